"""How many messages of a channel are finished in a part of the log, and how many are neither that nor deferred.

below the floor         finished, or in the deferred set
floor to reader         as the slots of the ring say
from the reader on      finished ahead, in the deferred set, or unread
"""

from __future__ import annotations

from nsqha.cursor.deferred.overlay import count_between
from nsqha.cursor.live.cursor import ChannelCursor


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
