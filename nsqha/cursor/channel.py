"""One channel of one partition, as its leader drives it: what to hand out next, and what came of it.

                    next_run -> delivered                fin
        the log  ------------------------->  in flight  ------>  finished -> the floor moves -> progress event
                    |                         |     ^
                    | deliver-at,             |     | redelivery -> redelivered
                    | deferred elsewhere      v     |
                    +--------------------->  waiting in memory, or deferred

The reader (`next_read`) goes over the log once, in order. It passes over what is finished (known from before a restart
or an undone seek) and what is deferred. Everything it hands out is IN_FLIGHT in the ring until FIN; REQ, time-outs and
lost consumers make it wait in memory or in the deferred set (`requeue` has the rule), from where `redelivery` hands it
out, one at a time.

The floor is the ring's `low`: all below is finished or deferred. It runs ahead of the committed floor by what the next
progress events will say. The reader stops `window` behind the *committed* floor, so that a log that does not commit, or
one message that is never answered, bounds memory and repetition alike.

What may be delivered twice, and why: after a crash or a change of leader everything finished since the last committed
progress; after a time-out or a lost connection what its consumer finished without our hearing it. What is never lost:
a message leaves only by FIN, or by an event that somebody asked for (seek, empty, topic empty, an abandoning policy).

Calls per delivery and FIN take runs and cost a few microseconds however long the run is.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from nsqha.clock import Now
from nsqha.cursor.deferred import Deferred, MemoryDeferred
from nsqha.cursor.events import ChannelProgress
from nsqha.cursor.flight import NOT_IN_FLIGHT, Flight, Single, runs
from nsqha.cursor.limits import Limits
from nsqha.cursor.postponed import Change, Postponed
from nsqha.cursor.progress import Written
from nsqha.cursor.requeue import ATTEMPTS_MAX, stays_in_memory
from nsqha.cursor.state import ChannelState, PartitionState
from nsqha.cursor.waiting import Waiting
from nsqha.hot import DEFERRED, FINISHED, WAITING, Ring
from nsqha.ids import parse_message_id
from nsqha.ranges import RangeSet

FIN_LINE = 21  # b"FIN " + 16 hex digits + newline
_NEVER = 1 << 63
_SPILL_AT_ONCE = 10_000


class Redelivery(NamedTuple):
    """A message to hand out again: with how many attempts, and where its frame is (0: at its own offset)."""

    offset: int
    attempts: int
    position: int = 0


class Board:
    """What the channels of a partition share: bounds, the committed state, and who has something to write."""

    __slots__ = ("dirty", "id_base", "limits", "mono", "ordered", "state", "urgent")

    def __init__(self, state: PartitionState, *, id_base: int, limits: Limits, ordered: bool) -> None:
        self.state = state
        self.id_base = id_base
        self.limits = limits
        self.ordered = ordered
        self.dirty: list[Channel] = []
        self.mono = 0.0  # the monotonic clock when it was last seen
        self.urgent = False  # what is dirty should be written now, not with the next progress


class Channel:
    """A cursor and everything in memory around it. One owner: the partition's leader."""

    def __init__(self, committed: ChannelState, board: Board) -> None:
        self.name = committed.name
        self.uid = committed.uid
        self.ephemeral = committed.ephemeral
        self.paused = committed.paused
        self.committed = committed
        self.requeue_count = 0
        self.timeout_count = 0
        self.finished_count = 0
        self.is_dirty = False
        self._blocked = False  # the reader stands at the end of the window
        self._board = board
        self._limits = board.limits
        self._id_base = board.id_base
        self._counted_from = committed.floor  # where message_count begins
        self._wall_ahead_s = 0.0  # wall clock minus monotonic clock, when they were last seen
        self.reload()

    def reload(self) -> None:
        """Begin anew from the committed cursor, with nothing in flight."""
        committed = self.committed
        self._flight = Flight(committed.floor)
        self._ring: Ring = self._flight.ring
        self._waiting = Waiting(self._ring)
        # An ephemeral channel commits nothing: its deferred set is its own.
        own = MemoryDeferred() if self.ephemeral else committed.deferred
        self.postponed = Postponed(own, direct=self.ephemeral)
        self._passed = committed.ranges.copy()  # finished at or above next_read
        self._again = list(committed.attempts)  # handed out before a clean stop: (first, end, deliveries)
        self.written = Written(committed.floor, committed.ranges)
        self._look()

    # ---- counters

    @property
    def floor(self) -> int:
        """All below is finished or deferred."""
        return self._ring.low

    @property
    def next_read(self) -> int:
        """The next offset of the log to hand out."""
        return self._ring.next

    @property
    def in_flight(self) -> int:
        return self._flight.count

    @property
    def deferred_count(self) -> int:
        """Messages that wait for a time: deferred ones that are not in flight, and requeued ones in memory."""
        in_flight = sum(single.deferred for single in self._flight.singles.values())
        return max(len(self.postponed) - in_flight, 0) + self._waiting.delayed

    @property
    def message_count(self) -> int:
        """Messages that the topic has handed to this channel since it was created or this leader began."""
        return max(self._board.state.pump - self._counted_from, 0)

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
        unread = end - place - self._passed.count_below(end) - self.postponed.committed.count_from(place)
        return max(unread, 0) + self._waiting.count

    def oldest_unfinished(self, end: int) -> int | None:
        """The lowest offset that this channel still has to do with; None if it is done up to `end`."""
        deferred = self.postponed.lowest()
        if self._ring.low >= end:
            return deferred
        return self._ring.low if deferred is None else min(self._ring.low, deferred)

    # ---- first delivery

    def next_run(self, end: int, count_max: int) -> tuple[int, int] | None:
        """The next offsets [first, stop) below `end` to hand out for the first time, at most `count_max` of them.

        It may pass over what is settled already; handing out is `delivered` or `drop`.
        """
        first = self._ring.next
        if first >= self._stop:
            first = self._skip()
        stop = min(first + count_max, end, self._stop)
        if stop > self._window_end():
            stop = self._window_end()
            self._blocked = stop <= first < end
        return (first, stop) if first < stop and not self.paused else None

    def delivered(self, first: int, end: int, owner: int, deadline: float) -> None:
        """The run [first, end), or a beginning of it, is in flight to `owner` until `deadline`."""
        assert first == self._ring.next, f"delivered {first} when the reader is at {self._ring.next}"
        self._flight.deliver(first, end, owner, deadline)

    def drop(self, first: int, end: int) -> None:
        """Nobody gets [first, end), which is next (a sample left it out)."""
        assert first == self._ring.next, f"dropped {first} when the reader is at {self._ring.next}"
        self._ring.settle(first, end, FINISHED)
        self._touch()

    def meet(self, offset: int, due_ns: int, now: Now) -> bool:
        """The reader met a message with a deliver-at time; it is deferred if that is not over. True if so.

        Deferring when the pump passes is the rule (`state`); this is for a message read again after a seek.
        """
        if due_ns <= now.wall_ns or offset != self._ring.next:
            return False
        self._ring.settle(offset, offset + 1, DEFERRED)
        self.postponed.put(Deferred(offset, due_ns, 0))
        self._touch()
        return True

    def _window_end(self) -> int:
        # An ephemeral channel commits nothing, so its own floor bounds it.
        return (self._ring.low if self.ephemeral else self.committed.floor) + self._limits.window

    def _skip(self) -> int:
        """Pass over what is finished or deferred where the reader stands; where it stands then."""
        ring, deferred, limit = self._ring, self.postponed.committed, self._window_end()
        place = ring.next
        while place < limit:
            past = min(self._passed.end_of_range(place), limit)
            if past > place:
                ring.settle(place, past, FINISHED)
            elif not self._board.ordered and deferred.next_offset(place) == place:
                past = place + 1
                ring.settle(place, past, DEFERRED)
            else:
                break
            place = past
            self._touch()
        self._look()
        return place

    def _look(self) -> None:
        """Where the reader must look closer next: nothing is special in [next_read, _stop)."""
        place = self._ring.next
        self._passed.cut_below(place)
        while self._again and self._again[0][1] <= place:
            del self._again[0]
        special = (
            self._passed.next_held(place),
            self.postponed.committed.next_offset(place),
            max(self._again[0][0], place) if self._again else None,
        )
        self._stop = min([at for at in special if at is not None], default=_NEVER)

    # ---- delivery again

    def has_redelivery(self, now: Now) -> bool:
        return self.redelivery(now) is not None

    def redelivery(self, now: Now) -> Redelivery | None:
        """The next message to hand out that is not new to this channel; the same until its state changes."""
        self._see(now)
        if self.paused or len(self._flight.singles) >= self._limits.singles_max:
            return None
        waiting = self._waiting
        if waiting.delayed:
            waiting.wake(now.mono)
        if waiting.count and (offset := waiting.first()) is not None:
            return self._redelivery_of(offset, waiting.attempts(offset), 0)
        if self._again and (before := self._handed_out_before()) is not None:
            return before
        return self._due(now)

    def _due(self, now: Now) -> Redelivery | None:
        ref = self.postponed.due(now.wall_ns, self._flight.singles)
        return self._redelivery_of(ref.offset, ref.attempts, ref.position) if ref is not None else None

    def _handed_out_before(self) -> Redelivery | None:
        place = self._skip() if self._ring.next >= self._stop else self._ring.next
        if not self._again or self._again[0][0] > place or place >= self._window_end():
            return None
        return self._redelivery_of(place, self._again[0][2], 0)

    def _redelivery_of(self, offset: int, attempts: int, position: int) -> Redelivery:
        return Redelivery(offset, min(attempts + 1, ATTEMPTS_MAX), position)

    def redelivered(self, redelivery: Redelivery, owner: int, deadline: float) -> None:
        """The message is in flight to `owner` until `deadline`."""
        offset = redelivery.offset
        deferred = False
        if self._ring.get(offset) == WAITING:
            self._waiting.pop(offset)
        elif offset == self._ring.next and self._again and self._again[0][0] <= offset:
            self._ring.deliver(offset, offset + 1, owner)
            self._look()
        else:
            deferred = True
        self._flight.deliver_single(offset, Single(owner, redelivery.attempts, deadline, deferred=deferred))

    # ---- answers

    def fin_run(self, data: bytes, pos: int, end: int, owner: int) -> tuple[int, int]:
        """Finish the messages of the complete FIN lines data[pos:end]: where it stopped, and how many it finished.

        It stops before the first line that can not be finished; `fin` says why.
        """
        total = 0
        while True:
            pos, finished = self._flight.fin_run(data, pos, end, self._id_base, owner)
            total += finished
            # What stopped it may be a message that is in flight singly.
            if pos >= end or not self._fin_line(data, pos, owner):
                break
            pos += FIN_LINE
            total += 1
        if total:
            self.finished_count += total
            self._touch()
        return pos, total

    def _fin_line(self, data: bytes, pos: int, owner: int) -> bool:
        number = parse_message_id(data[pos + 4 : pos + 20])
        if number is None:
            return False
        offset = number - self._id_base
        if self._flight.forgotten(offset, owner, answered=False) or self._flight.refuse(offset, owner) is not None:
            return False
        self._finish(offset)
        return True

    def fin(self, offset: int, owner: int) -> str | None:
        """Finish one message; why not, if it can not."""
        why = self._refuse(offset, owner, answered=True)
        if why is None:
            self._finish(offset)
            self.finished_count += 1
            self._touch()
        return why

    def _finish(self, offset: int) -> None:
        single = self._flight.take_back(offset)
        if single is None or not single.deferred:
            self._ring.set(offset, FINISHED)
            return
        self.postponed.finish(offset)
        if offset >= self._ring.next:  # the reader was moved back behind it
            self._passed.add(offset, offset + 1)
            self._look()
        elif offset >= self._ring.low:
            self._ring.set(offset, FINISHED)

    def req(self, offset: int, owner: int, delay_ms: int, now: Now) -> str | None:
        """Hand it out again after a delay; why not, if it can not."""
        why = self._refuse(offset, owner, answered=True)
        if why is None:
            single = self._flight.take_back(offset)
            self.requeue_count += 1
            self._requeue(offset, single, delay_ms / 1000, now)
        return why

    def touch(self, offset: int, owner: int, now: Now, timeout_s: float) -> str | None:
        """More time for one message; why not, if it can not."""
        why = self._refuse(offset, owner, answered=False)
        if why is None:
            self._flight.touch(offset, owner, now.mono, timeout_s, self._limits.max_msg_timeout_s)
        return why

    def _refuse(self, offset: int, owner: int, *, answered: bool) -> str | None:
        if self._flight.forgotten(offset, owner, answered=answered):
            return NOT_IN_FLIGHT
        return self._flight.refuse(offset, owner)

    def _requeue(self, offset: int, single: Single | None, delay_s: float, now: Now) -> None:
        attempts = single.attempts if single is not None else 1
        due_ns = now.wall_ns + round(delay_s * 1e9)
        if single is not None and single.deferred:
            self._defer(Deferred(offset, due_ns, attempts))
        elif not stays_in_memory(
            delay_s=delay_s, attempts=attempts, remembered=self._waiting.remembered, limits=self._limits
        ):
            # Postponed before settled: the order does not matter here, both leave in one event.
            self._defer(Deferred(offset, due_ns, attempts))
            self._ring.set(offset, DEFERRED)
        elif delay_s > 0:
            self._waiting.add_later(offset, attempts, now.mono + delay_s)
        else:
            self._waiting.add(offset, attempts)

    def _defer(self, ref: Deferred) -> None:
        self.postponed.put(ref)
        self._touch()

    # ---- time, owners

    def expire(self, now: Now) -> list[tuple[int, int]]:
        """Take back what timed out: owner and how many. Also notices which delays are over."""
        self._see(now)
        back: list[tuple[int, int]] = []
        for owner, offsets, singles in self._flight.expire(now.mono):
            back.append((owner, self._came_back(offsets, singles, now)))
        self._waiting.wake(now.mono)
        self.postponed.gather(now.wall_ns)
        if self._blocked:
            self._spill(now)  # what was at the floor may have timed out just now
        return back

    def detach(self, owner: int, now: Now) -> int:
        """The owner is gone; what it had in flight waits again at once. How many those were.

        They count as time-outs, which is what they become in nsqd, only later.
        """
        return self._came_back(*self._flight.detach(owner), now)

    def _came_back(self, offsets: list[int], singles: list[tuple[int, Single]], now: Now) -> int:
        self._waiting.add_expired(offsets)
        for offset, single in singles:
            self._requeue(offset, single, 0.0, now)
        count = len(offsets) + len(singles)
        self.timeout_count += count
        return count

    def _see(self, now: Now) -> None:
        self._board.mono = now.mono
        self._wall_ahead_s = now.wall_ns / 1e9 - now.mono
        if self._blocked:
            self._spill(now)

    def next_deadline(self) -> float | None:
        """When to call `expire` next (monotonic seconds)."""
        deadline = self._flight.next_deadline()
        if self._waiting.delayed:
            delay = self._waiting.next_deadline()
            if delay is not None and (deadline is None or delay < deadline):
                deadline = delay
        due_ns = self.postponed.next_due()
        if due_ns is not None:
            due = due_ns / 1e9 - self._wall_ahead_s
            if deadline is None or due < deadline:
                deadline = due
        return deadline

    # ---- a full window

    def _spill(self, now: Now) -> None:
        """Defer what waits at the floor, until a quarter of the window is free.

        What is in flight at the floor is left alone: it is answered, or times out and waits.
        """
        ring = self._ring
        for _ in range(_SPILL_AT_ONCE):
            offset = ring.low
            if ring.get(offset) != WAITING or ring.next - offset <= self._limits.window * 3 // 4:
                break
            attempts, due = self._waiting.give_up(offset)
            delay_s = max(due - now.mono, 0.0) if due is not None else 0.0
            self._defer(Deferred(offset, now.wall_ns + round(delay_s * 1e9), attempts))
            ring.set(offset, DEFERRED)
        self._blocked = ring.next >= self._window_end()
        if self.is_dirty:
            self._board.urgent = True  # only a committed floor makes room

    # ---- what the log did to it

    def settled(self, sent: dict[int, Change]) -> None:
        """The batch with this progress was applied."""
        self.postponed.settled(sent)

    def deliver_at(self, refs: tuple[Deferred, ...]) -> None:
        """The pump passed messages that wait for a time."""
        for ref in refs:
            if self.ephemeral:
                self.postponed.put(ref)
            else:
                self.postponed.arrived(ref)
        self._look()

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
                self.postponed.committed.clear()
            self.postponed.reload()
        else:
            self.postponed.keep_committed()
        counts = self._flight.forget(committed.floor, keep=self._deferred_in_flight())
        self._waiting = Waiting(self._ring)
        self._passed = committed.ranges.copy()
        for offset in self.postponed.finished(committed.floor):
            self._passed.add(offset, offset + 1)
        self._again = []
        self.written = Written(committed.floor, committed.ranges)
        self._look()
        return counts

    def gone(self, end: int) -> dict[int, int]:
        """By policy everything below `end` goes unread; owner -> deliveries that were dropped."""
        self.postponed.keep_committed(below=end)
        counts = self._flight.forget_below(end, keep=self._deferred_in_flight())
        self._ring.settle(self._ring.low, end, FINISHED)
        self._waiting.drop_below(end)
        self._look()
        self._touch()
        return counts

    def _deferred_in_flight(self) -> list[int]:
        return [o for o, single in self._flight.singles.items() if single.deferred and o in self.postponed]

    def holds_below(self, offset: int) -> bool:
        """Whether this channel still has to do with a message below `offset`."""
        lowest = self.postponed.lowest()
        return self._ring.low < offset or (lowest is not None and lowest < offset)

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

    def count_from(self, offset: int) -> None:
        """`message_count` begins here: what was handed over before this leader began is not counted again."""
        self._counted_from = offset

    # ---- into the log

    def _touch(self) -> None:
        """There is something to write."""
        if not self.is_dirty and not self.ephemeral:
            self.is_dirty = True
            self._board.dirty.append(self)
            if self._board.ordered:
                self._board.urgent = True  # the next message waits for this to be committed

    @property
    def has_final_news(self) -> bool:
        """Whether a clean stop has something to write."""
        handed_out = self._flight.count or self._ring.low < self._ring.next or self._again or self.committed.attempts
        return not self.ephemeral and bool(self.is_dirty or handed_out)

    def progress(self, *, final: bool) -> tuple[ChannelProgress, dict[int, Change]]:
        """What to write, and what to hand to `settled` when it is applied. `final`: a clean stop.

        With more deferrals than fit, the cursor stays where it was written: a floor must not pass a message whose
        deferral is not in the log. The channel stays dirty then.
        """
        self.is_dirty = False
        if final:
            for offset, single in self._flight.singles.items():
                ref = self.postponed.get(offset) if single.deferred else None
                if ref is not None:
                    self.postponed.put(ref._replace(attempts=single.attempts))
        sent = self.postponed.take_unsent(self.postponed.unsent if final else self._limits.changes_per_batch)
        ranges: list[tuple[int, int]] = []
        if self.postponed.unsent:
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
        """How often each unfinished message below the reader was delivered, as runs."""
        known = self._waiting.known()
        for offset, single in self._flight.singles.items():
            if not single.deferred:
                known[offset] = single.attempts
        marks = sorted(known)
        ring = self._ring
        deferred = self.postponed.offsets(ring.low, ring.next)
        settled = RangeSet(sorted([*ring.finished_ranges(ring.low, ring.next), *runs(deferred)]))
        found: list[tuple[int, int, int]] = []
        place = ring.low
        for first, end in [*settled, (ring.next, ring.next)]:
            found += _deliveries_of(place, first, known, marks)
            place = end
        return found + [(max(first, ring.next), end, n) for first, end, n in self._again]

    def __repr__(self) -> str:
        return (
            f"Channel({self.name}: floor {self.floor}, next {self.next_read}, {self.in_flight} in flight, "
            f"{self._waiting.count} waiting, {len(self.postponed)} deferred)"
        )


def _deliveries_of(first: int, end: int, known: dict[int, int], marks: list[int]) -> list[tuple[int, int, int]]:
    """[first, end) cut into runs of equal deliveries: 1 unless known; `marks` are the known ones in order."""
    found: list[tuple[int, int, int]] = []
    for offset in marks[bisect_left(marks, first) : bisect_left(marks, end)]:
        if first < offset:
            found.append((first, offset, 1))
        found.append((offset, offset + 1, known[offset]))
        first = offset + 1
    if first < end:
        found.append((first, end, 1))
    return found
