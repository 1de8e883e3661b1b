"""Deliver-at times of messages that the pump has not passed: no channel has deferred them yet."""

from __future__ import annotations

from array import array
from bisect import bisect_left

from nsqha.cursor.deferred.deferred_set import Deferred


class LaterMessages:
    """Messages at or above the pump that are not to be delivered before a time; sixteen bytes each."""

    __slots__ = ("_dues", "offsets")

    def __init__(self) -> None:
        self.offsets: array[int] = array("q")  # in order
        self._dues: array[int] = array("q")  # of each

    def __len__(self) -> int:
        return len(self.offsets)

    def add(self, offset: int, due_ns: int) -> None:
        """Remember a message until the pump passes it. In order of offsets."""
        self.offsets.append(offset)
        self._dues.append(due_ns)

    def rows(self) -> list[tuple[int, int]]:
        """(offset, due_ns) of each."""
        return list(zip(self.offsets, self._dues, strict=True))

    def cut(self, end: int) -> tuple[Deferred, ...]:
        """Take out those below `end`."""
        n = bisect_left(self.offsets, end)
        refs = tuple(Deferred(self.offsets[i], self._dues[i], 0) for i in range(n))
        del self.offsets[:n], self._dues[:n]
        return refs

    def copy(self) -> LaterMessages:
        copy = LaterMessages()
        copy.offsets, copy._dues = self.offsets[:], self._dues[:]
        return copy
