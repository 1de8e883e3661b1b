"""Statistics for scrapes are taken topic by topic: others have their turn in between, whatever they do with it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from nsqha import hot
from nsqha.server.node import snapshot
from nsqha.server.node.broker import Broker
from tests.unit.server.broker_rig import on_a_broker


@on_a_broker
async def test_they_are_the_same_and_others_have_their_turn_between_topics(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for topic in "abcd":
        await broker.publishing.publish(topic, hot.frame(topic.encode()))
    whole, turns = broker.snapshot(clients=False), 0
    monkeypatch.setattr(snapshot, "TURN_SECONDS", 0.0)
    taken = asyncio.ensure_future(broker.snapshot_in_turns())
    while not taken.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= len(whole.topics) == 4
    assert (await taken).topics == whole.topics
    (one,) = (await broker.snapshot_in_turns("b")).topics
    assert one.topic_name == "b"
    assert replace(await taken, topics=(), node=whole.node) == replace(whole, topics=())


@on_a_broker
async def test_a_topic_that_is_deleted_meanwhile_is_left_out(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    for topic in "abc":
        await broker.publishing.publish(topic, hot.frame(b"x"))
    monkeypatch.setattr(snapshot, "TURN_SECONDS", 0.0)
    held = asyncio.Event()
    sleep = asyncio.sleep

    async def until_deleted(seconds: float) -> None:
        await (held.wait() if not seconds else sleep(seconds))

    monkeypatch.setattr(snapshot.asyncio, "sleep", until_deleted)
    taken = asyncio.ensure_future(broker.snapshot_in_turns())
    await sleep(0.01)
    await broker.topics.delete_topic("c")
    held.set()
    assert [topic.topic_name for topic in (await taken).topics] == ["a", "b"]
