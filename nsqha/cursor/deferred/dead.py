"""Dead letters: messages of a channel that nobody gets any more, until an operator says otherwise.

A dead letter is a deferred message that is never due, so everything that holds for deferred messages holds for it: it
is in the log, in checkpoints and on every replica, it does not hold the floor, and its body outlives retention. Its due
time says when it died, and why:

    due_ns = 2^62 + time of death, of which the low three bits are the reason

Delays end below 2^62 ns (the year 2116). The dead of a channel are the tail of its order by due time.
"""

from __future__ import annotations

from enum import IntEnum

from nsqha.cursor.deferred.deferred_set import BEFORE_ALL, Deferred, DeferredSet, DueKey

DEAD_FROM = 1 << 62
_REASON = 7


class Reason(IntEnum):
    """What a message died of."""

    REQUEUED = 1
    TIMED_OUT = 2
    DISCONNECTED = 3  # its consumer's connection was lost
    EXPIRED = 4  # older than the policy allows when it should have been delivered again
    OPERATOR = 5

    @property
    def label(self) -> str:
        """As metrics and the command line have it."""
        return self.name.lower()


def dead_due_ns(now_ns: int, reason: Reason) -> int:
    """The due time of a message that dies now (nanoseconds since 1970)."""
    return DEAD_FROM + (min(max(now_ns, 0), DEAD_FROM - 8) & ~_REASON | reason)


def is_dead(ref: Deferred | None) -> bool:
    """Whether this is a dead letter."""
    return ref is not None and ref.due_ns >= DEAD_FROM


def death_of(due_ns: int) -> tuple[int, Reason]:
    """When the dead letter with this due time died, to eight nanoseconds, and why."""
    reason = due_ns & _REASON
    known = Reason(reason) if reason in Reason._value2member_map_ else Reason.OPERATOR
    return due_ns - DEAD_FROM & ~_REASON, known


_BEFORE: DueKey = (DEAD_FROM, -1)
_LAST = (1 << 63) - 1
_PAGE = 1000


def dead_in(held: DeferredSet, after: DueKey = _BEFORE, limit: int = _LAST) -> list[Deferred]:
    """Up to `limit` dead letters in order of death, those behind `after`."""
    return held.due(max(after, _BEFORE), _LAST, limit)


def clear_alive(held: DeferredSet) -> None:
    """Take out everything but the dead letters."""
    dead = dead_in(held)
    if len(held) <= 2 * len(dead):
        while alive := held.due(BEFORE_ALL, DEAD_FROM - 1, _PAGE):
            for ref in alive:
                held.remove(ref.offset)
        return
    held.clear()
    for ref in dead:
        held.put(ref)
