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

from tests.integration.servers import free_port, wait_until

TOPICS = 700
SECONDS = 60.0


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))


@contextmanager
def broker(folder: Path, *flags: str) -> Iterator[tuple[int, int]]:
    """The ports of a broker that may have 1,024 descriptors."""
    ports = free_port(), free_port()
    command = [sys.executable, "-c", "from nsqha.cli.nsqd import main; main()", f"--data-path={folder}"]
    command += [f"--tcp-address=127.0.0.1:{ports[0]}", f"--http-address=127.0.0.1:{ports[1]}", *flags]
    process = subprocess.Popen(command, preexec_fn=limited, stderr=(folder / "log").open("ab"))
    try:
        deadline = time.monotonic() + SECONDS
        while True:
            if answers(ports[1], "/ping"):
                break
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(0.1)
        yield ports
        process.terminate()
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()


def answers(port: int, path: str) -> bool:
    """Not before it listens; nor while a slow disk has so many files to sync that there is no descriptor to spare."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def publish_to_all(port: int, body: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as sock:
        sock.sendall(b"  V2")
        replies = sock.makefile("rb")
        for number in range(TOPICS):
            sock.sendall(b"PUB t%d\n" % number + struct.pack(">I", len(body)) + body)
            while (reply := replies.read(struct.unpack(">I", replies.read(4))[0])[4:]) == b"_heartbeat_":
                sock.sendall(b"NOP\n")  # a slow disk takes longer than half a minute for all
            assert reply == b"OK"


@pytest.mark.parametrize("sync", ["always", "interval"])
def test_a_node_with_1024_descriptors_serves_700_topics_after_a_restart_too(tmp_path: Path, sync: str) -> None:
    for body in (b"first", b"second"):
        with broker(tmp_path, f"--sync={sync}") as (tcp, http):
            publish_to_all(tcp, body)
            wait_until(lambda: answers(http, "/stats?format=json"), "it says what it has", SECONDS)
