"""Which pairs may go: the oldest ones that time or size give up, as far as the channels allow."""

from __future__ import annotations

import pytest

from nsqha.commitlog.entry import Place
from nsqha.commitlog.reading.lookup import PairInfo
from nsqha.commitlog.retention import FUTURE_NS, PairAges, Retention, log_start, roll_due, wanted_start

# Three full pairs of 100 messages and 1000 bytes that end at 10, 20 and 30 ns, and one that is being written.
BORDERS = [Place(1 + 10 * n, 100 * n, 1000 * n) for n in range(5)]
PAIRS = [PairInfo(BORDERS[n], BORDERS[n + 1], 1000, 10 * (n + 1)) for n in range(4)]
FOR_EVER = Retention(None, None)


@pytest.mark.parametrize(
    ("retention", "now", "pairs_gone"),
    [
        (FOR_EVER, 10**18, 0),
        (Retention(15, None), 25, 0),
        (Retention(15, None), 26, 1),
        (Retention(15, None), 46, 3),
        (Retention(15, None), 10**18, 3),
        (Retention(0, None), 31, 3),
        (Retention(None, 4000), 0, 0),
        (Retention(None, 3999), 0, 1),
        (Retention(None, 2000), 0, 2),
        (Retention(None, 0), 0, 3),
        (Retention(15, 2000), 26, 2),
        (Retention(15, 3000), 36, 2),
    ],
)
def test_time_or_size_give_up_the_oldest(retention: Retention, now: int, pairs_gone: int) -> None:
    assert wanted_start(PAIRS, retention, now) == BORDERS[pairs_gone]


@pytest.mark.parametrize(("limit", "pairs_gone"), [(0, 0), (99, 0), (100, 1), (250, 2), (10**9, 3)])
def test_channels_hold_what_they_need(limit: int, pairs_gone: int) -> None:
    assert log_start(PAIRS, Retention(0, None), 10**18, limit_offset=limit) == BORDERS[pairs_gone]


def test_the_log_start_never_passes_what_retention_wants_to_keep() -> None:
    assert log_start(PAIRS, Retention(15, None), 26, limit_offset=10**9) == BORDERS[1]


def test_the_pair_being_written_stays() -> None:
    assert wanted_start(PAIRS[-1:], Retention(0, 0), 10**18) == PAIRS[-1].first


def test_pairs_without_messages_go_with_those_before_them() -> None:
    empty = PairInfo(BORDERS[1], Place(15, 100, 1500), 500, 15)
    later = PairInfo(Place(15, 100, 1500), BORDERS[2], 500, 20)
    assert log_start([PAIRS[0], empty, later], Retention(0, None), 10**18, limit_offset=100) == later.first


def test_a_silent_topic_closes_its_pair_so_that_it_can_go() -> None:
    active = PAIRS[-1]
    assert not roll_due(active, Retention(5, None), 45)
    assert roll_due(active, Retention(5, None), 46)
    assert not roll_due(active, FOR_EVER, 10**18)
    assert not roll_due(PairInfo(BORDERS[3], BORDERS[3], 0, 30), Retention(5, None), 10**18)


def test_a_silent_topic_writes_no_more_once_its_messages_are_gone() -> None:
    """The log start and the checkpoint that let a pair go are in the next one, and need none after it."""
    events_only = PairInfo(BORDERS[3], Place(34, BORDERS[3].offset, BORDERS[3].position + 214), 214, 30)
    assert not roll_due(events_only, Retention(5, None), 10**18)


def test_stamps_from_the_future_age_from_when_a_pair_was_first_seen_as_it_is() -> None:
    now, future = 10**18, 10**19
    ages, full = PairAges(), PairInfo(BORDERS[0], BORDERS[1], 1000, future)
    growing, grown = (PairInfo(BORDERS[1], BORDERS[n], 1000, future) for n in (2, 3))
    assert [pair.newest_ns for pair in ages.sane([full, growing], now)] == [now, now]
    assert [pair.newest_ns for pair in ages.sane([full, grown], now + 50)] == [now, now + 50]
    assert [pair.newest_ns for pair in ages.sane([full, grown], now + 90)] == [now, now + 50]


def test_stamps_of_the_past_and_a_little_ahead_are_believed() -> None:
    ages, now = PairAges(), 10**18
    pairs = [PairInfo(BORDERS[0], BORDERS[1], 1000, 5), PairInfo(BORDERS[1], BORDERS[2], 1000, now + FUTURE_NS)]
    assert ages.sane(pairs, now) == pairs
