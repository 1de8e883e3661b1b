"""A rate that several jobs share: each says what it has done and is told how long to rest before it does more.

Nothing is reserved, so a job that is given up owes nothing. Who did nothing for a while may do as much as fits in
`BURST_SECONDS` at once: short work is never slowed down.
"""

from __future__ import annotations

BURST_SECONDS = 1.0


class Pace:
    """At most so much per second, all jobs together."""

    def __init__(self, per_second: int) -> None:
        """0: as much as they like."""
        self.per_second = per_second
        self._paid_until = float("-inf")  # by this time everything that was done is in order

    def done(self, cost: int, now: float) -> float:
        """Something of this cost was done; seconds to rest. Time is monotonic, in seconds."""
        if not self.per_second:
            return 0.0
        self._paid_until = max(self._paid_until, now - BURST_SECONDS) + cost / self.per_second
        return max(self._paid_until - now, 0.0)
