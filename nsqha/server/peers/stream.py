"""The messages of one end of a stream between nodes: encoded, taken apart, handed to a handler, and ended once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from nsqha.nsqlog import Logger
from nsqha.server.peers import api as peers
from nsqha.server.peers.api import Message, Method, PeerIdentity, StreamHandler, kind_and_text, one_line
from nsqha.server.peers.http2 import HEAD, HEAD_BYTES

CLOSED_HERE = "closed"
ENDED_THERE = "the other side ended the stream"
TURN_MESSAGES = 64  # handled in one turn of the loop
GREETING_BYTES_MAX = 64 << 10  # of the first message of a stream that came

logger = Logger("peers")


def too_large(size: int) -> str:
    """Why a message is not sent; empty: it can be."""
    limit = peers.MESSAGE_BYTES_MAX
    return f"a message of {size} bytes is over the limit of {limit}" if size > limit else ""


class StreamMessages:
    """Messages of one end, whatever carries their bytes."""

    def __init__(self, peer: PeerIdentity, on_end: Callable[[str, str], None]) -> None:
        """`on_end(kind, why)` tells the other side that the stream is over; it is called once."""
        self.peer = peer
        self.ended = False
        self.left = TURN_MESSAGES  # that may still be handled in this turn
        self.handler: StreamHandler | None = None
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()  # the handler knows that it has ended
        self._on_end = on_end
        self._on_greeted: Callable[[], None] | None = None  # until the first message was handled
        self._partial = bytearray()  # of a message that has not arrived as a whole
        self._last = ""  # why the stream ends behind what is kept; empty: more may come
        self._method: Method
        self._sent_type: type[Any]
        self._received_type: type[Any]

    def speak(self, method: Method, sent: type[Any], received: type[Any]) -> None:
        """The method of this stream and its types, before any message."""
        self._method = method
        self._sent_type = sent
        self._received_type = received

    def expect_greeting(self, then: Callable[[], None]) -> None:
        """What comes first is a greeting, from a side that is not known yet. `then`: the handler took it."""
        self._on_greeted = then

    # ---- out

    def encode(self, message: Message) -> bytes | None:
        """The bytes of a message; None: it is too large, and the stream has ended."""
        data = self._method.encoded(message, self._sent_type)
        if why := too_large(len(data)):
            logger.error("peer_message_too_large", "%s to %s: %s", self._method.name, self.peer, why)
            self.end("ValueError", why)
            return None
        return data

    # ---- in

    def take(self, data: bytes, start: int, stop: int) -> None:
        """The next bytes of messages: data[start:stop]. ValueError: they are none that may be sent.

        When `left` is 0 the rest is kept for `take_on`."""
        partial = self._partial
        while not partial and stop - start >= HEAD_BYTES and self.left:
            # One frame, one message: by far the usual case.
            end = start + HEAD_BYTES + self._size(data, start)
            if end > stop:
                break
            self._hand_over(data[start + HEAD_BYTES : end])
            if self.ended:
                return
            start = end
        if start == stop:
            return
        partial += memoryview(data)[start:stop]
        self._take_kept()

    def take_on(self) -> None:
        """Another turn begins: handle what the last one left. ValueError as `take`."""
        self.left = TURN_MESSAGES
        self._take_kept()
        if self._last and self.left:
            self.end("Unavailable", self._last)

    def last_came(self, why: str) -> None:
        """The other side sends no more: the stream ends behind what was kept."""
        self._last = why
        if self.left:
            self.end("Unavailable", why)

    def _take_kept(self) -> None:
        partial = self._partial
        while len(partial) >= HEAD_BYTES and self.left:
            end = HEAD_BYTES + self._size(partial, 0)
            if len(partial) < end:
                return
            with memoryview(partial) as view:
                whole = bytes(view[HEAD_BYTES:end])
            del partial[:end]
            self._hand_over(whole)
            if self.ended:
                return

    def _size(self, data: bytes | bytearray, at: int) -> int:
        """The size of the message whose head is there. ValueError: it is compressed or too large."""
        head: tuple[int, int] = HEAD.unpack_from(data, at)
        compressed, size = head
        if compressed or size > peers.MESSAGE_BYTES_MAX:
            raise ValueError("a compressed message" if compressed else f"a message of {size} bytes")
        if size > GREETING_BYTES_MAX and self._on_greeted is not None:
            raise ValueError(f"a message of {size} bytes before a greeting")
        return size

    def _hand_over(self, data: bytes) -> None:
        """Call the handler; a message that cannot be decoded, or a handler that fails, ends the stream here."""
        self.left -= 1
        try:
            message = self._received_type.FromString(data)
        except DecodeError:
            why = f"{len(data)} bytes that are not a {self._received_type.__name__}"
            logger.warning("peer_message_bad", "%s from %s: %s", self._method.name, self.peer, why)
            self.end("ValueError", why)
            return
        del data
        handler = self.handler
        if handler is None:
            return
        try:
            handler.on_message(message)
        except Exception as error:
            logger.error("peer_handler_failed", "%s with %s: on_message", self._method.name, self.peer, error=error)
            self.end(*kind_and_text(error))
        if self._on_greeted is not None and not self.ended:
            greeted, self._on_greeted = self._on_greeted, None
            greeted()

    # ---- the end

    def fail(self, error: Exception, doing: str) -> None:
        """End the stream because of a bug."""
        logger.error("peer_stream_failed", "%s with %s: %s", self._method.name, self.peer, doing, error=error)
        self.end(*kind_and_text(error))

    def end(self, kind: str, why: str) -> None:
        """The stream is over; tell the other side, and the handler a moment later."""
        if self.ended:
            return
        why = one_line(why)
        self.ended = True
        self._partial = bytearray()  # it may be large, and what ended is freed late
        self._loop.call_soon(self._close_handler, why)
        on_end = self._on_end
        del self._on_end  # its owner need not wait for the garbage collector
        on_end(kind, why)

    def _close_handler(self, why: str) -> None:
        handler, self.handler = self.handler, None
        try:
            if handler is not None:
                handler.on_closed(why)
        except Exception as error:
            logger.error("peer_handler_failed", "%s with %s: on_closed", self._method.name, self.peer, error=error)
        finally:
            self.over.set_result(None)
