"""What is held against a replica: an end that recovery cut, until all that counts has come again."""

from __future__ import annotations

from typing import Any

from nsqha.commitlog.entry import ENTRY_BYTES, FAULTY, BatchCorrupt, Place
from nsqha.cursor.checkpoint import write
from nsqha.cursor.state import PartitionState
from nsqha.frames import HAS_CHECKPOINT
from nsqha.ranges import RangeSet
from nsqha.server.replica_damage import Doubt
from tests.unit.server.replica_rig import (
    KEY,
    REGISTRATION,
    A,
    ReplicaRig,
    fit_to_lead,
    followed,
    log_of,
    pause,
    run,
)


async def cut(rig: ReplicaRig) -> tuple[Any, Any, Any]:
    """A member with two of its leader's five batches, since recovery cut the end of what it had."""
    await rig.settle(rig.record(leader=A, epoch=2, isr={A: 5}))
    log_ = log_of(1, 2, 2, 2, 2)
    stream = rig.leader(A)
    await stream.open(2, log_of())
    stream.push(2, log_, 1, 3)
    await pause()
    rig.replicas.damage._cut.add(KEY)
    stream.take()
    return rig.leader(A), log_, stream


def test_an_end_that_was_cut_counts_as_cut_until_all_that_is_committed_has_come_again() -> None:
    """Then an election need not wait for others that might have more."""

    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log_, _ = await cut(rig)
        opened = await stream.open(2, log_, start=2)
        assert not opened.behind and rig.replicas.damage.doubts(KEY) == (True, False), "the leader has more"
        stream.push(2, log_, 3, 5, committed=6)
        await pause()
        assert rig.replicas.damage.doubts(KEY) == (True, False), "one committed batch is still missing"
        stream.push(2, log_, 5, committed=6)
        await pause()
        stream.close()  # elections are held when the leader is gone
        assert rig.replicas.damage.doubts(KEY) == (False, False)

    run(scenario)


def test_what_a_new_leader_knows_to_be_committed_is_not_all_that_is() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log_, _ = await cut(rig)
        await stream.open(2, log_, start=5)  # all before its epoch may be committed, though it knows of little
        stream.push(2, log_, 3, 4, committed=2)
        await pause()
        assert rig.replicas.damage.doubts(KEY) == (True, False)
        stream.push(2, log_, 4, 5, committed=2)
        await pause()
        assert rig.replicas.damage.doubts(KEY) == (False, False)

    run(scenario)


def test_the_log_of_a_leader_is_whole_whatever_was_cut_before() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        rig.replicas.damage._cut.add(KEY)
        await rig.settle(rig.record(leader=rig.node, epoch=2, isr={rig.node: log_uid, A: 5}, registration=REGISTRATION))
        assert KEY in rig.replicas.leading and rig.replicas.damage.doubts(KEY) == (False, False)

    run(scenario)


def test_channels_that_can_not_be_read_are_asked_of_others_and_known_when_they_came() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=A, epoch=2, isr={A: 5}))
        log_ = log_of(1, 2, 2, 2)
        stream = rig.leader(A)
        await stream.open(2, log_of())
        stream.push(2, log_, 1, committed=5)
        await pause()
        follower = rig.replicas.followers[KEY]
        lost = follower.log.entry(2)
        commitlog = rig.storage.open(f"{follower.log.directory}/{0:020}.commitlog")
        commitlog.pwrite(lost._replace(flags=FAULTY).encode(), 2 * ENTRY_BYTES)
        rig.replicas._files.forget_state(follower)  # as after a cut: it is looked for anew
        follower.committed_to(5)
        for _ in range(2):
            rig.replicas.keep_house()
            await pause()
        assert follower.state is None and follower.damage == (2, 3)
        assert "Fetch" in rig.peers.calls
        commitlog.pwrite(lost.encode(), 2 * ENTRY_BYTES)
        rig.replicas.damage._mended(KEY, 2, 3)
        rig.replicas.keep_house()
        await pause()
        assert follower.damage is None and follower.state is not None and follower.state.applied.log_id == 4

    run(scenario)


def test_channels_that_nobody_can_mend_are_known_from_a_checkpoint_behind() -> None:
    """Retention has gone past the damage elsewhere, so nobody will ever have it again."""

    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=A, epoch=2, isr={A: 5}))
        log_ = log_of(1, 2, 2)
        state = PartitionState()
        for entry in log_.entries(1, 4):
            state.apply(entry, b"")
        (frame,) = write(state, 1 << 16)
        timestamp_ns = log_.next_timestamp(1)
        log_.append(bytearray(frame), count=0, flags=HAS_CHECKPOINT, timestamp_ns=timestamp_ns, epoch=2, durable=1)
        stream = rig.leader(A)
        await stream.open(2, log_of())
        stream.push(2, log_, 1)
        await pause()
        follower = rig.follower
        follower.forget_pending()  # as after a restart
        commitlog = rig.storage.open(f"{follower.log.directory}/{0:020}.commitlog")
        commitlog.pwrite(follower.log.entry(2)._replace(flags=FAULTY).encode(), 2 * ENTRY_BYTES)
        rig.nodes.clear()  # nobody to ask
        follower.committed_to(5)
        assert follower.damage == (2, 3) and follower.state is not None and follower.state.applied.log_id == 1
        await rig.replicas.damage._follow_leader(KEY, 2, 3)
        assert follower.damage is None and follower.state.applied.log_id == 4

    run(scenario)


def test_the_leader_is_told_that_this_replica_could_not_lead() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, _ = await followed(rig)
        rig.follower.found(BatchCorrupt(Place(1, 0, 0), Place(2, 1, 36), "its data does not fit its CRC"))
        await pause()
        assert [ack.unfit for ack in stream.acks] == [True]
        stream.take()
        rig.follower.mended()
        await pause()
        assert [ack.unfit for ack in stream.acks] == [False]
        rig.follower.damage = (1, 2)
        assert (await stream.open(1, log_of())).unfit

    run(scenario)


def test_a_log_whose_doubtful_end_was_cut_off_never_goes_by_its_old_name() -> None:
    """It is shorter than what the ISR counts on, also when all that was damaged in it is mended later."""

    async def scenario() -> None:
        rig = ReplicaRig()
        damage, told = rig.replicas.damage, []
        damage.on_whole = lambda key, name: told.append(name)
        for cut_off in (False, True):
            damage._doubts[KEY] = doubt = Doubt(2, 5)
            doubt.left.add(2, 4)
            if cut_off:
                damage.fetched_anew(KEY)
            damage._mended(KEY, 2, 4)
        assert told == [5, 0]

    run(scenario)


def test_a_partition_that_goes_while_its_leader_is_asked_is_no_failure() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        damage = rig.replicas.damage
        damage._bad[KEY] = RangeSet([(1, 2)])

        async def goes(*asked: Any) -> None:
            damage.gone(KEY)

        damage._repairer.mend_as_leader = goes  # type: ignore[method-assign]
        await damage._as_leader(KEY, log_of(1), "n1", 1, 1, 2)
        assert damage.known(KEY) == []

    run(scenario)
