"""The Admin services of the other nodes, for a node that was asked about what they lead.

One connection per address, made when it is first used. With cluster TLS it carries this node's own certificate. An
error of the other side comes back as the error that it was there; what nobody said is told apart as between nodes:
`Unavailable` was not sent, `OutcomeUnknown` may have been carried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

from grpc import aio

from nsqha.errors import Unavailable
from nsqha.pb.v1 import admin_pb2_grpc
from nsqha.server import peer_grpc
from nsqha.server.tls import ClusterTls


class Others(Protocol):
    """Other nodes, as the Admin service calls them."""

    async def call(self, address: str, rpc: str, request: Any, *, seconds: float) -> Any:
        """The answer. Unavailable, OutcomeUnknown, or the error that the other side told."""

    def stream(self, address: str, rpc: str, request: Any, *, seconds: float) -> AsyncIterator[Any]:
        """Answers, as many as there are; errors as with `call`. `seconds`: until there is a connection."""


class GrpcOthers:
    """Over gRPC. Made and used on one loop."""

    def __init__(self, *, tls: ClusterTls | None = None, message_bytes: int = 0) -> None:
        """`message_bytes`: the largest message."""
        self._credentials = peer_grpc.channel_credentials(tls) if tls else None
        self._options = peer_grpc.client_options(message_bytes)
        self._channels: dict[str, aio.Channel] = {}
        self._closed = False

    async def call(self, address: str, rpc: str, request: Any, *, seconds: float) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        stub = await self._connected(address, rpc, deadline)
        try:
            return await getattr(stub, rpc)(request, timeout=max(deadline - loop.time(), 0.001))
        except aio.AioRpcError as error:
            raise peer_grpc.error_of_rpc(error, f"{rpc} at {address}") from None

    async def stream(self, address: str, rpc: str, request: Any, *, seconds: float) -> AsyncIterator[Any]:
        stub = await self._connected(address, rpc, asyncio.get_running_loop().time() + seconds)
        call = getattr(stub, rpc)(request)
        try:
            async for message in call:
                yield message
        except aio.AioRpcError as error:
            raise peer_grpc.error_of_rpc(error, f"{rpc} at {address}") from None
        finally:
            call.cancel()

    async def _connected(self, address: str, rpc: str, deadline: float) -> Any:
        if self._closed:
            raise Unavailable("this node is stopping")
        channel = self._channels.get(address)
        if channel is None:
            if self._credentials is None:
                channel = aio.insecure_channel(address, options=self._options)
            else:
                channel = aio.secure_channel(address, self._credentials, options=self._options)
            self._channels[address] = channel
        if not await peer_grpc.connected(channel, deadline):
            raise Unavailable(f"{rpc} at {address}: no connection; nothing was sent")
        return admin_pb2_grpc.AdminStub(channel)

    async def close(self) -> None:
        """The node stops: what is under way ends."""
        self._closed = True
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()
