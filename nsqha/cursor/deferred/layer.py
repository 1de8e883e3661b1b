"""The parts that a layered deferred set is made of: a layer of changes, and what a table below it must offer."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Protocol, TypeVar

from nsqha.cursor.deferred.deferred_set import Deferred, DueKey

Sortable = TypeVar("Sortable", int, DueKey)
DueRow = tuple[int, int, Deferred]  # (due_ns, offset, the row): in this order

UNBOUNDED = 1 << 62

_RESORT = 512
_LEAST: DueKey = (-(1 << 63), -1)


class TableLost(Exception):
    """The table cannot be read."""


class Table(Protocol):
    """Rows at rest. Each call stands for itself; TableLost if they cannot be read."""

    def get(self, offset: int) -> Deferred | None: ...

    def by_offset(self, first: int, limit: int) -> list[Deferred]:
        """Up to `limit` rows from offset `first` on."""

    def offsets(self, first: int, end: int, limit: int) -> list[int]:
        """Up to `limit` offsets of rows in [first, end), in order."""

    def by_due(self, after: DueKey, limit: int) -> list[Deferred]:
        """Up to `limit` rows behind `after`, in order of (due_ns, offset)."""

    def pinned(self) -> Table:
        """The rows as they are now, whatever is written later. TableLost if that cannot be had."""


class Layer:
    """Changes, by offset: a row, or None where the row below is gone. Both orders are sorted when they are asked for.

    Sorted lists may name what is not so any more; a walk over them compares with `rows`.
    """

    __slots__ = ("_added", "_dues", "_offsets", "high", "low", "rows")

    def __init__(self, rows: dict[int, Deferred | None] | None = None) -> None:
        self.rows: dict[int, Deferred | None] = rows if rows is not None else {}
        self._offsets: list[int] = []
        self._dues: list[DueKey] = []
        self._added: list[Deferred] = [ref for ref in self.rows.values() if ref is not None]
        # No row was ever put outside these.
        self.low = min([ref.offset for ref in self._added], default=UNBOUNDED)
        self.high = max([ref.offset for ref in self._added], default=-1)

    def put(self, ref: Deferred) -> None:
        offset = ref.offset
        self.rows[offset] = ref
        self._added.append(ref)
        if offset > self.high:
            self.high = offset
        if offset < self.low:
            self.low = offset

    def refs(self, first: int) -> Iterator[Deferred]:
        """Rows from `first` on, by offset."""
        self._sort()
        rows, offsets, last = self.rows, self._offsets, -1
        for i in range(bisect_left(offsets, first), len(offsets)):
            offset = offsets[i]
            ref = rows.get(offset)
            if ref is not None and offset != last:
                last = offset
                yield ref

    def offsets(self, first: int, end: int, limit: int) -> list[int]:
        """Up to `limit` offsets of rows in [first, end), in order."""
        return [ref.offset for ref in islice(takewhile(lambda ref: ref.offset < end, self.refs(first)), limit)]

    def dues(self, after: DueKey) -> Iterator[DueRow]:
        """Rows behind `after`, by due time."""
        self._sort()
        rows, dues, last = self.rows, self._dues, _LEAST
        for i in range(bisect_left(dues, (after[0], after[1] + 1)), len(dues)):
            key = dues[i]
            ref = rows.get(key[1])
            if ref is not None and ref.due_ns == key[0] and key != last:
                last = key
                yield (*key, ref)

    def _sort(self) -> None:
        added, self._added = self._added, []
        if not added:
            return
        if len(added) + len(self._offsets) > 2 * len(self.rows) + _RESORT:  # mostly of rows that changed again
            self._offsets, self._dues = [], []
            added = [ref for ref in self.rows.values() if ref is not None]
        _merge(self._offsets, [ref.offset for ref in added])
        _merge(self._dues, [(ref.due_ns, ref.offset) for ref in added])


def _merge(held: list[Sortable], new: list[Sortable]) -> None:
    """Into a sorted list; the usual new ones belong to its end."""
    new.sort()
    if not held or (new and new[0] >= held[-1]) or len(new) * 32 > len(held):
        held += new
        held.sort()  # two sorted runs: a merge; one: a look
    else:
        for value in new:
            insort(held, value)


def count_on(at_rest: list[int], layers: Sequence[Layer], first: int, end: int, most: int) -> tuple[int, int]:
    """How many rows lie in [first, stop), and stop: `end`, or before it if a layer or the table has `most` there.

    `at_rest` are the first `most` offsets in there that the table has; of `layers` each shadows those behind it."""
    pages = [*(layer.offsets(first, end, most) for layer in layers), at_rest]
    stop = min([end, *(page[-1] + 1 for page in pages if len(page) == most)])
    if len(pages) == 1:
        return len(at_rest), stop
    found = 0
    for n, page in enumerate(pages):
        offsets = page[: bisect_left(page, stop)]
        for layer in layers[:n]:
            shadowed = layer.rows
            offsets = [offset for offset in offsets if offset not in shadowed]
        found += len(offsets)
    return found, stop


class MemoryTable:
    """A table that is a layer in memory."""

    def __init__(self, rows: Iterable[Deferred]) -> None:
        self._layer = Layer({ref.offset: ref for ref in rows})

    def get(self, offset: int) -> Deferred | None:
        return self._layer.rows.get(offset)

    def by_offset(self, first: int, limit: int) -> list[Deferred]:
        return list(islice(self._layer.refs(first), limit))

    def offsets(self, first: int, end: int, limit: int) -> list[int]:
        return self._layer.offsets(first, end, limit)

    def by_due(self, after: DueKey, limit: int) -> list[Deferred]:
        return [ref for _, _, ref in islice(self._layer.dues(after), limit)]

    def pinned(self) -> MemoryTable:
        return self
