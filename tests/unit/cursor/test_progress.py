"""From live state to events."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from nsqha.cursor.events import FRAME_BYTES_MAX, ChannelProgress, EpochStart, TopicEmpty
from nsqha.cursor.live.progress import ROWS_PER_PIECE, TakenEvents, Written, deliveries, frames, pieces, without
from nsqha.hot import frame
from nsqha.ranges import RangeSet

sets = st.sets(st.integers(0, 60))


def as_ranges(numbers: set[int]) -> list[tuple[int, int]]:
    return list(RangeSet((n, n + 1) for n in sorted(numbers)))


@settings(max_examples=300, deadline=None)
@given(sets, sets)
def test_without_is_the_difference(numbers, held):
    new = without(as_ranges(numbers), RangeSet(as_ranges(held)))
    assert {n for first, end in new for n in range(first, end)} == numbers - held
    assert new == sorted(new)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(sets, st.integers(0, 8)), max_size=6))
def test_every_finished_message_is_written_once(steps):
    written, finished, floor, told = Written(0, RangeSet()), set(), 0, []
    for more, ahead in steps:
        finished |= more
        floor += ahead
        finished |= set(range(floor))
        while floor in finished:
            floor += 1
        new = written.advance(floor, as_ranges({n for n in finished if n >= floor}), 61)
        told += [n for first, end in new for n in range(first, end)]
        assert written.floor == floor
        assert {n for first, end in written.ranges for n in range(first, end)} == {n for n in finished if n >= floor}
    assert len(told) == len(set(told))


def test_ranges_beyond_the_reader_are_kept():
    written = Written(0, RangeSet([(5, 7), (20, 30)]))
    assert written.advance(0, [(2, 3), (5, 7)], 10) == [(2, 3)]
    assert list(written.ranges) == [(2, 3), (5, 7), (20, 30)]


def long_progress(rows: int) -> ChannelProgress:
    return ChannelProgress(
        uid=1,
        seek=2,
        floor=900_000,
        ranges=tuple((1_000_000 + 2 * n, 1_000_001 + 2 * n) for n in range(rows)),
        puts=tuple((n, n, 1) for n in range(rows)),
        finished=tuple(range(rows)),
        attempts=tuple((n, n + 1, 1) for n in range(rows)),
        attempts_known=True,
    )


def test_short_news_are_one_piece():
    news = ChannelProgress(1, 2, 3, ranges=((4, 5),))
    assert list(pieces(news, 0)) == [news]


def test_long_news_are_cut_and_the_floor_comes_last():
    whole = long_progress(ROWS_PER_PIECE * 2 + 1)
    parts = list(pieces(whole, 7))
    for name in ("ranges", "puts", "finished", "attempts"):
        assert sum((getattr(part, name) for part in parts), ()) == getattr(whole, name)
    moved = [part.floor == 900_000 for part in parts]
    assert moved == sorted(moved)
    first_moved = moved.index(True)
    assert not any(part.puts or part.finished for part in parts[first_moved:])
    assert [part.attempts_known for part in parts[first_moved:]] == [True] + [False] * 2


def test_no_frame_is_above_64_kb():
    parts = [piece for n in range(40) for piece in pieces(long_progress(ROWS_PER_PIECE if n % 7 == 0 else 3), 0)]
    assert max(len(frame) for frame in frames(part.encode() for part in parts)) <= FRAME_BYTES_MAX


@settings(max_examples=200, deadline=None)
@given(sets, st.dictionaries(st.integers(0, 60), st.integers(2, 9)))
def test_deliveries_of_what_is_unfinished(settled, known):
    known = {offset: n for offset, n in known.items() if offset not in settled}
    found = deliveries(0, 61, as_ranges(settled), known)
    told = {offset: n for first, end, n in found for offset in range(first, end)}
    assert told == {offset: known.get(offset, 1) for offset in range(61) if offset not in settled}
    assert all(a[1] <= b[0] for a, b in pairwise(found))


FIRST, SECOND = TopicEmpty().encode(), EpochStart(2).encode()


def taken() -> TakenEvents[str]:
    events = TakenEvents[str]()
    events.add(FIRST, ["first"])
    events.add(SECOND, ["second", "too"])
    return events


def test_taken_events_are_found_in_the_batches_that_hold_them():
    events = taken()
    assert events.committed(FIRST + frame(b"a message")) == ["first"]
    assert events.committed(frame(b"a message")) == []
    assert events.committed(SECOND) == ["second", "too"]
    assert not events


def test_events_of_a_refused_batch_are_found_in_front_of_the_next():
    events = taken()
    assert events.committed(FIRST + SECOND + frame(b"a message")) == ["first", "second", "too"]
    assert not events


def test_taken_events_are_found_behind_events_of_others():
    events = taken()
    assert events.committed(EpochStart(1).encode() + FIRST) == ["first"]
    assert len(events) == 1


def test_taken_events_are_not_looked_for_behind_messages():
    events = taken()
    assert events.committed(frame(b"a message") + FIRST) == []
    assert len(events) == 2
