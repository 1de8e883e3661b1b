"""A snapshot of what a broker leads itself: what it costs, what it holds, and what is left of one that fails."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nsqha.admin import segments
from nsqha.admin.segments import SegmentsService
from nsqha.election.model import TopicSettings
from nsqha.pb.v1 import segments_pb2 as pb
from nsqha.server.node.broker import Broker
from nsqha.server.partition import holding
from nsqha.server.segments import pins, renewals
from tests.unit.admin.test_segments import Context, Refused
from tests.unit.server.broker_rig import led, on_a_broker
from tests.unit.server.node.test_broker import ONE

HOUR_MS = 3_600_000


@asynccontextmanager
async def serving(broker: Broker, partitions: int = 1) -> AsyncIterator[SegmentsService]:
    await broker.topics.ensure_topic("t", TopicSettings(partitions=partitions))
    await broker.publishing.publish("t", ONE)
    service = SegmentsService(broker, None)
    try:
        yield service
    finally:
        service.close()


async def ask(service: SegmentsService, **fields: Any) -> Any:
    return await service.Snapshot(pb.SnapshotRequest(topics=["t"], **fields), Context())


async def until(done: Any) -> None:
    while not done():
        await asyncio.sleep(0.001)


# ---- holds


@on_a_broker
async def test_a_hold_that_nobody_was_told_of_goes_with_its_snapshot(broker: Broker, monkeypatch: Any) -> None:
    async with serving(broker) as service:
        go_on = threading.Event()
        read = pins._read
        monkeypatch.setattr(pins, "_read", lambda *args: go_on.wait(10) and read(*args))
        asked = asyncio.create_task(ask(service, hold_ms=HOUR_MS))
        await until(lambda: holding.live_holds(led(broker)))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: not holding.live_holds(led(broker)))
        go_on.set()


@on_a_broker
async def test_a_hold_that_is_committed_after_its_snapshot_ended_goes_as_well(broker: Broker, monkeypatch: Any) -> None:
    async with serving(broker) as service:
        partition, go_on, begun = led(broker), asyncio.Event(), asyncio.Event()
        hold = holding.hold

        async def late(*args: Any) -> Any:
            begun.set()
            await go_on.wait()
            held = await hold(*args)
            assert holding.live_holds(partition)
            return held

        monkeypatch.setattr(holding, "hold", late)
        asked = asyncio.create_task(ask(service, hold_ms=HOUR_MS))
        await begun.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        go_on.set()
        await until(lambda: not service.renewals._under_way.keys())
        await until(lambda: not holding.live_holds(partition))


@on_a_broker
async def test_a_hold_that_the_reader_named_stays_for_the_next_attempt(broker: Broker, monkeypatch: Any) -> None:
    async with serving(broker) as service:

        async def fails(*args: Any) -> Any:
            raise pins.TooManyBorders("many")

        monkeypatch.setattr(segments, "pin", fails)
        with pytest.raises(Refused, match="RESOURCE_EXHAUSTED: many"):
            await ask(service, hold_ms=HOUR_MS, hold_id="00000000000000ab")
        with pytest.raises(Refused):
            await ask(service, hold_ms=HOUR_MS)
        await until(lambda: list(holding.live_holds(led(broker))) == [0xAB])


@on_a_broker
async def test_a_partition_that_commits_nothing_holds_up_neither_release_nor_renewal(
    broker: Broker, monkeypatch: Any
) -> None:
    async with serving(broker, partitions=2) as service:
        reply = await ask(service, hold_ms=60_000)
        assert not any(pin.error for pin in reply.partitions)
        stuck = broker.topics.topic("t").led[0]
        events: asyncio.Future[None] = broker.parts.loop.create_future()
        monkeypatch.setattr(stuck, "commit_events", lambda: asyncio.shield(events))
        monkeypatch.setattr(renewals, "HOLD_SECONDS", 0.05)
        renewed = await service.RenewHold(pb.RenewHoldRequest(hold_id=reply.hold_id), Context())
        assert renewed.partitions == 1
        again = await ask(service, hold_ms=60_000, hold_id=reply.hold_id)
        assert [bool(pin.error) for pin in again.partitions] == [True, False]
        assert "a snapshot without hold_ms is answered" in again.partitions[0].error
        with pytest.raises(Refused, match="UNAVAILABLE: an earlier request of this kind has not ended"):
            await service.ReleaseHold(pb.ReleaseHoldRequest(hold_id=reply.hold_id), Context())
        there, here = (holding.live_holds(partition) for partition in broker.topics.topic("t").led)
        assert len(there) == 1 and not here
        events.set_result(None)


# ---- what it costs


@on_a_broker
async def test_ends_do_not_wait_for_borders(broker: Broker, monkeypatch: Any) -> None:
    async with serving(broker) as service:
        reached, go_on = threading.Event(), threading.Event()
        cut_points = pins.cut_points

        def slow(*args: Any, **more: Any) -> Any:
            reached.set()
            assert go_on.wait(10)
            return cut_points(*args, **more)

        monkeypatch.setattr(pins, "cut_points", slow)
        borders = asyncio.create_task(ask(service, cut_points=True))
        await until(reached.is_set)
        assert (await ask(service)).partitions[0].end.offset == 1
        assert not borders.done()
        go_on.set()
        assert (await borders).partitions[0].cuts


@on_a_broker
async def test_nobody_looks_for_borders_that_nobody_waits_for(broker: Broker, monkeypatch: Any) -> None:
    async with serving(broker) as service:
        reached, go_on, ended = threading.Event(), threading.Event(), threading.Event()

        def endless(*args: Any, each: Any) -> Any:
            reached.set()
            assert go_on.wait(10)
            try:
                while True:
                    each()
            except pins.SnapshotAbandoned:
                ended.set()
                raise

        monkeypatch.setattr(pins, "cut_points", endless)
        monkeypatch.setattr(pins, "BORDERS_MAX", 1 << 60)
        asked, waits = (asyncio.create_task(ask(service, cut_points=True)) for _ in range(2))
        await until(reached.is_set)
        for task in (asked, waits):
            task.cancel()
        await asyncio.gather(asked, waits, return_exceptions=True)
        go_on.set()
        await until(ended.is_set)


@on_a_broker
async def test_a_request_for_too_many_borders_is_refused_as_a_whole(broker: Broker, monkeypatch: Any) -> None:
    async with serving(broker, partitions=2) as service:
        monkeypatch.setattr(pins, "BORDERS_MAX", 3)
        ranges = [pb.OffsetRange(topic="t", partition=n % 2, first=n, end=n + 1) for n in range(10)]
        with pytest.raises(Refused, match="RESOURCE_EXHAUSTED: the request needs more than 3 borders"):
            await ask(service, cut_points=True, ranges=ranges)
        assert len((await ask(service)).partitions) == 2


@on_a_broker
async def test_files_that_cannot_be_opened_are_their_partitions_trouble(broker: Broker, monkeypatch: Any) -> None:
    async with serving(broker, partitions=2) as service:
        first, second = broker.topics.topic("t").led

        def none() -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(first.log, "snapshot", none)
        found = (await ask(service)).partitions
        assert [pin.error for pin in found] == ["its files cannot be read: Too many open files", ""]
        assert found[1].end.offset == second.log.end.offset


@on_a_broker
async def test_one_snapshot_too_many_is_sent_to_another_node(broker: Broker, monkeypatch: Any) -> None:
    async with serving(broker) as service:
        monkeypatch.setattr(segments, "SNAPSHOTS_MAX", 0)
        with pytest.raises(Refused, match="UNAVAILABLE: 0 snapshots are being made here: ask again, or ask another"):
            await ask(service)


# ---- which life of a topic


@on_a_broker
async def test_the_offsets_of_another_life_move_nothing_and_make_no_channel(broker: Broker) -> None:
    async with serving(broker) as service:
        topic = broker.topics.topic("t")

        async def commit(uid: int) -> Any:
            request = pb.CommitReaderRequest(topic="t", channel="lake", offsets={0: 1}, back=True, topic_uid=uid)
            return await service.CommitReader(request, Context())

        with pytest.raises(Refused, match="FAILED_PRECONDITION: topic t was deleted and made again"):
            await commit(topic.record.uid ^ 1)
        assert not topic.has_channel("lake")
        for uid in (topic.record.uid, 0):
            assert [floor.offset for floor in (await commit(uid)).floors] == [1]
