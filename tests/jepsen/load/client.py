"""A V2 client that hides nothing: what it sends is what it is told to, what comes back is reported as it comes.

It is the load's own, so that a real client's habits (retries, back-off, reconnects) do not blur what the broker did.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, cast

HEADER = struct.Struct(">II")
MESSAGE = struct.Struct(">qH16s")
RESPONSE, ERROR, MESSAGE_FRAME = 0, 1, 2
NOT_FATAL = ("E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED")


class Broken:
    """What went wrong in callbacks of an event loop, which else only says so in its log: a history that such an error
    has cut short proves nothing. To be given to `set_exception_handler`."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, (OSError, Gone)):  # these are how connections end
            self.errors.append(f"{context.get('message')}: {error!r}")
        loop.default_exception_handler(context)


class Gone(Exception):
    """The connection ended; what was not answered has an unknown outcome. The text is the last error frame, if any."""


class V2(asyncio.Protocol):
    """One connection. Replies come in command order; messages and refusals go to callbacks."""

    def __init__(self) -> None:
        self.on_messages: Callable[[list[tuple[int, int, str, bytes]]], None] = lambda messages: None
        self.on_refused: Callable[[str, str], None] = lambda command, message_id: None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._error = ""

    # ---- what the load uses

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def ask(self, data: bytes, replies: int = 1) -> list[asyncio.Future[bytes]]:
        """Send commands that get `replies` replies; the futures end in order, or with Gone."""
        if self._transport is None:
            raise Gone(self._error)
        loop = asyncio.get_running_loop()
        futures = [cast("asyncio.Future[bytes]", loop.create_future()) for _ in range(replies)]
        self._waiting.extend(futures)
        self._transport.write(data)
        return futures

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        why = self._error  # answers the oldest command; what became of those behind it is unknown
        for future in self._waiting:
            if not future.done():
                future.set_exception(Gone(why))
                future.exception()  # whoever waits still gets it; nobody need wait
            why = ""
        self._waiting.clear()
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        unread = self._unread
        unread += data
        at = 0
        messages: list[tuple[int, int, str, bytes]] = []
        while len(unread) - at >= 8:
            size, kind = HEADER.unpack_from(unread, at)
            end = at + 4 + size
            if end > len(unread):
                break
            if kind == MESSAGE_FRAME:
                timestamp, attempts, message_id = MESSAGE.unpack_from(unread, at + 8)
                messages.append((timestamp, attempts, message_id.decode("latin-1"), bytes(unread[at + 34 : end])))
            else:
                if messages:
                    self.on_messages(messages)
                    messages = []
                self._frame(kind, bytes(unread[at + 8 : end]))
            at = end
        del unread[:at]
        if messages:
            self.on_messages(messages)

    def _frame(self, kind: int, data: bytes) -> None:
        if kind == ERROR:
            text = data.decode("latin-1")
            if text.startswith(NOT_FATAL):
                _, command, message_id, *_ = text.split(" ")
                self.on_refused(command, message_id)
            else:
                self._error = text
        elif data == b"_heartbeat_":
            self.send(b"NOP\n")
        elif self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(data)


async def connect(port: int, *, host: str = "127.0.0.1", **identify: object) -> V2:
    """A connection that has identified itself. OSError or Gone if the broker is not there."""
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(V2, host, port)
    body = json.dumps({"client_id": "load", "feature_negotiation": True, **identify}).encode()
    (reply,) = protocol.ask(b"  V2IDENTIFY\n" + struct.pack(">I", len(body)) + body)
    try:
        async with asyncio.timeout(10):  # `wait_for` loses a cancellation that comes with the reply
            await reply
    except TimeoutError:
        protocol.close()
        raise Gone("no reply to IDENTIFY") from None
    return protocol


def pub(topic: str, body: bytes, partition: int = -1) -> bytes:
    """`partition`: the one that is meant, by its number; -1: any."""
    where = b"" if partition < 0 else b" %d" % partition
    return b"PUB %s%s\n%s%s" % (topic.encode(), where, struct.pack(">I", len(body)), body)


def dpub(topic: str, delay_ms: int, body: bytes) -> bytes:
    return b"DPUB %s %d\n%s%s" % (topic.encode(), delay_ms, struct.pack(">I", len(body)), body)


def mpub(topic: str, bodies: list[bytes]) -> bytes:
    inner = struct.pack(">I", len(bodies)) + b"".join(struct.pack(">I", len(body)) + body for body in bodies)
    return b"MPUB %s\n%s%s" % (topic.encode(), struct.pack(">I", len(inner)), inner)


async def http(port: int, path: str, body: bytes = b"") -> int:
    """POST; the status. OSError or Gone if there was no answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        line = await asyncio.wait_for(reader.readline(), 20)
        parts = line.split()
        if len(parts) < 2:
            raise Gone("no answer")
        return int(parts[1])
    except TimeoutError:
        raise Gone("no answer in time") from None
    finally:
        writer.close()


async def get_json(port: int, path: str, *, host: str = "127.0.0.1") -> object:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 20)
    except TimeoutError:
        raise Gone("no answer in time") from None
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise Gone(head.decode("latin-1"))
    return json.loads(body)
