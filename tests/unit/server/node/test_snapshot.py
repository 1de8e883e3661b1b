"""Statistics for scrapes and /stats are taken in turns: others have theirs in between, whatever they do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nsqha import hot
from nsqha.election.model import TopicSettings
from nsqha.server.http.metrics import turns
from nsqha.server.node.broker import Broker
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


@contextmanager
def held_between_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A snapshot in turns stops after its first step, until the function is called."""
    held = asyncio.Event()

    with monkeypatch.context() as patch:
        patch.setattr(turns, "TURN_SECONDS", 0.0)
        patch.setattr(turns, "asyncio", SimpleNamespace(sleep=lambda _: held.wait()))
        yield held.set
