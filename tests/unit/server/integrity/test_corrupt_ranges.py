"""Damage where a follower's channels are: asked of others, of its leader, looked behind, and told to its leader."""

from __future__ import annotations

import errno
import random
from typing import Any

import pytest

from nsqha.commitlog.entry import ENTRY_BYTES, FAULTY, BatchCorrupt, Place
from nsqha.commitlog.log import PartitionLog
from nsqha.commitlog.storage import MemStorage
from nsqha.cursor.committed.checkpoint import write
from nsqha.cursor.committed.state import PartitionState
from nsqha.frames import HAS_CHECKPOINT, LOST
from nsqha.ranges import RangeSet
from nsqha.server.integrity.corrupt_ranges import damaged_range
from nsqha.server.integrity.peer_repair import is_lost, lost_of
from tests.unit.commitlog.logs import add, drop_pairs, new_log, roll
from tests.unit.server.replica_rig import (
    KEY,
    A,
    B,
    ReplicaRig,
    followed,
    log_of,
    pause,
    run,
    serving,
)


def test_channels_that_can_not_be_read_are_asked_of_others_and_known_when_they_came() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=A, epoch=2, isr={A: 5}))
        log = log_of(1, 2, 2, 2)
        stream = rig.leader(A)
        await stream.open(2, log_of())
        stream.push(2, log, 1, committed=5)
        await pause()
        follower = rig.replicas.followers[KEY]
        lost = follower.log.entry(2)
        commitlog = rig.storage.open(f"{follower.log.directory}/{0:020}.commitlog")
        commitlog.pwrite(lost._replace(flags=FAULTY).encode(), 2 * ENTRY_BYTES)
        follower.restart_with(follower.log, follower.log_uid)  # as after a cut: it is looked for anew
        follower.committed_to(5)
        for _ in range(2):
            rig.replicas.keep_house()
            await pause()
        assert follower.applier.state is None and follower.applier.damage == (2, 3)
        assert "Fetch" in rig.peers.calls
        commitlog.pwrite(lost.encode(), 2 * ENTRY_BYTES)
        rig.replicas.integrity.corrupt.mended(KEY, 2, 3)
        rig.replicas.keep_house()
        await pause()
        assert (
            follower.applier.damage is None
            and follower.applier.state is not None
            and follower.applier.state.applied.log_id == 4
        )

    run(scenario)


def test_channels_that_nobody_can_mend_are_known_from_a_checkpoint_behind() -> None:
    """Retention has gone past the damage elsewhere, so nobody will ever have it again."""

    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=A, epoch=2, isr={A: 5}))
        log = log_of(1, 2, 2)
        state = PartitionState()
        for entry in log.entries(1, 4):
            state.apply(entry, b"")
        (frame,) = write(state, 1 << 16)
        timestamp_ns = log.next_timestamp(1)
        log.append(bytearray(frame), count=0, flags=HAS_CHECKPOINT, timestamp_ns=timestamp_ns, epoch=2, durable=1)
        stream = rig.leader(A)
        await stream.open(2, log_of())
        stream.push(2, log, 1)
        await pause()
        follower = rig.follower
        follower.applier._pending.batches.clear()  # as after a restart
        commitlog = rig.storage.open(f"{follower.log.directory}/{0:020}.commitlog")
        commitlog.pwrite(follower.log.entry(2)._replace(flags=FAULTY).encode(), 2 * ENTRY_BYTES)
        rig.nodes.clear()  # nobody to ask
        follower.committed_to(5)
        assert (
            follower.applier.damage == (2, 3)
            and follower.applier.state is not None
            and follower.applier.state.applied.log_id == 1
        )
        await rig.replicas.integrity.corrupt._follow_leader(KEY, 2, 3)
        assert follower.applier.damage is None and follower.applier.state.applied.log_id == 4

    run(scenario)


async def parted(rig: ReplicaRig, leader_log: PartitionLog) -> PartitionLog:
    """A replica whose last batch is another one than its new leader has. The entry before, which tells where they part,
    does not verify here, and nobody has found that."""
    await rig.settle(rig.record(leader=A, epoch=2, isr={A: 5}))
    stream = rig.leader(A)
    await stream.open(2, log_of())
    stream.push(2, log_of(1, 1, 2), 1, committed=3)
    await pause()
    log, flipped = rig.follower.log, 2 * ENTRY_BYTES + 50
    commitlog = rig.storage.open(f"{log.directory}/{0:020}.commitlog")
    commitlog.pwrite(bytes([commitlog.pread(1, flipped)[0] ^ 1]), flipped)
    log.shelf.clear()
    rig.peers.serves = serving(leader_log, 3, committed=4)
    await rig.settle(rig.record(leader=B, epoch=3, isr={B: 5}))
    assert (await rig.leader(B).open(3, leader_log)).behind
    return log


def test_damage_that_hides_where_two_logs_part_is_found_and_mended() -> None:
    async def scenario() -> None:
        rig, leader_log = ReplicaRig(), log_of(1, 1, 3)
        log = await parted(rig, leader_log)
        await pause(40)
        assert not rig.follower.behind and log.last.chain == leader_log.last.chain
        assert log.read(log.entry(2)) == leader_log.read(leader_log.entry(2))
        assert rig.replicas.integrity.corrupt.known(KEY) == [] and not rig.failures and not rig.errors

    run(scenario)


@pytest.mark.parametrize("frames", [True, False])
def test_what_a_leader_gave_up_hides_no_more_where_two_logs_part(frames: bool) -> None:
    """Whoever catches up can not wait for the end of that before it does as its leader did. Its own frames, if they are
    what they were, are given up by nobody's word."""

    async def scenario() -> None:
        rig, leader_log = ReplicaRig(), log_of(1, 1, 3)
        lost = leader_log.entry(2)
        pair = leader_log.files.pair_of(2)
        pair.commitlog.pwrite(lost._replace(flags=lost.flags | LOST).encode(), pair.slot(2))
        leader_log.shelf.clear()
        log = await parted(rig, leader_log)
        if not frames:
            segment = rig.storage.open(f"{log.directory}/{0:020}.segment")
            segment.pwrite(b"?" * lost.size, lost.position)
        await pause(40)
        assert not rig.follower.behind and log.last.chain == leader_log.last.chain
        assert log.entry(2) == (lost if frames else leader_log.entry(2)) and not rig.failures and not rig.errors
        assert rig.replicas.integrity.corrupt.known(KEY) == ([] if frames else [(2, 3)])

    run(scenario)


def test_the_leader_is_told_that_this_replica_could_not_lead() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, _ = await followed(rig)
        rig.follower.applier.found(BatchCorrupt(Place(1, 0, 0), Place(2, 1, 36), "its data does not fit its CRC"))
        await pause()
        assert [ack.unfit for ack in stream.acks] == [True]
        stream.take()
        rig.follower.applier.mended()
        await pause()
        assert [ack.unfit for ack in stream.acks] == [False]
        rig.follower.applier.damage = (1, 2)
        assert (await stream.open(1, log_of())).unfit

    run(scenario)


def test_a_partition_that_goes_while_its_leader_is_asked_is_no_failure() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        damage = rig.replicas.integrity.corrupt
        damage._bad[KEY] = RangeSet([(1, 2)])

        async def goes(*asked: Any) -> None:
            damage.gone(KEY)

        damage._repairer.mend_as_leader = goes  # type: ignore[method-assign]
        await damage._as_leader(KEY, log_of(1), "n1", 1, 1, 2)
        assert damage.known(KEY) == []

    run(scenario)


def test_what_is_left_of_a_range_as_its_leader_has_it_is_not_read_on_the_loop() -> None:
    """It may be millions of batches."""

    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=A, epoch=2, isr={A: 5}))
        stream = rig.leader(A)
        await stream.open(2, log_of())
        stream.push(2, log_of(1, 2, 2, 2, 2), 1)
        await pause()
        log = rig.follower.log
        commitlog = rig.storage.open(f"{log.directory}/{0:020}.commitlog")
        for log_id in (2, 4):
            entry = log.entry(log_id)
            commitlog.pwrite(entry._replace(flags=entry.flags | LOST).encode(), log_id * ENTRY_BYTES)
        log.entry = log.entries = None  # type: ignore[assignment,method-assign]
        damage = rig.replicas.integrity.corrupt
        damage._bad[KEY] = RangeSet([(1, 6)])

        async def mended(*asked: Any) -> None:
            pass

        damage._repairer.mend_as_leader = mended  # type: ignore[method-assign]
        rig.disk.hold()
        for ask in (damage._as_leader(KEY, log, "n1", 2, 1, 6), damage._follow_leader(KEY, 1, 6)):
            rig.spawn(ask)
        await pause()
        assert damage.known(KEY) == [(1, 6)] and len(rig.tasks) == 2
        rig.disk.release()
        await pause()
        assert damage.known(KEY) == [(2, 3), (4, 5)] and not rig.errors and not rig.failures

    run(scenario)


def test_a_disk_that_lacks_descriptors_says_nothing_of_what_was_given_up() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, _ = await followed(rig)
        stream.push(1, log_of(1, 1), 1)
        await pause()
        damage, log = rig.replicas.integrity.corrupt, rig.follower.log
        damage._bad[KEY] = RangeSet([(1, 2)])

        class NoFiles(MemStorage):
            def open(self, *_: Any, **__: Any) -> Any:
                raise OSError(errno.EMFILE, "too many open files")

        log.files.storage = NoFiles()
        await damage._follow_leader(KEY, 1, 2)
        assert damage.known(KEY) == [(1, 2)] and "Fetch" not in rig.peers.calls and not rig.failures

    run(scenario)


def test_what_was_given_up_is_found_in_all_pairs() -> None:
    log = new_log(MemStorage())
    lost = random.Random(1).sample(range(1, 25), 9)
    for _ in range(24):
        add(log, b"m")
        if log.end.log_id % 7 == 0:
            roll(log)
    for log_id in lost:
        entry, pair = log.entry(log_id), log.files.pair_of(log_id)
        pair.commitlog.pwrite(entry._replace(flags=entry.flags | LOST).encode(), pair.slot(log_id))
    log.shelf.clear()
    for first in range(27):
        for end in range(first, 27):
            expected = RangeSet((n, n + 1) for n in range(first, end) if is_lost(log, n))
            assert lost_of(log.snapshot(), first, end) == expected


def test_a_range_that_retention_went_past_is_told_without_its_offsets() -> None:
    """An operator gave it up, and before that was told the files were gone."""
    log = new_log(MemStorage())
    for _ in range(4):
        add(log, b"m" * 900)
        roll(log)
    assert damaged_range(log, 1, 3) == (1, 3, 0, 2)
    drop_pairs(log, log.files.pair_of(3).first)
    assert log.start.log_id == 3
    assert damaged_range(log, 1, 3) == (1, 3, 0, 0)
    assert damaged_range(log, 3, 4) == (3, 4, 2, 3)
