"""Where an ordered set has nothing, as far as a walk over it has found: the next walk begins behind that.

A row that is taken out of a layered set stays in its table until that is written, and a walk passes over it. Thousands
may lie in a row, as messages become due, are delivered and finished in their order; whoever asks for the first row that
is left would pass over all of them each time.

    |....... nothing .......|====|...... nothing ......|=====
    bottom                low    begin                 end         two are known: below all, and where one asked last

What is put into a gap ends it there; what is taken out anywhere changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from nsqha.cursor.deferred.deferred_set import DueKey

Place = TypeVar("Place", int, DueKey)
Row = TypeVar("Row")


class Gaps(Generic[Place]):
    """The gaps of one order of a set."""

    __slots__ = ("begin", "end", "low")

    def __init__(self, bottom: Place) -> None:
        self.low: Place = bottom
        self.begin: Place = bottom
        self.end: Place = bottom

    def copy(self) -> Gaps[Place]:
        """Those of a set with the same rows."""
        same: Gaps[Place] = Gaps(self.low)
        same.begin, same.end = self.begin, self.end
        return same

    def behind(self, place: Place) -> Place:
        """Where a walk that should begin at `place` may begin instead."""
        if place < self.low:
            return self.low
        return self.end if self.begin <= place < self.end else place

    def found(self, place: Place, first: Place) -> None:
        """A walk from `place`, or from what `behind` says of it, came to `first`, and met nothing on the way."""
        if place <= self.low:
            self.low = max(self.low, first)
        else:
            self.begin, self.end = place, first

    def walked(self, place: Place, rows: Iterator[Row], place_of: Callable[[Row], Place], last: Place) -> Iterator[Row]:
        """The same rows, which a walk finds that began `behind(place)`; the first one is looked for at once. `last` is
        behind all."""
        row = next(rows, None)
        if row is None:
            self.found(place, last)
            return rows
        self.found(place, place_of(row))
        return chain((row,), rows)

    def put(self, place: Place) -> None:
        """There is something now."""
        if place < self.low:
            self.low = place
        if self.begin <= place < self.end:
            self.end = place
