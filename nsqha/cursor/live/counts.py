"""How many messages of a channel wait, and how many are finished or not in a part of the log.

As an operator counts them, what is deferred waits from its due time on, whether a consumer is there or not. Where many
are deferred that is counted a few rows at a time (`prepare`). In a part of the log:

below the floor         finished, or in the deferred set
floor to reader         as the slots of the ring say
from the reader on      finished ahead, in the deferred set, or unread
"""

from __future__ import annotations

from typing import NamedTuple

from nsqha.cursor.deferred.overlay import count_between, overdue
from nsqha.cursor.live.cursor import ChannelCursor


class HeldCounts(NamedTuple):
    """Messages of a channel that no consumer has now."""

    depth: int  # waiting for nothing but a consumer
    deferred: int  # waiting for a time


def held(cursor: ChannelCursor, now_ns: int) -> HeldCounts:
    """As of `now_ns` (nanoseconds since 1970)."""
    in_flight = sum(single.deferred for single in cursor.flight.singles.values())
    due = max(overdue(cursor.deferred_overlay, now_ns) - in_flight, 0)
    return HeldCounts(cursor.depth(cursor.end) + due, cursor.deferred_count - due)


def prepare(cursor: ChannelCursor, now_ns: int) -> bool:
    """Count some of what the figures of the channel need; whether all of them are quick now, for this time."""
    return cursor.unread.prepare_count() and cursor.deferred_overlay.prepare_figures(now_ns)


def finished(cursor: ChannelCursor, first: int, end: int) -> int:
    """Messages of [first, end) that are done. Deferred ones below the floor are counted: see `Counts`."""
    ring, floor, place = cursor.ring, cursor.floor, cursor.next_read
    count = sum(last - at for at, last in ring.finished_ranges(max(first, floor), max(min(end, place), floor)))
    if first < (below := min(end, floor)):
        count += below - first - count_between(cursor.deferred_overlay, first, below)
    return count + cursor.unread.finished(max(first, place), end)


def unfinished(cursor: ChannelCursor, first: int, end: int) -> int:
    """Messages of [first, end) that are unread, in flight or wait in memory. Deferred ones in front of the reader are
    counted likewise."""
    ring, place = cursor.ring, cursor.next_read
    count = ring.unfinished(max(first, ring.low), min(end, place))
    return count + cursor.unread.left(max(first, place), end)
