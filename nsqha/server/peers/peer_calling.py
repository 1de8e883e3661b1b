"""The end of a stream between nodes that opens it: a connection, and what a gRPC client says on it.

    connect -> preface, SETTINGS, HEADERS, DATA ... -> trailers, RST_STREAM, or a connection that is lost

A node's peer port and any other gRPC server understand it alike.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import cast
from urllib.parse import unquote

from nsqha.server.peers.api import Method, PeerIdentity, StreamHandler, one_line
from nsqha.server.peers.dialling import Failures, addresses
from nsqha.server.peers.http2 import (
    CANCEL,
    ENABLE_PUSH,
    INITIAL_WINDOW_SIZE,
    NUMBER,
    PREFACE,
    RST_STREAM,
    STREAM,
    WINDOW_BYTES,
    WINDOW_UPDATE,
    frame,
    settings,
)
from nsqha.server.peers.peer_http2 import OUR_WINDOW_BYTES, Http2End
from nsqha.server.peers.stream import CLOSED_HERE, ENDED_THERE
from nsqha.server.runtime.tls import HTTP2_ALPN

CONNECT_SECONDS = 1.0  # and as long again for the other side's first word

OPENING = PREFACE + settings((ENABLE_PUSH, 0), (INITIAL_WINDOW_SIZE, OUR_WINDOW_BYTES))


class CallingEnd(Http2End):
    """The end that opened it."""

    def __init__(
        self,
        address: str,
        method: Method,
        handler: StreamHandler,
        tls: ssl.SSLContext | None = None,
        failures: Failures | None = None,
    ) -> None:
        super().__init__(PeerIdentity(address), tls=tls is not None)
        self._speak(method, method.request, method.reply)
        self._handler = handler
        self._failures = failures or Failures()
        self._connecting = self._loop.create_task(self._connect(address, tls))

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
        if agreed is not None and agreed.selected_alpn_protocol() != HTTP2_ALPN:
            self._not_connected("it does not agree to HTTP/2 (ALPN)")
        transport = cast(asyncio.Transport, transport)
        if self.ended:
            transport.abort()
            return
        self._transport = transport
        request = self._headers.frame(
            0,
            (":method", "POST"),
            (":scheme", "http" if agreed is None else "https"),
            (":path", self._method.path),
            (":authority", self.peer.address),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "nsqha"),
        )
        more = frame(WINDOW_UPDATE, 0, 0, NUMBER.pack(OUR_WINDOW_BYTES - WINDOW_BYTES))
        transport.write(OPENING + more + request)
        self._paused = False
        self._expect(CONNECT_SECONDS, 0.0)
        self._write_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        why = one_line(str(exc)) if exc else "the connection is lost"
        if self._heard:
            self._end("Unavailable", why)
        else:
            self._not_connected(why)

    def _silent(self) -> None:
        transport = self._transport
        assert transport is not None
        self._not_connected(f"no connection within {CONNECT_SECONDS:g} s")
        transport.abort()

    def _settled(self) -> None:
        self._failures.reached(self.peer.address)

    def _headers_came(self, headers: dict[str, str], last: bool) -> None:
        status = headers.get(":status", "200" if last else "")
        if status == "200" and not last:
            return
        why = [] if status == "200" else [f"HTTP status {status}" if status else "not HTTP status 200"]
        if message := unquote(headers.get("grpc-message", "")):
            why.append(message)
        elif (code := headers.get("grpc-status", "0")) != "0":
            why.append(f"grpc-status {code}")
        self._end("Unavailable", one_line(": ".join(why)) or ENDED_THERE)

    def _tear_down(self, kind: str, why: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        transport = self._transport
        if transport is None:
            self._connecting.cancel()
        elif transport.get_write_buffer_size():
            transport.abort()  # what is pending is dropped; nobody may ever read it
        else:
            transport.write(frame(RST_STREAM, 0, STREAM, NUMBER.pack(CANCEL)))
            self._hang_up(transport)
