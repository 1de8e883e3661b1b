"""Where requeued and stuck messages wait, and the bounds of what is kept in memory."""

from __future__ import annotations

from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live.requeue import stays_in_memory
from tests.unit.cursor.tiny import Leader, Redelivery


def test_the_rule():
    limits = ChannelLimits(short_delay_s=5.0, waiting_max=2)

    def rule(delay_s: float, attempts: int, remembered: int) -> bool:
        return stays_in_memory(delay_s=delay_s, attempts=attempts, remembered=remembered, limits=limits)

    assert rule(0, 1, 1000), "costs an integer"
    assert rule(0, 2, 1) and not rule(0, 2, 2)
    assert rule(5, 1, 0) and not rule(5.1, 1, 0) and not rule(5, 1, 2)


def test_a_short_requeue_waits_in_memory_and_is_counted_as_deferred():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(2)
    leader.deliver(channel)
    channel.req(0, 1, 2000, leader.now)
    assert (channel.cursor.deferred_count, channel.cursor.depth(2), channel.in_flight) == (1, 0, 1)
    assert channel.next_deadline() == leader.now.mono + 2
    leader.clock.advance(2)
    channel.expire(leader.now)
    assert (channel.cursor.deferred_count, channel.cursor.depth(2)) == (0, 1)
    assert leader.redeliver(channel) == [Redelivery(0, 2)]


def test_what_a_client_asks_to_come_again_in_seconds_is_worth_keeping():
    leader = Leader()
    channel = leader.create("c")
    kept: list[int] = []
    leader.cursors.keep_by(kept.append)
    leader.publish(5)
    leader.deliver(channel, timeout=10)
    channel.req(0, 1, 0, leader.now)
    channel.req(1, 1, 1, leader.now)
    channel.req(2, 1, 5000, leader.now)
    channel.req(3, 1, 5001, leader.now)
    assert kept == [1, 2], "what comes at once is in memory as it is; what comes later would push out what comes sooner"
    leader.clock.advance(10)
    channel.expire(leader.now)
    assert kept == [1, 2], "what times out was read long ago"


def test_a_full_window_stops_the_reader_until_the_floor_is_committed():
    leader = Leader(limits=ChannelLimits(window=4))
    channel = leader.create("c")
    leader.publish(8)
    assert leader.deliver(channel) == [0, 1, 2, 3]
    leader.hold = True
    leader.fin(channel, 0, 1)
    leader.flush()
    assert channel.cursor.uncommitted_progress == 2
    assert leader.deliver(channel) == []
    leader.commit()
    assert leader.deliver(channel) == [4, 5]


def test_what_waits_at_the_floor_of_a_full_window_is_deferred():
    leader = Leader(limits=ChannelLimits(window=8))
    channel = leader.create("c")
    leader.publish(20)
    leader.deliver(channel, 8, timeout=10)
    leader.fin(channel, *range(1, 8))
    channel.req(0, 1, 3000, leader.now)
    assert leader.deliver(channel) == []
    channel.expire(leader.now)
    assert channel.cursor.floor == 8
    assert leader.cursors.urgent
    assert leader.cursors.event_deadline() == leader.now.mono
    leader.flush()
    assert leader.deliver(channel, 3) == [8, 9, 10]
    assert leader.redeliver(channel) == []
    leader.clock.advance(3)
    assert leader.redeliver(channel) == [Redelivery(0, 2)]


def test_what_is_in_flight_at_the_floor_blocks_until_it_times_out():
    leader = Leader(limits=ChannelLimits(window=4))
    channel = leader.create("c")
    leader.publish(8)
    leader.deliver(channel, timeout=10)
    leader.fin(channel, 1, 2, 3)
    leader.flush()
    assert leader.deliver(channel) == []
    channel.expire(leader.now)
    assert channel.cursor.floor == 0
    assert not leader.cursors.urgent
    leader.clock.advance(10)
    channel.expire(leader.now)
    assert channel.cursor.floor == 4
    leader.flush()
    assert leader.deliver(channel) == [4, 5, 6, 7]
    assert leader.redeliver(channel) == [Redelivery(0, 2)]


def test_redelivered_messages_in_flight_are_bounded():
    leader = Leader(limits=ChannelLimits(singles_max=2))
    channel = leader.create("c")
    leader.publish(5)
    leader.deliver(channel)
    channel.detach(1, leader.now)
    assert len(leader.redeliver(channel)) == 2
    leader.fin(channel, 0)
    assert len(leader.redeliver(channel)) == 1


def test_attempts_end_at_what_a_frame_can_say():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(1)
    leader.deliver(channel)
    channel.cursor.flight.singles.clear()
    channel.req(0, 1, 0, leader.now)
    channel.cursor.waiting._attempts[0] = 65535
    assert leader.redeliver(channel) == [Redelivery(0, 65535)]


def test_a_lost_consumer_gives_back_at_once_and_it_counts_as_time_outs():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(4)
    leader.deliver(channel, 2, owner=1)
    leader.deliver(channel, 2, owner=2)
    channel.touch(0, 1, leader.now, 60.0)
    assert channel.detach(1, leader.now) == 2
    assert (channel.answers.timed_out, channel.in_flight, channel.cursor.depth(4)) == (2, 2, 2)
    assert sorted(leader.redeliver(channel, owner=2)) == [Redelivery(0, 2), Redelivery(1, 2)]


def test_a_clock_that_is_set_back_loses_nothing():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(2)
    leader.deliver(channel)
    channel.req(0, 1, 60_000, leader.now)
    leader.flush()
    leader.clock.advance(60)
    assert channel.redelivery(leader.now) is not None
    leader.clock.wall -= 3600 * 10**9
    assert leader.redeliver(channel) == [Redelivery(0, 2)], "what was found due stays due"
    channel.req(1, 1, 6_000, leader.now)
    leader.flush()
    leader.clock.advance(6)
    assert leader.redeliver(channel) == [Redelivery(1, 2)]
