"""A topic takes messages before lookup daemons say which channels it begins with, and those get every one of them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nsqha import hot
from nsqha.errors import AppendFailed
from nsqha.server.node.broker import Broker
from nsqha.server.runtime.disk import DelayedCall
from nsqha.server.topics import first_channels
from tests.unit.server.broker_rig import Gate, led, on_a_broker, running, start, subscribed, until


class Daemons:
    """An `Announcer` whose daemons know some channels, and answer when they are let."""

    def __init__(self, *known: str, answer: bool = True) -> None:
        self.known = list(known)
        self.may_know = True
        self.asked: list[str] = []
        self.registered: dict[str, set[str]] = {}
        self.answer = asyncio.Event()
        if answer:
            self.answer.set()

    def changed(self, topic: str, channels: object) -> None:
        self.registered[topic] = set(channels or ())  # type: ignore[call-overload]

    def channels_changed(self, topic: str, channels: dict[str, bool]) -> None:
        self.registered[topic] |= {channel for channel, there in channels.items() if there}

    async def known_channels(self, topic: str, *, patient: bool = False) -> list[str]:
        self.asked.append(topic)
        await self.answer.wait()
        return self.known


def announce(broker: Broker, daemons: Daemons) -> None:
    """As a start does."""
    broker.topics.announcer = daemons  # type: ignore[assignment]
    broker.topics.first_channels.begin_all()


def unasked(broker: Broker, topic: str = "t") -> bool:
    """What the record on disk says."""
    found = broker.parts.store.records.topic(topic)
    assert found is not None
    return found.record.channels.unasked


def frame(body: str) -> bytes:
    return hot.frame(body.encode())


async def until_read(broker: Broker, channel: str, *bodies: str) -> None:
    """A consumer of the channel gets exactly these."""
    reader = await subscribed(broker, "t", channel, rdy=10)
    await until(lambda: len(reader.wire.bodies) >= len(bodies))  # type: ignore[attr-defined]
    assert reader.wire.bodies == [body.encode() for body in bodies]  # type: ignore[attr-defined]


@on_a_broker
async def test_a_publish_is_answered_before_the_daemons_are(broker: Broker):
    daemons = Daemons("archive", "metrics", answer=False)
    announce(broker, daemons)
    await broker.publishing.publish("t", frame("one"))
    await until(lambda: daemons.asked)
    await broker.publishing.publish("t", frame("two"))
    assert unasked(broker) and broker.topics["t"].channel_names() == []
    daemons.answer.set()
    await until(lambda: not unasked(broker))
    await broker.publishing.publish("t", frame("three"))
    for channel in ("archive", "metrics"):
        await until_read(broker, channel, "one", "two", "three")
    assert daemons.asked == ["t"] and daemons.registered == {"t": {"archive", "metrics"}}


@on_a_broker
async def test_daemons_hear_of_a_topic_behind_its_first_answer(broker: Broker, monkeypatch: pytest.MonkeyPatch):
    daemons, later = Daemons(), list[Callable[[], None]]()
    announce(broker, daemons)
    with monkeypatch.context() as patch:
        patch.setattr(broker.parts.disk, "later", lambda seconds, call: later.append(call) or DelayedCall(0.0, call))
        await broker.publishing.publish("t", frame("one"))
    assert not daemons.registered
    for call in later:
        call()
    assert daemons.registered == {"t": set()}


@pytest.mark.parametrize("sync", ["always", "interval"])
def test_what_a_killed_life_had_still_to_ask_the_next_one_asks(tmp_path: Path, sync: str):
    async def story():
        async with running(tmp_path / "life", sync=sync) as broker:
            announce(broker, Daemons(answer=False))
            await broker.publishing.publish("t", frame("one"))
            shutil.copytree(tmp_path / "life", tmp_path / "next")  # as kill -9 leaves it
            broker.topics.announcer.answer.set()  # type: ignore[attr-defined]
        async with running(tmp_path / "next", sync=sync) as broker:
            await broker.publishing.publish("t", frame("two"))
            assert unasked(broker)
            announce(broker, Daemons("archive"))
            await until(lambda: not unasked(broker))
            await until_read(broker, "archive", "one", "two")

    asyncio.run(story())


def test_a_life_that_is_killed_between_the_record_and_the_logs_has_the_channels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def story():
        async with running(tmp_path / "life") as broker:
            announce(broker, Daemons("archive"))
            await broker.publishing.publish("t", frame("one"))
            held = asyncio.Event()
            with monkeypatch.context() as patch:
                patch.setattr(type(broker.topics["t"]), "reconcile", lambda topic: held.wait())
                await until(lambda: not unasked(broker))
                shutil.copytree(tmp_path / "life", tmp_path / "next")
                held.set()
        async with running(tmp_path / "next") as broker:
            await until_read(broker, "archive", "one")

    asyncio.run(story())


@pytest.mark.parametrize("channel", ["mine", "mine#ephemeral", "archive"])
@on_a_broker
async def test_a_channel_that_is_made_meanwhile_takes_nothing_from_them(broker: Broker, channel: str):
    daemons = Daemons("archive", answer=False)
    announce(broker, daemons)
    await broker.publishing.publish("t", frame("one"))
    subscribing = asyncio.ensure_future(subscribed(broker, "t", channel, rdy=10))
    await until(lambda: daemons.asked)
    assert not broker.topics["t"].channel_names()
    daemons.answer.set()
    reader = await subscribing
    assert set(broker.topics["t"].channel_names()) == {"archive", channel}
    if channel != "mine#ephemeral":  # which came later, and is not the first one
        await until(lambda: reader.wire.bodies == [b"one"])  # type: ignore[attr-defined]
    if channel != "archive":
        await until_read(broker, "archive", "one")


@on_a_broker
async def test_a_first_consumer_costs_no_record_more_than_its_channel_does(broker: Broker):
    daemons = Daemons("archive", "metrics")
    announce(broker, daemons)
    before = broker.parts.store.records.revision
    await subscribed(broker, "t", "mine")
    assert broker.parts.store.records.revision == before + 2, "the topic, and its three channels"
    assert broker.topics["t"].channel_names() == ["archive", "metrics", "mine"] and daemons.asked == ["t"]


@on_a_broker
async def test_who_makes_a_topic_by_name_hears_when_its_channels_are_there(broker: Broker):
    announce(broker, Daemons("archive"))
    await broker.topics.create_topic("t")
    assert broker.topics["t"].serves("archive")


@on_a_broker
async def test_an_empty_of_the_topic_leaves_what_those_channels_are_to_get(broker: Broker):
    announce(broker, Daemons("archive"))
    await broker.publishing.publish("t", frame("one"))
    await broker.channels.empty_topic("t")
    await until_read(broker, "archive", "one")


@on_a_broker
async def test_a_topic_deleted_meanwhile_stays_deleted(broker: Broker):
    daemons = Daemons("archive", answer=False)
    announce(broker, daemons)
    await broker.publishing.publish("t", frame("one"))
    await until(lambda: daemons.asked)
    deleting = asyncio.ensure_future(broker.topics.delete_topic("t"))
    daemons.answer.set()
    await deleting
    assert "t" not in broker.topics and broker.parts.store.records.topic("t") is None
    await broker.publishing.publish("t", frame("two"))
    await until(lambda: not unasked(broker))
    await until_read(broker, "archive", "two")


@on_a_broker
async def test_an_ephemeral_topic_which_keeps_little_is_made_when_they_have_answered(broker: Broker):
    announce(broker, Daemons("archive"))
    await broker.topics.ensure_topic("t#ephemeral")
    assert broker.topics["t#ephemeral"].serves("archive")


def test_daemons_that_know_none_are_asked_once(tmp_path: Path):
    async def story():
        async with running(tmp_path) as broker:
            announce(broker, Daemons())
            await broker.publishing.publish("t", frame("one"))
            await until(lambda: not unasked(broker))
        async with running(tmp_path) as broker:
            daemons = Daemons("late")
            announce(broker, daemons)
            await until_read(broker, "mine", "one")
            assert daemons.asked == [] and broker.topics["t"].channel_names() == ["mine"]

    asyncio.run(story())


@on_a_broker
async def test_channels_that_a_full_disk_refused_come_when_it_has_room(broker: Broker, monkeypatch: pytest.MonkeyPatch):
    announce(broker, Daemons("archive"))
    monkeypatch.setattr(first_channels, "ASK_SECONDS", (0.01, 0.01))
    await broker.publishing.publish("t", frame("one"))
    records = broker.parts.store.records
    replace = records.replace
    gate = Gate.at(records, "replace", error=AppendFailed("disk full"))
    await gate.until_reached()
    records.replace = replace  # type: ignore[method-assign]
    await until(lambda: not unasked(broker))
    await until_read(broker, "archive", "one")


def test_a_node_without_daemons_marks_nothing(tmp_path: Path):
    async def story():
        broker = await start(tmp_path)
        await broker.publishing.publish("t", frame("one"))
        assert not unasked(broker)
        await broker.stop()

    asyncio.run(story())


def test_retention_leaves_what_they_are_to_get(tmp_path: Path):
    async def story():
        async with running(tmp_path, retention_ns=0, retention_bytes=0) as broker:
            daemons = Daemons("archive", answer=False)
            announce(broker, daemons)
            for body in ("one", "two"):
                await broker.publishing.publish("t", frame(body))
                led(broker).files.roll()
                await led(broker).files.wait()
            for _ in range(5):
                led(broker).keep_house(broker.now())
                await led(broker).files.wait()
            assert len(led(broker).log.pairs) == 3
            daemons.answer.set()
            await until_read(broker, "archive", "one", "two")

    asyncio.run(story())
