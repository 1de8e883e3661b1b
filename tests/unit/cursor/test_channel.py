"""One channel: delivery, FIN, REQ, TOUCH, time-outs, lost consumers."""

from __future__ import annotations

import pytest

from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live import counts
from nsqha.cursor.live.acting import Action, act
from nsqha.cursor.live.flight import NOT_IN_FLIGHT, NOT_OWNER
from tests.unit.cursor.tiny import Leader, Redelivery, fins


def test_fin_in_order_moves_the_floor_and_progress_commits_it():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(10)
    assert leader.deliver(channel) == list(range(10))
    data = fins(*range(10))
    assert channel.fin_run(data, 0, len(data), 1) == (len(data), 10)
    assert (channel.cursor.floor, channel.committed.floor, channel.cursor.uncommitted_progress) == (10, 0, 10)
    leader.flush()
    assert channel.committed.floor == 10
    assert channel.in_flight == 0
    assert channel.answers.finished == 10


def test_out_of_order_fin_waits_for_the_hole():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(5)
    leader.deliver(channel)
    assert leader.fin(channel, 1, 2, 4) == [None] * 3
    leader.flush()
    assert channel.committed.floor == 0
    assert list(channel.committed.ranges) == [(1, 3), (4, 5)]
    leader.fin(channel, 0)
    leader.flush()
    assert channel.committed.floor == 3
    assert list(channel.committed.ranges) == [(4, 5)]


def test_a_restart_delivers_what_was_not_committed_and_only_that():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(6)
    leader.deliver(channel)
    leader.fin(channel, 0, 2, 3)
    leader.flush()
    leader.fin(channel, 1)
    again = leader.restart()
    assert again.deliver(again.cursors.channels["c"]) == [1, 4, 5]


def test_the_first_channel_gets_the_backlog_a_later_one_starts_now():
    leader = Leader()
    leader.publish(3)
    assert leader.cursors.state.pump == 0
    first = leader.create("first")
    leader.publish(2)
    second = leader.create("second")
    leader.publish(1)
    assert leader.deliver(first) == [0, 1, 2, 3, 4, 5]
    assert leader.deliver(second) == [5]


def test_req_and_timeout_and_attempts():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(2)
    leader.deliver(channel)
    assert channel.req(0, 1, 0, leader.now) is None
    assert leader.redeliver(channel) == [Redelivery(0, 2)]
    leader.clock.advance(61)
    assert sorted(channel.expire(leader.now)) == [(1, 1), (1, 1)]
    assert channel.answers.timed_out == 2
    assert sorted(leader.redeliver(channel)) == [Redelivery(0, 3), Redelivery(1, 2)]
    assert leader.fin(channel, 0, 1) == [None, None]
    assert channel.cursor.floor == 2


def test_a_long_requeue_is_deferred_and_the_floor_passes_it():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(2)
    leader.deliver(channel)
    channel.req(0, 1, 60_000, leader.now)
    leader.fin(channel, 1)
    leader.flush()
    assert channel.committed.floor == 2
    assert channel.cursor.deferred_count == 1
    leader = leader.restart()
    channel = leader.cursors.channels["c"]
    assert leader.redeliver(channel) == []
    leader.clock.advance(60)
    assert leader.redeliver(channel) == [Redelivery(0, 2)]
    leader.fin(channel, 0)
    leader.flush()
    assert len(channel.committed.deferred) == 0


def held(leader: Leader, name: str = "c") -> counts.HeldCounts:
    """Depth and deferred, as the broker shows them."""
    cursor, now_ns = leader.cursors.channels[name].cursor, leader.now.wall_ns
    assert counts.prepare(cursor, now_ns)
    return counts.held(cursor, now_ns)


@pytest.mark.parametrize("name", ["c", "c#ephemeral"])
def test_what_is_due_counts_as_waiting_without_a_consumer(name: str) -> None:
    leader = Leader()
    channel = leader.create(name)
    leader.publish(2, deliver_at=leader.now.wall_ns + 500_000_000)
    leader.publish(1)
    assert held(leader, name) == (1, 2)
    leader.clock.advance(1)
    assert held(leader, name) == (3, 0)
    assert leader.redeliver(channel, 1) == [Redelivery(0, 1)]
    assert held(leader, name) == (2, 0), "one is in flight"
    channel.req(0, 1, 60_000, leader.now)
    assert held(leader, name) == (2, 1), "not written yet"
    leader.flush()
    assert held(leader, name) == (2, 1)
    leader.clock.advance(61)
    assert held(leader, name) == (3, 0)


def test_what_an_operator_requeues_waits_and_is_not_deferred() -> None:
    leader = Leader()
    channel = leader.create("c")
    leader.publish(1, deliver_at=leader.now.wall_ns + 3_600_000_000_000)
    act(channel.cursor, 0, Action.REQUEUE, leader.now)
    assert held(leader) == (1, 0)
    leader.flush()
    assert held(leader) == (1, 0)


@pytest.mark.parametrize("delay_ms", [0, 1000, 60_000])
def test_who_may_answer(delay_ms):
    leader = Leader()
    channel = leader.create("c")
    leader.publish(1)
    leader.deliver(channel, owner=1)
    assert channel.fin(0, 2) == NOT_OWNER
    assert channel.req(0, 2, 0, leader.now) == NOT_OWNER
    assert channel.touch(0, 2, leader.now, 60.0) == NOT_OWNER
    channel.req(0, 1, delay_ms, leader.now)
    assert channel.fin(0, 1) == NOT_IN_FLIGHT
    leader.clock.advance(60)
    assert leader.redeliver(channel, owner=2) == [Redelivery(0, 2)]
    assert channel.fin(0, 1) == NOT_OWNER
    assert channel.fin(0, 2) is None
    assert channel.fin(0, 2) == NOT_IN_FLIGHT


def test_touch_prolongs_up_to_the_maximum():
    leader = Leader(limits=ChannelLimits(max_msg_timeout_s=100.0))
    channel = leader.create("c")
    leader.publish(1)
    leader.deliver(channel, timeout=60.0)
    leader.clock.advance(50)
    assert channel.touch(0, 1, leader.now, 60.0) is None  # would be until 110, may be until 100
    leader.clock.advance(40)
    assert channel.expire(leader.now) == []
    assert channel.touch(0, 1, leader.now, 60.0) is None
    assert channel.next_deadline() == leader.now.mono + 10
    leader.clock.advance(10)
    assert channel.expire(leader.now) == [(1, 1)]


def test_what_the_log_can_not_read_is_given_up_and_nothing_else():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(10)
    assert channel.next_run(10, 4) == (0, 4)
    channel.delivered(0, 4, 1, 1e9)
    leader.fin(channel, 0)
    channel.detach(1, leader.now)  # 1, 2 and 3 wait
    assert channel.cursor.give_up(2, 7) == 5  # two that wait, three that were not read yet
    assert channel.cursor.next_read == 7
    assert leader.deliver(channel) == [7, 8, 9]
    assert [r.offset for r in leader.redeliver(channel)] == [1]
    assert channel.cursor.give_up(2, 7) == 0  # asking twice is safe
    leader.fin(channel, 1, 7, 8, 9)
    leader.flush()
    assert channel.committed.floor == 10
