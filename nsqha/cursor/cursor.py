"""A channel's place in the log, on its leader: where the reader stands, what is settled, and what the log is told.

    committed floor      floor = ring.low                next_read = ring.next          _stop        pump
         |                    |                               |                           |            |
    -----+--------------------+-------------------------------+---------------------------+------------+-----> offset
         |  settled, but not  |  in flight, waiting; some     |  unread, nothing special  |  something |
         |  committed yet     |  finished or deferred         |  in between               |  to pass   |

The reader goes over the log once, in order. What it meets settled it passes over: finished ranges that were known
before it came (`_passed`: from before a restart, an undone seek, an emptied topic) and messages that are deferred. What
was in flight when the last leader stopped cleanly (`_again`) it leaves to `redelivery`, which knows how often it was
delivered. `_stop` is the nearest of these, so that reading on costs nothing before it.

The floor may pass only what is finished or deferred. It runs ahead of the committed floor by what the next progress
events will say; the reader goes no further than `window` beyond the *committed* floor, so that a log that does not
commit, or a message that is never answered, bounds memory and repetition alike.

The committed state is changed by the log alone (`state`). Its effects arrive here after it was changed: deferred
messages, a seek, an emptied topic, messages that a policy gave up.
"""

from __future__ import annotations

from nsqha.cursor.deferred import Deferred, MemoryDeferred
from nsqha.cursor.deferred_overlay import DeferredChange, DeferredOverlay
from nsqha.cursor.events import ChannelProgress
from nsqha.cursor.flight import Flight, runs
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.progress import Written, deliveries
from nsqha.cursor.state import ChannelState, PartitionState
from nsqha.cursor.waiting import Waiting
from nsqha.hot import DEFERRED, FINISHED, Ring

_NEVER = 1 << 63


class ChannelContext:
    """What the channels of a partition share: bounds, the committed state, and who has something to write."""

    __slots__ = ("dirty", "id_base", "limits", "mono", "ordered", "state", "urgent")

    def __init__(self, state: PartitionState, *, id_base: int, limits: ChannelLimits, ordered: bool) -> None:
        self.state = state
        self.id_base = id_base
        self.limits = limits
        self.ordered = ordered
        self.dirty: list[ChannelCursor] = []
        self.mono = 0.0  # the monotonic clock when it was last seen
        self.urgent = False  # what is dirty should be written now, not with the next progress


class ChannelCursor:
    """The cursor of a channel; `Channel` hands out and takes answers on top of it."""

    def __init__(self, committed: ChannelState, context: ChannelContext) -> None:
        self.name = committed.name
        self.uid = committed.uid
        self.ephemeral = committed.ephemeral
        self.committed = committed
        self.is_dirty = False
        self._context = context
        self._limits = context.limits
        self._counted_from = committed.floor  # where message_count begins
        self.reload()

    def reload(self) -> None:
        """Begin anew from the committed cursor, with nothing in flight."""
        committed = self.committed
        self._flight = Flight(committed.floor)
        self._ring: Ring = self._flight.ring
        self._waiting = Waiting(self._ring)
        # An ephemeral channel commits nothing: its deferred set is its own.
        own = MemoryDeferred() if self.ephemeral else committed.deferred
        self.deferred_overlay = DeferredOverlay(own, direct=self.ephemeral)
        self._passed = committed.ranges.copy()  # finished at or above next_read
        self._again = list(committed.attempts)  # handed out before a clean stop: (first, end, deliveries)
        self.written = Written(committed.floor, committed.ranges)
        self._look()

    # ---- where it is

    @property
    def floor(self) -> int:
        """All below is finished or deferred."""
        return self._ring.low

    @property
    def end(self) -> int:
        """The end of what it may read: the pump, or a reader's log end."""
        return self._context.state.end_for(self.committed)

    @property
    def next_read(self) -> int:
        """The next offset of the log to hand out."""
        return self._ring.next

    @property
    def finished_range_count(self) -> int:
        """Ranges above the floor, as last written."""
        return len(self.written.ranges)

    @property
    def uncommitted_progress(self) -> int:
        """How far the floor is ahead of the committed one."""
        return max(self._ring.low - self.committed.floor, 0)

    def depth(self, end: int) -> int:
        """Messages below `end` that wait for nothing but a consumer."""
        place = self._ring.next
        unread = end - place - self._passed.count_below(end) - self.deferred_overlay.committed.count_from(place)
        return max(unread, 0) + self._waiting.count

    def oldest_unfinished(self, end: int) -> int | None:
        """The lowest offset that this channel still has to do with; None if it is done up to `end`."""
        deferred = self.deferred_overlay.lowest()
        if self._ring.low >= end:
            return deferred
        return self._ring.low if deferred is None else min(self._ring.low, deferred)

    def holds_below(self, offset: int) -> bool:
        """Whether this channel still has to do with a message below `offset`."""
        lowest = self.deferred_overlay.lowest()
        return self._ring.low < offset or (lowest is not None and lowest < offset)

    # ---- the reader

    def _window_end(self) -> int:
        # An ephemeral channel commits nothing, so its own floor bounds it.
        return (self._ring.low if self.ephemeral else self.committed.floor) + self._limits.window

    def _skip(self) -> int:
        """Pass over what is finished or deferred where the reader stands; where it stands then."""
        ring, limit = self._ring, self._window_end()
        place = ring.next
        while place < limit:
            past = min(self._passed.end_of_range(place), limit)
            if past > place:
                ring.settle(place, past, FINISHED)
            elif not self._context.ordered and (past := self._end_of_deferred(place, limit)) > place:
                ring.settle(place, past, DEFERRED)
            else:
                break
            place = past
            self._touch()
        self._look()
        return place

    def _end_of_deferred(self, place: int, limit: int) -> int:
        """`place`, or the end of the run of deferred messages that begins there."""
        deferred = self.deferred_overlay.committed
        if deferred.next_offset(place) != place:
            return place
        passed = self._passed.next_held(place)
        limit = limit if passed is None else min(limit, passed)
        for ref in deferred.items(place):
            if ref.offset != place or place >= limit:
                break
            place += 1
        return place

    def _look(self) -> None:
        """Where the reader must look closer next: nothing is special in [next_read, _stop)."""
        place = self._ring.next
        self._passed.cut_below(place)
        while self._again and self._again[0][1] <= place:
            del self._again[0]
        special = (
            self._passed.next_held(place),
            self.deferred_overlay.committed.next_offset(place),
            max(self._again[0][0], place) if self._again else None,
        )
        self._stop = min([at for at in special if at is not None], default=_NEVER)

    def keep_unread(self, pump: int) -> None:
        """A channel that is kept in memory only and not read drops its oldest unread messages.

        nsqd drops the newest; then a channel that nobody reads would hold the log where it began.
        """
        ring = self._ring
        excess = pump - ring.next - self._passed.total() - self._limits.ephemeral_unread_max
        if excess > 0:
            ring.settle(ring.next, ring.next + excess, FINISHED)
            self._look()
            self._touch()

    # ---- what the log did to it

    def settled(self, sent: dict[int, DeferredChange]) -> None:
        """The batch with this progress was applied."""
        self.deferred_overlay.settled(sent)

    def deliver_at(self, refs: tuple[Deferred, ...]) -> None:
        """The pump passed messages that wait for a time."""
        for ref in refs:
            if self.ephemeral:
                self.deferred_overlay.put(ref)
            else:
                self.deferred_overlay.arrived(ref)
        self._look()
        if refs[0].offset == self._ring.next:
            self._skip()  # an idle channel of messages for later does not leave them for the first consumer

    def emptied(self, first: int, end: int) -> None:
        """The topic was emptied: [first, end), above the reader, is finished."""
        self._passed.add(first, end)
        self.written.ranges.add(first, end)
        self._counted_from += end - first
        self._look()

    def sought(self, *, dropped: bool) -> dict[int, int]:
        """The cursor was moved (`dropped`: and the deferred set emptied); owner -> deliveries that were forgotten."""
        committed = self.committed
        if dropped:
            if self.ephemeral:
                self.deferred_overlay.committed.clear()
            self.deferred_overlay.reload()
        else:
            self.deferred_overlay.keep_committed()
        counts = self._flight.forget(committed.floor, keep=self._deferred_in_flight())
        self._waiting = Waiting(self._ring)
        self._passed = committed.ranges.copy()
        for offset in self.deferred_overlay.finished(committed.floor):
            self._passed.add(offset, offset + 1)
        self._again = []
        self.written = Written(committed.floor, committed.ranges)
        self._look()
        return counts

    def gone(self, end: int) -> dict[int, int]:
        """By policy everything below `end` goes unread; owner -> deliveries that were dropped."""
        self.deferred_overlay.keep_committed(below=end)
        counts = self._flight.forget_below(end, keep=self._deferred_in_flight())
        self._ring.settle(self._ring.low, end, FINISHED)
        self._waiting.drop_below(end)
        self._look()
        self._touch()
        return counts

    def _deferred_in_flight(self) -> list[int]:
        return [o for o, single in self._flight.singles.items() if single.deferred and o in self.deferred_overlay]

    def count_from(self, offset: int) -> None:
        """`message_count` begins here: what was handed over before this leader began is not counted again."""
        self._counted_from = offset

    # ---- into the log

    def _touch(self) -> None:
        """There is something to write."""
        if not self.is_dirty and not self.ephemeral:
            self.is_dirty = True
            self._context.dirty.append(self)
            if self._context.ordered:
                self._context.urgent = True  # the next message waits for this to be committed
        if self.deferred_overlay.unsent >= self._limits.changes_urgent:
            self._context.urgent = True  # memory holds them one by one

    @property
    def has_final_news(self) -> bool:
        """Whether a clean stop has something to write."""
        handed_out = self._flight.count or self._ring.low < self._ring.next or self._again or self.committed.attempts
        return not self.ephemeral and bool(self.is_dirty or handed_out)

    def progress(
        self, *, final: bool = False, whole: bool = False
    ) -> tuple[ChannelProgress, dict[int, DeferredChange]]:
        """What to write, and what to hand to `settled` when it is applied. `final`: a clean stop.

        With more deferrals than fit, the cursor stays where it was written: a floor must not pass a message whose
        deferral is not in the log. The channel stays dirty then. `whole`: all of them, since a seek follows.
        """
        self.is_dirty = False
        if final:
            for offset, single in self._flight.singles.items():
                ref = self.deferred_overlay.get(offset) if single.deferred else None
                if ref is not None:
                    self.deferred_overlay.put(ref._replace(attempts=single.attempts))
        everything = final or whole
        sent = self.deferred_overlay.take_unsent(
            self.deferred_overlay.unsent if everything else self._limits.changes_per_batch
        )
        ranges: list[tuple[int, int]] = []
        if self.deferred_overlay.unsent:
            self._touch()
        else:
            ring = self._ring
            ranges = self.written.advance(ring.low, ring.finished_ranges(ring.low, ring.next), ring.next)
        finished = tuple(offset for offset, change in sent.items() if change.ref is None)
        self.written.imply(finished)
        attempts = self._deliveries() if final else []
        refs = [change.ref for change in sent.values() if change.ref is not None]
        change = ChannelProgress(
            uid=self.uid,
            seek=self.committed.seek,
            floor=self.written.floor,
            ranges=tuple(ranges),
            puts=tuple((ref.offset, ref.due_ns, ref.attempts) for ref in refs),
            finished=finished,
            attempts=tuple(attempts),
            attempts_known=final,
        )
        return change, sent

    def _deliveries(self) -> list[tuple[int, int, int]]:
        """How often each unfinished message that was handed out was delivered, as runs."""
        ring = self._ring
        known = self._waiting.known()
        for offset, single in self._flight.singles.items():
            if not single.deferred:
                known[offset] = single.attempts
        settled = [
            *ring.finished_ranges(ring.low, ring.next),
            *runs(self.deferred_overlay.offsets(ring.low, ring.next)),
        ]
        found = deliveries(ring.low, ring.next, settled, known)
        return found + [(max(first, ring.next), end, n) for first, end, n in self._again]
