"""Warnings that others may cause as often as they like: one line in a while, which says how many there were."""

from __future__ import annotations

import time
from collections.abc import Callable

from nsqha.nsqlog import Logger

PAUSE_SECONDS = 10.0  # between two lines of the same kind


class RareWarnings:
    """The warnings of one kind of one owner."""

    def __init__(self, logger: Logger, event: str, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._logger = logger
        self._event = event
        self._silent_until = float("-inf")
        self._unlogged = 0  # since the last line

    def warning(self, text: str, *args: object) -> None:
        """Log this one, or only count it."""
        now = self._now()
        if now < self._silent_until:
            self._unlogged += 1
            return
        self._silent_until = now + PAUSE_SECONDS
        more = f"; {self._unlogged} more since the last of these lines" if self._unlogged else ""
        self._unlogged = 0
        self._logger.warning(self._event, text + "%s", *args, more)
