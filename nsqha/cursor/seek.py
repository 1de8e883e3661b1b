"""Moving a cursor: what would happen, and what an event of it says.

A seek is one event. Everything about it is decided when it is applied (also its target: clamped to [log start, pump], a
reader's to [log start, log end]), so a plan is a forecast; what was done is in the `Sought` effect. Asking twice
is safe: the second goes to the same place.

`empty` is a seek to that end that also drops the deferred messages. `undo` goes back to where the last seek came from,
with the finished ranges it had if they fitted into the event, and defers what `empty` dropped, up to a bound and as far
as the log still has it. How many stay dropped is in the plan. An ephemeral channel's are forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nsqha.cursor.committed.state import PartitionState, Undo
from nsqha.cursor.events import FRAME_BYTES_MAX, TARGET_END, Seek
from nsqha.cursor.live.cursor import ChannelCursor

RANGES_MAX = (FRAME_BYTES_MAX - 64) // 16


@dataclass(frozen=True)
class SeekPlan:
    """What a seek of one channel of one partition would do now."""

    channel: str
    floor: int  # where the cursor is
    target: int  # where it would be
    again: int  # finished or handed out messages that would be delivered (again)
    skipped: int  # messages that were not handed out yet and would not be
    exact: bool  # an undo would restore the finished ranges too
    clamped: bool  # the target asked for was outside of these bounds
    deferred_again: int = 0  # dropped messages that an undo defers again
    deferred_lost: int = 0  # dropped messages that an undo cannot bring back


def plan(state: PartitionState, cursor: ChannelCursor, target: int) -> SeekPlan:
    """What a seek to `target` would do."""
    goes_to = state.clamp(cursor.committed, target)
    place = cursor.next_read
    return SeekPlan(
        channel=cursor.name,
        floor=cursor.floor,
        target=goes_to,
        again=max(place - goes_to, 0),
        skipped=max(goes_to - place, 0),
        exact=len(cursor.written.ranges) <= RANGES_MAX,
        clamped=target != goes_to and target != TARGET_END,
    )


def undo_plan(state: PartitionState, cursor: ChannelCursor, undo: Undo) -> SeekPlan:
    """What going back to before the last seek would do."""
    returning = len(undo.returning(state.log_start))
    lost = undo.lost + len(undo.deferred) - returning
    return replace(plan(state, cursor, undo.floor), deferred_again=returning, deferred_lost=lost)


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
