"""Moving a cursor, and the way back."""

from __future__ import annotations

import pytest

from nsqha.cursor.committed import checkpoint, state
from nsqha.cursor.committed.state import Sought
from nsqha.cursor.events import TARGET_END
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live.flight import NOT_IN_FLIGHT
from nsqha.cursor.partition import Forgotten
from nsqha.errors import NotFound
from tests.unit.cursor.tiny import Leader, fins


def leader_with(count: int) -> tuple[Leader, object]:
    leader = Leader()
    channel = leader.create("c")
    leader.publish(count)
    return leader, channel


def test_a_seek_back_delivers_again_from_there():
    leader, channel = leader_with(6)
    leader.fin(channel, *leader.deliver(channel))
    leader.flush()
    plan = leader.cursors.requests.plan_seek("c", 2)
    assert (plan.floor, plan.target, plan.again, plan.skipped, plan.clamped) == (6, 2, 4, 0, False)
    assert channel.cursor.floor == 6, "a plan changes nothing"
    leader.cursors.requests.seek("c", 2)
    assert leader.cursors.urgent
    leader.flush()
    assert leader.deliver(channel) == [2, 3, 4, 5]
    assert leader.restart().deliver(leader.restart().cursors.channels["c"]) == [2, 3, 4, 5]


def test_a_seek_to_the_end_skips_what_is_unread_and_the_target_is_clamped():
    leader, channel = leader_with(6)
    plan = leader.cursors.requests.plan_seek("c", 1000)
    assert (plan.target, plan.skipped, plan.clamped) == (6, 6, True)
    leader.cursors.requests.seek("c", TARGET_END)
    leader.flush()
    sought = [effect for effect in leader.effects if isinstance(effect, Sought)]
    assert sought[0].floor == 6
    assert leader.deliver(channel) == []


def test_a_seek_forgets_what_is_in_flight_and_tells_whose_it_was():
    leader, channel = leader_with(6)
    leader.deliver(channel, 2, owner=1)
    leader.deliver(channel, 3, owner=2)
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    forgotten = [effect for effect in leader.effects if isinstance(effect, Forgotten)]
    assert forgotten[0].counts == {1: 2, 2: 3}
    assert channel.in_flight == 0
    assert channel.next_deadline() is None


def test_all_that_was_deferred_is_written_before_a_seek_and_stays_deferred():
    """However much that is: otherwise a batch takes a part, and the rest rides with later ones."""
    leader = Leader(limits=ChannelLimits(changes_per_batch=2))
    channel = leader.create("c")
    leader.publish(6)
    for offset in leader.deliver(channel):
        assert channel.req(offset, 1, 60_000, leader.now) is None
    leader.cursors.requests.seek("c", TARGET_END)
    leader.flush()
    assert len(channel.cursor.deferred_overlay) == len(channel.committed.deferred) == 6
    leader.clock.advance(61)
    assert [found.offset for found in leader.redeliver(channel)] == [0, 1, 2, 3, 4, 5]


def test_an_old_fin_can_not_finish_a_new_delivery():
    leader, channel = leader_with(3)
    leader.deliver(channel)
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    leader.deliver(channel)
    assert channel.touch(0, 1, leader.now, 60.0) == NOT_IN_FLIGHT  # takes nothing off
    assert channel.req(0, 1, 0, leader.now) == NOT_IN_FLIGHT  # the old delivery's answer
    data = fins(1, 2, 0)
    assert channel.fin_run(data, 0, len(data), 1) == (0, 0)
    assert leader.fin(channel, 1, 2) == [NOT_IN_FLIGHT] * 2
    assert channel.fin_run(data, 0, len(data), 1) == (len(data), 3)
    assert channel.cursor.floor == 3


def test_another_connection_has_nothing_to_do_with_it():
    leader, channel = leader_with(1)
    leader.deliver(channel, owner=1)
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    leader.deliver(channel, owner=2)
    assert leader.fin(channel, 0, owner=2) == [None]


def test_a_seek_does_not_touch_deferred_messages_nor_their_deliveries():
    leader, channel = leader_with(4)
    leader.deliver(channel)
    channel.req(0, 1, 60_000, leader.now)
    channel.req(1, 1, 60_000, leader.now)
    leader.flush()
    leader.clock.advance(60)
    leader.redeliver(channel, 1)
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    assert channel.in_flight == 1
    assert leader.deliver(channel) == [2, 3], "the reader passes over what is deferred"
    assert leader.fin(channel, 0) == [None]
    assert [r.offset for r in leader.redeliver(channel)] == [1]


def test_what_was_requeued_after_the_seek_was_written_is_pending_by_position():
    leader, channel = leader_with(3)
    leader.deliver(channel)
    leader.hold = True
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    channel.req(0, 1, 60_000, leader.now)
    leader.fin(channel, 1)
    leader.flush()
    leader.commit()
    assert leader.deliver(channel) == [0, 1, 2]
    assert len(channel.committed.deferred) == 0


def test_undo_goes_back_with_the_finished_ranges():
    leader, channel = leader_with(6)
    leader.deliver(channel)
    leader.fin(channel, 0, 2, 3)
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    leader.fin(channel, *leader.deliver(channel, 1))
    leader.cursors.requests.undo("c")
    leader.flush()
    assert leader.deliver(channel) == [1, 4, 5]


def test_an_undo_can_be_undone():
    leader, channel = leader_with(3)
    leader.cursors.requests.seek("c", TARGET_END)
    leader.flush()
    leader.cursors.requests.undo("c")
    leader.flush()
    assert channel.committed.floor == 0
    leader.cursors.requests.undo("c")
    leader.flush()
    assert channel.committed.floor == 3


def test_too_many_ranges_are_left_out_and_the_plan_says_so():
    leader, channel = leader_with(9000)
    leader.deliver(channel)
    leader.fin(channel, *range(1, 9000, 2))
    leader.flush()
    plan = leader.cursors.requests.seek("c", 0)
    assert not plan.exact
    leader.flush()
    assert channel.committed.undo.ranges is None
    assert len(leader.log.batches[-1][1]) < 100, "the seek's batch"


def test_empty_drops_everything_and_its_undo_brings_it_back():
    leader, channel = leader_with(5)
    leader.deliver(channel, 4)
    channel.req(0, 1, 60_000, leader.now)
    channel.req(1, 1, 0, leader.now)
    leader.fin(channel, 2)
    leader.flush()
    leader.cursors.requests.empty("c")
    leader.flush()
    assert (channel.in_flight, channel.cursor.depth(5), channel.cursor.deferred_count) == (0, 0, 0)
    assert leader.redeliver(channel) == []
    plan = leader.cursors.requests.undo("c")
    assert (plan.deferred_again, plan.deferred_lost) == (1, 0)
    leader.flush()
    assert leader.deliver(channel) == [1, 3, 4]
    assert leader.redeliver(channel) == [], "it is not due"
    again = leader.restart()
    for one, live in ((leader, channel), (again, again.cursors.channels["c"])):
        one.clock.advance(60)
        assert [(found.offset, found.attempts) for found in one.redeliver(live)][:1] == [(0, 2)]


def test_what_empty_dropped_comes_back_behind_the_floor_and_through_a_checkpoint(monkeypatch):
    monkeypatch.setattr(state, "UNDO_DEFERRED_MAX", 4)
    leader, channel = leader_with(6)
    for offset in leader.deliver(channel):
        assert channel.req(offset, 1, 60_000, leader.now) is None
    leader.flush()
    assert channel.committed.floor == 6
    leader.cursors.requests.empty("c")
    leader.flush()
    read = checkpoint.decode(checkpoint.encode(leader.cursors.state))
    assert read.channels["c"].undo == channel.committed.undo
    plan = leader.cursors.requests.plan_undo("c")
    assert (plan.deferred_again, plan.deferred_lost) == (4, 2)
    leader.cursors.requests.undo("c")
    leader.flush()
    assert channel.cursor.deferred_count == 4
    leader.clock.advance(61)
    assert [found.offset for found in leader.redeliver(channel)] == [0, 1, 2, 3]


def test_an_undo_says_what_the_log_no_longer_has():
    leader, channel = leader_with(3)
    for offset in leader.deliver(channel):
        assert channel.req(offset, 1, 60_000, leader.now) is None
    leader.flush()
    leader.cursors.requests.empty("c")
    leader.flush()
    leader.cursors.start_at(2, leader.cursors.state.log_start[1])
    plan = leader.cursors.requests.plan_undo("c")
    assert (plan.deferred_again, plan.deferred_lost) == (1, 2)
    leader.cursors.requests.undo("c")
    leader.flush()
    assert [ref.offset for ref in channel.committed.deferred.items()] == [2]


def test_empty_drops_deferred_messages_in_flight_too():
    leader, channel = leader_with(1)
    leader.deliver(channel)
    channel.req(0, 1, 60_000, leader.now)
    leader.flush()
    leader.clock.advance(60)
    leader.redeliver(channel)
    leader.cursors.requests.empty("c")
    leader.flush()
    assert leader.fin(channel, 0) == [NOT_IN_FLIGHT]
    assert channel.in_flight == 0


def test_a_message_met_again_before_its_time_is_deferred():
    leader = Leader()
    channel = leader.create("c")
    due = leader.now.wall_ns + 60_000_000_000
    leader.publish(1, deliver_at=due)
    leader.cursors.requests.empty("c")
    leader.flush()
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    assert channel.next_run(1, 10) == (0, 1)
    assert channel.meet(0, due, leader.now)
    assert channel.next_run(1, 10) is None
    leader.clock.advance(60)
    assert [r.offset for r in leader.redeliver(channel)] == [0]


def test_seek_of_an_unknown_channel_or_nothing_to_undo():
    leader, _ = leader_with(1)
    with pytest.raises(NotFound):
        leader.cursors.requests.seek("x", 0)
    with pytest.raises(NotFound):
        leader.cursors.requests.undo("c")
