"""The channels of a topic in a cluster: whose leaders have to follow a change."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsqha.election.memory import MemoryStore
from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord, TopicSettings, Versioned
from nsqha.errors import NotFound, Unavailable
from nsqha.server.routing.leaders import Administration
from nsqha.server.runtime.metadata import NodeMetadata as RealMetadata
from nsqha.server.topics.channel_leaders import LedChannels
from tests.unit.server.replica_rig import run


class NodeMetadata:
    """One record, and who is alive."""

    def __init__(self, record: TopicRecord, nodes: dict[int, NodeInfo]) -> None:
        self.records = SimpleNamespace(topic=lambda name: Versioned(record, 2), nodes=lambda: nodes)

    async def read(self, read: Callable[[], Any]) -> Any:
        return read()


def test_leaders_of_other_nodes_are_those_of_the_record_as_it_is_now() -> None:
    metas = {n: PartitionMeta(leader=leader) for n, leader in enumerate((1, 2, 0, 9))}
    metas[4] = PartitionMeta(leader=2, successor=3)  # it leads until the other one does
    nodes = {n: NodeInfo(n, grpc_address=f"n{n}", peer_address=f"n{n}") for n in (1, 2, 3)}

    async def scenario() -> None:
        metadata = cast(Any, NodeMetadata(TopicRecord("t", 7, 3, partitions=metas), nodes))
        led = LedChannels(cast(Any, None), metadata, node_uid=1, wait_seconds=5)  # no topic is looked at here
        assert await led.led_elsewhere("t", 7) == {1: "n2", 4: "n2"}
        with pytest.raises(NotFound):
            await led.led_elsewhere("t", 8)

    run(scenario)


class Emptied:
    """A partition that is led here: how often it was emptied; with `error` its log takes nothing."""

    begins = "the leader has only just been elected"

    def __init__(self, number: int, error: Exception | None = None) -> None:
        self.number = number
        self.serving = True
        self.times = 0
        self.cursors = SimpleNamespace(requests=SimpleNamespace(topic_empty=self._empty))
        self._error = error

    def _empty(self) -> None:
        self.times += 1

    async def commit_events(self) -> None:
        if self._error is not None:
            raise self._error


def test_what_is_in_no_record_is_done_and_reported_for_each_asked_partition() -> None:
    async def scenario() -> None:
        led = [Emptied(0), Emptied(1), Emptied(2, Unavailable("closed")), Emptied(5)]
        topic = SimpleNamespace(led=led, name="t", record=SimpleNamespace(uid=7), wake=lambda channel: None)
        topics = cast(Any, SimpleNamespace(of_uid=lambda name, uid: topic))
        channels = LedChannels(topics, cast(Any, None), node_uid=1, wait_seconds=5)

        async def empty(numbers: list[int] | None = None) -> list[int]:
            return await channels.carry_out("t", 7, Administration.EMPTY_TOPIC, "", numbers)

        assert await empty([1, 2, 3]) == [1]
        assert [partition.times for partition in led] == [0, 1, 1, 0]
        for failing in ([2, 3], None):
            with pytest.raises(Unavailable):
                await empty(failing)
        led[3].serving = False
        assert await empty([0]) == [0]
        with pytest.raises(Unavailable):
            await empty([0, 5])

    run(scenario)


def test_what_a_node_believes_to_be_so_already_is_looked_at_in_the_store() -> None:
    """Another node has changed it back since: a pause that was answered would not be one."""

    async def scenario() -> None:
        async def at_once(call: Callable[[], Any]) -> Any:
            return call()

        store = MemoryStore(random.Random(1))
        journal = SimpleNamespace(node=SimpleNamespace(stage_revision=lambda revision: None))
        metadata = RealMetadata(store.records, at_once, cast(Any, journal), lambda error: None)
        made = store.records.create_topic("t", TopicSettings())
        paused = await metadata.change_channels(made, lambda channels: channels.with_topic_paused(True))
        await metadata.change_channels(paused, lambda channels: channels.with_topic_paused(False))
        again = await metadata.change_channels(paused, lambda channels: channels.with_topic_paused(True))
        now = store.records.topic("t")
        assert now is not None and now.record.channels.paused and again.version == now.version
        assert await metadata.change_channels(again, lambda channels: channels) == now, "nothing to do"

    run(scenario)
