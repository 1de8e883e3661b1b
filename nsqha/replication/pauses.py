"""Whether this process stood still for so long that others lead what it led, and has not heard of it yet.

    fit --no tick for PAUSED_SECONDS--> stood still --HEARING_TICKS more ticks, or HELD_TICKS late ones--> fit

A process that was stopped, or whose host slept, goes on where it stood: what timed out meanwhile is overdue at once,
while the news of its successor lie unread in its sockets. So for two ticks it hands out nothing: in these its loop has
read what came. A tick that is overdue says by itself that the process stood, before any timer has run. One whose ticks
are late again and again is slow and does not stand: it must not hold back for ever, so it goes on for SLOW_SECONDS.
Who is not ticked is alone, and replaced by nobody.

A leader that is cut off does not stand still; what it may do is said by its followers (`silence`, `isr`).
"""

from __future__ import annotations

import math

PAUSED_SECONDS = 0.8  # others replace a leader that they do not hear for a second
HEARING_TICKS = 2
HELD_TICKS = 4  # at most, in a row
SLOW_SECONDS = 5.0


class ProcessPause:
    """The pauses of one process."""

    __slots__ = ("_held", "_left", "_slow_until", "_ticked", "fit_until")

    def __init__(self) -> None:
        self.fit_until = math.inf  # by the monotonic clock: later than this, it stood still
        self._ticked = math.inf
        self._left = 0
        self._held = 0  # ticks since it last was fit
        self._slow_until = -math.inf  # it is slow: late ticks say nothing

    def tick(self, now: float) -> bool:
        """Note that the process runs, every 100 ms. True: from now on it may hand out again what it held back."""
        paused = now > max(self._ticked + PAUSED_SECONDS, self._slow_until)
        self._ticked, before = now, self._left
        self._left = HEARING_TICKS if paused else max(before - 1, 0)
        self._held = self._held + 1 if self._left else 0
        if self._held > HELD_TICKS:
            self._left = self._held = 0
            self._slow_until = now + SLOW_SECONDS
        self.fit_until = -math.inf if self._left else max(now + PAUSED_SECONDS, self._slow_until)
        return bool(before) and not self._left
