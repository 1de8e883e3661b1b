"""One file, read whole: is it what its manifest says, and what the log says?

    bytes  --crc32--> the manifest's file_crc
    row groups --page checksums, crc of values and lengths--> the footer's groups, whose crc is the manifest's
    rows   --offset, id, topic, partition, time--> what its name and manifest say
    rows   --one by one, where the log still has them--> the log's, by offset: an anti-join in both directions

Each problem names offsets: those of a row, of a row group, or of the file where it cannot be told more exactly. This is
what a task of `verify --full` does; only problems go back to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_nsqha.entries import crc32
from pyspark_nsqha.lake import names
from pyspark_nsqha.lake.manifest import LakeFile
from pyspark_nsqha.lake.parquet import SCHEMA, BadFile, Footer, footer_of, open_file, read_rows
from pyspark_nsqha.lake.store import Store, StoreFailed
from pyspark_nsqha.lake.task import Read, read_log
from pyspark_nsqha.model import Gone, ReadFailed, Split, told

if TYPE_CHECKING:
    from pyspark_nsqha.options import Tls

COMPARED = ("offset", "value", "id", "timestamp_ns", "attempts", "leader_epoch", "deliver_at")
PROBLEMS_MAX = 20  # of one file

GAP, MISMATCH = "gap", "mismatch"


class Problem(NamedTuple):
    """Messages [first, end) of which lake and log, or lake and manifest, do not agree."""

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
    """What a task found."""

    rows: int = 0  # that were read
    compared: int = 0  # of these, with the log's
    problems: tuple[Problem, ...] = ()
    failed: str = ""  # why it could not be looked at
    gone: bool = False  # retention was faster: to be looked at again, with what the log has left


def problem(file: LakeFile, kind: str, why: str, first: int | None = None, end: int | None = None) -> Problem:
    """One about a file, or about some of its messages."""
    low, high = file.first if first is None else first, file.end if end is None else end
    return Problem(kind, file.topic, file.partition, low, high, file.path, why)


def differences(file: LakeFile, footer: Footer) -> Iterator[str]:
    """What a footer says otherwise than the manifest."""
    if footer.identity != file.identity:
        theirs = f"{footer.identity.topic}/{footer.identity.partition}, uid {footer.identity.topic_uid:016x}"
        yield f"its footer says that it is of {theirs}"
    if (footer.first, footer.end) != (file.first, file.end):
        yield f"its footer says that it has [{footer.first}, {footer.end})"
    if footer.crc != file.crc:
        yield "its footer has another checksum of the values than the manifest"


def check_file(file: LakeFile, store: Store, split: Split | None, read: Read) -> CheckedRows:
    """All of a file; with `split`, what the log still has of its messages too. StoreFailed, ReadFailed."""
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
            raise  # a bug; what damaged bytes do to a parser is none
    if not whole and not found:
        found.append(problem(file, MISMATCH, "the file does not have its checksum"))
    compared = 0
    if split is not None and parsed is not None and not found:
        compared = _compare(file, *parsed, split, read, found)
    return CheckedRows(0 if found else file.rows, compared, tuple(found[:PROBLEMS_MAX]))


def _parsed(file: LakeFile, raw: bytes, found: list[Problem]) -> tuple[Any, Footer] | None:
    """The file and its footer, if it has the one that the manifest knows."""
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
    """Group by group: one that is damaged does not hide the others."""
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
    """What is not as it has to be, and the rows that it is about."""
    offsets = batch.column("offset").to_numpy()
    numbers = (offsets + file.id_base).tolist()
    ids = pa.array([f"{number:016x}" for number in numbers], pa.string())
    stamps = batch.column("timestamp_ns").to_numpy()
    before = np.concatenate(([last_stamp], stamps[:-1]))
    micros = batch.column("timestamp").cast(pa.int64()).to_numpy()
    expected = {
        "the id is not that of its offset": pc.equal(batch.column("id"), ids),
        "the topic is another": pc.equal(batch.column("topic"), file.topic),
        "the partition is another": pc.equal(batch.column("partition"), file.partition),
    }
    fits = {why: values.fill_null(False).to_numpy(zero_copy_only=False) for why, values in expected.items()}
    fits["the timestamp falls"] = stamps >= before
    fits["the timestamp is of another day"] = stamps // names.DAY_NS == names.day_start(file.day) // names.DAY_NS
    fits["timestamp and timestamp_ns differ"] = micros == stamps // 1000
    fits["the timestamp is outside of what the manifest says"] = (stamps >= file.first_timestamp_ns) & (
        stamps <= file.last_timestamp_ns
    )
    for why, fit in fits.items():
        if not fit.all():
            yield why, np.flatnonzero(~fit)


# ---- with the log


def _compare(file: LakeFile, opened: Any, footer: Footer, split: Split, read: Read, found: list[Problem]) -> int:
    """How many messages were compared with the log's."""
    lake = _LakeRows(read_rows(opened, footer, first=split.first, end=split.end, columns=COMPARED))
    gone: list[tuple[int, int]] = []
    compared, at = 0, split.first
    for _, batches in read(split, lambda first, end, why: gone.append((first, end))):
        for batch in batches:
            ours = batch.select(list(COMPARED))
            first = ours.column("offset")[0].as_py()
            if first > at:  # the log cannot read these any more, the lake has them
                lake.take(first - at)
            at = first + ours.num_rows
            theirs = lake.take(ours.num_rows)
            compared += ours.num_rows
            found += [problem(file, MISMATCH, why, a, b) for why, a, b in _unequal(ours, theirs)]
    read_end = max([at, *(end for _, end in gone)])
    if read_end < split.end:
        raise ReadFailed(f"{file.topic}/{file.partition}: offsets [{read_end}, {split.end}) did not come; try again")
    return compared


def _unequal(log: pa.RecordBatch, lake: pa.RecordBatch) -> Iterator[tuple[str, int, int]]:
    """Messages that the one has otherwise than the other, as ranges of offsets."""
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
                yield f"{name} is not what the log has", int(part[0]), int(part[-1]) + 1


class _LakeRows:
    """Rows of the lake, as many as are asked for at a time."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None

    def take(self, rows: int) -> pa.RecordBatch:
        """The next ones. BadFile if there are fewer."""
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
    """As `check_file`; what failed is in the result."""
    try:
        return check_file(file, store, split, read)
    except Gone as error:
        return CheckedRows(failed=str(error), gone=True)
    except (StoreFailed, ReadFailed) as error:
        return CheckedRows(failed=str(error))
    except BadFile as error:
        return CheckedRows(problems=(problem(file, MISMATCH, str(error)),))
    except Exception as error:
        return CheckedRows(failed=f"{file.path}: {told(error)}")


Check = Callable[[list[tuple[LakeFile, Split | None]]], list[CheckedRows]]
"""Runs `checked` for each file, somewhere; results in the same order."""
