"""Strangers flood every port of a node in every state of a connection, beside a client that behaves well."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from nsqha.cli.brokers.v2client import V2Publisher
from nsqha.server.peers.http2 import PREFACE, frame, settings
from nsqha.server.runtime.grpc_threads import LOWER, LOWEST
from tests.integration.cluster import Cluster, Member
from tests.integration.servers import wait_until

pytestmark = pytest.mark.timeout(120)

FLOOD_SECONDS = 8.0
PUBLISHES_PER_SECOND = 20
RESIDENT_BYTES_MAX = 400 << 20  # of the node: what all strangers together may make it hold, and itself
BURST_BYTES = 16 << 10
FRAME_KINDS = range(11)  # of HTTP/2: DATA to CONTINUATION, and one that is not known


class Flood(NamedTuple):
    """A connection says `opening` once, then `again` until it is closed; then another one does the same."""

    address: str
    opening: bytes
    again: bytes


def sized(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def literal(name: str, value: str) -> bytes:
    """A header as HPACK has it, without any compression."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def call(path: str) -> bytes:
    """The beginning of a gRPC call on stream 1."""
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    block = b"".join(literal(*header) for header in {**headers, "content-type": "application/grpc"}.items())
    return PREFACE + settings() + frame(1, 4, 1, block)


def v2_floods(address: str) -> Iterator[Flood]:
    magic = b"  V2"
    identified = magic + b"IDENTIFY\n" + sized(b'{"feature_negotiation":true}')
    yield Flood(address, b"", b"")
    yield Flood(address, b"", b"\xff" * BURST_BYTES)
    for opening in (magic, identified, identified + b"SUB flooded c\n"):
        yield Flood(address, opening, b"NOP\n")
        yield Flood(address, opening, b"RDY 1\n")
        yield Flood(address, opening, b"FIN 0123456789abcdef\n")
        yield Flood(address, opening, b"nonsense\n")
        yield Flood(address, opening, b"IDENTIFY\n" + sized(b"{}"))
    yield Flood(address, magic + b"AUTH\n" + struct.pack(">I", 60 << 10), b"x")
    yield Flood(address, magic + b"MPUB flooded\n" + struct.pack(">I", 5 << 20), b"\0" * 4096)
    yield Flood(address, magic + b"PUB flooded\n" + struct.pack(">I", 1 << 20), b"x" * 512)


def http_floods(address: str) -> Iterator[Flood]:
    yield Flood(address, b"", b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
    yield Flood(address, b"", b"GET /stats HTTP/1.1\r\nHost: x\r\n\r\n")
    yield Flood(address, b"", b"\r\n")
    yield Flood(address, b"GET / HTTP/1.1\r\n", b"a: b\r\n")
    yield Flood(address, b"POST /pub?topic=flooded HTTP/1.1\r\nContent-Length: 9000000\r\n\r\n", b"x" * 512)
    yield Flood(address, b"POST /pub HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n")


def grpc_floods(address: str, path: str) -> Iterator[Flood]:
    yield Flood(address, b"", b"\0" * 64)
    yield Flood(address, PREFACE, b"")
    for opening in (PREFACE, PREFACE + settings(), call(path)):
        for kind in FRAME_KINDS:
            yield Flood(address, opening, frame(kind, 0, 1 if kind in (0, 1, 3, 5, 9) else 0, b""))
        yield Flood(address, opening, frame(6, 0, 0, bytes(8)))  # PING
        yield Flood(address, opening, frame(0, 0, 1, bytes(5)))  # empty messages
        yield Flood(address, opening, frame(0, 0, 1, b"\0" + struct.pack(">I", 4 << 20) + bytes(1024)))


class Strangers:
    """One connection for each kind of flood at a time."""

    def __init__(self, floods: list[Flood]) -> None:
        self.sent = 0
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._flood, args=[flood]) for flood in floods]

    @contextlib.contextmanager
    def flooding(self) -> Iterator[Strangers]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._end.set()
            for thread in self._threads:
                thread.join()

    def _flood(self, flood: Flood) -> None:
        host, _, port = flood.address.rpartition(":")
        burst = flood.again * (BURST_BYTES // len(flood.again)) if flood.again else b""
        while not self._end.wait(0.02):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1) as sock:
                sock.sendall(flood.opening)
                while not self._end.wait(0.001 if burst else 0.2):
                    with contextlib.suppress(TimeoutError):
                        self.sent += sock.send(burst)


def resident(node: Member) -> int:
    status = Path(f"/proc/{node.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) << 10


def sockets(node: Member) -> int:
    folder = f"/proc/{node.pid}/fd"
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
    with Cluster.running(tmp_path, nodes=1) as cluster:
        [node] = cluster.nodes
        cluster.create("steady", "c")
        floods = [*v2_floods(node.tcp), *http_floods(node.http)]
        floods += grpc_floods(node.grpc, "/nsqha.v1.Admin/ListTopics")
        floods += grpc_floods(node.peer, "/nsqha.v1.Replication/Push")
        publisher = V2Publisher(node.tcp, 20)
        publisher.publish("steady", [b"first"])
        before, registered, most, seconds = sockets(node), lives(node), 0, []
        with Strangers(floods).flooding() as strangers:
            end = time.monotonic() + FLOOD_SECONDS
            while (began := time.monotonic()) < end:
                publisher.publish("steady", [b"beside the flood"])
                seconds.append(time.monotonic() - began)
                most = max(most, resident(node))
                time.sleep(1 / PUBLISHES_PER_SECOND)
        seconds.sort()
        print(
            f"{len(floods)} strangers sent {strangers.sent >> 20} MiB; {len(seconds)} publishes, "
            f"p50 {seconds[len(seconds) // 2] * 1e3:.0f} ms, longest {seconds[-1] * 1e3:.0f} ms; "
            f"{most >> 20} MiB resident"
        )
        assert publisher.published == len(seconds) + 1, "not every publish was acknowledged"
        assert strangers.sent > 1 << 20, "that was no flood"
        assert most < RESIDENT_BYTES_MAX
        assert lives(node) == registered == 1, "the lease was lost"
        own = os.getpriority(os.PRIO_PROCESS, node.pid)
        assert priorities(node, "event_engine") == {min(own + LOWER, LOWEST)}, "those that came later, too"
        # The lookup daemon and etcd may have connected meanwhile.
        wait_until(lambda: sockets(node) <= before + 3, "sockets of strangers are closed")
        print(f"{before} sockets before, {sockets(node)} after")
        with urllib.request.urlopen(f"http://{node.http}/ping", timeout=10) as answer:
            assert answer.read() == b"OK"
        publisher.publish("steady", [b"last"])
        publisher.close()
        assert "Traceback" not in node.log(), "an error of a stranger is no error of the node"
