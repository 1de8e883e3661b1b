"""When a message that was requeued or timed out comes again, and where it waits until then.

The delay is what the client asks for, unless the channel's policy says otherwise (`cursor.policy`). A connection that
is lost at a message's first delivery makes no delay: a consumer that restarts would wait for what did not fail. Where
the message waits is one rule:

    it failed at delivery max_attempts           dies (`live.dead`)
    it is deferred already                       stays deferred, with a new due time
    it failed twice, and there is max_attempts   deferred, so that a crash does not begin its count anew
    no delay, delivered once                     memory (an integer)
    a delay above `short_delay_s`                deferred
    more than `waiting_max` remembered           deferred
    otherwise                                    memory

and, when the reader cannot go on because the window is full, what waits at the floor is deferred until there is room
(`spill`). Deferring costs an event in the log and survives a crash with due time and attempts; memory costs nothing and
a crash hands the message out again at once, with attempts begun again from one.
"""

from __future__ import annotations

from nsqha.clock import Now
from nsqha.cursor.deferred.dead import Reason
from nsqha.cursor.deferred.deferred_set import Deferred
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live.cursor import ChannelCursor
from nsqha.cursor.live.flight import Single
from nsqha.cursor.policy import DeathPolicy, RetryPolicy, draw
from nsqha.hot import DEFERRED, FINISHED, WAITING

ATTEMPTS_MAX = 65535  # what the message frame can say
_SPILL_AT_ONCE = 10_000


def stays_in_memory(*, delay_s: float, attempts: int, remembered: int, limits: ChannelLimits) -> bool:
    """Whether a message that is not deferred waits in memory."""
    if delay_s <= 0 and attempts == 1:
        return True
    return delay_s <= limits.short_delay_s and remembered < limits.waiting_max


def place_of(cursor: ChannelCursor) -> int:
    """Where the reader has to be for the turn of a message that comes back now."""
    return min(cursor.end, cursor.ring.next + cursor.context.limits.retry_after_max)


class Requeues:
    """Takes the messages of one channel that come again to where they wait."""

    __slots__ = ("_cursor", "blocked")

    def __init__(self, cursor: ChannelCursor) -> None:
        self.blocked = False  # the reader stands at the end of the window
        self._cursor = cursor

    @property
    def place(self) -> int:
        """Where the reader has to be for the turn of a message that comes back now."""
        return place_of(self._cursor)

    def place_reached(self, now: Now) -> bool:
        """Whether what waits in memory has its turn, although something unread can be handed out."""
        cursor = self._cursor
        group = cursor.waiting.group()
        return cursor.ring.next >= group.place or now.mono - group.since >= cursor.context.limits.retry_wait_s

    @property
    def policy(self) -> RetryPolicy | None:
        """What the channel's policy says of delays."""
        cursor = self._cursor
        return cursor.context.policies.retry(cursor.name)

    @property
    def one_by_one(self) -> bool:
        """Whether the policy has to be asked about each message that comes back after its first delivery."""
        death = self._cursor.dead.policy
        return self.policy is not None or (death is not None and death.max_attempts == 1)

    def add(self, offset: int, single: Single | None, delay_s: float, now: Now, reason: Reason) -> None:
        """The message, which was in flight until now, may be handed out again after the delay, or what the policy
        makes of it; or it dies of `reason`."""
        cursor = self._cursor
        waiting = cursor.waiting
        attempts = single.attempts if single is not None else 1
        policy, death = self.policy, cursor.dead.policy
        if policy is not None and not (reason is Reason.DISCONNECTED and attempts == 1):
            delay_s = policy.delay(delay_s, failures=attempts, draw=draw(cursor.uid, offset, attempts))
        limit = death.max_attempts if death is not None else None
        if death is not None and limit is not None and attempts >= limit:
            if not cursor.dead.full(death, cursor.deferred_overlay.dead):
                self._die(offset, attempts, reason, now, deferred=single is not None and single.deferred)
                return
            delay_s = max(delay_s, death.breaker_s)
        due_ns = now.wall_ns + round(delay_s * 1e9)
        if reason is Reason.REQUEUED and 0 < delay_s <= cursor.context.limits.short_delay_s:
            cursor.context.keep(offset)
        if single is not None and single.deferred:
            self.defer(Deferred(offset, due_ns, attempts))
        elif (limit is not None and attempts > 1) or not stays_in_memory(
            delay_s=delay_s, attempts=attempts, remembered=waiting.remembered, limits=cursor.context.limits
        ):
            # Deferred before settled: the order does not matter here, both leave in one event.
            self.defer(Deferred(offset, due_ns, attempts))
            cursor.ring.set(offset, DEFERRED)
        elif delay_s > 0:
            waiting.add_later(offset, attempts, now.mono + delay_s)
        else:
            waiting.add(offset, attempts, self.place, now.mono)

    def defer(self, ref: Deferred) -> None:
        """The message waits in the deferred set."""
        self._cursor.deferred_overlay.put(ref)
        self._cursor.mark_dirty()

    def _die(self, offset: int, attempts: int, reason: Reason, now: Now, *, deferred: bool) -> None:
        cursor = self._cursor
        letter = cursor.dead.letter(offset, attempts, reason, now.wall_ns)
        if letter is not None:
            self.defer(letter)
            if not deferred:
                cursor.ring.set(offset, DEFERRED)
        elif deferred:
            cursor.finish_deferred(offset)
        else:
            cursor.ring.set(offset, FINISHED)
        cursor.mark_dirty()

    def expire(self, offset: int, attempts: int, now: Now) -> None:
        """The message, whose turn it is, is older than the channel's policy allows: nobody gets it again."""
        cursor = self._cursor
        death = cursor.dead.policy
        if death is not None:
            self._die_of_age(offset, attempts, now, death)
            return
        if cursor.ring.get(offset) == WAITING:
            cursor.waiting.pop(offset)
            cursor.ring.set(offset, FINISHED)
        elif offset == cursor.ring.next and offset not in cursor.deferred_overlay:
            cursor.ring.settle(offset, offset + 1, FINISHED)  # handed out by the last leader, before a clean stop
            cursor.unread.look()
        else:
            cursor.finish_deferred(offset)
        cursor.passing.expired += 1
        cursor.mark_dirty()

    def _die_of_age(self, offset: int, attempts: int, now: Now, death: DeathPolicy) -> None:
        cursor = self._cursor
        full = cursor.dead.full(death, cursor.deferred_overlay.dead)
        deferred = False
        if cursor.ring.get(offset) == WAITING:
            cursor.waiting.pop(offset)
        elif offset == cursor.ring.next and offset not in cursor.deferred_overlay:
            cursor.ring.settle(offset, offset + 1, DEFERRED)  # handed out by the last leader, before a clean stop
            cursor.unread.look()
        else:
            deferred = True
        if not full:
            self._die(offset, attempts, Reason.EXPIRED, now, deferred=deferred)
            return
        self.defer(Deferred(offset, now.wall_ns + round(death.breaker_s * 1e9), attempts))
        if not deferred:
            cursor.ring.set(offset, DEFERRED)

    def spill(self, now: Now) -> None:
        """The window is full: defer what waits at the floor, until a quarter of the window is free.

        What is in flight at the floor is left alone: it is answered, or times out and waits.
        """
        cursor = self._cursor
        ring, context = cursor.ring, cursor.context
        for _ in range(_SPILL_AT_ONCE):
            offset = ring.low
            if ring.get(offset) != WAITING or ring.next - offset <= context.limits.window * 3 // 4:
                break
            attempts, due = cursor.waiting.give_up(offset)
            delay_s = max(due - now.mono, 0.0) if due is not None else 0.0
            self.defer(Deferred(offset, now.wall_ns + round(delay_s * 1e9), attempts))
            ring.set(offset, DEFERRED)
        self.blocked = ring.next >= cursor.unread.window_end()
        if cursor.is_dirty:
            context.urgent = True  # only a committed floor makes room
