"""What both ends of a gRPC stream between nodes do on their connection: HTTP/2 as far as that takes, on the loop.

gRPC hands every message and every completed write from thread to thread before the loop hears of it; that costs a
batch more than everything else that is done for it. Here a message is one write on the loop, and what arrives is read
on the loop. On the wire it is what any gRPC client and server say.

    calling (`peer_calling`):      preface, SETTINGS, HEADERS, DATA ...  RST_STREAM, or the connection is closed
    accepting (`peer_accepting`):  SETTINGS, HEADERS, DATA ...           HEADERS (trailers) that end the stream

Each stream has a connection of its own, so the windows of connection and stream are one thing. What flow control or
the socket does not let pass waits here, and nobody is asked for more meanwhile.

Answers to pings, and TLS, are the loop's business, too: the other side ends the streams of one that stands for
PING_TIMEOUT_SECONDS to that and KEEPALIVE_SECONDS.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

from nsqha.server.peers.api import (
    KEEPALIVE_SECONDS,
    MESSAGE_BYTES_MAX,
    PING_TIMEOUT_SECONDS,
    Message,
    PeerIdentity,
    one_line,
)
from nsqha.server.peers.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    FRAME_AND_HEAD,
    FRAME_BYTES,
    FRAME_BYTES_MAX,
    GOAWAY,
    HEAD,
    HEAD_BYTES,
    HEADERS,
    HEADERS_BYTES_MAX,
    INITIAL_WINDOW_SIZE,
    LAST_AND_CODE,
    MAX_FRAME_SIZE,
    NUMBER,
    PADDED,
    PING,
    PING_BYTES,
    PRIORITY,
    RST_STREAM,
    SETTING,
    SETTINGS,
    STREAM,
    WINDOW_BYTES,
    WINDOW_BYTES_MAX,
    WINDOW_UPDATE,
    Headers,
    frame,
    unpadded,
)
from nsqha.server.peers.stream import ENDED_THERE, StreamEnd

READING_SECONDS = 0.01  # for what came while the loop stood, before it is missed
OUR_WINDOW_BYTES = 16 << 20  # that may be sent to us: whatever arrives is handled at once
TOGETHER_BYTES = 4096  # a message up to here is copied behind its head, which costs less than a second buffer
SLICE_BYTES = 256 << 10  # that are copied together for TLS, where each buffer becomes a record of its own
ANSWERS_MAX = 1000  # to pings and settings, for who does not read them


class Http2End(StreamEnd, asyncio.Protocol):
    """One end, from `connection_made` of its subclass on."""

    def __init__(self, peer: PeerIdentity, *, tls: bool) -> None:
        super().__init__(peer)
        self.over: asyncio.Future[None] = self._loop.create_future()  # its handler knows that it has ended
        self._transport: asyncio.Transport | None = None
        self._asking = False  # `_ask` will be called
        self._paused = True  # nothing may be written: the socket takes nothing, or there is no stream yet
        self._together = FRAME_BYTES_MAX if tls else TOGETHER_BYTES
        self._sent = 0  # bytes of the queue's first message and its head
        self._frame_max = FRAME_BYTES
        self._window = WINDOW_BYTES  # left of the connection's
        self._stream_window = self._stream_window_first = WINDOW_BYTES
        self._untold = 0  # bytes that came and that the other side may send again
        self._rest = b""  # of what came: a frame that is not whole
        self._message = bytearray()  # that is not whole
        self._headers = Headers()
        self._block = b""  # of headers, until their last frame
        self._block_ends_it = False
        self._data_of = STREAM  # whose DATA is read
        self._answers = 0  # that the socket did not take
        self._heard = 0.0  # when something came last; 0: nothing yet
        self._timer: asyncio.TimerHandle | None = None

    # ---- the connection

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._answers = 0
        self._loop.call_soon(self._write_on)  # this may be within a write

    def _expect(self, seconds: float, since: float) -> None:
        """Something has to come within `seconds` that is newer than `since`."""
        self._timer = self._loop.call_later(
            seconds, lambda: self._loop.call_later(READING_SECONDS, self._expected, since)
        )

    def _keep_alive(self) -> None:
        quiet = self._loop.time() - self._heard
        if quiet < KEEPALIVE_SECONDS:
            self._timer = self._loop.call_later(KEEPALIVE_SECONDS - quiet + 0.001, self._keep_alive)
            return
        assert self._transport is not None
        self._transport.write(frame(PING, 0, 0, bytes(PING_BYTES)))
        self._expect(PING_TIMEOUT_SECONDS, self._loop.time())

    def _expected(self, since: float) -> None:
        if self.ended or self._transport is None:
            return
        if not self._heard:
            self._silent()
        elif self._heard < since:
            self._end("Unavailable", "it does not answer a ping")
        else:
            self._keep_alive()

    def _silent(self) -> None:
        """There is a connection, and nobody who says anything."""
        raise NotImplementedError

    def _hang_up(self, transport: asyncio.Transport) -> None:
        """Close it behind what is written, if somebody reads that."""
        transport.close()
        self._loop.call_later(PING_TIMEOUT_SECONDS, transport.abort)

    # ---- out

    def send(self, message: Message) -> None:
        if not self.ended:
            self._put(message)

    def pull(self, give: Callable[[], Message | None]) -> None:
        if not self.ended:
            self._give = give
            self._ask_soon()

    def _ask_soon(self) -> None:
        if not self._asking:
            self._asking = True
            self._loop.call_soon(self._ask)

    def _ask(self) -> None:
        self._asking = False
        give = self._give
        if give is None or self._queue or self._paused:
            return  # `_write_on` comes back to it
        self._give = None
        try:
            message = give()
            if message is not None and not self.ended:
                self._put(message)
        except Exception as error:
            self._failed(error, "writing")
        self._ask_on()

    def _ask_on(self) -> None:
        """Whoever is asked may want to be asked again."""
        if self._give is not None and not self._queue and not self._paused:
            self._ask_soon()

    def _put(self, message: Message) -> None:
        data = self._encoded(message)
        if data is None:
            return
        size = len(data)
        total = size + HEAD_BYTES
        if self._queue or self._paused or total > min(self._frame_max, self._window, self._stream_window):
            self._queue.append(data)
            if len(self._queue) == 1:
                self._write_on()
            return
        self._window -= total
        self._stream_window -= total
        head = FRAME_AND_HEAD.pack(total >> 16, total & 0xFFFF, DATA, 0, STREAM, 0, size)
        assert self._transport is not None
        if size <= self._together:
            self._transport.write(head + data)
        else:
            self._transport.writelines((head, data))

    def _write_on(self) -> None:
        """Write what may be written of the queue, and ask for more behind that."""
        queue = self._queue
        while queue and not self._paused:
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
            parts.append(FRAME.pack(size >> 16, size & 0xFFFF, DATA, 0, STREAM))
            if sent < HEAD_BYTES:
                parts.append(HEAD.pack(0, len(data))[sent : sent + size])
            if sent + size > HEAD_BYTES:
                parts.append(view[max(sent - HEAD_BYTES, 0) : sent + size - HEAD_BYTES])
            self._sent += size
            self._window -= size
            self._stream_window -= size
        return parts

    # ---- in

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        try:
            while end - at >= FRAME.size and not self.ended:
                high, low, kind, flags, stream = FRAME.unpack_from(data, at)
                stream &= 0x7FFFFFFF
                start, stop = at + FRAME.size, at + FRAME.size + (high << 16) + low
                if stop - start > FRAME_BYTES:
                    raise ValueError("a frame that is too large")
                if stop > end:
                    break
                if kind == DATA and stream == self._data_of:
                    self._untold += stop - start
                    if flags & PADDED:
                        start, padding = start + 1, data[start]
                        self._take(data, start, unpadded(start, stop, padding))
                    else:
                        self._take(data, start, stop)
                    if flags & END_STREAM:
                        self._end("Unavailable", ENDED_THERE)
                else:
                    self._control(kind, flags, stream, data[start:stop])
                at = stop
        except (struct.error, ValueError, IndexError) as error:
            self._end("Unavailable", f"what came is not HTTP/2: {error}")
        if self.ended:
            return
        self._rest = data[at:]
        if self._untold >= OUR_WINDOW_BYTES // 4:
            update, self._untold = NUMBER.pack(self._untold), 0
            assert self._transport is not None
            self._transport.write(frame(WINDOW_UPDATE, 0, 0, update) + frame(WINDOW_UPDATE, 0, STREAM, update))

    def _take(self, data: bytes, start: int, stop: int) -> None:
        """The next bytes of messages."""
        message = self._message
        while not message and stop - start >= HEAD_BYTES:
            # One frame, one message: by far the usual case.
            end = start + HEAD_BYTES + _size(data, start)
            if end > stop:
                break
            self._arrived(data[start + HEAD_BYTES : end])
            if self.ended:
                return
            start = end
        if start == stop:
            return
        message += memoryview(data)[start:stop]
        while len(message) >= HEAD_BYTES:
            end = HEAD_BYTES + _size(message, 0)
            if len(message) < end:
                return
            with memoryview(message) as view:
                whole = bytes(view[HEAD_BYTES:end])
            del message[:end]
            self._arrived(whole)
            if self.ended:
                return

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Every frame but our DATA. What is not known, or not of our stream, is ignored as HTTP/2 wants it."""
        if kind == WINDOW_UPDATE and stream in (0, STREAM):
            more = NUMBER.unpack(payload)[0] & 0x7FFFFFFF
            if stream:
                self._stream_window += more
            else:
                self._window += more
            self._write_on()
        elif stream == STREAM:
            self._of_stream(kind, flags, payload)
        elif not stream:
            self._of_connection(kind, flags, payload)

    def _of_connection(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == PING and not flags & ACK:
            if len(payload) != PING_BYTES:
                raise ValueError(f"a ping of {len(payload)} bytes")
            self._answer(frame(PING, ACK, 0, payload))
        elif kind == SETTINGS and not flags & ACK:
            for name, value in SETTING.iter_unpack(payload):
                if name == INITIAL_WINDOW_SIZE:
                    if value > WINDOW_BYTES_MAX:
                        raise ValueError(f"a window of {value} bytes")
                    self._stream_window += value - self._stream_window_first
                    self._stream_window_first = value
                elif name == MAX_FRAME_SIZE:
                    if not FRAME_BYTES <= value <= FRAME_BYTES_MAX:
                        raise ValueError(f"frames of {value} bytes")
                    self._frame_max = value
            self._settled()
            self._answer(frame(SETTINGS, ACK, 0))
            self._write_on()
        elif kind == GOAWAY:
            last, code = LAST_AND_CODE.unpack_from(payload)
            if code or last & 0x7FFFFFFF < STREAM:  # else it takes no more streams, and serves this one to its end
                why = payload[LAST_AND_CODE.size :].decode("utf-8", "replace")
                self._end("Unavailable", one_line(why) or f"the other side is going away: GOAWAY code {code}")

    def _settled(self) -> None:
        """The other side said how it speaks."""

    def _answer(self, data: bytes) -> None:
        """To what anybody may send as often as they like."""
        self._answers += self._paused
        if self._answers > ANSWERS_MAX:
            raise ValueError("it does not read what it asks for")
        assert self._transport is not None
        self._transport.write(data)

    def _of_stream(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == HEADERS:
            if flags & PADDED:
                payload = payload[1 : unpadded(1, len(payload), payload[0])]
            self._block = payload[5:] if flags & PRIORITY else payload
            self._block_ends_it = bool(flags & END_STREAM)
        elif kind == CONTINUATION:
            self._block += payload
            if len(self._block) > HEADERS_BYTES_MAX:
                raise ValueError(f"headers of more than {HEADERS_BYTES_MAX} bytes")
        elif kind == RST_STREAM:
            self._end("Unavailable", f"{ENDED_THERE}: RST_STREAM code {NUMBER.unpack(payload)[0]}")
            return
        elif kind == DATA:
            raise ValueError("data before headers")
        if kind in (HEADERS, CONTINUATION) and flags & END_HEADERS:
            block, self._block = self._block, b""
            self._headers_came(self._headers.read(block), self._block_ends_it)

    def _headers_came(self, headers: dict[str, str], last: bool) -> None:
        """`last`: nothing comes after them."""
        raise NotImplementedError

    # ---- the end

    def _tell(self, why: str) -> None:
        super()._tell(why)
        self.over.set_result(None)


def _joined(parts: list[Any]) -> list[Any]:
    """The same in fewer."""
    found: list[Any] = []
    begin = size = 0
    for end, part in enumerate(parts, 1):
        size += len(part)
        if size >= SLICE_BYTES or end == len(parts):
            found.append(b"".join(parts[begin:end]))
            begin, size = end, 0
    return found


def _size(data: bytes | bytearray, at: int) -> int:
    """Of the message whose head is there."""
    head: tuple[int, int] = HEAD.unpack_from(data, at)
    compressed, size = head
    if compressed or size > MESSAGE_BYTES_MAX:
        raise ValueError("a compressed message" if compressed else f"a message of {size} bytes")
    return size
