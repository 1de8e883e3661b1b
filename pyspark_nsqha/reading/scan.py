"""Converts verified batches to Arrow, without a Python object per message.

    run -> frames (`lanes`) -> messages, checked -> rows (`_ScannedRows`) -> the requested columns -> batches

The bytes are treated as one binary array whose elements are body, gap, body, gap ..; every second one is taken, which
copies each body once and nothing else. Headers of 34 bytes are gathered as one numpy table; offset, id and timestamp
are known from the entries and compared with it.

Besides the checks of `entries.verify`, these are made here: frames fill each batch exactly, a batch has as many
messages as its entry says, each message has its batch's timestamp and the id of its offset. Only frames of type 2
become rows: carried copies and events never do. Unknown types from 16 to 31 are an error, as the format requires.

The run's bytes are borrowed until the iterator is exhausted or closed; record batches have copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pyspark_nsqha.model import FetchedRun, NotVerified, PartitionLife, ReadFailed, Unreadable
from pyspark_nsqha.reading import lanes
from pyspark_nsqha.reading.columns import CORRUPT, arrow_schema
from pyspark_nsqha.reading.entries import FAULTY, LOST, Entries, Integers, describe

ROWS_MAX = 16384
BYTES_MAX = 8 << 20

OnBad = Literal["fail", "corrupt", "drop"]
Why = Literal["lost", "faulty", "corrupt"]

HEADER = np.dtype([("size", ">u4"), ("type", ">u4"), ("timestamp", ">i8"), ("attempts", ">u2"), ("id", "V16")])
HEADER_BYTES = 34
assert HEADER.itemsize == HEADER_BYTES

_BODY_BYTES_MAX = 2**31 - 1  # of NSQ's protocol, and of an Arrow array
_MESSAGE = 2
_CONTROL_MIN = 16
_ATTRIBUTES = 16
_UNKNOWN_MIN = 27  # types from here to 31 are unknown and an error
_SKIPPABLE_MIN = 32
_ATTRIBUTES_BYTES_MIN = 4 + 14  # type, covers, deliver_at, number of headers


class MissingRange(NamedTuple):
    """Requested messages [first, end) that did not become rows."""

    first: int
    end: int
    why: Why


def record_batches(
    run: FetchedRun,
    entries: Entries,
    identity: PartitionLife,
    *,
    columns: Sequence[str],
    first: int,
    end: int,
    rows_max: int = ROWS_MAX,
    bytes_max: int = BYTES_MAX,
    on_bad: OnBad = "fail",
    skip_unreadable: bool = False,
    missing: Callable[[MissingRange], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The messages of the run with offsets in [first, end), in batches of at most `rows_max` rows and `bytes_max` bytes
    of frames, but one message at least.

    A batch that does not verify raises NotVerified, or with `on_bad` becomes a row whose `_corrupt` has all its frames
    and whose offset is its first, or nothing. Entries that are LOST or FAULTY raise Unreadable, or are skipped with
    `skip_unreadable`. `missing` is called for what did not become rows. ReadFailed: a newer broker wrote it.
    """
    overlap = np.flatnonzero((entries.first_offsets < end) & (entries.first_offsets + entries.counts > first))
    if not len(overlap):
        return
    part = _BatchGroup(run, entries, identity, slice(int(overlap[0]), int(overlap[-1]) + 1))
    tell = missing or (lambda _: None)
    for index in part.unreadable():
        gap = part.range_of(index, first, end)
        if not skip_unreadable:
            raise part.unreadable_error(index, gap)
        if gap[1] > gap[0]:
            tell(MissingRange(*gap, "faulty" if entries.flags[index] & FAULTY else "lost"))
    rows = part.rows(tolerant=on_bad != "fail")
    wanted = np.searchsorted(rows.offsets, (first, end)).tolist()
    build = _Columns(run, identity, rows, columns)
    begin = wanted[0]
    for index in rows.bad:
        lost = part.range_of(index, first, end)
        if lost[1] <= lost[0]:
            continue
        tell(MissingRange(*lost, "corrupt"))
        if on_bad == "corrupt":
            stop = int(np.searchsorted(rows.offsets, lost[0]))
            yield from build.batches(begin, stop, rows_max, bytes_max)
            yield build.corrupt(lost[0], part.frames_of(index), part.epoch_and_time(index))
            begin = stop
    yield from build.batches(begin, wanted[1], rows_max, bytes_max)


class _ScannedRows(NamedTuple):
    """All readable messages of a part of a run."""

    at: Integers  # of their frames within the run's
    headers: npt.NDArray[np.void]  # of HEADER
    offsets: Integers
    ids: npt.NDArray[np.void]  # V16
    timestamps: Integers
    epochs: Integers
    deliver_at: Integers | None  # 0: none
    bad: list[int]  # batches that do not verify


class _BatchGroup:
    """Consecutive batches of a run."""

    def __init__(self, run: FetchedRun, entries: Entries, identity: PartitionLife, batches: slice) -> None:
        self.entries = entries
        self.identity = identity
        self.frames = run.frames
        self.batches = batches
        self.starts = entries.starts[batches.start : batches.stop + 1]
        # The number of messages whose frames are in the run.
        self.counts = np.where(entries.flags[batches] & (LOST | FAULTY), 0, entries.counts[batches])

    # ---- about one batch; `index` counts within the run

    def unreadable(self) -> list[int]:
        """Batches whose messages no longer exist."""
        entries, batches = self.entries, self.batches
        flagged = (entries.flags[batches] & (LOST | FAULTY) != 0) & (entries.counts[batches] > 0)
        return (np.flatnonzero(flagged) + batches.start).tolist()  # type: ignore[no-any-return]

    def range_of(self, index: int, first: int, end: int) -> tuple[int, int]:
        """The messages of a batch that are in [first, end)."""
        own = int(self.entries.first_offsets[index])
        return max(own, first), min(own + int(self.entries.counts[index]), end)

    def unreadable_error(self, index: int, gap: tuple[int, int]) -> Unreadable:
        given_up = "an operator marked them so" if self.entries.flags[index] & LOST else "recovery could not read them"
        return Unreadable(
            f"{self.identity.topic}/{self.identity.partition}: offsets [{gap[0]}, {gap[1]}) are lost: {given_up}; set "
            "failOnDataLoss=false to read without them",
            planned=gap,
        )

    def frames_of(self, index: int) -> bytes:
        with memoryview(self.frames) as view:
            return bytes(view[int(self.entries.starts[index]) : int(self.entries.starts[index + 1])])

    def epoch_and_time(self, index: int) -> tuple[int, int]:
        return int(self.entries.table["epoch"][index]), int(self.entries.timestamps[index])

    def not_verified(self, index: int, why: str) -> NotVerified:
        entries = self.entries
        log_id, first = entries.log_id(index), int(entries.first_offsets[index])
        offsets = first, first + int(entries.counts[index])
        return NotVerified(describe(self.identity, (log_id, log_id + 1), offsets, why), planned=offsets)

    # ---- frames to rows

    def rows(self, *, tolerant: bool) -> _ScannedRows:
        """The messages. NotVerified for the first batch that does not fit, unless `tolerant`."""
        entries, batches = self.entries, self.batches
        bad = dict.fromkeys(np.flatnonzero(entries.bad[batches]).tolist(), "the frames do not verify")
        at, torn = lanes.frame_starts(
            self.frames, self.starts, self.counts, entries.timestamps[batches], sorted(bad)
        )  # fmt: skip
        bad |= dict.fromkeys(torn, "its frames do not fill it")
        at, headers, control = self.messages(at, bad)
        self.check_control(control, bad)
        deliver_at = self.deliver_at(at, control, bad)
        self.check_counts(at, bad)
        if bad and not tolerant:
            index = min(bad)
            raise self.not_verified(index + batches.start, bad[index])
        counts = self.counts
        if bad:
            counts, kept = self.without(bad, at)
            at, headers = at[kept], headers[kept]
            deliver_at = None if deliver_at is None else deliver_at[kept]
        offsets = np.repeat(entries.first_offsets[batches] - (np.cumsum(counts) - counts), counts)
        offsets += np.arange(len(offsets))
        timestamps = np.repeat(entries.timestamps[batches], counts)
        ids = _ids(self.identity.id_base, offsets)
        fits = (headers["timestamp"] == timestamps) & _equal_ids(headers, ids)
        if not fits.all():
            of_rows = np.repeat(np.arange(batches.start, batches.stop), counts)
            if not tolerant:
                row = int(fits.argmin())
                what = "timestamp" if headers["timestamp"][row] != timestamps[row] else "id"
                why = f"the message at offset {offsets[row]} has a {what} that does not match its place in the log"
                raise self.not_verified(int(of_rows[row]), why)
            entries.bad[of_rows[~fits]] = True
            return self.rows(tolerant=True)  # without these everything fits
        epochs = np.repeat(entries.table["epoch"][batches].astype(np.int64), counts)
        misfits = [batches.start + index for index in sorted(bad)]
        return _ScannedRows(at, headers, offsets, ids, timestamps, epochs, deliver_at, misfits)

    def check_counts(self, at: Integers, bad: dict[int, str]) -> None:
        """Check that each batch has as many messages as its entry says; others are added to `bad`."""
        there = np.diff(np.searchsorted(at, self.starts))
        for index in np.flatnonzero(there != self.counts).tolist():
            bad.setdefault(index, f"{there[index]} messages are in it, but {self.counts[index]} are announced")

    def messages(self, at: Integers, bad: dict[int, str]) -> tuple[Integers, npt.NDArray[np.void], Integers]:
        """Divide the frames: messages, their headers, other frames. A batch with an impossible message is bad."""
        is_message = self.integers(4)[at + 4] == _MESSAGE
        control = at[~is_message]
        if len(control):
            at = at[is_message]
        whole = int(np.searchsorted(at, len(self.frames) - HEADER_BYTES, "right"))
        headers = self.gather(at[:whole])
        bodies = headers["size"].astype(np.uint32) - (HEADER_BYTES - 4)  # of less than nothing: 2^32 more
        for place in [*at[:whole][bodies > _BODY_BYTES_MAX].tolist(), *at[whole:].tolist()]:
            bad.setdefault(self.batch_at(place), "a message is shorter than its header, or longer than 2^31 bytes")
        return at[:whole], headers, control

    def check_control(self, control: Integers, bad: dict[int, str]) -> None:
        """ReadFailed for a frame of an unknown type that must be understood."""
        if not len(control):
            return
        types = self.integers(4)[control + 4].astype(np.int64)
        wrong = (types < _CONTROL_MIN) | (self.integers(4)[control] < 4)
        for frame in np.flatnonzero(wrong).tolist():
            bad.setdefault(self.batch_at(int(control[frame])), f"there is no frame of type {types[frame]}")
        unknown = (types >= _UNKNOWN_MIN) & (types < _SKIPPABLE_MIN)
        if unknown.any():
            frame = int(unknown.argmax())
            log_id = self.entries.log_id(self.batches.start + self.batch_at(int(control[frame])))
            raise ReadFailed(
                f"{self.identity.topic}/{self.identity.partition}: log id {log_id} has a frame of type {types[frame]}, "
                "which this reader does not know: a newer broker wrote it; update pyspark_nsqha"
            )

    def deliver_at(self, at: Integers, control: Integers, bad: dict[int, str]) -> Integers | None:
        """For each message when it may be delivered, from the attributes frames before it; 0: at once."""
        frames = control[self.integers(4)[control + 4] == _ATTRIBUTES]
        short = self.integers(4)[frames] < _ATTRIBUTES_BYTES_MIN
        for place in frames[short].tolist():
            bad.setdefault(self.batch_at(place), "attributes are cut off")
        frames = frames[~short]
        if not len(frames):
            return None
        first = np.searchsorted(at, frames)
        # An attributes frame covers messages of its own batch only.
        behind = np.searchsorted(at, self.starts[np.searchsorted(self.starts, frames, "right")])
        covers = np.minimum(self.integers(4)[frames + 8].astype(np.int64), behind - first)
        times = self.integers(8)[frames + 12].astype(np.int64)
        said = times != 0
        first, covers, times = first[said], covers[said], times[said]
        if (first[1:] < (first + covers)[:-1]).any():
            first, covers, times = _apart(first, covers, times)
        deliver_at = np.zeros(len(at), np.int64)
        within = np.arange(int(covers.sum())) - np.repeat(np.cumsum(covers) - covers, covers)
        deliver_at[np.repeat(first, covers) + within] = np.repeat(times, covers)
        return deliver_at

    def without(self, bad: dict[int, str], at: Integers) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """The messages per batch without bad batches, and which messages are left."""
        indices = np.array(sorted(bad))
        counts = self.counts.copy()
        counts[indices] = 0
        return counts, ~np.isin(np.searchsorted(self.starts, at, "right") - 1, indices)

    def batch_at(self, position: int) -> int:
        return lanes.batch_at(self.starts, position)

    def integers(self, width: int) -> npt.NDArray[Any]:
        return lanes.integers(self.frames, width)

    def gather(self, at: Integers) -> npt.NDArray[np.void]:
        """The headers of the messages at these places."""
        places = max(len(self.frames) - HEADER_BYTES + 1, 0)
        return np.ndarray((places,), f"V{HEADER_BYTES}", self.frames, strides=(1,))[at].view(HEADER)


def _apart(first: Integers, covers: Integers, times: Integers) -> tuple[Integers, Integers, Integers]:
    """The same attributes without overlaps, where the later one counts. Work and memory are bounded by their number."""
    apart: list[tuple[int, int, int]] = []
    covering: list[tuple[int, int]] = []  # (end, time), the latest last
    for start, count, time, following in zip(
        first.tolist(), covers.tolist(), times.tolist(), [*first[1:].tolist(), int((first + covers).max())], strict=True
    ):
        covering.append((start + count, time))
        at = start
        while at < following and covering:
            end, time = covering[-1]
            if end <= at:
                covering.pop()
                continue
            stop = min(end, following)
            apart.append((at, stop - at, time))
            at = stop
    parts = np.array(apart, np.int64).reshape(-1, 3)
    return parts[:, 0], parts[:, 1], parts[:, 2]


_DIGITS = np.frombuffer(b"".join(b"%02x" % n for n in range(256)), np.uint16)


def _ids(id_base: int, offsets: Integers) -> npt.NDArray[np.void]:
    """The ids of offsets, as 16 hex digits."""
    numbers = (offsets.astype(np.uint64) + np.uint64(id_base)).astype(">u8")
    return _DIGITS[numbers.view(np.uint8)].view("V16")


def _equal_ids(headers: npt.NDArray[np.void], ids: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """For each message whether its id is equal; ids are compared as two integers."""
    there = np.ascontiguousarray(headers["id"]).view(np.uint64).reshape(-1, 2)
    equal: npt.NDArray[np.bool_] = (there == ids.view(np.uint64).reshape(-1, 2)).all(axis=1)
    return equal


class _Columns:
    """Converts rows to record batches with the requested columns."""

    def __init__(self, run: FetchedRun, identity: PartitionLife, rows: _ScannedRows, columns: Sequence[str]) -> None:
        self.identity = identity
        self.rows = rows
        self.columns = columns
        self.schema = _schema(tuple(columns))
        self.data = pa.py_buffer(run.frames)
        self.body_starts = rows.at + HEADER_BYTES
        self.body_ends = rows.at + 4 + rows.headers["size"]

    def batches(self, first: int, end: int, rows_max: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
        """Record batches of the rows [first, end)."""
        bytes_max = min(bytes_max, _BODY_BYTES_MAX)
        while first < end:
            # Counted from the first body on, so that a single body of nearly 2^31 bytes has offsets of 31 bits.
            behind = int(np.searchsorted(self.body_ends, self.body_starts[first] + bytes_max, "right"))
            stop = min(max(behind, first + 1), first + rows_max, end)
            chunk = slice(first, stop)
            yield pa.record_batch([_BUILDERS[name](self, chunk) for name in self.columns], schema=self.schema)
            first = stop

    def corrupt(self, offset: int, frames: bytes, epoch_and_time: tuple[int, int]) -> pa.RecordBatch:
        """The row of a batch that does not verify."""
        epoch, timestamp_ns = epoch_and_time
        known = {
            "topic": self.identity.topic,
            "partition": self.identity.partition,
            "offset": offset,
            "timestamp": timestamp_ns // 1000,
            "timestampType": 0,
            "timestamp_ns": timestamp_ns,
            "leader_epoch": epoch,
            CORRUPT: frames if len(frames) <= _BODY_BYTES_MAX else None,
        }
        arrays = [pa.array([known.get(field.name)], field.type) for field in self.schema]
        return pa.record_batch(arrays, schema=self.schema)

    def value(self, chunk: slice) -> pa.Array:
        starts, ends = self.body_starts[chunk], self.body_ends[chunk]
        base, n = int(starts[0]), len(starts)
        borders = np.empty(2 * n, np.int32)
        borders[::2] = starts - base
        borders[1::2] = ends - base
        data = self.data.slice(base, int(ends[-1]) - base)
        bodies_and_gaps = pa.Array.from_buffers(pa.binary(), 2 * n - 1, [None, pa.py_buffer(borders), data])
        return bodies_and_gaps.take(_every_second(n))

    def topic(self, chunk: slice) -> pa.Array:
        return _constant(self.identity.topic, pa.string(), chunk.stop - chunk.start)

    def partition(self, chunk: slice) -> pa.Array:
        return _constant(self.identity.partition, pa.int32(), chunk.stop - chunk.start)

    def offset(self, chunk: slice) -> pa.Array:
        return pa.array(self.rows.offsets[chunk])

    def timestamp(self, chunk: slice) -> pa.Array:
        return pa.array(self.rows.timestamps[chunk] // 1000).view(_TIMESTAMP)

    def timestamp_type(self, chunk: slice) -> pa.Array:
        return _constant(0, pa.int32(), chunk.stop - chunk.start)

    def timestamp_ns(self, chunk: slice) -> pa.Array:
        return pa.array(self.rows.timestamps[chunk])

    def id(self, chunk: slice) -> pa.Array:
        n = chunk.stop - chunk.start
        ids = pa.py_buffer(self.rows.ids[chunk].view(np.uint8))
        return pa.Array.from_buffers(pa.string(), n, [None, _sixteens(n), ids])

    def attempts(self, chunk: slice) -> pa.Array:
        return pa.array(self.rows.headers["attempts"][chunk].astype(np.int32))

    def leader_epoch(self, chunk: slice) -> pa.Array:
        return pa.array(self.rows.epochs[chunk])

    def deliver_at(self, chunk: slice) -> pa.Array:
        times = self.rows.deliver_at
        if times is None:
            return _nulls(_TIMESTAMP, chunk.stop - chunk.start)
        part = times[chunk]
        return pa.array(part // 1000, mask=part == 0).view(_TIMESTAMP)

    def key(self, chunk: slice) -> pa.Array:
        return _nulls(pa.binary(), chunk.stop - chunk.start)

    def headers(self, chunk: slice) -> pa.Array:
        return _nulls(_HEADERS, chunk.stop - chunk.start)


_BUILDERS: dict[str, Callable[[_Columns, slice], pa.Array]] = {
    "key": _Columns.key,
    "value": _Columns.value,
    "topic": _Columns.topic,
    "partition": _Columns.partition,
    "offset": _Columns.offset,
    "timestamp": _Columns.timestamp,
    "timestampType": _Columns.timestamp_type,
    "timestamp_ns": _Columns.timestamp_ns,
    "id": _Columns.id,
    "attempts": _Columns.attempts,
    "leader_epoch": _Columns.leader_epoch,
    "deliver_at": _Columns.deliver_at,
    "headers": _Columns.headers,
    "_corrupt": _Columns.key,  # null, like the key: what verified is not corrupt
}

_TIMESTAMP = pa.timestamp("us", tz="UTC")
_HEADERS = arrow_schema(["headers"]).field(0).type


# Arrays that are equal in every record batch are made once, for the usual number of rows or more, and sliced.


@lru_cache(maxsize=64)
def _schema(columns: tuple[str, ...]) -> pa.Schema:
    return arrow_schema(columns)


def _usual(n: int) -> int:
    return max(ROWS_MAX, 1 << (n - 1).bit_length())


def _constant(value: Any, kind: pa.DataType, n: int) -> pa.Array:
    return _repeated(value, kind, _usual(n)).slice(0, n)


@lru_cache(maxsize=32)
def _repeated(value: Any, kind: pa.DataType, n: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), n)


def _nulls(kind: pa.DataType, n: int) -> pa.Array:
    return _null_array(kind, _usual(n)).slice(0, n)


@lru_cache(maxsize=16)
def _null_array(kind: pa.DataType, n: int) -> pa.Array:
    return pa.nulls(n, kind)


def _every_second(n: int) -> pa.Array:
    return _even(_usual(n)).slice(0, n)


@lru_cache(maxsize=4)
def _even(n: int) -> pa.Array:
    return pa.array(np.arange(0, 2 * n, 2, dtype=np.int32))


def _sixteens(n: int) -> pa.Buffer:
    return _multiples(_usual(n))


@lru_cache(maxsize=4)
def _multiples(n: int) -> pa.Buffer:
    return pa.py_buffer(np.arange(0, 16 * (n + 1), 16, dtype=np.int32))
