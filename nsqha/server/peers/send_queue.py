"""Messages on their way out of one stream: what flow control and the socket let pass is written, the rest waits.

A message is one write on the loop wherever it can be. While something waits, the owner of the stream is not asked for
more (`pull`). Who pulls while bytes that came are handled is asked right behind them, and else in the next turn of the
loop: a turn more is a look at every socket, which an ack need not wait for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from nsqha.server.peers.api import Message
from nsqha.server.peers.http2 import (
    DATA,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_AND_HEAD,
    FRAME_BYTES,
    FRAME_BYTES_MAX,
    HEAD,
    HEAD_BYTES,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    NO_STREAM,
    WINDOW_BYTES,
    WINDOW_BYTES_MAX,
    Http2Error,
)
from nsqha.server.peers.stream import StreamMessages

TOGETHER_BYTES = 4096  # a message up to here is copied behind its head, which costs less than a second buffer
SLICE_BYTES = 256 << 10  # that are copied together for TLS, where each buffer becomes a record of its own


def _nothing() -> None:
    """What is asked of an owner whose stream has ended."""


class AskTurn:
    """When the owner of a stream is asked what it has to say: right behind what is being read, or in the next turn."""

    __slots__ = ("_ask", "_loop", "_reading", "_soon", "_wanted")

    def __init__(self, loop: asyncio.AbstractEventLoop, ask: Callable[[], None]) -> None:
        self._loop = loop
        self._ask = ask
        self._reading = False  # what came is being handled
        self._wanted = False  # to be asked behind it
        self._soon = False  # the next turn asks

    def ask(self) -> None:
        """The owner has something to say."""
        if self._reading:
            self._wanted = True
        elif not self._soon:
            self._soon = True
            self._loop.call_soon(self._next_turn)

    def read_begins(self) -> None:
        """Bytes that came are handled from now on."""
        self._reading = True

    def read_ended(self) -> None:
        """They are handled: what the owner wants to say about them leaves at once."""
        self._reading = False
        if self._wanted:
            self._wanted = False
            self._ask()

    def end(self) -> None:
        """The owner says nothing any more."""
        self._ask = _nothing

    def _next_turn(self) -> None:
        self._soon = False
        self._ask()


class SendQueue:
    """The sending direction of one stream, and of its connection's windows."""

    def __init__(self, messages: StreamMessages, *, tls: bool) -> None:
        self.paused = True  # nothing may be written: there is no stream yet, or the socket takes nothing
        self._messages = messages
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._stream = NO_STREAM
        self._socket_full = False
        self._queue: deque[bytes] = deque()  # its first is being written
        self._sent = 0  # bytes of that one and its head
        self._give: Callable[[], Message | None] | None = None  # asked when the queue is empty
        self.turn = AskTurn(self._loop, self._ask)
        self._together = FRAME_BYTES_MAX if tls else TOGETHER_BYTES
        self._frame_max = FRAME_BYTES
        self._window = WINDOW_BYTES  # left of the connection's
        self._stream_window = self._initial_window = WINDOW_BYTES

    def __len__(self) -> int:
        return len(self._queue)

    # ---- when

    def open(self, transport: asyncio.Transport, stream: int) -> None:
        """From now on messages may be written."""
        self._transport = transport
        self._stream = stream
        self.paused = self._socket_full
        self.write_on()

    def pause(self) -> None:
        """The socket takes nothing."""
        self._socket_full = self.paused = True

    def resume(self) -> None:
        self._socket_full = False
        if self._stream != NO_STREAM:
            self.paused = False
            self._loop.call_soon(self.write_on)  # this may be within a write

    def clear(self) -> None:
        """The stream has ended: nothing is sent any more."""
        self._queue.clear()
        self._give = None
        self.turn.end()

    def add_window(self, stream: int, more: int) -> None:
        """The other side lets us send more. Http2Error."""
        window = (self._stream_window if stream else self._window) + more
        if window > WINDOW_BYTES_MAX:
            raise Http2Error("a window that is too large", FLOW_CONTROL_ERROR)
        if stream:
            self._stream_window = window
        else:
            self._window = window
        self.write_on()

    def set(self, name: int, value: int) -> None:
        """A setting of the other side, which counts for what is written once it is acknowledged. Http2Error."""
        if name == INITIAL_WINDOW_SIZE:
            if value > WINDOW_BYTES_MAX:
                raise Http2Error(f"a window of {value} bytes", FLOW_CONTROL_ERROR)
            self._stream_window += value - self._initial_window
            self._initial_window = value
        elif name == MAX_FRAME_SIZE:
            if not FRAME_BYTES <= value <= FRAME_BYTES_MAX:
                raise Http2Error(f"frames of {value} bytes")
            self._frame_max = value

    # ---- what

    def pull(self, give: Callable[[], Message | None]) -> None:
        self._give = give
        self.turn.ask()

    def _ask(self) -> None:
        give = self._give
        if give is None or self._queue or self.paused:
            return  # `write_on` comes back to it
        self._give = None
        try:
            message = give()
            if message is not None and not self._messages.ended:
                self.put(message)
        except Exception as error:
            self._messages.fail(error, "writing")
        self._ask_on()

    def _ask_on(self) -> None:
        """Ask again if it is wanted."""
        if self._give is not None and not self._queue and not self.paused:
            self.turn.ask()

    def put(self, message: Message) -> None:
        """Write the message, or queue it."""
        data = self._messages.encode(message)
        if data is None:
            return
        size = len(data)
        total = size + HEAD_BYTES
        if self._queue or self.paused or total > min(self._frame_max, self._window, self._stream_window):
            self._queue.append(data)
            if len(self._queue) == 1:
                self.write_on()
            return
        self._window -= total
        self._stream_window -= total
        head = FRAME_AND_HEAD.pack(total >> 16, total & 0xFFFF, DATA, 0, self._stream, 0, size)
        assert self._transport is not None
        if size <= self._together:
            self._transport.write(head + data)
        else:
            self._transport.writelines((head, data))

    def write_on(self) -> None:
        """Write what may be written of the queue, and ask for more behind that."""
        queue = self._queue
        while queue and not self.paused:
            data = queue[0]
            parts = self._frames(data)
            if parts:
                assert self._transport is not None
                if self._together > TOGETHER_BYTES:
                    parts = _joined(parts)
                self._transport.writelines(parts)
            if self._sent < HEAD_BYTES + len(data):
                return
            self._sent = 0
            queue.popleft()
        self._ask_on()

    def _frames(self, data: bytes) -> list[Any]:
        """The next frames of this message, as far as the windows reach."""
        parts: list[Any] = []
        view = memoryview(data)
        total = HEAD_BYTES + len(data)
        while size := min(self._frame_max, max(min(self._window, self._stream_window), 0), total - self._sent):
            sent = self._sent
            parts.append(FRAME.pack(size >> 16, size & 0xFFFF, DATA, 0, self._stream))
            if sent < HEAD_BYTES:
                parts.append(HEAD.pack(0, len(data))[sent : sent + size])
            if sent + size > HEAD_BYTES:
                parts.append(view[max(sent - HEAD_BYTES, 0) : sent + size - HEAD_BYTES])
            self._sent += size
            self._window -= size
            self._stream_window -= size
        return parts


def _joined(parts: list[Any]) -> list[Any]:
    """The same bytes in fewer pieces."""
    found: list[Any] = []
    begin = size = 0
    for end, part in enumerate(parts, 1):
        size += len(part)
        if size >= SLICE_BYTES or end == len(parts):
            found.append(b"".join(parts[begin:end]))
            begin, size = end, 0
    return found
