"""The socket of one client, with TLS and the codec that client and server agreed on over it.

    frames -> [codec] -> [TLS] -> socket

Owner of the transport from accept to close. Which frames are written, and when the socket is read, is the connection's
and its flow's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from nsqha.server.runtime.listen import address_text
from nsqha.server.runtime.rare_warnings import RefusalLog
from nsqha.server.runtime.tls import Handshake
from nsqha.wire.compression import Codec

TLS_SECONDS_MAX = 5.0
WRITE_BUFFER_HIGH = 1 << 20  # a consumer that reads slower gets no more messages until three quarters of it are gone
CLOSE_SECONDS_MAX = 30.0  # a closed connection has so long to take what was written

Write = Callable[[Any], None]


class ClientTransport:
    """The transport of one client; without effect before `carry_over` and after `lost`."""

    __slots__ = ("_closing", "_loop", "_transport", "codec", "remote_address", "tls")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.remote_address = ""
        self.tls: ssl.SSLObject | None = None
        self.codec: Codec | None = None
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._closing: asyncio.TimerHandle | None = None  # how long it may take

    @property
    def connected(self) -> bool:
        return self._transport is not None

    @property
    def unread_bytes(self) -> int:
        """Bytes that were written and that the client has not taken."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def carry_over(self, transport: asyncio.Transport) -> Write:
        """Use this transport from now on; returns what writes to it."""
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER_HIGH)
        if not self.remote_address:
            self.remote_address = address_text(transport.get_extra_info("peername"))
        return transport.write

    async def start_tls(self, context: ssl.SSLContext, refused: RefusalLog) -> Write | None:
        """Put TLS over the connection; returns what writes to it, None if the handshake failed: `refused` has why."""
        transport = self._transport
        assert transport is not None
        transport.pause_reading()
        try:
            with Handshake(self.remote_address, transport.get_extra_info("socket"), refused):
                upgraded = await self._loop.start_tls(
                    transport,
                    transport.get_protocol(),
                    context,
                    server_side=True,
                    ssl_handshake_timeout=TLS_SECONDS_MAX,
                )
        except (OSError, ssl.SSLError, ConnectionError):
            transport.abort()
            return None
        assert upgraded is not None
        self.tls = upgraded.get_extra_info("ssl_object")
        return self.carry_over(upgraded)

    def compress(self, codec: Codec) -> Write:
        """Use this codec in both directions from now on; returns what writes."""
        self.codec = codec
        return self._write_compressed

    def _write_compressed(self, data: Any) -> None:
        assert self.codec is not None and self._transport is not None
        for chunk in self.codec.chunks(data):
            self._transport.write(chunk)

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        """Close once the client has taken what was written, or after a while."""
        if self._transport is not None:
            self._closing = self._loop.call_later(CLOSE_SECONDS_MAX, self._transport.abort)
            self._transport.close()

    def lost(self) -> None:
        """The connection is gone."""
        self._transport = None
        self.codec = None  # it has buffers
        if self._closing is not None:
            self._closing.cancel()
