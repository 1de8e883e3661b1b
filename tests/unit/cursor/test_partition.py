"""When events are written, and how they come back."""

from __future__ import annotations

from typing import Any

import pytest

from nsqha import hot
from nsqha.clock import Now
from nsqha.cursor import events
from nsqha.cursor.committed import checkpoint
from nsqha.cursor.committed.state import Created, Progressed
from nsqha.cursor.events import ChannelProgress, EpochStart, ProgressEvent, decode
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.partition import PartitionCursors
from nsqha.frames import HAS_CARRY, HAS_EVENTS, HEAD
from tests.unit.cursor.tiny import ID_BASE, Entry, Leader, Record, fins


def frames_in(data: bytes) -> list[object]:
    found, at = [], 0
    while at < len(data):
        size, frame_type = HEAD.unpack_from(data, at)
        found.append(decode(frame_type, data[at + 8 : at + 4 + size]))
        at += 4 + size
    return found


def consumed() -> tuple[Leader, object]:
    leader = Leader()
    channel = leader.create("c")
    leader.publish(10)
    leader.deliver(channel)
    leader.clock.advance(10)
    return leader, channel


def test_progress_of_a_channel_rides_with_data_every_4_ms():
    leader, channel = consumed()
    leader.fin(channel, 0)
    assert leader.cursors.take_events(leader.now)[1] == HAS_EVENTS
    leader.fin(channel, 1)
    leader.clock.advance(0.003)
    assert leader.cursors.take_events(leader.now) == (b"", 0)
    leader.clock.advance(0.0011)
    assert leader.cursors.take_events(leader.now)[1] == HAS_EVENTS
    assert leader.cursors.take_events(leader.now) == (b"", 0)


def rides_after(leader: Leader, channel: Any, offset: int) -> float:
    """Seconds until progress rides again."""
    leader.fin(channel, offset)
    for ms in range(1, 100):
        leader.clock.advance(0.001)
        if leader.cursors.take_events(leader.now)[0]:
            return ms / 1000
    raise AssertionError("never")


@pytest.mark.parametrize(("channels", "seconds"), [(1, 0.004), (4, 0.004), (20, 0.02), (100, 0.04)])
def test_the_more_channels_a_progress_names_the_later_the_next_one_rides(channels: int, seconds: float):
    leader = Leader()
    all_ = [leader.create(f"c{n}") for n in range(channels)]
    leader.publish(5)
    for channel in all_:
        leader.deliver(channel)
        leader.fin(channel, 0)
    leader.clock.advance(1)
    data, _ = leader.cursors.take_events(leader.now)
    (progress,) = frames_in(data)
    assert len(progress.channels) == channels, "none waits for another one's turn"
    assert len(data) < 60 * channels
    assert rides_after(leader, all_[0], 1) == pytest.approx(seconds, abs=0.0011)


@pytest.mark.parametrize(("ranges", "seconds"), [(2, 0.004), (15, 0.016), (200, 0.044)])
def test_the_more_ranges_a_progress_names_the_later_the_next_one_rides(ranges: int, seconds: float):
    leader = Leader()
    channel = leader.create("c")
    leader.publish(500)
    leader.deliver(channel, 500)
    leader.fin(channel, *range(1, 2 * ranges, 2))
    leader.clock.advance(1)
    assert leader.cursors.take_events(leader.now)[0]
    assert rides_after(leader, channel, 499) == pytest.approx(seconds, abs=0.0011)


@pytest.mark.parametrize("ahead", [(), (7, 9)], ids=["in order", "out of order"])
def test_a_crash_repeats_what_was_finished_behind_the_last_batch_and_no_more(ahead: tuple[int, ...]):
    leader = Leader()
    channel = leader.create("c")
    finished: list[int] = []
    for n in range(5):
        leader.clock.advance(0.005)
        leader.publish(20)
        in_log = {*finished}
        leader.deliver(channel, 20)
        finished += [20 * n + offset for offset in range(20) if offset not in ahead]
        leader.fin(channel, *finished[-20 + len(ahead) :])
    channel = leader.restart().cursors.channels["c"]
    settled = {*range(channel.cursor.floor), *(o for first, end in channel.committed.ranges for o in range(first, end))}
    assert settled >= in_log
    assert len({*finished} - settled) <= 20


def test_a_floor_alone_is_written_as_any_progress_is():
    leader, channel = consumed()
    leader.fin(channel, 0, 1, 2)
    data, flags = leader.cursors.take_events(leader.now)
    assert flags == HAS_EVENTS
    assert frames_in(data) == [ProgressEvent((ChannelProgress(channel.uid, channel.committed.seek, 3),))]


def test_a_floor_rides_with_what_else_is_due():
    leader, channel = consumed()
    leader.fin(channel, 0)
    channel.req(3, 1, 60_000, leader.now)
    (progress,) = frames_in(leader.cursors.take_events(leader.now)[0])
    assert [offset for offset, _, _ in progress.channels[0].puts] == [3], "a deferral is not left behind"
    leader.fin(channel, 1)
    leader.clock.advance(1)
    leader.cursors.checkpoints.begin(leader.cursors.state.snapshot())
    assert [type(frame).__name__ for frame in frames_in(leader.cursors.take_events(leader.now)[0])] == [
        "ProgressEvent",
        "CheckpointFrame",
    ]


@pytest.mark.parametrize("ranges", [(), ((4, 6), (8, 9))], ids=["floor", "ranges"])
@pytest.mark.parametrize("behind", [b"", hot.frame(b"x")], ids=["alone", "riding"])
@pytest.mark.parametrize(("uid", "seek"), [(0, 0), (0, -1), (99, 0)], ids=["newest", "before a seek", "of no channel"])
def test_floors_and_ranges_are_applied_quickly_as_slowly(
    monkeypatch: pytest.MonkeyPatch, ranges: Any, behind: bytes, uid: int, seek: int
):
    states = []
    for quick in (True, False):
        leader, channel = consumed()
        leader.cursors.requests.seek("c", 1)
        leader.flush()
        committed = channel.committed
        progress = ChannelProgress(committed.uid + uid, committed.seek + seek, 3, ranges)
        if not quick:
            monkeypatch.setattr(events, "floor_in", lambda data: None)
            monkeypatch.setattr(events, "cursors_in", lambda data, at, end: None)
        leader._write(ProgressEvent((progress,)).encode(), HAS_EVENTS, [behind] if behind else [], int(bool(behind)))
        states.append((committed.floor, checkpoint.encode(leader.cursors.state)))
    assert states[0] == states[1]
    assert states[0][0] == (3 if (uid, seek) == (0, 0) else 1)


def test_floors_only_is_a_batch_for_which_no_reader_waits():
    leader, channel = consumed()
    leader.fin(channel, 0)
    cursors = leader.cursors
    events, flags = cursors.take_events(leader.now)
    leader._write(events, flags, [], 0)
    entry = leader.log.batches[-1][0]
    effects = [Progressed(channel.committed)]
    assert cursors.floors_only(entry, effects)
    assert not cursors.floors_only(entry, [*effects, Created(channel.committed)])
    assert not cursors.floors_only(entry, []), "an empty batch was asked for by somebody"
    leader.publish(1)
    assert not cursors.floors_only(entry, effects), "its reader has something in front of it"


def test_without_data_progress_is_due_after_50_ms():
    leader, channel = consumed()
    leader.flush()
    assert leader.cursors.event_deadline() is None
    channel.expire(leader.now)
    leader.fin(channel, 0)
    assert not leader.cursors.urgent
    assert leader.cursors.event_deadline() == leader.now.mono + 0.05
    leader.clock.advance(0.051)
    assert leader.cursors.take_events(leader.now)[0]
    assert leader.cursors.event_deadline() is None


def test_progress_of_all_channels_is_one_frame_with_only_what_is_new():
    leader = Leader()
    a, b = leader.create("a"), leader.create("b")
    leader.publish(6)
    for channel in (a, b):
        leader.deliver(channel)
    leader.fin(a, 0, 3)
    leader.fin(b, 1)
    (progress,) = frames_in(leader.cursors.take_events(leader.now, force=True)[0])
    assert isinstance(progress, ProgressEvent)
    assert [(c.floor, c.ranges) for c in progress.channels] == [(1, ((3, 4),)), (0, ((1, 2),))]
    leader.fin(a, 5)
    (progress,) = frames_in(leader.cursors.take_events(leader.now, force=True)[0])
    assert [(c.floor, c.ranges) for c in progress.channels] == [(1, ((5, 6),))]


def test_what_was_asked_for_is_urgent_and_takes_progress_with_it():
    leader, channel = consumed()
    leader.fin(channel, 0)
    assert not leader.cursors.urgent
    leader.cursors.requests.seek("c", 5)
    assert leader.cursors.urgent
    kinds = [type(frame).__name__ for frame in frames_in(leader.cursors.take_events(leader.now)[0])]
    assert kinds == ["ProgressEvent", "Seek"]
    assert not leader.cursors.urgent


def test_being_urgent_without_news_does_not_last():
    leader, _ = consumed()
    leader.flush()
    leader.cursors._context.urgent = True
    assert not leader.cursors.urgent
    assert leader.cursors.take_events(leader.now, force=True) == (b"", 0)


def test_events_of_a_batch_that_was_not_stored_go_before_the_next():
    leader, channel = consumed()
    leader.fin(channel, 0)
    channel.req(1, 1, 60_000, leader.now)
    lost, flags = leader.cursors.take_events(leader.now, force=True)
    channel.req(2, 1, 60_000, leader.now)
    later, _ = leader.cursors.take_events(leader.now, force=True)
    leader._write(lost + later, flags, [], 0)
    assert channel.committed.floor == 3
    assert channel.cursor.deferred_overlay.uncommitted == 0
    assert not leader.cursors._taken


def test_own_progress_behind_another_frame_is_recognised():
    leader, channel = consumed()
    leader.fin(channel, 0)
    taken, flags = leader.cursors.take_events(leader.now, force=True)
    leader._write(EpochStart(1).encode() + taken, flags, [], 0)
    assert channel.committed.floor == 1
    assert channel.cursor.next_read == 10, "it was not begun again"


def test_progress_of_another_leader_begins_the_channel_anew():
    leader, channel = consumed()
    follower = PartitionCursors(id_base=ID_BASE)
    for entry, data in leader.log.batches:
        follower.apply(entry, data)
    leader.fin(channel, 0, 1)
    leader.flush()
    follower.apply(*leader.log.batches[-1])
    assert follower.channels["c"].cursor.next_read == 2
    assert checkpoint.encode(follower.state) == checkpoint.encode(leader.cursors.state)


def test_many_deferrals_are_spread_and_the_floor_waits_for_them():
    leader = Leader(limits=ChannelLimits(changes_per_batch=3))
    channel = leader.create("c")
    leader.publish(10)
    leader.deliver(channel)
    for offset in range(10):
        channel.req(offset, 1, 60_000, leader.now)
    floors = []
    for _ in range(4):
        leader._write(*leader.cursors.take_events(leader.now, force=True), [], 0)
        floors.append((len(channel.committed.deferred), channel.committed.floor))
    assert floors == [(3, 0), (6, 0), (9, 0), (10, 10)]


def test_many_deferrals_are_written_without_waiting():
    leader = Leader(limits=ChannelLimits(changes_urgent=3, changes_per_batch=4))
    channel = leader.create("c")
    leader.publish(10)
    leader.deliver(channel)
    for offset in range(2):
        channel.req(offset, 1, 60_000, leader.now)
    assert not leader.cursors.urgent
    for offset in range(2, 8):
        channel.req(offset, 1, 60_000, leader.now)
    assert leader.cursors.urgent
    leader._write(*leader.cursors.take_events(leader.now), [], 0)
    assert leader.cursors.urgent, "four are left"
    leader._write(*leader.cursors.take_events(leader.now), [], 0)
    assert not leader.cursors.urgent
    assert len(channel.committed.deferred) == 8


def test_a_clean_stop_tells_attempts_of_everything_in_flight():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(8)
    leader.deliver(channel, 6)
    leader.fin(channel, 2)
    channel.req(1, 1, 0, leader.now)
    leader.redeliver(channel)
    channel.req(4, 1, 60_000, leader.now)
    leader.clock.advance(60)
    leader.redeliver(channel)
    leader.cursors.prepare_stop()
    leader.flush()
    assert channel.committed.attempts == [(0, 1, 1), (1, 2, 2), (3, 4, 1), (5, 6, 1)]
    leader = leader.restart()
    channel = leader.cursors.channels["c"]
    found = {r.offset: r.attempts for r in leader.redeliver(channel)}
    assert leader.deliver(channel) == [6, 7]
    assert found | {r.offset: r.attempts for r in leader.redeliver(channel)} == {0: 2, 1: 3, 3: 2, 5: 2, 4: 3}


def test_a_clean_stop_of_an_idle_partition_writes_nothing():
    leader = Leader()
    leader.create("c")
    leader.cursors.prepare_stop()
    assert leader.cursors.take_events(leader.now, force=True) == (b"", 0)


def test_flags_say_what_is_in_the_batch():
    leader = Leader()
    leader.cursors.retention.carry(0, b"frame")
    assert leader.cursors.take_events(leader.now)[1] == HAS_CARRY
    leader.cursors.requests.topic_empty()
    assert leader.cursors.take_events(leader.now)[1] == HAS_EVENTS


def test_plain_batches_change_only_the_end():
    cursors = PartitionCursors(id_base=ID_BASE)
    assert cursors.apply(Entry(1, 1, 0, 5, 0, 100, 7, 0), b"never looked at", Now(1.0, 1)) == []
    assert (cursors.state.applied.end_offset, cursors.state.pump) == (5, 0)


def test_reconcile_is_idempotent():
    leader = Leader()
    leader.create("c")
    assert not leader.cursors.requests.reconcile(leader.record)
    assert leader.cursors.requests.reconcile(Record(2, True, leader.record.channels))
    assert not leader.cursors.requests.reconcile(Record(2, True, leader.record.channels))
    leader.flush()
    assert leader.cursors.state.paused


def test_a_paused_channel_hands_out_nothing_but_takes_answers():
    leader, channel = consumed()
    leader.publish(1)
    leader.pause("c")
    channel.req(0, 1, 0, leader.now)
    assert leader.deliver(channel) == [] == leader.redeliver(channel)
    data = fins(1, 2)
    assert channel.fin_run(data, 0, len(data), 1) == (len(data), 2)
    leader.clock.advance(60)
    assert channel.expire(leader.now) == [(1, 7)]
    leader.pause("c", False)
    assert leader.deliver(channel) == [10]


def test_deleting_a_channel_takes_its_consumers_messages_with_it():
    leader, channel = consumed()
    leader.fin(channel, 0)
    leader.delete("c")
    assert leader.cursors.channels == {}
    leader.flush()
    assert leader.cursors.event_deadline() is None
