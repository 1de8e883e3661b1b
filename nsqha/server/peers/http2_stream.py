"""A gRPC stream and the connection that it has for itself: HTTP/2 as far as that takes, on the loop.

gRPC's library hands every message and every completed write from thread to thread before the loop hears of it; that
costs a batch more than everything else that is done for it. Here a message is one write on the loop, and what arrives
is read on the loop. On the wire it is what any gRPC client and server say.

    client (`client_stream`):  preface, SETTINGS, HEADERS, DATA ...  RST_STREAM, or the connection is closed
    server (`server_stream`):  SETTINGS, HEADERS, DATA ...           HEADERS (trailers) that end the stream

An `Http2Stream` is what both have in common, and the `PeerStream` that others see; its `Side` is the client or the
server, which decide when it begins and what is said at the end.

Each stream has a connection of its own, so the windows of connection and stream are one thing. What arrives is handled
at once, as much as a turn may have (`frame_budget`).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Protocol, cast

from nsqha.server.peers.api import PING_TIMEOUT_SECONDS, Message, PeerIdentity, one_line
from nsqha.server.peers.frame_budget import CREDIT_COST, FRAME_COST, HEADER_BYTE_COST, ReadTurns
from nsqha.server.peers.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FRAME,
    FRAME_BYTES,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    LAST_AND_CODE,
    NO_ERROR,
    NO_STREAM,
    NUMBER,
    PADDED,
    PING,
    PING_BYTES,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    Headers,
    Http2Error,
    check_frame,
    frame,
    number,
    unpadded,
)
from nsqha.server.peers.keepalive import Keepalive
from nsqha.server.peers.send_queue import SendQueue
from nsqha.server.peers.stream import CLOSED_HERE, ENDED_THERE, TURN_MESSAGES, StreamMessages

OUR_WINDOW_BYTES = 16 << 20  # that may be sent to us
ANSWERS_MAX = 1000  # to pings and settings, and refusals, for a peer that does not read them


_PING = frame(PING, 0, 0, bytes(PING_BYTES))


class Side(Protocol):
    """What differs between the end that opens a stream and the one that accepts it."""

    def connected(self, transport: asyncio.Transport) -> None:
        """There is a connection."""

    def connection_lost(self, why: str) -> None: ...

    def missed(self, why: str) -> None:
        """Nothing came in time."""

    def frame_came(self, kind: int, size: int) -> None:
        """Before the frame is read. Http2Error: it may not come now."""

    def settings_came(self, payload: bytes) -> None: ...

    def is_known(self, stream: int) -> bool:
        """Whether the other side has opened a stream of this number, or we have."""

    def open(self, stream: int) -> None:
        """HEADERS of a new stream begin. Http2Error: it cannot have this number."""

    def headers_came(self, stream: int, fields: dict[str, str], last: bool) -> None:
        """`last`: nothing comes after them. Http2Error: there may be none now."""

    def going_away(self, last: int, code: int, why: str) -> None:
        """The other side said GOAWAY."""

    def tear_down(self, kind: str, why: str, code: int) -> None:
        """Tell the other side that it is over. `code`: of the HTTP/2 error that it made, or NO_ERROR."""


class Http2Stream(asyncio.Protocol):
    """The connection, read frame by frame, and the stream on it."""

    def __init__(self, address: str, side: Side, *, tls: bool, preface: bytes = b"") -> None:
        """`preface`: what the other side has to say before its first frame."""
        self.messages = StreamMessages(PeerIdentity(address), self._ended)
        self.out = SendQueue(self.messages, tls=tls)
        self.headers = Headers()
        self.keepalive = Keepalive(lambda: self.write(_PING), side.missed)
        self.transport: asyncio.Transport | None = None
        self.stream = NO_STREAM  # its number
        self._side = side
        self._loop = asyncio.get_running_loop()
        self._preface = preface  # that is still to come
        self._rest = b""  # of what came: a frame that is not whole
        self._data_of = NO_STREAM  # the stream whose DATA is read
        self._uncredited = 0  # bytes that came, and that no WINDOW_UPDATE has given back yet
        self._answers = 0  # that the socket did not take
        self.turns = ReadTurns(self._loop, self._read_on)
        self._error = NO_ERROR  # of HTTP/2, for which the connection ends

    # ---- the stream, as others see it (`PeerStream`)

    @property
    def peer(self) -> PeerIdentity:
        return self.messages.peer

    @property
    def pending(self) -> int:
        return len(self.out)

    @property
    def ended(self) -> bool:
        return self.messages.ended

    @property
    def heard(self) -> float:
        return self.keepalive.heard

    def ping(self) -> None:
        if not self.messages.ended and self.transport is not None:
            self.write(_PING)

    def send(self, message: Message) -> None:
        if not self.messages.ended:
            self.out.put(message)

    def pull(self, give: Callable[[], Message | None]) -> None:
        if not self.messages.ended:
            self.out.pull(give)

    def close(self, why: str = "") -> None:
        self.end("Unavailable", why or CLOSED_HERE)

    def end(self, kind: str, why: str) -> None:
        self.messages.end(kind, why)

    def _ended(self, kind: str, why: str) -> None:
        self.out.clear()
        self._rest = b""
        self.keepalive.stop()
        self._side.tear_down(kind, why, self._error)

    # ---- for its side

    def begin(self, stream: int) -> None:
        """The number of the stream, whose DATA is read from now on."""
        self.stream = self._data_of = stream

    def write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    def answer(self, data: bytes) -> None:
        """Write what the other side may ask for as often as it likes. Http2Error."""
        self._answers += self.out.paused
        if self._answers > ANSWERS_MAX:
            raise Http2Error("it does not read what it asks for", ENHANCE_YOUR_CALM)
        self.write(data)

    # ---- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._side.connected(cast(asyncio.Transport, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._side.connection_lost(one_line(str(exc)) if exc else "the connection is lost")

        def come_apart(_: object) -> None:
            """Nothing comes any more, and the end was told. The parts know each other, and would be left to the garbage
            collector: where strangers come and go, that keeps the loop for 20 ms at a time."""
            self.turns.end()
            del self._side

        self.messages.over.add_done_callback(come_apart)

    def pause_writing(self) -> None:
        self.out.pause()

    def resume_writing(self) -> None:
        self._answers = 0
        self.out.resume()

    def data_received(self, data: bytes) -> None:
        now = self._loop.time()
        if now != self.keepalive.heard:
            self.keepalive.heard = now
            if not self.turns.resting:
                self.turns.begin()
                self.messages.left = TURN_MESSAGES
        if self.messages.ended:
            # Dropped until the other side closes, and not faster than others have their turn.
            if not self.turns.resting:
                self.turns.rest(self.transport)
            return
        if self._preface:
            came = self._preface[: len(data)]
            if not data.startswith(came):
                self._violated("no preface")
                return
            self._preface = self._preface[len(came) :]
            data = data[len(came) :]
        self.turns.bytes -= len(data)
        if self._rest:
            data = self._rest + data
        strangers = self.turns.strangers
        if self.turns.resting:
            self._rest = data
        elif strangers is None:
            self._read(data)
        else:
            strangers.enter()  # whether there is room or not: it may be a node, which gives up after a second
            self._read(data)
            strangers.leave()

    def _read(self, data: bytes) -> None:
        """Handle the frames in `data`, as many as this turn may have."""
        at, end = 0, len(data)
        frames = self.turns.frames
        messages = self.messages
        self.out.turn.read_begins()
        try:
            while frames and end - at >= FRAME.size and messages.left and not messages.ended:
                high, low, kind, flags, stream = FRAME.unpack_from(data, at)
                stream &= 0x7FFFFFFF
                start, stop = at + FRAME.size, at + FRAME.size + (high << 16) + low
                if stop - start > FRAME_BYTES:
                    raise Http2Error("a frame that is too large", FRAME_SIZE_ERROR)
                if stop > end:
                    break
                frames -= 1
                if kind == DATA and stream == self._data_of:
                    self._uncredited += stop - start
                    if flags & PADDED:
                        start, padding = start + 1, data[start]
                        end_of_data = unpadded(start, stop, padding)
                    else:
                        end_of_data = stop
                    if start == end_of_data:
                        self.turns.charge(FRAME_COST)
                    messages.take(data, start, end_of_data)
                    if flags & END_STREAM:
                        messages.last_came(ENDED_THERE)
                else:
                    self._control(kind, flags, stream, data[start:stop])
                at = stop
        except Http2Error as error:
            self._violated(str(error), error.code)
        except (struct.error, ValueError, IndexError) as error:
            self._violated(str(error))
        self.out.turn.read_ended()
        if messages.ended:
            return
        self._rest = data[at:]
        self.turns.frames = frames
        if self._uncredited >= OUR_WINDOW_BYTES // 4:
            update, self._uncredited = NUMBER.pack(self._uncredited), 0
            self.write(frame(WINDOW_UPDATE, 0, 0, update) + frame(WINDOW_UPDATE, 0, self.stream, update))
        if not frames or not messages.left or self.turns.bytes < 0:
            self.turns.rest(self.transport)

    def _read_on(self) -> None:
        """Another turn begins."""
        if self.messages.ended:
            return
        try:
            self.messages.take_on()
        except ValueError as error:
            self._violated(str(error))
        if not self.messages.ended:
            self._read(self._rest)

    def _violated(self, why: str, code: int = PROTOCOL_ERROR) -> None:
        self._error = code
        self.end("Unavailable", f"what came is not HTTP/2: {why}")

    # ---- frames other than DATA of the stream

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Frames of unknown types are ignored, as are those of streams that were refused."""
        self._side.frame_came(kind, FRAME.size + len(payload))
        if kind == WINDOW_UPDATE:
            self.turns.charge(CREDIT_COST)
        elif kind in (HEADERS, CONTINUATION):
            self.turns.charge(FRAME_COST + HEADER_BYTE_COST * len(payload))
        else:
            self.turns.charge(FRAME_COST)
        check_frame(kind, flags, stream, len(payload))
        if self.headers.incomplete and (kind, stream) != (CONTINUATION, self.headers.incomplete):
            raise Http2Error("headers that something else interrupts")
        if kind in (HEADERS, CONTINUATION):
            self._header_block(kind, flags, stream, payload)
        elif kind == SETTINGS:
            if not flags & ACK:
                for name, value in SETTING.iter_unpack(payload):
                    self.out.set(name, value)
                self._side.settings_came(payload)
                # Before anything that needs the larger window or frame: until then the other side holds us to the
                # earlier ones.
                self.answer(frame(SETTINGS, ACK, 0))
                self.out.write_on()
        elif kind == PING:
            if not flags & ACK:
                self.answer(frame(PING, ACK, 0, payload))
        elif kind == GOAWAY:
            last, code = LAST_AND_CODE.unpack_from(payload)
            why = one_line(payload[LAST_AND_CODE.size :].decode("utf-8", "replace"))
            self._side.going_away(last & 0x7FFFFFFF, code, why)
        elif kind == PUSH_PROMISE:
            raise Http2Error("a promise of a push, which was switched off")
        elif kind in (DATA, RST_STREAM, WINDOW_UPDATE):
            self._of_stream(kind, stream, payload)

    def _header_block(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == HEADERS and stream != self.stream:
            self._side.open(stream)
        self._data_of = NO_STREAM  # nothing may come between the frames of a block
        if self.headers.add(kind, flags, stream, payload):
            self._data_of = self.stream
            self._side.headers_came(stream, self.headers.fields(), self.headers.ends_stream)

    def _of_stream(self, kind: int, stream: int, payload: bytes) -> None:
        if stream and stream != self.stream and not self._side.is_known(stream):
            raise Http2Error("data before headers" if kind == DATA else f"a frame of stream {stream}, which is idle")
        if kind == WINDOW_UPDATE:
            more = number(payload)
            if not more:
                raise Http2Error("a window update of nothing")
            if stream in (0, self.stream):
                self.out.add_window(stream, more)
        elif kind == DATA:
            # Of a stream that was refused: its bytes have used the connection's window.
            if payload:
                self.answer(frame(WINDOW_UPDATE, 0, 0, NUMBER.pack(len(payload))))
        elif stream == self.stream:
            self.end("Unavailable", f"{ENDED_THERE}: RST_STREAM code {NUMBER.unpack(payload)[0]}")


def hang_up(transport: asyncio.Transport) -> None:
    """Close a connection behind what is written, if the other side reads that."""
    transport.close()
    asyncio.get_running_loop().call_later(PING_TIMEOUT_SECONDS, transport.abort)
