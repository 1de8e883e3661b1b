"""Group commit of one partition: what goes into the next batch, when it is written, and who waits for its commit.

    publishes, channel events -> [Gathering: now, or in a later turn?] -> a batch -> Outstanding -> committed -> answers

PendingEvents holds the channel events on their way into the log, and the callers that wait until they are committed
and applied:

    take -> Events -> written | not_written (the disk refused) | wait_on (outcome unknown: only the waiters are kept)

What a disk refuses is kept and goes first, without any other: what it says has been counted as said, nobody sends it
again, and with what becomes due meanwhile it would grow for as long as the disk is full.

Gathering decides whether a flush waits for the publishers that were answered just now. Publishers that wait for their
OKs fall into two groups: one waits for the batch under way, the other for that one's end, so each batch has half of
what it could; and where a commit takes no time, those who were answered first are back while the others are still
being answered. Who was answered usually publishes again at once; the next batch is therefore given a few turns of the
loop until as much waits as was answered or waiting at the commit: about as many bytes or, where bodies differ, as many
runs and most of the bytes.

Publishers that do not come back cost that once: each time most was not there in the end, twice as many commits pass
before it is tried again. So it is with the last ones: each time only they were missing, twice as many commits go with
most. All this is counted in turns, not in time: a turn looks at every socket once and takes some microseconds.

A publisher that can not be answered keeps no other one from its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nsqha import hot
from nsqha.clock import Now
from nsqha.commitlog.entry import Entry
from nsqha.cursor.partition import PartitionCursors
from nsqha.errors import Unavailable
from nsqha.hot import Waiter
from nsqha.nsqlog import Logger

TURNS = 32
SKIPPED_MAX = 64
ALL_BYTES = 31 / 32  # of what is expected: bodies differ
MOST_BYTES = 3 / 4

logger = Logger("partition")

Future = asyncio.Future[None]


class Outstanding:
    """A written batch that is not committed yet, and who waits for it."""

    __slots__ = ("data", "done", "entry", "size", "waiters", "written_at")

    def __init__(
        self,
        entry: Entry,
        data: bytearray,
        waiters: list[Waiter],
        done: list[Future],
        written_at: float,
        size: int,
    ) -> None:
        self.entry = entry
        self.data = data
        self.waiters = waiters
        self.done = done  # end when its events are applied
        self.written_at = written_at
        self.size = size  # what it has of the budget

    def committed(self) -> None:
        """Tell everybody."""
        hot.tell_stored(self.waiters, _not_told)
        if self.done:
            settle(self.done)


def refuse(waiters: Iterable[Waiter], why: str) -> None:
    """Tell publishers that nothing was stored, or that nobody knows; `why` says which."""
    for reply, _ in waiters:
        try:
            reply.failed(why)
        except Exception as error:
            _not_told(error)


def settle(futures: Iterable[Future], why: str | None = None) -> None:
    """End those that have not been given up. `why`: what they wait for will not come."""
    for future in futures:
        if future.done():
            continue
        if why is None:
            future.set_result(None)
        else:
            future.set_exception(Unavailable(why))


def settle_behind(batches: Sequence[Outstanding], futures: list[Future]) -> None:
    """There is nothing more to write for these: they end with what is written, the last batch included."""
    if batches:
        batches[-1].done += futures
    else:
        settle(futures)


def _not_told(error: Exception) -> None:
    logger.error("reply_failed", "a publisher could not be answered", error=error)


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


class _Patience:
    """Each failure in a row doubles how many commits pass before the next try."""

    __slots__ = ("_skip", "_skipped")

    def __init__(self) -> None:
        self._skip = 0  # commits that pass before the next try
        self._skipped = 0  # how many passed the last time

    def tries(self) -> bool:
        if self._skip:
            self._skip -= 1
            return False
        return True

    def succeeded(self) -> None:
        self._skipped = 0

    def failed(self) -> None:
        self._skipped = self._skip = min(2 * self._skipped or 1, SKIPPED_MAX)


class Linger:
    """Decides whether flushes of one partition wait.

    `committed` is called at each commit that leaves nothing outstanding, `waits` at each flush after it.
    """

    __slots__ = ("_bytes", "_first", "_for_last", "_last", "_runs", "_turns")

    def __init__(self) -> None:
        self._bytes = 0  # expected
        self._runs = 0
        self._turns = 0  # left
        self._first = _Patience()
        self._last = _Patience()
        self._for_last = False  # waits for the last ones too

    def committed(self, runs: int, size: int, bytes_max: int) -> None:
        """So many runs, of `size` bytes in all, were answered just now or wait; no more than `bytes_max` ever will."""
        if self._first.tries():
            self._runs = runs
            self._bytes = min(size, bytes_max)
            self._turns = TURNS
            self._for_last = self._last.tries()

    def stop(self) -> None:
        """The next flush waits for nobody."""
        self._turns = 0

    def waits(self, runs: int, size: int) -> bool:
        """Whether to look again in the next turn, with so much waiting now."""
        if not self._turns:
            return False
        most = size >= MOST_BYTES * self._bytes
        everybody = size >= ALL_BYTES * self._bytes or (most and runs >= self._runs)
        if not everybody and (self._for_last or not most):
            self._turns -= 1
            if self._turns:
                return True
        self._turns = 0
        if not most:
            self._first.failed()
            return False
        self._first.succeeded()
        if self._for_last:
            if everybody:
                self._last.succeeded()
            else:
                self._last.failed()
        return False
