"""Settings that change while a topic lives: what fits, what follows for partitions, and partitions that are added."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nsqha import hot
from nsqha.election import rules
from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord, TopicSettings
from nsqha.errors import AppendFailed, Conflict, Unavailable
from nsqha.server.node.broker import Broker
from nsqha.server.topics import settings
from tests.unit.server.broker_rig import Gate, on_a_broker, running, subscribed, until


def record(partitions: int = 2, replicas: int = 3, **chosen: Any) -> TopicRecord:
    nodes = tuple(range(1, replicas + 1))
    metas = {
        n: PartitionMeta(leader=1, isr=dict.fromkeys(nodes, 9), replicas=nodes, min_isr=2) for n in range(partitions)
    }
    return TopicRecord("t", 7, 3, TopicSettings(partitions=partitions, **chosen), partitions=metas)


def floors(found: TopicRecord, **chosen: Any) -> list[int]:
    metas = rules.with_min_isr(found, replace(found.settings, **chosen))
    return [meta.min_isr for meta in metas.values()]


# ---- pure


def test_partitions_only_grow() -> None:
    assert rules.changed_settings(record(2), {"partitions": 5}).partitions == 5
    assert rules.changed_settings(record(2), {"partitions": 2}).partitions == 2
    with pytest.raises(ValueError, match="topic t has 2 partitions; they cannot become 1, only more"):
        rules.changed_settings(record(2), {"partitions": 1})
    with pytest.raises(ValueError, match="partitions is 1024"):
        rules.changed_settings(record(2), {"partitions": 1024})


def test_min_isr_is_at_most_replicas() -> None:
    with pytest.raises(ValueError, match="min_isr is 3; it cannot be more than replicas, 2"):
        rules.changed_settings(record(replicas=3), {"replicas": 2, "min_isr": 3})
    with pytest.raises(ValueError, match="min_isr is 4; it cannot be more than replicas, 3 unless they are set"):
        rules.changed_settings(record(), {"min_isr": 4})
    assert rules.changed_settings(record(), {"replicas": 4, "min_isr": 4}).min_isr == 4


def test_the_floor_follows_what_is_there() -> None:
    assert floors(record(), min_isr=3) == [3, 3]
    assert floors(record(), min_isr=1) == [1, 1]
    assert floors(record(), min_isr=None) == [2, 2]
    assert floors(record(replicas=1), replicas=3, min_isr=3) == [1, 1], "until the others are there"
    assert floors(record(replicas=1), replicas=3) == [1, 1]


def said(hosts: int, **chosen: Any) -> str:
    nodes = {n: NodeInfo(n) for n in range(1, hosts + 1)}
    return "; ".join(settings.remarks(TopicSettings(**chosen), nodes))


def test_what_is_not_obvious_is_said() -> None:
    assert said(3) == said(3, replicas=3, min_isr=3) == said(1) == ""
    assert (
        said(3, replicas=5)
        == "replicas is 5, and there are 3 hosts that can have them; the rest is added when nodes come"
    )
    assert "1 host that" in said(1, replicas=3)
    assert "acknowledges nothing until it has 4 replicas" in said(3, replicas=5, min_isr=4)
    assert settings.remarks_alone(TopicSettings()) == []
    assert "alone" in settings.remarks_alone(TopicSettings(replicas=2))[0]


# ---- a node that is alone


async def publish(broker: Broker, n: int) -> list[bytes]:
    """Each over a publisher of its own, so that all partitions get some."""
    bodies = [b"%d" % i for i in range(n)]
    for body in bodies:
        await broker.publishing.publish("t", hot.frame(body))
    return bodies


def test_partitions_are_added_alone(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path) as broker:
            reader = await subscribed(broker, "t", "c", rdy=100)
            passing = await subscribed(broker, "t", "e#ephemeral", rdy=100)
            first = await publish(broker, 2)
            await broker.topics.change_settings("t", {"partitions": 3})
            topic = broker.topics.topic("t")
            assert [p.number for p in topic.led] == [0, 1, 2]
            more = await publish(broker, 9)
            assert all(p.log.end.offset for p in topic.led)
            for consumer in (reader, passing):
                await until(lambda c=consumer: sorted(c.wire.bodies) == sorted(first + more))  # type: ignore[misc]
            assert topic.record.settings.partitions == 3
        async with running(tmp_path) as broker:
            topic = broker.topics.topic("t")
            assert [p.number for p in topic.led] == [0, 1, 2]
            assert all("c" in p.cursors.channels for p in topic.led)
            late = await subscribed(broker, "t", "c", rdy=100)
            await until(lambda: sorted(late.wire.bodies) == sorted(first + more))

    asyncio.run(story())


@on_a_broker
async def test_a_partition_that_could_not_be_made_is_made_by_asking_again(broker: Broker) -> None:
    await publish(broker, 1)
    create = broker.parts.opener.create
    Gate.at(broker.parts.opener, "create", error=AppendFailed("disk full"), after=True)
    with pytest.raises(Unavailable, match=r"say 2 partitions now, but \[1\] could not be made: disk full"):
        await broker.topics.change_settings("t", {"partitions": 2})
    topic = broker.topics.topic("t")
    assert [p.number for p in topic.led] == [0]
    await publish(broker, 1)
    broker.parts.opener.create = create  # type: ignore[method-assign]
    await broker.topics.change_settings("t", {"partitions": 2})
    assert [p.number for p in topic.led] == [0, 1]
    await publish(broker, 4)
    assert all(p.log.end.offset for p in topic.led)


@on_a_broker
async def test_what_an_earlier_attempt_wrote_is_not_kept(broker: Broker) -> None:
    await publish(broker, 1)
    topic = broker.topics.topic("t")
    names = topic.channel_names

    def failing() -> list[str]:
        raise Unavailable("too late")

    topic.channel_names = failing  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="too late"):
        await broker.topics.change_settings("t", {"partitions": 2})
    topic.channel_names = names  # type: ignore[method-assign]
    await broker.topics.change_settings("t", {"partitions": 2})
    log = topic.led[1].log
    assert len(list(log.entries(log.start.log_id, log.end.log_id))) == 1, "one epoch start"


@on_a_broker
async def test_publishers_choose_anew_among_all(broker: Broker) -> None:
    await publish(broker, 1)
    topic = broker.topics.topic("t")
    seen: list[int] = []
    connection = Mock()
    connection.publisher.forget_targets = lambda: seen.append(len(topic.led))
    broker.connections.opened(connection)
    await broker.topics.change_settings("t", {"partitions": 2})
    connection.consuming.consumer = None
    broker.connections.closed(connection)
    assert seen[-1] == 2


@on_a_broker
async def test_a_lost_race_is_tried_again(broker: Broker) -> None:
    await publish(broker, 1)
    put = broker.parts.store.records.replace
    races = [1, 1]

    def replace_later(*args: Any, **kwargs: Any) -> Any:
        if races:
            races.pop()
            raise Conflict("somebody was faster")
        return put(*args, **kwargs)

    broker.parts.store.records.replace = replace_later  # type: ignore[method-assign]
    await broker.topics.change_settings("t", {"partitions": 2})
    assert len(broker.topics.topic("t").led) == 2
    assert not races


def test_the_next_start_makes_what_only_the_record_has(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path) as broker:
            await publish(broker, 1)
            await broker.channels.create("t", "c")
            Gate.at(broker.parts.opener, "create", error=AppendFailed("disk full"))
            with pytest.raises(Unavailable):
                await broker.topics.change_settings("t", {"partitions": 2})
        async with running(tmp_path) as broker:
            led = broker.topics.topic("t").led
            assert [p.number for p in led] == [0, 1]
            assert all("c" in p.cursors.channels for p in led)

    asyncio.run(story())


@on_a_broker
async def test_two_changes_at_once_are_both_made(broker: Broker) -> None:
    await publish(broker, 1)
    await asyncio.gather(
        broker.topics.change_settings("t", {"partitions": 2}),
        broker.topics.change_settings("t", {"retention_ms": 5000}),
        broker.channels.create("t", "c"),
    )
    topic = broker.topics.topic("t")
    assert (topic.record.settings.partitions, topic.record.settings.retention_ms) == (2, 5000)
    assert all("c" in p.cursors.channels for p in topic.led)
