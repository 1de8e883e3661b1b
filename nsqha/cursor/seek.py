"""Moving a cursor: what would happen, and what an event of it says.

A seek is one event. Everything about it is decided when it is applied (also its target: clamped to [log start, pump], a
reader's to [log start, log end]), so a plan is a forecast; what was done is in the `Sought` effect. Asking twice
is safe: the second goes to the same place.

`empty` is a seek to that end that also drops the deferred messages. `undo` goes back to where the last seek came from,
with the finished ranges it had if they fitted into the event, and defers what `empty` dropped, up to a bound and as far
as the log still has it. How many stay dropped is in the plan. An ephemeral channel's are forgotten.

A plan says for each message what becomes of it. Behind the target everything that is not deferred is delivered, also
what was finished there out of order:

              finished          unfinished            deferred, dead
    below     stays so          skipped: never again  stays so
    behind    comes again       comes                 stays so

It is counted from the finished ranges and the deferred set. Deferred messages may be millions, so what must be counted
of them first is counted in steps (`planning`), and others have their turn in between.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from itertools import islice

from nsqha.cursor.committed.state import PartitionState, Undo
from nsqha.cursor.deferred.deferred_set import COUNT_ROWS
from nsqha.cursor.events import FRAME_BYTES_MAX, TARGET_END, Seek
from nsqha.cursor.live.counts import finished, unfinished
from nsqha.cursor.live.cursor import ChannelCursor
from nsqha.cursor.live.looking import MessageState, held
from nsqha.ranges import RangeSet

RANGES_MAX = (FRAME_BYTES_MAX - 64) // 16


@dataclass(frozen=True)
class SeekPlan:
    """What a seek of one channel of one partition would do now."""

    channel: str
    floor: int  # where the cursor is
    target: int  # where it would be
    again: int  # finished messages that would be delivered again
    skipped: int  # messages that were never finished, and would not be delivered any more
    deferred: int  # messages that wait for a time, and would go on to
    dead: int  # dead letters, which stay
    in_flight: int  # messages in flight; those that are not deferred are taken from their consumers
    exact: bool  # an undo would restore the finished ranges too
    clamped: bool  # the target asked for was outside of these bounds
    deferred_again: int = 0  # dropped messages that an undo defers again
    deferred_lost: int = 0  # dropped messages that an undo cannot bring back


@dataclass(frozen=True)
class CursorMove:
    """Where a cursor would be moved to, with the finished ranges behind that that it would have."""

    target: int
    ranges: RangeSet
    undo: Undo | None = None


def move_to(state: PartitionState, cursor: ChannelCursor, target: int) -> CursorMove:
    """A seek."""
    return CursorMove(state.clamp(cursor.committed, target), RangeSet())


def move_back(state: PartitionState, cursor: ChannelCursor, undo: Undo) -> CursorMove:
    """An undo of the last seek."""
    ranges = RangeSet(undo.ranges or ())
    return CursorMove(ranges.swallow(state.clamp(cursor.committed, undo.floor)), ranges, undo=undo)


def planning(
    state: PartitionState, cursor: ChannelCursor, move: CursorMove, asked: int = TARGET_END
) -> Generator[None, None, SeekPlan]:
    """What the move would do, after a number of steps. `asked`: the target that was asked for.

    It is exact at the moment in which it ends, but for an undo that has a thousand deferred messages to look at among
    the finished ranges: what is deferred there, or no longer, between two steps may be missed."""
    hidden = yield from _deferred_in(cursor, move.ranges)
    while not _counted(cursor, move.target):
        yield
    return _plan(state, cursor, move, asked, hidden)


def _counted(cursor: ChannelCursor, target: int) -> bool:
    """Count some of the deferred messages; whether `_plan` is quick now. The target comes last: the two others may
    move between two steps, and what is known of the target must be the newest then."""
    places = (cursor.floor, cursor.next_read, target)
    overlay = cursor.deferred_overlay
    return overlay.prepare_figures() and all(overlay.committed.counted_from(at) is not None for at in places)


def _deferred_in(cursor: ChannelCursor, ranges: RangeSet) -> Generator[None, None, tuple[int, int]]:
    """How many deferred messages there are in these ranges: below the floor, and in front of the reader. Between the
    two the slots of the ring say so."""
    below = ahead = 0
    place = ranges.next_held(0)
    end = max((end for _, end in ranges), default=0)
    while place is not None:
        refs = [*islice(cursor.deferred_overlay.items(place), COUNT_ROWS)]
        for ref in refs:
            if ref.offset in ranges:
                below += ref.offset < cursor.floor
                ahead += ref.offset >= cursor.next_read
        if len(refs) < COUNT_ROWS or refs[-1].offset >= end:
            break
        place = refs[-1].offset + 1
        yield
    return below, ahead


def _plan(
    state: PartitionState, cursor: ChannelCursor, move: CursorMove, asked: int, hidden: tuple[int, int]
) -> SeekPlan:
    overlay, place = cursor.deferred_overlay, cursor.next_read
    again = finished(cursor, move.target, cursor.end) + hidden[0]
    skipped = unfinished(cursor, cursor.floor, move.target) - hidden[1]
    for first, end in move.ranges:
        again -= max(min(end, cursor.floor) - first, 0) + finished(cursor, max(first, cursor.floor), end)
        skipped += unfinished(cursor, first, min(end, place))
        ahead = max(end - max(first, place), 0)
        skipped += ahead - finished(cursor, max(first, place), end)
    returning = [] if move.undo is None else move.undo.returning(state.log_start)
    for ref in returning:  # dropped, so finished now, unless they were put back
        found = held(cursor, ref.offset)
        again -= ref.offset >= move.target and found is not None and found.state is MessageState.FINISHED
    waiting = len(overlay) - overlay.dead - sum(single.deferred for single in cursor.flight.singles.values())
    return SeekPlan(
        channel=cursor.name,
        floor=cursor.floor,
        target=move.target,
        again=max(again, 0),
        skipped=max(skipped, 0),
        deferred=max(waiting, 0),
        dead=overlay.dead,
        in_flight=cursor.flight.count,
        exact=len(cursor.written.ranges) <= RANGES_MAX,
        clamped=asked not in (move.target, TARGET_END),
        deferred_again=len(returning),
        deferred_lost=0 if move.undo is None else move.undo.lost + len(move.undo.deferred) - len(returning),
    )


def event(
    cursor: ChannelCursor, target: int, *, drop_deferred: bool = False, undo: bool = False, forward: bool = False
) -> Seek:
    """The event, to be written right behind the channel's progress: it says where the cursor was."""
    if cursor.ephemeral:
        cursor.progress()  # it writes none otherwise
    ranges = tuple(cursor.written.ranges)
    return Seek(
        uid=cursor.uid,
        target=target,
        old_floor=cursor.written.floor,
        old_ranges=ranges if len(ranges) <= RANGES_MAX else None,
        drop_deferred=drop_deferred,
        undo=undo,
        forward=forward,
    )
