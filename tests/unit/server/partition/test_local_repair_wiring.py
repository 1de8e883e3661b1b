"""Who finds damage of a log that nobody else has tells whoever rebuilds it, on a node alone and in a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nsqha import hot
from nsqha.commitlog.corruption.rebuild import Rebuild
from nsqha.commitlog.corruption.repair import LogRepair
from nsqha.commitlog.corruption.verify import verify
from nsqha.commitlog.entry import ENTRY_BYTES
from nsqha.commitlog.log import PartitionLog
from nsqha.server.partition.partition import Partition
from tests.unit.server.broker_rig import led, running, subscribed, until
from tests.unit.server.replica_rig import KEY, REGISTRATION, A, ReplicaRig, pause, run

BODIES = [b"%d" % n * 20 for n in range(5)]


def rot(log: PartitionLog, log_id: int) -> None:
    """An entry, where only the disk has it."""
    log.shelf.clear()
    pair = log.files.pair_of(log_id)
    pair.commitlog.pwrite(b"\1" * ENTRY_BYTES, pair.slot(log_id))


# ---- a node alone


@pytest.mark.parametrize("finder", ["reader", "scrub"])
def test_a_node_alone_rebuilds_what_is_found(finder: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, scrub_bytes_per_second=1 << 30) as broker:
            for body in BODIES:
                await broker.publishing.publish("t", hot.frame(body))
            partition = led(broker)
            rot(partition.log, partition.log.end.log_id - 3)
            if finder == "scrub":
                await broker.scrub.scrubber._round()
                assert broker.scrub.scrubber.damage
            else:
                reader = await subscribed(broker, "t", "c", rdy=10)
                await until(lambda: partition.deliveries["c"].stuck)
            broker.housekeeping.stop()
            broker.housekeeping.look()
            if finder == "scrub":
                await until(lambda: not broker.scrub.scrubber.damage)
                reader = await subscribed(broker, "t", "c", rdy=10)
            await until(lambda: reader.wire.bodies == BODIES)  # type: ignore[attr-defined]
            assert not broker.scrub.scrubber.damage and not verify(partition.log).problems
            assert broker.parts.opener.measures.log_events["log_damaged"] == 1 and broker.availability.failure is None

    asyncio.run(story())


def test_a_node_alone_makes_a_wrong_channel_state_anew_and_leads_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path) as broker:
            for body in BODIES:
                await broker.publishing.publish("t", hot.frame(body))
            partition = led(broker)
            reader = await subscribed(broker, "t", "c", rdy=5)
            await until(lambda: reader.wire.bodies == BODIES)  # type: ignore[attr-defined]
            partition.cursors.state.pump += 3
            reader.ready(10)
            topic = broker.topics.topic("t")
            await until(lambda: topic.led not in ((), (partition,)))
            assert partition.closed and led(broker).cursors.state.rebuilt
            assert reader.wire.closed  # type: ignore[attr-defined]
            await broker.publishing.publish("t", hot.frame(b"next"))
            reader = await subscribed(broker, "t", "c", rdy=10)
            await until(lambda: reader.wire.bodies == [*BODIES, b"next"])  # type: ignore[attr-defined]
            assert broker.parts.opener.measures.log_events["state_diverged"] == 1
            broker.housekeeping.stop()
            broker.housekeeping.look()
            rebuilt = led(broker).cursors.state
            await until(lambda: rebuilt.checkpoint.as_of >= rebuilt.rebuilt)

    asyncio.run(story())


# ---- in a cluster


async def leading_alone(rig: ReplicaRig) -> Partition:
    """The only replica, which leads; its log has five messages."""
    await rig.settle(rig.record(leader=A, epoch=1, isr={rig.node: 0}, replicas=(rig.node,), min_isr=1))
    await alone(rig, 2, rig.follower.log_uid)
    partition: Partition = rig.replicas.leading[KEY].partition
    for body in BODIES:
        partition.publish(hot.frame(body), Ignored())
        await pause()
    assert partition.serving and partition.log.end.offset == 5
    return partition


async def alone(rig: ReplicaRig, epoch: int, log_uid: int, *others: int) -> None:
    """What the record says now."""
    record = rig.record(
        leader=rig.node,
        epoch=epoch,
        isr={rig.node: log_uid},
        replicas=(rig.node, *others),
        min_isr=1,
        registration=REGISTRATION,
    )
    await rig.settle(record)


class Ignored:
    def stored(self) -> None: ...
    def failed(self, why: str) -> None: ...


def keep_house(rig: ReplicaRig) -> None:
    """As the broker does it."""
    for leadership in rig.replicas.leading.values():
        leadership.partition.keep_house(leadership.partition.now())
    rig.replicas.keep_house()


@pytest.mark.parametrize("finder", ["reader", "scrub"])
def test_the_only_replica_of_a_cluster_is_rebuilt(finder: str) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        partition = await leading_alone(rig)
        damage, log = rig.replicas.integrity.corrupt, partition.log
        mended: list[tuple[int, int]] = []
        damage.on_mended = lambda log, first, end: mended.append((first, end))
        bad = log.end.log_id - 3
        rot(log, bad)
        if finder == "reader":
            partition.on_damage(bad, bad + 1)
        else:
            damage.found(KEY, bad, bad + 1)
        assert damage.known(KEY) == [(bad, bad + 1)]
        keep_house(rig)
        await pause()
        assert not verify(log).problems and mended == [(bad, bad + 1)] and damage.known(KEY) == []
        assert rig.failures == [] and "Fetch" not in rig.peers.calls

    run(scenario)


def test_what_was_away_for_a_moment_is_not_known_as_damage_any_more() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        partition = await leading_alone(rig)
        bad = partition.log.end.log_id - 3
        rig.replicas.integrity.corrupt.found(KEY, bad, bad + 1)
        assert rig.replicas.integrity.corrupt.known(KEY) == [(bad, bad + 1)]
        keep_house(rig)
        await pause()
        assert rig.replicas.integrity.corrupt.known(KEY) == [] and "Fetch" not in rig.peers.calls and rig.failures == []

    run(scenario)


def test_damage_found_while_there_were_others_is_rebuilt_when_there_are_none() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        partition = await leading_alone(rig)
        log, log_uid = partition.log, rig.replicas.leading[KEY].log_uid
        await alone(rig, 2, log_uid, A)
        bad = log.end.log_id - 3
        rot(log, bad)
        rig.replicas.integrity.corrupt.found(KEY, bad, bad + 1)
        for _ in range(3):
            keep_house(rig)
            await pause()
        assert len(verify(log).problems) == 1, "the other one may have it"
        await alone(rig, 2, log_uid)
        for _ in range(3):
            keep_house(rig)
            await pause()
        assert not verify(log).problems and rig.replicas.integrity.corrupt.known(KEY) == []

    run(scenario)


def test_what_is_noted_is_left_alone_as_soon_as_there_is_another_replica() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        partition = await leading_alone(rig)
        log = partition.log
        bad = log.end.log_id - 3
        rot(log, bad)
        rig.replicas.integrity.corrupt.found(KEY, bad, bad + 1)
        await alone(rig, 2, rig.replicas.leading[KEY].log_uid, A)
        for _ in range(3):
            keep_house(rig)
            await pause()
        assert len(verify(log).problems) == 1 and rig.replicas.integrity.corrupt.known(KEY) == [(bad, bad + 1)]
        assert "Fetch" in rig.peers.calls

    run(scenario)


def test_what_can_not_be_rebuilt_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays known, for people; not a second is spent on it again each second."""

    async def scenario() -> None:
        rig = ReplicaRig()
        partition = await leading_alone(rig)
        log = partition.log
        bad = log.end.log_id - 3
        entry, pair = log.entry(bad), log.files.pair_of(bad)
        log.shelf.clear()
        pair.segment.pwrite(b"\xff" * 9, entry.position - pair.position)
        rig.replicas.integrity.corrupt.found(KEY, bad, bad + 1)
        looked: list[int] = []
        rebuilding = LogRepair.rebuilding

        def looking(repair: LogRepair, first: int, end: int) -> Rebuild | None:
            looked.append(first)
            return rebuilding(repair, first, end)

        monkeypatch.setattr(LogRepair, "rebuilding", looking)
        for _ in range(5):
            keep_house(rig)
            await pause()
        assert looked == [bad] and rig.replicas.integrity.corrupt.known(KEY) == [(bad, bad + 1)]

    run(scenario)
