"""Reads the log from files: the folder of a node that is not running, or a copy of one.

    <path>/lock   topics/<name>-<topic uid>/<partition>/00000000000000000000.segment, .commitlog, ..

No file says what is committed. A pin ends with the last batch that verifies, entry and frames: this node would start
there. In a cluster its last batches may never have been acknowledged, and other nodes may not have them.

`pins` finds logs, in the planner; it uses the broker's own reader. `FileRuns` reads ranges, in tasks: it uses only the
format (docs/disk-format.md). A pair's name is the position of its first byte, its slot 0 a copy of the entry before.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark_nsqha.model import (
    ENTRY_BYTES,
    CutPoint,
    FetchedRun,
    Gone,
    NotVerified,
    PartitionLife,
    PinnedPartition,
    ReadFailed,
    Split,
)
from pyspark_nsqha.reading.runs import RUN_BYTES, Frames, borders_of, run_end

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from nsqha.commitlog.entry import Entry
    from nsqha.commitlog.reading.lookup import LogReader

ENTRIES_BYTES: Final = 4 << 20  # read at a time
LOOKED_AT_MAX: Final = 1000  # batches that are searched for the first message

_TOPIC = re.compile(r"([.a-zA-Z0-9_-]{1,64})-([0-9a-f]{16})")
_PARTITION = re.compile(r"0|[1-9][0-9]{0,3}")
_FILE = re.compile(r"([0-9]{20})\.(segment|commitlog|dropping)")
_FRAME = struct.Struct(">II")
_MESSAGE = 2
_ID = slice(18, 34)  # of a message's frame


# ---- in the planner


def pins(path: str, wanted: Callable[[str, int], bool] = lambda topic, partition: True) -> tuple[PinnedPartition, ...]:
    """The partitions in a data folder for which `wanted(topic, partition)` is true, by topic and number, each up to the
    last batch that verifies.

    ReadFailed: there is no such folder, a process uses it, or a log in it cannot be read."""
    path = os.path.abspath(path)
    topics = os.path.join(path, "topics")
    if not os.path.isdir(topics):
        inside = sorted(entry.name for entry in _folders(path) if os.path.isdir(os.path.join(entry.path, "topics")))
        hint = f"; its folders {', '.join(inside)} have one: name one of them" if inside else ""
        raise ReadFailed(f"path={path}: there are no logs in it, a data folder has a folder `topics`{hint}")
    check_unlocked(path)
    found: dict[tuple[str, int], PinnedPartition] = {}
    for folder in _folders(topics):
        named = _TOPIC.fullmatch(folder.name)
        for inner in _folders(folder.path) if named else []:
            if not named or not _PARTITION.fullmatch(inner.name) or not wanted(named[1], int(inner.name)):
                continue
            key = named[1], int(inner.name)
            if key in found:
                other = os.path.basename(os.path.dirname(found[key].path))
                raise ReadFailed(
                    f"path={path}: {folder.name} and {other} are of two topics with one name; move one of them away"
                )
            pin = _pin(key[0], int(named[2], 16), key[1], inner.path)
            if pin is not None:
                found[key] = pin
    return tuple(found[key] for key in sorted(found))


def check_unlocked(path: str) -> None:
    """Check that no process uses the data folder. ReadFailed."""
    try:
        fd = os.open(os.path.join(path, "lock"), os.O_RDONLY)
    except FileNotFoundError:
        return  # a copy
    except OSError as error:
        raise ReadFailed(f"path={path}: {error.strerror}: {error.filename}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ReadFailed(
            f"path={path}: a broker uses this folder; read from it with the option brokers, or stop it first"
        ) from None
    finally:
        os.close(fd)


def _folders(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted((entry for entry in entries if entry.is_dir()), key=lambda entry: entry.name)
    except OSError as error:
        raise ReadFailed(f"path={path}: {error.strerror}") from None


def _pin(topic: str, uid: int, partition: int, path: str) -> PinnedPartition | None:
    """The pin of one partition; None if its files are being removed."""
    from nsqha.commitlog.entry import Place
    from nsqha.commitlog.reading.cuts import cut_points
    from nsqha.commitlog.reading.lookup import LogIdentity, LogReader
    from nsqha.commitlog.storage import OsStorage
    from nsqha.errors import LogCorrupt, NotFound

    try:
        log = LogReader.open(OsStorage(), path, LogIdentity(uid, partition))
        last = _last_good(log)
        end = Place(last.log_id + 1, last.end_offset, last.end_position)
        cuts = [CutPoint(*cut) for cut in cut_points(log, log.start, end)]
        id_base = _id_base(log, end.log_id)
    except NotFound:
        return None
    except (LogCorrupt, OSError) as error:
        raise ReadFailed(
            f"{topic}/{partition}: {error}; run `nsqha log verify`, or start the node, which repairs what it can"
        ) from None
    identity = PartitionLife(topic, uid, partition, id_base)
    return PinnedPartition(identity, cuts[0], cuts[-1], last.epoch, last.chain, tuple(cuts), path=path)


def offsets_for_times(pin: PinnedPartition, times_ns: Iterable[int]) -> dict[int, int]:
    """For each time the offset of the first message that is not older; the pin's end if there is none. ReadFailed."""
    from nsqha.commitlog.reading.lookup import LogIdentity, LogReader
    from nsqha.commitlog.storage import OsStorage
    from nsqha.errors import LogCorrupt, NotFound

    found: dict[int, int] = {}
    try:
        log = LogReader.open(OsStorage(), pin.path, LogIdentity(pin.identity.topic_uid, pin.identity.partition))
        for time_ns in times_ns:
            entry = log.entry_for_time(time_ns)
            offset = pin.end.offset if entry is None else entry.first_offset
            found[time_ns] = min(max(offset, pin.start.offset), pin.end.offset)
    except (LogCorrupt, NotFound, OSError) as error:
        raise ReadFailed(f"{pin.identity.topic}/{pin.identity.partition}: {error}; run `nsqha log verify`") from None
    return found


def _last_good(log: LogReader) -> Entry:
    """The last entry before anything torn. What was durable cannot be torn, and older files were synced."""
    from nsqha.commitlog.reading.lookup import verifies
    from nsqha.errors import LogCorrupt

    last = log.last
    if last is None:
        return log.entry_before(log.end.log_id)
    pairs = log.pairs
    first = max(last.durable, pairs[max(len(pairs) - 2, 0)].first.log_id, log.start.log_id)
    if first > last.log_id:
        return last
    good = log.entry_before(first)
    with suppress(LogCorrupt):
        for entry in log.entries(first, last.log_id + 1):
            data = log.files.pair_of(entry.log_id).read_data(entry.position, entry.size)
            if not (entry.follows(good) and entry.chained_to(good)) or not (entry.lost or verifies(entry, data)):
                break
            good = entry
    return good


def _id_base(log: LogReader, end_log_id: int) -> int:
    """What the partition adds to an offset for an id, from its first readable message; 0 if there is none."""
    from nsqha.commitlog.entry import UNREADABLE
    from nsqha.errors import LogCorrupt

    with suppress(LogCorrupt):
        looked = 0
        for entry in log.entries(log.start.log_id, end_log_id):
            if not entry.count or entry.flags & UNREADABLE:
                continue
            data = log.files.pair_of(entry.log_id).read_data(entry.position, entry.size)
            at = 0
            while at + _FRAME.size <= len(data):
                size, kind = _FRAME.unpack_from(data, at)
                if kind == _MESSAGE:
                    with suppress(ValueError):
                        return int(data[at:][_ID], 16) - entry.first_offset
                at += 4 + size
            looked += 1
            if looked == LOOKED_AT_MAX:
                break
    return 0


# ---- in a task


class _Pair(NamedTuple):
    position: int
    anchor_log_id: int
    end_log_id: int


class _Block(NamedTuple):
    """Entries that were read at once."""

    first_log_id: int
    entries: memoryview
    borders: npt.NDArray[np.int64]


class FileRuns:
    """The runs of one split, read from a partition's folder; `pyspark_nsqha.reading.runs.Runs`."""

    def __init__(self, split: Split, *, run_bytes: int = RUN_BYTES) -> None:
        self._split = split
        self._run_bytes = run_bytes
        self._next = split.first_log_id
        self._last: FetchedRun | None = None
        self._rejected = False
        self._frames = Frames()
        self._pairs: list[_Pair] | None = None
        self._pair: _Pair | None = None  # whose files are open
        self._fds: tuple[int, int] | None = None  # commitlog, segment
        self._block: _Block | None = None

    def __iter__(self) -> Iterator[FetchedRun]:
        return self

    def __next__(self) -> FetchedRun:
        if self._last is not None:
            self._rejected, self._last = False, None
        if self._next >= self._split.end_log_id:
            self.close()
            raise StopIteration
        try:
            run = self._read(self._next)
        except OSError as error:
            self.close()
            raise ReadFailed(f"{self._what()}: {error.filename or self._split.path}: {error.strerror}") from None
        self._next += len(run.entries) // ENTRY_BYTES
        self._last = run
        return run

    def retry_other(self, why: str) -> bool:
        """See `Runs`: there is only this file, and it is read once more."""
        if self._rejected or self._last is None:
            return False
        self._rejected, self._next, self._last = True, self._last.first_log_id, None
        self._block = None
        return True

    def close(self) -> None:
        """See `Runs`."""
        for fd in self._fds or ():
            os.close(fd)
        self._fds = self._pair = self._block = None

    def __del__(self) -> None:
        self.close()

    def _what(self) -> str:
        split = self._split
        place = f"{split.identity.topic}/{split.identity.partition}"
        return f"{place} offsets [{split.first}, {split.end}), from log id {self._next} in {split.path}"

    def _read(self, log_id: int) -> FetchedRun:
        commitlog, segment, pair = self._open(log_id)
        block = self._block
        if block is None or not block.first_log_id <= log_id < block.first_log_id + len(block.borders) - 1:
            block = self._block = self._entries(commitlog, pair, log_id)
        index = log_id - block.first_log_id
        end = run_end(block.borders, index, self._run_bytes)
        entries = block.entries[index * ENTRY_BYTES : end * ENTRY_BYTES]
        size = int(block.borders[end] - block.borders[index])
        have = 0
        for first, stop in _pieces(entries, block.borders[index : end + 1], pair.position):
            if first < 0 or stop > os.fstat(segment).st_size:
                raise self._not_verified("its segment ends before it, or its entry is damaged")
            while first < stop:
                room = self._frames.room(have, size)[: stop - first]
                got = os.preadv(segment, [room], first)
                if not got:
                    raise self._not_verified("its segment ends before it")
                have, first = have + got, first + got
        return FetchedRun(log_id, entries, self._frames.view[:size])

    def _entries(self, commitlog: int, pair: _Pair, log_id: int) -> _Block:
        """The split's entries in this pair from `log_id` on, ENTRIES_BYTES at most."""
        n = min(self._split.end_log_id, pair.end_log_id) - log_id
        entries = os.pread(commitlog, min(n * ENTRY_BYTES, ENTRIES_BYTES), (log_id - pair.anchor_log_id) * ENTRY_BYTES)
        entries = entries[: len(entries) - len(entries) % ENTRY_BYTES]
        if not entries:
            raise self._not_verified("its commitlog ends before it")
        return _Block(log_id, memoryview(entries), borders_of(entries))

    def _not_verified(self, why: str) -> NotVerified:
        split = self._split
        return NotVerified(f"{self._what()}: {why}; run `nsqha log verify`", planned=(split.first, split.end))

    def _open(self, log_id: int) -> tuple[int, int, _Pair]:
        """The files that have this entry."""
        if self._pair is None or self._fds is None or not self._pair.anchor_log_id < log_id < self._pair.end_log_id:
            self.close()
            if self._pairs is None:
                self._pairs = _pairs(self._split.path)
            at = bisect_left(self._pairs, log_id, key=lambda pair: pair.anchor_log_id) - 1
            if at < 0:
                raise Gone(f"{self._what()}: the log starts after it", planned=(self._split.first, self._split.end))
            if log_id >= self._pairs[at].end_log_id:
                raise self._not_verified("its commitlog ends before it")
            stem = os.path.join(self._split.path, f"{self._pairs[at].position:020d}")
            commitlog = os.open(f"{stem}.commitlog", os.O_RDONLY)
            try:
                self._fds = commitlog, os.open(f"{stem}.segment", os.O_RDONLY)
            except OSError:
                os.close(commitlog)
                raise
            self._pair = self._pairs[at]
        return *self._fds, self._pair


def _pairs(path: str) -> list[_Pair]:
    """The pairs of a folder, oldest first. A pair with an impossible anchor is left out: reads of it fail."""
    names = [found for name in os.listdir(path) if (found := _FILE.fullmatch(name))]
    dropping = max((int(found[1]) for found in names if found[2] == "dropping"), default=-1)
    anchors: list[tuple[int, int, int]] = []
    for position in sorted(int(found[1]) for found in names if found[2] == "commitlog"):
        if position <= dropping:
            continue
        fd = os.open(os.path.join(path, f"{position:020d}.commitlog"), os.O_RDONLY)
        try:
            log_id = int.from_bytes(os.pread(fd, 8, 0))
            slots = os.fstat(fd).st_size // ENTRY_BYTES
        finally:
            os.close(fd)
        if slots and (not anchors or log_id >= anchors[-1][1]):
            anchors.append((position, log_id, log_id + slots))
    ends = [log_id + 1 for _, log_id, _ in anchors[1:]]
    return [
        _Pair(position, log_id, min(end, ends[i]) if i < len(ends) else end)
        for i, (position, log_id, end) in enumerate(anchors)
    ]


def _pieces(entries: memoryview, borders: npt.NDArray[np.int64], base: int) -> list[tuple[int, int]]:
    """(first, end) in the segment of the frames of these entries, adjacent ones merged; not checked against it."""
    import numpy as np

    sizes = np.diff(borders)
    there = sizes > 0
    positions = np.frombuffer(entries, np.uint8).reshape(-1, ENTRY_BYTES)[:, 24:32]
    firsts = np.ascontiguousarray(positions).view(">i8").ravel()[there].astype(np.int64) - base
    ends = firsts + sizes[there]
    begins = np.ones(len(firsts), bool)
    begins[1:] = firsts[1:] != ends[:-1]
    stops = np.append(begins[1:], True)[: len(ends)]
    return list(zip(firsts[begins].tolist(), ends[stops].tolist(), strict=True))
