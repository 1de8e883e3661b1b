"""Channel events of one partition on their way into the log, and the callers that wait until they are applied.

    take -> Events -> written | not_written (the disk refused) | wait_on (outcome unknown: only the waiters are kept)

What a disk refuses is kept and goes first, without any other: what it says has been counted as said, nobody sends it
again, and with what becomes due meanwhile it would grow for as long as the disk is full.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from nsqha.clock import Now
from nsqha.cursor.partition import PartitionCursors

Future = asyncio.Future[None]


class Events(NamedTuple):
    """What goes in front of a batch, and who waits for it."""

    frames: bytes
    flags: int
    done: list[Future]


class PendingEvents:
    """The channel events of one partition that are not in its log yet."""

    __slots__ = ("_flags", "_refused", "_waiters", "_wanted")

    def __init__(self) -> None:
        self._refused = b""
        self._flags = 0
        self._waiters: list[Future] = []
        self._wanted = False

    @property
    def refused(self) -> bool:
        """Whether there are some that a disk refused, or that were put first."""
        return bool(self._refused)

    @property
    def urgent(self) -> bool:
        """Whether they are not to wait for publishes."""
        return bool(self._waiters or self._wanted or self._refused)

    def wait(self, future: Future) -> None:
        """It ends when what is due now is committed and applied."""
        self._waiters.append(future)

    def want(self) -> None:
        """All that are due are to be written soon; nobody waits."""
        self._wanted = True

    def forced(self) -> bool:
        """Whether all that are due go with the next batch, asked once for it."""
        wanted, self._wanted = self._wanted, False
        return wanted or bool(self._waiters)

    def first(self, frames: bytes, flags: int) -> None:
        """These go before all others."""
        self._refused, self._flags = frames, flags

    def take(self, cursors: PartitionCursors | None, now: Now, force: bool) -> Events:
        """Those of the next batch: refused ones, or what is due at `cursors`; None: they may say nothing yet."""
        if self._refused:
            return Events(self._refused, self._flags, [])
        frames, flags = cursors.take_events(now, force) if cursors is not None else (b"", 0)
        done, self._waiters = self._waiters, []
        return Events(frames, flags, done)

    def written(self) -> None:
        """They are in the log: nothing is kept any more."""
        self._refused, self._flags = b"", 0

    def not_written(self, events: Events) -> None:
        """The disk refused: they are tried again."""
        self._refused, self._flags = events.frames, events.flags
        self.wait_on(events.done)

    def wait_on(self, done: list[Future]) -> None:
        """These still wait, and first."""
        self._waiters = done + self._waiters

    def give_up(self) -> list[Future]:
        """Nothing is written any more; who waits."""
        waiters, self._waiters = self._waiters, []
        return waiters
