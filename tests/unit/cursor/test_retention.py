"""Checkpoints, carrying, log start and what may be unlinked."""

from __future__ import annotations

import pytest

from nsqha.cursor.committed import checkpoint
from nsqha.cursor.committed.checkpoint import Gatherer, checkpoint_frames
from nsqha.cursor.committed.state import CheckpointComplete, CheckpointMark, PartitionState
from nsqha.cursor.events import Abandoned, CheckpointFrame
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.partition import Forgotten
from nsqha.errors import LogCorrupt
from tests.unit.cursor.tiny import Leader


def busy_leader(limits: ChannelLimits | None = None) -> Leader:
    leader = Leader(limits=limits)
    a = leader.create("a")
    leader.create("b")
    leader.publish(20)
    leader.deliver(a)
    leader.fin(a, 0, 1, 5, 6, 9)
    for offset in (2, 3, 7):
        a.req(offset, 1, 60_000, leader.now)
    leader.cursors.requests.seek("b", 4)
    leader.flush()
    leader.pause_topic()
    leader.publish(2, deliver_at=leader.now.wall_ns + 1)
    leader.flush()
    return leader


def frames_of(leader: Leader) -> list[CheckpointFrame]:
    return [frame for _, data in leader.log.batches for frame in checkpoint_frames(data)]


def write_checkpoint(leader: Leader) -> None:
    leader.cursors.checkpoints.begin(leader.cursors.state.snapshot())
    leader.flush()


def test_a_checkpoint_gives_the_state_back():
    leader = busy_leader()
    before = checkpoint.encode(leader.cursors.state)
    write_checkpoint(leader)
    gathered = Gatherer()
    assert [gathered.feed(frame) for frame in frames_of(leader)] == [True]
    assert checkpoint.encode(gathered.state()) == before
    assert any(isinstance(effect, CheckpointComplete) for effect in leader.effects)


def test_a_checkpoint_spans_frames_and_batches_and_events_between_count():
    leader = busy_leader(ChannelLimits(checkpoint_frame_bytes=64, checkpoint_bytes_per_batch=1))
    leader.cursors.checkpoints.begin(leader.cursors.state.snapshot())
    a = leader.cursors.channels["a"]
    for offset in (4, 8, 10, 11):
        leader.clock.advance(1)
        leader.fin(a, offset)
        leader.publish(1)
    leader.flush()
    assert len(frames_of(leader)) > 4
    assert leader.cursors.state.checkpoint.as_of < leader.cursors.state.checkpoint.end_log_id
    assert checkpoint.encode(leader.log.rebuild()) == checkpoint.encode(leader.cursors.state)


def test_frames_are_at_most_64_kb():
    leader = Leader()
    channel = leader.create("a")
    leader.publish(30_000)
    leader.deliver(channel)
    for offset in range(0, 30_000, 2):
        channel.req(offset, 1, 60_000, leader.now)
    leader.flush()
    leader.fin(channel, *range(1, 30_000, 4))
    leader.flush()
    write_checkpoint(leader)
    frames = frames_of(leader)
    assert len(frames) > 5
    assert max(len(frame.encode()) for frame in frames) <= 64 << 10
    assert checkpoint.encode(leader.log.rebuild()) == checkpoint.encode(leader.cursors.state)


def test_an_unfinished_checkpoint_is_no_checkpoint():
    leader = busy_leader(ChannelLimits(checkpoint_frame_bytes=64, checkpoint_bytes_per_batch=1))
    leader.cursors.checkpoints.begin(leader.cursors.state.snapshot())
    leader.clock.advance(1)
    leader.publish(1)
    assert len(frames_of(leader)) == 1
    assert leader.cursors.state.checkpoint.as_of == 0
    after = leader.restart(limits=ChannelLimits())
    write_checkpoint(after)
    assert after.cursors.state.checkpoint.as_of > 0
    assert checkpoint.encode(after.log.rebuild()) == checkpoint.encode(after.cursors.state)


def test_the_highest_as_of_wins_and_none_is_written_below_it():
    leader = busy_leader()
    old = leader.cursors.state.snapshot()
    leader.publish(1)
    write_checkpoint(leader)
    mark = leader.cursors.state.checkpoint
    leader.cursors.checkpoints.begin(old)
    leader.flush()
    assert leader.cursors.state.checkpoint == mark
    gathered = Gatherer()
    for frame in frames_of(leader):
        gathered.feed(frame)
    gathered.feed(*checkpoint_frames(next(checkpoint.write(old))))
    assert gathered.as_of == mark.as_of


def test_a_damaged_checkpoint_is_corrupt():
    frame = next(checkpoint_frames(next(checkpoint.write(busy_leader().cursors.state))))
    body = bytearray(frame.body)
    body[20] ^= 1
    with pytest.raises(LogCorrupt, match="digest"):
        Gatherer().feed(CheckpointFrame(frame.id, 0, frame.as_of, True, bytes(body)))


@pytest.mark.parametrize("cut", [0, 1, 40, 100, -1])
def test_records_that_end_early_are_corrupt(cut):
    records = checkpoint.encode(busy_leader().cursors.state)
    with pytest.raises(LogCorrupt):
        checkpoint.decode(records[:cut])


def test_a_checkpoint_is_due_when_the_log_grew_and_is_begun_once():
    leader = Leader(limits=ChannelLimits(checkpoint_every_bytes=1000))
    leader.create("a")
    assert not leader.cursors.checkpoints.due
    leader.publish(40)
    assert leader.cursors.checkpoints.due
    leader.hold = True
    for _ in range(5):
        leader.clock.advance(1)
        leader.publish(1)
    leader.commit()
    assert len(frames_of(leader)) == 1
    assert not leader.cursors.checkpoints.due


def test_a_large_checkpoint_is_due_again_when_the_log_grew_by_four_times_that():
    leader = Leader(limits=ChannelLimits(checkpoint_every_bytes=100))
    leader.create("a")
    leader.publish(10)
    leader.cursors.state.checkpoint = mark = CheckpointMark(1, 1000, 1, leader.cursors.state.applied.end_position)
    while leader.cursors.state.applied.end_position < mark.end_position + 4 * mark.size:
        assert not leader.cursors.checkpoints.due
        leader.publish(1)
    assert leader.cursors.checkpoints.due


def test_without_a_checkpoint_a_log_that_begins_in_the_middle_is_corrupt():
    leader = busy_leader()
    del leader.log.batches[0]
    with pytest.raises(LogCorrupt, match="no complete checkpoint"):
        leader.log.rebuild()


# ---- log start


def test_log_start_stays_below_every_floor_and_the_pump():
    leader = Leader()
    channel = leader.create("a")
    leader.publish(4)
    leader.fin(channel, *leader.deliver(channel, 2))
    leader.flush()
    leader.pause_topic()
    leader.publish(4)
    assert leader.cursors.retention.log_start_limit() == 2
    leader.cursors.retention.propose_log_start(8, leader.log.end_position)
    leader.flush()
    assert leader.cursors.state.log_start[0] == 2


def carry_all(leader: Leader, offset: int, position: int) -> int:
    refs = leader.cursors.retention.to_carry(offset, position)
    for ref in refs:
        frame = leader.log.frame_at(ref.position) if ref.position else leader.log.frame_of(ref.offset)
        leader.cursors.retention.carry(ref.offset, frame)
    leader.flush()
    return len(refs)


def test_what_is_to_be_carried_is_named_in_part_and_counted():
    leader = Leader()
    for name in "ab":
        leader.create(name)
    leader.publish(20)
    for name in "ab":
        channel = leader.cursors.channels[name]
        leader.deliver(channel)
        for offset in range(0, 20, 2 if name == "a" else 5):
            channel.req(offset, 1, 1_000_000, leader.now)
    leader.flush()
    place = leader.log.end_offset, leader.log.end_position
    everything = leader.cursors.retention.to_carry(*place)
    assert [ref.offset for ref in everything] == [0, 2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18]
    assert leader.cursors.retention.to_carry(*place, limit=3) == everything[:3]
    assert leader.cursors.retention.must_carry_more(*place, than=9)
    assert not leader.cursors.retention.must_carry_more(*place, than=10)
    carry_all(leader, 10, leader.log.end_position)
    assert [ref.offset for ref in leader.cursors.retention.to_carry(*place)] == [10, 12, 14, 15, 16, 18]


def unlink(leader: Leader) -> int:
    batches, gone = leader.log.batches, 0
    while leader.cursors.retention.may_unlink(
        end_offset=batches[0][0].end_offset,
        end_position=batches[0][0].end_position,
        end_log_id=batches[0][0].log_id,
    ):
        del batches[0]
        gone += 1
    return gone


def test_a_deferred_message_outlives_its_segment_twice():
    leader = Leader()
    channel = leader.create("a")
    leader.publish(3)
    leader.deliver(channel)
    channel.req(1, 1, 1_000_000, leader.now)
    leader.fin(channel, 0, 2)
    leader.flush()
    for round_ in range(2):
        offset, position = leader.log.end_offset, leader.log.end_position
        assert carry_all(leader, offset, position) == 1, round_
        assert carry_all(leader, offset, position) == 0
        leader.cursors.retention.propose_log_start(offset, position)
        write_checkpoint(leader)
        assert leader.cursors.state.log_start == (offset, position)
        assert unlink(leader) > 0
        leader = leader.restart()
    channel = leader.cursors.channels["a"]
    leader.clock.advance(1000)
    assert [r.offset for r in leader.redeliver(channel)] == [1]


def test_a_carry_of_a_message_that_is_gone_changes_nothing():
    leader = Leader()
    channel = leader.create("a")
    leader.publish(1)
    leader.deliver(channel)
    leader.cursors.retention.carry(0, leader.log.frame_of(0))
    leader.flush()
    assert len(channel.committed.deferred) == 0


def test_what_was_not_carried_holds_log_start_back():
    leader = Leader()
    channel = leader.create("a")
    leader.publish(3)
    leader.deliver(channel)
    channel.req(1, 1, 60_000, leader.now)
    leader.fin(channel, 0, 2)
    leader.flush()
    leader.cursors.retention.propose_log_start(3, leader.log.end_position)
    leader.flush()
    assert leader.cursors.state.log_start[0] == 1


def test_nothing_is_unlinked_before_a_checkpoint_above_it():
    leader = Leader()
    channel = leader.create("a")
    leader.publish(3)
    leader.fin(channel, *leader.deliver(channel))
    leader.flush()
    leader.cursors.retention.propose_log_start(3, leader.log.end_position)
    leader.flush()
    assert unlink(leader) == 0
    write_checkpoint(leader)
    assert unlink(leader) > 0
    assert leader.cursors.retention.needed_durable <= leader.log.log_id


def test_an_ephemeral_channel_holds_files_but_not_log_start():
    leader = Leader()
    leader.cursors.requests.create_ephemeral("e#ephemeral", 5)
    leader.flush()
    leader.publish(3)
    channel = leader.cursors.channels["e#ephemeral"]
    leader.deliver(channel)
    channel.req(0, 1, 60_000, leader.now)
    leader.fin(channel, 1, 2)
    leader.cursors.retention.propose_log_start(3, leader.log.end_position)
    write_checkpoint(leader)
    assert leader.cursors.state.log_start[0] == 3
    unlink(leader)
    assert leader.log.batches[0][0].first_offset == 0
    leader.clock.advance(60)
    leader.fin(channel, *[r.offset for r in leader.redeliver(channel)])
    assert unlink(leader) > 0


def test_a_policy_may_abandon_what_a_channel_does_not_read():
    leader = Leader()
    channel = leader.create("a")
    leader.publish(6)
    leader.deliver(channel, 4)
    channel.req(0, 1, 60_000, leader.now)
    leader.cursors.retention.propose_log_start(5, leader.log.end_position, (Abandoned(channel.uid, 0, 5),))
    leader.flush()
    assert channel.committed.abandoned == 4, "all below 5 but the deferred one"
    assert [e.counts for e in leader.effects if isinstance(e, Forgotten)] == [{1: 3}]
    assert leader.deliver(channel) == [5]
    assert leader.cursors.state.log_start[0] == 0, "the deferred message was not carried"


def test_a_policy_may_abandon_what_no_channel_ever_got():
    leader = Leader()
    leader.publish(6)
    leader.cursors.retention.propose_log_start(4, leader.log.end_position, (Abandoned(0, 0, 4),))
    leader.flush()
    assert (leader.cursors.state.pump, leader.cursors.state.log_start[0]) == (4, 4)
    assert leader.deliver(leader.create("a")) == [4, 5]


def test_if_the_first_file_begins_later_the_file_wins():
    state = PartitionState()
    leader = busy_leader()
    state = leader.cursors.state
    state.start_at(15, 999)
    assert state.log_start == (15, 999)
    assert all(channel.floor >= 15 for channel in state.channels.values())


def test_a_leader_reads_from_where_its_first_file_begins():
    leader = busy_leader().restart()
    leader.cursors.start_at(15, 999)
    assert leader.cursors.state.log_start == (15, 999)
    channel = leader.cursors.channels["b"]
    assert channel.cursor.floor == 15 and leader.deliver(channel, 2) == [15, 16]
    leader.cursors.start_at(15, 999)  # it knows: nothing is forgotten
    assert channel.in_flight == 2


def test_where_the_files_begin_is_nothing_to_ephemeral_channels():
    """Replicas let go of files at different times; those that are opened after that have the same state."""
    leader = Leader()
    leader.publish(3)
    leader.create("a")
    leader.cursors.requests.create_ephemeral("e#ephemeral", 77)
    leader.flush()
    state, other = leader.cursors.state, leader.cursors.state.snapshot()
    leader.publish(9)
    before = state.channels["e#ephemeral"].floor
    state.start_at(before + 2, 0)
    assert state.channels["e#ephemeral"].floor == before == other.channels["e#ephemeral"].floor
