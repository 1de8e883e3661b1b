"""Statistics for scrapes and /stats are taken in turns: others have theirs in between, whatever they do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha import hot
from nsqha.cursor.deferred.deferred_set import Deferred
from nsqha.election.model import TopicSettings
from nsqha.server.http.metrics import turns
from nsqha.server.node import snapshot
from nsqha.server.node.broker import Broker
from nsqha.server.partition.topic import Topic
from tests.unit.cursor.counted_table import ENOUGH, ROWS, CountedTable, store_of
from tests.unit.server.broker_rig import on_a_broker


@on_a_broker
@pytest.mark.parametrize("clients", [False, True])
async def test_they_are_the_same_and_others_have_their_turn_between_partitions(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, clients: bool
) -> None:
    for topic in "abcd":
        await broker.topics.create_topic(topic, TopicSettings(partitions=4))
        await broker.channels.create(topic, "c")
    whole, found = broker.snapshot(clients=clients), 0
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.0)
    taken = asyncio.ensure_future(broker.snapshot_in_turns("", clients))
    while not taken.done():
        await asyncio.sleep(0)
        found += 1
    assert found >= 4 * (4 + 4)  # topics, their partitions, and cursors of a channel in each
    assert (await taken).topics == whole.topics
    (one,) = (await broker.snapshot_in_turns("b")).topics
    assert one.topic_name == "b"
    assert replace(await taken, topics=(), node=whole.node) == replace(whole, topics=())


@on_a_broker
async def test_a_topic_that_is_deleted_meanwhile_is_left_out(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    for topic in "abc":
        await broker.publishing.publish(topic, hot.frame(b"x"))
    with held_between_turns(monkeypatch) as go_on:
        taken = asyncio.ensure_future(broker.snapshot_in_turns())
        await asyncio.sleep(0.01)
        await broker.topics.delete_topic("c")
        go_on()
    assert [topic.topic_name for topic in (await taken).topics] == ["a", "b"]


@on_a_broker
async def test_what_a_partition_counted_is_in_the_sum_once_when_it_is_not_led_any_more(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.topics.create_topic("t", TopicSettings(partitions=2))
    await broker.channels.create("t", "c")
    for partition in (0, 1):
        await broker.publishing.publish("t", hot.frame(b"x"), partition=partition)
    topic = broker.topics["t"]
    with held_between_turns(monkeypatch) as go_on:
        taken = asyncio.ensure_future(broker.snapshot_in_turns())
        await asyncio.sleep(0.01)  # the channel's cursor in the first partition has been seen
        topic.remove_led(topic.led[0], "moved")
        go_on()
    (found,) = (await taken).topics
    (channel,) = found.channels
    assert [cursor.partition for cursor in channel.cursors] == [p.partition for p in found.partitions] == [1]
    assert found.message_count == channel.message_count == 2


@on_a_broker
async def test_a_node_that_does_not_lead_shows_whether_a_channel_is_paused(broker: Broker) -> None:
    topic = await with_a_channel(broker)
    await broker.channels.create("t", "other")
    await broker.channels.pause("t", "c", True)
    topic.remove_led(topic.led[0], "moved")
    (found,) = broker.snapshot().topics
    assert {channel.channel_name: channel.paused for channel in found.channels} == {"c": True, "other": False}


async def with_a_channel(broker: Broker) -> Topic:
    await broker.topics.create_topic("t", TopicSettings())
    await broker.channels.create("t", "c")
    return broker.topics["t"]


@contextmanager
def many_deferred(topic: Topic) -> Iterator[Callable[[], CountedTable]]:
    """The function gives the channel other deferred messages, the reader in the middle of them. Await nothing
    meanwhile: the broker's own cache would not know them."""
    channel = topic.led[0].cursors.channels["c"]
    own = channel.committed.deferred

    def other_ones() -> CountedTable:
        held, table = store_of([Deferred(n, 1 << 61, 1) for n in range(40 * ROWS)])
        channel.committed.deferred, channel.committed.floor = held, 20 * ROWS
        channel.cursor.reload()
        table.take_read()
        return table

    yield other_ones
    channel.committed.deferred, channel.committed.floor = own, 0
    channel.cursor.reload()


@on_a_broker
async def test_what_must_be_counted_for_figures_is_counted_in_steps(broker: Broker) -> None:
    with many_deferred(await with_a_channel(broker)) as other_ones:
        table = other_ones()
        read = [table.take_read() for _ in snapshot._topics_in_steps(broker, "t", False)]
        assert len(read) > 20 and max(read) <= ENOUGH
        (found,) = broker.snapshot().topics
        assert found.channels[0].deferred_count == 40 * ROWS


@on_a_broker
@pytest.mark.parametrize("why", ["deleted", "not led"])
async def test_what_is_not_there_any_more_is_not_counted_on(broker: Broker, why: str) -> None:
    topic = await with_a_channel(broker)
    led, deliveries = topic.led, dict(topic.led[0].deliveries)
    with many_deferred(topic) as other_ones:
        table = other_ones()
        steps = snapshot._topics_in_steps(broker, "t", False)
        next(steps)
        assert 0 < table.take_read() <= ENOUGH
        if why == "deleted":
            del led[0].deliveries["c"]
        else:
            topic.led = ()
        assert sum(1 for _ in steps) < 5 and table.take_read() == 0
        topic.led = led
        led[0].deliveries.update(deliveries)


@on_a_broker
async def test_a_topic_that_is_looked_at_in_one_turn_in_the_end_is_counted_before(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, tables, real = await with_a_channel(broker), [], snapshot.partition_stats
    with many_deferred(topic) as other_ones:

        def changes_hands(*args: Any) -> Any:
            topic.led = (*topic.led,)
            tables.append(other_ones())
            return real(*args)

        monkeypatch.setattr(snapshot, "partition_stats", changes_hands)
        tables.append(other_ones())
        read = [sum(table.take_read() for table in tables) for _ in snapshot._topics_in_steps(broker, "t", False)]
        assert len(tables) == 1 + snapshot.LOOKS_MAX + 1
        assert max(read) <= 2 * ENOUGH


@contextmanager
def held_between_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A snapshot in turns stops after its first step, until the function is called."""
    held = asyncio.Event()

    with monkeypatch.context() as patch:
        patch.setattr(turns, "TURN_SECONDS", 0.0)
        patch.setattr(turns, "asyncio", SimpleNamespace(sleep=lambda _: held.wait()))
        yield held.set
