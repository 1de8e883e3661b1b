"""A stream between nodes at the end that accepts it: a connection that came, and what a gRPC server says on it.

    connection -> preface, SETTINGS, HEADERS (which method) -> who serves it -> HEADERS, DATA ... -> trailers

A connection carries one stream and is closed with it: that is announced (SETTINGS_MAX_CONCURRENT_STREAMS), further
streams are refused in a way that clients repeat elsewhere (REFUSED_STREAM), and GOAWAY comes with the end. Until a
method is named a connection may say OPENING_BYTES_MAX within OPENING_SECONDS. As long again it has for its first
message, the greeting, which is GREETING_BYTES_MAX at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import quote

from nsqha.cluster_secret import ClusterSecret
from nsqha.nsqlog import Logger
from nsqha.server.peers.api import (
    ERROR_TRAILER,
    INTERNAL,
    PING_TIMEOUT_SECONDS,
    STATUS,
    UNAUTHENTICATED,
    UNIMPLEMENTED,
    CallRefused,
    Method,
    PeerIdentity,
    StreamHandler,
    kind_and_text,
    status_of,
)
from nsqha.server.peers.greeting import ServerGreeting
from nsqha.server.peers.http2 import (
    END_STREAM,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS_BYTES_MAX,
    INITIAL_WINDOW_SIZE,
    LAST_AND_CODE,
    MAX_CONCURRENT_STREAMS,
    MAX_HEADER_LIST_SIZE,
    NO_ERROR,
    NUMBER,
    PREFACE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_BYTES,
    WINDOW_UPDATE,
    Http2Error,
    frame,
    settings,
)
from nsqha.server.peers.http2_stream import OUR_WINDOW_BYTES, Http2Stream, hang_up
from nsqha.server.peers.stream import ENDED_THERE
from nsqha.server.runtime.budget import SharedTurns
from nsqha.server.runtime.rare_warnings import RareWarnings
from nsqha.server.runtime.tls import HTTP2_ALPN

OPENING_SECONDS = 10.0  # until a method is named, and from then on until a greeting was taken
OPENING_BYTES_MAX = HEADERS_BYTES_MAX + (16 << 10)  # and how much may be said before

_GREETING = ((":status", "200"), ("content-type", "application/grpc"))
_PLAIN = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"  # that gRPC's messages do not escape

_refused = RareWarnings(Logger("peers"), "greeting_refused")


class ServerStream:
    """The `Side` of a stream that serves it."""

    def __init__(
        self,
        address: str,
        serve: Callable[[ServerStream, str], StreamHandler],
        *,
        tls: bool = False,
        secret: ClusterSecret | None = None,
        greeted: Callable[[], None] = lambda: None,
        strangers: SharedTurns | None = None,
    ) -> None:
        """`serve` is given the path that was asked for. It calls `speak` and says who handles the stream, or raises.
        It is not asked before the client has proved `secret`. `greeted`: whoever handles it took the first message;
        until then its turns are those of `strangers`."""
        self.stream = Http2Stream(address, self, tls=tls, preface=PREFACE)
        if strangers is not None:
            self.stream.turns.share(strangers)
        self._serve = serve
        self._on_greeted = greeted
        self._greeting = ServerGreeting(secret)
        self._opening_bytes = 0  # before a method was named
        self._opening: asyncio.TimerHandle | None = None  # until one is, and then until there is a greeting
        self._settings_came = False
        self._last_stream = 0  # the highest number that the other side has opened
        self._named = False  # a method, which is served or refused
        self._greeted = False  # our HEADERS are out
        self._http_status = "200"
        self._status = 0  # of gRPC, for a stream that is refused; 0: as the error says

    def speak(self, method: Method, peer: PeerIdentity) -> None:
        """Which method this stream is, and who opened it."""
        self.stream.messages.peer = peer
        self.stream.messages.speak(method, method.reply, method.request)

    @property
    def identity(self) -> PeerIdentity:
        """By the certificate that the connection was accepted with."""
        address = self.stream.peer.address
        assert self.stream.transport is not None
        tls = self.stream.transport.get_extra_info("ssl_object")
        if tls is None:
            return PeerIdentity(address)
        names = tls.getpeercert().get("subjectAltName", ())
        return PeerIdentity.of_certificate(
            address, *([value for kind, value in names if kind == wanted] for wanted in ("DNS", "URI"))
        )

    # ---- the connection

    def connected(self, transport: asyncio.Transport) -> None:
        self.stream.transport = transport
        if self.stream.ended:  # during the handshake
            transport.abort()
            return
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != HTTP2_ALPN:
            self.stream.end("Unavailable", "HTTP/2 was not agreed to (ALPN)")
            return
        mine = settings(
            (MAX_CONCURRENT_STREAMS, 1),
            (INITIAL_WINDOW_SIZE, OUR_WINDOW_BYTES),
            (MAX_HEADER_LIST_SIZE, HEADERS_BYTES_MAX),
            *self._greeting.settings,
        )
        transport.write(mine + frame(WINDOW_UPDATE, 0, 0, NUMBER.pack(OUR_WINDOW_BYTES - WINDOW_BYTES)))
        self._wait_for("no stream")

    def _wait_for(self, what: str) -> None:
        if self._opening is not None:
            self._opening.cancel()
        why = f"{what} within {OPENING_SECONDS:g} s"
        self._opening = asyncio.get_running_loop().call_later(OPENING_SECONDS, self.stream.end, "Unavailable", why)

    def _greeting_taken(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        self.stream.turns.share(None)
        self._on_greeted()

    def connection_lost(self, why: str) -> None:
        self.stream.end("Unavailable", why)

    def missed(self, why: str) -> None:
        self.stream.end("Unavailable", why)

    def settings_came(self, payload: bytes) -> None:
        pass

    def going_away(self, last: int, code: int, why: str) -> None:
        if code != NO_ERROR:  # else it only wants no streams that we would open
            self.stream.end("Unavailable", why or f"the other side is going away: GOAWAY code {code}")

    # ---- streams

    def frame_came(self, kind: int, size: int) -> None:
        if self._named:
            return
        if not self._settings_came and kind != SETTINGS:
            raise Http2Error("settings have to come first")
        self._settings_came = True
        self._opening_bytes += size
        if self._opening_bytes > OPENING_BYTES_MAX:
            raise Http2Error(f"no stream within {OPENING_BYTES_MAX} bytes", ENHANCE_YOUR_CALM)

    def is_known(self, stream: int) -> bool:
        return stream <= self._last_stream and stream % 2 == 1

    def open(self, stream: int) -> None:
        if stream % 2 == 0:
            raise Http2Error(f"stream {stream} of a client, which has odd numbers")
        if stream <= self._last_stream:
            raise Http2Error(f"headers of stream {stream}, which is closed", STREAM_CLOSED)
        if not self._last_stream:
            self.stream.begin(stream)
        self._last_stream = stream

    def headers_came(self, stream: int, fields: dict[str, str], last: bool) -> None:
        if stream != self.stream.stream:
            self.stream.answer(frame(RST_STREAM, 0, stream, NUMBER.pack(REFUSED_STREAM)))
        elif not self._named:
            self._named = True
            self._accept(fields, last)
        elif last:
            self.stream.end("Unavailable", ENDED_THERE)
        else:
            raise Http2Error("headers again")

    def _accept(self, fields: dict[str, str], last: bool) -> None:
        stream = self.stream
        path = fields.get(":path", "")
        try:
            self._check(fields)
            if why := self._greeting.refused(fields, path):
                _refused.warning("a stream from %s: %s", stream.peer.address, why)
                raise CallRefused(why, UNAUTHENTICATED)
            handler = self._serve(self, path)
        except Exception as error:
            self._status = status_of(error)
            stream.end(*kind_and_text(error))
            return
        stream.messages.handler = handler
        if stream.ended:  # by who serves it
            return
        assert stream.transport is not None
        self._wait_for("no greeting")
        stream.messages.expect_greeting(self._greeting_taken)
        stream.write(stream.headers.frame(0, stream.stream, *_GREETING, *self._greeting.answer(fields, path)))
        self._greeted = True
        stream.keepalive.start()
        stream.out.open(stream.transport, stream.stream)
        if last:
            stream.end("Unavailable", ENDED_THERE)

    def _check(self, fields: dict[str, str]) -> None:
        if not fields.get("content-type", "").startswith("application/grpc"):
            self._http_status = "415"
        elif fields.get(":method") != "POST":
            self._http_status = "405"
        if self._http_status != "200":
            raise ValueError("this is for gRPC only")
        if (encoding := fields.get("grpc-encoding", "identity")) != "identity":
            why = f"messages compressed with {encoding} are not understood here; send them as they are"
            raise CallRefused(why, UNIMPLEMENTED)

    # ---- the end

    def tear_down(self, kind: str, why: str, code: int) -> None:
        if self._opening is not None:
            self._opening.cancel()
        stream, transport = self.stream, self.stream.transport
        if transport is None or transport.is_closing():
            return
        if not self._named:
            transport.write(frame(GOAWAY, 0, 0, LAST_AND_CODE.pack(0, code) + why.encode(errors="replace")))
            hang_up(transport)
            return
        status = self._status or STATUS.get(kind, INTERNAL)
        greeting = () if self._greeted else ((":status", self._http_status), *_GREETING[1:])
        trailers = (
            ("grpc-status", str(status)),
            ("grpc-message", quote(why, safe=_PLAIN, errors="replace")),
            (ERROR_TRAILER, kind),
        )
        transport.write(
            stream.headers.frame(END_STREAM, stream.stream, *greeting, *trailers)
            + frame(RST_STREAM, 0, stream.stream, NUMBER.pack(NO_ERROR))
            + frame(GOAWAY, 0, 0, LAST_AND_CODE.pack(stream.stream, code))
        )
        # The other side closes the connection. Closed here it would be reset, if something has come meanwhile that is
        # not read any more, and the trailers were lost.
        asyncio.get_running_loop().call_later(PING_TIMEOUT_SECONDS, transport.abort)
