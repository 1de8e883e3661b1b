"""A deferred set in layers: what changed lately in memory, over rows that lie somewhere else and are written slowly.

    memtable     changes since the last `freeze`                     always answers first
    immutable    the layer that is being written below just now     or None
    table        rows at rest (a database)                           or None

Each layer shadows those below it: it holds a row, or says that there is none any more. A write of the immutable layer
may be half done at any time, because no read goes below it; `thaw` drops it when the table has all of it. The number of
rows and the lowest and highest offset that the table may hold are known in memory, so a set that is empty, and a
message that was published after the table was written, cost no access to the table. Rows that are gone but still in the
table are passed over once, and then known as a gap.

If the table fails, `Home` hands in its rows once more (the log has them), and the set goes on in memory.

    freeze -> [written elsewhere] -> thaw            the same set all the time
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile
from typing import Protocol, TypeVar

from nsqha.cursor.deferred.deferred_set import COUNT_ROWS, Deferred, DueKey
from nsqha.cursor.deferred.layer import UNBOUNDED, DueRow, Layer, Table, TableLost, count_on
from nsqha.cursor.deferred.marks import Counts, Mark

T = TypeVar("T")

_FIRST_PAGE = 2  # most questions want one row; each page is four times as long as the one before
_PAGE = 512
_UNHELD = Deferred(-1, 0, 0)  # a layer says nothing of an offset
_LAST: DueKey = ((1 << 63) - 1, UNBOUNDED)  # behind all


class Home(Protocol):
    """The owner of a set's table."""

    def full(self, held: DeferredStore) -> None:
        """The memtable layer has reached its room: freeze it soon."""

    def cleared(self, held: DeferredStore, table: Table) -> None:
        """The rows of this table are not needed any more."""

    def lost(self, held: DeferredStore, error: TableLost) -> None:
        """The table failed: call `settle_in_memory` with its rows before returning."""


class DeferredStore:
    """A DeferredSet over a table that is written now and then."""

    __slots__ = (
        "_carried_from",
        "_counts",
        "_high",
        "_home",
        "_immutable",
        "_low",
        "_memtable",
        "_own_from",
        "carried",
        "count",
        "room",
        "table",
    )  # fmt: skip

    def __init__(
        self,
        home: Home,
        table: Table | None = None,
        *,
        count: int = 0,
        carried: int = 0,
        bounds: tuple[int, int] | None = None,
        room: int = UNBOUNDED,
    ) -> None:
        """The table has `count` rows, `carried` of them with a position; `bounds` are its lowest and highest offset."""
        self.table = table
        self.count = count
        self.carried = carried
        self.room = room
        self._home = home
        self._memtable = Layer()
        self._immutable: Layer | None = None
        self._low, self._high = bounds if bounds is not None else (1, 0)
        self._counts = Counts()
        # No row without a position has a lower offset, and no row with one has a lower position: what `below` found.
        self._own_from = self._carried_from = 0

    # ---- changing

    def put(self, ref: Deferred) -> None:
        offset = ref.offset
        old = self.get(offset)
        if old is None:
            self.count += 1
        elif old.position:
            self.carried -= 1
        self._counts.change(old, ref)
        if ref.position:
            self.carried += 1
            if ref.position < self._carried_from:
                self._carried_from = ref.position
        elif offset < self._own_from:
            self._own_from = offset
        memtable = self._memtable
        memtable.put(ref)
        if len(memtable.rows) == self.room:
            self._home.full(self)

    def remove(self, offset: int) -> bool:
        old = self.get(offset)
        if old is None:
            return False
        self.count -= 1
        self._counts.change(old, None)
        if old.position:
            self.carried -= 1
        rows, immutable = self._memtable.rows, self._immutable
        if self._low <= offset <= self._high or (immutable is not None and offset in immutable.rows):
            rows[offset] = None
            if len(rows) == self.room:
                self._home.full(self)
        else:
            del rows[offset]
        return True

    def clear(self) -> None:
        table = self.table
        self.__init__(self._home, room=self.room)  # type: ignore[misc]
        if table is not None:
            self._home.cleared(self, table)

    # ---- asking

    def __len__(self) -> int:
        return self.count

    def get(self, offset: int) -> Deferred | None:
        ref = self._memtable.rows.get(offset, _UNHELD)
        if ref is not _UNHELD:
            return ref
        if self._immutable is not None:
            ref = self._immutable.rows.get(offset, _UNHELD)
            if ref is not _UNHELD:
                return ref
        if self._low <= offset <= self._high and self.table is not None:
            try:
                return self.table.get(offset)
            except TableLost as error:
                self._home.lost(self, error)
                return self.get(offset)
        return None

    def next_offset(self, offset: int) -> int | None:
        if self.count == 0:
            return None
        for ref in self._refs(offset):
            return ref.offset
        return None

    def count_from(self, offset: int) -> int:
        while (count := self.counted_from(offset)) is None:
            pass
        return count

    def counted_from(self, offset: int) -> int | None:
        lowest = self.next_offset(0)
        if lowest is None or offset <= lowest:
            return self.count
        if self.next_offset(offset) is None:
            return 0
        above = 1 + max(self._high, self._memtable.high, -1 if self._immutable is None else self._immutable.high)
        ends = Mark(lowest, self.count), Mark(above, 0)

        def count_some(first: int, end: int, most: int) -> tuple[int, int]:
            at_rest: list[int] = []
            if first <= self._high:  # if the table is lost now, its rows are in the memtable layer from then on
                at_rest = self._from_table(lambda table: table.offsets(first, end, most), list)
            layers = [layer for layer in (self._memtable, self._immutable) if layer is not None and layer.rows]
            return count_on(at_rest, layers, first, end, most)

        return self._counts.at_or_above(offset, ends, count_some, COUNT_ROWS)

    def items(self, first: int = 0) -> Iterator[Deferred]:
        return self._refs(first) if self.count else iter(())

    def due(self, after: DueKey, until_ns: int, limit: int) -> list[Deferred]:
        found: list[Deferred] = []
        if self.count == 0:
            return found
        for due_ns, _, ref in self._dues(after):
            if due_ns > until_ns or len(found) == limit:
                break
            found.append(ref)
        return found

    def next_due(self, after: DueKey) -> int | None:
        if self.count == 0:
            return None
        for due_ns, _, _ in self._dues(after):
            return due_ns
        return None

    def count_due_from(self, due_ns: int) -> int:
        while (count := self.counted_due_from(due_ns)) is None:
            pass
        return count

    def counted_due_from(self, due_ns: int) -> int | None:
        if self.count == 0:
            return 0

        def keys(after: DueKey, end_ns: int, limit: int) -> list[DueKey]:
            rows = takewhile(lambda row: row[0] < end_ns, self._dues(after))
            return [(due, offset) for due, offset, _ in islice(rows, limit)]

        return self._counts.due_from(due_ns, self.count, keys, COUNT_ROWS)

    def below(self, offset: int, position: int) -> Iterator[Deferred]:
        if not self.carried or position <= self._carried_from:
            if offset > self._own_from:
                for ref in _between(self._refs(self._own_from), offset):
                    if not ref.position:
                        self._own_from = ref.offset
                        break
                else:
                    self._own_from = offset
            return (ref for ref in _between(self._refs(self._own_from), offset) if not ref.position)
        return self._below(offset, position)

    def _below(self, offset: int, position: int) -> Iterator[Deferred]:
        """As `below`, when there are carried ones: those may have any offset. Remembers where the lowest are."""
        own_from, carried_from = offset, UNBOUNDED
        for ref in self.items():
            if ref.position:
                carried_from = min(carried_from, ref.position)
                if ref.position < position:
                    yield ref
            elif ref.offset < offset:
                own_from = min(own_from, ref.offset)
                yield ref
        self._own_from, self._carried_from = max(self._own_from, own_from), carried_from

    def snapshot(self) -> DeferredStore:
        copy = DeferredStore(self._home, count=self.count, carried=self.carried)
        copy._counts.gaps, copy._counts.due_gaps = self._counts.gaps.copy(), self._counts.due_gaps.copy()
        copy._memtable = Layer({**(self._immutable.rows if self._immutable is not None else {}), **self._memtable.rows})
        if self._low <= self._high:
            copy.table = self._from_table(lambda table: table.pinned(), lambda: None)
            if copy.table is None:  # the table was lost: its rows are in the memtable layer by now
                copy._memtable = Layer(dict(self._memtable.rows))
            else:
                copy._low, copy._high = self._low, self._high
        return copy

    # ---- the layers as one

    def _refs(self, first: int) -> Iterator[Deferred]:
        """Rows from `first` on, by offset."""
        place, gaps = first, self._counts.gaps
        first = gaps.behind(place)
        memtable, immutable = self._memtable, self._immutable
        sources: list[Iterable[Deferred]] = []
        if memtable.rows and first <= memtable.high:
            sources.append(memtable.refs(first))
        if immutable is not None:
            sources.append(ref for ref in immutable.refs(first) if ref.offset not in memtable.rows)
        if first <= self._high:
            sources.append(self._table_refs(first, memtable, immutable))
        refs = heapq.merge(*sources) if len(sources) > 1 else iter(sources[0] if sources else ())
        return gaps.walked(place, refs, lambda ref: ref.offset, UNBOUNDED)

    def _table_refs(self, first: int, memtable: Layer, immutable: Layer | None) -> Iterator[Deferred]:
        limit = _FIRST_PAGE
        while True:
            # Lost meanwhile: its rows were put into a new memtable layer; those from here on are taken from there.
            page = self._from_table(
                lambda table: table.by_offset(first, limit),  # noqa: B023
                lambda: list(islice(self._memtable.refs(first), limit)),  # noqa: B023
            )
            if memtable.rows or immutable is not None:
                for ref in page:
                    if ref.offset not in memtable.rows and (immutable is None or ref.offset not in immutable.rows):
                        yield ref
            else:
                yield from page
            if len(page) < limit:
                return
            first, limit = page[-1].offset + 1, min(4 * limit, _PAGE)

    def _dues(self, after: DueKey) -> Iterator[DueRow]:
        """Rows behind `after`, by due time."""
        place, gaps = (after[0], after[1] + 1), self._counts.due_gaps
        due_ns, offset = gaps.behind(place)
        after = (due_ns, offset - 1)
        memtable, immutable = self._memtable, self._immutable
        sources: list[Iterable[DueRow]] = []
        if memtable.rows:
            sources.append(memtable.dues(after))
        if immutable is not None:
            sources.append(row for row in immutable.dues(after) if row[1] not in memtable.rows)
        if self._low <= self._high:
            sources.append(self._table_dues(after, memtable, immutable))
        dues = heapq.merge(*sources) if len(sources) > 1 else iter(sources[0] if sources else ())
        return gaps.walked(place, dues, lambda row: row[:2], _LAST)

    def _table_dues(self, after: DueKey, memtable: Layer, immutable: Layer | None) -> Iterator[DueRow]:
        limit = _FIRST_PAGE
        while True:
            page = self._from_table(
                lambda table: table.by_due(after, limit),  # noqa: B023
                lambda: [ref for _, _, ref in islice(self._memtable.dues(after), limit)],  # noqa: B023
            )
            for ref in page:
                if ref.offset not in memtable.rows and (immutable is None or ref.offset not in immutable.rows):
                    yield (ref.due_ns, ref.offset, ref)
            if len(page) < limit:
                return
            after, limit = (page[-1].due_ns, page[-1].offset), min(4 * limit, _PAGE)

    def _from_table(self, ask: Callable[[Table], T], otherwise: Callable[[], T]) -> T:
        """Ask the table; if it is lost, `otherwise` answers from memory, where all rows are then."""
        table = self.table
        if table is not None:
            try:
                return ask(table)
            except TableLost as error:
                self._home.lost(self, error)
        assert self.table is None, "a set whose table is lost was not settled in memory"
        return otherwise()

    # ---- between the layers and the table

    @property
    def overlaid(self) -> int:
        """Changes that are in memory only."""
        return len(self._memtable.rows) + (len(self._immutable.rows) if self._immutable is not None else 0)

    def freeze(self) -> Layer | None:
        """What changed since the last time, to be written; None if nothing did. The table must be set by then."""
        assert self._immutable is None, "immutable twice"
        if not self._memtable.rows:
            return None
        self._immutable, self._memtable = self._memtable, Layer()
        return self._immutable

    def thaw(self, layer: Layer, count: int) -> None:
        """The table has all of `layer` now, and `count` rows.

        A set that was cleared meanwhile has nothing to do with it any more.
        """
        if self._immutable is not layer:
            return
        self._immutable = None
        if count == 0:
            self._low, self._high = 1, 0
        elif layer.low <= layer.high:
            empty = self._low > self._high
            self._low = layer.low if empty else min(self._low, layer.low)
            self._high = layer.high if empty else max(self._high, layer.high)

    def unfreeze(self) -> None:
        """The immutable layer was not written and nothing changed since: it is the memtable one again."""
        assert self._immutable is not None and not self._memtable.rows, "unfroze a layer that has another above it"
        self._memtable, self._immutable = self._immutable, None

    def settle_in_memory(self, rows: Iterable[Deferred]) -> None:
        """The table is gone; these were its rows. From now on everything is in memory."""
        merged: dict[int, Deferred | None] = {ref.offset: ref for ref in rows}
        if self._immutable is not None:
            merged.update(self._immutable.rows)
        merged.update(self._memtable.rows)
        self._memtable = Layer({offset: ref for offset, ref in merged.items() if ref is not None})
        self._immutable, self.table = None, None
        self._low, self._high = 1, 0
        assert len(self._memtable.rows) == self.count, "the rows that were recalled are not those that were lost"

    def __repr__(self) -> str:
        return f"DeferredStore({self.count}, {self.overlaid} of them overlaid)"


def _between(refs: Iterator[Deferred], high: int) -> Iterator[Deferred]:
    return takewhile(lambda ref: ref.offset < high, refs)
