"""When a checkpoint is due, and how its frames are spread over batches."""

from __future__ import annotations

from nsqha.cursor.committed.checkpoint import CheckpointWriter
from nsqha.cursor.committed.state import AppliedEntry, ChannelState, CheckpointMark, PartitionState
from nsqha.cursor.deferred.deferred_set import Deferred, MemoryDeferred
from nsqha.cursor.limits import ChannelLimits
from nsqha.frames import HAS_CHECKPOINT

LIMITS = ChannelLimits(checkpoint_every_bytes=1000, checkpoint_bytes_per_batch=100, checkpoint_frame_bytes=50)


def state_at(position: int, log_id: int = 9) -> PartitionState:
    state = PartitionState()
    state.applied = AppliedEntry(log_id=log_id, end_position=position)
    return state


def test_a_checkpoint_is_due_when_the_log_grew():
    state = state_at(999)
    writer = CheckpointWriter(state, LIMITS)
    assert not writer.due
    state.applied = AppliedEntry(log_id=9, end_position=1000)
    assert writer.due


def test_the_next_one_is_due_when_the_log_grew_by_four_times_the_last():
    state = state_at(2999)
    state.checkpoint = CheckpointMark(as_of=5, size=500, end_log_id=6, end_position=1000)
    writer = CheckpointWriter(state, LIMITS)
    assert not writer.due
    state.applied = AppliedEntry(log_id=9, end_position=3000)
    assert writer.due


def test_one_that_was_begun_here_and_is_not_committed_is_not_due_again():
    state = state_at(1000)
    writer = CheckpointWriter(state, LIMITS)
    assert writer.take([]) == HAS_CHECKPOINT
    while writer.frames is not None:
        writer.take([])
    assert writer.unfinished and not writer.due
    assert writer.take([]) == 0
    state.checkpoint = CheckpointMark(as_of=9, size=100, end_log_id=10, end_position=1100)
    assert not writer.unfinished


def test_each_batch_takes_some_of_the_frames():
    state = state_at(1000)
    deferred = MemoryDeferred()
    for offset in range(10_000):
        deferred.put(Deferred(offset, offset, 1))
    state.channels["c"] = ChannelState("c", 1, 0, deferred)
    writer = CheckpointWriter(state, LIMITS)
    taken: list[list[bytes]] = []
    while not taken or writer.frames is not None:
        parts: list[bytes] = []
        writer.take(parts)
        taken.append(parts)
    assert len(taken) > 3
    for parts in taken:
        assert sum(map(len, parts[:-1])) < LIMITS.checkpoint_bytes_per_batch


def test_an_older_snapshot_than_the_last_checkpoint_is_not_written():
    state = state_at(500)
    state.checkpoint = CheckpointMark(as_of=9)
    writer = CheckpointWriter(state, LIMITS)
    writer.begin(state_at(400, log_id=8))
    assert writer.frames is None and not writer.unfinished
