"""Finding and reading batches of one partition's log: by log id, by offset, by time, and in runs for a backlog.

The commitlog is the index: entries have a fixed size and a dense ordinal, offsets and times rise with it, so a look-up
is a bisection over the pairs (in memory: one anchor each) and then over the slots of one commitlog. Nothing else is
kept in memory, however long the log is.

A single message is looked for where it would be if all batches were alike, and its batch is read alone: retries come
back in any order. Those that are near each other get a run, as a reader of a backlog does.

An entry or a batch that does not verify raises `BatchCorrupt`, which says where reading may go on. It does not stand
in the way of look-ups that do not need it. Entries without messages are never the answer to an offset or a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from operator import or_
from typing import TYPE_CHECKING

from nsqha.commitlog.entry import (
    ENTRY_BYTES,
    FAULTY,
    UNREADABLE,
    BatchCorrupt,
    Entry,
    Place,
    columns,
    follow_each_other,
)
from nsqha.commitlog.files.directory import find
from nsqha.commitlog.files.pair_list import PairList
from nsqha.commitlog.files.pairs import BLOCK_SLOTS, COMMITLOG, LogIdentity, Pair
from nsqha.commitlog.reading.reader import RUN_BYTES, Batch, BatchCache
from nsqha.errors import LogCorrupt, NotFound, NotInLog
from nsqha.frames import LOST
from nsqha.hot import crc32

if TYPE_CHECKING:
    from nsqha.commitlog.storage import Storage

__all__ = ["LogIdentity", "LogReader", "PairInfo", "bad_data", "hole", "verifies"]

RUN_SLOTS = 4096  # entries that a run looks at, at most
NEAR_MESSAGES = 1000  # single messages that are read so near to each other are not the only ones there
READERS = 8  # of single messages, at places of their own, that are told from random ones
COUNT, SIZE, CRC, FLAGS = (Entry._fields.index(name) for name in ("count", "size", "crc", "flags"))


@dataclass(frozen=True, slots=True)
class PairInfo:
    """One pair of files, for retention and statistics. `newest_ns` is the timestamp of its last batch."""

    first: Place
    end: Place
    size: int
    newest_ns: int


class LogReader:
    """The reading side of a partition's log."""

    def __init__(
        self,
        storage: Storage,
        directory: str,
        identity: LogIdentity,
        pairs: list[Pair],
        last: Entry,
        cache: BatchCache,
    ) -> None:
        """`last` is the last entry; the anchor of the last pair if that one is empty."""
        self.directory = directory
        self.identity = identity
        self.unreadable: tuple[int, ...] = ()  # positions of pairs of which nothing can be used, if that was looked for
        self.unfinished = False  # the last pair has less than an anchor: a crash came while it was made
        self.end = Place(last.log_id + 1, last.end_offset, last.end_position)
        self.files = PairList(storage, pairs, last)
        self.shelf = cache.shelf()  # what is in memory of it
        self.closed = False  # its files may go, or be another log's
        self._cache = cache
        self._read_lately: deque[tuple[int, int]] = deque(maxlen=READERS)  # offsets of what was read for one message

    @classmethod
    def open(cls, storage: Storage, directory: str, identity: LogIdentity) -> LogReader:
        """Look at a log as it is, also while its broker writes it: nothing is changed or recovered.

        LogCorrupt: there are files, and none that can be used."""
        found = find(storage, directory, identity, read_only=True)
        if not found.pairs and found.unreadable:
            raise LogCorrupt(f"{directory}: no commitlog of this partition can be read")
        if not found.pairs:
            raise NotFound(f"{directory} has no log files" + (" that are not about to go" if found.dropping else ""))
        pair = found.pairs[-1]
        last = pair.anchor
        for log_id in range(last.log_id + pair.size(COMMITLOG) // ENTRY_BYTES - 1, last.log_id, -1):
            if (entry := pair.read_entry(log_id)) is not None:
                last = entry
                break
        log = LogReader(storage, directory, identity, found.pairs, last, BatchCache())
        log.unreadable = tuple(found.unreadable)
        log.unfinished = found.unfinished is not None
        return log

    @property
    def last(self) -> Entry | None:
        """The last entry, even if its files are gone; None in a log that never had one."""
        return self.files.last if self.files.last.log_id else None

    @property
    def start(self) -> Place:
        """Where the oldest batch that is still here begins."""
        return self.files.pairs[0].first

    @property
    def pairs(self) -> list[PairInfo]:
        """All pairs, oldest first; the last one is being written."""
        ends = [(pair.first, pair.anchor.timestamp_ns) for pair in self.files.pairs[1:]]
        ends.append((self.end, self.files.last.timestamp_ns))
        return [
            PairInfo(pair.first, end, end.position - pair.position, newest_ns)
            for pair, (end, newest_ns) in zip(self.files.pairs, ends, strict=False)
        ]

    # ---- entries

    def entry(self, log_id: int) -> Entry:
        """One entry. LogCorrupt if it does not verify; it must be in [start, end)."""
        batch = self.shelf.by_log_id(log_id)
        if batch is not None:
            return batch.entry
        assert self.start.log_id <= log_id < self.end.log_id, f"log id {log_id} is not in {self}"
        entry = self.files.pair_of(log_id).read_entry(log_id)
        if entry is None:
            raise hole(self, log_id)
        return entry

    def encoded(self, entry: Entry) -> bytes:
        """The bytes on disk of an entry of this log."""
        return entry.encode()

    def entries(self, first_log_id: int, end_log_id: int) -> Iterator[Entry]:
        """The entries of [first, end) that are here. LogCorrupt at one that does not verify."""
        log_id = max(first_log_id, self.start.log_id)
        while log_id < (end := min(end_log_id, self.end.log_id)):
            pair = self.files.pair_of(log_id)
            block = pair.read_entries(log_id, min(end, self.end_of(pair).log_id, log_id + BLOCK_SLOTS) - log_id)
            if not block:
                raise hole(self, log_id)
            for entry in block:
                if entry is None:
                    raise hole(self, log_id)
                yield entry
                log_id += 1

    def entry_for_offset(self, offset: int) -> Entry | None:
        """The entry of the batch that holds message `offset`; None if it is not here."""
        if not self.start.offset <= offset < self.end.offset:
            return None
        found = self.shelf.entry_by_offset(offset)
        if found is not None:
            return found
        pairs = self.files.pairs
        pair = pairs[bisect_right(pairs, offset, key=lambda p: p.first.offset) - 1]
        first, end = pair.first, self.end_of(pair)  # batches of one log are much alike
        guess = first.log_id + (offset - first.offset) * (end.log_id - first.log_id) // (end.offset - first.offset)
        log_id, entry = self.files.first_where(pair, lambda entry: entry.end_offset > offset, guess)
        if entry is None or entry.first_offset > offset:
            raise hole(self, log_id - 1) if entry is None else _gap(self, log_id)
        return entry

    def entry_at_position(self, position: int) -> Entry | None:
        """The entry of the batch that holds the byte at `position`; None if it is not here."""
        if not self.start.position <= position < self.end.position:
            return None
        pairs = self.files.pairs
        pair = pairs[bisect_right(pairs, position, key=lambda p: p.position) - 1]
        log_id, entry = self.files.first_where(pair, lambda entry: entry.end_position > position)
        if entry is None or entry.position > position:
            raise hole(self, log_id) if entry is None else _gap(self, log_id)
        return entry

    def entry_for_time(self, timestamp_ns: int) -> Entry | None:
        """The first batch with messages at or after this time; None if there is none yet."""
        pairs = self.files.pairs
        # An anchor has the newest time of the pair before, so the last pair whose anchor is older holds the answer.
        pair = pairs[max(bisect_right(pairs, timestamp_ns - 1, key=lambda p: p.anchor.timestamp_ns) - 1, 0)]
        _, entry = self.files.first_where(pair, lambda entry: entry.timestamp_ns >= timestamp_ns)
        return None if entry is None else self.entry_for_offset(entry.first_offset)

    def end_of_epoch(self, epoch: int) -> int | None:
        """The end of the batches written in epochs up to this one; None if all that are here are of later ones.

        LogCorrupt: it may be at entries that do not verify. They are passed over by the bisection, which ends behind
        them; those that are still in memory say themselves which epoch they are of."""
        pairs = self.files.pairs
        i = bisect_right(pairs, epoch, key=lambda p: p.anchor.epoch) - 1
        if i < 0:
            return None
        end = self.files.first_where(pairs[i], lambda entry: entry.epoch > epoch)[0]
        while self.entry_before(end).epoch > epoch:  # the anchor is not: there it ends at the latest
            end -= 1
        return end

    def entry_before(self, log_id: int) -> Entry:
        """The entry that `log_id` follows, also if its own files are gone. LogCorrupt if it does not verify.

        The last one is in memory: a log whose end is damaged can still say where it ends."""
        if log_id == self.end.log_id:
            return self.files.last
        pair = self.files.pair_of(log_id)
        return pair.anchor if pair.first.log_id == log_id else self.entry(log_id - 1)

    def part(self, position: int, end_log_id: int, storage: Storage) -> LogReader | None:
        """The pair that begins at `position`, below `end_log_id`, as a log that another thread may read.

        It has files of its own, opened by `storage`, and stays as it is whatever becomes of this log; files that are
        unlinked meanwhile read as empty. None if the pair is gone or has nothing below `end_log_id`. LogCorrupt if the
        last entry of the part does not verify.
        """
        pairs = self.files.pairs
        i = bisect_right(pairs, position, key=lambda p: p.position) - 1
        if i < 0 or pairs[i].position != position:
            return None
        anchor = pairs[i].anchor
        last = pairs[i + 1].anchor if i + 1 < len(pairs) else self.files.last
        if end_log_id <= last.log_id:
            last = anchor if end_log_id <= anchor.log_id + 1 else self.entry(end_log_id - 1)
        if last.log_id == anchor.log_id:
            return None
        pair = Pair(storage, self.directory, anchor, read_only=True)
        return LogReader(storage, self.directory, self.identity, [pair], last, BatchCache(0))

    def part_at(self, log_id: int) -> LogReader:
        """The pair that this log id, which must be in [start, end), belongs to, as `part` gives it."""
        pairs = self.files.pairs
        pair = pairs[bisect_right(pairs, log_id, key=lambda p: p.first.log_id) - 1]
        part = self.part(pair.position, self.end.log_id, self.files.storage)
        assert part is not None, f"log id {log_id} is not in {self}"
        return part

    def snapshot(self) -> LogReader:
        """The whole log as it is now, as `part` gives one pair of it."""
        pairs = [Pair(self.files.storage, self.directory, pair.anchor, read_only=True) for pair in self.files.pairs]
        return LogReader(self.files.storage, self.directory, self.identity, pairs, self.files.last, BatchCache(0))

    def end_of(self, pair: Pair) -> Place:
        """Where the next pair begins, or the log ends."""
        pairs = self.files.pairs
        i = bisect_right(pairs, pair.position, key=lambda p: p.position)
        return pairs[i].first if i < len(pairs) else self.end

    # ---- frames

    def read(self, entry: Entry) -> bytes | bytearray:
        """The frames of one batch, verified. LogCorrupt if they are not what the entry says."""
        batch = self.shelf.by_log_id(entry.log_id)
        if batch is not None and batch.entry == entry:
            return batch.data
        data = self.files.pair_of(entry.log_id).read_data(entry.position, entry.size)
        if not verifies(entry, data):
            raise bad_data(entry)
        return data

    def events(self, entry: Entry) -> bytes | bytearray:
        """The frames of one batch, to be applied: none if they were given up, and what they said with them."""
        return b"" if entry.flags & LOST else self.read(entry)

    def batch_at(self, offset: int) -> Batch | None:
        """A batch, or a run of neighbouring ones, that holds message `offset`; None if it is not here."""
        batch = self.shelf.by_offset(offset)
        if batch is not None:
            return batch
        log_id = self.shelf.log_id_after_run(offset)
        if log_id is None or log_id < self.start.log_id:  # what lay between the run and the start has no message
            entry = self.entry_for_offset(offset)
            if entry is None:
                return None
            log_id = entry.log_id
        while log_id < self.end.log_id:
            run = self._read_run(log_id)
            if offset < run.first_offset:
                raise _gap(self, log_id)
            if offset < run.end_offset:
                self._cache.keep_run(self.shelf, run)
                return run
            log_id = run.end_log_id
        return None

    def message(self, offset: int, position: int = 0) -> bytes:
        """The stored frame of one message, or its carried copy, whose own frame begins at `position`.

        LogCorrupt if it cannot be read; NotInLog if it is not here.
        """
        if position:
            entry = self.entry_at_position(position)
            if entry is None:
                why = f"position {position} of the carried message {offset} is not in the log"
                raise NotInLog(offset, why, carried=True)
            return _frame_at(self.read(entry), position - entry.position)
        if (kept := self.shelf.take_retry(offset)) is not None:
            return kept
        batch = self.shelf.by_offset(offset) or self._batch_around(offset)
        if batch is None:
            raise NotInLog(offset, f"offset {offset} is not in the log")
        return batch.frame(offset)

    def _batch_around(self, offset: int) -> Batch | None:
        """What is read for one message: a run in or near what was read for one lately, which stays in memory; else its
        batch alone."""
        batch: Batch | None
        if any(first - NEAR_MESSAGES < offset < end + NEAR_MESSAGES for first, end in self._read_lately):
            batch = self.batch_at(offset)
        else:
            entry = self.entry_for_offset(offset)
            batch = None if entry is None else Batch.of(entry, self.read(entry))
        if batch is not None:
            self._read_lately.append((batch.first_offset, batch.end_offset))
        return batch

    def _read_run(self, log_id: int) -> Batch:
        """The batch `log_id` and those behind it in the same pair, up to RUN_BYTES; just this one if any is bad."""
        pair = self.files.pair_of(log_id)
        # As many entries as fill a run if their batches are of the pair's average size.
        first_place, end = pair.first, self.end_of(pair)
        average = (end.position - first_place.position) // (end.log_id - first_place.log_id) + 1
        slots = min(RUN_BYTES // average + 2, RUN_SLOTS, end.log_id - log_id)
        fields = columns(pair.read_slots(log_id, slots))
        if fields is not None:
            first = Entry(*[field[0] for field in fields])
            if first.log_id == log_id and follow_each_other([field[1:] for field in fields], first):
                run = _verified_run(pair, first, fields)
                if run is not None:
                    return run
        entry = self.entry(log_id)
        return Batch.of(entry, self.read(entry))

    def close(self) -> None:
        """Let go of the files. Nothing is synced; a sync in another thread ends before they are closed."""
        self.closed = True
        self.shelf.clear()
        self.files.release()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.directory!r}, {self.start} to {self.end})"


def hole(log: LogReader, log_id: int) -> BatchCorrupt:
    """The error for an entry that does not verify: the damage reaches from valid neighbour to valid neighbour."""
    pair = log.files.pair_of(log_id)
    end = log.end_of(pair)
    before: Entry | None = pair.anchor
    for first in range(log_id, pair.first.log_id, -1):
        if (before := pair.read_entry(first - 1)) is not None:
            break
    before = before or pair.anchor
    for after_id in range(log_id + 1, end.log_id):
        if (after := pair.read_entry(after_id)) is not None:
            end = Place(after_id, after.first_offset, after.position)
            break
    first_place = Place(before.log_id + 1, before.end_offset, before.end_position)
    return BatchCorrupt(first_place, end, "commitlog entries do not verify")


def _gap(log: LogReader, log_id: int) -> BatchCorrupt:
    """The error for what should be in front of an entry that verifies, and is not: entries that do not verify, or a
    range that is mended in part. What stands in for the rest of it is empty, and begins where that ends."""
    try:
        before = log.entry_before(log_id)
    except BatchCorrupt as hole:
        return hole
    last = log.entry(log_id)
    try:
        while last.stands_in and last.log_id + 1 < log.end.log_id:
            if not (after := log.entry(last.log_id + 1)).stands_in:
                break
            last = after
    except BatchCorrupt:
        pass  # that one is damage of its own
    first = Place(log_id, before.end_offset, before.end_position)
    end = Place(last.log_id + 1, last.end_offset, last.end_position)
    return BatchCorrupt(first, end, "what stood for these batches is mended, and they are not")


def _frame_at(data: bytes | bytearray, at: int) -> bytes:
    size = int.from_bytes(data[at : at + 4], "big")
    return bytes(data[at : at + 4 + size])


def _verified_run(pair: Pair, first: Entry, fields: list[tuple[int, ...]]) -> Batch | None:
    """As many of these batches as RUN_BYTES hold, or the first one; None if any of them does not verify."""
    ends = list(accumulate(fields[SIZE]))
    n = max(bisect_right(ends, RUN_BYTES), 1)
    data = pair.read_data(first.position, ends[n - 1])
    if len(data) != ends[n - 1]:
        return None
    with memoryview(data) as view:
        crcs = [crc32(view[at:end]) for at, end in pairwise([0, *ends[:n]])]
    flags = reduce(or_, fields[FLAGS][:n])
    if tuple(crcs) != fields[CRC][:n] or flags & UNREADABLE:
        return None
    end_offset = first.first_offset + sum(fields[COUNT][:n])
    return Batch(first, data, first.first_offset, first.log_id + n, end_offset, flags)


def verifies(entry: Entry, data: bytes | bytearray | memoryview) -> bool:
    """Whether these are the frames that the entry describes."""
    return not entry.flags & UNREADABLE and len(data) == entry.size and crc32(data) == entry.crc


def bad_data(entry: Entry) -> BatchCorrupt:
    """The error for a batch whose entry is good and whose frames are not."""
    end = Place(entry.log_id + 1, entry.end_offset, entry.end_position)
    why = "the bytes in the segment do not verify"
    if entry.flags & LOST:
        why = "lost, and given up"
    elif entry.flags & FAULTY:
        why = "lost before, marked by recovery"
    return BatchCorrupt(Place(entry.log_id, entry.first_offset, entry.position), end, why)
