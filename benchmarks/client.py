"""Blocking NSQ V2 handshakes, and the commands a benchmark sends.

Reads exactly the frames it waits for and not a byte more, so a socket can be handed to the load generator or to the
verification pass with nothing lost in a buffer.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
from typing import Any

Address = tuple[str, int]

RESPONSE, ERROR, MESSAGE = 0, 1, 2

# nsqd refuses SUB with heartbeats off; a minute is the longest it takes and longer than any cell is quiet.
QUIET: dict[str, Any] = {"heartbeat_interval": 60_000}
# What a latency row asks for, so that two servers are compared and not two defaults.
UNBUFFERED: dict[str, Any] = {**QUIET, "output_buffer_size": -1, "output_buffer_timeout": -1}


class Refused(Exception):
    """The server answered a handshake with an error frame, or with something else than expected."""


def pub(topic: str, body: bytes) -> bytes:
    return b"PUB %s\n%s%s" % (topic.encode(), struct.pack(">I", len(body)), body)


def mpub(topic: str, bodies: list[bytes]) -> bytes:
    block = struct.pack(">I", len(bodies)) + b"".join(struct.pack(">I", len(body)) + body for body in bodies)
    return b"MPUB %s\n%s%s" % (topic.encode(), struct.pack(">I", len(block)), block)


def connect(address: Address, *, timeout_s: float = 10.0) -> socket.socket:
    """A connection on which `  V2` was sent."""
    sock = socket.create_connection(address, timeout=timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(b"  V2")
    return sock


def identify(sock: socket.socket, settings: dict[str, Any]) -> dict[str, Any]:
    """IDENTIFY with feature negotiation; what the server agreed to."""
    body = json.dumps({"client_id": "bench", "hostname": "bench", "feature_negotiation": True, **settings}).encode()
    sock.sendall(b"IDENTIFY\n" + struct.pack(">I", len(body)) + body)
    agreed: dict[str, Any] = json.loads(read_frame(sock, RESPONSE))
    return agreed


def open_tls(address: Address, settings: dict[str, Any]) -> ssl.SSLSocket:
    """A connection switched to TLS as an NSQ client does it: asked for in IDENTIFY, confirmed by OK inside."""
    plain = connect(address)
    if not identify(plain, {**settings, "tls_v1": True}).get("tls_v1"):
        plain.close()
        raise Refused("the server did not agree to tls_v1")
    # The certificate was made by this process a moment ago; its identity is not what is measured.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    sock = context.wrap_socket(plain)
    expect_ok(sock)
    return sock


def open_connection(address: Address, settings: dict[str, Any] = QUIET, *, tls: bool = False) -> socket.socket:
    """A connection past IDENTIFY."""
    if tls:
        return open_tls(address, settings)
    sock = connect(address)
    identify(sock, settings)
    return sock


def subscribe(sock: socket.socket, topic: str, channel: str) -> socket.socket:
    sock.sendall(f"SUB {topic} {channel}\n".encode())
    expect_ok(sock)
    return sock


def expect_ok(sock: socket.socket) -> None:
    answer = read_frame(sock, RESPONSE)
    if answer != b"OK":
        raise Refused(f"the server answered {answer[:80]!r} instead of OK")


def read_frame(sock: socket.socket, kind: int) -> bytes:
    """The payload of the next frame, which must be of this kind."""
    size, found = struct.unpack(">II", _exactly(sock, 8))
    payload = _exactly(sock, size - 4)
    if found != kind:
        raise Refused(f"the server answered with frame type {found}: {payload[:120]!r}")
    return payload


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise Refused("the server closed the connection during the handshake")
        data += piece
    return bytes(data)
