"""The cache's database: three tables in one LMDB environment, and the only user of lmdb.

Integers are big endian, so that keys sort by value. Every deferred set has a number of its own, never used again.

    rows     number u32, offset u64                        ->  due_ns i64, attempts u16 [, position u64]
    due      number u32, due_ns + 2^63 u64, offset u64     ->  nothing
    heads    topic uid u64, partition u16, piece u16       ->  a slice of what is known of a partition beside its rows

Transactions are not synced one by one: a write is many of them, then `sync`, then its proof (`lmdb_proof`). Small ones,
because their dirty pages are what costs memory; what is only read are the kernel's pages. A read transaction ends with
the call that began it, but for a `ReadPin`.

Reading from any thread; a writer waits for the one before it. What goes wrong is a TablesError; MapFull if `grow` may
help.
"""

from __future__ import annotations

import os
import struct
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import lmdb

from nsqha.cursor.cache.lmdb_proof import prove, remove
from nsqha.cursor.deferred.deferred_set import Deferred, DueKey

T = TypeVar("T")

FOLDER_MODE = 0o750  # as the folders of logs: bodies of delayed messages are in it
MAP_BYTES = 64 << 30  # address space, not memory; doubled when it is used up
MAP_BYTES_SMALL = 1 << 30  # where address space is limited
READERS_MAX = 1024
ROWS_PER_TXN = 2_000
PIECE_BYTES = 32 << 10
SPARSE_BYTES = 16 << 20  # a file above this that is mostly free is written again when it is opened

_U32 = struct.Struct(">I")
_ROW_KEY = struct.Struct(">IQ")
_DUE_KEY = struct.Struct(">IQQ")
_ROW = struct.Struct(">qH")
_ROW_CARRIED = struct.Struct(">qHQ")
_HEAD_KEY = struct.Struct(">QHH")
_MIDDLE = 1 << 63
_unpack_row = _ROW.unpack
_unpack_carried = _ROW_CARRIED.unpack
_int = int.from_bytes


class TablesError(Exception):
    """The database could not be read or written."""


class MapFull(TablesError):
    """The map is too small for what was to be written."""


class ReadPin:
    """A read transaction that lasts as long as this object. The file cannot reuse pages nor grow its map meanwhile."""

    def __init__(self, txn: Any) -> None:
        self.txn = txn


def _due_key(number: int, ref: Deferred) -> bytes:
    return _DUE_KEY.pack(number, ref.due_ns + _MIDDLE, ref.offset)


def _row(ref: Deferred) -> bytes:
    if ref.position:
        return _ROW_CARRIED.pack(ref.due_ns, ref.attempts, ref.position)
    return _ROW.pack(ref.due_ns, ref.attempts)


def _ref(offset: int, value: bytes, *, _new: Callable[..., Deferred] = tuple.__new__) -> Deferred:
    # Made as a tuple, which takes a third of the time: reading a million rows is mostly this.
    if len(value) == 10:
        return _new(Deferred, (offset, *_unpack_row(value), 0))
    return _new(Deferred, (offset, *_unpack_carried(value)))


class Tables:
    """One open environment."""

    def __init__(self, env: lmdb.Environment) -> None:
        """Use `open`."""
        self._env = env
        self._rows, self._due, self._heads = (env.open_db(name) for name in (b"rows", b"due", b"heads"))

    @classmethod
    def open(cls, path: str, *, map_bytes: int = MAP_BYTES) -> Tables:
        """What is at `path`, which must be proven, or new. TablesError if that cannot be."""
        try:
            os.makedirs(path, FOLDER_MODE, exist_ok=True)
            env = _environment(path, map_bytes)
            if _sparse(env):
                env.copy(_emptied(f"{path}/copy"), compact=True)
                env.close()
                os.replace(f"{path}/copy/data.mdb", f"{path}/data.mdb")
                _emptied(f"{path}/copy")
                prove(path)
                env = _environment(path, map_bytes)
            return cls(env)
        except (lmdb.Error, OSError, MemoryError) as error:
            raise TablesError(str(error)) from error

    def close(self) -> None:
        """Pins end here too."""
        self._env.close()

    # ---- reading rows

    def _read(self, pin: ReadPin | None, ask: Callable[[Any], T]) -> T:
        try:
            return ask(pin.txn if pin is not None else self._env.begin())
        except lmdb.Error as error:
            raise TablesError(str(error)) from error

    def get(self, number: int, offset: int, pin: ReadPin | None = None) -> Deferred | None:
        """The row of a message in set `number`."""
        key = _ROW_KEY.pack(number, offset)
        value = self._read(pin, lambda txn: txn.get(key, db=self._rows))
        return None if value is None else _ref(offset, value)

    def by_offset(self, number: int, first: int, limit: int, pin: ReadPin | None = None) -> list[Deferred]:
        """Up to `limit` rows from offset `first` on."""
        start = _ROW_KEY.pack(number, first)
        end = _U32.pack(number + 1)

        def ask(txn: Any) -> list[Deferred]:
            found: list[Deferred] = []
            cursor = txn.cursor(db=self._rows)
            if cursor.set_range(start):
                for key, value in islice(cursor.iternext(), limit):
                    if key >= end:
                        break
                    found.append(_ref(_int(key[4:]), value))
            return found

        return self._read(pin, ask)

    def offsets(self, number: int, first: int, end: int, limit: int, pin: ReadPin | None = None) -> list[int]:
        """Up to `limit` offsets of rows in [first, end), in order; nothing of the rows is read."""
        start = _ROW_KEY.pack(number, first)

        def ask(txn: Any) -> list[int]:
            cursor = txn.cursor(db=self._rows)
            if not cursor.set_range(start):
                return []
            keys = b"".join(islice(cursor.iternext(values=False), limit))
            found = [offset for of, offset in _ROW_KEY.iter_unpack(keys) if of == number]
            return found[: bisect_left(found, end)]

        return self._read(pin, ask)

    def by_due(self, number: int, after: DueKey, limit: int, pin: ReadPin | None = None) -> list[Deferred]:
        """Up to `limit` rows behind (due_ns, offset), in that order."""
        start = _DUE_KEY.pack(number, after[0] + _MIDDLE, after[1] + 1)

        def ask(txn: Any) -> list[Deferred]:
            found = []
            for key, _ in islice(_walk(txn, self._due, start, 4), limit):
                value = txn.get(key[:4] + key[12:], db=self._rows)
                if value is None:
                    raise TablesError(f"set {number} has a due time of a message that it does not hold")
                found.append(_ref(_int(key[12:]), value))
            return found

        return self._read(pin, ask)

    def highest(self, number: int, pin: ReadPin | None = None) -> int:
        """The highest offset of a set that has rows."""

        def ask(txn: Any) -> int:
            cursor = txn.cursor(db=self._rows)
            found = cursor.prev() if cursor.set_range(_U32.pack(number + 1)) else cursor.last()
            assert found, f"set {number} has no rows"
            return int.from_bytes(cursor.key()[4:])

        return self._read(pin, ask)

    def numbers(self) -> list[int]:
        """The numbers of the sets that have rows."""

        def ask(txn: Any) -> list[int]:
            numbers = []
            cursor = txn.cursor(db=self._rows)
            found = cursor.first()
            while found:
                numbers.append(_U32.unpack_from(cursor.key())[0])
                found = cursor.set_range(_U32.pack(numbers[-1] + 1))
            return numbers

        return self._read(None, ask)

    def pin(self) -> ReadPin | None:
        """The tables as they are now; None if there are too many pins."""
        try:
            return ReadPin(self._env.begin())
        except lmdb.ReadersFullError:
            return None
        except lmdb.Error as error:
            raise TablesError(str(error)) from error

    # ---- reading heads

    def head(self, topic_uid: int, partition: int) -> bytes:
        """What is stored of a partition; empty if nothing is."""
        start = _HEAD_KEY.pack(topic_uid, partition, 0)
        return self._read(None, lambda txn: b"".join(value for _, value in _walk(txn, self._heads, start, 10)))

    def partitions(self) -> set[tuple[int, int]]:
        """The topic uid and partition of each head."""
        return self._read(None, lambda txn: {_HEAD_KEY.unpack(key)[:2] for key, _ in txn.cursor(db=self._heads)})

    # ---- writing

    def _write(self, work: Callable[[Any], T]) -> T:
        try:
            with self._env.begin(write=True) as txn:
                return work(txn)
        except lmdb.MapFullError as error:
            raise MapFull(str(error)) from error
        except (lmdb.Error, OSError) as error:
            raise TablesError(str(error)) from error

    def write_rows(self, changes: Iterable[tuple[int, Mapping[int, Deferred | None], Iterable[int]]]) -> None:
        """Put and remove rows: of each set its number, the rows (None: gone) and which of them. One transaction."""
        rows, due = self._rows, self._due

        def work(txn: Any) -> None:
            for number, changed, offsets in changes:
                for offset in offsets:
                    key, ref = _ROW_KEY.pack(number, offset), changed[offset]
                    old = txn.replace(key, _row(ref), db=rows) if ref is not None else txn.pop(key, db=rows)
                    if old is not None:
                        txn.delete(_due_key(number, _ref(offset, old)), db=due)
                    if ref is not None:
                        txn.put(_due_key(number, ref), b"", db=due)

        self._write(work)

    def delete_rows(self, number: int) -> int:
        """Remove rows of a set, ROWS_PER_TXN at most; how many."""

        def work(txn: Any) -> int:
            found = list(islice(_walk(txn, self._rows, _U32.pack(number), 4), ROWS_PER_TXN))
            for key, value in found:
                txn.delete(_due_key(number, _ref(_int(key[4:]), value)), db=self._due)
                txn.delete(key, db=self._rows)
            return len(found)

        return self._write(work)

    def write_heads(self, heads: Mapping[tuple[int, int], bytes]) -> None:
        """Replace what is stored of these partitions; an empty head removes it."""

        def work(txn: Any) -> None:
            for (topic_uid, partition), head in heads.items():
                wanted = {
                    _HEAD_KEY.pack(topic_uid, partition, n): head[at : at + PIECE_BYTES]
                    for n, at in enumerate(range(0, len(head), PIECE_BYTES))
                }
                for key, value in list(_walk(txn, self._heads, _HEAD_KEY.pack(topic_uid, partition, 0), 10)):
                    if key not in wanted:
                        txn.delete(key, db=self._heads)
                    elif wanted[key] == value:
                        del wanted[key]
                for key, value in wanted.items():
                    txn.put(key, value, db=self._heads)

        self._write(work)

    def sync(self) -> None:
        """Everything written so far is durable, and proven."""
        try:
            self._env.sync(True)
            prove(self._env.path())
        except (lmdb.Error, OSError) as error:
            raise TablesError(str(error)) from error

    def grow(self) -> None:
        """Double the map. LMDB moves it, so there must be no transaction and no pin anywhere."""
        try:
            self._env.set_mapsize(2 * self._env.info()["map_size"])
        except lmdb.Error as error:
            raise TablesError(str(error)) from error


class TableUse:
    """Reads of the tables that take longer than one call: loads and pins. Only while there are none the map grows."""

    def __init__(self, tables: Tables | None) -> None:
        self.growing = False
        self._tables = tables
        self._loads = 0
        self._pin: weakref.ref[ReadPin] | None = None  # the one that is shared now
        self._pins: weakref.WeakSet[ReadPin] = weakref.WeakSet()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count a load, which goes over the rows, as a reader while it lasts."""
        self._loads += 1
        try:
            yield
        finally:
            self._loads -= 1

    def pin(self) -> ReadPin | None:
        """The tables as they are now, shared by all who ask before `forget_pin`."""
        pin = self._pin() if self._pin is not None else None
        if pin is None and self._tables is not None and (pin := self._tables.pin()) is not None:
            self._pin = weakref.ref(pin)
            self._pins.add(pin)
        return pin

    def forget_pin(self) -> None:
        """The tables change: `pin` returns another one from now on."""
        self._pin = None

    def grow(self) -> bool:
        """Double the map; False while there are readers. TablesError if it cannot grow."""
        self.growing = True  # first: a load that begins from here on leaves the tables alone
        try:
            if self._loads or self._pins or self._tables is None:
                return False
            self._tables.grow()
            return True
        finally:
            self.growing = False


def _walk(txn: Any, table: Any, start: bytes, same: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values from `start` on, whose first `same` bytes are those of `start`."""
    cursor = txn.cursor(db=table)
    prefix = start[:same]
    if cursor.set_range(start):
        for key, value in cursor.iternext():
            if key[:same] != prefix:
                return
            yield key, value


def _environment(path: str, map_bytes: int) -> lmdb.Environment:
    size = os.path.getsize(f"{path}/data.mdb") if os.path.exists(f"{path}/data.mdb") else 0
    if os.path.exists(f"{path}/lock.mdb"):
        os.remove(f"{path}/lock.mdb")  # of a process that is gone: the lock of the data folder says so

    def opened(map_size: int) -> lmdb.Environment:
        return lmdb.open(
            path,
            map_size=map_size,
            mode=FOLDER_MODE,  # files get it without the x bits
            max_dbs=3,
            max_readers=READERS_MAX,
            sync=False,
            metasync=False,
            readahead=False,
        )

    try:
        return opened(max(map_bytes, 2 * size))
    except (lmdb.MemoryError, MemoryError):
        return opened(max(min(map_bytes, MAP_BYTES_SMALL), 2 * size))


def _sparse(env: lmdb.Environment) -> bool:
    """Whether most of a big file is free."""
    pages = env.info()["last_pgno"] + 1
    if pages * env.stat()["psize"] <= SPARSE_BYTES:
        return False
    with env.begin() as txn:
        names: list[Any] = [name for name, _ in txn.cursor()]
        stats = [txn.stat(env.open_db(name, txn=txn, create=False)) for name in names]
    return 4 * sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats) < pages


def _emptied(path: str) -> str:
    """An empty folder there."""
    remove(path)
    os.makedirs(path, FOLDER_MODE, exist_ok=True)
    return path
