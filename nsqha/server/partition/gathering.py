"""Whether a flush waits for the publishers that were answered just now.

Publishers that wait for their OKs fall into two groups: one waits for the batch under way, the other for that one's
end, so each batch has half of what it could; and where a commit takes no time, those who were answered first are back
while the others are still being answered. Who was answered usually publishes again at once; the next batch is
therefore given a few turns of the loop until as much waits as was answered or waiting at the commit: about as many
bytes or, where bodies differ, as many runs and most of the bytes.

Publishers that do not come back cost that once: each time most was not there in the end, twice as many commits pass
before it is tried again. So it is with the last ones: each time only they were missing, twice as many commits go with
most.

Counted in turns, not in time: a turn looks at every socket once and takes some microseconds.
"""

from __future__ import annotations

TURNS = 32
SKIPPED_MAX = 64
ALL_BYTES = 31 / 32  # of what is expected: bodies differ
MOST_BYTES = 3 / 4


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


class Gathering:
    """Of one partition. `committed` at each commit that leaves nothing outstanding, `waits` at each flush after it."""

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
