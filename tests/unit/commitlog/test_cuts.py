"""Where a log may be divided: every border is one, and none is missing where a reader needs it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from nsqha.commitlog.entry import Entry, Place
from nsqha.commitlog.log import PartitionLog
from nsqha.commitlog.reading.cuts import Cut, cut_points, ranges_cut
from tests.unit.commitlog.test_lookup import built, damage

STEP = 400


def places(log: PartitionLog, entries: list[Entry]) -> dict[int, Place]:
    """Every border of the log by log id."""
    found = {entry.log_id: Place(entry.log_id, entry.first_offset, entry.position) for entry in entries}
    return found | {log.end.log_id: log.end}


@pytest.mark.parametrize("seed", range(8))
def test_cuts_are_borders_and_no_further_apart_than_asked_for(seed: int) -> None:
    _, log, entries = built(80, seed)
    cuts = cut_points(log, log.start, log.end, step=STEP)
    borders = places(log, entries)
    assert [Place(c.log_id, c.offset, c.position) for c in cuts] == [borders[c.log_id] for c in cuts]
    assert (cuts[0].log_id, cuts[-1].log_id) == (log.start.log_id, log.end.log_id)
    times = {entry.log_id: entry.timestamp_ns for entry in entries}
    assert [c.timestamp_ns for c in cuts] == [times[min(c.log_id, entries[-1].log_id)] for c in cuts]
    for a, b in pairwise(cuts):
        assert b.position - a.position > 0
        assert b.position - a.position <= STEP or b.log_id == a.log_id + 1


def test_a_batch_that_is_larger_than_a_step_is_a_piece_of_its_own() -> None:
    _, log, entries = built(40)
    cuts = cut_points(log, log.start, log.end, step=1)
    assert [c.log_id for c in cuts] == [*(entry.log_id for entry in entries), log.end.log_id]


def test_a_range_is_cut_from_the_batch_of_its_first_message_to_that_of_its_last() -> None:
    rng = random.Random(3)
    _, log, entries = built(80)
    borders = places(log, entries)
    with_messages = [entry for entry in entries if entry.count]
    for _ in range(200):
        first, end = sorted(rng.sample(range(log.end.offset + 1), 2))
        cuts = ranges_cut(log, log.start, log.end, [(first, end)])
        of_first = next(e for e in with_messages if e.first_offset <= first < e.end_offset)
        of_last = next(e for e in with_messages if e.first_offset < end <= e.end_offset)
        assert (cuts[0].log_id, cuts[-1].log_id) == (of_first.log_id, of_last.log_id + 1)
        assert all(borders[c.log_id] == Place(c.log_id, c.offset, c.position) for c in cuts)


def test_ranges_that_overlap_are_divided_once_and_each_has_its_ends() -> None:
    rng = random.Random(4)
    _, log, entries = built(80)
    borders = places(log, entries)
    for _ in range(50):
        ranges = [(first, first + rng.randrange(60)) for first in rng.sample(range(log.end.offset), 12)]
        cuts = {c.log_id: c for c in ranges_cut(log, log.start, log.end, ranges, step=STEP)}
        assert list(cuts) == sorted(cuts)
        assert all(borders[c.log_id] == Place(c.log_id, c.offset, c.position) for c in cuts.values())
        for one in ranges:
            ends = ranges_cut(log, log.start, log.end, [one], step=1 << 40)
            assert {c.log_id for c in ends} <= cuts.keys(), one
            within = [c for log_id, c in cuts.items() if ends[0].log_id <= log_id <= ends[-1].log_id]
            for a, b in pairwise(within):
                assert b.position - a.position <= STEP or b.log_id == a.log_id + 1

    def looked(ranges: list[tuple[int, int]]) -> int:
        count: list[None] = []
        ranges_cut(log, log.start, log.end, ranges, step=STEP, each=lambda: count.append(None))
        return len(count)

    whole = (0, log.end.offset)
    assert looked([whole] * 1000) == looked([whole])
    ends = log.end.offset // 2
    assert looked([(n, log.end.offset) for n in range(ends)]) < looked([whole]) + 3 * ends


def test_whoever_has_seen_enough_ends_it() -> None:
    _, log, _ = built(80)
    left = [5]

    def each() -> None:
        left[0] -= 1
        if not left[0]:
            raise InterruptedError

    for cut in (
        lambda: cut_points(log, log.start, log.end, step=1, each=each),
        lambda: ranges_cut(log, log.start, log.end, [(n, n + 1) for n in range(9)], each=each),
    ):
        left[0] = 5
        with pytest.raises(InterruptedError):
            cut()


def test_ranges_outside_the_log_are_cut_at_its_ends() -> None:
    _, log, _ = built(40)
    start, end = log.start, log.end
    assert [c.log_id for c in ranges_cut(log, start, end, [(end.offset, end.offset + 5)])] == [end.log_id]
    cuts = ranges_cut(log, start, end, [(0, 10**12)])
    assert (cuts[0].offset, cuts[-1].log_id) == (0, end.log_id)


def test_entries_that_do_not_verify_have_a_cut_on_either_side() -> None:
    storage, log, entries = built(60)
    bad = entries[25].log_id
    damage(storage, log, bad)
    cuts = cut_points(log, log.start, log.end, step=1)
    assert bad in [c.log_id for c in cuts]
    assert bad + 1 in [c.log_id for c in cuts]
    before, behind = (next(c for c in cuts if c.log_id == n) for n in (bad, bad + 1))
    assert (before.timestamp_ns, behind.timestamp_ns) == (entries[24].timestamp_ns, entries[26].timestamp_ns)


@pytest.mark.parametrize("seed", range(6))
def test_no_message_in_front_of_a_cut_is_newer_than_it_and_none_behind_is_older(seed: int) -> None:
    rng = random.Random(seed)
    storage, log, entries = built(60, seed)
    bad = sorted(rng.sample(range(len(entries)), 12))
    for at in bad:
        damage(storage, log, entries[at].log_id)
    for end in (log.end, *(Place(e.log_id, e.first_offset, e.position) for e in entries[20:])):
        known = 0
        for cut in cut_points(log, log.start, end, step=1):
            if cut.timestamp_ns:
                known += 1
                # Behind the end, too: what is left out there by its time is never read.
                assert all(e.timestamp_ns <= cut.timestamp_ns for e in entries if e.log_id < cut.log_id)
                if cut.log_id < end.log_id:
                    assert all(e.timestamp_ns >= cut.timestamp_ns for e in entries if e.log_id >= cut.log_id)
        assert known


def test_an_empty_log_is_one_border() -> None:
    _, log, _ = built(0)
    assert cut_points(log, log.start, log.end) == [Cut(0, 1, 0, 0)]
