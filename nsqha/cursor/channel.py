"""One channel of one partition, as its leader drives it: what to hand out next, and what came of it.

                    next_run -> delivered                fin
        the log  ------------------------->  in flight  ------>  finished -> the floor moves -> progress event
                    |                         |     ^
                    | deliver-at,             |     | redelivery -> redelivered
                    | deferred elsewhere      v     |
                    +--------------------->  waiting in memory, or deferred

`cursor` is the place in the log: what may be handed out next, and what settled means. Here is what happens to a
message in between. Everything handed out is IN_FLIGHT in the ring until FIN; REQ, time-outs and lost consumers make it
wait in memory or in the deferred set (`requeue` has the rule), from where `redelivery` hands it out, one at a time. A
full window defers what waits at the floor.

What may be delivered twice, and why: after a crash or a change of leader everything finished since the last committed
progress; after a time-out or a lost connection what its consumer finished without our hearing it. What is never lost:
a message leaves only by FIN, or by an event that somebody asked for (seek, empty, topic empty, an abandoning policy).

Calls per delivery and FIN take runs and cost a few microseconds however long the run is.
"""

from __future__ import annotations

from typing import NamedTuple

from nsqha.clock import Now
from nsqha.cursor.cursor import ChannelContext, ChannelCursor
from nsqha.cursor.deferred import Deferred
from nsqha.cursor.flight import NOT_IN_FLIGHT, Single
from nsqha.cursor.requeue import ATTEMPTS_MAX, stays_in_memory
from nsqha.cursor.state import ChannelState
from nsqha.hot import DEFERRED, FINISHED, WAITING
from nsqha.ids import parse_message_id

FIN_LINE = 21  # b"FIN " + 16 hex digits + newline
_SPILL_AT_ONCE = 10_000


class Redelivery(NamedTuple):
    """A message to hand out again: with how many attempts, and where its frame is (0: at its own offset)."""

    offset: int
    attempts: int
    position: int = 0


class Channel(ChannelCursor):
    """A cursor, and what was handed out from it. One owner: the partition's leader."""

    def __init__(self, committed: ChannelState, context: ChannelContext) -> None:
        super().__init__(committed, context)
        self.paused = committed.silent  # for good, if it is a reader's
        self.requeue_count = 0
        self.timeout_count = 0
        self.finished_count = 0
        self._blocked = False  # the reader stands at the end of the window
        self._id_base = context.id_base
        self._wall_ahead_s = 0.0  # wall clock minus monotonic clock, when they were last seen

    # ---- counters

    @property
    def in_flight(self) -> int:
        return self._flight.count

    @property
    def deferred_count(self) -> int:
        """Messages that wait for a time: deferred ones that are not in flight, and requeued ones in memory."""
        in_flight = sum(single.deferred for single in self._flight.singles.values())
        return max(len(self.deferred_overlay) - in_flight, 0) + len(self._waiting.delays)

    @property
    def message_count(self) -> int:
        """Messages that the topic has handed to this channel since it was created or this leader began."""
        return max(self.end - self._counted_from, 0)

    # ---- first delivery

    def next_run(self, end: int, count_max: int) -> tuple[int, int] | None:
        """The next offsets [first, stop) below `end` to hand out for the first time, at most `count_max` of them.

        It may pass over what is settled already; handing out is `delivered` or `drop`.
        """
        first = self._ring.next
        if first >= self._stop:
            first = self._skip()
        if first >= end:
            return None
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

    def give_up(self, first: int, end: int) -> int:
        """The log can not be read in [first, end), and an operator goes on without: how many messages that costs."""
        ring = self._ring
        lost = [offset for offset in range(max(first, ring.low), min(end, ring.next)) if ring.get(offset) == WAITING]
        for offset in lost:
            self._waiting.give_up(offset)
            ring.set(offset, FINISHED)
        # A carried copy can still be read, and what is in flight was read.
        held = [
            ref.offset for ref in self.deferred_overlay.committed.items(first) if ref.offset < end and not ref.position
        ]
        gone = [offset for offset in held if offset in self.deferred_overlay and offset not in self._flight.singles]
        for offset in gone:
            self._finish_deferred(offset)
        count = len(lost) + len(gone)
        if first <= ring.next < end:
            count += end - ring.next - self._passed.count_below(end) - len([o for o in gone if o >= ring.next])
            ring.settle(ring.next, end, FINISHED)
            self._look()
        self._touch()
        return count

    def meet(self, offset: int, due_ns: int, now: Now) -> bool:
        """The reader met a message with a deliver-at time; it is deferred if that is not over. True if so.

        Deferring when the pump passes is the rule (`state`); this is for a message read again after a seek.
        """
        if due_ns <= now.wall_ns or offset != self._ring.next:
            return False
        self._ring.settle(offset, offset + 1, DEFERRED)
        self.deferred_overlay.put(Deferred(offset, due_ns, 0))
        self._touch()
        return True

    # ---- delivery again

    def has_redelivery(self, now: Now) -> bool:
        return self.redelivery(now) is not None

    def redelivery(self, now: Now) -> Redelivery | None:
        """The next message to hand out that is not new to this channel; the same until its state changes."""
        self._see(now)
        if self.paused or len(self._flight.singles) >= self._limits.singles_max:
            return None
        waiting = self._waiting
        if waiting.delays:
            waiting.wake(now.mono)
        if waiting.count and (offset := waiting.first()) is not None:
            return self._redelivery_of(offset, waiting.attempts(offset), 0)
        if self._again and (before := self._handed_out_before()) is not None:
            return before
        return self._due(now)

    def _due(self, now: Now) -> Redelivery | None:
        ref = self.deferred_overlay.due(now.wall_ns, self._flight.singles)
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
        self._finish_deferred(offset)

    def _finish_deferred(self, offset: int) -> None:
        self.deferred_overlay.finish(offset)
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
        self.deferred_overlay.put(ref)
        self._touch()

    # ---- time, owners

    def expire(self, now: Now) -> list[tuple[int, int]]:
        """Take back what timed out: owner and how many. Also notices which delays are over."""
        self._see(now)
        back: list[tuple[int, int]] = []
        for owner, offsets, singles in self._flight.expire(now.mono):
            back.append((owner, self._came_back(offsets, singles, now)))
        self._waiting.wake(now.mono)
        self.deferred_overlay.gather(now.wall_ns)
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
        self._context.mono = now.mono
        self._wall_ahead_s = now.wall_ns / 1e9 - now.mono
        if self._blocked:
            self._spill(now)

    def next_deadline(self) -> float | None:
        """When to call `expire` next (monotonic seconds)."""
        deadline = self._flight.next_deadline()
        if self._waiting.delays:
            delay = self._waiting.next_deadline()
            if delay is not None and (deadline is None or delay < deadline):
                deadline = delay
        due_ns = self.deferred_overlay.next_due()
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
            self._context.urgent = True  # only a committed floor makes room

    def __repr__(self) -> str:
        return (
            f"Channel({self.name}: floor {self.floor}, next {self.next_read}, {self.in_flight} in flight, "
            f"{self._waiting.count} waiting, {len(self.deferred_overlay)} deferred)"
        )
