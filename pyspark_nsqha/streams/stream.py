"""The stream source behind `spark.readStream.format("nsqha")`.

    initialOffset   where a new query begins: startingOffsets and the like, resolved once
    latestOffset    what is committed, within the limits; new partitions begin at their first message
    partitions      a plan of [start, end) from a new snapshot, whose log is proven to be the one that was read
    read            in a task: the rows of a split, as in the batch source
    commit          moves the floor of `commitChannel`; Spark calls it one micro-batch late

Spark passes [start, end) of every micro-batch from the checkpoint, also after a restart, so each message is read
exactly once into micro-batches. This requires that the log is the same one: before anything after a record is planned,
the log has to have the record's witness (`witnesses`).

The commit channel holds retention, or else a hold on what is planned, which reading renews.

Topics and partitions that do not exist any more are left out with failOnDataLoss=false, also from a micro-batch that
was planned with them: otherwise it could never be planned again. A topic that was created again is another one, by its
uid: offsets of the former one say nothing about it, neither where reading begins nor what retention may remove.

Spark 4.1 calls `latestOffset` without a start: there the limits count from the last end that this object returned, and
do not apply to the first micro-batch after a restart. Its start is known only in `partitions`, so the channel is moved
to it there.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from nsqha.ids import is_ephemeral, valid_name
from pyspark_nsqha import planner
from pyspark_nsqha.batch import columns_of, of_those_there, task_batches
from pyspark_nsqha.model import Gone, NotThere, PinnedPartition, ReadFailed
from pyspark_nsqha.options import (
    HOLD_MS,
    HOLD_MS_MAX,
    LATEST,
    Bounds,
    ConnectOptions,
    Given,
    OptionError,
    Reading,
    TopicSelection,
    parse_bounds,
    parse_connection,
    parse_reading,
    parse_subscription,
)
from pyspark_nsqha.planner import PlannedRange
from pyspark_nsqha.reading.rows import Recipe
from pyspark_nsqha.snapshot import Segments, Snapshot, SnapshotRequest, of_subscription
from pyspark_nsqha.streams.offsets import (
    BatchLimits,
    Key,
    PartitionOffset,
    Records,
    end_within,
    from_json,
    shares,
    to_json,
)
from pyspark_nsqha.streams.witnesses import Witnesses, entry_at, is_behind, same_topic

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # Spark 4.1
    ReadAllAvailable = ReadLimit = ReadMaxBytes = ReadMaxRows = ReadMinRows = None  # type: ignore[assignment,misc]
    SupportsTriggerAvailableNow = object  # type: ignore[assignment,misc]

logger = logging.getLogger(__name__)

RETRIES_LEAST = 15  # about 25 s: a query should survive a change of leader and a restart of the brokers
NAMED_MAX = 3  # partitions in one line
AGAIN_S = 0.2  # between two requests to a new leader that does not know its high watermark yet
SPARKS_OPTIONS = {"checkpointlocation", "queryname"}
_DURATION = re.compile(r"(\d{1,9})\s*(ms|s|m|min|h|d)?", re.IGNORECASE)
Life = tuple[str, int, int]
"""Topic, partition and the topic's uid."""

_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclass(frozen=True)
class StreamOptions:
    """All options of `spark.readStream.format("nsqha")`, parsed."""

    connection: ConnectOptions
    subscription: TopicSelection
    bounds: Bounds
    reading: Reading
    limits: BatchLimits
    commit_channel: str = ""
    hold_ms: int = HOLD_MS


def stream_options(options: Mapping[str, str]) -> StreamOptions:
    """Parse the options of a stream. OptionError names what cannot be used."""
    given = Given({name: value for name, value in options.items() if name.lower() not in SPARKS_OPTIONS}, "readStream")
    limits = BatchLimits(
        max_offsets=given.number("maxOffsetsPerTrigger", 0, 1, 10**12),
        max_bytes=given.size("maxBytesPerTrigger", 0, 1, 1 << 50),
        min_offsets=given.number("minOffsetsPerTrigger", 0, 1, 10**12),
        max_delay_s=_duration_ms(given, "maxTriggerDelay", 900_000) / 1000,
    )
    if 0 < limits.max_offsets < limits.min_offsets:
        raise OptionError(
            f"minOffsetsPerTrigger: {limits.min_offsets} is more than maxOffsetsPerTrigger, {limits.max_offsets}"
        )
    channel = given.text("commitChannel")
    if channel and not valid_name(channel):
        raise OptionError(f"commitChannel: {channel[:60]!r} is not a channel name")
    if is_ephemeral(channel):
        raise OptionError(f"commitChannel: {channel} is ephemeral: it would keep nothing from retention")
    connection = parse_connection(given)
    return StreamOptions(
        connection=replace(connection, retries=max(connection.retries, RETRIES_LEAST)),
        subscription=parse_subscription(given),
        bounds=parse_bounds(given, start=LATEST),
        reading=parse_reading(given),
        limits=limits,
        commit_channel=channel,
        hold_ms=given.number("holdMs", HOLD_MS, 0, HOLD_MS_MAX),
    )


def _duration_ms(given: Given, name: str, default: int) -> int:
    if not given.has(name):
        return default
    match = _DURATION.fullmatch(given.text(name))
    if match is None:
        raise OptionError(f"{name}: {given.text(name)[:60]!r} is not a duration such as 90s, 15m or 500ms")
    return int(match[1]) * _MS[(match[2] or "ms").lower()]


def stream_reader(options: Mapping[str, str], pinned: Snapshot | None, schema: StructType) -> StreamReader:
    """The reader of one query. OptionError. What was pinned at load() is not used: a query begins when it starts."""
    return StreamReader(stream_options(options), schema)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans in a process beside the driver that lives as long as the query; tasks get the recipe and their splits."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        connection = options.connection
        self._schema = schema
        self._recipe = Recipe(columns_of(schema), options.reading, connection)
        witnesses = Witnesses(partial(entry_at, connection))
        self._plans: Plans | None = Plans(options, Segments(connection), witnesses)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_plans": None}

    @property
    def plans(self) -> Plans:
        assert self._plans is not None, "tasks do not plan"
        return self._plans

    def initialOffset(self) -> dict[str, Any]:
        return to_json(self.plans.initial())

    def getDefaultReadLimit(self) -> ReadLimit:
        """One of the limits: Spark passes it back unless it wants everything. `latestOffset` applies all of them."""
        limits = self.plans.limits
        if limits.max_offsets:
            return ReadMaxRows(limits.max_offsets)
        if limits.max_bytes:
            return ReadMaxBytes(limits.max_bytes)
        if limits.min_offsets:
            return ReadMinRows(limits.min_offsets)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        everything = ReadAllAvailable is not None and isinstance(limit, ReadAllAvailable)
        return to_json(self.plans.latest(None if start is None else from_json(start), everything=everything))

    def prepareForTriggerAvailableNow(self) -> None:
        self.plans.stop_at_now()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return to_json(self.plans.committed) or None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [InputPartition(task) for task in self.plans.tasks(from_json(start), from_json(end))]

    def commit(self, end: dict[str, Any]) -> None:
        self.plans.done(from_json(end))

    def stop(self) -> None:
        self.plans.stop()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of one task, in order of offsets."""
        return task_batches(partition.value, self._schema, self._recipe)


class QueryHold:
    """The hold of one query: what is planned is kept until its tasks have read it."""

    def __init__(self, segments: Segments, now: Callable[[], float]) -> None:
        self.id = ""  # empty: there is none
        self._segments = segments
        self._now = now
        self._since = 0.0
        self._lives: frozenset[Life] = frozenset()

    def covers(self, lives: set[Life], hold_ms: int) -> bool:
        """Whether it is of these, and young enough for one more micro-batch."""
        return bool(self.id) and lives <= self._lives and self._now() - self._since < hold_ms / 3000

    def keep(self, found: Snapshot) -> None:
        """Use the hold of this snapshot from now on."""
        self.release()
        self.id, self._since = found.hold_id, self._now()
        self._lives = frozenset(_life(pin) for pin in found.pins)

    def release(self) -> None:
        hold_id, self.id = self.id, ""
        if hold_id:
            try:
                self._segments.release_hold(hold_id)
            except ReadFailed as error:
                logger.info("hold %s was not released; it ends by itself: %s", hold_id, error)


class Plans:
    """Plans the micro-batches of one query: what it has read, what is committed, and what is next."""

    def __init__(
        self,
        options: StreamOptions,
        segments: Segments,
        witnesses: Witnesses,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.limits = options.limits
        self.committed: Records = {}  # what was committed in the last snapshot
        self._options = options
        self._segments = segments
        self._now = now
        self._sleep = sleep
        self._initial: Records | None = None
        self._handed: Records | None = None  # the last end that was returned
        self._target: dict[Key, int] | None = None  # with Trigger.AvailableNow
        self._last_batch_at = float("-inf")
        self._witnesses = witnesses
        self._lives: dict[Key, int] = {}  # the topic's uid in the last snapshot
        self._missed: frozenset[str] = frozenset()  # topics by name that did not exist in the last snapshot
        self._channelled: set[Life] = set()
        self._hold = QueryHold(segments, now)

    @property
    def _strict(self) -> bool:
        return self._options.reading.fail_on_data_loss

    # ---- offsets

    def initial(self) -> Records:
        """Where a new query begins; the same in every call. ReadFailed, Gone."""
        if self._initial is None:
            bounds, subscription = self._options.bounds, self._options.subscription
            found = self._segments.snapshot(
                of_subscription(subscription, times_ns=bounds.start.instants, channel=bounds.channel)
            )
            ranges = planner.resolve(
                found.pins,
                subscription,
                bounds,
                times=found.times,
                floors=found.floors,
                fail_on_data_loss=self._strict,
            )
            self._initial = self._handed = {one.key: PartitionOffset.at(one.pin, one.first) for one in ranges}
        return self._initial

    def latest(self, start: Records | None, *, everything: bool) -> Records:
        """The end of the next micro-batch; `start` if there is none. ReadFailed, Gone: as `tasks`."""
        start = self._handed if start is None else start
        restarted = start is None  # with Spark 4.1: where the query is, is not known before `tasks`
        pins = self._pins(of_subscription(self._options.subscription), start or {})
        self.committed = {key: PartitionOffset.at(pin, pin.end.offset) for key, pin in pins.items()}
        begun, new = self._begun(start or {}, pins)
        if not restarted:
            self._claim_channel(begun)
            self._begin_channel(begun)
        ends = {key: pins[key].end.offset for key in begun}
        if self._target is not None:
            ends = {key: min(end, self._target.get(key, begun[key].offset)) for key, end in ends.items()}
        if restarted and not everything and self.limits.any:
            logger.warning("Spark 4.1 does not pass the start of a restarted query: its first micro-batch has no limit")
        elif not everything:
            ends = self._limited(begun, ends, pins)
        initial = self._initial or {}
        self._handed = {
            # A new partition is included also without a message, so that its start is recorded. The start of the query
            # itself is not in a checkpoint: Spark asks for it again when it plans the first micro-batch again.
            key: PartitionOffset.at(pins[key], max(record.offset, ends[key]), record.offset)
            if key in new or (initial.get(key) == record and record.offset < ends[key])
            else record.moved(pins[key], max(record.offset, ends[key]))
            for key, record in begun.items()
        }
        return self._handed

    def stop_at_now(self) -> None:
        """For Trigger.AvailableNow: the query ends at what is committed now."""
        pins = self._pins(of_subscription(self._options.subscription), {})
        self._target = {key: pin.end.offset for key, pin in pins.items()}

    def _begun(self, start: Records, pins: Mapping[Key, PinnedPartition]) -> tuple[Records, set[Key]]:
        """The next message of each partition: from `start`, or the first one of a new partition; and the new ones."""
        begun = {key: record for key, record in start.items() if key in pins and same_topic(record, pins[key])}
        new = {key for key in pins.keys() - begun.keys() if self._target is None or key in self._target}
        for key in new:
            begun[key] = PartitionOffset.at(pins[key], pins[key].start.offset)
        # The log was truncated below what was read, and the user wants to continue.
        for key, record in begun.items():
            if record.offset > pins[key].end.offset:
                begun[key] = PartitionOffset.at(pins[key], pins[key].end.offset)
        return begun, new

    def _limited(self, begun: Records, ends: dict[Key, int], pins: Mapping[Key, PinnedPartition]) -> dict[Key, int]:
        waiting = {key: max(0, end - begun[key].offset) for key, end in ends.items()}
        limits = self.limits
        if self._target is None and limits.too_few(sum(waiting.values()), self._now() - self._last_batch_at):
            return {key: begun[key].offset for key in ends}
        if any(waiting.values()):
            self._last_batch_at = self._now()
        if limits.max_offsets:
            taken = shares(waiting, limits.max_offsets)
            ends = {key: begun[key].offset + taken.get(key, 0) for key in ends}
        if limits.max_bytes and any(waiting.values()):
            ends = self._limited_bytes(begun, ends, pins)
        return ends

    def _limited_bytes(
        self, begun: Records, ends: dict[Key, int], pins: Mapping[Key, PinnedPartition]
    ) -> dict[Key, int]:
        """The ends with at most maxBytesPerTrigger in sum, from borders that are requested where messages wait."""
        sizes = {}
        wanted = []
        for key, end in ends.items():
            first, pin = begun[key].offset, pins[key]
            if end <= first:
                continue
            mean = (pin.end.position - pin.start.position) / max(1, pin.end.offset - pin.start.offset)
            sizes[key] = max(1, int(mean * (end - first)))
            # No more borders than the limit can use, even if messages have half the mean size.
            wanted.append((*key, first, min(end, first + 1 + int(2 * self.limits.max_bytes / max(mean, 1)))))
        if not wanted:
            return ends
        divided, _ = self._of_those_there(_in_ranges(wanted))
        cuts = {_key(pin): pin.cuts for pin in divided.pins}
        taken = shares(sizes, self.limits.max_bytes)
        found = dict(ends)
        for topic, partition, first, end in wanted:
            key = (topic, partition)
            if borders := cuts.get(key):
                found[key] = end_within(borders, first, end, taken[key])
        return found

    # ---- a micro-batch

    def tasks(self, start: Records, end: Records) -> list[planner.Task]:
        """The splits of [start, end). ReadFailed: it cannot be read as planned; Gone: messages of it are lost."""
        self._handed = end
        first_of = {key: _first(start.get(key), record) for key, record in end.items()}
        wanted = [(*key, first_of[key], record.offset) for key, record in end.items() if first_of[key] < record.offset]
        pins: dict[Key, PinnedPartition] = {}
        if wanted:
            keys = [(topic, partition) for topic, partition, *_ in wanted]
            pins = self._pins(self._asked(wanted, end), {key: end[key] for key in keys})
            self._check({key: start[key] for key in keys if key in start and key in pins}, pins)
        # Also for partitions that are not planned: retention shall wait there from now on.
        there = {key: record for key, record in end.items() if self._lives.get(key) == record.uid}
        begun = {key: replace(record, offset=min(first_of[key], record.offset)) for key, record in there.items()}
        self._begin_channel(begun)
        ranges = []
        for topic, partition, first, behind in wanted:
            pin = pins.get((topic, partition))
            left = first
            if pin is not None and same_topic(end[topic, partition], pin):
                left = max(first, min(behind, pin.end.offset))
                if first < left:
                    ranges.append(planner.available(PlannedRange(pin, first, left), pin.start.offset, self._strict))
            if left < behind:
                logger.warning(
                    "%s/%d: %d messages [%d, %d) of a planned micro-batch are gone, and left out",
                    topic, partition, behind - left, left, behind,
                )  # fmt: skip
        reading = self._options.reading
        return planner.plan(
            [one for one in ranges if one.first < one.end],
            split_bytes=reading.split_bytes,
            min_partitions=reading.min_partitions,
            hold_id=self._hold.id,
        )

    def done(self, end: Records) -> None:
        """Everything before `end` is processed: move the commit channel there. Offsets of a topic that was created
        again since are left out: they say nothing about the present topic."""
        if not self._options.commit_channel:
            return
        try:
            there = {key: record for key, record in end.items() if self._lives.get(key) == record.uid}
            self._move_channel(there, back=False)
        except ReadFailed as error:
            # The next micro-batch moves it as well; until then more is kept than needed.
            logger.warning("commitChannel %s was not moved: %s", self._options.commit_channel, error)

    def stop(self) -> None:
        """The query ends: release the hold. Spark does not always call this; a hold ends by itself."""
        self._hold.release()

    # ---- holds and the commit channel

    def _asked(self, wanted: list[Any], end: Records) -> SnapshotRequest:
        """The request for a snapshot with borders, and a new hold if none is young enough: a hold never rises."""
        asked = _in_ranges(wanted)
        lives = {(topic, partition, end[topic, partition].uid) for topic, partition, *_ in wanted}
        hold_ms = 0 if self._options.commit_channel else self._options.hold_ms
        return asked if not hold_ms or self._hold.covers(lives, hold_ms) else replace(asked, hold_ms=hold_ms)

    def _claim_channel(self, begun: Records) -> None:
        """ReadFailed if a query without a checkpoint would move floors that are elsewhere: another reader may need the
        messages there."""
        initial, channel = self._initial or {}, self._options.commit_channel
        begins = {k: r for k, r in begun.items() if initial.get(k) == r and (*k, r.uid) not in self._channelled}
        if not begins or not channel:
            return
        floors = self._segments.snapshot(of_subscription(self._options.subscription, channel=channel)).floors
        other = {k: r for k, r in begins.items() if k in floors and floors[k] != r.offset}
        if not other:
            return
        # Moves nothing, and raises ReadFailed if this is not a reader channel at all.
        self._move_channel({key: replace(record, offset=0) for key, record in other.items()}, back=False)
        places = [f"{t}/{p} at {floors[t, p]} (the query begins at {r.offset})" for (t, p), r in sorted(other.items())]
        more = f" and {len(places) - NAMED_MAX} more" if len(places) > NAMED_MAX else ""
        raise ReadFailed(
            f"commitChannel {channel} is elsewhere: {', '.join(places[:NAMED_MAX])}{more}; another reader may need it "
            f"there: name another channel, begin where it is (startingChannel {channel}), or move it with nsqha seek"
        )

    def _begin_channel(self, begun: Records) -> None:
        """Move the channel to where this query begins, in every partition, before anything of it is read."""
        new = {(*key, record.uid): (key, record) for key, record in begun.items()}
        new = {life: one for life, one in new.items() if life not in self._channelled}
        if new and self._options.commit_channel:
            self._move_channel(dict(new.values()), back=True)
            self._channelled |= new.keys()

    def _move_channel(self, records: Records, *, back: bool) -> None:
        by_topic: dict[tuple[str, int], dict[int, int]] = {}
        for (topic, partition), record in records.items():
            by_topic.setdefault((topic, record.uid), {})[partition] = record.offset
        for (topic, uid), offsets in by_topic.items():
            self._segments.commit_reader(topic, self._options.commit_channel, offsets, back=back, topic_uid=uid)

    # ---- the same log, or another one

    def _pins(self, asked: SnapshotRequest, known: Records) -> dict[Key, PinnedPartition]:
        """What is committed now, of a log that has the witnesses of `known`. Gone, ReadFailed: it does not have them.

        With failOnDataLoss=false this is logged instead."""
        deadline = self._now() + self._options.connection.timeout_ms / 1000
        while True:
            found, refusal = self._of_those_there(asked)
            if asked.hold_ms:
                self._hold.keep(found)
                asked = replace(asked, hold_ms=0)
            pins = {_key(one): one for one in found.pins if self._options.subscription.wants(*_key(one))}
            # A new leader has to commit its first batch before it knows that everything before is committed.
            behind = [k for k, r in known.items() if k in pins and same_topic(r, pins[k]) and is_behind(r, pins[k])]
            if not behind or self._now() >= deadline:
                break
            self._sleep(AGAIN_S)
        if asked.ranges is None:
            self._lives = {}
        self._lives |= {key: pin.identity.topic_uid for key, pin in pins.items()}
        self._check(known, pins)
        self._miss(asked, pins, refusal)
        return pins

    def _of_those_there(self, asked: SnapshotRequest) -> tuple[Snapshot, ReadFailed | None]:
        """A snapshot without what does not exist any more, and the brokers' error about it. ReadFailed: as `snapshot`.

        If something does not exist and that is an error, the snapshot is one of whole topics."""
        try:
            return self._segments.snapshot(asked), None
        except NotThere as error:
            if not asked.topics:
                raise
            refusal = error
        there = self._segments.snapshot(of_those_there(TopicSelection(topics=asked.topics)))
        there = replace(there, pins=tuple(pin for pin in there.pins if pin.identity.topic in asked.topics))
        if asked.ranges is None or self._strict:
            return there, refusal
        keys = {_key(pin) for pin in there.pins}
        left = [one for one in asked.ranges if one[:2] in keys]
        if len(left) == len(asked.ranges):  # one node does not know a topic yet that another one knows
            raise refusal
        if not left:
            return Snapshot(()), None
        return self._of_those_there(_in_ranges(left, asked.hold_ms))

    def _miss(self, asked: SnapshotRequest, pins: Mapping[Key, PinnedPartition], refusal: ReadFailed | None) -> None:
        """Report topics that are named and do not exist. ReadFailed with failOnDataLoss."""
        if refusal is not None and self._strict:
            raise ReadFailed(f"{refusal}; leave it out, or set failOnDataLoss to false to continue without it")
        if asked.ranges is not None:
            return
        missed = frozenset(asked.topics) - {topic for topic, _ in pins} if refusal is not None else frozenset()
        if missed - self._missed:
            names = ", ".join(sorted(missed))
            logger.warning("there is no topic %s; the query continues without it, as failOnDataLoss is false", names)
        self._missed = missed

    def _check(self, known: Records, pins: Mapping[Key, PinnedPartition]) -> None:
        for key, record in known.items():
            if key not in pins and not self._selects(key, record):
                self._left_out(key)
            elif why := self._witnesses.differs(key, record, pins.get(key)):
                self._lost(why)

    def _selects(self, key: Key, record: PartitionOffset) -> bool:
        """Whether a partition that was not found would be read if it existed. ReadFailed."""
        subscription = self._options.subscription
        if subscription.names:
            return key[0] in subscription.names and subscription.wants(*key)
        there = self._segments.snapshot(of_those_there(TopicSelection(topics=(key[0],)))).pins
        return not any(_key(pin) == key and same_topic(record, pin) for pin in there)

    def _left_out(self, key: Key) -> None:
        """Report that the subscription differs from that of the checkpoint. ReadFailed with failOnDataLoss."""
        subscription = self._options.subscription
        option = "subscribe" if subscription.topics else "assign" if subscription.assigned else "subscribePattern"
        what = f"{key[0]}/{key[1]}" if subscription.assigned else key[0]
        line = f"the checkpoint reads {what}, but {option} does not name it any more"
        if self._strict:
            raise ReadFailed(
                f"{line}: name it, or use a new checkpointLocation; failOnDataLoss false continues without it"
            )
        logger.warning("%s; the query continues without it, as failOnDataLoss is false", line)

    def _lost(self, why: str) -> None:
        if self._strict:
            raise Gone(f"{why}; failOnDataLoss false continues with what is left, a new checkpointLocation starts over")
        logger.warning("%s; the query continues with what is left, as failOnDataLoss is false", why)


def _key(pin: PinnedPartition) -> Key:
    return pin.identity.topic, pin.identity.partition


def _life(pin: PinnedPartition) -> Life:
    return (*_key(pin), pin.identity.topic_uid)


def _in_ranges(wanted: Iterable[tuple[str, int, int, int]], hold_ms: int = 0) -> SnapshotRequest:
    """The request for a snapshot with the borders of these ranges."""
    ranges = tuple(wanted)
    return SnapshotRequest(tuple(sorted({topic for topic, *_ in ranges})), ranges=ranges, hold_ms=hold_ms)


def _first(start: PartitionOffset | None, end: PartitionOffset) -> int:
    """The offset where a micro-batch begins in a partition."""
    if start is None or start.uid != end.uid or (end.first is not None and start.first is None):
        return end.offset if end.first is None else end.first
    return start.offset
