"""How fast a lost replica is made again: `python -m benchmarks.rebuild [--mib 1024] [--size 1000]`.

Three nodes, one partition with three replicas, sync=interval. A follower is killed with -9, its folder emptied, and the
node started again; MB/s from its first 16 MiB to its last byte. Beside it, in the same minute and before and after: a
plain copy to the same disk that ends with fsync, and a stream over loopback. The target is 60 % of the slower one.
"""

from __future__ import annotations

import argparse
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from . import client, servers
from .disk import bytes_below
from .many import described, host_of
from .procstat import ProcessTree

MIB = 1 << 20
RUN_BYTES = 128 << 10  # of an MPUB
OUTSTANDING = 8
BEGUN_BYTES = 16 * MIB
PROBE_BYTES = 256 * MIB
SECONDS = 180.0
TOPIC = "rebuild"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="of messages in the partition")
    parser.add_argument("--size", type=int, default=1000, help="bytes of a message")
    parser.add_argument("--rate", type=int, default=0, help="--catch-up-bytes-per-second of all nodes")
    args = parser.parse_args()
    servers.compile_modules()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        with servers.fresh_server(servers.our_cluster(3), workspace, sync="interval") as server, ExitStack() as started:
            nodes = described(workspace / "cell" / "log")
            flag = f"--catch-up-bytes-per-second={args.rate}"
            for node in nodes:
                node["start"].append(flag)
                node["process"] = started.enter_context(_started_again(node, workspace))
            _publish(host_of(nodes[0]["tcp"]), args.mib * MIB, args.size)
            print(_rebuilt(nodes, workspace))
            assert server.alive()


@contextmanager
def _started_again(node: dict[str, Any], workspace: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The node as its arguments say by now, instead of the process that there was."""
    os.kill(node["pid"], signal.SIGTERM)
    _answers(node, served=False)
    with (workspace / "again").open("ab") as log:
        process = subprocess.Popen(node["start"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _answers(node, served=True)
        yield process
    finally:
        process.kill()
        process.wait()


def _answers(node: dict[str, Any], *, served: bool) -> None:
    """Wait until it is ready, or until nothing listens."""
    give_up = time.perf_counter() + SECONDS
    while True:
        connection = http.client.HTTPConnection(*host_of(node["http"]), timeout=5)
        try:
            connection.request("GET", "/readyz")
            found = connection.getresponse().status == 200
            if found and served:
                return
        except ConnectionRefusedError:
            if not served:
                return
        except (OSError, http.client.HTTPException):
            pass  # it begins or ends just now
        finally:
            connection.close()
        if time.perf_counter() > give_up:
            sys.exit(f"node at {node['http']} is not {'ready' if served else 'gone'} after {SECONDS:.0f} s")
        time.sleep(0.02)


def _publish(address: client.Address, total: int, size: int) -> None:
    """Random bodies, in MPUBs of which a few are under way; all are answered when this returns."""
    count = max(1, RUN_BYTES // size)
    run = client.mpub(TOPIC, [os.urandom(size) for _ in range(count)])
    left, out = max(1, total // (count * size)), 0
    with client.open_connection(address) as sock:
        sock.sendall(b"SUB " + TOPIC.encode() + b" steady\n")
        client.expect_ok(sock)
    with client.open_connection(address) as sock:
        while left or out:
            while left and out < OUTSTANDING:
                sock.sendall(run)
                left, out = left - 1, out + 1
            client.expect_ok(sock)
            out -= 1


def _rebuilt(nodes: list[dict[str, Any]], workspace: Path) -> str:
    victim = nodes[-1]  # the first one leads
    data = Path(_flag(victim["start"], "--data-path"))
    _settled(data, bytes_below(Path(_flag(nodes[0]["start"], "--data-path"))))
    victim["process"].kill()
    victim["process"].wait()
    time.sleep(1.0)
    whole = bytes_below(data)
    shutil.rmtree(data)
    data.mkdir()
    before = _disk(workspace), _loopback()
    leader = ProcessTree([nodes[0]["process"].pid])
    with (workspace / "again").open("ab") as log:
        process = subprocess.Popen(victim["start"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        first = _settled(data, BEGUN_BYTES)
        follower = ProcessTree([process.pid])
        cpu, begun = (follower.cpu_ns(), leader.cpu_ns()), time.perf_counter()
        last = _settled(data, whole)
        seconds, size = time.perf_counter() - begun, last - first
        spent = [(now - then) / size for now, then in zip((follower.cpu_ns(), leader.cpu_ns()), cpu, strict=True)]
    finally:
        process.terminate()
        process.wait()
    after = _disk(workspace), _loopback()
    speed = size / seconds / 1e6
    disk, link = ((a + b) / 2 for a, b in zip(before, after, strict=True))
    return (
        f"rebuild {speed:.0f} MB/s of {size / 1e6:.0f} MB; disk {before[0]:.0f} and {after[0]:.0f}, loopback "
        f"{before[1]:.0f} and {after[1]:.0f} MB/s: {speed / min(disk, link):.0%} of the slower; CPU s/GB: follower "
        f"{spent[0]:.2f}, leader {spent[1]:.2f}; load {os.getloadavg()[0]:.1f}"
    )


def _flag(arguments: list[str], name: str) -> str:
    at = next(n for n, word in enumerate(arguments) if word.split("=")[0] == name)
    return arguments[at].partition("=")[2] or arguments[at + 1]


def _settled(folder: Path, size: int) -> int:
    """Wait until so many bytes, but for the last megabyte, are in the folder; how many there are."""
    give_up = time.perf_counter() + SECONDS
    while (found := bytes_below(folder)) < size - MIB:
        if time.perf_counter() > give_up:
            sys.exit(f"{folder} has {found:,} bytes after {SECONDS:.0f} s, not {size:,}")
        time.sleep(0.02)
    return found


def _disk(folder: Path) -> float:
    """MB/s of a plain copy to the same disk, fsync included."""
    block, path = os.urandom(MIB), folder / "plain"
    begun = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(PROBE_BYTES // MIB):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begun
    path.unlink()
    return PROBE_BYTES / seconds / 1e6


def _loopback() -> float:
    """MB/s of a stream from one thread to another."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        reader = threading.Thread(target=_drain, args=(server,))
        reader.start()
        begun, block = time.perf_counter(), bytes(MIB)
        with socket.create_connection(server.getsockname()) as sock:
            for _ in range(PROBE_BYTES // MIB):
                sock.sendall(block)
        reader.join()
        return PROBE_BYTES / (time.perf_counter() - begun) / 1e6


def _drain(server: socket.socket) -> None:
    peer, _ = server.accept()
    with peer:
        room = bytearray(MIB)
        while peer.recv_into(room):
            pass


if __name__ == "__main__":
    main()
