"""A real `nsqha dev` in a process of its own, and the commands that talk to it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from nsqha.cli.brokers.admin import Admin
from nsqha.cli.brokers.v2client import V2Publisher

BIN = Path(sys.executable).parent
ANY_PORTS = [f"--{name}-port=0" for name in ("tcp", "http", "grpc", "segments", "lookupd-tcp", "lookupd-http")]


_libc = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Whatever becomes of the test process, its node does not outlive it."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class DevNode:
    """Serves once the constructor returns; `stop` ends it cleanly."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        command = [str(BIN / "nsqha"), "dev", "--data-dir", str(folder / "data"), "--json", *ANY_PORTS, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
        assert self.process.stdout is not None
        self.description = json.loads(self.process.stdout.readline())
        node = self.description["nodes"][0]
        self.tcp, self.http, self.grpc, self.segments = (node[name] for name in ("tcp", "http", "grpc", "segments"))

    @property
    def environment(self) -> dict[str, str]:
        """For commands in a shell: this node is where they look, and this checkout is what they run."""
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"PATH": path, "NSQHA_GRPC_ADDRESS": self.grpc, "NSQHA_TCP_ADDRESS": self.tcp}

    def run(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """`nsqha` with these words."""
        return subprocess.run(
            [str(BIN / "nsqha"), *words],
            input=stdin,
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.folder,
            timeout=60,
        )

    def ok(self, *words: str, stdin: str = "") -> str:
        """Its stdout; it must succeed."""
        done = self.run(*words, stdin=stdin)
        assert done.returncode == 0, (words, done.returncode, done.stderr)
        return done.stdout

    def json(self, *words: str) -> Any:
        """The one JSON line that it prints."""
        return json.loads(self.ok(*words, "--json"))

    def create(self, topic: str, *channels: str) -> None:
        """Without a process of its own, for what a test needs first."""
        with Admin(self.grpc, 10) as admin:
            admin.call("CreateTopic", topic=topic, channels=channels)

    def publish(self, topic: str, *bodies: str) -> None:
        """As `create`."""
        publisher = V2Publisher(self.tcp, 10)
        publisher.publish(topic, [body.encode() for body in bodies])
        publisher.close()

    def stop(self) -> int:
        self.process.terminate()
        status = self.process.wait(20)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status
