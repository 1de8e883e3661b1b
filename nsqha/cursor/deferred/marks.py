"""What was found out about a deferred set, kept up to date from then on: how many rows lie at or above a place, counted
some rows at a time, and where it has none.

A set of ten million rows takes seconds to count, and nobody may stop the loop for so long. So a count is a walk from a
place that is known to the one that was asked for, upwards by offset, and others have their turn between its steps:

    start = known             at                 end = asked for           or the other way round, whichever is near
      |==== rows found ========|---- to be counted --->|

What is put or taken out behind `at` meanwhile changes what was found, so the set may change as it likes between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nsqha.cursor.deferred.deferred_set import BEFORE_ALL, Deferred, DueKey
from nsqha.cursor.deferred.gaps import Gaps

_MARKS = 3

CountOn = Callable[[int, int, int], tuple[int, int]]
"""(first, end, most) -> how many rows lie in [first, stop), and stop: `end`, or before it if `most` rows were read."""

Keys = Callable[[DueKey, int], list[DueKey]]
"""(after, limit) -> up to `limit` of the keys behind `after`, in order of due time."""


class Mark:
    """How many rows lie at or above an offset."""

    __slots__ = ("count", "offset")

    def __init__(self, offset: int, count: int) -> None:
        self.offset = offset
        self.count = count

    def change(self, offset: int, by: int) -> None:
        if offset >= self.offset:
            self.count += by


class _Walk:
    """Rows that were counted from `start` to `at`, on the way to `end`."""

    __slots__ = ("at", "end", "found", "known", "start")

    def __init__(self, known: Mark, offset: int) -> None:
        self.start = self.at = min(known.offset, offset)
        self.end = max(known.offset, offset)
        self.found = 0
        self.known = Mark(known.offset, known.count)  # its own: the other may be forgotten meanwhile

    def change(self, offset: int, by: int) -> None:
        self.known.change(offset, by)
        if self.start <= offset < self.at:
            self.found += by

    def mark(self) -> Mark:
        """What is known when the walk is over."""
        if self.known.offset == self.start:
            return Mark(self.end, self.known.count - self.found)
        return Mark(self.start, self.known.count + self.found)


class _DueCount:
    """How many rows are due at a time or later: counted from both ends of what is known, until one has no more."""

    __slots__ = ("_earlier", "_earlier_to", "_later", "_later_to", "due_ns", "known")

    def __init__(self, due_ns: int) -> None:
        self.due_ns = due_ns
        self.known: int | None = None
        self._later, self._later_to = 0, (due_ns, -1)  # rows found from `due_ns` on, and where the last one is
        self._earlier, self._earlier_to = 0, BEFORE_ALL  # likewise from the first one on

    def change(self, ref: Deferred, by: int) -> None:
        """There is one more, or one less."""
        if ref.due_ns >= self.due_ns:
            if self.known is not None:
                self.known += by
            elif (ref.due_ns, ref.offset) <= self._later_to:
                self._later += by
        elif self.known is None and (ref.due_ns, ref.offset) <= self._earlier_to:
            self._earlier += by

    def go_on(self, total: int, keys: Keys, most: int) -> int | None:
        """Count on, `most` rows from each end; how many it is, once that is known."""
        if self.known is None:
            later = keys(self._later_to, most)
            self._later += len(later)
            if len(later) < most:
                self.known = self._later
                return self.known
            self._later_to = later[-1]
            page = keys(self._earlier_to, most)
            earlier = [key for key in page if key[0] < self.due_ns]
            self._earlier += len(earlier)
            if len(earlier) < most:
                self.known = total - self._earlier
            else:
                self._earlier_to = earlier[-1]
        return self.known


class Counts:
    """How many rows a set has from some places on that were asked for lately; the next question is about one nearby.
    Its owner says what changes, and walks over the set behind the gaps."""

    __slots__ = ("_due", "_marks", "_walk", "due_gaps", "gaps")

    def __init__(self) -> None:
        self.gaps, self.due_gaps = Gaps(0), Gaps((BEFORE_ALL[0], 0))
        self._marks: list[Mark] = []
        self._walk: _Walk | None = None
        self._due: _DueCount | None = None

    def change(self, old: Deferred | None, new: Deferred | None) -> None:
        """A row was put, replaced or taken out."""
        if new is not None:
            self.gaps.put(new.offset)
            self.due_gaps.put((new.due_ns, new.offset))
        if old is None or new is None:
            offset, by = (old.offset, -1) if old is not None else (new.offset, 1) if new is not None else (0, 0)
            for mark in self._marks:
                mark.change(offset, by)
            if self._walk is not None:
                self._walk.change(offset, by)
        if self._due is not None:
            if old is not None:
                self._due.change(old, -1)
            if new is not None:
                self._due.change(new, 1)

    def at_or_above(self, offset: int, ends: Sequence[Mark], count_on: CountOn, most: int) -> int | None:
        """How many are at or above `offset`; None: `most` rows were read and it takes more, ask again.

        `ends` is what is known anyway. A walk that is under way is gone to its end first, wherever the question is by
        now: it ends, and what is asked for then is near it.
        """
        while True:
            walk = self._walk
            if walk is None:
                near = min((*self._marks, *ends), key=lambda mark: abs(mark.offset - offset))
                if near.offset == offset:
                    return near.count
                if most <= 0:
                    return None
                walk = self._walk = _Walk(near, offset)
            found, walk.at = count_on(walk.at, walk.end, most)
            walk.found += found
            if walk.at < walk.end:
                return None
            most -= found
            self._marks = [walk.mark(), *self._marks[: _MARKS - 1]]
            self._walk = None

    def due_from(self, due_ns: int, total: int, keys: Keys, most: int) -> int | None:
        """How many are due at `due_ns` or later, of `total`; None likewise."""
        if self._due is None or self._due.due_ns != due_ns:
            self._due = _DueCount(due_ns)
        return self._due.go_on(total, keys, most // 2)
