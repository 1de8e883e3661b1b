"""One partition in the cache: its head, the rows of its deferred sets at rest, and what becomes of a set without them.

What is known of a partition beside its deferred messages is its *head*; big endian:

    size u64, partial u8, id u64, sequence u32, bytes u64     of the checkpoint that is being written
    sets u32, [uid u64, number u32, count u64, carried u64]*sets
    the records of `committed.checkpoint` without deferred messages; the first names the batch that was applied
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from nsqha.cursor.cache.lmdb_tables import ReadPin, Tables, TablesError
from nsqha.cursor.committed import checkpoint
from nsqha.cursor.committed.state import PartitionState
from nsqha.cursor.deferred.deferred_set import Deferred, DeferredSet, DueKey, MemoryDeferred
from nsqha.cursor.deferred.layer import MemoryTable, Table, TableLost
from nsqha.cursor.deferred.store import DeferredStore
from nsqha.errors import LogCorrupt
from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger

SetRow = tuple[int, int, int, int]  # channel uid, number of its set, rows, carried ones among them

ROOM = 5_000  # changes of one set that are gathered before they should be written

_HEAD = struct.Struct(">QBQIQI")
_SET = struct.Struct(">QIQQ")

logger = Logger("cursor_cache")


class Cache(Protocol):
    """What a partition needs of the whole."""

    @property
    def tables(self) -> Tables | None: ...
    @property
    def usable(self) -> bool: ...

    def press(self) -> None: ...
    def drain(self, partition: CachedPartition, held: DeferredStore) -> None: ...
    def bury(self, number: int) -> None: ...
    def pin(self) -> ReadPin | None: ...
    def lost(self, error: Exception) -> None: ...


def encode_head(outline: PartitionState, sets: Iterable[SetRow]) -> bytes:
    """The head of a state, of which `outline` is a copy without deferred messages."""
    rows = [_SET.pack(*row) for row in sets]
    body = b"".join([*rows, *checkpoint.records(outline)])
    partial = (0, 0, 0, 0) if outline.partial is None else (1, *outline.partial)
    return _HEAD.pack(_HEAD.size + len(body), *partial, len(rows)) + body


class LmdbRows:
    """The rows of one deferred set, at rest."""

    __slots__ = ("_as_of", "_pin", "number", "owner", "tables", "uid")

    def __init__(self, tables: Tables, owner: CachedPartition, uid: int, number: int) -> None:
        self.tables = tables
        self.owner = owner
        self.uid = uid
        self.number = number
        self._pin: ReadPin | None = None
        self._as_of = 0

    @property
    def as_of(self) -> int:
        """See `CachedPartition.base_log_id`."""
        return self._as_of if self._pin is not None else self.owner.base_log_id

    def get(self, offset: int) -> Deferred | None:
        try:
            return self.tables.get(self.number, offset, self._pin)
        except TablesError as error:
            raise TableLost(str(error)) from error

    def by_offset(self, first: int, limit: int) -> list[Deferred]:
        try:
            return self.tables.by_offset(self.number, first, limit, self._pin)
        except TablesError as error:
            raise TableLost(str(error)) from error

    def offsets(self, first: int, end: int, limit: int) -> list[int]:
        try:
            return self.tables.offsets(self.number, first, end, limit, self._pin)
        except TablesError as error:
            raise TableLost(str(error)) from error

    def by_due(self, after: DueKey, limit: int) -> list[Deferred]:
        try:
            return self.tables.by_due(self.number, after, limit, self._pin)
        except TablesError as error:
            raise TableLost(str(error)) from error

    def pinned(self) -> Table:
        if self._pin is not None:
            return self
        try:
            pin = self.owner.cache.pin()
        except TablesError as error:
            raise TableLost(str(error)) from error
        if pin is None:
            return MemoryTable(self.by_offset(0, 1 << 62))
        rows = LmdbRows(self.tables, self.owner, self.uid, self.number)
        rows._pin, rows._as_of = pin, self.as_of
        return rows


class CachedPartition:
    """What the cache has of one partition; the `Home` of its deferred sets."""

    def __init__(self, cache: Cache, key: PartitionKey, recall: Callable[[int], PartitionState]) -> None:
        self.cache = cache
        self.key = key
        self.state: PartitionState | None = None  # None while it is being loaded
        # A state whose deferred messages may stand for the rows at rest: every change since then is in memory.
        self.base_log_id = 0
        self.written_log_id = 0  # the batch that the stored head has applied
        self._recall = recall
        self._stored: dict[int, tuple[int, ...]] = {}  # uid -> number, count, carried: of sets not opened yet

    # ---- loading

    def new_deferred(self, uid: int) -> DeferredSet:
        """The set of a channel: as it is stored, when the head is being read; else a new one."""
        tables = self.cache.tables
        if tables is None or not self.cache.usable:
            return MemoryDeferred()
        number, count, carried = self._stored.pop(uid, (0, 0, 0))
        if not count:
            return DeferredStore(self, room=ROOM)
        lowest = tables.by_offset(number, 0, 1)
        if not lowest:
            raise ValueError(f"set {number} should have {count} rows and has none")
        bounds = lowest[0].offset, tables.highest(number)
        rows = LmdbRows(tables, self, uid, number)
        return DeferredStore(self, rows, count=count, carried=carried, bounds=bounds, room=ROOM)

    def stored(self) -> PartitionState | None:
        """The state that is in the cache, deferred sets and all; None if there is none that can be read."""
        tables = self.cache.tables
        if tables is None or not self.cache.usable:
            return None
        try:
            head = tables.head(*self.key)
            return self._decoded(head) if head else None
        except TablesError as error:
            self.cache.lost(error)
            return None
        except (LogCorrupt, struct.error, ValueError) as error:
            logger.warning("cursor_cache_unreadable", "what is cached of %s does not decode: %s", self.key, error)
            return None
        finally:
            self._stored = {}

    def _decoded(self, head: bytes) -> PartitionState:
        size, partial, id_, sequence, bytes_, sets = _HEAD.unpack_from(head)
        records = _HEAD.size + sets * _SET.size
        if size != len(head):
            raise ValueError(f"{len(head)} bytes of {size}")
        self._stored = {uid: tuple(rest) for uid, *rest in _SET.iter_unpack(head[_HEAD.size : records])}
        state = checkpoint.decode(head[records:], self.new_deferred)
        state.partial = (id_, sequence, bytes_) if partial else None
        self.written_log_id = state.applied.log_id
        return state

    # ---- as the home of deferred sets

    def full(self, held: DeferredStore) -> None:
        if self.state is not None:
            self.cache.press()
        else:
            self.cache.drain(self, held)

    def cleared(self, held: DeferredStore, table: Table) -> None:
        if isinstance(table, LmdbRows):
            self.cache.bury(table.number)

    def lost(self, held: DeferredStore, error: TableLost) -> None:
        self.cache.lost(error)
        if self.state is None:
            raise error  # while loading: the log is read again
        rows = held.table
        if rows is not None:  # of a snapshot, or of a channel that is gone
            assert isinstance(rows, LmdbRows)
            held.settle_in_memory(rows_of(self._recall(rows.as_of), rows.uid))

    def sets(self) -> Iterator[tuple[int, DeferredStore]]:
        """The sets that the cache looks after, by channel uid."""
        if self.state is not None:
            for channel in self.state.channels.values():
                if isinstance(channel.deferred, DeferredStore):
                    yield channel.uid, channel.deferred

    def settle_in_memory(self) -> None:
        """The cache is lost: read from the log what it held."""
        held = [(uid, set_) for uid, set_ in self.sets() if set_.table is not None]
        if held:
            state = self._recall(self.base_log_id)
            for uid, set_ in held:
                set_.settle_in_memory(rows_of(state, uid))


def rows_of(state: PartitionState, uid: int) -> list[Deferred]:
    """The deferred messages of a channel."""
    channel = state.channels.by_uid(uid)
    return list(channel.deferred.items()) if channel is not None else []
