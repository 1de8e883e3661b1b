"""What a policy passes over: all that is unread, or the oldest of it; nothing else, and nothing uncounted."""

from __future__ import annotations

import random

import pytest

from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live.channel import Channel
from tests.unit.cursor.tiny import Leader, Redelivery


def law(leader: Leader, channel: Channel, finished: int) -> None:
    """Everything that the pump handed over is somewhere, once. `finished`: by consumers."""
    cursor, end = channel.cursor, leader.cursors.state.pump
    passing = cursor.passing
    known = finished + passing.skipped + passing.dropped + passing.expired + channel.in_flight + cursor.deferred_count
    assert end == known + cursor.depth(end), channel


def test_skip_passes_over_what_is_unread_and_what_comes():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(5)
    leader.ask(skip=True)
    leader.publish(5)
    assert leader.deliver(channel) == []
    assert (channel.cursor.passing.skipped, channel.cursor.depth(10), channel.cursor.floor) == (10, 0, 10)
    leader.flush()
    assert channel.committed.floor == 10, "retention may go on"
    leader.ask()
    leader.publish(2)
    assert leader.deliver(channel) == [10, 11]


def test_what_was_handed_out_is_not_passed_over():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(6)
    leader.deliver(channel, 3)
    channel.req(0, 1, 0, leader.now)
    channel.req(1, 1, 60_000, leader.now)
    leader.ask(skip=True)
    assert channel.cursor.passing.skipped == 3
    assert leader.redeliver(channel) == [Redelivery(0, 2)]
    leader.clock.advance(60)
    assert leader.redeliver(channel) == [Redelivery(1, 2)]
    assert channel.in_flight == 3


def test_the_depth_keeps_the_newest_that_are_unread():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(10)
    leader.deliver(channel, 2)
    leader.ask(max_depth=3)
    assert (channel.cursor.passing.dropped, channel.cursor.depth(10)) == (5, 3)
    leader.publish(2)
    assert leader.deliver(channel) == [9, 10, 11]
    assert channel.in_flight == 5, "what is in flight does not count"


def test_deferred_messages_are_neither_counted_nor_passed_over():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(2)
    leader.publish(1, deliver_at=leader.now.wall_ns + 10**10)
    leader.publish(2)
    leader.ask(max_depth=3)
    assert (channel.cursor.passing.dropped, channel.cursor.deferred_count) == (1, 1)
    assert leader.deliver(channel) == [1, 3, 4]
    leader.clock.advance(10)
    assert leader.redeliver(channel) == [Redelivery(2, 1)]


def test_the_window_bounds_what_is_passed_over_at_once():
    leader = Leader(limits=ChannelLimits(window=8))
    channel = leader.create("c")
    leader.publish(30)
    leader.deliver(channel, 1)
    leader.ask(skip=True)
    assert channel.cursor.next_read == 8, "the first is in flight, and holds the floor"
    leader.fin(channel, 0)
    for _ in range(10):
        leader.flush()
    assert channel.cursor.passing.skipped == 29
    assert channel.committed.floor == 30


def test_an_ordered_channel_does_not_pass_over_what_it_waits_for():
    leader = Leader(ordered=True)
    channel = leader.create("c")
    leader.publish(1, deliver_at=leader.now.wall_ns + 10**10)
    leader.publish(3)
    leader.ask(skip=True)
    assert channel.cursor.passing.skipped == 0
    leader.clock.advance(10)
    assert leader.redeliver(channel) == [Redelivery(0, 1)]
    leader.fin(channel, 0)
    leader.flush()
    leader.publish(1)
    assert channel.cursor.passing.skipped == 4


def test_readers_and_other_channels_are_left_alone():
    leader = Leader()
    channel = leader.create("c")
    reader = leader.create("r", reader=True)
    leader.ask(skip=True)
    leader.publish(3)
    assert channel.cursor.passing.skipped == 3
    assert (reader.cursor.passing.skipped, reader.committed.floor) == (0, 0)


def test_a_channel_that_comes_later_follows_too():
    leader = Leader()
    leader.ask(skip=True)
    channel = leader.create("late")
    leader.publish(2)
    assert channel.cursor.passing.skipped == 2


def test_what_is_too_old_is_passed_over_by_time():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(4)
    leader.ask(ttl_ms=10_000, max_depth=100)
    leader.clock.advance(6)
    leader.publish(2)
    leader.clock.advance(5)
    assert leader.cursors.passing.expire(leader.now.wall_ns, lambda time_ns: 4)
    assert (channel.cursor.passing.expired, channel.cursor.next_read) == (4, 4)
    assert leader.deliver(channel) == [4, 5]
    leader.fin(channel, 4, 5)
    leader.flush()
    assert not leader.cursors.passing.expire(leader.now.wall_ns, lambda time_ns: 4), "nothing is left to look for"


def test_a_retry_that_is_too_old_expires_when_its_turn_comes():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(3)
    leader.publish(1, deliver_at=leader.now.wall_ns + 20 * 10**9)
    leader.ask(ttl_ms=10_000)
    leader.deliver(channel, timeout=1e6)
    channel.req(0, 1, 0, leader.now)
    channel.req(1, 1, 15_000, leader.now)
    leader.clock.advance(20)
    leader.cursors.passing.expire(leader.now.wall_ns, lambda time_ns: 4)
    assert leader.redeliver(channel) == [Redelivery(3, 1)], "what was never delivered goes when it is due"
    assert (channel.cursor.passing.expired, channel.in_flight) == (2, 2)
    law(leader, channel, 0)
    leader.fin(channel, 2, 3)
    leader.flush()
    assert (channel.committed.floor, len(channel.committed.deferred)) == (4, 0)


def test_without_a_ttl_nothing_expires_any_more():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(2)
    leader.deliver(channel, 1)
    leader.ask(ttl_ms=1000)
    leader.cursors.passing.expire(leader.now.wall_ns, lambda time_ns: 2)
    leader.ask(max_depth=5)
    channel.req(0, 1, 0, leader.now)
    assert leader.redeliver(channel) == [Redelivery(0, 2)]


@pytest.mark.parametrize("seed", range(60))
def test_nothing_leaves_a_channel_uncounted(seed: int):
    rng = random.Random(seed)
    leader = Leader(limits=ChannelLimits(window=rng.choice([6, 40, 1000]), waiting_max=3))
    channel = leader.create("c")
    finished = 0
    held: list[int] = []
    for _ in range(60):
        match rng.randrange(8):
            case 0 | 1:
                later = rng.random() < 0.2
                leader.publish(rng.randint(1, 5), deliver_at=leader.now.wall_ns + 10**10 if later else 0)
            case 2:
                held += leader.deliver(channel, rng.randint(1, 4), timeout=1e6)
            case 3:
                held += [again.offset for again in leader.redeliver(channel, timeout=1e6)]
            case 4 if held:
                rng.shuffle(held)
                leader.fin(channel, held.pop())
                finished += 1
            case 5 if held:
                channel.req(held.pop(), 1, rng.choice([0, 1000, 20_000]), leader.now)
            case 6:
                leader.ask(**rng.choice([{}, {"skip": True}, {"max_depth": rng.randint(1, 6)}, {"ttl_ms": 1000}]))
            case 7:
                leader.clock.advance(rng.choice([0.1, 12]))
                channel.expire(leader.now)
                old = rng.randint(0, leader.cursors.state.pump)
                leader.cursors.passing.expire(leader.now.wall_ns, lambda time_ns, old=old: old)  # type: ignore[misc]
                leader.flush()
        leader.flush()  # `depth` is one too low for what was deferred, and is finished, but not committed yet
        law(leader, channel, finished)
