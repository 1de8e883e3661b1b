"""How long publishes take beside a flood of strangers at every port, at a fixed rate: a measurement, not a test.

    python -m tests.jepsen.flood_latency                   all kinds of strangers at once
    python -m tests.jepsen.flood_latency --each            ports and states one after another: which of them costs
    python -m tests.jepsen.flood_latency --quiet           no stranger: what the machine does to the same client
    python -m tests.jepsen.flood_latency --together        strangers on the cores of the broker

Strangers are those of `tests.integration.strangers`, in processes of their own, at the lowest priority. Times count
from when a publish should have been sent. The claim is about the broker: that it is fair. Strangers on its core would
take time that it needs for anybody, which is a matter of the machine; so the broker and the client have the first core,
and strangers the others, unless they run `--together`. So has the lookup daemon, at their priority: it is flooded as
well, and on the broker's core it took as much of that. Whatever else runs on the machine still counts: the threads of
gRPC in the broker, other processes, and with sync=always the disk, which `TMPDIR=/dev/shm` leaves out. So what the loop
itself did is counted, too, as CPU: how much of it the loop used while a publish waited.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

from benchmarks.procstat import ProcessTree
from tests.integration.cluster import Cluster, Member
from tests.integration.servers import Daemon
from tests.integration.strangers import TOPIC, Flood, Strangers, flooded_cluster, floods_of, sized
from tests.integration.test_flood import lives, resident

SETTLE_SECONDS = 1.0
ANSWER_SECONDS = 30.0
OK_BYTES = 10
PROCESSES = 2
LOWEST_PRIORITY = 19


def strangers(floods: Sequence[Flood], end: Event, cores: Iterable[int]) -> None:
    """The work of one process."""
    os.nice(LOWEST_PRIORITY)
    os.sched_setaffinity(0, cores)
    with Strangers(list(floods)).flooding():
        end.wait()


class Waited(NamedTuple):
    """From when a publish was due to its OK."""

    seconds: float
    loop: float  # CPU seconds that the broker's loop used meanwhile


def waits(node: Member, rate: int, seconds: float) -> list[Waited]:
    """How long each publish took."""
    count = int(rate * seconds)
    body = b"PUB %b\n" % TOPIC.encode() + struct.pack(">I", 100) + bytes(100)
    host, _, port = node.tcp.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(b"  V2IDENTIFY\n" + sized(b'{"heartbeat_interval":-1}'))
        assert sock.recv(4096)[8:] == b"OK"
        began = time.perf_counter() + 0.1
        used: list[float] = []  # by the broker's loop, when each publish was sent

        def send() -> None:
            for n in range(count):
                time.sleep(max(began + n / rate - time.perf_counter(), 0))
                used.append(loop_seconds(node))
                sock.sendall(body)

        sender = threading.Thread(target=send)
        sender.start()
        found: list[Waited] = []
        unread = 0
        while len(found) < count:
            came = sock.recv(1 << 16)
            assert came, "the connection was closed"
            now, cpu, unread = time.perf_counter(), loop_seconds(node), unread + len(came)
            answers, unread = divmod(unread, OK_BYTES)
            found += [Waited(now - began - n / rate, cpu - used[n]) for n in range(len(found), len(found) + answers)]
        sender.join()
    return found


def loop_seconds(node: Member) -> float:
    """CPU time of the broker's loop, its first thread, until now or a tick before."""
    with open(f"/proc/{node.pid}/task/{node.pid}/schedstat", "rb") as file:
        return int(file.read().split()[0]) / 1e9


def percentiles(found: Iterable[float]) -> tuple[float, float, float]:
    """p50, p99 and the longest, in ms."""
    times = sorted(found)
    p50, p99, longest = (1e3 * times[min(int(len(times) * part), len(times) - 1)] for part in (0.5, 0.99, 1.0))
    return p50, p99, longest


def part(cluster: Cluster) -> set[int]:
    """Give the broker and this process one core, and the lookup daemon the others, as strangers have them; returns
    those."""
    first, *others = sorted(os.sched_getaffinity(0))
    assert others, "strangers can not have a core for themselves: there is one only"
    [node], [lookupd] = cluster.nodes, cluster.lookupds
    for thread in threads(node):
        os.sched_setaffinity(thread, {first})
    for thread in threads(lookupd):
        os.sched_setaffinity(thread, others)
        os.setpriority(os.PRIO_PROCESS, thread, LOWEST_PRIORITY)
    os.sched_setaffinity(0, {first})
    return set(others)


def threads(daemon: Daemon) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{daemon.pid}/task")]


def measured(
    node: Member, name: str, floods: Sequence[Flood], *, rate: int, seconds: float, cores: Iterable[int]
) -> str:
    """One line about a flood of these, from strangers on these cores."""
    context = multiprocessing.get_context("spawn")
    end = context.Event()
    processes = [context.Process(target=strangers, args=(floods[n::PROCESSES], end, cores)) for n in range(PROCESSES)]
    for process in processes:
        process.start()
    try:
        time.sleep(SETTLE_SECONDS if floods else 0.0)
        tree = ProcessTree([node.pid])
        cpu, began = tree.cpu_ns(), time.perf_counter()
        found = waits(node, rate, seconds)
        share = (tree.cpu_ns() - cpu) / 1e9 / (time.perf_counter() - began)
    finally:
        end.set()
        for process in processes:
            process.join()
    p50, p99, longest = percentiles(wait.seconds for wait in found)
    own50, own99, own_longest = percentiles(wait.loop for wait in found)
    return (
        f"{name:24} {len(floods):4} strangers  p50 {p50:7.1f}  p99 {p99:7.1f}  longest {longest:7.1f} ms  "
        f"CPU of the loop meanwhile {own50:6.1f} {own99:6.1f} {own_longest:6.1f} ms  "
        f"{share:4.2f} cores, {resident(node) >> 20} MiB, {lives(node)} life"
    )


def groups(ports: Mapping[str, Sequence[Flood]], *, each: bool) -> dict[str, list[Flood]]:
    if not each:
        return {"all": [flood for floods in ports.values() for flood in floods]}
    return {
        f"{port} {number} {opening[:14]!r}": list(found)
        for port, floods in ports.items()
        for number, (opening, found) in enumerate(groupby(floods, key=lambda flood: flood.opening))
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.jepsen.flood_latency", description="See the module.")
    parser.add_argument("--rate", type=int, default=1000, help="publishes a second: %(default)s")
    parser.add_argument("--seconds", type=float, default=8.0, help="%(default)s")
    parser.add_argument("--each", action="store_true", help="kinds of strangers one after another")
    parser.add_argument("--quiet", action="store_true", help="no strangers")
    parser.add_argument("--together", action="store_true", help="strangers on the cores of the broker")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, flooded_cluster(Path(folder)) as cluster:
        [node] = cluster.nodes
        ports = floods_of(cluster)
        cores = os.sched_getaffinity(0) if args.together else part(cluster)
        found = {"quiet": []} if args.quiet else groups(ports, each=args.each)
        for name, floods in found.items():
            print(measured(node, name, floods, rate=args.rate, seconds=args.seconds, cores=cores), flush=True)


if __name__ == "__main__":
    main()
