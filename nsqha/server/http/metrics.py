"""/metrics for Prometheus: one snapshot of the broker, written in the format the scraper asks for.

Units are seconds and bytes, counters end in `_total`, the HELP of every metric says what it means. Nothing is counted
here: the figures are those of /stats. With more than SERIES_MAX channel cursors the label `partition` becomes `all` and
the figures of a channel are summed over its partitions (the age is that of the oldest), so that a scrape stays small;
`nsqha_metrics_cursors_merged` says how many were merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from platform import python_version

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from nsqha.quantile import HistogramData
from nsqha.server.http.stats import BrokerStats, ChannelStats, CursorStats
from nsqha.server.runtime.measures import collector, open_files, resident_bytes

SERIES_MAX = 2000

_TOPIC = ("topic",)
_CHANNEL = ("topic", "channel")
_PARTITION = ("topic", "partition")
_FOLLOWER = ("follower",)
_CURSOR = ("topic", "channel", "partition")


def render(stats: BrokerStats, accept: str) -> tuple[bytes, str]:
    """The body, and its Content-Type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_NodeMetrics(stats))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _NodeMetrics(Collector):
    def __init__(self, stats: BrokerStats) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return ()  # a registry looks for duplicate names with it; there is only this collector

    def collect(self) -> Iterator[Metric]:
        yield from _process(self._stats)
        yield from _storage(self._stats)
        yield from _segments(self._stats)
        yield from _publishing(self._stats)
        yield from _partitions(self._stats)
        yield from _cluster(self._stats)
        yield from _channels(self._stats)
        yield from _cursors(self._stats)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"nsqha_{name}", text, value=value)


def _gauges(name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(f"nsqha_{name}", text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _counters(name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = CounterMetricFamily(f"nsqha_{name}", text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _histogram(name: str, text: str, data: HistogramData) -> Metric:
    buckets = []
    total = 0
    for bound, count in zip([*map(str, map(float, data.bounds)), "+Inf"], data.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return HistogramMetricFamily(f"nsqha_{name}", text, buckets=buckets, sum_value=data.sum)


def _process(stats: BrokerStats) -> Iterator[Metric]:
    node = stats.node
    build = {"version": node.version, "nsq_version": stats.version, "python": python_version(), "hot": node.hot}
    yield InfoMetricFamily("nsqha_build", "What is running; `hot` is compiled or pure.", value=build)
    yield _gauge("start_time_seconds", "When the process began to serve, Unix time.", stats.start_time_ns / 1e9)
    yield _gauge("healthy", "1 if the last write to disk succeeded.", float(stats.health == "OK"))
    yield _gauge("resident_memory_bytes", "Resident memory of the process.", resident_bytes())
    yield _gauge("open_files", "File descriptors in use.", open_files())
    yield _counters("gc_runs", "Full garbage collections.", (), [((), collector.runs)])
    yield _counters("gc_pause_seconds", "Time spent in full garbage collections.", (), [((), collector.seconds_total)])
    yield _histogram("loop_lag_seconds", "How late the event loop ran a timer.", node.loop_lag_seconds)
    yield _gauge("connections", "Open TCP connections of clients.", node.connections)
    yield _counters(
        "connections_accepted", "TCP connections accepted since the start.", (), [((), node.connections_total)]
    )


def _storage(stats: BrokerStats) -> Iterator[Metric]:
    node = stats.node
    yield _gauge("disk_free_bytes", "Free space of the data folder's file system.", node.disk_free_bytes)
    yield _gauge("disk_total_bytes", "Size of the data folder's file system.", node.disk_total_bytes)
    yield _gauge(
        "disk_refusing_publishes", "1 while publishes are refused as the disk is low.", float(node.disk_refusing)
    )
    yield _gauge(
        "cursor_cache_written",
        "1 if the cache of channel state could be written and read; if not, starts take longer and memory grows.",
        float(node.cursor_cache_written),
    )
    yield _gauge(
        "cursor_cache_waiting_rows",
        "Changes of deferred messages that are not in the cache of channel state yet.",
        node.cursor_cache_waiting,
    )
    yield _histogram("fsync_seconds", "Duration of a disk round: fdatasync of all files written.", node.fsync_seconds)
    yield _counters(
        "log_events",
        "Events of the log to look into: cuts at recovery, checksum errors, possible losses.",
        ("event",),
        [((event,), count) for event, count in node.log_events],
    )
    yield _counters("scrub_read_bytes", "Stored bytes that the scrub has checked.", (), [((), node.scrub.read_bytes)])
    yield _counters("scrub_rounds", "Rounds of the scrub over everything stored.", (), [((), node.scrub.rounds)])
    yield _gauge(
        "scrub_damaged_ranges",
        "Ranges of the log that did not verify when the scrub last read them.",
        node.scrub.damaged_ranges,
    )


def _segments(stats: BrokerStats) -> Iterator[Metric]:
    segments = stats.node.segments
    yield _counters("segments_sent_bytes", "Bytes of the log sent to readers of segments.", (), [((), segments.bytes)])
    yield _counters(
        "segments_requests",
        "Requests of readers of segments, by HTTP status.",
        ("status",),
        [((status,), count) for status, count in segments.requests],
    )
    yield _gauge("segments_connections", "Open connections of readers of segments.", segments.connections)


def _publishing(stats: BrokerStats) -> Iterator[Metric]:
    node, topics = stats.node, stats.topics
    yield _counters(
        "publish_messages", "Messages published.", _TOPIC, [((t.topic_name,), t.message_count) for t in topics]
    )
    yield _counters(
        "publish_bytes",
        "Bytes of message bodies published.",
        _TOPIC,
        [((t.topic_name,), t.message_bytes) for t in topics],
    )
    yield _counters(
        "publish_errors", "Publishes that were not answered OK.", ("code",), [((c,), n) for c, n in node.publish_errors]
    )
    yield _gauge("ephemeral_bytes", "Memory that #ephemeral topics hold.", node.ephemeral_bytes)
    yield _counters(
        "ephemeral_dropped_messages",
        "Messages that #ephemeral topics dropped unread, to stay within their bounds.",
        (),
        [((), node.ephemeral_dropped)],
    )
    yield _histogram("publish_seconds", "From the flush of a batch to its commit.", node.publish_seconds)
    yield _histogram("publish_group_commit_messages", "Messages committed together.", node.batch_messages)
    yield _gauges(
        "topic_depth",
        "Messages that have not been copied to any channel yet (topic paused or without channels).",
        _TOPIC,
        [((t.topic_name,), t.depth) for t in topics],
    )
    yield _gauges("topic_paused", "1 if the topic is paused.", _TOPIC, [((t.topic_name,), t.paused) for t in topics])


def _partitions(stats: BrokerStats) -> Iterator[Metric]:
    rows = [((t.topic_name, str(p.partition)), p) for t in stats.topics for p in t.partitions]

    def family(name: str, text: str, field: str) -> Metric:
        return _gauges(f"partition_{name}", text, _PARTITION, [(labels, getattr(p, field)) for labels, p in rows])

    yield family("epoch", "Leader epoch.", "leader_epoch")
    yield family("start_offset", "Oldest message that is kept.", "start_offset")
    yield family("end_offset", "One past the newest message written.", "end_offset")
    yield family("committed_offset", "One past the newest message committed.", "committed_offset")
    yield family("start_position_bytes", "Position of the oldest byte that is kept.", "start_position_bytes")
    yield family("end_position_bytes", "Position one past the newest byte.", "end_position_bytes")
    yield family("segments", "Segment files.", "segments")
    yield family("waiting_bytes", "Bytes of publishes that are not written yet.", "waiting_bytes")
    yield family("unsynced_messages", "Messages written and not yet fdatasync'ed.", "unsynced_messages")
    yield _gauges(
        "segment_holds",
        "Holds of batch readers, which keep the partition's files from retention.",
        _PARTITION,
        [(labels, p.holds) for labels, p in rows],
    )
    yield _gauges(
        "partition_sync_mode",
        "1 for what OK means: always, interval or none.",
        (*_PARTITION, "mode"),
        [((*labels, p.sync), 1) for labels, p in rows],
    )


def _cluster(stats: BrokerStats) -> Iterator[Metric]:
    """The metrics of a cluster's node; a single node has none of them."""
    cluster = stats.node.cluster
    if cluster is None:
        return
    yield _gauge(
        "cluster_registered", "1 while the node's lease is valid for the other nodes.", float(cluster.registered)
    )
    yield _gauge("cluster_nodes", "Live nodes, as far as this node knows.", cluster.nodes)
    yield _gauge("cluster_leaders", "Partitions that this node leads.", cluster.leaders)
    yield _gauge("cluster_followers", "Partitions that this node follows.", cluster.followers)
    yield _gauge(
        "cluster_followers_behind",
        "Partitions that this node follows and that catch up, or have no leader.",
        cluster.followers_behind,
    )
    yield _gauge(
        "cluster_under_replicated",
        "Partitions led here with fewer in-sync replicas than the topic is to have.",
        cluster.under_replicated,
    )
    yield _gauge(
        "cluster_below_min_isr",
        "Partitions led here with fewer in-sync replicas than min_isr: they acknowledge nothing.",
        cluster.below_min_isr,
    )
    rows = [((t.topic_name, str(p.partition)), p) for t in stats.topics for p in t.partitions]
    yield _gauges(
        "partition_isr_size",
        "Members of the ISR as recorded; an unreachable one may still be among them.",
        _PARTITION,
        [(labels, p.isr_size) for labels, p in rows],
    )
    yield _gauges("partition_replicas", "Replicas.", _PARTITION, [(labels, p.replicas) for labels, p in rows])
    yield _gauges(
        "partition_min_isr",
        "Replicas that must have a message before it is acknowledged.",
        _PARTITION,
        [(labels, p.min_isr) for labels, p in rows],
    )
    yield _gauges(
        "partition_below_min_isr",
        "1 while the partition has too few in-sync replicas and acknowledges nothing.",
        _PARTITION,
        [(labels, p.below_min_isr) for labels, p in rows],
    )
    lags = [((lag.name or f"{lag.node:016x}",), lag) for lag in cluster.push_lag]
    yield _gauges(
        "push_lag_entries",
        "Batches of all partitions led here that a follower node has not acknowledged.",
        _FOLLOWER,
        [(labels, lag.entries) for labels, lag in lags],
    )
    yield _gauges(
        "push_lag_bytes",
        "Bytes of all partitions led here that a follower node has not acknowledged.",
        _FOLLOWER,
        [(labels, lag.bytes) for labels, lag in lags],
    )
    yield _gauges(
        "clock_offset_seconds",
        "What the wall clock of another node is ahead of the one here.",
        ("peer",),
        [((offset.name or f"{offset.node:016x}",), offset.seconds) for offset in cluster.clock_offsets],
    )


def _channels(stats: BrokerStats) -> Iterator[Metric]:
    rows = [((t.topic_name, c.channel_name), c) for t in stats.topics for c in t.channels]

    def family(kind: type, name: str, text: str, field: str) -> Metric:
        make = _counters if kind is CounterMetricFamily else _gauges
        return make(f"channel_{name}", text, _CHANNEL, [(labels, getattr(c, field)) for labels, c in rows])

    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    yield family(counter, "messages", "Messages copied to the channel.", "message_count")
    yield family(counter, "acked", "Messages finished by consumers.", "finish_count")
    yield family(counter, "requeued", "REQ commands of consumers.", "requeue_count")
    yield family(counter, "timed_out", "Deliveries that were not answered in time.", "timeout_count")
    yield family(gauge, "clients", "Consumers.", "client_count")
    yield family(gauge, "paused", "1 if the channel is paused.", "paused")
    yield _gauges(
        "channel_end_to_end_seconds",
        "Message age at FIN over the sliding window, by configured quantile.",
        (*_CHANNEL, "quantile"),
        [
            ((*labels, str(quantile)), nanoseconds / 1e9)
            for labels, channel in rows
            for quantile, nanoseconds in channel.e2e_processing_latency.percentiles or ()
        ],
    )


def _cursors(stats: BrokerStats) -> Iterator[Metric]:
    channels = [(t.topic_name, c) for t in stats.topics for c in t.channels]
    cursors = sum(len(c.cursors) for _, c in channels)
    merged = cursors > SERIES_MAX
    rows: list[tuple[tuple[str, ...], CursorStats]] = []
    for topic, channel in channels:
        if merged and channel.cursors:
            rows.append(((topic, channel.channel_name, "all"), _merged(channel)))
        elif not merged:
            rows += [((topic, channel.channel_name, str(c.partition)), c) for c in channel.cursors]

    def family(name: str, text: str, field: str) -> Metric:
        return _gauges(f"channel_{name}", text, _CURSOR, [(labels, getattr(c, field)) for labels, c in rows])

    yield family("depth", "Messages waiting, without those in flight or deferred.", "depth")
    yield family("in_flight", "Messages delivered and not answered yet.", "in_flight_count")
    yield family("deferred", "Messages deferred until a later time.", "deferred_count")
    yield family("finished_ranges", "Ranges finished above the floor.", "finished_ranges")
    yield family(
        "uncommitted_progress", "Messages finished whose progress is not committed yet.", "uncommitted_progress"
    )
    yield _gauges(
        "channel_oldest_unfinished_seconds",
        "Age of the oldest message that is not finished, by its publish time; 0 if all are.",
        _CURSOR,
        [(labels, c.oldest_unfinished_seconds or 0) for labels, c in rows],
    )
    yield _gauges(
        "channel_stuck",
        "1 if the channel cannot read further, for example at a damaged part of the log.",
        _CURSOR,
        [(labels, bool(c.stuck)) for labels, c in rows],
    )
    yield _gauge("metrics_cursors_merged", "Cursors summed into one series per channel.", cursors if merged else 0)


def _merged(channel: ChannelStats) -> CursorStats:
    cursors = channel.cursors
    ages = [c.oldest_unfinished_seconds for c in cursors if c.oldest_unfinished_seconds is not None]
    return CursorStats(
        partition=-1,
        floor=0,
        next_read=0,
        finished_ranges=sum(c.finished_ranges for c in cursors),
        depth=sum(c.depth for c in cursors),
        in_flight_count=sum(c.in_flight_count for c in cursors),
        deferred_count=sum(c.deferred_count for c in cursors),
        uncommitted_progress=sum(c.uncommitted_progress for c in cursors),
        oldest_unfinished_seconds=max(ages, default=None),
        stuck=next((c.stuck for c in cursors if c.stuck), ""),
    )
