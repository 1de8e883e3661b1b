"""Silence on a connection: a ping after KEEPALIVE_SECONDS, and the end when nothing answers it.

Answers are the loop's work too: the other side ends the streams of a loop that stands for longer than both times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nsqha.server.peers.api import KEEPALIVE_SECONDS, PING_TIMEOUT_SECONDS

READING_SECONDS = 0.01  # for bytes that came while the loop stood, before they are missed


class Keepalive:
    """The watch over one connection."""

    def __init__(self, ping: Callable[[], None], missed: Callable[[str], None]) -> None:
        """`ping` sends one; `missed(why)` is called when nothing came in time."""
        self.heard = 0.0  # when bytes came last; 0: none yet. Set by the owner
        self._loop = asyncio.get_running_loop()
        self._ping = ping
        self._missed = missed
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        quiet = self._loop.time() - self.heard
        if quiet < KEEPALIVE_SECONDS:
            self._timer = self._loop.call_later(KEEPALIVE_SECONDS - quiet + 0.001, self.start)
            return
        self._ping()
        self.expect(PING_TIMEOUT_SECONDS, self._loop.time(), "it does not answer a ping")

    def expect(self, seconds: float, since: float, why: str) -> None:
        """Something has to come within `seconds` that is newer than `since`; then go on watching."""

        def look() -> None:
            if self.heard and self.heard >= since:
                self.start()
            else:
                self._missed(why)

        def read_first() -> None:
            self._timer = self._loop.call_later(READING_SECONDS, look)

        self._timer = self._loop.call_later(seconds, read_first)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
