"""The task of a round: it reads its piece of the log, verified, and writes it as files.

    runs -> entries.verify -> scan.record_batches -> one file per UTC day and unbroken range -> LakeFile
                                                     a range that is LOST everywhere -> Missing

Only what an operator marked as lost is missing permanently. A range that is FAULTY on all replicas fails the piece: its
files may be restored, so it is tried again later, and retention waits for it.

Rows are not returned to the driver, only the manifest's records and the entries at both ends of the piece: the driver
checks that the next piece is chained to this one. Nothing is raised: errors are in the outcome, in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from pyspark_nsqha.lake import names
from pyspark_nsqha.lake.commits.manifest import Addition, LakeFile, Missing, OffsetRange, joined, without
from pyspark_nsqha.lake.parquet import SCHEMA, FileMaker
from pyspark_nsqha.lake.store import Store, StoreFailed
from pyspark_nsqha.model import ENTRY_BYTES, NotVerified, ReadFailed, Split, bug_report
from pyspark_nsqha.reading.entries import ENTRY, Entries, verify
from pyspark_nsqha.reading.fetch import runs
from pyspark_nsqha.reading.scan import MissingRange, record_batches

if TYPE_CHECKING:
    from pyspark_nsqha.options import Tls


class Verified(NamedTuple):
    """A run that verified, and its messages: offsets rise, and are dense but for what cannot be read."""

    entries: Entries
    batches: Iterable[pa.RecordBatch]


LOST = "lost"  # of `scan.MissingRange`: an operator marked the messages as lost
Tell = Callable[[int, int, str], None]
Read = Callable[[Split, Tell], Iterator[Verified]]
"""Reads the runs of a split; reports what no replica can read: first, end, why. ReadFailed if no replica has them."""


@dataclass(frozen=True)
class PieceOutcome:
    """The result of one piece: files and gaps that cover it, or why it failed."""

    split: Split
    addition: Addition = field(default_factory=Addition)
    first_entry: bytes = b""
    last_entry: bytes = b""
    failed: str = ""
    store_failed: bool = False  # and nothing may be committed


def read_log(
    split: Split, tell: Tell, *, tls: Tls | None = None, timeout_seconds: float = 30.0, retries: int = 3, host: str = ""
) -> Iterator[Verified]:
    """The runs of a split from its replicas. A replica that cannot read a range, or whose bytes do not verify, is left
    for the others; `tell` is called for what none can read; if no replica's bytes verify, NotVerified."""
    source = runs(split, tls=tls, timeout_seconds=timeout_seconds, retries=retries, host=host)
    before: bytes | None = None
    for run in source:
        gaps: list[MissingRange] = []
        try:
            entries = verify(run, split.identity, before, at=(split.at_log_id, split.chain))
            batches = list(
                record_batches(
                    run,
                    entries,
                    split.identity,
                    columns=SCHEMA.names,
                    first=split.first,
                    end=split.end,
                    skip_unreadable=True,
                    missing=gaps.append,
                )
            )
        except NotVerified as error:
            if source.retry_other(str(error)):
                continue
            raise
        if gaps and source.retry_other(f"offsets [{gaps[0].first}, {gaps[0].end}) are {gaps[0].why} there"):
            continue
        for gap in gaps:
            tell(*gap)
        before = entries.last
        yield Verified(entries, batches)


def write_piece(split: Split, store: Store, read: Read, *, run: str) -> PieceOutcome:
    """Write the files of a piece."""
    writer = _Writer(split, store, run)
    try:
        for entries, batches in read(split, writer.tell):
            writer.take(entries, batches)
        return writer.finish()
    except ReadFailed as error:
        return PieceOutcome(split, failed=str(error))
    except StoreFailed as error:
        return PieceOutcome(split, failed=str(error), store_failed=True)


@dataclass
class _Open:
    """The state of a file that is being made."""

    maker: FileMaker
    day: str
    first: int
    first_timestamp_ns: int
    first_log_id: int
    chain_before: int | None
    last_timestamp_ns: int = 0
    last: bytes = b""  # the entry of its last message

    @property
    def end(self) -> int:
        return self.first + self.maker.rows


class _Writer:
    """Writes the files of one piece, one after the other."""

    def __init__(self, split: Split, store: Store, run: str) -> None:
        self.split = split
        self.store = store
        self.run = run
        self.files: list[LakeFile] = []
        self.unreadable: list[tuple[OffsetRange, str]] = []
        self.missing: list[Missing] = []
        self.at = split.first
        self.file: _Open | None = None
        self.first_entry = b""
        self.last_entry = b""

    def tell(self, first: int, end: int, why: str) -> None:
        """Record messages that cannot be read. ReadFailed unless an operator marked them as lost."""
        if why != LOST:
            raise ReadFailed(
                f"{self._where()}: offsets [{first}, {end}) are {why} on every replica: restore the files of one, or "
                f"mark them as lost: nsqha log skip {self._where()}; they are tried again later",
                planned=(first, end),
            )
        self.unreadable.append((OffsetRange(first, end), why))

    def take(self, entries: Entries, batches: Iterable[pa.RecordBatch]) -> None:
        """Write the messages of a run."""
        raw = entries.table.tobytes()
        self.first_entry = self.first_entry or raw[:ENTRY_BYTES]
        for batch in batches:
            offsets = batch.column("offset").to_numpy()
            days = batch.column("timestamp_ns").to_numpy() // names.DAY_NS
            breaks = np.flatnonzero((np.diff(offsets) != 1) | (np.diff(days) != 0)) + 1
            borders = [0, *breaks.tolist(), batch.num_rows]
            for begin, end in pairwise(borders):
                if end > begin:
                    self._take_unbroken(batch.slice(begin, end - begin), entries, raw)
        self.last_entry = raw[-ENTRY_BYTES:] or self.last_entry

    def finish(self) -> PieceOutcome:
        """Close the last file and return the outcome. ReadFailed if the piece is not complete."""
        if self.file is not None:
            # Batches without messages after the last one belong to it: then the next file begins where this one ends.
            if self.last_entry and _end_offset(self.last_entry) == self.file.end:
                self.file.last = self.last_entry
            self._close()
        self._skip_to(self.split.end)
        addition = Addition(tuple(self.files), tuple(self.missing))
        return PieceOutcome(self.split, addition, self.first_entry, self.last_entry)

    def _take_unbroken(self, batch: pa.RecordBatch, entries: Entries, raw: bytes) -> None:
        """Write messages of one day without a gap between them."""
        first = batch.column("offset")[0].as_py()
        stamps = batch.column("timestamp_ns")
        stamp, last_stamp = stamps[0].as_py(), stamps[-1].as_py()
        if first < self.at:
            raise ReadFailed(f"{self._where()}: offset {first} was read twice; this is a bug, please report it")
        day = names.day_of(stamp)
        if self.file is not None and (first != self.file.end or day != self.file.day):
            self._close()
        self._skip_to(first)
        if self.file is None:
            self.file = self._opened(first, stamp, day, entries, raw)
        self.file.maker.add(batch)
        self.file.last_timestamp_ns = last_stamp
        self.at = first + batch.num_rows
        index = int(np.searchsorted(entries.first_offsets, self.at - 1, "right")) - 1
        self.file.last = raw[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES]

    def _opened(self, first: int, stamp: int, day: str, entries: Entries, raw: bytes) -> _Open:
        """A new file that begins with message `first`. If it follows another one, their log ids meet."""
        before = self.files[-1] if self.files else None
        if before is not None and before.end == first:
            return _Open(FileMaker(self.split.identity, first), day, first, stamp, before.end_log_id, before.chain)
        index = int(np.searchsorted(entries.first_offsets, first, "right")) - 1
        if before is None and first == self.split.first == self.split.first_offset:
            log_id = self.split.first_log_id
        else:
            log_id = entries.log_id(index)
        position = log_id - entries.log_id(0)
        chain = None
        if position > 0:
            chain = int(_entry(raw[(position - 1) * ENTRY_BYTES : position * ENTRY_BYTES])["chain"])
        elif position == 0 and self.last_entry:
            chain = int(_entry(self.last_entry)["chain"])
        return _Open(FileMaker(self.split.identity, first), day, first, stamp, log_id, chain)

    def _close(self) -> None:
        """Finish the file and write it to the store."""
        file, self.file = self.file, None
        assert file is not None
        made = file.maker.finish()
        last = _entry(file.last)
        identity = self.split.identity
        written = LakeFile(
            topic=identity.topic,
            topic_uid=identity.topic_uid,
            partition=identity.partition,
            day=file.day,
            first=file.first,
            end=file.end,
            rows=made.rows,
            bytes=made.data.size,
            first_timestamp_ns=file.first_timestamp_ns,
            last_timestamp_ns=file.last_timestamp_ns,
            id_base=identity.id_base,
            first_log_id=file.first_log_id,
            end_log_id=int(last["log_id"]) + 1,
            epoch=int(last["epoch"]),
            chain=int(last["chain"]),
            flags=int(last["flags"]),
            chain_before=file.chain_before,
            crc=made.crc,
            file_crc=made.file_crc,
        )
        self.store.write(written.path, made.data, run=self.run)
        self.files.append(written)

    def _skip_to(self, offset: int) -> None:
        """Record messages up to `offset` that were not read as missing. ReadFailed if they were not reported."""
        skipped, self.at = OffsetRange(self.at, max(self.at, offset)), max(self.at, offset)
        if left := list(without(skipped, joined(gap for gap, _ in self.unreadable))):
            first, end = left[0]
            raise ReadFailed(f"{self._where()}: offsets [{first}, {end}) were not read; try again", planned=left[0])
        identity = self.split.identity
        for gap, why in sorted(self.unreadable):
            first, end = max(gap.first, skipped.first), min(gap.end, skipped.end)
            if first < end:
                self.missing.append(Missing(identity.topic, identity.topic_uid, identity.partition, first, end, why))

    def _where(self) -> str:
        return f"{self.split.identity.topic}/{self.split.identity.partition}"


def _entry(raw: bytes) -> np.void:
    """Parse one entry of the commitlog."""
    found: np.void = np.frombuffer(raw, ENTRY)[0]
    return found


def _end_offset(raw: bytes) -> int:
    entry = _entry(raw)
    return int(entry["first_offset"]) + int(entry["count"])


@dataclass(frozen=True)
class PieceTask:
    """`write_piece` for Spark, with everything that it needs; small, as every task gets it."""

    store: Store
    run: str
    tls: Tls | None = None
    timeout_seconds: float = 30.0
    retries: int = 3
    host: str = ""

    def __call__(self, split: Split) -> PieceOutcome:
        read = partial(
            read_log, tls=self.tls, timeout_seconds=self.timeout_seconds, retries=self.retries, host=self.host
        )
        try:
            return write_piece(split, self.store, read, run=self.run)
        except Exception as error:
            return PieceOutcome(split, failed=bug_report(error))
