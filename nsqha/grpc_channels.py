"""Channels of gRPC's client, with or without TLS; no other module creates channels."""

from __future__ import annotations

from collections.abc import Sequence

import nsqha.grpc_env  # noqa: F401

# isort: split
import grpc
from grpc import aio

ChannelOptions = Sequence[tuple[str, int]]


def credentials(*, ca: bytes | None, key: bytes | None, certificate: bytes | None) -> grpc.ChannelCredentials:
    """Credentials for a server with TLS, whose certificate must name the dialled address. PEM texts; no `ca`: gRPC's
    own ones; no `key` and `certificate`: no client certificate."""
    return grpc.ssl_channel_credentials(ca, key, certificate)


def channel(address: str, options: ChannelOptions, tls: grpc.ChannelCredentials | None) -> grpc.Channel:
    """For threads; `tls` None: in clear. It connects when it is first used."""
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls, options=options)


def aio_channel(address: str, options: ChannelOptions, tls: grpc.ChannelCredentials | None) -> aio.Channel:
    """The same for a loop."""
    if tls is None:
        return aio.insecure_channel(address, options=options)
    return aio.secure_channel(address, tls, options=options)
