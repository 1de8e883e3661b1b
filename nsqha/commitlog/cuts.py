"""Where a log may be divided: borders between batches, found by the commitlog, for readers that share the work.

    start ----8 MiB---- cut ----8 MiB---- cut --- .. --- end

Neighbours are at most STEP_BYTES apart, unless a single batch is larger. A cut costs one bisection over the slots of
one file, whatever the size of batches: no entry in between is read. A range whose entries do not verify has a cut in
front of it and one behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from nsqha.commitlog.entry import BatchCorrupt, Entry, Place

if TYPE_CHECKING:
    from nsqha.commitlog.lookup import LogReader

STEP_BYTES = 8 << 20


class Cut(NamedTuple):
    """A border between two batches. `timestamp_ns` is that of the batch behind it; at the end, of the last one."""

    offset: int
    log_id: int
    position: int
    timestamp_ns: int


def cut_points(log: LogReader, start: Place, end: Place, *, step: int = STEP_BYTES) -> list[Cut]:
    """The borders from `start` to `end`, both included, which are borders themselves; `end` is where what may be used
    ends. It reads files."""
    return _divided(log, start, end, end, step)


def ranges_cut(log: LogReader, start: Place, end: Place, ranges: Iterable[tuple[int, int]]) -> list[Cut]:
    """The borders that divide these ranges [first, behind) of offsets: from the last one at or below the first message
    to the first one behind the last message, within `start` and `end`."""
    found: dict[int, Cut] = {}
    for first, behind in ranges:
        low = _border(log, first, start, end)
        high = max(_border_behind(log, behind, start, end), low)
        found.update((cut.log_id, cut) for cut in _divided(log, low, high, end, STEP_BYTES))
    return [found[log_id] for log_id in sorted(found)]


def cut_at(log: LogReader, place: Place, end: Place) -> Cut:
    """The border `place` with its time; `end` is where what may be used ends."""
    if place.log_id < end.log_id:
        return Cut(place.offset, place.log_id, place.position, _timestamp(log, place.log_id))
    try:
        timestamp_ns = log.entry_before(place.log_id).timestamp_ns
    except BatchCorrupt:
        timestamp_ns = _timestamp(log, place.log_id)
    return Cut(place.offset, place.log_id, place.position, timestamp_ns)


def _divided(log: LogReader, low: Place, high: Place, end: Place, step: int) -> list[Cut]:
    cuts = [cut_at(log, low, end)]
    at = low
    while high.position - at.position > step:
        at = _next(log, at, step)
        if at.position >= high.position:
            break
        cuts.append(cut_at(log, at, end))
    if high.log_id > low.log_id:
        cuts.append(cut_at(log, high, end))
    return cuts


def _border(log: LogReader, offset: int, start: Place, end: Place) -> Place:
    """In front of the batch that holds message `offset`."""
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
    """Behind the batch that holds message `behind - 1`."""
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


def _timestamp(log: LogReader, log_id: int) -> int:
    """Of the first batch from here on whose entry verifies; timestamps never fall, so it is not too early."""
    try:
        entry: Entry = log.entry_before(log_id) if log_id == log.end.log_id else log.entry(log_id)
    except BatchCorrupt as hole:
        return _timestamp(log, hole.end.log_id) if hole.end.log_id > log_id else 0
    return entry.timestamp_ns
