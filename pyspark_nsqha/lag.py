"""Computes how far readers of the log are behind, from their channels' floors, a lake's end and what is committed.

    log          |...........................................|
                start        floor            lake's end    end
    channel                    |<-------- messages ---------->|

A reader channel's floor is the offset of the next message to read; all below is done, so the lag in messages is exact.
Bytes are those that the messages take in the log; the age is that of the first unread one, by the broker's clock.

The messages of a topic without a channel that a lake lacks have an age, too: by the clock of the asking machine.

Floors are read first and the end afterwards, so a lag is never too small: it includes what is published meanwhile.
Everything is gRPC: no Spark session and no Java is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nsqha.ids import is_ephemeral
from pyspark_nsqha.lake.commits.manifest import LakeState, Life

Ask = Callable[..., Any]
"""Calls one RPC by its name with the fields of its request, and returns its answer."""

RANGES_MAX = 20_000  # how many a broker takes in one request


@dataclass(frozen=True)
class PartitionLag:
    """The lag of one channel in one partition."""

    partition: int
    start: int  # of the log
    end: int  # what is committed ends here
    floor: int | None = None  # None: there is no channel, or no broker reported it
    messages: int = 0
    bytes: int = 0
    oldest_seconds: float = 0.0  # of the first unread message, or without a channel that the lake lacks; 0: none
    lake_end: int | None = None  # of what is in the lake without a gap; None: no lake was given
    lake_messages: int = 0  # kept by the log and not in the lake
    error: str = ""  # figures are missing, and why


@dataclass(frozen=True)
class Lag:
    """The lag of one reader channel of one topic; or, with an empty `channel`, only what a lake lacks of the topic."""

    topic: str
    channel: str
    partitions: tuple[PartitionLag, ...]

    @property
    def messages(self) -> int:
        return sum(one.messages for one in self.partitions)

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.partitions)

    @property
    def oldest_seconds(self) -> float:
        return max((one.oldest_seconds for one in self.partitions), default=0.0)

    @property
    def lake_messages(self) -> int | None:
        """What the lake lacks; None if no lake was given."""
        if all(one.lake_end is None for one in self.partitions):
            return None
        return sum(one.lake_messages for one in self.partitions)

    @property
    def errors(self) -> list[str]:
        return [f"{self.topic}/{one.partition}: {one.error}" for one in self.partitions if one.error]


@dataclass(frozen=True)
class LagSample:
    """All lags at one moment."""

    lags: list[Lag]
    doubts: tuple[str, ...] = ()  # why there may be more channels than these

    def missing(self, topics: Collection[str], channel: str) -> list[str]:
        """Lines for what was requested and does not exist: no lag is not the same as nothing to measure."""
        kind = f"reader channel {channel}" if channel else "reader channel"
        have = {lag.topic for lag in self.lags if channel in ("", lag.channel)}
        if topics:
            return [f"topic {topic} has no {kind}" for topic in topics if topic not in have]
        return [] if have else [f"none of the topics has a {kind}"]


@dataclass(frozen=True)
class Rates:
    """Messages per second between two samples."""

    read: float
    published: float

    def seconds_left(self, messages: int) -> float | None:
        """Seconds until nothing is unread, if both rates stay; None: never."""
        gain = self.read - self.published
        return 0.0 if not messages else messages / gain if gain > 0 else None


@dataclass(frozen=True)
class Limit:
    """The largest lag that is allowed; None: any."""

    messages: int | None = None
    seconds: float | None = None

    def exceeded(self, lag: Lag) -> bool:
        """Whether the unread messages, or without a channel those that the lake lacks, exceed the limit."""
        messages = lag.messages if lag.channel else lag.lake_messages or 0
        return (self.messages is not None and messages > self.messages) or (
            self.seconds is not None and lag.oldest_seconds > self.seconds
        )


def look(
    ask: Ask,
    ask_segments: Ask,
    *,
    topics: Collection[str] = (),
    pattern: str = "",
    channel: str = "",
    lake: LakeState | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> LagSample:
    """The lag of every reader channel of these topics, or of `channel` alone, by topic and channel.

    With a lake the result includes topics without such a channel. Without topics and pattern all topics are included.
    """
    listed = ask("ListChannels", topic=next(iter(topics)) if len(topics) == 1 else "")
    readers = sorted(
        (one for one in listed.channels if one.reader and not is_ephemeral(one.topic) and channel in ("", one.name)),
        key=lambda one: (one.topic, one.name),
    )
    asked = {"topics": list(topics)} if topics else {"pattern": pattern or ".*"}
    committed: dict[str, list[Any]] = {}
    for one in ask_segments("Snapshot", **asked).partitions:
        if not is_ephemeral(one.topic):
            committed.setdefault(one.topic, []).append(one)
    found = []
    for topic, ends in sorted(committed.items()):
        mine = [one for one in readers if one.topic == topic]
        for reader in mine:
            plan = ask("Seek", topic=topic, channel=reader.name, target={"end": True}, plan_only=True)
            found.append(Lag(topic, reader.name, _partitions(ends, reader, plan, lake)))
        if not mine and lake is not None:
            found.append(Lag(topic, "", _partitions(ends, None, None, lake)))
    ages = _lake_ages(ask_segments, asked, found, now_ns)
    lags = [lag if lag.channel else _with_ages(lag, ages) for lag in found]
    doubts = [f"{one.name} did not answer" for one in listed.unreachable]
    doubts += [f"{one.topic}/{one.partition}: {one.error}" for ends in committed.values() for one in ends if one.error]
    return LagSample(lags, tuple(doubts))


def _lake_ages(
    ask_segments: Ask, asked: dict[str, Any], found: Sequence[Lag], now_ns: Callable[[], int]
) -> dict[tuple[str, int], float]:
    """The age in seconds of the first message that the lake lacks, where there is no channel; only known ages."""
    lacking = [
        (lag.topic, one.partition, one.lake_end)
        for lag in found
        for one in lag.partitions
        if not lag.channel and one.lake_end is not None and one.lake_messages
    ]
    ages = {}
    for at in range(0, len(lacking), RANGES_MAX):
        ranges = [
            {"topic": topic, "partition": partition, "first": first, "end": first + 1}
            for topic, partition, first in lacking[at : at + RANGES_MAX]
        ]
        answer = ask_segments("Snapshot", **asked, cut_points=True, ranges=ranges)
        now = now_ns()
        for one in answer.partitions:
            # The border before a batch has the batch's time; 0: the batch does not verify.
            if one.cuts and one.cuts[0].timestamp_ns:
                ages[str(one.topic), int(one.partition)] = max(now - int(one.cuts[0].timestamp_ns), 0) / 1e9
    return ages


def _with_ages(lag: Lag, ages: dict[tuple[str, int], float]) -> Lag:
    def aged(one: PartitionLag) -> PartitionLag:
        if not one.lake_messages:
            return one
        age = ages.get((lag.topic, one.partition))
        if age is None:
            return replace(one, error=f"the age of message {one.lake_end}, which the lake lacks, is not known")
        return replace(one, oldest_seconds=age)

    return replace(lag, partitions=tuple(map(aged, lag.partitions)))


def _partitions(ends: Sequence[Any], reader: Any, plan: Any, lake: LakeState | None) -> tuple[PartitionLag, ...]:
    reported = {one.partition: one for one in reader.partitions} if reader is not None else {}
    planned = {one.partition: one for one in plan.partitions} if plan is not None else {}
    return tuple(_partition(one, reported.get(one.partition), planned.get(one.partition), reader, lake) for one in ends)


def _partition(end: Any, reported: Any, planned: Any, reader: Any, lake: LakeState | None) -> PartitionLag:
    """`end` is from the snapshot, `reported` from the channel, `planned` from the plan of a seek to the end."""
    number, start, committed = int(end.partition), int(end.start.offset), int(end.end.offset)
    if end.error:
        return PartitionLag(number, start, committed, error=str(end.error))
    lake_end = lake_messages = None
    if lake is not None:
        life = Life(str(end.topic), int(end.topic_uid), number)
        lake_end = lake.covered_from(life, start)
        lake_messages = max(committed - lake_end, 0)
    lag = PartitionLag(number, start, committed, lake_end=lake_end, lake_messages=lake_messages or 0)
    if reader is None:
        return lag
    error = "no broker reported the channel's offset" if reported is None else str(reported.error)
    if not error and planned is not None:
        error = str(planned.error)
    if error or reported is None:
        return PartitionLag(number, start, committed, lake_end=lake_end, lake_messages=lake_messages or 0, error=error)
    floor = int(reported.floor)
    messages = max(committed - floor, 0)
    return PartitionLag(
        number,
        start,
        committed,
        floor,
        messages,
        _bytes(planned, messages),
        float(reported.oldest_unfinished_seconds) if messages else 0.0,
        lake_end,
        lake_messages or 0,
    )


def _bytes(planned: Any, messages: int) -> int:
    """The bytes of `messages`, scaled from a plan of another moment, which may skip a few more or less."""
    skipped = -int(planned.messages) if planned is not None else 0
    if not messages or skipped <= 0:
        return 0
    return int(planned.bytes) * messages // skipped


def rates(before: Lag, now: Lag, seconds: float) -> Rates:
    """How fast floors and ends rose; partitions that one of the samples lacks are left out."""
    earlier = {one.partition: one for one in before.partitions if one.floor is not None}
    read = published = 0
    for one in now.partitions:
        if one.floor is not None and (old := earlier.get(one.partition)) is not None:
            read += max(one.floor - (old.floor or 0), 0)
            published += max(one.end - old.end, 0)
    return Rates(read / seconds, published / seconds) if seconds > 0 else Rates(0.0, 0.0)
