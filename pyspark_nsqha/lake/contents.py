"""Verifies one whole file against its manifest and the log.

    bytes  --crc32--> the manifest's file_crc
    row groups --page checksums, crc of values and lengths--> the footer's groups, whose crc is the manifest's
    rows   --offset, id, topic, partition, time--> what its name and manifest say
    rows   --one by one, where the log still has them--> the log's, by offset: an anti-join in both directions

Each problem names offsets: those of a row, of a row group, or of the file if it cannot be located more exactly. This is
the task of `verify --full`; only problems are returned to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_nsqha.lake import names
from pyspark_nsqha.lake.commits.manifest import LakeFile
from pyspark_nsqha.lake.parquet import SCHEMA, BadFile, Footer, footer_of, open_file, read_rows
from pyspark_nsqha.lake.store import Store, StoreFailed
from pyspark_nsqha.lake.task import Read, read_log
from pyspark_nsqha.model import Gone, ReadFailed, Split, bug_report
from pyspark_nsqha.reading.entries import crc32

if TYPE_CHECKING:
    from pyspark_nsqha.options import Tls

COMPARED = ("offset", "value", "id", "timestamp_ns", "attempts", "leader_epoch", "deliver_at")
PROBLEMS_MAX = 20  # of one file

GAP, MISMATCH = "gap", "mismatch"


class Problem(NamedTuple):
    """Messages [first, end) for which lake and log, or file and manifest, do not agree."""

    kind: str
    topic: str
    partition: int
    first: int
    end: int
    file: str
    why: str

    def __str__(self) -> str:
        where = f"{self.topic}/{self.partition}: offsets [{self.first}, {self.end})"
        return f"{self.kind}: {where}: {self.why}" + (f" ({self.file})" if self.file else "")


@dataclass(frozen=True)
class CheckedRows:
    """The result of one task."""

    rows: int = 0  # that were read
    compared: int = 0  # of these, with the log's
    problems: tuple[Problem, ...] = ()
    failed: str = ""  # why the file could not be checked
    gone: bool = False  # retention was faster: to be checked again, with what the log has left


def problem(file: LakeFile, kind: str, why: str, first: int | None = None, end: int | None = None) -> Problem:
    """A problem of a file, or of some of its messages."""
    low, high = file.first if first is None else first, file.end if end is None else end
    return Problem(kind, file.topic, file.partition, low, high, file.path, why)


def differences(file: LakeFile, footer: Footer) -> Iterator[str]:
    """Where a footer differs from the manifest."""
    if footer.identity != file.identity:
        theirs = f"{footer.identity.topic}/{footer.identity.partition}, uid {footer.identity.topic_uid:016x}"
        yield f"its footer says that it is of {theirs}"
    if (footer.first, footer.end) != (file.first, file.end):
        yield f"its footer says that it has [{footer.first}, {footer.end})"
    if footer.crc != file.crc:
        yield "the checksum of the values in its footer is not that of the manifest"


def check_file(file: LakeFile, store: Store, split: Split | None, read: Read) -> CheckedRows:
    """Check a whole file; with `split` also against the messages that the log still has. StoreFailed, ReadFailed."""
    try:
        raw = store.read(file.path)
    except FileNotFoundError:
        return CheckedRows(problems=(problem(file, GAP, "the file is gone"),))
    found: list[Problem] = []
    whole = len(raw) == file.bytes and crc32(raw) == file.file_crc
    parsed = None
    try:
        parsed = _parsed(file, raw, found)
        if parsed is not None:
            _check_rows(file, *parsed, found)
    except Exception:
        if whole:
            raise  # a bug; an error of the parser on damaged bytes is not
    if not whole and not found:
        found.append(problem(file, MISMATCH, "the file's checksum is wrong"))
    compared = 0
    if split is not None and parsed is not None and not found:
        compared = _compare(file, *parsed, split, read, found)
    return CheckedRows(0 if found else file.rows, compared, tuple(found[:PROBLEMS_MAX]))


def _parsed(file: LakeFile, raw: bytes, found: list[Problem]) -> tuple[Any, Footer] | None:
    """The file and its footer, if the footer agrees with the manifest."""
    try:
        opened = open_file(pa.BufferReader(raw))
        footer = footer_of(opened)
    except BadFile as error:
        found.append(problem(file, MISMATCH, str(error)))
        return None
    wrong = list(differences(file, footer))
    found += [problem(file, MISMATCH, why) for why in wrong]
    return None if wrong else (opened, footer)


def _check_rows(file: LakeFile, opened: Any, footer: Footer, found: list[Problem]) -> None:
    """Check the rows group by group, so that a damaged group does not hide the others."""
    at = footer.first
    last_stamp = file.first_timestamp_ns
    for group in footer.groups:
        end = at + group.rows
        try:
            for batch in read_rows(opened, footer, first=at, end=end, columns=SCHEMA.names):
                for why, rows in _wrong_rows(file, batch, last_stamp):
                    offsets = batch.column("offset").to_numpy()[rows]
                    found.append(problem(file, MISMATCH, why, int(offsets[0]), int(offsets[-1]) + 1))
                last_stamp = batch.column("timestamp_ns")[-1].as_py()
        except BadFile as error:
            found.append(problem(file, MISMATCH, str(error), at, end))
        at = end


def _wrong_rows(file: LakeFile, batch: pa.RecordBatch, last_stamp: int) -> Iterator[tuple[str, Any]]:
    """Yield what is wrong, and the rows for which it is."""
    offsets = batch.column("offset").to_numpy()
    numbers = (offsets + file.id_base).tolist()
    ids = pa.array([f"{number:016x}" for number in numbers], pa.string())
    stamps = batch.column("timestamp_ns").to_numpy()
    before = np.concatenate(([last_stamp], stamps[:-1]))
    micros = batch.column("timestamp").cast(pa.int64()).to_numpy()
    expected = {
        "the id is not that of its offset": pc.equal(batch.column("id"), ids),
        "the topic is wrong": pc.equal(batch.column("topic"), file.topic),
        "the partition is wrong": pc.equal(batch.column("partition"), file.partition),
    }
    fits = {why: values.fill_null(False).to_numpy(zero_copy_only=False) for why, values in expected.items()}
    fits["the timestamp falls"] = stamps >= before
    fits["the timestamp is of another day"] = stamps // names.DAY_NS == names.day_start(file.day) // names.DAY_NS
    fits["timestamp and timestamp_ns differ"] = micros == stamps // 1000
    fits["the timestamp is outside of the manifest's range"] = (stamps >= file.first_timestamp_ns) & (
        stamps <= file.last_timestamp_ns
    )
    for why, fit in fits.items():
        if not fit.all():
            yield why, np.flatnonzero(~fit)


# ---- with the log


def _compare(file: LakeFile, opened: Any, footer: Footer, split: Split, read: Read, found: list[Problem]) -> int:
    """Compare the rows with the log's messages; returns the number of messages compared."""
    lake = _LakeRows(read_rows(opened, footer, first=split.first, end=split.end, columns=COMPARED))
    gone: list[tuple[int, int]] = []
    compared, at = 0, split.first
    for _, batches in read(split, lambda first, end, why: gone.append((first, end))):
        for batch in batches:
            ours = batch.select(list(COMPARED))
            first = ours.column("offset")[0].as_py()
            if first > at:  # they are not readable in the log any more; the lake has them
                lake.take(first - at)
            at = first + ours.num_rows
            theirs = lake.take(ours.num_rows)
            compared += ours.num_rows
            found += [problem(file, MISMATCH, why, a, b) for why, a, b in _unequal(ours, theirs)]
    read_end = max([at, *(end for _, end in gone)])
    if read_end < split.end:
        raise ReadFailed(f"{file.topic}/{file.partition}: offsets [{read_end}, {split.end}) were not read; try again")
    return compared


def _unequal(log: pa.RecordBatch, lake: pa.RecordBatch) -> Iterator[tuple[str, int, int]]:
    """Messages that differ between log and lake, as ranges of offsets."""
    offsets = log.column("offset").to_numpy()
    for name in COMPARED:
        ours, theirs = log.column(name), lake.column(name)
        if ours.equals(theirs):
            continue
        same = pc.equal(ours, theirs)
        both_null = pc.and_(ours.is_null(), theirs.is_null())
        fits = pc.or_(same.fill_null(False), both_null).to_numpy(zero_copy_only=False)
        wrong = offsets[np.flatnonzero(~fits)]
        for part in np.split(wrong, np.flatnonzero(np.diff(wrong) != 1) + 1):
            if len(part):
                yield f"{name} differs from the log", int(part[0]), int(part[-1]) + 1


class _LakeRows:
    """Returns rows of the lake, any number at a time."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None

    def take(self, rows: int) -> pa.RecordBatch:
        """The next `rows` rows. BadFile if there are fewer."""
        parts: list[pa.RecordBatch] = []
        while rows:
            if self._rest is None or not self._rest.num_rows:
                self._rest = next(self._batches, None)
                if self._rest is None:
                    raise BadFile("it has fewer rows than its footer says")
            part = self._rest.slice(0, rows)
            self._rest = self._rest.slice(part.num_rows)
            rows -= part.num_rows
            parts.append(part)
        return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


@dataclass(frozen=True)
class CheckTask:
    """`check_file` for Spark."""

    store: Store
    tls: Tls | None = None
    timeout_seconds: float = 30.0
    retries: int = 3

    def __call__(self, work: tuple[LakeFile, Split | None]) -> CheckedRows:
        file, split = work
        read = partial(read_log, tls=self.tls, timeout_seconds=self.timeout_seconds, retries=self.retries)
        return checked(file, split, self.store, read)


def checked(file: LakeFile, split: Split | None, store: Store, read: Read) -> CheckedRows:
    """As `check_file`, but errors are in the result."""
    try:
        return check_file(file, store, split, read)
    except Gone as error:
        return CheckedRows(failed=str(error), gone=True)
    except (StoreFailed, ReadFailed) as error:
        return CheckedRows(failed=str(error))
    except BadFile as error:
        return CheckedRows(problems=(problem(file, MISMATCH, str(error)),))
    except Exception as error:
        return CheckedRows(failed=f"{file.path}: {bug_report(error)}")


Check = Callable[[list[tuple[LakeFile, Split | None]]], list[CheckedRows]]
"""Runs `checked` for each file, such as in Spark; results in the same order."""
