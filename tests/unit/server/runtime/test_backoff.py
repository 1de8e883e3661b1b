"""Pauses double up to the longest, and begin again with the first one."""

from __future__ import annotations

from nsqha.server.runtime.backoff import Backoff


def pauses(backoff: Backoff, count: int) -> list[float]:
    return [backoff.next_pause() for _ in range(count)]


def test_pauses_double_up_to_the_longest():
    assert pauses(Backoff(30.0, 200.0), 5) == [30.0, 60.0, 120.0, 200.0, 200.0]


def test_after_a_success_the_pauses_begin_again():
    backoff = Backoff(0.02, 1.0)
    pauses(backoff, 3)
    backoff.reset()
    assert pauses(backoff, 2) == [0.02, 0.04]


def test_the_longest_can_come_next():
    backoff = Backoff(0.02, 1.0)
    backoff.at_max()
    assert pauses(backoff, 2) == [1.0, 1.0]
    backoff.reset()
    assert pauses(backoff, 1) == [0.02]


def test_one_pause_may_be_all():
    assert pauses(Backoff(0.5, 0.5), 3) == [0.5, 0.5, 0.5]
