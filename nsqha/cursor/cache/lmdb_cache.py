"""A cache of the committed state of all partitions of a node: so that a start reads only the end of each log, and
messages that wait for a year wait on disk.

Nothing in it is needed: the logs say it all (`committed.loading`). So whatever cannot be proven right is thrown away,
and the folder may be deleted whenever its node is stopped.

    <path>/data.mdb, lock.mdb     LMDB's (`lmdb_tables`)
    <path>/proof                  what data.mdb was when it was last written completely (`lmdb_proof`)

What it has of one partition is in `lmdb_partition`.

**Writing**, about once a second:

    take         on the loop: what changed is set aside. Until the end the sets answer from memory, so
                 everything that follows may fail half done, and be repeated
    write_rows   on the loop, some rows at a time, until all are: to the page cache, as the log is written
    write        on the disk thread: the heads; then all is synced, and proven
    written      on the loop: let go of it

Rows are not left to a thread: it would have the interpreter half of the time at best, much less on a busy machine, and
when many messages are deferred memory would fill with rows that wait for it (measured: 350,000, 100 MB). When more is
deferred than memory should hold, rows are written more often, without the rest: that makes room, and the next whole
write proves it.

**Reading**: whether the log has exactly the batch that a head has applied is asked by `committed.loading`; an old copy
of the folder is as good as a new one, only older.

**When it fails**: a write (disk full) is tried again while memory holds what changed; `overlaid` says how much. A read
(which only a broken disk or a bug explains) ends the use of the cache until the next start: each set gets its rows from
the log, once, and lives on in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from nsqha.cursor.cache.lmdb_partition import CachedPartition, LmdbRows, encode_head
from nsqha.cursor.cache.lmdb_proof import remove, unproven
from nsqha.cursor.cache.lmdb_tables import MAP_BYTES, ROWS_PER_TXN, MapFull, ReadPin, Tables, TablesError, TableUse
from nsqha.cursor.committed.loading import LoadedState, LogLike, load
from nsqha.cursor.committed.state import NEEDS_LOOK, EntryLike, PartitionState
from nsqha.cursor.deferred.layer import Layer, TableLost
from nsqha.cursor.deferred.store import DeferredStore
from nsqha.cursor.turns import InTurns
from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger

Read = Callable[[EntryLike], bytes | bytearray]

SLICE_ROWS = 250  # written at once on the loop: about a millisecond
SLICES_MAX = 8  # but at least such a part of what waits, so that it cannot come faster than it goes
BURIED_ROWS = 20_000  # deleted with one write
OVERLAY_ROWS_MAX = 1_000_000  # of changes that a disk does not take, before the node should take no messages
RETRY_SECONDS = 5.0
IDLE_SHARE = 9  # how many times as long as writes the pauses are
PAUSE_SECONDS_MAX = 30.0
_NOT_KNOWN = 0  # the uid of a channel that is being loaded
_TXN_ROWS = ROWS_PER_TXN // 20  # what a transaction costs, in rows

logger = Logger("cursor_cache")


@dataclass
class _Change:
    """A set whose changes are being written: it has `count` rows then."""

    held: DeferredStore
    rows: LmdbRows
    layer: Layer
    count: int
    left: list[int] = field(default_factory=list)  # offsets to be written still, the last first

    def __post_init__(self) -> None:
        self.again()

    def again(self) -> None:
        """Nothing is written."""
        self.left = sorted(self.layer.rows, reverse=True)

    def slice(self, limit: int) -> list[int]:
        """The next offsets to write."""
        taken = self.left[-limit:]
        del self.left[-limit:]
        return taken[::-1]


@dataclass(frozen=True)
class _PartitionWrite:
    """A partition that is being written."""

    partition: CachedPartition
    outline: PartitionState
    sets: list[tuple[int, int, int, int]]  # uid, number, count, carried
    changes: list[_Change]

    @property
    def log_id(self) -> int:
        return self.outline.applied.log_id

    def head(self) -> bytes:
        return encode_head(self.outline, self.sets)


@dataclass
class CacheWrite:
    """What one write consists of, and what came of it. One that is not `whole` writes rows only and proves nothing."""

    at: float
    whole: bool
    parts: list[_PartitionWrite]
    forgotten: list[PartitionKey]
    dead: list[int]
    buried: list[int] = field(default_factory=list)
    error: TablesError | None = None

    def __post_init__(self) -> None:
        self.changes = [change for part in self.parts for change in part.changes]

    def again(self) -> None:
        """Start from the beginning, as if nothing of it were written."""
        self.error = None
        for change in self.changes:
            change.again()


class LmdbCache:
    """The cache of one node.

    `load` and `write` block: they belong to the disk thread, not at once. The rest belongs to the loop.
    """

    def __init__(self, path: str, tables: Tables | None) -> None:
        """Use `open`. Without tables everything is kept in memory."""
        self.path = path
        self.tables = tables
        self.failure: str | None = None if tables is not None else "not opened"  # why it is not used any more
        self.delayed: str | None = None  # why the last write failed
        self.overfull = False  # so much could not be written that the node should take no messages
        self.on_full: Callable[[], None] = lambda: None  # called when `take` should be, soon
        self._partitions = InTurns[PartitionKey, CachedPartition]()
        self._dead: list[int] = []  # sets that belong to no channel, to be deleted
        self._numbers = itertools.count(max(tables.numbers() if tables is not None else [], default=0) + 1)
        self._forgotten: list[PartitionKey] = []
        self._retry: CacheWrite | None = None
        self._writing = False
        self.pressing = False  # a set has gathered so much that it should be written soon
        self._not_before = 0.0
        self._use = TableUse(tables)

    @classmethod
    def open(cls, path: str, *, map_bytes: int = MAP_BYTES) -> LmdbCache:
        """What is there if it is proven, else an empty one; one that works in memory if the disk refuses that too."""
        why = unproven(path)
        if why:
            logger.warning("cursor_cache_dropped", "%s: %s; channel state is read from the logs", path, why)
        try:
            if why is not None:
                remove(path)
            return cls(path, Tables.open(path, map_bytes=map_bytes))
        except (TablesError, OSError) as error:
            logger.warning("cursor_cache_failed", "%s cannot be used: %s; channel state is kept in memory", path, error)
            return cls(path, None)

    @property
    def usable(self) -> bool:
        return self.failure is None and not self._use.growing

    def close(self) -> None:
        """Close the tables; what is not written is in the logs."""
        self.failure = self.failure or "closed"
        if self.tables is not None:
            self.tables.close()

    # ---- partitions

    def load(
        self,
        key: PartitionKey,
        log: LogLike,
        read: Read,
        *,
        committed: int | None = None,
        later: tuple[LogLike, Read] | None = None,
        must_read: int = NEEDS_LOOK,
        distrusted: int | None = None,
    ) -> LoadedState:
        """The committed state of a partition: from here as far as its log vouches for it. It is written from now on.

        `committed`: the end of what is known to be committed, if that is not the whole log. `later`: the log itself, if
        `log_` is a snapshot of one in use; what is stored here is of an earlier log then, and not asked. `must_read`:
        flags of the batches that are not passed over. `distrusted`: as `committed.loading.load`; what is stored here is
        not asked then."""
        with self._use.loading():
            try:
                return self._load(key, log, read, committed, later, must_read, distrusted)
            except TableLost:
                return self._load(key, log, read, committed, later, must_read, distrusted)  # in memory

    def _load(
        self,
        key: PartitionKey,
        log: LogLike,
        read: Read,
        committed: int | None,
        later: tuple[LogLike, Read] | None,
        must_read: int,
        distrusted: int | None,
    ) -> LoadedState:
        recall_log, recall_read = later or (log, read)

        def recall(log_id: int) -> PartitionState:
            end = log_id + 1
            return load(recall_log, recall_read, end_log_id=end, must_read=must_read, distrusted=distrusted).state

        partition = CachedPartition(self, key, recall)
        stored = partition.stored if later is None else lambda: None
        loaded = load(
            log, read, stored, partition.new_deferred, committed=committed, must_read=must_read, distrusted=distrusted
        )
        partition.base_log_id = loaded.state.applied.log_id
        partition.state = loaded.state
        for uid, set_ in partition.sets():
            if isinstance(set_.table, LmdbRows):
                set_.table.uid = uid  # one that was drained did not know
        self._partitions[key] = partition
        return loaded

    def forget(self, key: PartitionKey) -> None:
        """The partition is gone."""
        partition = self._partitions.pop(key, None)
        if partition is not None:
            self._forgotten.append(key)
            self._dead += [set_.table.number for _, set_ in partition.sets() if isinstance(set_.table, LmdbRows)]

    def look_at(self, key: PartitionKey) -> None:
        """Its owner found something to do there: what its state has become is written next time."""
        self._partitions.turns.add(key)

    def give_back(self, key: PartitionKey, state: PartitionState) -> None:
        """A state that was loaded and is of no use; nothing, if another one has its place."""
        partition = self._partitions.get(key)
        if partition is not None and partition.state is state:
            self.forget(key)

    def sweep(self) -> None:
        """All partitions have been loaded: what else is there belongs to no channel and will be deleted."""
        if self.tables is None or self.failure is not None:
            return
        sets = [set_ for partition in self._partitions.values() for _, set_ in partition.sets()]
        mine = {set_.table.number for set_ in sets if isinstance(set_.table, LmdbRows)}
        try:
            self._dead = [number for number in self.tables.numbers() if number not in mine]
            self._forgotten = [key for key in self.tables.partitions() if key not in self._partitions]
        except TablesError as error:
            self.lost(error)

    @property
    def overlaid(self) -> int:
        """Changes of deferred messages that only memory has."""
        return sum(set_.overlaid for partition in list(self._partitions.values()) for _, set_ in partition.sets())

    # ---- what sets ask for

    def press(self) -> None:
        """A set is full."""
        self.pressing = True
        self.on_full()

    def drain(self, partition: CachedPartition, held: DeferredStore) -> None:
        """Write the rows of a set that is being loaded, so that memory stays small."""
        change = self._freeze(partition, _NOT_KNOWN, held)
        if change is None:
            return
        try:
            while change.left:
                change.rows.tables.write_rows([(change.rows.number, change.layer.rows, change.slice(ROWS_PER_TXN))])
        except TablesError:
            held.unfreeze()
            held.room = 1 << 62  # memory has to do until the first write
        else:
            held.thaw(change.layer, change.count)

    def bury(self, number: int) -> None:
        """Delete this set's rows with a later write."""
        self._dead.append(number)

    def pin(self) -> ReadPin | None:
        """The tables as they are now, until the next write begins or ends."""
        return self._use.pin()

    def lost(self, error: Exception) -> None:
        """The tables cannot be read: go on in memory."""
        if self.failure is not None:
            return
        self.failure = str(error)
        self._retry = None
        logger.error("cursor_cache_lost", "%s cannot be read: %s; channel state is kept in memory", self.path, error)
        for partition in list(self._partitions.values()):
            partition.settle_in_memory()

    # ---- writing

    def take(self, now: float, *, force: bool = False) -> CacheWrite | None:
        """What should be written now; None if there is nothing, or it is too early (`force`: it never is).

        When sets are full it is never too early for rows, which need not wait for a disk to make room in memory.
        """
        if self._writing or self.failure is not None:
            return None
        early = now < self._not_before and not force
        if early and (self.delayed is not None or not self.pressing):
            return None
        taken = self._retry or self._gather(now, whole=not early, everything=force)
        if taken is None:
            return None
        if taken.error is not None:
            taken.again()
        taken.at = now
        self._writing = True
        self._use.forget_pin()
        return taken

    def _gather(self, now: float, *, whole: bool, everything: bool) -> CacheWrite | None:
        known = self._partitions
        changed = [
            partition
            for partition in (known.values() if self.pressing or everything else known.turns.choose(known))
            if (state := partition.state) is not None and state.applied.log_id != partition.written_log_id
        ]
        known.turns.busy(partition.key for partition in changed)
        parts = [part for partition in changed if (part := self._part(partition)) is not None]
        self.pressing = False
        if not whole:
            return CacheWrite(now, False, parts, [], []) if parts else None
        if not (parts or self._dead or self._forgotten):
            return None
        taken = CacheWrite(now, True, parts, self._forgotten, self._dead[:])
        self._forgotten = []
        return taken

    def _part(self, partition: CachedPartition) -> _PartitionWrite | None:
        state = partition.state
        if state is None or state.applied.log_id == partition.written_log_id:
            return None
        changes, sets = [], []
        for channel in state.channels.values():
            held = channel.deferred
            if not isinstance(held, DeferredStore):
                return None  # it was loaded while the cache could not be used
            change = self._freeze(partition, channel.uid, held)
            if change is not None:
                changes.append(change)
            if held.count:
                assert isinstance(held.table, LmdbRows)
                sets.append((channel.uid, held.table.number, held.count, held.carried))
        return _PartitionWrite(partition, state.outline(), sets, changes)

    def _freeze(self, partition: CachedPartition, uid: int, held: DeferredStore) -> _Change | None:
        layer = held.freeze()
        if layer is None or self.tables is None:
            return None
        if held.table is None:
            held.table = LmdbRows(self.tables, partition, uid, next(self._numbers))
        assert isinstance(held.table, LmdbRows)
        return _Change(held, held.table, layer, held.count)

    def write_rows(self, taken: CacheWrite, limit: int = 0) -> bool:
        """Write some rows (`limit` 0: as many as seems right). Whether there are none left, or it failed."""
        assert self.tables is not None
        left = limit or max(SLICE_ROWS, sum(change.held.overlaid for change in taken.changes) // SLICES_MAX)
        slices = []
        for change in taken.changes:
            if change.left and left > 0:
                offsets = change.slice(left)
                left -= len(offsets)
                slices.append((change.rows.number, change.layer.rows, offsets))
        try:
            if slices:
                self.tables.write_rows(slices)
        except TablesError as error:
            taken.error = error
        return left > 0 or taken.error is not None

    def write(self, taken: CacheWrite) -> None:
        """Write what is left of it, and prove it if it is whole; whether that worked is in `taken`."""
        tables = self.tables
        assert tables is not None
        while not self.write_rows(taken, ROWS_PER_TXN):
            pass
        if taken.error is not None or not taken.whole:
            return
        try:
            heads = dict.fromkeys(taken.forgotten, b"")
            tables.write_heads(heads | {part.partition.key: part.head() for part in taken.parts})
            self._bury(tables, taken)
            tables.sync()
        except TablesError as error:
            taken.error = error

    def _bury(self, tables: Tables, taken: CacheWrite) -> None:
        """Delete rows of sets that are gone, some at a time."""
        left = BURIED_ROWS
        for number in taken.dead:
            deleted = ROWS_PER_TXN
            while deleted == ROWS_PER_TXN:
                if left <= 0 or self.pressing:
                    return
                deleted = tables.delete_rows(number)
                left -= deleted + _TXN_ROWS
            taken.buried.append(number)

    def written(self, taken: CacheWrite, now: float) -> None:
        """The write has ended: let go of what is at rest now, or keep it for another try."""
        self._writing = False
        self._use.forget_pin()
        if self.failure is not None:
            return
        if taken.error is not None:
            self._failed(taken, taken.error, now)
            return
        self._retry = None
        self.overfull = False
        if self.delayed is not None:
            logger.info("cursor_cache_recovered", "%s is written again", self.path)
            self.delayed = None
        if taken.whole:
            self._not_before = now + min(IDLE_SHARE * (now - taken.at), PAUSE_SECONDS_MAX)
            self._dead = [number for number in self._dead if number not in taken.buried]
        for part in taken.parts:
            part.partition.base_log_id = part.log_id
            if taken.whole:
                part.partition.written_log_id = part.log_id
            for change in part.changes:
                change.held.thaw(change.layer, change.count)

    def _failed(self, taken: CacheWrite, error: TablesError, now: float) -> None:
        self._retry = taken
        self.overfull = self.overlaid > OVERLAY_ROWS_MAX
        self._not_before = now + RETRY_SECONDS
        if isinstance(error, MapFull) and _grow(self._use, self.path):
            self._not_before = now
        elif self.delayed is None:
            self.delayed = str(error)
            text = "%s cannot be written: %s; memory holds what changes until it can"
            logger.warning("cursor_cache_delayed", text, self.path, error)


def _grow(use: TableUse, path: str) -> bool:
    try:
        return use.grow()
    except TablesError as error:
        logger.warning("cursor_cache_full", "%s cannot grow: %s", path, error)
        return False
