"""Silence on a connection: a ping after KEEPALIVE_SECONDS, and the end when nothing answers it.

Answers are the loop's work too: the other side ends the streams of a loop that stands for longer than both times. Who
waits for something on a stream knows of a silence earlier (`SilenceWatch`), and ends nothing for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nsqha.replication.silence import LOOK_SECONDS, LookTimes, SilenceDetector
from nsqha.server.peers.api import KEEPALIVE_SECONDS, PING_TIMEOUT_SECONDS, PeerStream

READING_SECONDS = 0.01  # for bytes that came while the loop stood, before they are missed


def _nobody(*_: str) -> None:
    """Whom a watch that was stopped calls."""


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
        """Watch no more, and know nobody any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._ping = self._missed = _nobody


class SilenceWatch:
    """Looks whether the other side of a stream is heard, while its owner waits for it."""

    def __init__(self, stream: PeerStream, waits: Callable[[], bool], on_silence: Callable[[], None]) -> None:
        """`waits`: whether something has to come; else the looks end. `on_silence`: called at each look that finds it
        silent."""
        self._stream = stream
        self._waits = waits
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._detector = SilenceDetector()
        self._look_times = LookTimes()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def silent(self) -> bool:
        """Whether the last looks heard nothing, and no answer to a ping."""
        return self._detector.silent

    def begin(self) -> None:
        """Something has to come from now on."""
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def stop(self) -> None:
        """The stream has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._detector.reset()

    def _look(self) -> None:
        self._timer = None
        late = self._look_times.late(self._loop.time())
        if not self._waits():
            self._detector.reset()
            return
        self.begin()
        if self._detector.look(self._stream.heard, late=late):
            self._stream.ping()
        elif self._detector.silent:
            self._on_silence()
