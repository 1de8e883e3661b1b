"""Reader channels on a node: how they are made and moved, and that no consumer gets a place there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nsqha.commitlog.log import LogLimits
from nsqha.election.model import ChannelList, TopicSettings
from nsqha.errors import LimitReached, NotFound, OutcomeUnknown, Unavailable, WrongKind
from nsqha.server.node.broker import Broker
from nsqha.server.partition.retention import AbandonedPolicy
from nsqha.server.runtime.tasks import StillUnderWay
from nsqha.server.safe_mode.rebuilding import channels_of
from nsqha.server.topics import channel_list, reader_channels
from tests.unit.server.broker_rig import consumer, led, on_a_broker, running, subscribed, until
from tests.unit.server.node.test_broker import ONE
from tests.unit.server.partition.test_retention import fill, keep_house
from tests.unit.server.shell_rig import PartitionRig


async def published(broker: Broker, count: int = 5) -> None:
    for _ in range(count):
        await broker.publishing.publish("t", ONE)


async def commit(broker: Broker, offset: int, *, back: bool = False) -> object:
    return (await broker.channels.readers.commit("t", "spark", {0: offset}, back=back))[0]


@on_a_broker
async def test_a_first_commit_makes_the_channel_and_later_ones_move_it(broker: Broker) -> None:
    await published(broker)
    assert await commit(broker, 2) == 2
    assert broker.topics.topic("t").record.channels.channels["spark"].reader
    assert [await commit(broker, offset) for offset in (1, 2, 4, 99)] == [2, 2, 4, 5]
    assert await commit(broker, 3, back=True) == 3


@on_a_broker
async def test_a_commit_that_says_nothing_new_writes_nothing(broker: Broker) -> None:
    await published(broker)
    await commit(broker, 2)
    end = led(broker).log.end
    for back in (False, True):
        assert await commit(broker, 2, back=back) == 2
    assert led(broker).log.end == end


@on_a_broker
async def test_a_new_channel_begins_at_the_pump_and_back_takes_it_to_the_reader(broker: Broker) -> None:
    await published(broker)
    await broker.channels.create("t", "consumers")
    await published(broker)
    assert await commit(broker, 7, back=True) == 7
    assert await commit(broker, 1, back=True) == 1


@on_a_broker
async def test_only_partitions_led_here_are_moved_and_one_without_an_epoch_says_so(broker: Broker) -> None:
    await published(broker)
    await commit(broker, 1)
    led(broker).life.serving = False
    moved = await broker.channels.readers.commit("t", "spark", {0: 2, 9: 4}, back=False)
    assert list(moved) == [0] and isinstance(moved[0], Unavailable)


@on_a_broker
async def test_a_partition_that_commits_nothing_keeps_nobody_from_the_others(broker: Broker, monkeypatch: Any) -> None:
    monkeypatch.setattr(reader_channels, "MOVE_SECONDS", 0.1)
    topic = await broker.topics.ensure_topic("t", TopicSettings(partitions=2))
    while not all(partition.log.end.offset for partition in topic.led):
        await broker.publishing.publish("t", ONE)
    await broker.channels.readers.ensure("t", "spark")
    await broker.channels.readers.commit("t", "spark", {0: 0, 1: 0}, back=True)
    stuck, events = topic.led[0], topic.led[0].commit_events
    calls: list[asyncio.Future[None]] = []

    def never() -> asyncio.Future[None]:
        calls.append(broker.parts.loop.create_future())
        return calls[-1]

    monkeypatch.setattr(stuck, "commit_events", never)
    waiting = [asyncio.create_task(broker.channels.readers.commit("t", "spark", {0: 1}, back=False)) for _ in range(3)]
    while not calls:
        await asyncio.sleep(0)
    assert await broker.channels.readers.commit("t", "spark", {1: 1}, back=False) == {1: 1}
    outcomes = [(await task)[0] for task in waiting]
    assert [type(outcome) for outcome in outcomes] == [OutcomeUnknown, StillUnderWay, StillUnderWay]
    assert len(calls) == 1, "of those who come back none queues another move"
    monkeypatch.setattr(stuck, "commit_events", events)
    calls[0].set_result(None)
    assert await broker.channels.readers.commit("t", "spark", {0: 1, 1: 1}, back=False) == {0: 1, 1: 1}


@on_a_broker
async def test_another_life_of_the_topic_is_not_moved(broker: Broker) -> None:
    await published(broker)
    uid = broker.topics.topic("t").record.uid
    await broker.topics.delete_topic("t")
    await published(broker)
    with pytest.raises(WrongKind, match=f"deleted and made again: .* {uid:016x} is meant"):
        await broker.channels.readers.commit("t", "spark", {0: 2}, back=True, topic_uid=uid)
    assert not broker.topics.topic("t").has_channel("spark")
    now = broker.topics.topic("t").record.uid
    assert await broker.channels.readers.commit("t", "spark", {0: 2}, back=True, topic_uid=now) == {0: 2}


@on_a_broker
async def test_a_topic_has_so_many_reader_channels_and_no_more(broker: Broker, monkeypatch: Any) -> None:
    monkeypatch.setattr(channel_list, "READERS_MAX", 2)
    await published(broker)
    await broker.channels.create("t", "consumers")
    for name in ("a", "b", "a"):
        await broker.channels.readers.ensure("t", name)
    with pytest.raises(LimitReached, match="topic t has 2 reader channels, as many as there may be"):
        await broker.channels.readers.commit("t", "c", {0: 0}, back=False)
    await broker.channels.create("t", "more-consumers")
    await broker.channels.delete("t", "b")
    await broker.channels.readers.ensure("t", "c")


@on_a_broker
async def test_a_channel_of_consumers_is_not_moved_by_readers(broker: Broker) -> None:
    await published(broker)
    await broker.channels.create("t", "spark")
    with pytest.raises(WrongKind, match="channel spark of topic t is one for consumers"):
        await commit(broker, 2)
    assert led(broker).cursors.channels["spark"].committed.floor == 0


@on_a_broker
async def test_consumers_get_no_place_at_a_readers_channel(broker: Broker) -> None:
    await published(broker)
    await broker.channels.readers.ensure("t", "spark")
    why = "channel spark of topic t is a reader's: it is moved by nsqha spark, not by consumers"
    for asked in (
        broker.subscriptions.subscribe(consumer("t", "spark")),
        broker.channels.create("t", "spark"),
        broker.channels.ensure_here(broker.topics.topic("t"), "spark"),
    ):
        with pytest.raises(WrongKind, match=why):
            await asked
    late = consumer("t", "spark")
    broker.topics.topic("t").attach(late)  # it was let in before that was known
    assert not late.subscriptions and not led(broker).deliveries["spark"].consumers


@on_a_broker
async def test_of_two_who_make_a_channel_of_either_kind_at_once_one_is_refused(broker: Broker) -> None:
    await published(broker)
    asked = [broker.channels.readers.ensure("t", "spark"), broker.channels.create("t", "spark")]
    done = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(outcome) for outcome in done] == [type(None), WrongKind]


@on_a_broker
async def test_who_makes_a_channel_that_another_node_made_for_a_reader_hears_of_it(broker: Broker) -> None:
    """The record has it, and this node has not seen that yet."""
    await published(broker)
    topic = broker.topics.topic("t")
    before = topic.versioned
    await broker.channels.readers.ensure("t", "spark")
    topic.versioned = before
    led(broker).cursors.channels.clear()
    led(broker).deliveries.clear()
    with pytest.raises(WrongKind):
        await broker.channels.create("t", "spark")


@on_a_broker
async def test_consumers_of_a_channel_that_is_made_anew_for_a_reader_are_closed(broker: Broker) -> None:
    await published(broker)
    reader = await subscribed(broker, "t", "spark")
    partition = led(broker)
    changed = broker.topics.topic("t").record.channels.without_channel("spark").with_channel("spark", 77, reader=True)
    partition.cursors.requests.reconcile(changed)
    await partition.commit_events()
    await until(lambda: reader.wire.closed)
    assert not partition.deliveries["spark"].consumers


@on_a_broker
async def test_readers_channels_are_not_announced(broker: Broker) -> None:
    """A node that hears of a channel makes it for consumers, and nobody would read it there."""
    await published(broker)
    await broker.channels.create("t", "consumers")
    await broker.channels.readers.ensure("t", "spark")
    assert broker.topics.registrations() == {"t": ["consumers"]}


@on_a_broker
async def test_what_is_ephemeral_keeps_nothing_for_a_reader(broker: Broker) -> None:
    await broker.publishing.publish("t#ephemeral", ONE)
    await published(broker)
    for topic, channel in (("t#ephemeral", "spark"), ("t", "spark#ephemeral")):
        with pytest.raises(ValueError, match="keeps nothing for a reader"):
            await broker.channels.readers.ensure(topic, channel)


@on_a_broker
async def test_without_the_topic_there_is_no_channel(broker: Broker) -> None:
    with pytest.raises(NotFound):
        await commit(broker, 1)


def test_the_kind_and_the_place_survive_a_restart_and_a_rebuild_from_the_log(tmp_path) -> None:
    async def life() -> None:
        async with running(tmp_path) as broker:
            await published(broker)
            await commit(broker, 3)
            rebuilt = channels_of(led(broker).cursors.state)
            assert rebuilt.channels["spark"].reader
        async with running(tmp_path) as broker:
            assert broker.topics.topic("t").record.channels.channels["spark"].reader
            assert await commit(broker, 0) == 3

    asyncio.run(life())


def test_the_first_channel_of_consumers_begins_where_the_log_does_after_restarts_too(tmp_path) -> None:
    async def life() -> None:
        async with running(tmp_path) as broker:
            await published(broker, 3)
            await commit(broker, 3)
            await broker.channels.readers.ensure("t", "lake")
            assert led(broker).cursors.channels["lake"].cursor.depth(3) == 3
        async with running(tmp_path) as broker:
            await published(broker, 2)
            assert await commit(broker, 9) == 5, "as far as the log goes"
            for channel, depth in (("consumers", 5), ("more", 0)):
                await broker.channels.create("t", channel)
                cursor = led(broker).cursors.channels[channel].cursor
                assert cursor.depth(cursor.end) == depth

    asyncio.run(life())


def test_a_topic_of_readers_alone_lets_go_what_they_have_read() -> None:
    rig = PartitionRig(limits=LogLimits(segment_bytes=300), channel=False)
    record = ChannelList().with_channel("r", 200, reader=True)
    rig.cursors.requests.reconcile(record)
    rig.partition.commit_events()
    rig.disk.sync()
    fill(rig, pairs=6)
    end = rig.log.end.offset
    keep_house(rig, 8)
    assert rig.log.start.offset == 0
    rig.cursors.requests.advance("r", end)
    rig.partition.commit_events()
    rig.disk.sync()
    keep_house(rig, 8)
    start = rig.log.start.offset
    assert 0 < start == rig.cursors.state.pump <= end
    rig.cursors.requests.reconcile(record.with_channel("a", 300))
    rig.partition.commit_events()
    rig.disk.sync()
    assert rig.cursors.channels["a"].cursor.floor == start


def test_a_reader_is_never_abandoned_and_others_keep_what_it_keeps() -> None:
    rig = PartitionRig(limits=LogLimits(segment_bytes=300), channel=False)
    record = rig.channel_list("abandoned").with_channel("r", 200, reader=True)
    rig.cursors.requests.reconcile(record)
    rig.partition.commit_events()
    rig.disk.sync()
    rig.partition.retention.abandoned = AbandonedPolicy(over_bytes=1)
    fill(rig, pairs=6)
    rig.cursors.requests.advance("r", 2)
    rig.partition.commit_events()
    rig.disk.sync()
    keep_house(rig, 8)
    floors = {name: channel.committed.floor for name, channel in rig.cursors.channels.items()}
    assert (floors, rig.log.start.offset) == ({"abandoned": 2, "r": 2}, 2)
