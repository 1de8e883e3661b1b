"""How long publishes take beside a flood of strangers at every port, at a fixed rate: a measurement, not a test.

    python -m tests.jepsen.flood_latency                   all kinds of strangers at once
    python -m tests.jepsen.flood_latency --each            ports and states one after another: which of them costs
    python -m tests.jepsen.flood_latency --quiet           no stranger: what the machine does to the same client

Strangers are those of `test_flood`, in processes of their own. Times count from when a publish should have been sent.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import groupby
from multiprocessing.synchronize import Event
from pathlib import Path

from benchmarks.procstat import ProcessTree
from tests.integration.cluster import Cluster, Member
from tests.integration.test_flood import Flood, Strangers, grpc_floods, http_floods, lives, resident, sized, v2_floods

SETTLE_SECONDS = 1.0
ANSWER_SECONDS = 30.0
OK_BYTES = 10
PROCESSES = 2


def strangers(floods: Sequence[Flood], end: Event) -> None:
    """The work of one process."""
    with Strangers(list(floods)).flooding():
        end.wait()


def seconds_of(node: Member, rate: int, seconds: float) -> list[float]:
    """From when each publish was due to its OK."""
    count = int(rate * seconds)
    body = b"PUB steady\n" + struct.pack(">I", 100) + bytes(100)
    host, _, port = node.tcp.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(b"  V2IDENTIFY\n" + sized(b'{"heartbeat_interval":-1}'))
        assert sock.recv(4096)[8:] == b"OK"
        began = time.perf_counter() + 0.1

        def send() -> None:
            for n in range(count):
                time.sleep(max(began + n / rate - time.perf_counter(), 0))
                sock.sendall(body)

        sender = threading.Thread(target=send)
        sender.start()
        found: list[float] = []
        unread = 0
        while len(found) < count:
            came = sock.recv(1 << 16)
            assert came, "the connection was closed"
            now, unread = time.perf_counter(), unread + len(came)
            answers, unread = divmod(unread, OK_BYTES)
            found += [now - began - n / rate for n in range(len(found), len(found) + answers)]
        sender.join()
    return sorted(found)


def measured(node: Member, name: str, floods: Sequence[Flood], rate: int, seconds: float) -> str:
    """One line about a flood of these."""
    context = multiprocessing.get_context("spawn")
    end = context.Event()
    processes = [context.Process(target=strangers, args=(floods[n::PROCESSES], end)) for n in range(PROCESSES)]
    for process in processes:
        process.start()
    try:
        time.sleep(SETTLE_SECONDS if floods else 0.0)
        tree = ProcessTree([node.pid])
        cpu, began = tree.cpu_ns(), time.perf_counter()
        found = seconds_of(node, rate, seconds)
        share = (tree.cpu_ns() - cpu) / 1e9 / (time.perf_counter() - began)
    finally:
        end.set()
        for process in processes:
            process.join()
    p50, p99, longest = (1e3 * found[min(int(len(found) * part), len(found) - 1)] for part in (0.5, 0.99, 1.0))
    return (
        f"{name:24} {len(floods):4} strangers  p50 {p50:8.1f}  p99 {p99:8.1f}  longest {longest:8.1f} ms  "
        f"broker {share:4.2f} cores, {resident(node) >> 20} MiB, {lives(node)} life"
    )


def groups(node: Member, *, each: bool) -> dict[str, list[Flood]]:
    admin, push = (
        grpc_floods(at, path)
        for at, path in ((node.grpc, "/nsqha.v1.Admin/ListTopics"), (node.peer, "/nsqha.v1.Replication/Push"))
    )
    ports = {
        "tcp": list(v2_floods(node.tcp)),
        "http": list(http_floods(node.http)),
        "grpc": list(admin),
        "peer": list(push),
    }
    if not each:
        return {"all": [flood for floods in ports.values() for flood in floods]}
    return {
        f"{port} {opening[:14]!r}": list(found)
        for port, floods in ports.items()
        for opening, found in groupby(floods, key=lambda flood: flood.opening)
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.jepsen.flood_latency", description="See the module.")
    parser.add_argument("--rate", type=int, default=1000, help="publishes a second: %(default)s")
    parser.add_argument("--seconds", type=float, default=8.0, help="%(default)s")
    parser.add_argument("--each", action="store_true", help="kinds of strangers one after another")
    parser.add_argument("--quiet", action="store_true", help="no strangers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Cluster.running(Path(folder), nodes=1) as cluster:
        [node] = cluster.nodes
        cluster.create("steady", "c")
        found = {"quiet": []} if args.quiet else groups(node, each=args.each)
        for name, floods in found.items():
            print(measured(node, name, floods, args.rate, args.seconds), flush=True)


if __name__ == "__main__":
    main()
