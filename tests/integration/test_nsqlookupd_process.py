"""The real command: port 0, one conversation, idle company, a clean end."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.servers import wait_until


@pytest.fixture
def daemon() -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    command = [
        sys.executable,
        "-m",
        "lookupd",
        "--tcp-address=127.0.0.1:0",
        "-http-address",
        "127.0.0.1:0",
        "--verbose",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        addresses = []
        for line in process.stderr:
            assert re.match(r"\[nsqlookupd\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} INFO: ", line), line
            if found := re.search(r"(?:TCP|HTTP): listening on (\d+\.\d+\.\d+\.\d+:\d+)$", line.strip()):
                addresses.append(found[1])
            if len(addresses) == 2:
                break
        tcp, http = addresses
        yield process, tcp, http
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=30)
    try:
        sock.sendall(b"  V1")
    except OSError:
        sock.close()
        raise
    return sock


def reply(sock: socket.socket) -> bytes:
    (size,) = struct.unpack(">i", sock.recv(4, socket.MSG_WAITALL))
    return sock.recv(size, socket.MSG_WAITALL)


def get(address: str, target: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}{target}", timeout=30) as answer:
        body: bytes = answer.read()
        return body


def test_a_conversation_with_the_real_process(daemon: tuple[subprocess.Popen[str], str, str]) -> None:
    process, tcp, http = daemon
    assert get(http, "/ping") == b"OK"
    with connect(tcp) as sock:
        body = b'{"version":"1.3.0","broadcast_address":"a","tcp_port":1,"http_port":2}'
        sock.sendall(b"IDENTIFY\n" + struct.pack(">i", len(body)) + body)
        assert json.loads(reply(sock))["tcp_port"] == int(tcp.rpartition(":")[2])
        sock.sendall(b"REGISTER orders billing\nPING\n")
        assert (reply(sock), reply(sock)) == (b"OK", b"OK")
        assert b'"channels":["billing"],"producers":[{' in get(http, "/lookup?topic=orders")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_idle_connections_cost_little(daemon: tuple[subprocess.Popen[str], str, str]) -> None:
    process, tcp, http = daemon
    idle = [connect(tcp) for _ in range(500)]
    try:
        assert get(http, "/ping") == b"OK"
        resident = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096
        assert resident < 75 << 20
        # Not at once: it may still be taking them in.
        wait_until(lambda: cpu_of(process.pid, 0.3) <= 0.03, "it does nothing for them")
    finally:
        for sock in idle:
            sock.close()


def cpu_of(pid: int, seconds: float) -> float:
    """What a process uses in so long."""
    before = cpu_seconds(pid)
    time.sleep(seconds)
    return cpu_seconds(pid) - before


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_a_port_in_use_ends_the_start_with_one_line(daemon: tuple[subprocess.Popen[str], str, str]) -> None:
    _, tcp, _ = daemon
    command = [sys.executable, "-m", "lookupd", f"--tcp-address={tcp}", "--http-address=127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.search(rf"FATAL: .*--tcp-address={tcp}: cannot listen: Address already in use; stop .*\n$", done.stderr)
    assert "Traceback" not in done.stderr


def test_it_does_not_wait_for_its_log() -> None:
    """Standard error is a pipe that nobody reads, and 10,000 requests have a line each."""
    command = [sys.executable, "-m", "lookupd", "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"HTTP: listening on (\S+)", said)):
            said += process.stderr.readline()
        host, _, port = found[1].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as sock:
            for _ in range(100):
                sock.sendall(f"GET /ping?{'x' * 150} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * 100)
                answers = b""
                while answers.count(b"HTTP/1.1 200") < 100:
                    more = sock.recv(1 << 16)
                    assert more
                    answers += more
        assert get(found[1], "/ping") == b"OK"
        process.terminate()
        lines = process.communicate(timeout=60)[1].splitlines()
    finally:
        process.kill()
    lost = sum(int(n) for line in lines for n in re.findall(r"WARNING: (\d+) log lines were lost", line))
    assert lost > 0
    assert sum("200 GET /ping" in line for line in lines) + lost >= 10_001


def test_with_all_descriptors_taken_http_answers(tmp_path: Path) -> None:
    """256 descriptors: 64 are not for TCP, and of these 32 are for HTTP."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "lookupd", "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
    limits = ["prlimit", "--nofile=256:256", *command]
    with log.open("w") as stderr:
        process = subprocess.Popen(limits, stderr=stderr)
    taken: list[socket.socket] = []
    try:
        addresses: list[str] = []
        deadline = time.monotonic() + 60
        while len(addresses) < 2 and time.monotonic() < deadline:
            addresses = re.findall(r"(?:TCP|HTTP): listening on (\S+)", log.read_text())
            time.sleep(0.05)
        tcp, http = addresses
        for _ in range(300):
            with contextlib.suppress(ConnectionError):  # one that was refused before it said a word
                taken.append(connect(tcp))
        while "refused" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        with urllib.request.urlopen(f"http://{http}/ping", timeout=30) as answer:
            assert answer.read() == b"OK"
        assert log.read_text().count("refused") == 1, "one line for all of them"
        for each in taken:
            each.close()
        while not pongs(tcp):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for each in taken:
            each.close()
        process.kill()
        process.wait()


def pongs(address: str) -> bool:
    try:
        with connect(address) as sock:
            sock.sendall(b"PING\n")
            return sock.recv(100).endswith(b"OK")
    except OSError:
        return False
