"""Calls of the gRPC port are counted by method and status, whatever ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import aio

from nsqha.admin.peer_admins import GrpcOthers
from nsqha.admin.service import AdminServer
from nsqha.cluster_secret import ClusterSecret
from nsqha.errors import NotFound, Unavailable
from nsqha.pb.v1 import admin_pb2 as pb

ADMIN = "nsqha.v1.Admin"


def topic(name: str) -> Any:
    if name == "slow":
        raise Unavailable("not now")
    raise NotFound("no t") if name == "t" else KeyError("a bug")


async def called(address: str, method: str, data: bytes = b"") -> None:
    """Until it has ended, however."""
    async with aio.insecure_channel(address) as channel:
        await channel.unary_unary(f"/{method}")(data, timeout=30).code()


async def counted(count: int, *, secret: ClusterSecret | None = None, calls: Any) -> Mapping[tuple[str, str], int]:
    """Once so many have ended: a caller may know it before the server has counted it."""
    endpoints: Any = SimpleNamespace()
    broker: Any = SimpleNamespace(
        cluster=None, log_source=None, topics=SimpleNamespace(topic=topic), endpoints=endpoints
    )
    server = AdminServer(broker, "127.0.0.1:0", secret=secret)
    await server.start()
    try:
        await calls(server.address)
        async with asyncio.timeout(20):
            while sum(endpoints.grpc_requests.values()) < count:
                await asyncio.sleep(0.005)
    finally:
        await server.close()
    return dict(endpoints.grpc_requests)


def test_each_call_counts_with_how_it_ended() -> None:
    async def calls(address: str) -> None:
        for name in ("t", "t", "slow", "bug"):
            await called(address, f"{ADMIN}/DescribeTopic", pb.DescribeTopicRequest(topic=name).SerializeToString())
        await called(address, f"{ADMIN}/DescribeTopic", b"\xff\xff")
        await called(address, "grpc.health.v1.Health/Check")
        await called(address, f"{ADMIN}/NoSuchMethod{id(address)}")
        await called(address, f"{ADMIN}/NoSuchMethod")
        others = GrpcOthers()
        with pytest.raises(NotFound):
            async for _ in others.stream(address, "PeekMessages", pb.PeekMessagesRequest(topic="t"), seconds=30):
                pass
        await others.close()

    assert asyncio.run(counted(9, calls=calls)) == {
        (f"{ADMIN}/DescribeTopic", "NOT_FOUND"): 2,
        (f"{ADMIN}/DescribeTopic", "UNAVAILABLE"): 1,
        (f"{ADMIN}/DescribeTopic", "UNKNOWN"): 1,
        (f"{ADMIN}/DescribeTopic", "INVALID_ARGUMENT"): 1,
        (f"{ADMIN}/PeekMessages", "NOT_FOUND"): 1,
        ("grpc.health.v1.Health/Check", "OK"): 1,
        ("(none)", "UNIMPLEMENTED"): 2,
    }


def test_what_a_gate_refuses_counts_too_and_makes_no_series_of_its_own() -> None:
    async def calls(address: str) -> None:
        await called(address, f"{ADMIN}/ListTopics")
        await called(address, "no.such/method")

    found = asyncio.run(counted(2, secret=ClusterSecret(b"s" * 32), calls=calls))
    assert found == {(f"{ADMIN}/ListTopics", "UNAUTHENTICATED"): 1, ("(none)", "UNAUTHENTICATED"): 1}


def test_a_stream_that_its_caller_leaves_counts_as_cancelled() -> None:
    async def calls(address: str) -> None:
        async with aio.insecure_channel(address) as channel:
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
            await watch.read()
            watch.cancel()

    assert asyncio.run(counted(1, calls=calls)) == {("grpc.health.v1.Health/Watch", "CANCELLED"): 1}
