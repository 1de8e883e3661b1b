"""What a channel holds, message by message: for an operator who wants to see it.

    unread      the reader has not come to it
    in flight   a consumer has it
    waiting     it comes again from memory
    deferred    it waits for a time
    dead        nobody gets it any more
    finished    the channel is done with it

A page is in order of offsets, dead letters in order of death. It ends early where looking further would take long: a
look costs the same however much the channel holds. `Page.next` says where the next one begins.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from nsqha.cursor.deferred.dead import DEAD_FROM, death_of, is_dead
from nsqha.cursor.deferred.deferred_set import Deferred
from nsqha.cursor.live.cursor import ChannelCursor
from nsqha.hot import FINISHED, IN_FLIGHT, WAITING

LOOKED_AT_ONCE = 50_000  # slots of the ring, or rows: some milliseconds


class MessageState(IntEnum):
    """Where a message of a channel is."""

    IN_FLIGHT = 1
    WAITING = 2
    DEFERRED = 3
    DEAD = 4
    UNREAD = 5
    FINISHED = 6


class Held(NamedTuple):
    """A message of a channel, as it is now."""

    offset: int
    state: MessageState
    attempts: int = 0
    due_ns: int = 0  # of a deferred one
    position: int = 0  # of the copy of its frame, if it was carried
    owner: int = 0  # of one in flight
    deadline: float = 0.0  # of one in flight, or that waits for a time in memory; monotonic seconds

    @property
    def died_ns(self) -> int:
        """When it died; 0: it is not dead."""
        return death_of(self.due_ns)[0] if self.state is MessageState.DEAD else 0


class Page(NamedTuple):
    """Messages in one state; `next` is where the page behind it begins, None if there is none."""

    messages: list[Held]
    next: tuple[int, int] | None


def page_of(cursor: ChannelCursor, state: MessageState, after: tuple[int, int], limit: int) -> Page:
    """Up to `limit` messages behind `after`: (0, offset), of the dead (due_ns, offset). (0, -1) is the beginning.

    ValueError for a state that has no list: unread, finished."""
    if state is MessageState.DEAD:
        dead = cursor.deferred_overlay.dead_letters(max(after, (DEAD_FROM, -1)), limit + 1)
        page = [_of_deferred(ref) for ref in dead[:limit]]
        return Page(page, (page[-1].due_ns, page[-1].offset) if len(dead) > limit else None)
    if state is MessageState.DEFERRED:
        return _deferred(cursor, after[1] + 1, limit)
    if state is MessageState.WAITING:
        return _waiting(cursor, after[1] + 1, limit)
    if state is MessageState.IN_FLIGHT:
        return _in_flight(cursor, after[1] + 1, limit)
    raise ValueError(f"messages that are {state.name.lower()} are not listed: nsqha peek shows what the log has")


def _deferred(cursor: ChannelCursor, first: int, limit: int) -> Page:
    overlay, singles = cursor.deferred_overlay, cursor.flight.singles
    found: list[Held] = []
    last = first - 1
    for ref in islice(overlay.items(first), LOOKED_AT_ONCE):
        if len(found) == limit:
            return Page(found, (0, last))
        last = ref.offset
        if not is_dead(ref) and ref.offset not in singles:
            found.append(_of_deferred(ref))
    return Page(found, (0, last) if overlay.lowest(last + 1) is not None else None)


def _waiting(cursor: ChannelCursor, first: int, limit: int) -> Page:
    ring, waiting = cursor.ring, cursor.waiting
    first = max(first, ring.low)
    end = min(ring.next, first + LOOKED_AT_ONCE)
    found: list[Held] = []
    for offset in range(first, end):
        if ring.get(offset) == WAITING:
            if len(found) == limit:
                return Page(found, (0, offset - 1))
            due = waiting.delays.get(offset, 0.0)
            found.append(Held(offset, MessageState.WAITING, waiting.attempts(offset), deadline=due))
    return Page(found, (0, end - 1) if end < ring.next else None)


def _in_flight(cursor: ChannelCursor, first: int, limit: int) -> Page:
    ring, flight = cursor.ring, cursor.flight
    low = max(first, ring.low)
    end = min(ring.next, low + LOOKED_AT_ONCE)
    runs = [offset for offset in range(low, end) if ring.get(offset) == IN_FLIGHT] if flight.count else []
    # A deferred message in flight may lie anywhere; of the others those behind `end` are for the next page.
    last = ring.next if end == ring.next else end
    singles = [o for o, single in flight.singles.items() if o >= first and (o < last or last == ring.next)]
    offsets = sorted([*runs, *singles])
    found = [_flying(cursor, offset) for offset in offsets[:limit]]
    if len(offsets) > limit:
        return Page(found, (0, offsets[limit - 1]))
    return Page(found, (0, end - 1) if end < ring.next else None)


def _flying(cursor: ChannelCursor, offset: int) -> Held:
    flight = cursor.flight
    owner, attempts, deadline = flight.delivery(offset)
    position = 0
    if (single := flight.singles.get(offset)) is not None and single.deferred:
        ref = cursor.deferred_overlay.get(offset)
        position = ref.position if ref is not None else 0
    return Held(offset, MessageState.IN_FLIGHT, attempts, position=position, owner=owner, deadline=deadline)


def _of_deferred(ref: Deferred) -> Held:
    state = MessageState.DEAD if is_dead(ref) else MessageState.DEFERRED
    return Held(ref.offset, state, ref.attempts, due_ns=ref.due_ns, position=ref.position)


def held(cursor: ChannelCursor, offset: int) -> Held | None:
    """Where the message is; None: the channel has not got it, or not yet."""
    ring, flight, unread = cursor.ring, cursor.flight, cursor.unread
    if not 0 <= offset < cursor.end:
        return None
    slot = ring.get(offset) if ring.low <= offset < ring.next else FINISHED
    if offset in flight.singles or slot == IN_FLIGHT:
        return _flying(cursor, offset)
    if (ref := cursor.deferred_overlay.get(offset)) is not None:
        return _of_deferred(ref)
    if slot == WAITING:
        due = cursor.waiting.delays.get(offset, 0.0)
        return Held(offset, MessageState.WAITING, cursor.waiting.attempts(offset), deadline=due)
    if offset >= ring.next and offset not in unread.passed:
        return Held(offset, MessageState.UNREAD)
    return Held(offset, MessageState.FINISHED)
