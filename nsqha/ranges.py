"""An ordered set of integers, kept as merged half-open ranges `[first, end)`.

It holds offsets that a channel finished out of order: few, long ranges. Adding at the end and cutting from the front
are cheap; everything else is a bisection over two parallel lists.

Invariant: firsts[i] < ends[i] < firsts[i + 1] (ranges that touch are one).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class RangeSet:
    """Merged half-open ranges of integers."""

    __slots__ = ("_ends", "_firsts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []
        for first, end in ranges:
            self.add(first, end)

    def add(self, first: int, end: int) -> None:
        """Add every integer of [first, end); an empty range changes nothing."""
        if first >= end:
            return
        firsts, ends = self._firsts, self._ends
        if not ends or first > ends[-1]:
            firsts.append(first)
            ends.append(end)
            return
        lo = bisect_left(ends, first)  # the first range that touches or lies behind `first`
        hi = bisect_right(firsts, end)  # one past the last range that touches `end`
        if lo < hi:
            first = min(first, firsts[lo])
            end = max(end, ends[hi - 1])
        firsts[lo:hi] = [first]
        ends[lo:hi] = [end]

    def discard(self, first: int, end: int) -> None:
        """Remove every integer of [first, end)."""
        if first >= end:
            return
        firsts, ends = self._firsts, self._ends
        lo = bisect_right(ends, first)
        hi = bisect_left(firsts, end)
        if lo >= hi:
            return
        kept = [(firsts[lo], first), (end, ends[hi - 1])]
        kept = [(a, b) for a, b in kept if a < b]
        firsts[lo:hi] = [a for a, _ in kept]
        ends[lo:hi] = [b for _, b in kept]

    def cut_below(self, first: int) -> None:
        """Remove every integer below `first`."""
        if self._firsts and self._firsts[0] < first:
            self.discard(self._firsts[0], first)

    def swallow(self, floor: int) -> int:
        """Remove everything below `floor` and the range that starts at or spans it; return where that range ends.

        This is how a floor moves: if [floor, x) is held, the new floor is x.
        """
        i = bisect_right(self._firsts, floor)
        if i and self._ends[i - 1] > floor:
            floor = self._ends[i - 1]
        del self._firsts[:i], self._ends[:i]
        return floor

    def end_of_range(self, value: int) -> int:
        """`value` if it is not held, else the end of the range that holds it (the next integer that is not held)."""
        i = bisect_right(self._firsts, value)
        return self._ends[i - 1] if i and self._ends[i - 1] > value else value

    def next_held(self, value: int) -> int | None:
        """The lowest held integer at or above `value`."""
        i = bisect_right(self._ends, value)
        return max(value, self._firsts[i]) if i < len(self._firsts) else None

    def __contains__(self, value: int) -> bool:
        return self.end_of_range(value) != value

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._firsts, self._ends, strict=True))

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self._firsts)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RangeSet):
            return NotImplemented
        return self._firsts == other._firsts and self._ends == other._ends

    __hash__ = None  # type: ignore[assignment]

    def total(self) -> int:
        """The number of held integers."""
        return sum(self._ends) - sum(self._firsts)

    def count_below(self, end: int) -> int:
        """The number of held integers below `end`."""
        return sum(min(b, end) - a for a, b in self if a < end)

    def copy(self) -> RangeSet:
        new = RangeSet()
        new._firsts = self._firsts[:]
        new._ends = self._ends[:]
        return new

    def __repr__(self) -> str:
        return "RangeSet(" + " ".join(f"[{a},{b})" for a, b in self) + ")"
