"""The batch source behind `spark.read.format("nsqha")`: pin, plan, read.

    pin          in DefaultSource.__init__: one snapshot, with a short hold; it ends at what was committed then
    partitions   in the planner: ranges inside the pinned ends; a second snapshot has borders and replicas for these
                 and makes the hold a long one
    read         in a task: runs of batches, verified, as Arrow; exactly as many rows as were planned, or an error

There are two reader classes, because Spark refuses every query, also one without a filter, of a reader that has
pushFilters while `spark.sql.python.filterPushdown.enabled` is off, which is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from nsqha.ids import is_ephemeral
from pyspark_nsqha import planner
from pyspark_nsqha.model import NotThere, PinnedPartition
from pyspark_nsqha.options import (
    HOLD_MS_MAX,
    BatchOptions,
    Bounds,
    Given,
    OptionError,
    TopicSelection,
    batch_options,
    is_id,
    parse_bounds,
    parse_connection,
    parse_reading,
    parse_subscription,
)
from pyspark_nsqha.planner import PlannedRange, Restriction, SplitPart
from pyspark_nsqha.reading import columns
from pyspark_nsqha.snapshot import Segments, Snapshot, SnapshotRequest, of_subscription

if TYPE_CHECKING:
    from pyspark_nsqha.reading.rows import Recipe

NULLS = ("key", "headers", "deliver_at", columns.CORRUPT)
LOAD_HOLD_MS = 120_000  # without option holdMs: from load() to a plan, which makes it as long as holdMs
NAMED_MAX = 100  # topics that are requested as one pattern: with more of them its automaton does not fit in memory
RANGES_ASKED_MAX = 1000  # around single messages, in one request; more are asked for as one range per partition


# ---- at load()


def pin(options: Mapping[str, str]) -> Snapshot:
    """Pin what is committed now, for a batch read or a stream: it is not known yet which of them it will be.

    So the hold is short. A stream does not use it and cannot release it, as it may be shared; a query that is started
    repeatedly would fill a partition's holds. For the same reason a missing topic is not an error yet where
    failOnDataLoss is false: a stream continues without it (`batch_reader` refuses it)."""
    given = Given(options, None)
    subscription, bounds = parse_subscription(given), parse_bounds(given)
    reading = parse_reading(given)
    schema(options)
    archive = given.text("archive")
    if path := given.text("path"):
        if archive:
            raise OptionError("archive goes with brokers, not with path: files of a stopped node are read alone")
        return _pinned_files(path, subscription, bounds)
    connection = parse_connection(given)
    hold_ms = 0 if _is_stream(given) else given.number("holdMs", LOAD_HOLD_MS, 0, HOLD_MS_MAX)
    holder = (connection.brokers, subscription, hold_ms)
    shared = _young_hold(holder)
    strict = reading.fail_on_data_loss or len(subscription.names) > NAMED_MAX
    asked = (of_subscription if strict else of_those_there)(
        subscription,
        times_ns=tuple(sorted({*bounds.start.instants, *bounds.end.instants})),
        channel=bounds.channel,
        # A shared hold is not requested again: a plan may have made it long, and a request would make it short.
        hold_ms=0 if shared else hold_ms,
        hold_id=shared,
    )
    found = Segments(connection).snapshot(asked)
    if shared:
        found = replace(found, hold_id=shared)
    elif hold_ms:
        _holds[holder] = found.hold_id, monotonic()
    if archive:
        from pyspark_nsqha.lake import history

        longer = history.lengthened(archive, found.pins, found.times)
        found = replace(found, pins=longer.pins, times=longer.times)
    # The planner asks for replicas again; here they are left out, as the object is pickled into every plan.
    return replace(found, pins=tuple(replace(one, replicas=()) for one in found.pins))


_Holder = tuple[tuple[str, ...], TopicSelection, int]
_holds: dict[_Holder, tuple[str, float]] = {}
"""The holds of this process: hold id, and when it was made. Spark uses one process for many calls of load()."""


def _young_hold(holder: _Holder) -> str:
    """The hold of an earlier load() to share, or an empty id. A partition takes 64 holds, and a job may call load() in
    a loop; but the offset of a hold never rises, so a hold is shared for a third of its time only."""
    for other in [one for one, (_, since) in _holds.items() if monotonic() - since > one[2] / 3000]:
        del _holds[other]
    return _holds.get(holder, ("", 0.0))[0]


def of_those_there(subscription: TopicSelection, **more: Any) -> SnapshotRequest:
    """The request for all that is subscribed to, as `of_subscription`, but by a pattern, so that a missing topic is not
    an error. With more than NAMED_MAX names the pattern matches all topics."""
    if subscription.pattern:
        return of_subscription(subscription, **more)
    names = subscription.names
    pattern = "|".join(name.replace(".", r"\.") for name in names) if len(names) <= NAMED_MAX else ".*"
    return SnapshotRequest(pattern=pattern, **more)


def _is_stream(given: Given) -> bool:
    """Whether the options are only for a stream, which needs no hold here."""
    only = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "commitChannel")
    return any(given.has(name) for name in only)


def _pinned_files(path: str, subscription: TopicSelection, bounds: Bounds) -> Snapshot:
    """A snapshot of files: they do not change, so borders are read at once."""
    from pyspark_nsqha.reading import files

    if bounds.channel:
        raise OptionError("startingChannel: files have no offsets of channels; give startingOffsets, or brokers")
    matches = _matcher(subscription)
    pins = files.pins(path, lambda topic, partition: matches(topic) and subscription.wants(topic, partition))
    there = {pin.identity.topic for pin in pins}
    if missing := sorted(set(subscription.names) - there):
        raise NotThere(f"path={path}: there is no topic {', '.join(missing)} in it")
    instants = {*bounds.start.instants, *bounds.end.instants}
    times = {(pin.identity.topic, pin.identity.partition): files.offsets_for_times(pin, instants) for pin in pins}
    return Snapshot(pins, times)


def _matcher(subscription: TopicSelection) -> Callable[[str], bool]:
    """A function that says whether a topic is subscribed to; partitions are not checked."""
    if not subscription.pattern:
        return lambda topic: topic in subscription.names
    import re2  # the brokers' syntax

    try:
        pattern = re2.compile(subscription.pattern)
    except re2.error as error:
        raise OptionError(f"subscribePattern: {error}") from None
    return lambda topic: not is_ephemeral(topic) and pattern.fullmatch(topic) is not None


def schema(options: Mapping[str, str]) -> str:
    """The columns as Spark's DDL. OptionError."""
    given = Given(options, None)
    parse_subscription(given)
    reading = parse_reading(given)
    names = reading.columns or columns.DEFAULT
    if reading.mode == "PERMISSIVE" and not reading.columns:
        names = (*names, columns.CORRUPT)
    try:
        return columns.ddl(names)
    except ValueError as error:
        raise OptionError(str(error)) from None


# ---- in the planner


def batch_reader(options: Mapping[str, str], pinned: Snapshot | None, schema: StructType) -> BatchReader:
    """The reader of one plan. OptionError if an option is wrong, or not for a batch. ReadFailed: no such topic."""
    asked = batch_options(options)
    assert pinned is not None, "a subscription is pinned at load()"
    there = {pin.identity.topic for pin in pinned.pins}
    if missing := sorted(set(asked.subscription.names) - there):
        raise NotThere(f"there is no topic {', '.join(missing)}; `nsqha topic list` shows what there is")
    kind = PushingReader if asked.pushdown else BatchReader
    return kind(asked, pinned, schema)


class BatchReader(DataSourceReader):
    """Plans in the planner, reads in tasks; a task gets only the recipe and its own splits."""

    def __init__(self, options: BatchOptions, pinned: Snapshot, schema: StructType) -> None:
        self._schema = schema
        self._columns = columns_of(schema)
        self._reading = options.reading
        self._connection = options.connection
        self._options: BatchOptions | None = options
        self._pinned: Snapshot | None = pinned
        self._restriction = Restriction()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_options": None, "_pinned": None, "_restriction": None}

    def partitions(self) -> Sequence[InputPartition]:
        """One per task. ReadFailed: a bound, an id or a partition does not exist."""
        options, pinned = self._options, self._pinned
        assert options is not None and pinned is not None, "the planner has them"
        reading = options.reading
        ranges = planner.resolve(
            pinned.pins,
            options.subscription,
            options.bounds,
            times=pinned.times,
            floors=pinned.floors,
            fail_on_data_loss=reading.fail_on_data_loss,
        )
        if options.ids:
            ranges = planner.narrow_to_ids(ranges, options.ids, reading.fail_on_data_loss)
        ranges = [one for one in self._restriction.apply(ranges) if one.first < one.end]
        if not ranges:
            return []
        now, hold_id = self._now(ranges)
        from_lake: Sequence[Any] = ()
        if options.archive:
            from_lake, ranges = self._from_lake(options.archive, ranges, now)
        ranges = planner.with_borders(ranges, now, reading.fail_on_data_loss)
        tasks = planner.plan(
            [self._restriction.by_time(one) for one in ranges],
            split_bytes=reading.split_bytes,
            min_partitions=reading.min_partitions,
            hold_id=hold_id,
        )
        return [InputPartition(task) for task in (*from_lake, *tasks)]

    def _from_lake(
        self, uri: str, ranges: Sequence[PlannedRange], now: Sequence[PinnedPartition]
    ) -> tuple[Sequence[Any], list[PlannedRange]]:
        """Tasks for what retention has removed from the log, and the ranges that the log has."""
        from pyspark_nsqha.lake import history

        parts, left = history.divide(
            uri,
            ranges,
            now,
            since_ns=self._restriction.since_ns,
            until_ns=self._restriction.until_ns,
            fail_on_data_loss=self._reading.fail_on_data_loss,
        )
        return history.tasks(parts, self._reading.split_bytes), left

    def _now(self, ranges: Sequence[PlannedRange]) -> tuple[Sequence[Any], str]:
        """Borders and replicas of these ranges now, and the hold on them."""
        options, pinned = self._options, self._pinned
        assert options is not None and pinned is not None
        if options.connection is None:
            return pinned.pins, ""
        asked = SnapshotRequest(
            topics=tuple(sorted({one.key[0] for one in ranges})),
            ranges=tuple(_asked_ranges(ranges)),
            hold_ms=options.hold_ms,
            hold_id=pinned.hold_id,
        )
        found = Segments(options.connection).snapshot(asked)
        return found.pins, found.hold_id

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of one task, in order."""
        from pyspark_nsqha.reading.rows import Recipe

        return task_batches(partition.value, self._schema, Recipe(self._columns, self._reading, self._connection))


def task_batches(task: tuple[SplitPart, ...] | None, schema: StructType, recipe: Recipe) -> Iterator[Any]:
    """The rows of one task, in order, as Spark expects them for `schema`."""
    if task is None:  # Spark's only task for a plan without tasks
        return
    import inspect

    from pyspark.sql.pandas.types import to_arrow_schema

    from pyspark_nsqha.reading.rows import part_batches

    # Spark compares only the first batch of a task with the schema that it expects: all get that schema here.
    # Spark 4.1 has no parameter for the zone, and uses UTC.
    zone: dict[str, Any] = {"timezone": "UTC"}
    wanted = to_arrow_schema(schema, **zone if "timezone" in inspect.signature(to_arrow_schema).parameters else {})
    for part in task:
        for batch in part_batches(part, recipe) if isinstance(part, SplitPart) else _lake_batches(part, recipe):
            yield batch if batch.schema.equals(wanted) else batch.from_arrays(batch.columns, schema=wanted)


def _lake_batches(part: Any, recipe: Recipe) -> Iterator[Any]:
    from pyspark_nsqha.lake.history import part_rows

    return part_rows(part, recipe.columns)


class PushingReader(BatchReader):
    """A BatchReader that turns filters into ranges. Spark applies all filters again: ranges may contain more."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._restriction = restriction(filters)
        return filters


def columns_of(schema: StructType) -> tuple[str, ...]:
    """The names of a schema, which may be the user's. OptionError if one is not a column, or of another type."""
    names = tuple(schema.fieldNames())
    try:
        ours = columns.check(names)
    except ValueError as error:
        raise OptionError(str(error).replace("columns:", "schema:", 1)) from None
    for field in schema.fields:
        kind, said = columns.type_of(field.name), field.dataType.simpleString()
        if said != kind:
            raise OptionError(f"schema: column {field.name} is {kind}, not {said}; cast it in a select")
        if not field.nullable and field.name in NULLS:
            raise OptionError(f"schema: column {field.name} has nulls; leave out its NOT NULL")
    return ours


def _asked_ranges(ranges: Iterable[PlannedRange]) -> Iterator[tuple[str, int, int, int]]:
    """Where borders are needed: around whole ranges, or around single messages if these are not too many."""
    ranges = list(ranges)
    single = sum(len(one.wanted) for one in ranges if one.wanted is not None) <= RANGES_ASKED_MAX
    for one in ranges:
        topic, partition = one.key
        if one.wanted is None or not single:
            yield topic, partition, one.first, one.end
            continue
        for offset in one.wanted:
            yield topic, partition, offset, offset + 1


# ---- filters


def restriction(filters: Iterable[Filter]) -> Restriction:
    """What all filters together say about ranges; filters that say nothing about them are skipped."""
    found = Restriction()
    for one in filters:
        attribute: tuple[str, ...] = getattr(one, "attribute", ())
        if len(attribute) == 1 and (meet := _MEET.get(attribute[0].lower())) is not None:
            found = meet(found, one)
    return found


def _values(one: Filter) -> frozenset[Any] | None:
    """The values that the column may have; None: the filter does not say."""
    if isinstance(one, (EqualTo, EqualNullSafe)):
        return frozenset({one.value}) if one.value is not None else frozenset()
    if isinstance(one, In):
        return frozenset(value for value in one.value if value is not None)
    return None


def _span(one: Filter, least: int, most: int) -> tuple[int, int]:
    """The range of integers that the filter allows, both ends included."""
    value = getattr(one, "value", None)
    if isinstance(value, bool) or not isinstance(value, int):
        return least, most
    if isinstance(one, GreaterThan):
        return max(least, value + 1), most
    if isinstance(one, GreaterThanOrEqual):
        return max(least, value), most
    if isinstance(one, LessThan):
        return least, min(most, value - 1)
    if isinstance(one, LessThanOrEqual):
        return least, min(most, value)
    return least, most


def _both(one: frozenset[Any] | None, other: frozenset[Any] | None) -> frozenset[Any] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _meet_topic(found: Restriction, one: Filter) -> Restriction:
    return replace(found, topics=_both(found.topics, _values(one)))


def _meet_partition(found: Restriction, one: Filter) -> Restriction:
    least, most = _span(one, found.partition_least, found.partition_most)
    return replace(found, partitions=_both(found.partitions, _values(one)), partition_least=least, partition_most=most)


def _meet_offset(found: Restriction, one: Filter) -> Restriction:
    first, last = _span(one, found.first, found.end - 1)
    return replace(found, offsets=_both(found.offsets, _values(one)), first=first, end=max(last + 1, 0))


def _meet_id(found: Restriction, one: Filter) -> Restriction:
    values = _values(one)
    if values is not None:
        values = frozenset(value for value in values if is_id(value))
    return replace(found, ids=_both(found.ids, values))


def _meet_timestamp(found: Restriction, one: Filter) -> Restriction:
    """The column has microseconds, the log nanoseconds."""
    values = _values(one)
    times = [_micros(value) for value in (values if values is not None else [getattr(one, "value", None)])]
    if any(at is None for at in times) or not times:
        return found
    low, high = min(at for at in times if at is not None), max(at for at in times if at is not None)
    since, until = found.since_ns, found.until_ns
    if values is not None or isinstance(one, (GreaterThan, GreaterThanOrEqual)):
        since = max(since, low * 1000)
    if values is not None or isinstance(one, (LessThan, LessThanOrEqual)):
        until = min(until, (high + 1) * 1000)
    return replace(found, since_ns=since, until_ns=until)


def _meet_timestamp_ns(found: Restriction, one: Filter) -> Restriction:
    since, last = _span(one, found.since_ns, found.until_ns - 1)
    if (values := _values(one)) is not None and values:
        since, last = max(since, min(values)), min(last, max(values))
    return replace(found, since_ns=since, until_ns=last + 1)


def _micros(value: object) -> int | None:
    """Microseconds since 1970; None for a time without a zone, which is in the session's zone."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    since = value - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 10**6 + since.microseconds


_MEET = {
    "topic": _meet_topic,
    "partition": _meet_partition,
    "offset": _meet_offset,
    "id": _meet_id,
    "timestamp": _meet_timestamp,
    "timestamp_ns": _meet_timestamp_ns,
}
