"""The bound of /metrics: which topics, partitions and channels have series of their own, and what the others add up to.

    everything -> partition="all" -> channels by rank, the rest channel="(other)" -> topics by rank, topic="(other)"

Each step is taken when the series of the one before exceed the bound, and taken back only when they are well below it,
so that labels do not flap. Who has series of its own keeps them while there is room; the rank, messages since the
start, decides between the others. Names in brackets are none that a topic or a channel can have.

Figures that are merged are sums; ages, epochs, quantiles and flags are the largest, the ISR is the smallest. A merged
counter never goes back: what a channel counted stays in it when the channel is deleted or gets series of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

from nsqha.cursor.deferred.dead import Reason
from nsqha.cursor.live.followed import NO_TIMES, ChannelTimes
from nsqha.quantile import HistogramData, Result
from nsqha.server.http.stats import BrokerStats, ChannelStats, CursorStats, PartitionStats, TopicStats

M = TypeVar("M")

SERIES_MAX = 10_000
NODE_STEP = 500  # the node's own series vary; room for them is made in steps
PARTITIONS_AGAIN = 0.8  # of the room: partitions have labels again below this
OWN_AGAIN = 0.9  # of the room: below this a topic or a channel gets series of its own

MERGED_AT_ONCE = 32  # partitions or cursors, in one step

ALL = "all"
OTHER = "(other)"


@dataclass(frozen=True, slots=True)
class Widths:
    """How many series each topic, partition, channel and cursor has; a partition has one more for its sync mode."""

    topic: int
    partition: int
    channel: int
    cursor: int


@dataclass(frozen=True, slots=True)
class Rows:
    """What is shown, by the values of its labels, and how much is merged."""

    topics: list[tuple[tuple[str, ...], TopicStats]] = field(default_factory=list)
    partitions: list[tuple[tuple[str, ...], PartitionStats]] = field(default_factory=list)
    sync_modes: list[tuple[str, ...]] = field(default_factory=list)
    channels: list[tuple[tuple[str, ...], ChannelStats]] = field(default_factory=list)
    cursors: list[tuple[tuple[str, ...], CursorStats]] = field(default_factory=list)
    merged: dict[str, int] = field(default_factory=dict)


class _Rest:
    """Sums of counters over members that come and go; they never go back."""

    def __init__(self) -> None:
        self._last: Mapping[Any, Sequence[float]] = {}
        self._gone: Sequence[float] = ()

    def sums(self, members: Mapping[Any, Sequence[float]]) -> Generator[None, None, Sequence[float]]:
        """`members` are all that are merged now; there is at least one."""
        gone = self._gone
        for name, counts in self._last.items():
            now = members.get(name)
            if now is None or any(new < old for new, old in zip(now, counts, strict=True)):
                gone = _added((gone, counts))
            yield
        self._gone, self._last = gone, members  # at once: who asked may go away between two steps
        total = gone
        for counts in members.values():
            total = _added((total, counts))
            yield
        return total


class SeriesBound:
    """Keeps one scraper's series below the bound, from one scrape to the next. One scrape at a time."""

    def __init__(self, series_max: int = SERIES_MAX) -> None:
        self._series_max = series_max
        self._partitions_merged = False
        self._ranked = False  # some topics or channels have no series of their own
        self._topics: set[str] = set()  # these have
        self._channels: set[tuple[str, str]] = set()
        self._other_topics = _Rest()
        self._other_channels: dict[str, _Rest] = {}  # by the label of their topic

    def rows(self, stats: BrokerStats, widths: Widths, node_series: int) -> Generator[None, None, Rows]:
        """`node_series`: series that are not of a topic; they are always shown. It is done in steps."""
        room = self._series_max - -(-node_series // NODE_STEP) * NODE_STEP
        full = 0
        for topic in stats.topics:
            full += _series(topic, widths)
            yield
        self._partitions_merged = full > room * (PARTITIONS_AGAIN if self._partitions_merged else 1)
        if not self._partitions_merged:
            self._ranked = False
            self._keep_all(stats.topics)
        else:
            yield from self._rank(stats.topics, widths, room)
        yield
        return (yield from self._rows(stats.topics))

    # ---- who has series of its own

    def _keep_all(self, topics: Iterable[TopicStats]) -> None:
        self._topics = {topic.topic_name for topic in topics}
        self._channels = {(topic.topic_name, channel.channel_name) for topic in topics for channel in topic.channels}

    def _rank(self, topics: Sequence[TopicStats], widths: Widths, room: int) -> Generator[None, None, None]:
        of_channel = widths.channel + widths.cursor
        bases = {}
        for topic in topics:
            bases[topic.topic_name] = _series_of_topic(topic, widths)
            yield
        named = sum(bases.values()) + of_channel * sum(len(t.channels) for t in topics)
        self._ranked = named > room * (OWN_AGAIN if self._ranked else 1)
        if not self._ranked:
            self._keep_all(topics)
            return
        room -= widths.topic + widths.partition + 3 + of_channel  # of topic="(other)"; there are three sync modes
        used, kept = 0, []
        for topic in sorted(topics, key=lambda t: (t.topic_name not in self._topics, -t.message_count, t.topic_name)):
            needs = bases[topic.topic_name] + of_channel * bool(topic.channels)
            if used + needs <= room * (1 if topic.topic_name in self._topics else OWN_AGAIN):
                used += needs
                kept.append(topic)
            yield
        channels = {(t.topic_name, t.channels[0].channel_name) for t in kept if len(t.channels) == 1}
        ranked = [((t.topic_name, c.channel_name), c) for t in kept if len(t.channels) > 1 for c in t.channels]
        ranked.sort(key=lambda pair: (pair[0] not in self._channels, -pair[1].message_count, pair[0]))
        for key, _ in ranked:
            if used + of_channel <= room * (1 if key in self._channels else OWN_AGAIN):
                used += of_channel
                channels.add(key)
            yield
        self._topics, self._channels = {topic.topic_name for topic in kept}, channels

    # ---- what is shown

    def _rows(self, topics: Sequence[TopicStats]) -> Generator[None, None, Rows]:
        rows = Rows()
        shown = [t for t in topics if t.topic_name in self._topics]
        others = [t for t in topics if t.topic_name not in self._topics]
        for topic in shown:
            yield from self._show(rows, topic)
        if others:
            other = yield from self._other_topic(others)
            yield from self._show(rows, other)
        labels = {topic.topic_name for topic in shown} | {OTHER}
        self._other_channels = {name: rest for name, rest in self._other_channels.items() if name in labels}
        merged = self._partitions_merged
        rows.merged.update(
            partition=sum(len(t.partitions) for t in topics) if merged else 0,
            channel=sum(len(t.channels) for t in topics) - len(self._channels),
            topic=len(others),
        )
        return rows

    def _show(self, rows: Rows, topic: TopicStats) -> Generator[None, None, None]:
        name = topic.topic_name
        rows.topics.append(((name,), topic))
        if self._partitions_merged:
            if topic.partitions:
                partition = yield from _merged(topic.partitions, _merged_partitions)
                rows.partitions.append(((name, ALL), partition))
                rows.sync_modes.extend((name, ALL, mode) for mode in sorted({p.sync for p in topic.partitions}))
        else:
            for partition in topic.partitions:
                yield
                rows.partitions.append(((name, str(partition.partition)), partition))
                rows.sync_modes.append((name, str(partition.partition), partition.sync))
        others = []
        for channel in topic.channels:
            if (name, channel.channel_name) in self._channels:
                yield from self._show_channel(rows, name, channel)
            else:
                others.append(channel)
        if others:
            other = yield from self._other_channel(name, others)
            yield from self._show_channel(rows, name, other)

    def _show_channel(self, rows: Rows, topic: str, channel: ChannelStats) -> Generator[None, None, None]:
        yield
        name = channel.channel_name
        rows.channels.append(((topic, name), channel))
        if not self._partitions_merged:
            rows.cursors.extend(((topic, name, str(cursor.partition)), cursor) for cursor in channel.cursors)
        elif channel.cursors:
            cursor = yield from _merged(channel.cursors, merged_cursors)
            rows.cursors.append(((topic, name, ALL), cursor))

    def _other_topic(self, topics: Sequence[TopicStats]) -> Generator[None, None, TopicStats]:
        members, channels = {}, []
        for topic in topics:
            changes = topic.leader_changes, *topic.isr_changes
            members[topic.topic_name] = (topic.message_count, topic.message_bytes, *changes)
            # A channel's name has its topic's in front, so that equal ones of two topics are counted as two.
            for channel in topic.channels:
                channels.append(replace(channel, channel_name=f"{topic.topic_name}/{channel.channel_name}"))
                yield
        sums = yield from self._other_topics.sums(members)
        counts = tuple(map(int, sums))
        return TopicStats(
            topic_name=OTHER,
            channels=tuple(channels),
            depth=sum(t.depth for t in topics),
            message_count=counts[0],
            message_bytes=counts[1],
            leader_changes=counts[2],
            isr_changes=counts[3:],
            paused=any(t.paused for t in topics),
            partitions=tuple(chain.from_iterable(t.partitions for t in topics)),
        )

    def _other_channel(self, topic: str, channels: Sequence[ChannelStats]) -> Generator[None, None, ChannelStats]:
        rest = self._other_channels.setdefault(topic, _Rest())
        members = {}
        for c in channels:
            members[c.channel_name] = _counts(c)
            yield
        sums = yield from rest.sums(members)
        counts = tuple(map(int, sums[:_TIMES_AT]))
        return ChannelStats(
            channel_name=OTHER,
            message_count=counts[0],
            finish_count=counts[1],
            requeue_count=counts[2],
            timeout_count=counts[3],
            skipped_count=counts[4],
            dropped_count=counts[5],
            expired_count=counts[6],
            died=counts[7:],
            times=_times(sums[_TIMES_AT:]),
            client_count=sum(c.client_count for c in channels),
            paused=any(c.paused for c in channels),
            e2e_processing_latency=_slowest([c.e2e_processing_latency for c in channels]),
            cursors=tuple(chain.from_iterable(c.cursors for c in channels)),
        )


_TIMES_AT = 7 + len(Reason)  # where `_numbers` begin among the counts of a channel


def _counts(channel: ChannelStats) -> tuple[float, ...]:
    return (
        channel.message_count,
        channel.finish_count,
        channel.requeue_count,
        channel.timeout_count,
        channel.skipped_count,
        channel.dropped_count,
        channel.expired_count,
        *channel.died,
        *_numbers(channel.times),
    )


def _numbers(times: ChannelTimes) -> list[float]:
    """All numbers of the histograms, which are summed like counters."""
    return [number for data in times for number in (*data.counts, data.sum)]


def _times(numbers: Sequence[float]) -> ChannelTimes:
    """The histograms with these numbers."""
    found, at = [], 0
    for data in NO_TIMES:
        end = at + len(data.counts)
        found.append(HistogramData(data.bounds, tuple(map(int, numbers[at:end])), numbers[end]))
        at = end + 1
    return ChannelTimes(*found)


def _series(topic: TopicStats, widths: Widths) -> int:
    channels = sum(widths.channel + widths.cursor * len(channel.cursors) for channel in topic.channels)
    return widths.topic + (widths.partition + 1) * len(topic.partitions) + channels


def _series_of_topic(topic: TopicStats, widths: Widths) -> int:
    """With partitions merged, and without its channels."""
    modes = len({p.sync for p in topic.partitions})
    return widths.topic + (widths.partition + modes if modes else 0)


def _added(counts: Iterable[Sequence[float]]) -> Sequence[float]:
    return [sum(column) for column in zip(*filter(None, counts), strict=True)]


def _merged(members: Sequence[M], merge: Callable[[Collection[M]], M]) -> Generator[None, None, M]:
    """All of them, of which there is at least one, as one; `merge` takes what it has made before as one of them."""
    found = merge(members[:MERGED_AT_ONCE])
    for at in range(MERGED_AT_ONCE, len(members), MERGED_AT_ONCE):
        yield
        found = merge((found, *members[at : at + MERGED_AT_ONCE]))
    yield
    return found


def _merged_partitions(partitions: Collection[PartitionStats]) -> PartitionStats:
    return PartitionStats(
        partition=-1,
        leader_epoch=max(p.leader_epoch for p in partitions),
        start_offset=sum(p.start_offset for p in partitions),
        start_position_bytes=sum(p.start_position_bytes for p in partitions),
        end_offset=sum(p.end_offset for p in partitions),
        end_position_bytes=sum(p.end_position_bytes for p in partitions),
        committed_offset=sum(p.committed_offset for p in partitions),
        segments=sum(p.segments for p in partitions),
        waiting_bytes=sum(p.waiting_bytes for p in partitions),
        unsynced_messages=sum(p.unsynced_messages for p in partitions),
        isr_size=min(p.isr_size for p in partitions),
        replicas=max(p.replicas for p in partitions),
        min_isr=max(p.min_isr for p in partitions),
        under_replicated=any(p.under_replicated for p in partitions),
        below_min_isr=any(p.below_min_isr for p in partitions),
        holds=sum(p.holds for p in partitions),
    )


def merged_cursors(cursors: Collection[CursorStats]) -> CursorStats:
    """The cursors of several partitions as one."""
    ages = [c.oldest_unfinished_seconds for c in cursors if c.oldest_unfinished_seconds is not None]
    return CursorStats(
        partition=-1,
        floor=0,
        next_read=0,
        finished_ranges=sum(c.finished_ranges for c in cursors),
        depth=sum(c.depth for c in cursors),
        in_flight_count=sum(c.in_flight_count for c in cursors),
        deferred_count=sum(c.deferred_count for c in cursors),
        dead_count=sum(c.dead_count for c in cursors),
        dead_oldest_seconds=max((c.dead_oldest_seconds for c in cursors), default=0.0),
        uncommitted_progress=sum(c.uncommitted_progress for c in cursors),
        oldest_unfinished_seconds=max(ages, default=None),
        stuck=next((c.stuck for c in cursors if c.stuck), ""),
    )


def _slowest(latencies: Iterable[Result]) -> Result:
    found: dict[float, int] = {}
    observations = 0
    for latency in latencies:
        observations += latency.observations
        for quantile, value in latency.percentiles or ():
            found[quantile] = max(value, found.get(quantile, value))
    return Result(observations, tuple(sorted(found.items())) or None)
