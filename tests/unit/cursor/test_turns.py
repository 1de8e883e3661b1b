"""Whose turn it is: what is unread, what came back, what is due."""

from __future__ import annotations

from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live.channel import Channel
from nsqha.cursor.live.waiting import Waiting
from nsqha.hot import WAITING, Ring
from tests.unit.cursor.tiny import Leader

SHARE, SHARE_OF = ChannelLimits().share, ChannelLimits().share_of


def hand_out(leader: Leader, channel: Channel) -> int | None:
    """The next message, as a consumer with RDY 1 gets it."""
    again = leader.redeliver(channel, 1)
    if again:
        return again[0].offset
    found = leader.deliver(channel, 1)
    return found[0] if found else None


def answer(leader: Leader, channel: Channel, offset: int, failing: range) -> None:
    if offset in failing:
        assert channel.req(offset, 1, 0, leader.now) is None
    else:
        assert channel.fin(offset, 1) is None


def consume(leader: Leader, channel: Channel, count: int, failing: range) -> list[int]:
    """So many messages one by one, of which some always fail."""
    found: list[int] = []
    while len(found) < count and (offset := hand_out(leader, channel)) is not None:
        found.append(offset)
        answer(leader, channel, offset, failing)
    return found


def led(messages: int, **limits: float) -> tuple[Leader, Channel]:
    leader = Leader(limits=ChannelLimits(**limits))
    channel = leader.create("c")
    if messages:
        leader.publish(messages)
    return leader, channel


def test_what_failed_goes_behind_what_waits():
    leader, channel = led(3)
    assert consume(leader, channel, 5, range(1)) == [0, 1, 2, 0, 0]


def test_what_timed_out_goes_behind_what_waits():
    leader, channel = led(3)
    assert leader.deliver(channel, 1, timeout=10.0) == [0]
    leader.clock.advance(11)
    assert channel.expire(leader.now) == [(1, 1)]
    assert consume(leader, channel, 3, range(0)) == [1, 2, 0]


def test_what_a_lost_consumer_had_goes_behind_what_waits_in_its_order():
    leader, channel = led(4)
    assert leader.deliver(channel, 2) == [0, 1]
    channel.detach(1, leader.now)
    assert consume(leader, channel, 4, range(0)) == [2, 3, 0, 1]


def test_a_message_that_failed_is_behind_at_most_so_many():
    leader, channel = led(3000)
    found = consume(leader, channel, 1002, range(1))
    assert found == [0, *range(1, 1001), 0]


def test_messages_published_later_do_not_go_before_one_that_failed():
    leader, channel = led(3)
    assert hand_out(leader, channel) == 0
    channel.req(0, 1, 0, leader.now)
    leader.publish(5)
    assert consume(leader, channel, 8, range(0)) == [1, 2, 0, 3, 4, 5, 6, 7]


def test_equal_places_go_in_the_order_of_coming_back():
    leader, channel = led(6)
    assert leader.deliver(channel, 4) == [0, 1, 2, 3]
    for offset in (2, 0, 3, 1):
        channel.req(offset, 1, 0, leader.now)
    assert consume(leader, channel, 6, range(0)) == [4, 5, 2, 0, 3, 1]


def test_a_short_delay_that_is_over_gives_a_place_as_of_then():
    leader, channel = led(10, retry_after_max=3)
    assert leader.deliver(channel, 1) == [0]
    channel.req(0, 1, 2000, leader.now)
    assert consume(leader, channel, 2, range(0)) == [1, 2]
    leader.clock.advance(2)
    assert consume(leader, channel, 5, range(0)) == [3, 4, 5, 0, 6]


def test_after_half_a_minute_it_waits_no_longer():
    leader, channel = led(3000)
    assert hand_out(leader, channel) == 0
    channel.req(0, 1, 0, leader.now)
    leader.clock.advance(29.9)
    assert hand_out(leader, channel) == 1
    leader.clock.advance(0.2)
    assert hand_out(leader, channel) == 0


def test_a_run_of_first_deliveries_ends_where_another_has_its_turn():
    leader, channel = led(3000, retry_after_max=10)
    assert leader.deliver(channel, 5) == [0, 1, 2, 3, 4]
    channel.req(3, 1, 0, leader.now)
    assert channel.redelivery(leader.now) is None
    assert channel.next_run(3000, 1000) == (5, 15)


def test_a_full_window_hands_out_what_waits():
    leader, channel = led(50, window=8, waiting_max=0)
    assert leader.deliver(channel, 8) == list(range(8))
    channel.req(5, 1, 0, leader.now)
    assert [r.offset for r in leader.redeliver(channel)] == [5]


def test_at_most_every_second_is_something_else_while_something_unread_is_there():
    leader, channel = led(2000, retry_after_max=1)
    failing = range(300)
    found = consume(leader, channel, 1500, failing)
    seen: set[int] = set()
    others = [offset in seen or seen.add(offset) is not None for offset in found]
    counts = [sum(others[at : at + SHARE_OF]) for at in range(len(others) - SHARE_OF)]
    assert max(counts) == SHARE
    assert found.count(650) == 1, "what is healthy gets its turn"


def test_what_is_due_does_not_wait_for_a_place_and_keeps_to_the_share():
    leader, channel = led(0)
    leader.publish(200, deliver_at=leader.clock.wall_ns() + 10_000_000_000)
    leader.publish(1000)
    assert hand_out(leader, channel) == 200
    leader.clock.advance(11)
    found = consume(leader, channel, 256, range(0))
    assert found[:SHARE] == list(range(64)), "due messages go at once"
    assert found[SHARE:SHARE_OF] == list(range(201, 201 + SHARE_OF - SHARE))
    assert sum(offset < 200 for offset in found) == 2 * SHARE


def test_what_always_fails_does_not_keep_what_is_due_waiting():
    leader, channel = led(400, retry_after_max=1)
    leader.publish(2, deliver_at=leader.clock.wall_ns() + 10_000_000_000)
    consume(leader, channel, 300, range(402))
    leader.clock.advance(11)
    assert 400 in consume(leader, channel, 6, range(400))


def test_a_clean_stop_leaves_what_was_handed_out_in_the_order_of_the_log():
    leader, channel = led(6)
    assert leader.deliver(channel, 3) == [0, 1, 2]
    leader.cursors.prepare_stop()
    leader.flush()
    leader = leader.restart()
    channel = leader.cursors.channels["c"]
    assert consume(leader, channel, 8, range(1)) == [0, 1, 2, 3, 4, 5, 0, 0]


def test_a_seek_forgets_places():
    leader, channel = led(6)
    assert hand_out(leader, channel) == 0
    channel.req(0, 1, 0, leader.now)
    assert consume(leader, channel, 3, range(0)) == [1, 2, 3]
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    assert consume(leader, channel, 8, range(0)) == [0, 1, 2, 3, 4, 5]


def test_an_ordered_channel_keeps_what_failed_first():
    leader = Leader(ordered=True)
    channel = leader.create("c")
    leader.publish(3)
    assert consume(leader, channel, 200, range(1)) == [0] * 200


def test_what_a_policy_drops_leaves_the_other_places_as_they_are():
    leader, channel = led(30, retry_after_max=4)
    assert leader.deliver(channel, 6) == list(range(6))
    channel.req(1, 1, 0, leader.now)
    assert leader.deliver(channel, 2) == [6, 7]
    channel.req(5, 1, 0, leader.now)
    channel.req(4, 1, 0, leader.now)
    channel.cursor.waiting.drop_below(3)
    assert consume(leader, channel, 7, range(0)) == [8, 9, 10, 11, 5, 4, 12]


def test_a_place_costs_one_mark_for_all_that_come_back_together():
    ring = Ring(0)
    ring.deliver(0, 1000, 1)
    waiting = Waiting(ring)
    waiting.add_expired(ring.expire(0, 1000, 1), 1000, 5.0)
    assert waiting.count == 1000 and ring.get(7) == WAITING
    group = waiting.group()
    assert (group.end, group.place, group.since) == (1000, 1000, 5.0)
    assert waiting.first() == 0
    waiting.pop(0)
    waiting.give_up(1)
    ring.settle(1, 2, Ring.DEFERRED)
    assert waiting.first() == 2 and waiting.group() is group
