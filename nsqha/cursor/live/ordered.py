"""A channel in strict order: a message is first delivered only after the FIN of the one before it is committed.

So at most one message of a partition is in flight, and the reader waits where an ordinary channel passes over: at a
deferred message, until that is due and finished. A crash can repeat the last message; it cannot hand out a later one
first. What no broker can prevent: a consumer that was frozen through its time-out wakes and goes on with a message that
another consumer has finished meanwhile (docs/guarantees.md).
"""

from __future__ import annotations

from nsqha.clock import Now
from nsqha.cursor.live.channel import Channel, Redelivery

JUST_DUE_SECONDS = 0.001  # more than the error of a wall clock in floating-point seconds


class OrderedChannel(Channel):
    """One message at a time, in the order of the log."""

    def next_run(self, end: int, count_max: int) -> tuple[int, int] | None:
        run = super().next_run(end, min(count_max, 1))
        if run is None or not self._all_committed():
            return None
        lowest = self.cursor.deferred_overlay.lowest_waiting()
        return run if lowest is None or lowest > run[0] else None

    def redelivery(self, now: Now) -> Redelivery | None:
        return super().redelivery(now) if self.in_flight == 0 else None

    def unread_ready(self) -> bool:
        """No: what failed goes first, whatever is unread."""
        return False

    def due(self, now: Now) -> Redelivery | None:
        """The lowest deferred message, once everything before it is finished and it is due."""
        cursor = self.cursor
        offset = cursor.deferred_overlay.lowest_waiting()
        if offset is None or cursor.floor != cursor.next_read or offset > cursor.unread.skip():
            return None
        ref = cursor.deferred_overlay.get(offset)
        if ref is None or ref.due_ns > now.wall_ns or not (ref.attempts or self._all_committed()):
            return None
        return Redelivery.after(ref.offset, ref.attempts, ref.position)

    def next_deadline(self) -> float | None:
        """As of any channel; and when the lowest deferred message is due, although others are due already and wait
        behind it. Once that is over, a commit or a consumer is what it waits for."""
        deadline, overlay = super().next_deadline(), self.cursor.deferred_overlay
        offset = overlay.lowest_waiting()
        ref = None if offset is None else overlay.get(offset)
        if ref is None:
            return deadline
        due = ref.due_ns / 1e9 - self._wall_ahead_s
        if due < self._context.mono - JUST_DUE_SECONDS:
            return deadline
        return due if deadline is None else min(due, deadline)

    def _all_committed(self) -> bool:
        cursor = self.cursor
        if self.in_flight or cursor.floor != cursor.next_read or cursor.deferred_overlay.uncommitted:
            return False
        return self.ephemeral or cursor.floor == self.committed.floor
