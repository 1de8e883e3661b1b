"""Strangers flood every port of a node in every state of a connection, beside a client that behaves well."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from pathlib import Path

import pytest

from nsqha.cli.brokers.v2client import V2Publisher
from nsqha.server.runtime.grpc_threads import LOWER, LOWEST
from tests.integration.cluster import Member
from tests.integration.servers import Daemon, wait_until
from tests.integration.strangers import (
    ANSWER_BYTES,
    SUB,
    TOPIC,
    Flood,
    Strangers,
    announced,
    connected,
    flooded_cluster,
    floods_of,
    get,
    negotiated,
    sized,
    stored_range,
    unverified,
)

pytestmark = pytest.mark.timeout(120)

FLOOD_SECONDS = 8.0
PUBLISHES_PER_SECOND = 20
RESIDENT_BYTES_MAX = 400 << 20  # of the node: what all strangers together may make it hold, and itself
LOOKUP_RESIDENT_BYTES_MAX = 250 << 20  # of the lookup daemon, likewise


def resident(daemon: Daemon) -> int:
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) << 10


def sockets(daemon: Daemon) -> int:
    folder = f"/proc/{daemon.pid}/fd"
    found = 0
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"{folder}/{name}").startswith("socket:")
    return found


def priorities(node: Member, name: str) -> set[int]:
    """Nice values of the node's threads of this name."""
    found = set()
    for task in Path(f"/proc/{node.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().strip() == name:
                found.add(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    return found


def lives(node: Member) -> int:
    return len(re.findall(r", life \d+\s", node.log()))


def test_a_flood_at_every_port_leaves_publishers_memory_and_lease(tmp_path: Path) -> None:
    with flooded_cluster(tmp_path) as cluster:
        [node], [lookupd] = cluster.nodes, cluster.lookupds
        publisher = V2Publisher(node.tcp, 20)
        publisher.publish(TOPIC, [b"connected"])
        floods = [flood for found in floods_of(cluster).values() for flood in found]
        before, before_lookup, registered = sockets(node), sockets(lookupd), lives(node)
        most, most_lookup, seconds = 0, 0, []
        with Strangers(floods).flooding() as strangers:
            end = time.monotonic() + FLOOD_SECONDS
            while (began := time.monotonic()) < end:
                publisher.publish(TOPIC, [b"beside the flood"])
                seconds.append(time.monotonic() - began)
                most, most_lookup = max(most, resident(node)), max(most_lookup, resident(lookupd))
                time.sleep(1 / PUBLISHES_PER_SECOND)
        seconds.sort()
        print(
            f"{len(floods)} strangers sent {strangers.sent >> 20} MiB; {len(seconds)} publishes, "
            f"p50 {seconds[len(seconds) // 2] * 1e3:.0f} ms, longest {seconds[-1] * 1e3:.0f} ms; "
            f"{most >> 20} MiB resident, {most_lookup >> 20} MiB of the lookup daemon"
        )
        assert publisher.published == len(seconds) + 1, "not every publish was acknowledged"
        assert strangers.sent > 1 << 20, "that was no flood"
        assert most < RESIDENT_BYTES_MAX
        assert most_lookup < LOOKUP_RESIDENT_BYTES_MAX
        assert lives(node) == registered == 1, "the lease was lost"
        own = os.getpriority(os.PRIO_PROCESS, node.pid)
        assert priorities(node, "event_engine") == {min(own + LOWER, LOWEST)}, "those that came later, too"
        # The lookup daemon and etcd may have connected meanwhile; of its own connections mostly three are new.
        wait_until(lambda: sockets(node) <= before + 3, "sockets of strangers are closed")
        wait_until(lambda: sockets(lookupd) <= before_lookup + 6, "so are those at the lookup daemon")
        print(f"{before} and {before_lookup} sockets before, {sockets(node)} and {sockets(lookupd)} after")
        for daemon in (node, lookupd):
            assert daemon.request("/ping") == b"OK"
            before_it, found, it = daemon.log().partition("Traceback")
            assert not found, f"an error of a stranger is no error of the daemon:\n{before_it[-300:]}{found}{it[:3000]}"
        assert answered(lookupd.tcp, b"  V1PING\n") == sized(b"OK")
        [producer] = lookupd.json(f"/lookup?topic={TOPIC}")["producers"]
        assert producer["tcp_port"] == node.tcp_port
        with connected(Flood(node.tcp, negotiated("tls_v1"), b"", SUB), unverified()) as sock:
            assert sock.recv(ANSWER_BYTES)[8:] == b"OK", "no client has TLS any more"
        assert answered(announced(node, "segments"), get(stored_range(node, TOPIC))).startswith(b"HTTP/1.1 200 ")
        publisher.publish(TOPIC, [b"last"])
        publisher.close()


def answered(address: str, request: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(request)
        return sock.recv(ANSWER_BYTES)
