"""The stream source behind `spark.readStream.format("nsqha")`.

    initialOffset   where a new query begins: startingOffsets and the like, resolved once
    latestOffset    what is committed, less what the limits leave for later; new partitions begin at their first message
    partitions      a plan of [start, end) from a snapshot of now, whose log is proven to be the one that was read
    read            in a task: the rows of a split, as of the batch source
    commit          moves the floor of `commitChannel`; Spark says it one micro-batch late

Spark gives every micro-batch [start, end) as the checkpoint has them, also after a restart, so each message is read
exactly once into micro-batches. That rests on the log being the same one: before anything behind a record is planned,
the log has to have the record's witness (`stream_witnesses`).

Retention is held by the commit channel, or else by a hold on what is planned, renewed by reading.

Topics and partitions that are not there any more are left out with failOnDataLoss=false, also of a micro-batch that was
planned with them: it could never be planned again otherwise. A topic that was made anew is another one, by its uid:
offsets of one life say nothing about the next, neither where reading begins nor what retention may take.

Spark 4.1 calls `latestOffset` without a start: there the limits count from what this object handed out last, and not at
all in the first micro-batch after a restart. Where that begins is known from `partitions` on, and so it is there that
the channel is put.
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
from pyspark_nsqha.rows import Recipe
from pyspark_nsqha.snapshot import Segments, Snapshot, SnapshotRequest, of_subscription
from pyspark_nsqha.stream_offsets import (
    BatchLimits,
    Key,
    PartitionOffset,
    Records,
    end_within,
    from_json,
    shares,
    to_json,
)
from pyspark_nsqha.stream_witnesses import Witnesses, entry_at, is_behind, same_topic

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

RETRIES_LEAST = 15  # about 25 s: a query should outlive a change of leader and a restart of the brokers
NAMED_MAX = 3  # partitions in one line
AGAIN_S = 0.2  # between two looks at a new leader that does not know yet how far it is committed
SPARKS_OPTIONS = {"checkpointlocation", "queryname"}
_DURATION = re.compile(r"(\d{1,9})\s*(ms|s|m|min|h|d)?", re.IGNORECASE)
Life = tuple[str, int, int]
"""Topic, partition and the topic's uid."""

_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclass(frozen=True)
class StreamOptions:
    """Everything that `spark.readStream.format("nsqha")` was told."""

    connection: ConnectOptions
    subscription: TopicSelection
    bounds: Bounds
    reading: Reading
    limits: BatchLimits
    commit_channel: str = ""
    hold_ms: int = HOLD_MS


def stream_options(options: Mapping[str, str]) -> StreamOptions:
    """OptionError names what cannot be."""
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
        raise OptionError(f"commitChannel: {channel[:60]!r} is no name of a channel")
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
        raise OptionError(f"{name}: {given.text(name)[:60]!r} is no time such as 90s, 15m or 500ms")
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
        """One of the limits, by which Spark tells "as usual" from "everything": `latestOffset` heeds all of them."""
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


class Plans:
    """What a query has read, what there is, and what is next."""

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
        self.committed: Records = {}  # what was committed at the last look
        self._options = options
        self._segments = segments
        self._now = now
        self._sleep = sleep
        self._initial: Records | None = None
        self._handed: Records | None = None  # the last end
        self._target: dict[Key, int] | None = None  # with Trigger.AvailableNow
        self._last_batch_at = float("-inf")
        self._witnesses = witnesses
        self._lives: dict[Key, int] = {}  # the topic's uid, as of the last look
        self._missed: frozenset[str] = frozenset()  # topics by name that were not there at the last look
        self._channelled: set[Life] = set()
        self._hold_id = ""
        self._held: tuple[float, frozenset[Life]] = (0.0, frozenset())

    @property
    def _strict(self) -> bool:
        return self._options.reading.fail_on_data_loss

    # ---- offsets

    def initial(self) -> Records:
        """Where a new query begins; the same however often Spark asks. ReadFailed, Gone."""
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
        restarted = start is None  # with 4.1: where the query stands is not known before `tasks`
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
            logger.warning("Spark 4.1 does not say where a restarted query is: its first micro-batch has no limit")
        elif not everything:
            ends = self._limited(begun, ends, pins)
        initial = self._initial or {}
        self._handed = {
            # A new one is there also without a message: from now on it is known where it begins. Where the query itself
            # begins is no part of a checkpoint: Spark asks anew when it plans its first micro-batch again.
            key: PartitionOffset.at(pins[key], max(record.offset, ends[key]), record.offset)
            if key in new or (initial.get(key) == record and record.offset < ends[key])
            else record.moved(pins[key], max(record.offset, ends[key]))
            for key, record in begun.items()
        }
        return self._handed

    def stop_at_now(self) -> None:
        """Trigger.AvailableNow: what is committed now is the end of the query."""
        pins = self._pins(of_subscription(self._options.subscription), {})
        self._target = {key: pin.end.offset for key, pin in pins.items()}

    def _begun(self, start: Records, pins: Mapping[Key, PinnedPartition]) -> tuple[Records, set[Key]]:
        """Where each partition's next message is: of `start`, and the first one of those that are new; which are."""
        begun = {key: record for key, record in start.items() if key in pins and same_topic(record, pins[key])}
        new = {key for key in pins.keys() - begun.keys() if self._target is None or key in self._target}
        for key in new:
            begun[key] = PartitionOffset.at(pins[key], pins[key].start.offset)
        # The log was cut below what was read, and the user wants to read on.
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
        """The ends with at most maxBytesPerTrigger in all, by borders that are asked for where messages wait."""
        sizes = {}
        wanted = []
        for key, end in ends.items():
            first, pin = begun[key].offset, pins[key]
            if end <= first:
                continue
            mean = (pin.end.position - pin.start.position) / max(1, pin.end.offset - pin.start.offset)
            sizes[key] = max(1, int(mean * (end - first)))
            # No more borders than the limit can use, even if messages are half as large as in the mean.
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
        # Of what is not planned as well: retention is to wait there from now on.
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
                    "%s/%d: %d messages [%d, %d) of a planned micro-batch are gone and left out",
                    topic, partition, behind - left, left, behind,
                )  # fmt: skip
        reading = self._options.reading
        return planner.plan(
            [one for one in ranges if one.first < one.end],
            split_bytes=reading.split_bytes,
            min_partitions=reading.min_partitions,
            hold_id=self._hold_id,
        )

    def done(self, end: Records) -> None:
        """Everything before `end` is processed: the commit channel may let it go. What was read of a topic that was
        made anew since says nothing about what is there now."""
        if not self._options.commit_channel:
            return
        try:
            there = {key: record for key, record in end.items() if self._lives.get(key) == record.uid}
            self._move_channel(there, back=False)
        except ReadFailed as error:
            # The next one moves it as well; until then more is kept than has to be.
            logger.warning("commitChannel %s was not moved: %s", self._options.commit_channel, error)

    def stop(self) -> None:
        """The query ends. Spark does not always say so; a hold ends by itself."""
        self._release()

    # ---- what keeps messages

    def _asked(self, wanted: list[Any], end: Records) -> SnapshotRequest:
        """A snapshot with borders, and with a new hold if none is young enough: a hold never rises."""
        asked = _in_ranges(wanted)
        lives = {(topic, partition, end[topic, partition].uid) for topic, partition, *_ in wanted}
        hold_ms = 0 if self._options.commit_channel else self._options.hold_ms
        since, held = self._held
        if not hold_ms or (self._hold_id and lives <= held and self._now() - since < hold_ms / 3000):
            return asked
        return replace(asked, hold_ms=hold_ms)

    def _keep(self, asked: SnapshotRequest, found: Snapshot) -> None:
        if not asked.hold_ms:
            return
        self._release()
        self._hold_id = found.hold_id
        self._held = (self._now(), frozenset(_life(pin) for pin in found.pins))

    def _release(self) -> None:
        hold_id, self._hold_id = self._hold_id, ""
        if hold_id:
            try:
                self._segments.release_hold(hold_id)
            except ReadFailed as error:
                logger.info("hold %s was not released, and ends by itself: %s", hold_id, error)

    def _claim_channel(self, begun: Records) -> None:
        """A query without a checkpoint moves no place that stands elsewhere: somebody else's messages wait there.
        ReadFailed."""
        initial, channel = self._initial or {}, self._options.commit_channel
        begins = {k: r for k, r in begun.items() if initial.get(k) == r and (*k, r.uid) not in self._channelled}
        if not begins or not channel:
            return
        floors = self._segments.snapshot(of_subscription(self._options.subscription, channel=channel)).floors
        other = {k: r for k, r in begins.items() if k in floors and floors[k] != r.offset}
        if not other:
            return
        # Moves nothing, and says so if this is no reader channel at all.
        self._move_channel({key: replace(record, offset=0) for key, record in other.items()}, back=False)
        places = [f"{t}/{p} at {floors[t, p]} (the query begins at {r.offset})" for (t, p), r in sorted(other.items())]
        more = f" and {len(places) - NAMED_MAX} more" if len(places) > NAMED_MAX else ""
        raise ReadFailed(
            f"commitChannel {channel} stands elsewhere: {', '.join(places[:NAMED_MAX])}{more}; another reader may need "
            f"it there: name another channel, begin where it stands (startingChannel {channel}), or nsqha seek it"
        )

    def _begin_channel(self, begun: Records) -> None:
        """The channel stands where this query begins, in every partition, before anything is read of it."""
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

    # ---- is it the same log

    def _pins(self, asked: SnapshotRequest, known: Records) -> dict[Key, PinnedPartition]:
        """What is committed now, of a log that has the witnesses of `known`. Gone, ReadFailed: it has not.

        With failOnDataLoss=false it is said in the log instead."""
        deadline = self._now() + self._options.connection.timeout_ms / 1000
        while True:
            found, refusal = self._of_those_there(asked)
            self._keep(asked, found)
            if asked.hold_ms:
                asked = replace(asked, hold_ms=0)
            pins = {_key(one): one for one in found.pins if self._options.subscription.wants(*_key(one))}
            # A new leader commits its first batch before it knows that all before is committed.
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
        """A snapshot without what is not there any more, and what the brokers said of that. ReadFailed: as `snapshot`.

        If something of it is not there and that is an error, the snapshot is one of whole topics."""
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
        if len(left) == len(asked.ranges):  # a node that does not know of it yet, and another one that does
            raise refusal
        if not left:
            return Snapshot(()), None
        return self._of_those_there(_in_ranges(left, asked.hold_ms))

    def _miss(self, asked: SnapshotRequest, pins: Mapping[Key, PinnedPartition], refusal: ReadFailed | None) -> None:
        """Topics that were asked for by name and are not there."""
        if refusal is not None and self._strict:
            raise ReadFailed(f"{refusal}; leave it out, or failOnDataLoss false reads on with what is there")
        if asked.ranges is not None:
            return
        missed = frozenset(asked.topics) - {topic for topic, _ in pins} if refusal is not None else frozenset()
        if missed - self._missed:
            names = ", ".join(sorted(missed))
            logger.warning("there is no topic %s; read on with what is there, as failOnDataLoss is false", names)
        self._missed = missed

    def _check(self, known: Records, pins: Mapping[Key, PinnedPartition]) -> None:
        for key, record in known.items():
            if key not in pins and not self._selects(key, record):
                self._left_out(key)
            elif why := self._witnesses.differs(key, record, pins.get(key)):
                self._lost(why)

    def _selects(self, key: Key, record: PartitionOffset) -> bool:
        """Whether a partition that was not found would be read if it were there. ReadFailed."""
        subscription = self._options.subscription
        if subscription.names:
            return key[0] in subscription.names and subscription.wants(*key)
        there = self._segments.snapshot(of_those_there(TopicSelection(topics=(key[0],)))).pins
        return not any(_key(pin) == key and same_topic(record, pin) for pin in there)

    def _left_out(self, key: Key) -> None:
        """The subscription is another one than that of the checkpoint."""
        subscription = self._options.subscription
        option = "subscribe" if subscription.topics else "assign" if subscription.assigned else "subscribePattern"
        what = f"{key[0]}/{key[1]}" if subscription.assigned else key[0]
        line = f"the checkpoint reads {what}, {option} does not name it any more"
        if self._strict:
            raise ReadFailed(
                f"{line}: name it, or take a new checkpointLocation; failOnDataLoss false reads on without it"
            )
        logger.warning("%s; read on without it, as failOnDataLoss is false", line)

    def _lost(self, why: str) -> None:
        if self._strict:
            raise Gone(f"{why}; failOnDataLoss false reads on with what is there, a new checkpointLocation begins anew")
        logger.warning("%s; read on with what is there, as failOnDataLoss is false", why)


def _key(pin: PinnedPartition) -> Key:
    return pin.identity.topic, pin.identity.partition


def _life(pin: PinnedPartition) -> Life:
    return (*_key(pin), pin.identity.topic_uid)


def _in_ranges(wanted: Iterable[tuple[str, int, int, int]], hold_ms: int = 0) -> SnapshotRequest:
    """A snapshot with the borders of these ranges."""
    ranges = tuple(wanted)
    return SnapshotRequest(tuple(sorted({topic for topic, *_ in ranges})), ranges=ranges, hold_ms=hold_ms)


def _first(start: PartitionOffset | None, end: PartitionOffset) -> int:
    """Where a micro-batch begins in a partition."""
    if start is None or start.uid != end.uid or (end.first is not None and start.first is None):
        return end.offset if end.first is None else end.first
    return start.offset
