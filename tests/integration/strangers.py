"""Strangers: connections that say what they like, at every port of a cluster, in every state of a connection.

    with flooded_cluster(tmp_path) as cluster:
        floods = floods_of(cluster)       # by port
        with Strangers(floods["tcp"]).flooding() as strangers: ...

A flood is plain data, so that processes can be given some. Each kind of frame or command is one, in each state that a
connection can be in before and after it has greeted, compressed and in TLS; so are bodies that never come, and silence.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from nsqha.cli.brokers.v2client import V2Publisher
from nsqha.pb.v1 import segments_pb2, segments_pb2_grpc
from nsqha.server.peers.http2 import PREFACE, frame, settings
from nsqha.wire.compression import new_codec
from tests.certificates import Certificates
from tests.integration.cluster import Cluster, Member
from tests.integration.servers import wait_until

TOPIC = "steady"  # the one that clients use who behave well
BURST_BYTES = 16 << 10
FRAME_KINDS = range(11)  # of HTTP/2: DATA to CONTINUATION, and one that is not known
GARBAGE = b"\xff" * BURST_BYTES
ANSWER_BYTES = 4096  # more than an answer to IDENTIFY


class Flood(NamedTuple):
    """A connection says `opening` once, then `again` until it is closed; then another one does the same."""

    address: str
    opening: bytes
    again: bytes
    tls: bytes | None = None  # said first inside of TLS, which begins behind the opening and the answer to it
    beneath: bool = False  # `again` goes past TLS, as bytes that are no records


def sized(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


# ---- V2

MAGIC = b"  V2"
IDENTIFIED = MAGIC + b"IDENTIFY\n" + sized(b'{"feature_negotiation":true}')
SUB = b"SUB flooded c\n"
REQ = b"REQ 0123456789abcdef 0\n"
COMPRESSED_COMMANDS = 10
COMMANDS = (
    b"NOP\n",
    b"RDY 1\n",
    b"FIN 0123456789abcdef\n",
    REQ,
    b"TOUCH 0123456789abcdef\n",
    b"DPUB flooded 1000\n" + sized(b"x"),
    b"IDENTIFY\n" + sized(b"{}"),
    SUB,
    b"CLS\n",
    b"nonsense\n",
)


def negotiated(feature: str) -> bytes:
    """What a client says that asks for TLS or a compression; its answer is the last that is plain."""
    return MAGIC + b"IDENTIFY\n" + sized(b'{"feature_negotiation":true,"%b":true}' % feature.encode())


def v2_floods(address: str) -> Iterator[Flood]:
    yield Flood(address, b"", b"")
    yield Flood(address, b"", GARBAGE)
    for opening in (MAGIC, IDENTIFIED, IDENTIFIED + SUB):
        for command in COMMANDS:
            yield Flood(address, opening, command)
    yield Flood(address, MAGIC + b"AUTH\n" + struct.pack(">I", 60 << 10), b"x")
    yield Flood(address, MAGIC + b"MPUB flooded\n" + struct.pack(">I", 5 << 20), b"\0" * 4096)
    yield Flood(address, MAGIC + b"PUB flooded\n" + struct.pack(">I", 1 << 20), b"x" * 512)
    yield Flood(address, MAGIC + b"DPUB flooded 1000\n" + struct.pack(">I", 1 << 20), b"x" * 512)


def compressed_floods(address: str) -> Iterator[Flood]:
    """What a new codec writes first can be sent again and again. One flood of each decompresses to a hundred times
    its bytes, and is answered: one that is not is worked off for long after its client has gone."""
    for name in ("deflate", "snappy"):
        opening = negotiated(name)
        yield Flood(address, opening, GARBAGE)
        yield Flood(address, opening, compressed(name, b"MPUB flooded\n" + struct.pack(">I", 5 << 20)))
        yield Flood(address, opening + compressed(name, SUB), compressed(name, REQ * (BURST_BYTES // len(REQ))))
        if name == "snappy":
            yield Flood(address, opening + compressed(name, SUB), b"\x80\0\0\0")  # a chunk that is skipped
        for command in COMMANDS:
            yield Flood(address, opening + compressed(name, SUB), compressed(name, command * COMPRESSED_COMMANDS))


def compressed(name: str, data: bytes) -> bytes:
    return new_codec(name, 6).compress(data)


def hello() -> bytes:
    """How a TLS handshake begins."""
    context, sent = unverified(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


def unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def handshake_floods(address: str, before: bytes) -> Iterator[Flood]:
    """Handshakes that are begun and left, repeated, broken off, and bytes that are none; and behind one that ended."""
    begun = hello()
    for opening, again in ((begun, b""), (begun, begun), (begun[:40], b""), (begun[:40], GARBAGE), (b"", GARBAGE)):
        yield Flood(address, before + opening, again)
    yield Flood(address, before, b"", b"")
    yield Flood(address, before, GARBAGE, b"", beneath=True)


def v2_tls_floods(address: str) -> Iterator[Flood]:
    before = negotiated("tls_v1")
    yield from handshake_floods(address, before)
    for command in COMMANDS:
        yield Flood(address, before, command, SUB)


# ---- HTTP

HTTP_BODIES = (
    (b"GET / HTTP/1.1\r\n", b"a: b\r\n"),
    (b"POST /pub?topic=flooded HTTP/1.1\r\nContent-Length: 9000000\r\n\r\n", b"x" * 512),
    (b"POST /pub HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def http_floods(address: str, *paths: str) -> Iterator[Flood]:
    yield Flood(address, b"", b"")
    yield Flood(address, b"", GARBAGE)
    yield Flood(address, b"", b"\r\n")
    for path in paths:
        yield Flood(address, b"", get(path))
    for opening, again in HTTP_BODIES:
        yield Flood(address, opening, again)


def https_floods(address: str, *paths: str) -> Iterator[Flood]:
    yield from handshake_floods(address, b"")
    for path in paths:
        yield Flood(address, b"", get(path), b"")
    for opening, again in HTTP_BODIES:
        yield Flood(address, b"", again, opening)


def stored_range(node: Member, topic: str) -> str:
    """Where a reader of segments finds what the topic has."""
    with grpc.insecure_channel(node.grpc) as channel:
        stub: Any = segments_pb2_grpc.SegmentsStub(channel)
        [pin] = stub.Snapshot(segments_pb2.SnapshotRequest(topics=[topic]), timeout=20).partitions
    end = pin.end.log_id
    where = f"/segments/{pin.topic_uid:016x}/{pin.partition}"
    return f"{where}?first={pin.start.log_id}&end={end}&at={end - 1}&chain={pin.chain:016x}"


# ---- HTTP/2


def literal(name: str, value: str) -> bytes:
    """A header as HPACK has it, without any compression."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def call(path: str) -> bytes:
    """The beginning of a gRPC call on stream 1."""
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    block = b"".join(literal(*header) for header in {**headers, "content-type": "application/grpc"}.items())
    return PREFACE + settings() + frame(1, 4, 1, block)


def grpc_floods(address: str, path: str) -> Iterator[Flood]:
    yield Flood(address, b"", b"\0" * 64)
    yield Flood(address, PREFACE, b"")
    for opening in (PREFACE, PREFACE + settings(), call(path)):
        for kind in FRAME_KINDS:
            yield Flood(address, opening, frame(kind, 0, 1 if kind in (0, 1, 3, 5, 9) else 0, b""))
        yield Flood(address, opening, frame(6, 0, 0, bytes(8)))  # PING
        yield Flood(address, opening, frame(0, 0, 1, bytes(5)))  # empty messages
        yield Flood(address, opening, frame(0, 0, 1, b"\0" + struct.pack(">I", 4 << 20) + bytes(1024)))


# ---- the lookup daemon's own protocol


def lookup_floods(address: str) -> Iterator[Flood]:
    magic = b"  V1"
    said = b'{"broadcast_address":"127.0.0.1","hostname":"x","http_port":1,"tcp_port":1,"version":"1.3.0"}'
    identified = magic + b"IDENTIFY\n" + sized(said)
    names = b"".join(b"REGISTER flooded%d c\n" % number for number in range(1000))
    yield Flood(address, b"", b"")
    yield Flood(address, b"", GARBAGE)
    for opening in (magic, identified):
        yield Flood(address, opening, b"PING\n")
        yield Flood(address, opening, b"REGISTER flooded c\n")
        yield Flood(address, opening, b"REGISTER flooded c\nUNREGISTER flooded c\n")
        yield Flood(address, opening, b"UNREGISTER flooded\n")
        yield Flood(address, opening, names)
        yield Flood(address, opening, b"IDENTIFY\n" + sized(said))
        yield Flood(address, opening, b"nonsense\n")
        yield Flood(address, opening, b"x")
    yield Flood(address, magic + b"IDENTIFY\n" + struct.pack(">I", 60 << 10), b"x")


# ---- all of them


def tls_flags(folder: Path) -> list[str]:
    """Flags with which a broker has TLS on its TCP port, and HTTPS, with a certificate that this makes."""
    folder.mkdir()
    made = Certificates(folder)
    made.issue("broker", "IP:127.0.0.1")
    return [f"--tls-cert={made.cert('broker')}", f"--tls-key={made.key('broker')}", "--https-address=127.0.0.1:0"]


@contextlib.contextmanager
def flooded_cluster(folder: Path) -> Iterator[Cluster]:
    """One node, which serves TLS too, and a lookup daemon; the topic has a message."""
    with Cluster.running(folder / "cluster", nodes=1, flags=tls_flags(folder / "tls")) as cluster:
        cluster.create(TOPIC, "c")
        publisher = V2Publisher(cluster.nodes[0].tcp, 20)
        publisher.publish(TOPIC, [b"first"])
        publisher.close()
        yield cluster


def announced(node: Member, name: str) -> str:
    """The address that it says it listens on."""
    found = wait_until(lambda: re.findall(rf"\b{name}: listening on (\S+:\d+)\s", node.log()), f"{name} listens")
    return str(found[-1])


def floods_of(cluster: Cluster) -> dict[str, list[Flood]]:
    """By port, of a `flooded_cluster`."""
    [node], [lookupd] = cluster.nodes, cluster.lookupds
    return {
        "tcp": list(v2_floods(node.tcp)),
        "tcp, compressed": list(compressed_floods(node.tcp)),
        "tcp, TLS": list(v2_tls_floods(node.tcp)),
        "http": list(http_floods(node.http, "/ping", "/stats")),
        "https": list(https_floods(announced(node, "HTTPS"), "/ping", "/stats")),
        "grpc": list(grpc_floods(node.grpc, "/nsqha.v1.Admin/ListTopics")),
        "peer": list(grpc_floods(node.peer, "/nsqha.v1.Replication/Push")),
        "segments": list(http_floods(announced(node, "segments"), "/", stored_range(node, TOPIC))),
        "lookup tcp": list(lookup_floods(lookupd.tcp)),
        "lookup http": list(http_floods(lookupd.http, "/ping", "/nodes", f"/lookup?topic={TOPIC}", "/controller")),
    }


class Strangers:
    """One connection for each kind of flood at a time."""

    def __init__(self, floods: Sequence[Flood]) -> None:
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
        burst = flood.again * (BURST_BYTES // len(flood.again) or 1) if flood.again else b""
        context = unverified()
        while not self._end.wait(0.02):
            with contextlib.suppress(OSError), connected(flood, context) as sock:
                while not self._end.wait(0.001 if burst else 0.2):
                    with contextlib.suppress(TimeoutError):
                        self.sent += sock.send(burst)


@contextlib.contextmanager
def connected(flood: Flood, context: ssl.SSLContext) -> Iterator[socket.socket]:
    """A connection in the state in which the flood begins: what sends it."""
    host, _, port = flood.address.rpartition(":")
    with contextlib.ExitStack() as opened:
        sock = opened.enter_context(socket.create_connection((host, int(port)), timeout=1))
        sock.sendall(flood.opening)
        if flood.tls is None:
            yield sock
            return
        if flood.opening and not sock.recv(ANSWER_BYTES):
            raise ConnectionResetError("no answer")
        past = opened.enter_context(sock.dup())
        past.settimeout(1)
        inside = opened.enter_context(context.wrap_socket(sock))
        inside.sendall(flood.tls)
        yield past if flood.beneath else inside
