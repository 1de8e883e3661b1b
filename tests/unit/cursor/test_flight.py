"""Who has what, and until when."""

from __future__ import annotations

import random
from itertools import pairwise

from nsqha.cursor.live.flight import NOT_IN_FLIGHT, Flight, Single, runs
from nsqha.hot import IN_FLIGHT, WAITING


def expired(flight: Flight, now: float) -> list[int]:
    found: list[int] = []
    for _, offsets, singles in flight.expire(now):
        found += offsets + [offset for offset, _ in singles]
    return sorted(found)


def test_deliveries_within_a_moment_share_a_deadline_the_later_one():
    flight = Flight(0)
    flight.deliver(0, 3, 1, 60.0)
    flight.deliver(3, 5, 2, 60.01)
    flight.deliver(5, 9, 1, 60.04)
    assert len(flight._span_heap) == 2
    assert expired(flight, 60.0) == []
    assert expired(flight, 60.01) == [3, 4]
    assert expired(flight, 60.04) == [0, 1, 2, 5, 6, 7, 8]
    assert flight.count == 0


def test_finished_spans_are_forgotten():
    flight = Flight(0)
    for n in range(2000):
        flight.deliver(n, n + 1, 1, n * 1.0)
        flight.take_back(n)
        flight.ring.set(n, 2)
    assert len(flight._span_heap) <= 256
    assert len(flight._spans[1]) <= 256
    assert flight.next_deadline() is None


def test_deadlines_that_moved_leave_nothing_behind():
    flight = Flight(0)
    flight.deliver(0, 2, 1, 10.0)
    for now in range(1, 3000):
        flight.touch(0, 1, now * 0.001, 10.0, 900.0)
    assert len(flight._single_heap) < 600
    assert expired(flight, 10.5) == [1]
    assert expired(flight, 12.999) == [0]


def test_an_owner_number_that_is_used_again_inherits_nothing():
    flight = Flight(0)
    flight.deliver(0, 4, 1, 10.0)
    flight.detach(1)
    flight.deliver(4, 8, 1, 20.0)
    assert expired(flight, 10.0) == []
    assert flight.ring.get(0) == WAITING
    assert flight.ring.get(4) == IN_FLIGHT


def test_a_seek_forgets_spans_and_remembers_whose_they_were():
    flight = Flight(0)
    flight.deliver(0, 4, 1, 10.0)
    flight.deliver_single(100, Single(2, 3, 10.0, deferred=True))
    flight.deliver_single(101, Single(2, 3, 10.0, deferred=True))
    assert flight.forget(0, keep=[100]) == {1: 4, 2: 1}
    assert flight.count == 1
    flight.deliver(0, 4, 1, 30.0)
    assert expired(flight, 10.0) == [100]
    assert flight.refuse(101, 2) == NOT_IN_FLIGHT
    assert flight.forgotten(3, 1, answered=True)
    assert not flight.forgotten(3, 1, answered=True)
    assert flight.forgotten(101, 2, answered=False) and flight.forgotten(101, 2, answered=True)
    assert not flight.forgotten(101, 2, answered=True)


def test_two_seeks_forget_a_message_twice():
    flight = Flight(0)
    for _ in range(2):
        flight.deliver(0, 1, 1, 10.0)
        flight.forget(0)
    assert [flight.forgotten(0, 1, answered=True) for _ in range(3)] == [True, True, False]


def test_runs_of_offsets():
    rng = random.Random(1)
    offsets = sorted(rng.sample(range(100), 50))
    ranges = list(runs(offsets))
    assert [o for first, end in ranges for o in range(first, end)] == offsets
    assert all(a[1] < b[0] for a, b in pairwise(ranges))
    assert list(runs([])) == []
