"""Where a log may be divided: borders between batches, found by the commitlog, for readers that share the work.

    start ----8 MiB---- cut ----8 MiB---- cut --- .. --- end

Neighbours are at most STEP_BYTES apart, unless a single batch is larger. A cut costs one bisection over the slots of
one file, whatever the size of batches: no entry in between is read. A range whose entries do not verify has a cut in
front of it and one behind it.

Ranges that overlap are divided once: what a call costs is bounded by the size of the log and by how many ends the
ranges have, not by how often they cover the same. `each` is called for every border that is looked for, and may raise
to end it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from nsqha.commitlog.entry import BatchCorrupt, Entry, Place

if TYPE_CHECKING:
    from nsqha.commitlog.reading.lookup import LogReader

STEP_BYTES = 8 << 20


class Cut(NamedTuple):
    """A border between two batches. `timestamp_ns` is that of the batch behind it; if its entry does not verify, of the
    batch in front; at the end, of the last one. So no message in front is newer, and none behind is older. 0: it
    is not known."""

    offset: int
    log_id: int
    position: int
    timestamp_ns: int


def _ignored() -> None:
    pass


def cut_points(
    log: LogReader, start: Place, end: Place, *, step: int = STEP_BYTES, each: Callable[[], None] = _ignored
) -> list[Cut]:
    """The borders from `start` to `end`, both included, which are borders themselves; `end` is where what may be used
    ends. It reads files."""
    return _divided(log, start, end, end, step, each)


def ranges_cut(
    log: LogReader,
    start: Place,
    end: Place,
    ranges: Iterable[tuple[int, int]],
    *,
    step: int = STEP_BYTES,
    each: Callable[[], None] = _ignored,
) -> list[Cut]:
    """The borders that divide these ranges [first, behind) of offsets: from the last one at or below the first message
    to the first one behind the last message, within `start` and `end`."""
    found: dict[int, Cut] = {}
    firsts: dict[int, Place] = {}
    behinds: dict[int, Place] = {}
    done: Place | None = None  # up to here everything since `low` of the range before is divided
    for first, behind in sorted({*ranges}):
        if first not in firsts:
            each()
            firsts[first] = _border(log, first, start, end)
        if behind not in behinds:
            each()
            behinds[behind] = _border_behind(log, behind, start, end)
        low = firsts[first]
        high = max(behinds[behind], low)
        for place in (low, high):
            if place.log_id not in found:
                found[place.log_id] = cut_at(log, place, end)
        at = low if done is None else max(low, done)
        if high > at:
            found.update((cut.log_id, cut) for cut in _divided(log, at, high, end, step, each))
        done = high if done is None else max(done, high)
    return [found[log_id] for log_id in sorted(found)]


def cut_at(log: LogReader, place: Place, end: Place) -> Cut:
    """The border `place` with its time; `end` is where what may be used ends."""
    time_of = _time_between if place.log_id < end.log_id else _time_of_end
    return Cut(place.offset, place.log_id, place.position, time_of(log, place.log_id))


def _divided(log: LogReader, low: Place, high: Place, end: Place, step: int, each: Callable[[], None]) -> list[Cut]:
    each()
    cuts = [cut_at(log, low, end)]
    at = low
    while high.position - at.position > step:
        each()
        at = _next(log, at, step)
        if at.position >= high.position:
            break
        cuts.append(cut_at(log, at, end))
    if high.log_id > low.log_id:
        cuts.append(cut_at(log, high, end))
    return cuts


def _border(log: LogReader, offset: int, start: Place, end: Place) -> Place:
    """The border in front of the batch that holds message `offset`."""
    if offset < start.offset:
        return start
    if offset >= end.offset:
        return end
    try:
        entry = log.entry_for_offset(offset)
    except BatchCorrupt as hole:
        return max(hole.first, start)
    assert entry is not None, f"{offset} is between {start} and {end}"
    return max(Place(entry.log_id, entry.first_offset, entry.position), start)


def _border_behind(log: LogReader, behind: int, start: Place, end: Place) -> Place:
    """The border behind the batch that holds message `behind - 1`."""
    if behind <= start.offset:
        return start
    if behind >= end.offset:
        return end
    try:
        entry = log.entry_for_offset(behind - 1)
    except BatchCorrupt as hole:
        return min(hole.end, end)
    assert entry is not None, f"{behind} is between {start} and {end}"
    return min(Place(entry.log_id + 1, entry.end_offset, entry.end_position), end)


def _next(log: LogReader, at: Place, step: int) -> Place:
    """The last border at most `step` bytes behind `at`, or the end of the batch there if that one is larger."""
    try:
        entry = log.entry_at_position(at.position + step)
    except BatchCorrupt as hole:
        return hole.first if hole.first.position > at.position else hole.end
    if entry is None:
        return log.end
    if entry.position > at.position:
        return Place(entry.log_id, entry.first_offset, entry.position)
    return Place(entry.log_id + 1, entry.end_offset, entry.end_position)


def _time_between(log: LogReader, log_id: int) -> int:
    """The time that `Cut` describes. Behind a hole is a batch that may be newer than those in it: its time would leave
    them out."""
    try:
        return log.entry(log_id).timestamp_ns
    except BatchCorrupt:
        pass
    try:
        return log.entry_before(log_id).timestamp_ns
    except BatchCorrupt:
        return 0


def _time_of_end(log: LogReader, log_id: int) -> int:
    """The time of the last batch, or if its entry does not verify, of the first one behind it that does: never too
    early."""
    try:
        return log.entry_before(log_id).timestamp_ns
    except BatchCorrupt:
        return _first_time(log, log_id)


def _first_time(log: LogReader, log_id: int) -> int:
    """The time of the first batch from here on whose entry verifies; 0 if there is none."""
    try:
        entry: Entry = log.entry_before(log_id) if log_id == log.end.log_id else log.entry(log_id)
    except BatchCorrupt as hole:
        return _first_time(log, hole.end.log_id) if hole.end.log_id > log_id else 0
    return entry.timestamp_ns
