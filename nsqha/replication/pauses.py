"""Whether this process stood still for so long that others lead what it led, and has not heard of it yet.

    fit --no tick for PAUSED_SECONDS--> stood still --HEARING_TICKS more ticks--> fit

A process that was stopped, or whose host slept, goes on where it stood: what timed out meanwhile is overdue at once,
while the news of its successor lie unread in its sockets. So for two ticks it hands out nothing: in these its loop has
read what came. A tick that is overdue says by itself that the process stood, before any timer has run. Who is not
ticked is alone, and replaced by nobody.

A leader that is cut off does not stand still; what it may do is said by its followers (`silence`, `isr`).
"""

from __future__ import annotations

import math

PAUSED_SECONDS = 0.8  # others replace a leader that they do not hear for a second
HEARING_TICKS = 2


class ProcessPause:
    """The pauses of one process."""

    __slots__ = ("_left", "_ticked", "fit_until")

    def __init__(self) -> None:
        self.fit_until = math.inf  # by the monotonic clock: later than this, it stood still
        self._ticked = math.inf
        self._left = 0

    def tick(self, now: float) -> bool:
        """Note that the process runs, every 100 ms. True: from now on it may hand out again what it held back."""
        paused, self._ticked = now - self._ticked > PAUSED_SECONDS, now
        over = not paused and self._left == 1
        self._left = HEARING_TICKS if paused else max(self._left - 1, 0)
        self.fit_until = -math.inf if self._left else now + PAUSED_SECONDS
        return over
