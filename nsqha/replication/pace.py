"""How fast replicas that are far behind are filled, by who pulls and by who pushes: clients go first.

Nobody rests for a replica that messages may have to wait for, nor where the log grows more than half as fast as the
replica: it would never be near.
"""

from __future__ import annotations

BATCH_COST_MIN = 4 << 10  # bytes that a batch counts as at least: small ones cost more processor than disk
BURST_SECONDS = 1.0  # of a pace, that may be done at once


class SharedRate:
    """A rate that several jobs share: each says what it has done and gets the seconds to rest before it does more.

    Nothing is reserved, so a job that is given up owes nothing. A job that did nothing for a while may do as much as
    fits in `BURST_SECONDS` at once: short work is never slowed down."""

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
