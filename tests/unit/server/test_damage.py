"""Damage where a follower's channels are: asked of others, of its leader, looked behind, and told to its leader."""

from __future__ import annotations

from typing import Any

from nsqha.commitlog.entry import ENTRY_BYTES, FAULTY, BatchCorrupt, Place
from nsqha.cursor.checkpoint import write
from nsqha.cursor.state import PartitionState
from nsqha.frames import HAS_CHECKPOINT
from nsqha.ranges import RangeSet
from tests.unit.server.replica_rig import (
    KEY,
    A,
    ReplicaRig,
    followed,
    log_of,
    pause,
    run,
)


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
        rig.replicas.damage.mended(KEY, 2, 3)
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
