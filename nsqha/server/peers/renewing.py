"""gRPC between nodes with certificates that are renewed while the process runs: both sides of a connection.

`RenewingPeers` opens what is new with the newest certificates, on connections of its own; streams that stand end when
they end, and then the connections that they were on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from nsqha.cluster_secret import ClusterSecret
from nsqha.errors import Unavailable
from nsqha.server.peers.api import Message, Peers, PeerStream, StreamHandler
from nsqha.server.peers.calls import GrpcPeers
from nsqha.server.runtime.certificates import CertificateFiles
from nsqha.server.runtime.tasks import TaskGroup


async def listen(server: grpc.aio.Server, wanted: str, files: CertificateFiles | None) -> str:
    """Start a server at `wanted` (host:port, or a unix socket), with TLS if there are files. Unavailable.

    Returns where it listens.
    """
    bound = f"0.0.0.0{wanted}" if wanted.startswith(":") else wanted  # all interfaces, of IPv6 too; gRPC wants a host
    try:
        if files is None:
            port = server.add_insecure_port(bound)
        else:
            port = server.add_secure_port(bound, _server_credentials(files))
    except RuntimeError as error:
        raise Unavailable(f"--grpc-address={wanted}: cannot listen: {error}") from None
    await server.start()
    return wanted if wanted.startswith("unix") else f"{wanted.rpartition(':')[0]}:{port}"


def _server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """For a port on which every client shows a certificate of the cluster's CA, as that is when they connect."""
    given = files.generation

    def newer() -> Any:
        """Asked in gRPC's thread before each handshake. None: nothing changed."""
        nonlocal given
        if files.generation == given:
            return None
        given = files.generation
        return _configuration(files)

    return grpc.dynamic_ssl_server_credentials(_configuration(files), newer, require_client_authentication=True)


def _configuration(files: CertificateFiles) -> Any:
    tls = files.tls
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.certificate)], tls.ca)


def peers(
    services: Iterable[ServiceDescriptor], files: CertificateFiles | None, secret: ClusterSecret | None = None
) -> Peers:
    """The other nodes, with TLS if there are files."""
    if files is None:
        return GrpcPeers(services, secret=secret)
    return RenewingPeers(services, files, secret)


class RenewingPeers:
    """`Peers` over one `GrpcPeers` per set of certificates."""

    def __init__(
        self, services: Iterable[ServiceDescriptor], files: CertificateFiles, secret: ClusterSecret | None = None
    ) -> None:
        self._secret = secret
        self._services = tuple(services)
        self._files = files
        self._newest = self._made()
        self._older: set[_Generation] = set()
        self._ending = TaskGroup()

    def stream(self, address: str, method: str, handler: StreamHandler) -> PeerStream:
        generation = self._current()
        counted = _Counted(self, generation, handler)
        stream = generation.peers.stream(address, method, counted)
        generation.used += 1
        return stream

    async def call(self, address: str, method: str, request: Message, *, timeout: float) -> Message:
        generation = self._current()
        generation.used += 1
        try:
            return await generation.peers.call(address, method, request, timeout=timeout)
        finally:
            self._left(generation)

    async def close(self) -> None:
        generations = [self._newest, *self._older]
        self._older.clear()
        await asyncio.gather(*(generation.peers.close() for generation in generations), self._ending.wait())

    def _current(self) -> _Generation:
        if self._newest.number != self._files.generation:
            old, self._newest = self._newest, self._made()
            self._older.add(old)
            self._end_unused(old)
        return self._newest

    def _made(self) -> _Generation:
        number = self._files.generation  # before the files' content: at worst it is older than that
        return _Generation(number, GrpcPeers(self._services, tls=self._files.tls, secret=self._secret))

    def _left(self, generation: _Generation) -> None:
        generation.used -= 1
        self._end_unused(generation)

    def _end_unused(self, generation: _Generation) -> None:
        if not generation.used and generation in self._older:
            self._older.discard(generation)
            self._ending.spawn(generation.peers.close())


class _Generation:
    """Connections with one set of certificates."""

    __slots__ = ("number", "peers", "used")

    def __init__(self, number: int, peers: GrpcPeers) -> None:
        self.number = number
        self.peers = peers
        self.used = 0  # streams and calls


class _Counted:
    """A `StreamHandler` whose end is noticed."""

    __slots__ = ("_generation", "_owner", "_wrapped", "on_message")

    def __init__(self, owner: RenewingPeers, generation: _Generation, handler: StreamHandler) -> None:
        self._owner = owner
        self._generation = generation
        self._wrapped = handler
        self.on_message = handler.on_message

    def on_closed(self, why: str) -> None:
        try:
            self._wrapped.on_closed(why)
        finally:
            self._owner._left(self._generation)
