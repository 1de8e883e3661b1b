"""A client that connects while a broker still starts waits for its answer and is not refused."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

# The import of the node waits until the test has said so.
SLOW_START = """
import sys
from importlib.abc import MetaPathFinder

class Slow(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "nsqha.server.node.start":
            print("imports", flush=True)
            sys.stdin.readline()

sys.meta_path.insert(0, Slow())
from nsqha.cli import nsqd
nsqd.main()
"""


def test_who_connects_during_the_start_is_answered(tmp_path: Path) -> None:
    tcp, http = tmp_path / "tcp", tmp_path / "http"
    flags = [f"--tcp-address={tcp}", f"--http-address={http}", f"--data-path={tmp_path / 'data'}"]
    flags += ["--grpc-address=127.0.0.1:0", "--segments-address=127.0.0.1:0"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_START, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "imports\n"
        with socket.socket(socket.AF_UNIX) as v2, socket.socket(socket.AF_UNIX) as web:
            for sock, address, sent in (
                (v2, tcp, b"  V2PUB early\n\0\0\0\1x"),
                (web, http, b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
            ):
                sock.settimeout(60)
                sock.connect(str(address))
                sock.sendall(sent)
            process.stdin.write("go on\n")
            process.stdin.flush()
            assert v2.recv(100) == b"\0\0\0\6\0\0\0\0OK"
            assert web.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_port_that_is_taken_is_said_before_the_node_is_imported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = [f"--tcp-address=127.0.0.1:{taken.getsockname()[1]}", f"--data-path={tmp_path / 'data'}"]
        ended = subprocess.run([sys.executable, "-c", SLOW_START, *flags], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "imports" not in ended.stdout
    assert "cannot listen: Address already in use; stop the process" in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "data").exists()
