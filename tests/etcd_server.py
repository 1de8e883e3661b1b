"""A real etcd for tests: one process on free loopback ports, data under a temporary folder, ended by its pid.

    @pytest.fixture(scope="session")
    def etcd(tmp_path_factory) -> Iterator[EtcdServer]:
        with EtcdServer.running(tmp_path_factory.mktemp("etcd")) as server:
            yield server

Its data is not synced to disk. `kill`, `freeze`, `thaw` and `start` are the faults.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nsqha.election.etcd_binary import find_etcd

START_S = 20.0


@dataclass
class EtcdServer:
    folder: Path
    extra: tuple[str, ...] = ()
    scheme: str = "http"
    client_port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path, *extra: str, scheme: str = "http") -> Iterator[EtcdServer]:
        server = cls(folder, extra, scheme)
        server.start()
        try:
            yield server
        finally:
            server.kill()
            shutil.rmtree(folder / "data", ignore_errors=True)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    def start(self) -> None:
        """Returns when it serves; the same port and data as before, if it ran before."""
        ports = _free_ports(3)
        self.client_port = self.client_port or ports[0]
        client, peer = f"{self.scheme}://{self.endpoint}", f"http://127.0.0.1:{ports[1]}"
        command = [find_etcd(), "--name", "test", "--data-dir", str(self.folder / "data"), "--unsafe-no-fsync"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"test={peer}", "--log-level", "error", *self.extra]
        # Tells over plain HTTP when it serves, whatever clients need; it accepts connections long before.
        command += ["--listen-metrics-urls", f"http://127.0.0.1:{ports[2]}"]
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        self._wait(f"http://127.0.0.1:{ports[2]}/health")

    def kill(self) -> None:
        """SIGKILL, frozen or not."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def _wait(self, health: str) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=1) as answer:
                if b"true" in answer.read():
                    return
            time.sleep(0.02)
        self.kill()
        raise AssertionError(f"etcd did not start: {(self.folder / 'etcd.log').read_text()[-2000:]}")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def eventually(check: object, *, within_s: float = 20.0) -> None:
    """Wait for something that other threads bring about; how long it takes is not what is tested."""
    assert callable(check)
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
