"""The calling end of a gRPC stream between nodes: HTTP/2 as far as that takes, on the loop of the process.

gRPC's own client hands every message and every completed write from thread to thread before the loop hears of it; a
batch that is pushed to two followers costs it more than everything else that a leader does for that batch. Here a
message is one write on the loop, and what arrives is read on the loop. On the wire it is what any gRPC client says,
and the other side is a gRPC server as it comes.

    connect -> preface, SETTINGS, HEADERS, DATA ... -> trailers, RST_STREAM, or a connection that is lost

Each stream has a connection of its own, so the windows of connection and stream are one thing. What flow control or
the socket does not let pass waits here, and nobody is asked for more meanwhile.

Answers to pings, and TLS, are the loop's business, too: the other side ends the streams of one that stands for
PING_TIMEOUT_SECONDS to that and KEEPALIVE_SECONDS, and nothing connects while it stands for CONNECT_SECONDS.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

from nsqha.server.dialling import Failures, addresses
from nsqha.server.peer_stream import CLOSED_HERE, ENDED_THERE, StreamEnd
from nsqha.server.peers import (
    KEEPALIVE_SECONDS,
    MESSAGE_BYTES_MAX,
    PING_TIMEOUT_SECONDS,
    Message,
    Method,
    PeerIdentity,
    StreamHandler,
    one_line,
)

CONNECT_SECONDS = 1.0  # and as long again for the other side's first word
READING_SECONDS = 0.01  # for what came while the loop stood, before it is missed

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 4, 5
CANCEL = 8
STREAM = 1  # the only one of its connection
HEAD_BYTES = 5  # before each message: whether it is compressed, and its size
FRAME_BYTES = 16384  # that a frame may have unless its reader says otherwise; we do not. Nobody may say less, or more
FRAME_BYTES_MAX = (1 << 24) - 1  # than that
HEADERS_BYTES_MAX = 64 << 10
WINDOW_BYTES = 65535  # that may be sent unless the reader says otherwise, and
OUR_WINDOW_BYTES = 16 << 20  # what we say: whatever arrives is handled at once
TOGETHER_BYTES = 4096  # a message up to here is copied behind its head, which costs less than a second buffer
SLICE_BYTES = 256 << 10  # that are copied together for TLS, where each buffer becomes a record of its own

_FRAME = struct.Struct(">BHBBL")  # the size in two parts, type, flags, stream
_FRAME_AND_HEAD = struct.Struct(">BHBBLBL")
_HEAD = struct.Struct(">BL")
_NUMBER = struct.Struct(">L")
_SETTING = struct.Struct(">HL")
_LAST_AND_CODE = struct.Struct(">LL")


class Http2Stream(StreamEnd, asyncio.Protocol):
    """The end that opened it."""

    def __init__(
        self,
        address: str,
        method: Method,
        handler: StreamHandler,
        tls: ssl.SSLContext | None = None,
        failures: Failures | None = None,
    ) -> None:
        super().__init__(PeerIdentity(address), method, method.request, method.reply)
        self.over: asyncio.Future[None] = self._loop.create_future()  # its handler knows that it has ended
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._asking = False  # `_ask` will be called
        self._paused = True  # the socket takes nothing
        self._together = FRAME_BYTES_MAX if tls is not None else TOGETHER_BYTES
        self._sent = 0  # bytes of the queue's first message and its head
        self._frame_max = FRAME_BYTES
        self._window = WINDOW_BYTES  # left of the connection's
        self._stream_window = self._stream_window_first = WINDOW_BYTES
        self._untold = 0  # bytes that came and that the other side may send again
        self._rest = b""  # of what came: a frame that is not whole
        self._message = bytearray()  # that is not whole
        self._headers = b""  # until their last frame
        self._headers_end_it = False
        self._heard = 0.0  # when something came last; 0: nothing yet
        self._timer: asyncio.TimerHandle | None = None
        self._failures = failures or Failures()
        self._connecting = self._loop.create_task(self._connect(address, tls))

    # ---- the connection

    async def _connect(self, address: str, tls: ssl.SSLContext | None) -> None:
        if why := self._failures.why(address, self._loop.time()):
            self._end("Unavailable", why)
            return
        until = self._loop.time() + CONNECT_SECONDS
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            async with asyncio.timeout_at(until):
                await self._dial(await addresses(host, int(port)), host, int(port), tls, until)
        except TimeoutError:
            self._not_connected(f"no connection within {CONNECT_SECONDS:g} s")
        except (OSError, ValueError) as error:
            self._not_connected(one_line(str(error) or type(error).__name__))
        except asyncio.CancelledError:
            self._transport = None
            self._end("Unavailable", CLOSED_HERE)
            raise
        except Exception as error:
            self._transport = None
            self._failed(error, "connecting")

    async def _dial(self, found: list[str], host: str, port: int, tls: ssl.SSLContext | None, until: float) -> None:
        """Connect to the first that takes it; each has its share of the time."""
        name = host if tls else None
        for left in range(len(found), 0, -1):
            try:
                async with asyncio.timeout((until - self._loop.time()) / left):
                    await self._loop.create_connection(lambda: self, found[-left], port, ssl=tls, server_hostname=name)
                return
            except OSError:
                if left == 1 or self._transport is not None:  # it came about, a moment too late
                    raise

    def _not_connected(self, why: str) -> None:
        if not self.ended:
            self._transport = None  # if there is one, it is closed already
            self._failures.failed(self.peer.address, self._loop.time(), why)
            self._end("Unavailable", why)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        agreed = transport.get_extra_info("ssl_object")
        if agreed is not None and agreed.selected_alpn_protocol() != "h2":
            self._not_connected("it does not agree to HTTP/2 (ALPN)")
        transport = cast(asyncio.Transport, transport)
        if self.ended:
            transport.abort()
            return
        self._transport = transport
        settings = ((HEADER_TABLE_SIZE, 0), (ENABLE_PUSH, 0), (INITIAL_WINDOW_SIZE, OUR_WINDOW_BYTES))
        self._transport.write(
            PREFACE
            + frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*setting) for setting in settings))
            + frame(WINDOW_UPDATE, 0, 0, _NUMBER.pack(OUR_WINDOW_BYTES - WINDOW_BYTES))
            + frame(HEADERS, END_HEADERS, STREAM, self._request())
        )
        self._paused = False
        self._expect(CONNECT_SECONDS, 0.0)
        self._write_on()

    def _request(self) -> bytes:
        assert self._transport is not None
        scheme = "http" if self._transport.get_extra_info("sslcontext") is None else "https"
        return request_headers(scheme, self._method.path, self.peer.address)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        why = one_line(str(exc)) if exc else "the connection is lost"
        if self._heard:
            self._end("Unavailable", why)
        else:
            self._not_connected(why)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
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
        self._transport.write(frame(PING, 0, 0, bytes(8)))
        self._expect(PING_TIMEOUT_SECONDS, self._loop.time())

    def _expected(self, since: float) -> None:
        transport = self._transport
        if self.ended or transport is None:
            return
        if not self._heard:
            self._not_connected(f"no connection within {CONNECT_SECONDS:g} s")
            transport.abort()
        elif self._heard < since:
            self._end("Unavailable", "it does not answer a ping")
        else:
            self._keep_alive()

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
        head = _FRAME_AND_HEAD.pack(total >> 16, total & 0xFFFF, DATA, 0, STREAM, 0, size)
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
            parts.append(_FRAME.pack(size >> 16, size & 0xFFFF, DATA, 0, STREAM))
            if sent < HEAD_BYTES:
                parts.append(_HEAD.pack(0, len(data))[sent : sent + size])
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
            while end - at >= _FRAME.size and not self.ended:
                high, low, kind, flags, stream = _FRAME.unpack_from(data, at)
                start, stop = at + _FRAME.size, at + _FRAME.size + (high << 16) + low
                if stop - start > FRAME_BYTES:
                    raise ValueError("a frame that is too large")
                if stop > end:
                    break
                if kind == DATA and stream == STREAM:
                    self._untold += stop - start
                    if flags & PADDED:
                        start, padding = start + 1, data[start]
                        self._take(data, start, _unpadded(start, stop, padding))
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
            update, self._untold = _NUMBER.pack(self._untold), 0
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
            more = _NUMBER.unpack(payload)[0] & 0x7FFFFFFF
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
        assert self._transport is not None
        if kind == PING and not flags & ACK:
            self._transport.write(frame(PING, ACK, 0, payload))
        elif kind == SETTINGS and not flags & ACK:
            for name, value in _SETTING.iter_unpack(payload):
                if name == INITIAL_WINDOW_SIZE:
                    if value > 0x7FFFFFFF:
                        raise ValueError(f"a window of {value} bytes")
                    self._stream_window += value - self._stream_window_first
                    self._stream_window_first = value
                elif name == MAX_FRAME_SIZE:
                    if not FRAME_BYTES <= value <= FRAME_BYTES_MAX:
                        raise ValueError(f"frames of {value} bytes")
                    self._frame_max = value
            self._failures.reached(self.peer.address)
            self._transport.write(frame(SETTINGS, ACK, 0))
            self._write_on()
        elif kind == GOAWAY:
            last, code = _LAST_AND_CODE.unpack_from(payload)
            if code or last & 0x7FFFFFFF < STREAM:  # else it takes no more streams, and serves this one to its end
                why = payload[_LAST_AND_CODE.size :].decode("utf-8", "replace")
                self._end("Unavailable", one_line(why) or f"the other side is going away: GOAWAY code {code}")

    def _of_stream(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == HEADERS:
            if flags & PADDED:
                payload = payload[1 : _unpadded(1, len(payload), payload[0])]
            self._headers = payload[5:] if flags & PRIORITY else payload
            self._headers_end_it = bool(flags & END_STREAM)
            self._headers_came(flags)
        elif kind == CONTINUATION:
            self._headers += payload
            if len(self._headers) > HEADERS_BYTES_MAX:
                raise ValueError(f"headers of more than {HEADERS_BYTES_MAX} bytes")
            self._headers_came(flags)
        elif kind == RST_STREAM:
            self._end("Unavailable", f"{ENDED_THERE}: RST_STREAM code {_NUMBER.unpack(payload)[0]}")

    def _headers_came(self, flags: int) -> None:
        if not flags & END_HEADERS:
            return
        headers = headers_of(self._headers)
        ok = headers.get(":status", "200" if self._headers_end_it else "") == "200"
        if ok and not self._headers_end_it:
            return
        why = [] if ok else [f"HTTP status {headers[':status']}" if headers.get(":status") else "not HTTP status 200"]
        if message := unquote(headers.get("grpc-message", "")):
            why.append(message)
        elif (status := headers.get("grpc-status", "0")) != "0":
            why.append(f"grpc-status {status}")
        self._end("Unavailable", one_line(": ".join(why)) or ENDED_THERE)

    # ---- the end

    def _tear_down(self, kind: str, why: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        transport = self._transport
        if transport is None:
            self._connecting.cancel()
        elif transport.get_write_buffer_size():
            transport.abort()  # what is pending is dropped; nobody may ever read it
        else:
            transport.write(frame(RST_STREAM, 0, STREAM, _NUMBER.pack(CANCEL)))
            transport.close()
            self._loop.call_later(PING_TIMEOUT_SECONDS, transport.abort)

    def _tell(self, why: str) -> None:
        super()._tell(why)
        self.over.set_result(None)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


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


def _unpadded(start: int, stop: int, padding: int) -> int:
    """Where the content ends."""
    if stop - padding < start:
        raise ValueError("more padding than there is")
    return stop - padding


def _size(data: bytes | bytearray, at: int) -> int:
    """Of the message whose head is there."""
    head: tuple[int, int] = _HEAD.unpack_from(data, at)
    compressed, size = head
    if compressed or size > MESSAGE_BYTES_MAX:
        raise ValueError("a compressed message" if compressed else f"a message of {size} bytes")
    return size


# ---- headers (HPACK), without a table of our own and without Huffman's code

_STATUS = {8: "200", 9: "204", 10: "206", 11: "304", 12: "400", 13: "404", 14: "500"}  # in HPACK's table


def request_headers(scheme: str, path: str, authority: str) -> bytes:
    """Of a gRPC call. The numbers are those of names in HPACK's table."""
    return b"".join(
        (
            b"\x83" + (b"\x87" if scheme == "https" else b"\x86"),  # :method: POST, and the scheme
            b"\x04" + _text(path),
            b"\x01" + _text(authority),
            b"\x00" + _text("te") + _text("trailers"),
            b"\x0f\x10" + _text("application/grpc"),  # content-type
            b"\x0f\x2b" + _text("nsqha"),  # user-agent
        )
    )


def _text(text: str) -> bytes:
    raw = text.encode()
    size = len(raw)
    if size < 127:
        return bytes((size,)) + raw
    out, size = bytearray((127,)), size - 127
    while size >= 128:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out) + raw


def headers_of(block: bytes) -> dict[str, str]:
    """`:status`, and the headers whose name is written out, as a gRPC server writes its own.

    Empty values for Huffman's code.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(block):
        first = block[at]
        if first & 0x80:  # all of it is in the table
            index, at = _number(block, at, 7)
            if index in _STATUS:
                found[":status"] = _STATUS[index]
        elif first & 0xE0 == 0x20:  # the table's new size
            _, at = _number(block, at, 5)
        else:
            index, at = _number(block, at, 6 if first & 0x40 else 4)
            if index:
                name = ":status" if index in _STATUS else ""
            else:
                name, at = _read_text(block, at)
            value, at = _read_text(block, at)
            if name:
                found[name] = value
    return found


def _number(block: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    shift = 0
    while True:
        value += (block[at] & 127) << shift
        shift += 7
        at += 1
        if shift > 28:
            raise ValueError("a number that is too large")
        if block[at - 1] < 128:
            return value, at


def _read_text(block: bytes, at: int) -> tuple[str, int]:
    coded = block[at] & 0x80
    size, at = _number(block, at, 7)
    if at + size > len(block):
        raise ValueError("a text that is cut off")
    return "" if coded else block[at : at + size].decode("utf-8", "replace"), at + size
