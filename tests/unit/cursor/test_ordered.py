"""Strict order: one message at a time, the next only after the FIN of the one before is committed."""

from __future__ import annotations

import pytest

from tests.unit.cursor.tiny import Leader, Redelivery


def ordered(count: int) -> tuple[Leader, object]:
    leader = Leader(ordered=True)
    channel = leader.create("c")
    leader.publish(count)
    return leader, channel


def test_the_next_message_waits_for_the_commit_of_the_fin():
    leader, channel = ordered(3)
    assert leader.deliver(channel) == [0]
    assert leader.deliver(channel) == []
    leader.hold = True
    leader.fin(channel, 0)
    assert leader.cursors.urgent
    leader.flush()
    assert leader.deliver(channel) == [], "the FIN is written but not committed"
    leader.commit()
    assert leader.deliver(channel) == [1]


def test_a_requeued_message_comes_before_the_next():
    leader, channel = ordered(2)
    leader.deliver(channel)
    channel.req(0, 1, 60_000, leader.now)
    leader.flush()
    assert leader.deliver(channel) == [] == leader.redeliver(channel)
    leader.clock.advance(60)
    assert leader.deliver(channel) == []
    assert leader.redeliver(channel) == [Redelivery(0, 2)]
    leader.fin(channel, 0)
    leader.flush()
    assert leader.deliver(channel) == [1]


def test_the_reader_waits_at_a_message_for_later():
    leader, channel = ordered(1)
    leader.publish(1, deliver_at=leader.now.wall_ns + 10_000_000_000)
    leader.publish(1)
    for offset in (0, 1, 2):
        if offset == 1:
            assert leader.deliver(channel) == [] == leader.redeliver(channel)
            leader.clock.advance(10)
            assert [r.offset for r in leader.redeliver(channel)] == [1]
        else:
            assert leader.deliver(channel) == [offset]
        leader.fin(channel, offset)
        leader.flush()
    assert channel.committed.floor == 3


def test_of_two_due_messages_the_earlier_in_the_log_comes_first():
    leader, channel = ordered(0)
    leader.publish(1, deliver_at=leader.now.wall_ns + 10_000_000_000)
    leader.publish(1, deliver_at=leader.now.wall_ns + 1_000_000_000)
    leader.clock.advance(2)
    assert leader.redeliver(channel) == []
    leader.clock.advance(10)
    assert [r.offset for r in leader.redeliver(channel)] == [0]
    leader.fin(channel, 0)
    assert leader.redeliver(channel) == []
    leader.flush()
    assert [r.offset for r in leader.redeliver(channel)] == [1]


def test_the_lowest_deferred_message_has_its_alarm_whatever_was_due_before():
    """Nothing else may happen: no publish, no FIN and no new consumer."""
    leader, channel = ordered(0)
    for offset in range(2):
        leader.publish(1, deliver_at=leader.now.wall_ns + 1_000_000_000)
        assert channel.redelivery(leader.now) is None
        assert channel.next_deadline() == pytest.approx(leader.now.mono + 1)
        leader.clock.advance(1)
        channel.expire(leader.now)
        assert [r.offset for r in leader.redeliver(channel)] == [offset]
        leader.fin(channel, offset)
        leader.flush()


def test_a_deferred_message_has_its_alarm_while_a_later_one_is_due():
    leader, channel = ordered(0)
    leader.publish(1, deliver_at=leader.now.wall_ns + 10_000_000_000)
    leader.publish(1, deliver_at=leader.now.wall_ns + 1_000_000_000)
    leader.clock.advance(2)
    channel.expire(leader.now)
    assert channel.next_deadline() == pytest.approx(leader.now.mono + 8)


def test_what_is_due_and_waits_for_a_consumer_rings_no_alarm():
    leader, channel = ordered(0)
    leader.publish(1, deliver_at=leader.now.wall_ns + 1_000_000_000)
    leader.clock.advance(2)
    channel.expire(leader.now)
    assert channel.next_deadline() is None
    assert channel.redelivery(leader.now) is not None


def test_a_crash_repeats_the_last_message_and_no_other():
    leader, channel = ordered(3)
    leader.fin(channel, *leader.deliver(channel))
    leader.flush()
    leader.deliver(channel)
    again = leader.restart(ordered=True)
    assert again.deliver(again.cursors.channels["c"]) == [1]
