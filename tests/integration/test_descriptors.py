"""A node with fewer descriptors than its topics have files."""

from __future__ import annotations

import resource
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TOPICS = 700
SECONDS = 60.0


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))


@contextmanager
def broker(folder: Path, *flags: str) -> Iterator[tuple[int, int]]:
    """The ports of a broker that may have 1,024 descriptors."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    command = [sys.executable, "-c", "from nsqha.cli.nsqd import main; main()", f"--data-path={folder}"]
    command += [f"--tcp-address=127.0.0.1:{ports[0]}", f"--http-address=127.0.0.1:{ports[1]}", *flags]
    process = subprocess.Popen(command, preexec_fn=limited, stderr=(folder / "log").open("ab"))
    try:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/ping", timeout=10).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
                time.sleep(0.1)
        yield ports
        process.terminate()
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()


def publish_to_all(port: int, body: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as sock:
        sock.sendall(b"  V2")
        replies = sock.makefile("rb")
        for number in range(TOPICS):
            sock.sendall(b"PUB t%d\n" % number + struct.pack(">I", len(body)) + body)
            size = struct.unpack(">I", replies.read(4))[0]
            assert replies.read(size)[4:] == b"OK"


@pytest.mark.parametrize("sync", ["always", "interval"])
def test_a_node_with_1024_descriptors_serves_700_topics_after_a_restart_too(tmp_path: Path, sync: str) -> None:
    for body in (b"first", b"second"):
        with broker(tmp_path, f"--sync={sync}") as (tcp, http):
            publish_to_all(tcp, body)
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/stats?format=json", timeout=30) as answer:
                assert answer.status == 200
