"""The task of a replay: it reads its splits, publishes their messages, and reports how far it got.

    splits -> rows, by partition and offset -> commands -> paced -> one connection -> ReplayOutcome

It is known exactly which messages have a broker's OK, so only the rest of a failed task is sent again. Expected errors
are not raised: they are in the outcome, in one line.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from pyspark_nsqha.batch import BatchReader
from pyspark_nsqha.lake.history import LakePart
from pyspark_nsqha.model import ReadFailed, bug_report
from pyspark_nsqha.planner import SplitPart
from pyspark_nsqha.writing.publisher import Command, PublishFailed, PublishRefused
from pyspark_nsqha.writing.replay_state import ReplaySpan
from pyspark_nsqha.writing.sink import SinkColumns, SinkOptions, SinkRefused, commands, task_publisher

STEP_SECONDS: Final = 0.2  # of the rate, sent at once
BURST_SECONDS: Final = 1.0  # of the rate, caught up after a pause
SENT: Final = ("partition", "offset", "value")
ROWS_MAX: Final = 1000  # that a query selected, published at once
BYTES_MAX: Final = 2 << 20


class Pace:
    """Limits a task to `rate` messages per second; it catches up at most BURST_SECONDS after a pause. None: no limit.

    It waits after what was sent, so that a task with `n` messages takes `n / rate` seconds however short it is.
    """

    def __init__(
        self,
        rate: float | None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rate = rate
        self._now = now
        self._sleep = sleep
        self._due = now()

    @property
    def step(self) -> int | None:
        """Messages that may be sent at once."""
        return None if self._rate is None else max(int(self._rate * STEP_SECONDS), 1)

    def paid(self, messages: int) -> None:
        """Wait after `messages` were sent until the next may be sent."""
        if self._rate is None:
            return
        self._due = max(self._due, self._now() - BURST_SECONDS) + messages / self._rate
        if (wait := self._due - self._now()) > 0:
            self._sleep(wait)


@dataclass(frozen=True)
class ReplayOutcome:
    """The result of one task. `failed` is one line, or empty."""

    done: tuple[ReplaySpan, ...] = ()  # need not be sent again
    rows: int = 0  # read, or selected by the query
    sent: int = 0  # with a broker's OK
    possible_duplicates: int = 0  # sent twice by this task, or perhaps stored and to be sent again
    failed: str = ""


@dataclass(frozen=True)
class Destination:
    """Where messages go, and how: plain values, for tasks."""

    sink: SinkOptions
    defer_ms: int = 0
    rate: float | None = None  # of one task

    def publish(
        self, batches: Iterable[pa.RecordBatch], spans: Sequence[ReplaySpan], *, pace: Pace | None = None
    ) -> ReplayOutcome:
        """Publish the rows of SENT, by partition and offset like `spans`. Expected errors are in the outcome."""
        publishing = _Publishing(self, pace or Pace(self.rate))
        failed = ""
        try:
            try:
                for batch in batches:
                    publishing.send(batch)
            except ReadFailed as error:
                failed = str(error)  # what was read before is published
            publishing.publisher.flush()
        except (SinkRefused, PublishRefused, PublishFailed) as error:
            failed = failed or str(error)
        finally:
            publishing.publisher.close()
        tally = publishing.publisher.tally
        unanswered = publishing.handed - tally.published
        before = sum(span.messages for span in spans) if _attempt() else 0
        return ReplayOutcome(
            done=tuple(spans) if not failed else tuple(until(spans, publishing.last_stored)),
            rows=publishing.rows,
            sent=tally.published,
            possible_duplicates=tally.possible_duplicates + unanswered + before,
            failed=failed,
        )


def _attempt() -> int:
    """How often Spark ran this task before: such a run may have published everything."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.attemptNumber() if context is not None else 0


class _Publishing:
    """The state of one publishing task."""

    def __init__(self, to: Destination, pace: Pace) -> None:
        self.publisher = task_publisher(to.sink)
        self.rows = 0
        self.handed = 0  # messages, to the publisher
        self._to = to
        self._pace = pace
        self._marks: list[tuple[int, int, int]] = []  # handed with a command; partition and offset of its last message

    @property
    def last_stored(self) -> tuple[int, int] | None:
        """Partition and offset of the last message that is certainly stored."""
        at = bisect_right(self._marks, self.publisher.tally.published, key=lambda mark: mark[0])
        return self._marks[at - 1][1:] if at else None

    def send(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        step = self._pace.step or batch.num_rows
        for first in range(0, batch.num_rows, step):
            piece = batch.slice(first, step)
            at = 0
            for command in self._commands(piece):
                at += command.messages
                self.handed += command.messages
                self._mark(piece, at - 1)
                self.publisher.publish(command)
            self._pace.paid(piece.num_rows)

    def _commands(self, piece: pa.RecordBatch) -> Iterator[Command]:
        value = piece.column(SENT.index("value"))
        if not self._to.defer_ms:
            return commands(pa.record_batch([value], ["value"]), SinkColumns(0, None, None), self._to.sink)
        defer = pa.array([self._to.defer_ms] * piece.num_rows, pa.int64())
        return commands(pa.record_batch([value, defer], ["value", "defer_ms"]), SinkColumns(0, None, 1), self._to.sink)

    def _mark(self, piece: pa.RecordBatch, row: int) -> None:
        self._marks.append((self.handed, piece.column(0)[row].as_py(), piece.column(1)[row].as_py()))
        stored = self.publisher.tally.published
        if len(self._marks) > 1024:  # of the marks whose messages are stored only the last one is needed
            keep = max(bisect_right(self._marks, stored, key=lambda mark: mark[0]) - 1, 0)
            del self._marks[:keep]


def until(spans: Sequence[ReplaySpan], last: tuple[int, int] | None) -> Iterator[ReplaySpan]:
    """The part of the spans up to and with the message `last` (partition, offset)."""
    if last is None:
        return
    partition, offset = last
    for span in spans:
        if span.partition == partition and span.first <= offset < span.end:
            yield span._replace(end=offset + 1)
            return
        yield span


def batches_of(
    rows: Iterable[tuple[int, int, bytes]], *, rows_max: int = ROWS_MAX, bytes_max: int = BYTES_MAX
) -> Iterator[pa.RecordBatch]:
    """Batches for `Destination.publish` from single rows of SENT."""
    some: list[tuple[int, int, bytes]] = []
    size = 0
    for row in rows:
        some.append(row)
        size += len(row[2])
        if len(some) >= rows_max or size >= bytes_max:
            yield _batch_of(some)
            some, size = [], 0
    if some:
        yield _batch_of(some)


def _batch_of(rows: Sequence[tuple[int, int, bytes]]) -> pa.RecordBatch:
    partitions, offsets, values = zip(*rows, strict=True)
    types = (pa.int32(), pa.int64(), pa.binary())
    arrays = [pa.array(column, kind) for column, kind in zip((partitions, offsets, values), types, strict=True)]
    return pa.record_batch(arrays, list(SENT))


Group = tuple[InputPartition, ...]


@dataclass(frozen=True)
class ReadAndPublish:
    """The function of a task without a query."""

    reader: BatchReader
    to: Destination

    def __call__(self, group: Group) -> ReplayOutcome:
        try:
            return self.to.publish((row for part in group for row in self.reader.read(part)), spans_of(group))
        except Exception as error:
            perhaps = sum(span.messages for span in spans_of(group))
            return ReplayOutcome(possible_duplicates=perhaps, failed=bug_report(error))


def spans_of(group: Group) -> list[ReplaySpan]:
    """The spans of splits and of parts of a lake's files, in the order in which they are read."""
    return [span_of(part) for partition in group for part in partition.value]


def span_of(part: SplitPart | LakePart) -> ReplaySpan:
    if isinstance(part, SplitPart):
        return ReplaySpan(part.split.identity.partition, part.split.first, part.split.end)
    return ReplaySpan(part.file.partition, part.first, part.end)
