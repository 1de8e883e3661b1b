"""A stream between nodes at the end that opens it: a connection, and what a gRPC client says on it.

    connect -> preface, SETTINGS, HEADERS, DATA ... -> trailers, RST_STREAM, or a connection that is lost

A node's peer port and any other gRPC server understand it alike.
"""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import unquote

from nsqha.cluster_secret import NOT_ASKED, ClusterSecret
from nsqha.nsqlog import Logger
from nsqha.server.peers.api import UNAUTHENTICATED, Method, StreamHandler, one_line
from nsqha.server.peers.dialling import Failures, addresses
from nsqha.server.peers.greeting import ClientGreeting, nonce_in_settings
from nsqha.server.peers.http2 import (
    CANCEL,
    CLIENT_STREAM,
    ENABLE_PUSH,
    GOAWAY,
    INITIAL_WINDOW_SIZE,
    LAST_AND_CODE,
    NUMBER,
    PREFACE,
    RST_STREAM,
    WINDOW_BYTES,
    WINDOW_UPDATE,
    frame,
    settings,
)
from nsqha.server.peers.http2_stream import OUR_WINDOW_BYTES, Http2Stream, hang_up
from nsqha.server.peers.stream import CLOSED_HERE, ENDED_THERE
from nsqha.server.runtime.rare_warnings import RareWarnings
from nsqha.server.runtime.tasks import begin
from nsqha.server.runtime.tls import HTTP2_ALPN

CONNECT_SECONDS = 1.0  # and as long again until the other side says something

OPENING = PREFACE + settings((ENABLE_PUSH, 0), (INITIAL_WINDOW_SIZE, OUR_WINDOW_BYTES))

_refused = RareWarnings(Logger("peers"), "greeting_refused")


class ClientStream:
    """The `Side` of a stream that opens it."""

    def __init__(
        self,
        address: str,
        method: Method,
        handler: StreamHandler,
        tls: ssl.SSLContext | None = None,
        failures: Failures | None = None,
        secret: ClusterSecret | None = None,
    ) -> None:
        self.stream = Http2Stream(address, self, tls=tls is not None)
        self.stream.messages.speak(method, method.request, method.reply)
        self.stream.messages.handler = handler
        self.stream.begin(CLIENT_STREAM)
        self._path = method.path
        self._secret = secret
        self._greeting = ClientGreeting(secret, method.path)
        self._asked = False  # our HEADERS are out
        self._encrypted = tls is not None
        self._failures = failures or Failures()
        self._loop = asyncio.get_running_loop()
        self._connecting = begin(self._loop, self._connect(address, tls))  # it ends the stream if it fails

    async def _connect(self, address: str, tls: ssl.SSLContext | None) -> None:
        if why := self._failures.why(address, self._loop.time()):
            self.stream.end("Unavailable", why)
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
            self.stream.transport = None
            self.stream.end("Unavailable", CLOSED_HERE)
            raise
        except Exception as error:
            self.stream.transport = None
            self.stream.messages.fail(error, "connecting")

    async def _dial(self, found: list[str], host: str, port: int, tls: ssl.SSLContext | None, until: float) -> None:
        """Connect to the first that takes it; each has its share of the time."""
        name = host if tls else None
        for left in range(len(found), 0, -1):
            try:
                async with asyncio.timeout((until - self._loop.time()) / left):
                    await self._loop.create_connection(
                        lambda: self.stream, found[-left], port, ssl=tls, server_hostname=name
                    )
                return
            except OSError:
                if left == 1 or self.stream.transport is not None:  # it came about, a moment too late
                    raise

    def _not_connected(self, why: str) -> None:
        if not self.stream.ended:
            self.stream.transport = None  # if there is one, it is closed already
            self._failures.failed(self.stream.peer.address, self._loop.time(), why)
            self.stream.end("Unavailable", why)

    # ---- the connection

    def connected(self, transport: asyncio.Transport) -> None:
        stream = self.stream
        agreed = transport.get_extra_info("ssl_object")
        if agreed is not None and agreed.selected_alpn_protocol() != HTTP2_ALPN:
            self._not_connected("it does not agree to HTTP/2 (ALPN)")
        if stream.ended:
            transport.abort()
            return
        stream.transport = transport
        more = frame(WINDOW_UPDATE, 0, 0, NUMBER.pack(OUR_WINDOW_BYTES - WINDOW_BYTES))
        # With a secret the request waits for the server's nonce, and messages for its proof.
        transport.write(OPENING + more + (self._request(b"") if self._secret is None else b""))
        stream.keepalive.expect(CONNECT_SECONDS, 0.0, f"no connection within {CONNECT_SECONDS:g} s")
        if self._secret is None:
            stream.out.open(transport, CLIENT_STREAM)

    def _request(self, server_nonce: bytes) -> bytes:
        self._asked = True
        stream = self.stream
        return stream.headers.frame(
            0,
            CLIENT_STREAM,
            (":method", "POST"),
            (":scheme", "https" if self._encrypted else "http"),
            (":path", self._path),
            (":authority", stream.peer.address),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "nsqha"),
            *self._greeting.opening(server_nonce),
        )

    def connection_lost(self, why: str) -> None:
        if self.stream.keepalive.heard:
            self.stream.end("Unavailable", why)
        else:
            self._not_connected(why)

    def missed(self, why: str) -> None:
        transport = self.stream.transport
        if self.stream.keepalive.heard or transport is None:
            self.stream.end("Unavailable", why)
            return
        self._not_connected(why)
        transport.abort()

    def frame_came(self, kind: int, size: int) -> None:
        pass

    def settings_came(self, payload: bytes) -> None:
        self._failures.reached(self.stream.peer.address)
        if self._asked:
            return
        nonce = nonce_in_settings(payload)
        if nonce:
            self.stream.write(self._request(nonce))
        else:
            self._refuse(NOT_ASKED)

    def _refuse(self, why: str) -> None:
        _refused.warning("%s at %s: %s", self._path, self.stream.peer.address, why)
        self.stream.end("Unavailable", why)

    def going_away(self, last: int, code: int, why: str) -> None:
        if code or last < CLIENT_STREAM:  # else it takes no more streams, and serves this one to its end
            self.stream.end("Unavailable", why or f"the other side is going away: GOAWAY code {code}")

    # ---- the stream

    def is_known(self, stream: int) -> bool:
        return True  # frames of streams that we did not open are passed over

    def open(self, stream: int) -> None:
        pass

    def headers_came(self, stream: int, fields: dict[str, str], last: bool) -> None:
        if stream != CLIENT_STREAM:
            return
        status = fields.get(":status", "200" if last else "")
        if status == "200" and not last:
            self._accepted(fields)
            return
        why = [] if status == "200" else [f"HTTP status {status}" if status else "not HTTP status 200"]
        if message := unquote(fields.get("grpc-message", "")):
            why.append(message)
        elif (code := fields.get("grpc-status", "0")) != "0":
            why.append(f"grpc-status {code}")
        if fields.get("grpc-status") == str(UNAUTHENTICATED):
            _refused.warning("%s at %s: %s", self._path, self.stream.peer.address, one_line(": ".join(why)))
        self.stream.end("Unavailable", one_line(": ".join(why)) or ENDED_THERE)

    def _accepted(self, fields: dict[str, str]) -> None:
        stream = self.stream
        if why := self._greeting.refused(fields):
            self._refuse(why)
        elif self._secret is not None and stream.transport is not None:
            stream.out.open(stream.transport, CLIENT_STREAM)

    # ---- the end

    def tear_down(self, kind: str, why: str, code: int) -> None:
        transport = self.stream.transport
        if transport is None:
            self._connecting.cancel()
        elif transport.get_write_buffer_size():
            transport.abort()  # what is pending is dropped; perhaps it would never be read
        else:
            goaway = frame(GOAWAY, 0, 0, LAST_AND_CODE.pack(0, code)) if code else b""
            transport.write(frame(RST_STREAM, 0, CLIENT_STREAM, NUMBER.pack(CANCEL)) + goaway)
            hang_up(transport)
