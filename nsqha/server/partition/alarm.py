"""One timer of the loop for the earliest of many deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SLACK_SECONDS = 0.01  # deadlines closer than this share one timer


class Alarm:
    """Calls back at the earliest deadline that was set since it last did."""

    __slots__ = ("_at", "_call", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call = call
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0

    def set(self, deadline: float, now: float) -> None:
        """Call at `deadline`, in seconds of the same clock as `now`; never at once, and perhaps a slack late."""
        if self._timer is not None:
            if self._at <= deadline + SLACK_SECONDS:
                return
            self._timer.cancel()
        self._at = max(deadline, now + SLACK_SECONDS)
        self._timer = self._loop.call_later(self._at - now, self._ring)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._call()
