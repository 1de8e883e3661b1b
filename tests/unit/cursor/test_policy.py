"""What a policy makes of a message that failed."""

from __future__ import annotations

import pytest

from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.policy import ChannelPolicies, RetryPolicy, draw
from nsqha.election.policy import ChannelPolicy, in_force
from tests.unit.cursor.tiny import Leader, Record, Redelivery


def policy(**said: object) -> RetryPolicy | None:
    return RetryPolicy.of(in_force(ChannelPolicy(**said), ChannelPolicy()))  # type: ignore[arg-type]


def test_the_delay_grows_up_to_its_bound():
    retry = RetryPolicy(first_s=1.0, most_s=10.0, factor=2.0)
    assert [retry.delay(0, failures=n, draw=0.5) for n in range(1, 7)] == [1, 2, 4, 8, 10, 10]
    assert retry.delay(0, failures=65535, draw=0.5) == 10, "no number is too large for the power"


def test_the_longer_delay_counts_unless_the_policy_is_to_replace_it():
    retry = RetryPolicy(first_s=1.0, most_s=10.0)
    assert [retry.delay(asked, failures=1, draw=0.5) for asked in (0, 0.5, 7)] == [1, 1, 7]
    instead = RetryPolicy(first_s=1.0, most_s=10.0, instead=True)
    assert [instead.delay(asked, failures=1, draw=0.5) for asked in (0, 7)] == [1, 1]


def test_jitter_spreads_the_delay_evenly_and_the_same_everywhere():
    retry = RetryPolicy(first_s=10.0, most_s=100.0, jitter=0.2)
    delays = [retry.delay(0, failures=1, draw=draw(7, offset, 1)) for offset in range(10_000)]
    assert 8 <= min(delays) < 8.01
    assert 11.99 < max(delays) <= 12
    assert 9.95 < sum(delays) / len(delays) < 10.05
    assert draw(7, 5, 1) == draw(7, 5, 1)
    assert len({draw(7, 5, 1), draw(7, 5, 2), draw(7, 6, 1), draw(8, 5, 1)}) == 4


def test_without_a_retry_nothing_changes_a_clients_delay():
    assert policy() is None
    assert policy(retry_max_ms=1000, retry_jitter=0.5) is None
    assert policy(retry_ms=0, retry_instead=True) is not None, "no delay at all, whatever a client asks for"


def test_the_newest_record_counts():
    policies = ChannelPolicies()
    assert policies.retry("c") is None
    policies.follow(Record(5, policy=ChannelPolicy(retry_ms=1000)))
    policies.follow(Record(4))
    assert policies.retry("c") is not None
    policies.follow(Record(6))
    assert policies.retry("c") is None


def test_each_kind_of_failure_waits():
    leader = Leader()
    channel = leader.create("c")
    leader.ask(retry_ms=2000, retry_jitter=0.0)
    leader.publish(2)
    leader.deliver(channel, timeout=10)
    channel.req(0, 1, 0, leader.now)
    leader.clock.advance(1.9)
    assert leader.redeliver(channel) == []
    leader.clock.advance(0.1)
    assert leader.redeliver(channel, timeout=60) == [Redelivery(0, 2)]
    leader.clock.advance(8)
    channel.expire(leader.now)  # 1 timed out
    assert leader.redeliver(channel) == []
    leader.clock.advance(2)
    assert leader.redeliver(channel) == [Redelivery(1, 2)]
    channel.detach(1, leader.now)  # a second failure of both
    leader.clock.advance(3.9)
    assert leader.redeliver(channel) == []
    leader.clock.advance(0.1)
    assert sorted(leader.redeliver(channel)) == [Redelivery(0, 3), Redelivery(1, 3)]


def test_a_connection_lost_at_the_first_delivery_makes_no_delay():
    leader = Leader()
    channel = leader.create("c")
    leader.ask(retry_ms=2000)
    leader.publish(2)
    leader.deliver(channel)
    channel.detach(1, leader.now)
    assert leader.redeliver(channel) == [Redelivery(0, 2), Redelivery(1, 2)]


def test_a_long_delay_is_in_the_log_with_its_attempts():
    leader = Leader()
    channel = leader.create("c")
    leader.ask(retry_ms=60_000, retry_jitter=0.0)
    leader.publish(1)
    leader.deliver(channel)
    channel.req(0, 1, 0, leader.now)
    leader.flush()
    assert [(ref.offset, ref.attempts) for ref in channel.committed.deferred.items()] == [(0, 1)]
    assert channel.committed.floor == 1


def test_a_policy_counts_for_what_fails_from_now_on():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(2)
    leader.deliver(channel)
    leader.ask(retry_ms=3000, retry_jitter=0.0)
    channel.req(0, 1, 0, leader.now)
    leader.ask()
    channel.req(1, 1, 0, leader.now)
    assert leader.redeliver(channel) == [Redelivery(1, 2)]
    leader.clock.advance(3)
    assert leader.redeliver(channel) == [Redelivery(0, 2)]


@pytest.mark.parametrize("retry_ms", [None, 1000])
def test_many_that_time_out_at_once_are_taken_back_some_at_a_time(retry_ms: int | None):
    leader = Leader(limits=ChannelLimits(retries_at_once=10))
    channel = leader.create("c")
    leader.ask(retry_ms=retry_ms)
    leader.publish(40)
    for owner in range(1, 9):
        leader.deliver(channel, 5, owner=owner, timeout=10)
    leader.clock.advance(11)
    turns = []
    while channel.in_flight:
        assert channel.next_deadline() < leader.now.mono  # type: ignore[operator]
        turns.append(sum(count for _, count in channel.expire(leader.now)))
    assert turns == ([40] if retry_ms is None else [10, 10, 10, 10])
    assert channel.answers.timed_out == 40


def test_many_of_one_consumer_are_taken_back_some_at_a_time_too():
    leader = Leader(limits=ChannelLimits(retries_at_once=10))
    channel = leader.create("c")
    leader.ask(retry_ms=1000, retry_jitter=0.0)
    leader.publish(35)
    for owner in (1, 2):  # each has one span, which overlaps the other's
        leader.deliver(channel, 10, owner=owner, timeout=10)
    leader.deliver(channel, 15, owner=1, timeout=10)
    leader.fin(channel, 3)
    leader.clock.advance(11)
    turns = []
    while channel.in_flight:
        turns.append(sum(count for _, count in channel.expire(leader.now)))
    assert max(turns) <= 10 + 9, "a piece may go beyond what is left"
    assert (sum(turns), channel.answers.timed_out) == (34, 34)
    assert channel.next_deadline() == leader.now.mono + 1, "the delay; nothing times out any more"
