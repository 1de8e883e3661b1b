"""The Admin and Segments services of the other nodes, for a node that was asked about what they lead.

One connection per address, made when it is used and kept while it is. With cluster TLS it carries this node's newest
certificate. An error of the other node is raised here as the same error. Without an answer there are two errors, as
between nodes: `Unavailable` was not sent, `OutcomeUnknown` may have been carried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from grpc import aio

from nsqha.cluster_secret import ClusterSecret
from nsqha.errors import Unavailable
from nsqha.grpc_channels import aio_channel
from nsqha.pb.v1 import admin_pb2_grpc, segments_pb2, segments_pb2_grpc
from nsqha.server.peers import calls as peer_grpc
from nsqha.server.runtime.certificates import CertificateFiles
from nsqha.server.runtime.tasks import TaskGroup

ENDING_SECONDS = 60.0
"""Requests that began before certificates were renewed have this long to end."""

_SEGMENTS = frozenset(segments_pb2.DESCRIPTOR.services_by_name["Segments"].methods_by_name)


class PeerAdmins(Protocol):
    """Other nodes, as the Admin service calls them."""

    async def call(self, address: str, rpc: str, request: Any, *, seconds: float) -> Any:
        """The answer. Raises Unavailable, OutcomeUnknown, or the error that the other node answered with."""

    def stream(self, address: str, rpc: str, request: Any, *, seconds: float) -> AsyncIterator[Any]:
        """Yield all answers; errors as with `call`. `seconds`: until there is a connection."""


class GrpcOthers:
    """Over gRPC. Made and used on one loop."""

    def __init__(self, *, tls: CertificateFiles | None = None, secret: ClusterSecret | None = None) -> None:
        self._secret = secret
        self._tls = tls
        self._generation = 0 if tls is None else tls.generation
        self._ending = TaskGroup()
        self._options = peer_grpc.client_options()
        self._channels: dict[str, peer_grpc.CallChannel] = {}
        self._closed = False

    async def call(self, address: str, rpc: str, request: Any, *, seconds: float) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        try:
            async with self._connected(address, rpc, deadline) as stub:
                return await getattr(stub, rpc)(request, timeout=max(deadline - loop.time(), 0.001))
        except aio.AioRpcError as error:
            raise peer_grpc.error_of_rpc(error, f"{rpc} at {address}") from None

    async def stream(self, address: str, rpc: str, request: Any, *, seconds: float) -> AsyncIterator[Any]:
        async with self._connected(address, rpc, asyncio.get_running_loop().time() + seconds) as stub:
            call = getattr(stub, rpc)(request)
            try:
                async for message in call:
                    yield message
            except aio.AioRpcError as error:
                raise peer_grpc.error_of_rpc(error, f"{rpc} at {address}") from None
            finally:
                call.cancel()

    @asynccontextmanager
    async def _connected(self, address: str, rpc: str, deadline: float) -> AsyncIterator[Any]:
        if self._closed:
            raise Unavailable("this node is stopping")
        self._renew()
        for unused in peer_grpc.take_unused(self._channels):
            self._ending.spawn(unused.close())
        channel = self._channels.get(address)
        if channel is None:
            tls = None if self._tls is None else peer_grpc.channel_credentials(self._tls.tls)
            made = aio_channel(address, self._options, tls, self._secret)
            channel = self._channels[address] = peer_grpc.CallChannel(made)
        with channel.in_use():
            if not await peer_grpc.connected(channel.grpc, deadline):
                raise Unavailable(f"{rpc} at {address}: no connection; nothing was sent")
            service = segments_pb2_grpc.SegmentsStub if rpc in _SEGMENTS else admin_pb2_grpc.AdminStub
            yield service(channel.grpc)

    def _renew(self) -> None:
        """Make new connections if certificates changed; calls on the old connections may end there."""
        if self._tls is None or self._tls.generation == self._generation:
            return
        self._generation = self._tls.generation
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            self._ending.spawn(channel.grpc.close(grace=ENDING_SECONDS))

    async def close(self) -> None:
        """End calls that are under way; the node stops."""
        self._closed = True
        channels, self._channels = self._channels, {}
        self._ending.cancel()
        for channel in channels.values():
            await channel.grpc.close()
