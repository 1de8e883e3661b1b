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

Whose turn it is: what waits in memory goes when the reader is at its place, when it has waited for long, or when
nothing unread can be handed out; what is deferred goes when it is due. `redelivery` says so, and notes in `turn_at`
where the reader makes way again; `next_run` ends there. `unread_share` keeps that what is unread goes on.

What may be delivered twice, and why: after a crash or a change of leader everything finished since the last committed
progress; after a time-out or a lost connection what its consumer finished and this node did not hear of. What is never
lost: a message leaves only by FIN, or by an event that was requested (seek, empty, topic empty, an abandoning policy).

Calls per delivery and FIN take runs and cost a few microseconds however long the run is.
"""

from __future__ import annotations

from typing import NamedTuple

from nsqha.clock import Now
from nsqha.cursor.committed.state import ChannelState
from nsqha.cursor.deferred.dead import Reason
from nsqha.cursor.deferred.deferred_set import Deferred
from nsqha.cursor.live.cursor import ChannelContext, ChannelCursor
from nsqha.cursor.live.flight import NOT_IN_FLIGHT, Single
from nsqha.cursor.live.followed import Answers
from nsqha.cursor.live.requeue import ATTEMPTS_MAX, Requeues
from nsqha.cursor.live.unread_share import UnreadShare
from nsqha.hot import DEFERRED, FINISHED, WAITING
from nsqha.ids import parse_message_id

NOTHING_WAITS = 1 << 63  # as `turn_at`
_NO_LIMIT = 1 << 63
_EXPIRED_AT_ONCE = 5_000  # what is left waits for the next look

FIN_LINE = 21  # b"FIN " + 16 hex digits + newline


class Redelivery(NamedTuple):
    """A message to hand out again: with how many attempts, and where its frame is (0: at its own offset)."""

    offset: int
    attempts: int
    position: int = 0

    @classmethod
    def after(cls, offset: int, attempts: int, position: int = 0) -> Redelivery:
        """The delivery that follows this many attempts."""
        return cls(offset, min(attempts + 1, ATTEMPTS_MAX), position)


class Channel:
    """A channel's cursor, and what happens to the messages that are handed out from it."""

    def __init__(self, committed: ChannelState, context: ChannelContext) -> None:
        self.name = committed.name
        self.uid = committed.uid
        self.ephemeral = committed.ephemeral
        self.committed = committed
        self.cursor = ChannelCursor(committed, context)
        self.paused = committed.silent  # for good, if it is a reader's
        self.answers = Answers()
        self.turn_at = NOTHING_WAITS  # where the reader makes way for something else
        self._share = UnreadShare(context.limits)
        self._due_first = False  # the last of these waited in memory
        self._requeues = Requeues(self.cursor)
        self._context = context
        self._wall_ahead_s = 0.0  # wall clock minus monotonic clock, when they were last seen

    @property
    def in_flight(self) -> int:
        return self.cursor.flight.count

    @property
    def finished_count(self) -> int:
        """Messages that consumers or an operator finished under this leader."""
        return self.answers.finished + self.cursor.passing.finished_by_operator

    # ---- first delivery

    def next_run(self, end: int, count_max: int) -> tuple[int, int] | None:
        """The next offsets [first, stop) below `end` to hand out for the first time, at most `count_max` of them.

        It may pass over what is settled already; handing out is `delivered` or `drop`.
        """
        unread = self.cursor.unread
        first = self.cursor.ring.next
        if first >= unread.stop:
            before, first = first, unread.skip()
            if before < self.turn_at <= first:
                return None  # a place was passed over
        if first >= end:
            return None
        stop = min(first + count_max, end, unread.stop)
        if first < self.turn_at < stop:
            stop = self.turn_at
        if stop > (limit := unread.window_end()):
            stop = limit
            self._requeues.blocked = stop <= first < end
        return (first, stop) if first < stop and not self.paused else None

    def delivered(self, first: int, end: int, owner: int, deadline: float) -> None:
        """The run [first, end), or a beginning of it, is in flight to `owner` until `deadline`."""
        flight = self.cursor.flight
        assert first == flight.ring.next, f"delivered {first} when the reader is at {flight.ring.next}"
        flight.deliver(first, end, owner, deadline)
        if self._share.others:
            self._share.note(end - first, other=False)

    def drop(self, first: int, end: int) -> None:
        """No consumer gets [first, end), which is next (a sample left it out)."""
        ring = self.cursor.ring
        assert first == ring.next, f"dropped {first} when the reader is at {ring.next}"
        ring.settle(first, end, FINISHED)
        self.cursor.mark_dirty()

    def meet(self, offset: int, due_ns: int, now: Now) -> bool:
        """The reader met a message with a deliver-at time; it is deferred if that is not over. True if so.

        Deferring when the pump passes is the rule (`committed.state`); this is for a message read again after a seek.
        """
        ring = self.cursor.ring
        if due_ns <= now.wall_ns or offset != ring.next:
            return False
        ring.settle(offset, offset + 1, DEFERRED)
        self._requeues.defer(Deferred(offset, due_ns, 0))
        return True

    # ---- delivery again

    def redelivery(self, now: Now) -> Redelivery | None:
        """The message that is not new to this channel and whose turn it is; the same until its state changes."""
        for _ in range(_EXPIRED_AT_ONCE):
            found = self._next_redelivery(now)
            if found is None or found.attempts < 2:
                return found
            if found.offset >= self.cursor.passing.expires_below:
                death = self.cursor.dead.policy
                if death is None or death.max_attempts is None or found.attempts <= death.max_attempts:
                    return found
                return found._replace(attempts=death.max_attempts)  # nobody was allowed to die, or more were
            self._requeues.expire(found.offset, found.attempts - 1, now)
        return None

    def _next_redelivery(self, now: Now) -> Redelivery | None:
        self._see(now)
        self.turn_at = NOTHING_WAITS
        cursor = self.cursor
        if self.paused or len(cursor.flight.singles) >= self._context.limits.singles_max:
            return None
        waiting = cursor.waiting
        if waiting.delays:
            waiting.wake(now.mono, self._requeues.place)
        offset = waiting.first() if waiting.count else None
        due = self.due(now) if offset is None or self._due_first else None
        if (offset is not None or due is not None) and self.unread_ready():
            if (unread_first := self._share.unread_first()) > 0:
                self.turn_at = cursor.ring.next + unread_first
                offset = due = None
            elif offset is not None and not self._requeues.place_reached(now):
                due = due or self.due(now)
                if due is None:
                    self.turn_at = waiting.group().place
                offset = None
        if due is not None:
            return due
        if offset is not None:
            return Redelivery.after(offset, waiting.attempts(offset))
        before = cursor.unread.handed_out_before() if cursor.unread.again else None
        return Redelivery.after(*before) if before is not None else None

    def unread_ready(self) -> bool:
        """Whether something can be handed out in the order of the log."""
        unread = self.cursor.unread
        if unread.again and unread.handed_out_before() is not None:
            return True
        return self.next_run(self.cursor.end, 1) is not None

    def due(self, now: Now) -> Redelivery | None:
        """The deferred message to hand out, if nothing comes before that."""
        cursor = self.cursor
        ref = cursor.deferred_overlay.due(now.wall_ns, cursor.flight.singles)
        return Redelivery.after(ref.offset, ref.attempts, ref.position) if ref is not None else None

    def redelivered(self, redelivery: Redelivery, owner: int, deadline: float) -> None:
        """The message is in flight to `owner` until `deadline`."""
        offset = redelivery.offset
        deferred = False
        cursor = self.cursor
        ring, unread = cursor.ring, cursor.unread
        if ring.get(offset) == WAITING:
            cursor.waiting.pop(offset)
            other = self._due_first = True
        elif offset == ring.next and unread.again and unread.again[0][0] <= offset:
            ring.deliver(offset, offset + 1, owner)
            unread.look()
            other = False  # it goes in the order of the log
        else:
            deferred = other = True
            self._due_first = False
        self._share.note(1, other=other)
        cursor.flight.deliver_single(offset, Single(owner, redelivery.attempts, deadline, deferred=deferred))

    # ---- answers

    def fin_run(self, data: bytes, pos: int, end: int, owner: int) -> tuple[int, int]:
        """Finish the messages of the complete FIN lines data[pos:end]: where it stopped, and how many it finished.

        It stops before the first line that cannot be finished; `fin` says why.
        """
        flight, id_base = self.cursor.flight, self._context.id_base
        total = 0
        while True:
            pos, finished = flight.fin_run(data, pos, end, id_base, owner)
            total += finished
            # What stopped it may be a message that is in flight singly.
            if pos >= end or not self._fin_line(data, pos, owner):
                break
            pos += FIN_LINE
            total += 1
        if total:
            self.answers.finished += total
            self.cursor.mark_dirty()
        return pos, total

    def _fin_line(self, data: bytes, pos: int, owner: int) -> bool:
        number = parse_message_id(data[pos + 4 : pos + 20])
        if number is None:
            return False
        flight, offset = self.cursor.flight, number - self._context.id_base
        if flight.forgotten(offset, owner, answered=False) or flight.refuse(offset, owner) is not None:
            return False
        self._finish(offset)
        return True

    def fin(self, offset: int, owner: int) -> str | None:
        """Finish one message; why not, if it cannot."""
        why = self._refuse(offset, owner, answered=True)
        if why is None:
            self._finish(offset)
            self.answers.finished += 1
            self.cursor.mark_dirty()
        return why

    def _finish(self, offset: int) -> None:
        single = self.cursor.flight.take_back(offset)
        if single is not None and single.attempts > 1:
            self.answers.finished_later.observe(single.attempts)
        if single is None or not single.deferred:
            self.cursor.ring.set(offset, FINISHED)
            return
        self.cursor.finish_deferred(offset)

    def req(self, offset: int, owner: int, delay_ms: int, now: Now) -> str | None:
        """Hand it out again after a delay; why not, if it cannot."""
        why = self._refuse(offset, owner, answered=True)
        if why is None:
            single = self.cursor.flight.take_back(offset)
            self.answers.requeued += 1
            self._requeues.add(offset, single, delay_ms / 1000, now, Reason.REQUEUED)
        return why

    def touch(self, offset: int, owner: int, now: Now, timeout_s: float) -> str | None:
        """More time for one message; why not, if it cannot."""
        why = self._refuse(offset, owner, answered=False)
        if why is None:
            self.cursor.flight.touch(offset, owner, now.mono, timeout_s, self._context.limits.max_msg_timeout_s)
        return why

    def _refuse(self, offset: int, owner: int, *, answered: bool) -> str | None:
        flight = self.cursor.flight
        if flight.forgotten(offset, owner, answered=answered):
            return NOT_IN_FLIGHT
        return flight.refuse(offset, owner)

    # ---- time, owners

    def expire(self, now: Now) -> list[tuple[int, int]]:
        """Take back what timed out: owner and how many. Also notices which delays are over."""
        self._see(now)
        cursor = self.cursor
        back: list[tuple[int, int]] = []
        most = self._context.limits.retries_at_once if self._requeues.one_by_one else _NO_LIMIT
        for owner, offsets, singles in cursor.flight.expire(now.mono, most):
            back.append((owner, self._came_back(offsets, singles, now, Reason.TIMED_OUT)))
            most -= back[-1][1]
            if most <= 0:
                break  # `next_deadline` is still in the past
        cursor.waiting.wake(now.mono, self._requeues.place)
        cursor.deferred_overlay.gather(now.wall_ns)
        if self._requeues.blocked:
            self._requeues.spill(now)  # what was at the floor may have timed out just now
        return back

    def detach(self, owner: int, now: Now) -> int:
        """The owner is gone; what it had in flight waits again at once. How many those were.

        They count as time-outs, which is what they become in nsqd, only later.
        """
        return self._came_back(*self.cursor.flight.detach(owner), now, Reason.DISCONNECTED)

    def _came_back(self, offsets: list[int], singles: list[tuple[int, Single]], now: Now, reason: Reason) -> int:
        if self._requeues.one_by_one:
            for offset in offsets:
                self._requeues.add(offset, None, 0.0, now, reason)
        else:
            self.cursor.waiting.add_expired(offsets, self._requeues.place, now.mono)
        for offset, single in singles:
            self._requeues.add(offset, single, 0.0, now, reason)
        count = len(offsets) + len(singles)
        self.answers.timed_out += count
        return count

    def _see(self, now: Now) -> None:
        self._context.mono = now.mono
        self._wall_ahead_s = now.wall_ns / 1e9 - now.mono
        if self._requeues.blocked:
            self._requeues.spill(now)

    def next_deadline(self) -> float | None:
        """When to call `expire` next (monotonic seconds)."""
        cursor = self.cursor
        deadline = cursor.flight.next_deadline()
        if cursor.waiting.delays:
            delay = cursor.waiting.next_deadline()
            if delay is not None and (deadline is None or delay < deadline):
                deadline = delay
        due_ns = cursor.deferred_overlay.next_due()
        if due_ns is not None:
            due = due_ns / 1e9 - self._wall_ahead_s
            if deadline is None or due < deadline:
                deadline = due
        return deadline

    def __repr__(self) -> str:
        cursor = self.cursor
        return (
            f"Channel({self.name}: floor {cursor.floor}, next {cursor.next_read}, {self.in_flight} in flight, "
            f"{cursor.waiting.count} waiting, {len(cursor.deferred_overlay)} deferred)"
        )
