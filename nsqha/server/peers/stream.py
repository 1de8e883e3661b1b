"""What both ends of a stream between nodes do alike: make and read messages, serve a handler, end once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from nsqha.nsqlog import Logger
from nsqha.server.peers import api as peers
from nsqha.server.peers.api import Message, Method, PeerIdentity, StreamHandler, kind_and_text, one_line

CLOSED_HERE = "closed"
ENDED_THERE = "the other side ended the stream"

logger = Logger("peers")


def too_large(size: int) -> str:
    """Why a message is not sent; empty: it can be."""
    limit = peers.MESSAGE_BYTES_MAX
    return f"a message of {size} bytes is over the limit of {limit}" if size > limit else ""


class StreamEnd:
    """One end. It knows its handler, and what waits; how that travels is its subclasses' business."""

    _method: Method
    _out: type[Any]
    _in: type[Any]

    def __init__(self, peer: PeerIdentity) -> None:
        self.peer = peer
        self.ended = False
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes] = deque()  # its first is being written
        self._give: Callable[[], Message | None] | None = None  # asked when the queue is empty
        self._handler: StreamHandler | None = None

    def _speak(self, method: Method, out: type[Any], in_: type[Any]) -> None:
        """This stream's method, before any message."""
        self._method = method
        self._out = out
        self._in = in_

    @property
    def pending(self) -> int:
        return len(self._queue)

    def close(self, why: str = "") -> None:
        self._end("Unavailable", why or CLOSED_HERE)

    def _encoded(self, message: Message) -> bytes | None:
        """Its bytes; None: it is too large, and the stream has ended."""
        data = self._method.encoded(message, self._out)
        if why := too_large(len(data)):
            logger.error("peer_message_too_large", "%s to %s: %s", self._method.name, self.peer, why)
            self._end("ValueError", why)
            return None
        return data

    def _arrived(self, data: bytes) -> None:
        """Hand a message over; one that can not be read, or a handler that fails, ends the stream here."""
        try:
            message = self._in.FromString(data)
        except DecodeError:
            why = f"{len(data)} bytes that are not a {self._in.__name__}"
            logger.warning("peer_message_bad", "%s from %s: %s", self._method.name, self.peer, why)
            self._end("ValueError", why)
            return
        del data
        handler = self._handler
        if handler is None:
            return
        try:
            handler.on_message(message)
        except Exception as error:
            logger.error("peer_handler_failed", "%s with %s: on_message", self._method.name, self.peer, error=error)
            self._end(*kind_and_text(error))

    def _failed(self, error: Exception, doing: str) -> None:
        """What must not happen ends the stream."""
        logger.error("peer_stream_failed", "%s with %s: %s", self._method.name, self.peer, doing, error=error)
        self._end(*kind_and_text(error))

    def _end(self, kind: str, why: str) -> None:
        """The stream is over; tell the other side, and the handler a moment later."""
        if self.ended:
            return
        why = one_line(why)
        self.ended = True
        self._queue.clear()
        self._give = None
        self._loop.call_soon(self._tell, why)
        self._tear_down(kind, why)

    def _tell(self, why: str) -> None:
        handler, self._handler = self._handler, None
        if handler is None:
            return
        try:
            handler.on_closed(why)
        except Exception as error:
            logger.error("peer_handler_failed", "%s with %s: on_closed", self._method.name, self.peer, error=error)

    def _tear_down(self, kind: str, why: str) -> None:
        raise NotImplementedError
