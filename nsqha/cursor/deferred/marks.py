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

Keys = Callable[[DueKey, int, int], list[DueKey]]
"""(after, end_ns, limit) -> up to `limit` of the keys behind `after` that are due before `end_ns`, in order."""


class Mark:
    """How many rows lie at or above a place: an offset, or a due time."""

    __slots__ = ("count", "place")

    def __init__(self, place: int, count: int) -> None:
        self.place = place
        self.count = count

    def change(self, place: int, by: int) -> None:
        if place >= self.place:
            self.count += by

    def copy(self) -> Mark:
        return Mark(self.place, self.count)


class _Walk:
    """Rows that were counted from `start` to `at`, on the way to `end`."""

    __slots__ = ("at", "end", "found", "known", "start")

    def __init__(self, known: Mark, offset: int) -> None:
        self.start = self.at = min(known.place, offset)
        self.end = max(known.place, offset)
        self.found = 0
        self.known = known.copy()  # its own: the other may be forgotten meanwhile

    def change(self, offset: int, by: int) -> None:
        self.known.change(offset, by)
        if self.start <= offset < self.at:
            self.found += by

    def mark(self) -> Mark:
        """What is known when the walk is over."""
        if self.known.place == self.start:
            return Mark(self.end, self.known.count - self.found)
        return Mark(self.start, self.known.count + self.found)


class _DueWalk:
    """Counts the rows that are due at a time or later, from both ends of what is not known, until one has no more:

        below = known             due_ns = asked for              above = known
          |==== earlier --->          |==== later --->              |
    """

    __slots__ = ("_above", "_below", "_earlier", "_earlier_to", "_later", "_later_to", "due_ns")

    def __init__(self, due_ns: int, below: Mark, above: Mark) -> None:
        self.due_ns = due_ns
        self._below, self._above = below.copy(), above.copy()
        self._later, self._later_to = 0, (due_ns, -1)  # rows found from `due_ns` on, and where the last one is
        self._earlier, self._earlier_to = 0, (below.place, -1)  # likewise from `below` on

    def change(self, ref: Deferred, by: int) -> None:
        """There is one more, or one less."""
        self._below.change(ref.due_ns, by)
        self._above.change(ref.due_ns, by)
        key = (ref.due_ns, ref.offset)
        if ref.due_ns >= self.due_ns:
            self._later += by * (key <= self._later_to)
        elif ref.due_ns >= self._below.place:
            self._earlier += by * (key <= self._earlier_to)

    def go_on(self, keys: Keys, most: int) -> tuple[Mark | None, int]:
        """Count on, `most` rows from each end: what is known now, and how many rows were counted."""
        earlier = keys(self._earlier_to, self.due_ns, most)
        self._earlier += len(earlier)
        if len(earlier) < most:
            return Mark(self.due_ns, self._below.count - self._earlier), len(earlier)
        self._earlier_to = earlier[-1]
        later = keys(self._later_to, self._above.place, most)
        self._later += len(later)
        if len(later) < most:
            return Mark(self.due_ns, self._above.count + self._later), most + len(later)
        self._later_to = later[-1]
        return None, 2 * most


class Counts:
    """How many rows a set has from some places on that were asked for lately; the next question is about one nearby.
    Its owner says what changes, and walks over the set behind the gaps."""

    __slots__ = ("_due_marks", "_due_walk", "_marks", "_walk", "due_gaps", "gaps")

    def __init__(self) -> None:
        self.gaps, self.due_gaps = Gaps(0), Gaps((BEFORE_ALL[0], 0))
        self._marks: list[Mark] = []
        self._walk: _Walk | None = None
        self._due_marks: list[Mark] = []
        self._due_walk: _DueWalk | None = None

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
        for ref, by in ((old, -1), (new, 1)) if self._due_marks or self._due_walk is not None else ():
            if ref is not None:
                for mark in self._due_marks:
                    mark.change(ref.due_ns, by)
                if self._due_walk is not None:
                    self._due_walk.change(ref, by)

    def at_or_above(self, offset: int, ends: Sequence[Mark], count_on: CountOn, most: int) -> int | None:
        """How many are at or above `offset`; None: `most` rows were read and it takes more, ask again.

        `ends` is what is known anyway. A walk that is under way is gone to its end first, wherever the question is by
        now: it ends, and what is asked for then is near it.
        """
        while True:
            walk = self._walk
            if walk is None:
                near = min((*self._marks, *ends), key=lambda mark: abs(mark.place - offset))
                if near.place == offset:
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
        """How many are due at `due_ns` or later, of `total`; None likewise, and a walk is gone to its end likewise.

        Who asks what is due asks later and later: the mark of the time before is where the next walk begins.
        """
        while True:
            walk, marks = self._due_walk, self._due_marks
            if walk is None:
                if (known := next((mark for mark in marks if mark.place == due_ns), None)) is not None:
                    return known.count
                if most <= 0:
                    return None
                below = max([m for m in marks if m.place < due_ns], key=_place, default=Mark(BEFORE_ALL[0], total))
                above = min([m for m in marks if m.place > due_ns], key=_place, default=_BEHIND_ALL)
                walk = self._due_walk = _DueWalk(due_ns, below, above)
            mark, counted = walk.go_on(keys, max(most // 2, 1))
            if mark is None:
                return None
            most -= counted
            self._due_marks = [mark, *marks[: _MARKS - 1]]
            self._due_walk = None


_BEHIND_ALL = Mark(1 << 63, 0)


def _place(mark: Mark) -> int:
    return mark.place
