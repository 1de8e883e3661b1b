"""Replay: publishes messages of the log again, to another topic, selected by a range, a query or a list of ids.

    snapshot, held --> planned spans --> wave --> tasks: read, verify, (query), publish --> state --> next wave
                                          |                                                  |
                                          +------- a run after a kill continues here --------+

A wave takes a part of every partition in proportion to what is left, so all of them move through time together; it is
as large as some seconds at the requested rate, or as a few splits. Its tasks are groups of splits, not more than Spark
has cores, each with its share of the rate: so the rate holds however many of them run at a time.

Promises. Everything that is planned is stored at least once: what was in flight when a connection, a task or a run was
lost is sent again, and counted as possibly stored twice. Messages of one split keep their order. The ends are fixed at
the beginning, so a replay ends even if it publishes into the topic that it reads.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructField, StructType

from pyspark_nsqha import jobs
from pyspark_nsqha.batch import BatchReader
from pyspark_nsqha.lake import history
from pyspark_nsqha.lake.history import LakePart
from pyspark_nsqha.model import PinnedPartition, ReadFailed
from pyspark_nsqha.options import MIB, BatchOptions, Bound, Bounds, ConnectOptions, Reading, TopicSelection
from pyspark_nsqha.planner import SplitPart
from pyspark_nsqha.reading import columns
from pyspark_nsqha.snapshot import Segments, Snapshot, SnapshotRequest
from pyspark_nsqha.writing.replay_state import Order, ReplaySpan, ReplayState
from pyspark_nsqha.writing.replay_task import (
    SENT,
    Destination,
    Group,
    ReadAndPublish,
    ReplayOutcome,
    batches_of,
    span_of,
    spans_of,
)

HOLD_MS: Final = 900_000  # renewed by every wave
WAVE_SECONDS: Final = 10  # of a wave at the rate: a kill may duplicate one wave
WAVE_BYTES: Final = 32 * MIB  # of log for each core, if there is no rate
WAVE_READ_MAX: Final = 100_000  # messages that a query reads in one wave at a low rate
WAVE_GROWTH_MAX: Final = 8  # from one wave to the next, if a query selects little
SENT_SCHEMA: Final = StructType(
    [StructField("partition", IntegerType()), StructField("offset", LongType()), StructField("value", BinaryType())]
)


class Size(NamedTuple):
    """How much a replay would send."""

    messages: int
    bytes: int  # in the log; for single messages estimated by their neighbours; for a query exact, of the bodies alone


@dataclass
class Replay:
    """One replay, run by the driver. `pinned` is what was committed when it was planned."""

    connection: ConnectOptions
    pinned: Snapshot
    state: ReplayState
    session: Any = None  # only for running, and for queries
    where: str = ""
    lake: str = ""  # URI; read for what is before the log
    single_messages: bool = False  # single messages are planned rather than ranges
    skip_missing: bool = False
    split_bytes: int = 16 * MIB
    to: Destination | None = None
    rate: float | None = None  # of all tasks together
    _selected: float = field(default=1.0, init=False)  # the selected share of what was read in the last wave
    _wave: int = field(default=0, init=False)  # messages in the last one

    def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
        """Send what is left, and save the state. Returns a line for each error; then a later run continues."""
        assert self.to is not None
        while True:
            wave = self.state.next_wave(self._wave_messages(), single=not self.single_messages)
            if not wave:
                return []
            reader, parts = self.tasks_of(wave)
            groups = grouped(parts, self.session.sparkContext.defaultParallelism)
            to = replace(self.to, rate=self.rate / max(len(groups), 1) if self.rate else None)
            self.state.begin(wave)
            outcomes = self.send(reader, groups, to) if groups else []
            failed = list(dict.fromkeys(one.failed for one in outcomes if one.failed))
            rows = sum(one.rows for one in outcomes)
            read = sum(span.messages for span in wave)
            self.state.end(
                [span for one in outcomes for span in one.done] if failed else _hulls(wave),
                sent=sum(one.sent for one in outcomes),
                possible_duplicates=sum(one.possible_duplicates for one in outcomes),
                missing=0 if failed or self.where else read - rows,
            )
            if failed:
                return failed
            self._selected = max(rows / read, 1e-6)
            progress(self.state.total - self.state.left, self.state.total)

    def size(self) -> Size:
        """How much is left to send. With a query this runs the query."""
        spans = self.state.remaining()
        if self.where:
            return self._query_size(spans)
        return Size(sum(span.messages for span in spans), self._log_bytes(spans))

    def check_query(self) -> None:
        """ValueError with one line if Spark cannot run it."""
        from pyspark.errors import PySparkException

        rows = self.session.createDataFrame([], columns.ddl(columns.DEFAULT))
        logging.disable(logging.CRITICAL)  # Spark logs a page of JSON
        try:
            rows.where(self.where).schema  # noqa: B018  the access makes Spark analyse the query
        except PySparkException as error:
            # A parser's error begins with an empty line.
            line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ValueError(" ".join(line.split())[:300].rstrip("; ")) from None
        finally:
            logging.disable(logging.NOTSET)

    # ---- waves

    def _wave_messages(self) -> int:
        cores = int(self.session.sparkContext.defaultParallelism)
        each = max(self._log_bytes_each(), 1)
        most = max(cores * WAVE_BYTES // each, 1)
        if self.rate is None:
            return most
        wanted = int(self.rate * WAVE_SECONDS / self._selected) + 1
        if self._wave:
            wanted = min(wanted, self._wave * WAVE_GROWTH_MAX)
        # The query may select much more of the next wave than of the last one.
        self._wave = min(wanted, most, max(WAVE_READ_MAX, int(self.rate) * WAVE_SECONDS))
        return self._wave

    def _log_bytes_each(self) -> int:
        """The average bytes of a message in the log."""
        messages = sum(pin.end.offset - pin.start.offset for pin in self.pinned.pins)
        size = sum(pin.end.position - pin.start.position for pin in self.pinned.pins)
        return size // messages if messages else 0

    def tasks_of(self, wave: Sequence[ReplaySpan]) -> tuple[BatchReader, list[InputPartition]]:
        """The reader of a wave, and its tasks."""
        schema = self._schema()
        hulls = _hulls(wave)
        topic = self.state.order.topic
        bounds = Bounds(
            start=Bound("the replay's start", offsets=tuple(((topic, one.partition), one.first) for one in hulls)),
            end=Bound("the replay's end", offsets=tuple(((topic, one.partition), one.end) for one in hulls)),
        )
        options = BatchOptions(
            connection=self.connection,
            subscription=TopicSelection(assigned=((topic, tuple(one.partition for one in hulls)),)),
            bounds=bounds,
            reading=Reading(
                fail_on_data_loss=not self.skip_missing,
                min_partitions=self.session.sparkContext.defaultParallelism,
                split_bytes=self.split_bytes,
                columns=tuple(schema.fieldNames()),
            ),
            ids=tuple(self._ids(wave)) if self.single_messages else (),
            hold_ms=HOLD_MS,
            archive=self.lake,
        )
        reader = BatchReader(options, self.pinned, schema)
        return reader, list(reader.partitions())

    def _ids(self, wave: Iterable[ReplaySpan]) -> Iterator[str]:
        bases = {pin.identity.partition: pin.identity.id_base for pin in self.pinned.pins}
        for span in wave:
            for offset in range(span.first, span.end):
                yield f"{bases[span.partition] + offset:016x}"

    def _schema(self) -> StructType:
        if not self.where:
            return SENT_SCHEMA
        found: StructType = self.session.createDataFrame([], columns.ddl(named(self.where))).schema
        return found

    def send(self, reader: BatchReader, groups: Sequence[Group], to: Destination) -> list[ReplayOutcome]:
        """Run a task for each group. CannotStart if the Spark job itself fails."""
        if not self.where:
            return jobs.run_tasks(self.session, ReadAndPublish(reader, to), groups)
        spans = [spans_of(group) for group in groups]

        def publish(rows: Iterator[tuple[int, int, bytes]]) -> Iterator[ReplayOutcome]:
            from pyspark import TaskContext

            context = TaskContext.get()
            assert context is not None
            yield to.publish(batches_of(rows), spans[context.partitionId()])

        try:
            # Not mapInArrow, here and in _rows: it needs pandas.
            found: list[ReplayOutcome] = self._rows(reader, groups).select(*SENT).rdd.mapPartitions(publish).collect()
        except Exception as error:
            raise jobs.CannotStart(f"the Spark job failed: {jobs.first_line(error)}") from None
        return found

    def _rows(self, reader: BatchReader, groups: Sequence[Group]) -> Any:
        """The rows that the query selects, as a DataFrame with a task for each group, in their order."""
        source = _source_of(reader, groups)
        self.session.dataSource.register(source)
        return self.session.read.format(source.name()).schema(self._schema()).load().where(self.where)

    # ---- sizes

    def _query_size(self, spans: Sequence[ReplaySpan]) -> Size:
        """Pass n reads span n of each partition; there is only one pass, unless a run failed before."""
        passes: dict[int, list[ReplaySpan]] = {}
        seen: Counter[int] = Counter()
        for span in spans:
            passes.setdefault(seen[span.partition], []).append(span)
            seen[span.partition] += 1
        messages = size = 0
        for some in passes.values():
            reader, parts = self.tasks_of(some)
            groups = [(part,) for part in parts]
            try:
                rows = self._rows(reader, groups)
                row = rows.selectExpr("count(1)", "coalesce(sum(octet_length(value)), 0)").first()
            except Exception as error:
                raise jobs.CannotStart(f"the Spark job failed: {jobs.first_line(error)}") from None
            messages, size = messages + int(row[0]), size + int(row[1])
        return Size(messages, size)

    def _log_bytes(self, spans: Sequence[ReplaySpan]) -> int:
        if not spans:
            return 0
        topic = self.state.order.topic
        ranges = tuple((topic, hull.partition, hull.first, hull.end) for hull in _hulls(spans))
        pins = Segments(self.connection).snapshot(SnapshotRequest(topics=(topic,), ranges=ranges)).pins
        by_partition = {pin.identity.partition: pin for pin in pins}
        return round(sum(log_bytes(by_partition[span.partition], span) for span in spans))


def _source_of(reader: BatchReader, groups: Sequence[Group]) -> type[DataSource]:
    """A data source whose tasks are these groups. It is a local class, so that it is pickled with its code."""

    class Groups(DataSourceReader):
        def partitions(self) -> Sequence[InputPartition]:
            return [InputPartition(group) for group in groups]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            for part in partition.value:
                yield from reader.read(part)

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "nsqha_replay"

        def reader(self, schema: StructType) -> DataSourceReader:
            return Groups()

    return Source


def log_bytes(pin: PinnedPartition, span: ReplaySpan) -> float:
    """The bytes of messages in the log; between two borders, and before the first, all are assumed equally large."""
    before = min(span.end, pin.start.offset) - span.first
    total = pin.end.position * before / pin.end.offset if before > 0 else 0.0
    for low, high in pairwise(pin.cuts):
        messages = min(span.end, high.offset) - max(span.first, low.offset)
        if messages > 0:
            total += (high.position - low.position) * messages / (high.offset - low.offset)
    return total


def grouped(parts: Sequence[InputPartition], most: int) -> list[Group]:
    """At most `most` groups of adjacent tasks, with about equal numbers of messages."""
    sizes = [sum(_messages(part) for part in partition.value) for partition in parts]
    total, behind = sum(sizes), 0
    groups: dict[int, list[InputPartition]] = {}
    for part, size in zip(parts, sizes, strict=True):
        groups.setdefault(min(most * behind // max(total, 1), most - 1), []).append(part)
        behind += size
    return [tuple(group) for group in groups.values()]


def _messages(part: SplitPart | LakePart) -> int:
    return len(part.wanted) if part.wanted is not None else span_of(part).messages


def named(where: str) -> tuple[str, ...]:
    """The columns that a condition may name, and those that are sent. Words in strings count, too: they cost time."""
    words = {word.lower() for word in re.findall(r"\w+", where)}
    everything = "*" in where
    return tuple(name for name in columns.DEFAULT if name in SENT or everything or name.lower() in words)


def _hulls(spans: Iterable[ReplaySpan]) -> list[ReplaySpan]:
    """One span per partition, from its first message to its last."""
    found: dict[int, ReplaySpan] = {}
    for span in spans:
        before = found.get(span.partition, span)
        found[span.partition] = ReplaySpan(span.partition, min(before.first, span.first), max(before.end, span.end))
    return [found[partition] for partition in sorted(found)]


# ---- what is planned


def planned_range(
    found: Snapshot, *, since_ns: int | None = None, until_ns: int | None = None, offsets: Sequence[ReplaySpan] = ()
) -> list[ReplaySpan]:
    """The spans of a snapshot that was requested with these times, or of given offsets. ReadFailed: offsets of an
    unknown partition, or outside of its log; what retention removes later is reported when it is read."""
    if offsets:
        ends = {pin.identity.partition: pin for pin in found.pins}
        for span in offsets:
            if (pin := ends.get(span.partition)) is None:
                raise ReadFailed(f"there is no partition {span.partition}; `nsqha topic show` lists them")
            if span.end > pin.end.offset or span.first < pin.start.offset:
                have = f"[{pin.start.offset}, {pin.end.offset})"
                raise ReadFailed(
                    f"partition {span.partition}: asked for [{span.first}, {span.end}), there is {have}: ask for less"
                )
        return [span for span in offsets if span.messages]
    spans = []
    for pin in found.pins:
        times = found.times.get((pin.identity.topic, pin.identity.partition), {})
        first = pin.start.offset if since_ns is None else times[since_ns]
        end = pin.end.offset if until_ns is None else times[until_ns]
        if first < end:
            spans.append(ReplaySpan(pin.identity.partition, first, end))
    return spans


def planned_ids(found: Snapshot, ids: Iterable[str], *, skip_missing: bool = False) -> tuple[list[ReplaySpan], int]:
    """A span for each message, and the number of missing ones. ReadFailed names one, unless they may be skipped."""
    spans, missing, example = [], 0, ""
    for one in ids:
        number = int(one, 16)
        for pin in found.pins:
            offset = number - pin.identity.id_base
            if pin.start.offset <= offset < pin.end.offset:
                spans.append(ReplaySpan(pin.identity.partition, offset, offset + 1))
                break
        else:
            missing, example = missing + 1, example or one
    if missing and not skip_missing:
        raise ReadFailed(
            f"{missing} of the ids, such as {example}, are not in the log (of another topic, or removed by retention); "
            "--skip-missing sends the others"
        )
    return spans, missing


def pinned(log: Segments, topic: str, times_ns: Iterable[int] = (), *, lake: str = "") -> Snapshot:
    """Pin what is committed now, with a hold while waves run; with a lake from the lake's start. ReadFailed."""
    found = log.snapshot(SnapshotRequest(topics=(topic,), times_ns=tuple(sorted(set(times_ns))), hold_ms=HOLD_MS))
    if not lake:
        return found
    longer = history.lengthened(lake, found.pins, found.times)
    return replace(found, pins=longer.pins, times=longer.times)


def order_of(found: Snapshot, topic: str, into: str, asked: Mapping[str, Any]) -> Order:
    """What the replay is asked for, to compare with a saved state."""
    return Order(topic, found.pins[0].identity.topic_uid if found.pins else 0, into, dict(asked))
