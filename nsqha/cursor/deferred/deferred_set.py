"""Messages that wait for a due time: the set, as the committed state needs it, and its in-memory form.

A deferred message is a reference, never a body: its offset, when it is due, how often it was delivered, and where its
frame lies (`position` 0: in its own place in the log, found by its offset; else the byte position of a carried copy).
The floor of the channel may pass it.

`DeferredSet` is what storage must offer; committed state changes it only by applying a batch, so one that lags behind
(a database written once a second, plus what came since in memory) is as good as one that does not, as long as it
answers like this one. `MemoryDeferred` keeps rows in sorted blocks of plain arrays, about 50 bytes a message.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol


class Deferred(NamedTuple):
    """A reference to a message that waits; `attempts` counts its deliveries so far."""

    offset: int
    due_ns: int
    attempts: int
    position: int = 0


DueKey = tuple[int, int]  # (due_ns, offset): the order in which deferred messages become due
BEFORE_ALL: DueKey = (-(1 << 63), -1)
COUNT_ROWS = 1_000  # counted in one step: well below a millisecond


class DeferredSet(Protocol):
    """The deferred messages of one channel, found by offset and by due time."""

    def put(self, ref: Deferred) -> None:
        """Add, or replace what is held for this offset."""

    def remove(self, offset: int) -> bool:
        """Take out; whether it was there."""

    def get(self, offset: int) -> Deferred | None:
        """What is held for `offset`."""

    def clear(self) -> None:
        """Take out everything."""

    def __len__(self) -> int: ...

    def next_offset(self, offset: int) -> int | None:
        """The lowest held offset at or above `offset`."""

    def count_from(self, offset: int) -> int:
        """How many are held at or above `offset`; of ten million that may take seconds."""

    def counted_from(self, offset: int) -> int | None:
        """The same if it is known after reading a few times COUNT_ROWS rows, else None: ask again, and it goes on. The
        set may change between two calls, and `offset` be another one."""

    def items(self, first: int = 0) -> Iterator[Deferred]:
        """All from offset `first` on, by offset. The set must not change meanwhile."""

    def due(self, after: DueKey, until_ns: int, limit: int) -> list[Deferred]:
        """Up to `limit` in order of (due_ns, offset): those behind `after` that are due at or before `until_ns`."""

    def next_due(self, after: DueKey) -> int | None:
        """When the first one behind `after` is due."""

    def count_due_from(self, due_ns: int) -> int:
        """How many are due at `due_ns` or later."""

    def counted_due_from(self, due_ns: int) -> int | None:
        """The same as `counted_from` does it. Quick again for a time a little later."""

    def snapshot(self) -> DeferredSet:
        """The set as it is now, whatever happens to this one."""

    def below(self, offset: int, position: int) -> Iterator[Deferred]:
        """Those whose frame would be lost if the log began at (offset, position): to be carried first."""


class MemoryDeferred:
    """A DeferredSet in memory."""

    def __init__(self) -> None:
        self._by_offset = _SortedRows(4)  # offset, due_ns, attempts, position
        self._by_due = _SortedRows(2)  # due_ns, offset

    def put(self, ref: Deferred) -> None:
        row = self._by_offset.find(ref.offset)
        if row is not None:
            self._by_offset.delete((row[0], row[1]))
            self._by_due.delete((row[1], row[0]))
        self._by_offset.insert(ref)
        self._by_due.insert((ref.due_ns, ref.offset))

    def remove(self, offset: int) -> bool:
        row = self._by_offset.find(offset)
        if row is None:
            return False
        self._by_offset.delete((offset, row[1]))
        self._by_due.delete((row[1], offset))
        return True

    def get(self, offset: int) -> Deferred | None:
        row = self._by_offset.find(offset)
        return None if row is None else Deferred._make(row)

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def __len__(self) -> int:
        return self._by_offset.count

    def next_offset(self, offset: int) -> int | None:
        for row in self._by_offset.rows((offset, _LEAST)):
            return row[0]
        return None

    def count_from(self, offset: int) -> int:
        return self._by_offset.count_from((offset, _LEAST))

    def counted_from(self, offset: int) -> int:
        return self.count_from(offset)  # by whole blocks: ten million rows take a millisecond or two

    def items(self, first: int = 0) -> Iterator[Deferred]:
        for row in self._by_offset.rows((first, _LEAST)):
            yield Deferred(*row)

    def due(self, after: DueKey, until_ns: int, limit: int) -> list[Deferred]:
        found: list[Deferred] = []
        for due_ns, offset in self._by_due.rows((after[0], after[1] + 1)):
            if due_ns > until_ns or len(found) == limit:
                break
            ref = self.get(offset)
            assert ref is not None, "the two orders of a deferred set disagree"
            found.append(ref)
        return found

    def next_due(self, after: DueKey) -> int | None:
        for due_ns, _ in self._by_due.rows((after[0], after[1] + 1)):
            return due_ns
        return None

    def count_due_from(self, due_ns: int) -> int:
        return self._by_due.count_from((due_ns, _LEAST))

    def counted_due_from(self, due_ns: int) -> int:
        return self.count_due_from(due_ns)

    def snapshot(self) -> MemoryDeferred:
        copy = MemoryDeferred()
        copy._by_offset, copy._by_due = self._by_offset.copy(), self._by_due.copy()
        return copy

    def below(self, offset: int, position: int) -> Iterator[Deferred]:
        for ref in self.items():
            if ref.position < position if ref.position else ref.offset < offset:
                yield ref

    def __repr__(self) -> str:
        return f"MemoryDeferred({len(self)})"


_LEAST = -(1 << 63)
_MOST = (1 << 63) - 1
_BLOCK = 512


class _SortedRows:
    """Rows of 64-bit integers, unique and sorted by their first two columns, in blocks of parallel arrays.

    A block holds at most 2 x _BLOCK rows, so inserting moves few bytes; `_firsts` has the first key of each block.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._blocks: list[tuple[array[int], ...]] = []
        self._firsts: list[DueKey] = []
        self.count = 0

    def copy(self) -> _SortedRows:
        new = _SortedRows(self._columns)
        new._blocks = [tuple(column[:] for column in block) for block in self._blocks]
        new._firsts = self._firsts[:]
        new.count = self.count
        return new

    def find(self, value: int) -> tuple[int, ...] | None:
        """The row whose first column is `value`, where those are unique."""
        n = bisect_right(self._firsts, (value, _MOST)) - 1
        if n < 0:
            return None
        block = self._blocks[n]
        firsts = block[0]
        at = bisect_left(firsts, value)
        if at == len(firsts) or firsts[at] != value:
            return None
        return tuple([column[at] for column in block])

    def insert(self, row: tuple[int, ...]) -> None:
        key = (row[0], row[1])
        if not self._blocks:
            self._blocks.append(tuple(array("q") for _ in range(self._columns)))
            self._firsts.append(key)
        n = bisect_right(self._firsts, key) - 1
        if n < 0:
            n = 0
            self._firsts[0] = key
        block = self._blocks[n]
        at = _place(block, key)
        for column, value in zip(block, row):  # noqa: B905  # equally long, and this is the hot place
            column.insert(at, value)
        self.count += 1
        if len(block[0]) > 2 * _BLOCK:
            # Cut at the end when rows arrive in order, which leaves full blocks behind instead of half-full ones.
            cut = 2 * _BLOCK if at == 2 * _BLOCK else _BLOCK
            upper = tuple(column[cut:] for column in block)
            for column in block:
                del column[cut:]
            self._blocks.insert(n + 1, upper)
            self._firsts.insert(n + 1, (upper[0][0], upper[1][0]))

    def delete(self, key: DueKey) -> None:
        n = bisect_right(self._firsts, key) - 1
        block = self._blocks[n]
        at = _place(block, key)
        assert (block[0][at], block[1][at]) == key, "deleted a row that is not there"
        for column in block:
            del column[at]
        self.count -= 1
        if block[0]:
            self._firsts[n] = (block[0][0], block[1][0])
        else:
            del self._blocks[n], self._firsts[n]

    def rows(self, key: DueKey) -> Iterator[tuple[int, ...]]:
        """The rows at or above `key`, in order."""
        if not self._blocks:
            return
        n = max(bisect_right(self._firsts, key) - 1, 0)
        at = _place(self._blocks[n], key)
        while n < len(self._blocks):
            block = self._blocks[n]
            for i in range(at, len(block[0])):
                yield tuple([column[i] for column in block])
            n, at = n + 1, 0

    def count_from(self, key: DueKey) -> int:
        if not self._blocks:
            return 0
        n = max(bisect_right(self._firsts, key) - 1, 0)
        return sum(len(block[0]) for block in self._blocks[n:]) - _place(self._blocks[n], key)


def _place(block: tuple[array[int], ...], key: DueKey) -> int:
    first, second = block[0], block[1]
    lo = bisect_left(first, key[0])
    if lo == len(first) or first[lo] != key[0]:
        return lo
    hi = bisect_right(first, key[0], lo)
    return bisect_left(second, key[1], lo, hi)


NewDeferred = Callable[[int], DeferredSet]
