"""Errors of another node's Admin service arrive as what they were, with and without TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.admin.peer_admins import GrpcOthers
from nsqha.admin.service import AdminServer
from nsqha.errors import LogCorrupt, NotFound, OutcomeUnknown, Unavailable
from nsqha.pb.v1 import admin_pb2 as pb
from nsqha.server.runtime import tls
from tests.unit.server.peers.test_calls import files, made


def served(
    scenario: Callable[[GrpcOthers, str], Any],
    topic: Callable[[str], Any],
    *,
    node: tls.ClusterTls | None = None,
    caller: tls.ClusterTls | None = None,
) -> None:
    """`scenario` with a way to an Admin service whose broker looks topics up by `topic`."""

    async def main() -> None:
        broker: Any = SimpleNamespace(
            cluster=None, log_source=None, topics=SimpleNamespace(topic=topic), endpoints=SimpleNamespace()
        )
        server = AdminServer(broker, "127.0.0.1:0", tls=files(node))
        await server.start()
        others = GrpcOthers(tls=files(caller))
        try:
            await scenario(others, server.address)
        finally:
            await others.close()
            await server.close()

    asyncio.run(main())


def failing(error: Exception) -> Callable[[str], Any]:
    def topic(name: str) -> Any:
        raise error

    return topic


@pytest.mark.parametrize("error", [NotFound("no t"), Unavailable("not now"), LogCorrupt("bad"), ValueError("odd")])
def test_errors_are_what_they_were(error: Exception) -> None:
    async def scenario(others: GrpcOthers, address: str) -> None:
        with pytest.raises(type(error), match=str(error)):
            await others.call(address, "DescribeTopic", pb.DescribeTopicRequest(topic="t"), seconds=5)
        with pytest.raises(type(error), match=str(error)):
            async for _ in others.stream(address, "PeekMessages", pb.PeekMessagesRequest(topic="t"), seconds=5):
                raise AssertionError("there is nothing to peek")

    served(scenario, failing(error))


def test_a_bug_over_there_is_of_unknown_outcome() -> None:
    async def scenario(others: GrpcOthers, address: str) -> None:
        with pytest.raises(OutcomeUnknown):
            await others.call(address, "Seek", pb.SeekRequest(topic="t"), seconds=5)

    served(scenario, failing(KeyError("oops")))


def test_nobody_there_means_that_nothing_was_sent() -> None:
    async def scenario(others: GrpcOthers, address: str) -> None:
        with pytest.raises(Unavailable, match="nothing was sent"):
            await others.call("127.0.0.1:1", "Seek", pb.SeekRequest(topic="t"), seconds=5)
        await others.close()
        with pytest.raises(Unavailable, match="stopping"):
            await others.call(address, "Seek", pb.SeekRequest(topic="t"), seconds=5)

    served(scenario, failing(NotFound("no t")))


@pytest.mark.parametrize("names", [("IP:127.0.0.1",), ("URI:nsqha:reader",), ("URI:nsqha:node/00000000000000cd",)])
def test_without_a_cluster_administration_wants_its_role_too(tmp_path: Path, names: tuple[str, ...]) -> None:
    asked: list[str] = []
    node, caller = made(tmp_path, "node1", "IP:127.0.0.1"), made(tmp_path, "caller", *names)

    async def refused(others: GrpcOthers, address: str) -> None:
        with pytest.raises(OutcomeUnknown, match="is no administrator's"):
            await others.call(address, "DescribeTopic", pb.DescribeTopicRequest(topic="t"), seconds=5)

    served(refused, asked.append, node=node, caller=caller)
    assert asked == []


def test_with_cluster_tls_the_node_shows_its_certificate(tmp_path: Path) -> None:
    node = made(tmp_path, "node1", "IP:127.0.0.1", "URI:nsqha:administrator")
    asked: list[str] = []

    def topic(name: str) -> Any:
        asked.append(name)
        raise NotFound("no t")

    async def known(others: GrpcOthers, address: str) -> None:
        with pytest.raises(NotFound, match="no t"):
            await others.call(address, "DescribeTopic", pb.DescribeTopicRequest(topic="t"), seconds=5)

    async def stranger(others: GrpcOthers, address: str) -> None:
        with pytest.raises(Unavailable):
            await others.call(address, "DescribeTopic", pb.DescribeTopicRequest(topic="t"), seconds=5)

    served(known, topic, node=node, caller=node)
    served(stranger, topic, node=node)
    assert asked == ["t"]
