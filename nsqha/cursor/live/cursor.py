"""A channel's place in the log, on its leader: where the reader stands, what is settled, and what is written of it.

    committed floor      floor = ring.low                next_read = ring.next           stop        pump
         |                    |                               |                           |            |
    -----+--------------------+-------------------------------+---------------------------+------------+-----> offset
         |  settled, but not  |  in flight, waiting; some     |  unread, nothing special  |  something |
         |  committed yet     |  finished or deferred         |  in between               |  to pass   |

The reader goes over the log once, in order; what lies in front of it is `unread`.

The floor may pass only what is finished or deferred. It runs ahead of the committed floor by what the next progress
events will say; the reader goes no further than `window` beyond the *committed* floor, so that a log that does not
commit, or a message that is never answered, bounds memory and repetition alike.

The committed state is changed by the log alone (`committed.state`). Its effects arrive here after it was changed:
deferred messages, a seek, an emptied topic, messages that a policy gave up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from nsqha.cursor.committed.state import ChannelState, PartitionState
from nsqha.cursor.deferred.deferred_set import Deferred, MemoryDeferred
from nsqha.cursor.deferred.overlay import DeferredChange, DeferredOverlay
from nsqha.cursor.events import ChannelProgress, encode_cursor, floor_frame
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live.dead import DeadLetters
from nsqha.cursor.live.flight import Flight, runs
from nsqha.cursor.live.passing import PassingOver
from nsqha.cursor.live.progress import Written, deliveries, without
from nsqha.cursor.live.unread import UnreadLog
from nsqha.cursor.live.waiting import Waiting
from nsqha.cursor.policy import ChannelPolicies
from nsqha.hot import FINISHED, WAITING, Ring

SMALL_RANGES = 100  # a progress with more finished ranges takes the general path
SPAN_OF_A_ROW = 4096  # messages in flight that take as long to search as one row takes to write


class ChannelContext:
    """What the channels of a partition share: bounds, the committed state, and who has something to write."""

    __slots__ = ("dirty", "id_base", "keep", "limits", "mono", "ordered", "policies", "state", "urgent")

    def __init__(self, state: PartitionState, *, id_base: int, limits: ChannelLimits, ordered: bool) -> None:
        self.state = state
        self.id_base = id_base
        self.limits = limits
        self.ordered = ordered
        self.policies = ChannelPolicies()
        self.dirty: list[ChannelCursor] = []
        self.keep: Callable[[int], object] = lambda offset: None  # this message will be asked for again soon
        self.mono = 0.0  # the monotonic clock when it was last seen
        self.urgent = False  # what is dirty should be written now, not with the next progress


@dataclass(slots=True)
class CountedMessages:
    """Where `message_count` of a channel begins."""

    first: int
    inherited: int = 0
    """Messages that waited there, or were finished behind one that did."""


class ChannelCursor:
    """The cursor of a channel, with all that is not settled; `Channel` hands out from it and takes answers."""

    def __init__(self, committed: ChannelState, context: ChannelContext) -> None:
        self.name = committed.name
        self.uid = committed.uid
        self.ephemeral = committed.ephemeral
        self.committed = committed
        self.context = context
        self.is_dirty = False
        self.counted = CountedMessages(committed.floor)
        self.passing = PassingOver()
        self.dead = DeadLetters(self.name, context.policies, ephemeral=self.ephemeral)
        self.reload()

    def reload(self) -> None:
        """Begin again from the committed cursor, with nothing in flight."""
        committed = self.committed
        self.flight = Flight(committed.floor)
        self.ring: Ring = self.flight.ring
        self.waiting = Waiting(self.ring)
        # An ephemeral channel commits nothing: its deferred set is its own.
        own = MemoryDeferred() if self.ephemeral else committed.deferred
        self.deferred_overlay = DeferredOverlay(own, direct=self.ephemeral)
        limits = self.context.limits
        self.unread = UnreadLog(self.ring, committed, own, limits, waits=self.context.ordered, moved=self.mark_dirty)
        self.written = Written(committed.floor, committed.ranges)

    # ---- where it is

    @property
    def floor(self) -> int:
        """All below is finished or deferred."""
        return self.ring.low

    @property
    def end(self) -> int:
        """The end of what it may read: the pump, or a reader's log end."""
        return self.context.state.end_for(self.committed)

    @property
    def next_read(self) -> int:
        """The next offset of the log to hand out."""
        return self.ring.next

    @property
    def uncommitted_progress(self) -> int:
        """How far the floor is ahead of the committed one."""
        return max(self.ring.low - self.committed.floor, 0)

    @property
    def message_count(self) -> int:
        """Messages that the topic has handed to this channel since it was created or this leader began."""
        return max(self.end - self.counted.first, 0)

    @property
    def deferred_count(self) -> int:
        """Messages that are kept until a time: deferred ones that are not in flight, and requeued ones in memory. Those
        that are due since are among them (`live.counts`), dead letters are not."""
        in_flight = sum(single.deferred for single in self.flight.singles.values())
        return max(len(self.deferred_overlay) - self.deferred_overlay.dead - in_flight, 0) + len(self.waiting.delays)

    def depth(self, end: int) -> int:
        """Messages below `end` that never waited for a time, and wait for nothing but a consumer."""
        return self.unread.count(end) + self.waiting.count

    def oldest_unfinished(self, end: int) -> int | None:
        """The lowest offset that consumers still have to do with; None if they are done up to `end`."""
        deferred = self.deferred_overlay.lowest_waiting()
        if self.ring.low >= end:
            return deferred
        return self.ring.low if deferred is None else min(self.ring.low, deferred)

    def holds_below(self, offset: int) -> bool:
        """Whether this channel still has to do with a message below `offset`."""
        lowest = self.deferred_overlay.lowest()
        return self.ring.low < offset or (lowest is not None and lowest < offset)

    def keep_unread(self, pump: int, *, drop_below: int = 0) -> int:
        """A channel that is kept in memory only and not read drops its oldest unread messages; how many.

        nsqd drops the newest; then a channel without consumers would hold the log where it began. `drop_below`: those
        below this offset go too.
        """
        ring, passed = self.ring, self.unread.passed
        excess = pump - ring.next - passed.total() - self.context.limits.ephemeral_unread_max
        end = max(ring.next + excess, drop_below)
        if end <= ring.next:
            return 0
        count = end - ring.next - passed.count_below(end)
        ring.settle(ring.next, end, FINISHED)
        self.unread.look()
        self.mark_dirty()
        return count

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
        self.unread.look()
        if refs[0].offset == self.ring.next:
            self.unread.skip()  # an idle channel of messages for later does not leave them for the first consumer

    def emptied(self, first: int, end: int) -> None:
        """The topic was emptied: [first, end), above the reader, is finished."""
        self.unread.passed.add(first, end)
        self.written.ranges.add(first, end)
        self.counted.first += end - first
        self.unread.look()

    def sought(self, *, dropped: bool, returned: Sequence[Deferred] = ()) -> dict[int, int]:
        """The cursor was moved; owner -> deliveries that were forgotten.

        `dropped`: the deferred set was emptied. `returned`: these were put back into it."""
        committed = self.committed
        if dropped and self.ephemeral:
            self.deferred_overlay.committed.clear()
            self.deferred_overlay = DeferredOverlay(self.deferred_overlay.committed, direct=True)
        else:
            # Dropped or not: what an operator wants of dead letters, which stay, holds whatever was asked for before.
            self.deferred_overlay.keep_committed()
        for ref in returned:
            self.deferred_overlay.arrived(ref)
        counts = self.flight.forget(committed.floor, keep=self._deferred_in_flight())
        self.waiting = Waiting(self.ring)
        self.unread.moved_back(self.deferred_overlay.finished(committed.floor))
        for offset in self.deferred_overlay.put_back:
            if offset >= committed.floor:
                self.unread.put_back(offset)
        self.written = Written(committed.floor, committed.ranges)
        return counts

    def gone(self, end: int) -> dict[int, int]:
        """By policy everything below `end` goes unread; owner -> deliveries that were dropped."""
        self.deferred_overlay.keep_committed(below=end)
        counts = self.flight.forget_below(end, keep=self._deferred_in_flight())
        self.ring.settle(self.ring.low, end, FINISHED)
        self.waiting.drop_below(end)
        self.unread.look()
        self.mark_dirty()
        return counts

    def _deferred_in_flight(self) -> list[int]:
        return [o for o, single in self.flight.singles.items() if single.deferred and o in self.deferred_overlay]

    def give_up(self, first: int, end: int, *, carried: bool = False) -> int:
        """The log cannot be read in [first, end), and an operator goes on without: how many messages that costs.
        `carried`: it is the carried copy of these messages that cannot be read."""
        ring, overlay, passed = self.ring, self.deferred_overlay, self.unread.passed
        lost = [offset for offset in range(max(first, ring.low), min(end, ring.next)) if ring.get(offset) == WAITING]
        for offset in lost:
            self.waiting.give_up(offset)
            ring.set(offset, FINISHED)
        # A carried copy can still be read, and what is in flight was read.
        below = takewhile(lambda ref: ref.offset < end, overlay.committed.items(first))
        held = [ref.offset for ref in below if carried or not ref.position]
        gone = [offset for offset in held if offset in overlay and offset not in self.flight.singles]
        for offset in gone:
            self.finish_deferred(offset)
        count = len(lost) + len(gone)
        if first <= ring.next < end:
            count += end - ring.next - passed.count_below(end) - len([o for o in gone if o >= ring.next])
            ring.settle(ring.next, end, FINISHED)
            self.unread.look()
        self.mark_dirty()
        return count

    def finish_deferred(self, offset: int) -> None:
        """A deferred message is done."""
        self.deferred_overlay.finish(offset)
        if offset >= self.ring.next:  # the reader was moved back behind it
            self.unread.finish_deferred((offset,))
        elif offset >= self.ring.low:
            self.ring.set(offset, FINISHED)

    def count_from(self, offset: int) -> None:
        """`message_count` begins here: what was handed over before this leader began is not counted again."""
        self.counted = CountedMessages(offset, max(offset - self.floor, 0))

    # ---- into the log

    def mark_dirty(self) -> None:
        """There is something to write."""
        if not self.is_dirty and not self.ephemeral:
            self.is_dirty = True
            self.context.dirty.append(self)
            if self.context.ordered:
                self.context.urgent = True  # the next message waits for this to be committed
        if self.deferred_overlay.unsent >= self.context.limits.changes_urgent:
            self.context.urgent = True  # memory holds them one by one

    @property
    def has_final_news(self) -> bool:
        """Whether a clean stop has something to write."""
        handed_out = self.flight.count or self.ring.low < self.ring.next or self.unread.again or self.committed.attempts
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
            for offset, single in self.flight.singles.items():
                ref = self.deferred_overlay.get(offset) if single.deferred else None
                if ref is not None:
                    self.deferred_overlay.put(ref._replace(attempts=single.attempts))
        everything = final or whole
        sent = self.deferred_overlay.take_unsent(
            self.deferred_overlay.unsent if everything else self.context.limits.changes_per_batch
        )
        ranges: list[tuple[int, int]] = []
        if self.deferred_overlay.unsent:
            self.mark_dirty()
        else:
            ring = self.ring
            ranges = self.written.advance(ring.low, ring.finished_ranges(ring.low, ring.next), ring.next)
            for first, end in without(self.unread.take_ahead(), self.written.ranges):
                ranges.append((first, end))
                self.written.ranges.add(first, end)
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
        ring = self.ring
        known = self.waiting.known()
        for offset, single in self.flight.singles.items():
            if not single.deferred:
                known[offset] = single.attempts
        settled = [
            *ring.finished_ranges(ring.low, ring.next),
            *runs(self.deferred_overlay.offsets(ring.low, ring.next)),
        ]
        found = deliveries(ring.low, ring.next, settled, known)
        return found + [(max(first, ring.next), end, n) for first, end, n in self.unread.again]


def floor_progress(cursor: ChannelCursor) -> bytes | None:
    """The frame of a progress that is nothing but a floor; None: it is more, and nothing was done."""
    ring, written = cursor.ring, cursor.written
    low = ring.low
    if cursor.deferred_overlay.unsent or cursor.unread.has_ahead or written.ranges:
        return None
    if low < written.floor or ring.next - low > SPAN_OF_A_ROW or ring.finished_ranges(low, ring.next):
        return None
    cursor.is_dirty = False
    written.floor = low
    return floor_frame(cursor.uid, cursor.committed.seek, low)


def small_progress(cursor: ChannelCursor) -> tuple[bytes, int] | None:
    """The encoded progress of a channel whose floor moved over what consumers finished, and how many rows that is;
    None: it has more to say, and `progress` does."""
    ring = cursor.ring
    if cursor.deferred_overlay.unsent or cursor.unread.has_ahead:
        return None
    ranges = ring.finished_ranges(ring.low, ring.next)
    if len(ranges) > SMALL_RANGES:
        return None
    cursor.is_dirty = False
    new = cursor.written.advance(ring.low, ranges, ring.next)
    rows = 1 + len(new) + (ring.next - ring.low) // SPAN_OF_A_ROW
    return encode_cursor(cursor.uid, cursor.committed.seek, cursor.written.floor, new), rows
