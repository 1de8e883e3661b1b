"""A deferred set over a table that counts how many of its rows are read."""

from __future__ import annotations

from typing import TypeVar

from nsqha.cursor.deferred.deferred_set import COUNT_ROWS, Deferred, DueKey
from nsqha.cursor.deferred.layer import MemoryTable, Table, TableLost
from nsqha.cursor.deferred.store import DeferredStore

T = TypeVar("T")

ROWS = COUNT_ROWS
ENOUGH = 4 * ROWS  # a step may read, of each layer and of each end, so many


class CountedTable(MemoryTable):
    """A table that counts the rows that were asked for, and may be lost."""

    def __init__(self, rows: list[Deferred]) -> None:
        super().__init__(rows)
        self.read = 0
        self.lost = False

    def _counted(self, found: list[T]) -> list[T]:
        if self.lost:
            raise TableLost("gone")
        self.read += len(found)
        return found

    def get(self, offset: int) -> Deferred | None:
        return self._counted([super().get(offset)])[0]

    def by_offset(self, first: int, limit: int) -> list[Deferred]:
        return self._counted(super().by_offset(first, limit))

    def offsets(self, first: int, end: int, limit: int) -> list[int]:
        return self._counted(super().offsets(first, end, limit))

    def by_due(self, after: DueKey, limit: int) -> list[Deferred]:
        return self._counted(super().by_due(after, limit))

    def take_read(self) -> int:
        read, self.read = self.read, 0
        return read


class Owner:
    """The home of a set, which has its rows once more."""

    def __init__(self, model: dict[int, Deferred] | None = None) -> None:
        self.at_rest = dict(model or {})

    def full(self, held: DeferredStore) -> None:
        raise AssertionError("no room was set")

    def cleared(self, held: DeferredStore, table: Table) -> None:
        pass

    def lost(self, held: DeferredStore, error: TableLost) -> None:
        held.settle_in_memory(self.at_rest.values())


def store_of(rows: list[Deferred]) -> tuple[DeferredStore, CountedTable]:
    table = CountedTable(rows)
    owner = Owner({ref.offset: ref for ref in rows})
    bounds = (rows[0].offset, rows[-1].offset)
    return DeferredStore(owner, table, count=len(rows), bounds=bounds), table
