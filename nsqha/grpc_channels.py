"""Channels of gRPC's client, with or without TLS; no other module makes any."""

from __future__ import annotations

from collections.abc import Sequence

import nsqha.grpc_env  # noqa: F401

# isort: split
import grpc
from grpc import aio

ChannelOptions = Sequence[tuple[str, int]]


def credentials(*, ca: bytes | None, key: bytes | None, certificate: bytes | None) -> grpc.ChannelCredentials:
    """For a server with TLS, whose certificate has to name the address that is dialled. PEM texts; no `ca`: those of
    gRPC; no `key` and `certificate`: none is shown."""
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
