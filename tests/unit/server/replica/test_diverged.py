"""A channel state belongs to one log. Batches that were cut never get into it, whatever was cancelled around the cut. A
replica whose state was made from other batches leaves the in-sync set, and rebuilds the state from its log."""

from __future__ import annotations

import asyncio
from typing import Any

from nsqha import hot
from nsqha.commitlog.log import PartitionLog
from nsqha.cursor import events
from nsqha.cursor.committed.checkpoint import digest, write
from nsqha.cursor.committed.state import NEEDS_LOOK, PartitionState
from nsqha.cursor.listing import ChannelEntry, Listing
from nsqha.frames import HAS_ATTRIBUTES, HAS_CHECKPOINT, HAS_EVENTS
from nsqha.pb.v1 import replication_pb2 as pb
from tests.unit.server.replica_rig import (
    KEY,
    REGISTRATION,
    A,
    B,
    LeaderStream,
    ReplicaRig,
    add,
    copy_of,
    fit_to_lead,
    followed,
    log_of,
    pause,
    run,
    serving,
)

FAR = 1 << 61  # a due time
UID = 7  # of the channel "ch"


def append(log: PartitionLog, epoch: int, data: bytes, flags: int, count: int = 0) -> None:
    log.append(bytearray(data), count=count, flags=flags, timestamp_ns=log.next_timestamp(1), epoch=epoch, durable=0)


def add_deferred(log: PartitionLog, epoch: int) -> None:
    """A DPUB of one message."""
    append(log, epoch, events.Attributes(covers=1, deliver_at_ns=FAR).encode() + hot.frame(b"later"), HAS_ATTRIBUTES, 1)


def add_channel(log: PartitionLog, epoch: int) -> None:
    listing = Listing.of([ChannelEntry("ch", UID, False, False)])
    append(log, epoch, events.ChannelsEvent(1, False, listing).encode(), HAS_EVENTS)


def add_progress(log: PartitionLog, epoch: int, **fields: Any) -> None:
    append(log, epoch, events.progress_frame([events.ChannelProgress(UID, 0, **fields).encode()]), HAS_EVENTS)


def state_of(log: PartitionLog, end: int | None = None) -> PartitionState:
    """What the log says."""
    state = PartitionState()
    for entry in log.entries(log.start.log_id, log.end.log_id if end is None else end):
        state.apply(entry, log.read(entry) if entry.flags & NEEDS_LOOK else b"")
    return state


async def opened_twice_while_it_cuts(rig: ReplicaRig, other: PartitionLog, start: int, committed: int) -> LeaderStream:
    """The next leader opens a second stream while the first one's catch-up cuts the log, as when a cut heals: the
    catch-up is cancelled, and its cut completes. The second stream, on which the leader continues from `start`."""
    rig.record(leader=B, epoch=2, isr={B: 6})
    rig.peers.serves = serving(other, 2, committed=start)
    files = rig.replicas.files
    cut_log, is_cut, go_on = files._cut_log, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any) -> None:
        await cut_log(*args)
        is_cut.set()
        await go_on.wait()  # the journal takes its time

    files._cut_log = slow  # type: ignore[method-assign]
    rig.leader(B).ask(2, other, start=start)
    await is_cut.wait()
    again = rig.leader(B)
    again.ask(2, other, start=start)
    await pause()
    go_on.set()
    await pause(1)
    again.push(2, other, start, committed=committed)
    await pause()
    assert not rig.errors and rig.follower.log.end.log_id == other.end.log_id
    return again


def test_a_catch_up_that_is_cancelled_behind_its_cut_applies_nothing_of_what_was_cut() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, _ = await followed(rig)
        mine = log_of(1)
        add_deferred(mine, 1)  # log id 2: never committed
        stream.push(1, mine, 1, committed=2)
        await pause()
        other = copy_of(mine, 2)
        add(other, 2, b"x")  # log id 2 of the next leader
        await opened_twice_while_it_cuts(rig, other, 2, committed=3)
        state = rig.follower.applier.state
        assert state is not None and digest(state) == digest(state_of(other))
        assert not state.later.rows(), "a DPUB that was never committed"

    run(scenario)


def test_no_deferred_message_is_lost_with_it() -> None:
    """The leader defers a message (a REQ of 10 s; a dead letter is the same) in the batch that would be missed, and its
    floor passes it in the next one. Nobody who led from such a state would ever deliver it."""

    async def scenario() -> None:
        rig = ReplicaRig()
        stream, _ = await followed(rig)
        mine = log_of()
        add_channel(mine, 1)
        add(mine, 1, b"acknowledged")  # log id 2, offset 0: committed
        add(mine, 1, b"not acknowledged")  # log id 3: never committed
        stream.push(1, mine, 1, committed=3)
        await pause()
        other = copy_of(mine, 3)
        add_progress(other, 2, floor=0, puts=((0, FAR, 2),))  # log id 3
        add_progress(other, 2, floor=1)
        await opened_twice_while_it_cuts(rig, other, 3, committed=5)
        state = rig.follower.applier.state
        assert state is not None and digest(state) == digest(state_of(other))
        assert [held.offset for held in state.channels["ch"].deferred.items()] == [0]

    run(scenario)


def test_a_cut_below_what_is_applied_forgets_the_state_in_the_same_step() -> None:
    """Also when the catch-up that asked for it is cancelled."""

    async def scenario() -> None:
        rig = ReplicaRig()
        stream, _ = await followed(rig)
        mine = log_of(1, 1)
        stream.push(1, mine, 1, committed=3)
        await pause()
        follower = rig.follower
        assert follower.applier.applied_end == 3
        follower.leader_log.differs_at = 2
        cut = asyncio.ensure_future(rig.replicas.files.cut(follower, 2))
        while follower.log.end.log_id == 3:
            await asyncio.sleep(0.001)
        assert follower.applier.state is None and follower.applier.committed == 0
        assert follower.leader_log.differs_at is None
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)

    run(scenario)


# ---- a state of another log


async def diverged(rig: ReplicaRig) -> tuple[LeaderStream, PartitionLog]:
    """A follower whose state is of a batch that its log does not have; a checkpoint in the log is wrong, too."""
    stream, _ = await followed(rig)
    log = log_of()
    add_channel(log, 1)
    add(log, 1, b"one")
    (frame,) = write(state_of(log), 1 << 16)
    append(log, 1, frame, HAS_CHECKPOINT)
    add_progress(log, 1, floor=0, puts=((0, FAR, 2),))  # log id 4
    other = copy_of(log, 4)
    add_progress(other, 1, floor=1)
    wrong = state_of(other)
    (frame,) = write(wrong, 1 << 16)
    append(log, 1, frame, HAS_CHECKPOINT)  # log id 5: this replica led for a while
    stream.push(1, log, 1, committed=6)
    await pause()
    follower = rig.follower
    follower.applier.state = wrong
    add_progress(log, 1, floor=1)
    return stream, log


def test_a_replica_with_a_state_of_another_log_leaves_the_isr_and_rebuilds_it() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log = await diverged(rig)
        stream.take()
        stream.push(1, log, 6, committed=7)
        await pause()
        follower = rig.follower
        assert [(r.refusal, r.why) for r in stream.refused] == [(pb.REFUSAL_FAILED, "its channel state is rebuilt")]
        assert follower.applier.state is None and not follower.applier.fit and follower.stopped is None
        assert follower.behind and follower.port is None
        assert rig.replicas.measures.log_events["state_diverged"] == 1
        rig.peers.serves = serving(log, 1, committed=7)
        stream.take()
        stream.ask(1, log)
        await pause(1)
        assert [opened.behind for opened in stream.opened] == [True, False], "it is rebuilt before it is in sync again"
        state = follower.applier.state
        assert state is not None and digest(state) == digest(state_of(log)) and state.rebuilt == 6
        assert [held.offset for held in state.channels["ch"].deferred.items()] == [0]
        assert not rig.errors and not rig.failures

    run(scenario)


def test_a_replica_with_a_state_of_another_log_does_not_begin_to_lead() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        _stream, log = await diverged(rig)
        record = rig.record(
            leader=rig.node, epoch=2, isr={rig.node: rig.follower.log_uid, A: 5}, registration=REGISTRATION
        )
        await rig.settle(record)
        assert not rig.replicas.leading and rig.replicas.table.declined[KEY] == (2, "its channels are not known yet")
        await pause(2)
        rig.replicas.keep_house()
        await pause(2)
        state = rig.follower.applier.state
        assert state is not None and digest(state) == digest(state_of(log, 6))

    run(scenario)


def test_a_rebuilt_state_that_does_not_fit_either_stops_the_replica() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log = await diverged(rig)
        state = rig.follower.applier.state
        assert state is not None
        state.rebuilt = state.applied.log_id
        stream.push(1, log, 6, committed=7)
        await pause()
        assert "StateDiverged" in (rig.follower.stopped or "")

    run(scenario)


# ---- a leader whose state names what its log does not have


def test_a_leader_with_a_wrong_state_steps_down_and_rebuilds_it() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        isr = {rig.node: log_uid}
        await rig.settle(rig.record(leader=rig.node, epoch=2, isr=isr, min_isr=1, registration=REGISTRATION))
        await pause()
        partition = rig.replicas.leading[KEY].partition
        right = digest(partition.cursors.state)
        partition.cursors.state.pump = 8
        partition.life.on_wrong_state()
        await pause(2)
        assert not rig.replicas.leading and partition.closed
        rig.replicas.keep_house()
        await pause(2)
        state = rig.follower.applier.state
        assert state is not None and state.rebuilt and digest(state) == right
        await rig.settle(rig.record(leader=rig.node, epoch=3, isr=isr, min_isr=1, registration=REGISTRATION))
        await pause()
        assert rig.replicas.leading[KEY].epoch == 3 and not rig.errors

    run(scenario)
