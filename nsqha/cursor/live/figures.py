"""How many messages of a channel wait, as an operator counts them: what is deferred waits from its due time on, whether
a consumer is there or not. Where many are deferred that is counted a few rows at a time (`prepare`)."""

from __future__ import annotations

from typing import NamedTuple

from nsqha.cursor.deferred.overlay import overdue
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
