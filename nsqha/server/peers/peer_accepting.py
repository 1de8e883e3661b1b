"""The end of a stream between nodes that accepts it: a connection that came, and what a gRPC server says on it.

    connection -> preface, SETTINGS, HEADERS (which method) -> whoever serves it -> HEADERS, DATA ... -> trailers

A connection carries one stream, and is closed with it: every gRPC client that counts its streams from 1 is understood,
and sees its second one refused. Until a method is named a connection may say OPENING_BYTES_MAX within OPENING_SECONDS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast
from urllib.parse import quote

from nsqha.server.peers.api import (
    ERROR_TRAILER,
    INTERNAL,
    PING_TIMEOUT_SECONDS,
    STATUS,
    Method,
    PeerIdentity,
    StreamHandler,
    kind_and_text,
    one_line,
    status_of,
)
from nsqha.server.peers.http2 import (
    END_STREAM,
    GOAWAY,
    HEADERS,
    HEADERS_BYTES_MAX,
    INITIAL_WINDOW_SIZE,
    LAST_AND_CODE,
    MAX_CONCURRENT_STREAMS,
    NO_ERROR,
    NUMBER,
    PREFACE,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    RST_STREAM,
    STREAM,
    WINDOW_BYTES,
    WINDOW_UPDATE,
    frame,
    settings,
)
from nsqha.server.peers.peer_http2 import OUR_WINDOW_BYTES, Http2End
from nsqha.server.peers.stream import ENDED_THERE
from nsqha.server.runtime.tls import HTTP2_ALPN

OPENING_SECONDS = 10.0  # until it is said which method
OPENING_BYTES_MAX = HEADERS_BYTES_MAX + (16 << 10)  # and how much may be said before
NOBODY = -1

_GREETING = ((":status", "200"), ("content-type", "application/grpc"))
_PLAIN = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"  # that gRPC's messages do not escape


class AcceptingEnd(Http2End):
    """The end that accepted it."""

    def __init__(self, address: str, serve: Callable[[AcceptingEnd, str], StreamHandler], *, tls: bool = False) -> None:
        """`serve` is given the path that was asked for. It calls `speak` and says who handles the stream, or raises."""
        super().__init__(PeerIdentity(address), tls=tls)
        self._serve = serve
        self._data_of = NOBODY  # STREAM once our HEADERS are out
        self._preface = PREFACE  # that is still to come
        self._opening = 0  # bytes
        self._full = False  # the socket takes nothing
        self._asked = False  # for a method: there is a stream
        self._status = 0  # of gRPC, for one that is refused; 0: as the error says

    def speak(self, method: Method, peer: PeerIdentity) -> None:
        """Which method this stream is, and whose."""
        self.peer = peer
        self._speak(method, method.reply, method.request)

    @property
    def identity(self) -> PeerIdentity:
        """By the certificate that the connection was accepted with."""
        assert self._transport is not None
        tls = self._transport.get_extra_info("ssl_object")
        if tls is None:
            return PeerIdentity(self.peer.address)
        names = tls.getpeercert().get("subjectAltName", ())
        return PeerIdentity.of_certificate(
            self.peer.address, *([value for kind, value in names if kind == wanted] for wanted in ("DNS", "URI"))
        )

    # ---- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self.ended:  # while it shook hands
            self._transport.abort()
            return
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != HTTP2_ALPN:
            self._end("Unavailable", "HTTP/2 was not agreed to (ALPN)")
            return
        mine = settings((MAX_CONCURRENT_STREAMS, 1), (INITIAL_WINDOW_SIZE, OUR_WINDOW_BYTES))
        self._transport.write(mine + frame(WINDOW_UPDATE, 0, 0, NUMBER.pack(OUR_WINDOW_BYTES - WINDOW_BYTES)))
        self._timer = self._loop.call_later(OPENING_SECONDS, self._silent)

    def data_received(self, data: bytes) -> None:
        if self._preface:
            came = self._preface[: len(data)]
            if not data.startswith(came):
                self._end("Unavailable", "what came is not HTTP/2")
                return
            self._preface = self._preface[len(came) :]
            data = data[len(came) :]
        super().data_received(data)
        if not self._asked:
            self._opening += len(data)
            if self._opening > OPENING_BYTES_MAX:
                self._end("Unavailable", f"no stream within {OPENING_BYTES_MAX} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end("Unavailable", one_line(str(exc)) if exc else "the connection is lost")

    def pause_writing(self) -> None:
        self._full = self._paused = True

    def resume_writing(self) -> None:
        self._full = False
        if self._data_of == STREAM:
            super().resume_writing()

    def _silent(self) -> None:
        self._end("Unavailable", f"no stream within {OPENING_SECONDS:g} s")

    # ---- the stream

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == HEADERS and stream not in (0, STREAM):
            self._answer(frame(RST_STREAM, 0, stream, NUMBER.pack(REFUSED_STREAM)))
        elif kind != GOAWAY or LAST_AND_CODE.unpack_from(payload)[1] != NO_ERROR:  # it wants no more streams from here
            super()._control(kind, flags, stream, payload)

    def _headers_came(self, headers: dict[str, str], last: bool) -> None:
        if self._asked:
            raise ValueError("headers again")
        self._asked = True
        try:
            if headers.get(":method") != "POST" or not headers.get("content-type", "").startswith("application/grpc"):
                raise ValueError("this is for gRPC only")
            handler = self._serve(self, headers.get(":path", ""))
        except Exception as error:
            self._status = status_of(error)
            self._end(*kind_and_text(error))
            return
        self._handler = handler
        if self.ended:  # by who serves it
            return
        assert self._transport is not None and self._timer is not None
        self._timer.cancel()
        self._transport.write(self._headers.frame(0, *_GREETING))
        self._data_of = STREAM
        self._paused = self._full
        self._keep_alive()
        self._write_on()
        if last:
            self._end("Unavailable", ENDED_THERE)

    def _tear_down(self, kind: str, why: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not self._asked:
            transport.write(frame(GOAWAY, 0, 0, LAST_AND_CODE.pack(0, PROTOCOL_ERROR) + why.encode(errors="replace")))
            self._hang_up(transport)
            return
        status = self._status or STATUS.get(kind, INTERNAL)
        fields = (
            ("grpc-status", str(status)),
            ("grpc-message", quote(why, safe=_PLAIN, errors="replace")),
            (ERROR_TRAILER, kind),
        )
        transport.write(
            self._headers.frame(END_STREAM, *(_GREETING if self._data_of == NOBODY else ()), *fields)
            + frame(RST_STREAM, 0, STREAM, NUMBER.pack(NO_ERROR))
            + frame(GOAWAY, 0, 0, LAST_AND_CODE.pack(STREAM, NO_ERROR))
        )
        # The other side closes the connection. Closed here it would be reset, if something has come meanwhile that
        # nobody reads any more, and the trailers were lost.
        self._loop.call_later(PING_TIMEOUT_SECONDS, transport.abort)
