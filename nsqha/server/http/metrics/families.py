"""/metrics for Prometheus: one snapshot of the broker, written in the format the scraper asks for.

Units are seconds and bytes, counters end in `_total`, the HELP of every metric says what it means. Nothing is counted
here: the figures are those of /stats. All series together are bounded (`series`): partition labels go first, then
channels and topics by rank; `nsqha_metrics_merged` says how many of each have no series of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from platform import python_version
from types import MappingProxyType
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from nsqha.cursor.deferred.dead import Reason
from nsqha.quantile import ATTEMPT_BOUNDS, MESSAGE_BOUNDS, HistogramData
from nsqha.server.http.metrics.exposition import PIECE, Family, Row, SeriesTable, label_text
from nsqha.server.http.metrics.series import Rows, SeriesBound, Widths
from nsqha.server.http.metrics.turns import to_end
from nsqha.server.http.stats import ISR_CHANGES, BrokerStats
from nsqha.server.runtime.measures import collector, open_files, resident_bytes

_EOF = b"# EOF\n"
_ISR_CHANGES = tuple(label_text(("kind",), (kind,)) for kind in ISR_CHANGES)
_REASONS = tuple(label_text(("reason",), (reason.label,)) for reason in Reason)

_TOPIC = ("topic",)
_CHANNEL = ("topic", "channel")
_PARTITION = ("topic", "partition")
_FOLLOWER = ("follower",)
_CURSOR = ("topic", "channel", "partition")

Requests = Mapping[tuple[str, int], int]
"""How many HTTP requests were answered, by route and status."""
NO_REQUESTS: Requests = MappingProxyType({})


class Scrape(NamedTuple):
    """One answer: its body, in parts, and its Content-Type."""

    parts: list[bytes]
    content_type: str


def render(stats: BrokerStats, accept: str, bound: SeriesBound, requests: Requests = NO_REQUESTS) -> tuple[bytes, str]:
    """The body, and its Content-Type; `bound` is that of the last scrape of the same topics."""
    made = to_end(rendered(stats, accept, bound, requests))
    return b"".join(made.parts), made.content_type


def rendered(
    stats: BrokerStats, accept: str, bound: SeriesBound, requests: Requests, files: int | None = None
) -> Generator[None, None, Scrape]:
    """The same, piece by piece."""
    encode, content_type = choose_encoder(accept)
    openmetrics = content_type.startswith("application/openmetrics-text")
    made = Scrape([], content_type)
    for family in NodeMetrics(stats, bound, requests, files).steps():
        if isinstance(family, SeriesTable):
            for piece in family.pieces(openmetrics=openmetrics):
                made.parts.append(piece.encode())
                yield
        elif family is not None:
            made.parts.append(encode(_Alone(family)).removesuffix(_EOF))
        yield
    if openmetrics:
        made.parts.append(_EOF)
    return made


class NodeMetrics:
    """All families of one moment of a broker."""

    def __init__(self, stats: BrokerStats, bound: SeriesBound, requests: Requests, files: int | None = None) -> None:
        """`files`: how many are open; None: they are counted here, which takes a microsecond each."""
        self._stats = stats
        self._files = files
        self._bound = bound
        self._requests = requests

    def collect(self) -> Iterator[Family]:
        return (family for family in self.steps() if family is not None)

    def steps(self) -> Iterator[Family | None]:
        """None where something else was done than a family."""
        stats, node_series = self._stats, 0
        for family in self._of_node():
            node_series += len(family.samples)
            yield family
        widths = yield from _widths(stats)
        rows = yield from self._bound.rows(stats, widths, node_series)
        tables = yield from _tables(rows)
        in_cluster = stats.node.cluster is not None
        yield from _topics(tables.topics, in_cluster=in_cluster)
        yield from _partitions(tables, in_cluster=in_cluster)
        yield from _channels(tables.channels)
        yield from _cursors(tables.cursors)
        yield gauges(
            "metrics_merged",
            "Values of a label that have no series of their own, as the series of /metrics are bounded; 0 if none.",
            ("label",),
            [((label,), count) for label, count in rows.merged.items()],
        )

    def _of_node(self) -> Iterator[Metric]:
        stats = self._stats
        yield from _process(stats, self._files)
        yield http_requests(self._requests)
        yield _grpc_requests(stats)
        yield from _storage(stats)
        yield from _segments(stats)
        yield from _publishing(stats)
        yield from _cluster(stats)


class _Alone(Collector):
    """A registry of one family, as the encoders want one."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


class _Tables(NamedTuple):
    """What has series, with its labels as text."""

    topics: list[Row]
    partitions: list[Row]
    sync_modes: list[Row]
    channels: list[Row]
    cursors: list[Row]


def _tables(rows: Rows) -> Generator[None, None, _Tables]:
    """Write the labels."""
    modes: list[tuple[tuple[str, ...], object]] = [(labels, None) for labels in rows.sync_modes]
    found = _Tables([], [], [], [], [])
    all_rows: tuple[tuple[list[Row], tuple[str, ...], Sequence[tuple[tuple[str, ...], object]]], ...] = (
        (found.topics, _TOPIC, rows.topics),
        (found.partitions, _PARTITION, rows.partitions),
        (found.sync_modes, (*_PARTITION, "mode"), modes),
        (found.channels, _CHANNEL, rows.channels),
        (found.cursors, _CURSOR, rows.cursors),
    )
    for texts, names, labelled in all_rows:
        for at in range(0, len(labelled), PIECE):
            texts.extend([(label_text(names, labels), row) for labels, row in labelled[at : at + PIECE]])
            yield
    return found


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"nsqha_{name}", text, value=value)


def gauges(name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(f"nsqha_{name}", text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def counters(name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = CounterMetricFamily(f"nsqha_{name}", text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def histogram(name: str, text: str, data: HistogramData) -> Metric:
    return HistogramMetricFamily(f"nsqha_{name}", text, buckets=_buckets(data), sum_value=data.sum)


def _histograms(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], HistogramData]]
) -> Metric:
    family = HistogramMetricFamily(f"nsqha_{name}", text, labels=labels)
    for values, data in rows:
        family.add_metric(values, _buckets(data), data.sum)
    return family


def _buckets(data: HistogramData) -> list[tuple[str, float]]:
    buckets = []
    total = 0
    for bound, count in zip([*map(str, map(float, data.bounds)), "+Inf"], data.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets


def http_requests(requests: Requests) -> Metric:
    """Of a broker, or of a lookup daemon."""
    return counters(
        "http_requests",
        "HTTP requests that were answered; what is no route counts as (none).",
        ("route", "code"),
        [((route, str(status)), count) for (route, status), count in sorted(requests.items())],
    )


def _grpc_requests(stats: BrokerStats) -> Metric:
    return counters(
        "grpc_requests",
        "Calls that the gRPC port answered, a stream when it ends; what is no method counts as (none).",
        ("method", "code"),
        [(labels, count) for labels, count in stats.node.grpc_requests],
    )


def certificates(ends: Iterable[tuple[str, float]]) -> Metric:
    """Of a broker, or of a lookup daemon."""
    return gauges(
        "certificate_expiry_timestamp_seconds",
        "When a certificate in use expires, Unix time.",
        ("path",),
        [((path,), end) for path, end in ends],
    )


def _process(stats: BrokerStats, files: int | None) -> Iterator[Metric]:
    node = stats.node
    build = {"version": node.version, "nsq_version": stats.version, "python": python_version(), "hot": node.hot}
    yield InfoMetricFamily("nsqha_build", "What is running; `hot` is compiled or pure.", value=build)
    yield gauge("start_time_seconds", "When the process began to serve, Unix time.", stats.start_time_ns / 1e9)
    yield gauge("healthy", "1 if the last write to disk succeeded.", float(stats.health == "OK"))
    yield gauge("resident_memory_bytes", "Resident memory of the process.", resident_bytes())
    yield gauge("open_files", "File descriptors in use.", open_files() if files is None else files)
    yield counters("gc_runs", "Full garbage collections.", (), [((), collector.runs)])
    yield counters("gc_pause_seconds", "Time spent in full garbage collections.", (), [((), collector.seconds_total)])
    yield histogram("loop_lag_seconds", "How late the event loop ran a timer.", node.loop_lag_seconds)
    yield certificates(node.certificates)
    yield gauge("connections", "Open TCP connections of clients.", node.connections)
    yield counters(
        "connections_accepted", "TCP connections accepted since the start.", (), [((), node.connections_total)]
    )


def _storage(stats: BrokerStats) -> Iterator[Metric]:
    node = stats.node
    yield gauge("disk_free_bytes", "Free space of the data folder's file system.", node.disk_free_bytes)
    yield gauge("disk_total_bytes", "Size of the data folder's file system.", node.disk_total_bytes)
    yield gauge(
        "disk_refusing_publishes", "1 while publishes are refused as the disk is low.", float(node.disk_refusing)
    )
    yield gauge(
        "cursor_cache_written",
        "1 if the cache of channel state could be written and read; if not, starts take longer and memory grows.",
        float(node.cursor_cache_written),
    )
    yield gauge(
        "cursor_cache_waiting_rows",
        "Changes of deferred messages that are not in the cache of channel state yet.",
        node.cursor_cache_waiting,
    )
    yield histogram("fsync_seconds", "Duration of a disk round: fdatasync of all files written.", node.fsync_seconds)
    yield counters(
        "log_events",
        "Events of the log to look into: cuts at recovery, checksum errors, possible losses.",
        ("event",),
        [((event,), count) for event, count in node.log_events],
    )
    yield counters(
        "retention_removed_bytes",
        "Bytes of the log that retention removed here.",
        (),
        [((), node.retention_removed_bytes)],
    )
    yield counters("scrub_read_bytes", "Stored bytes that the scrub has checked.", (), [((), node.scrub.read_bytes)])
    yield counters("scrub_rounds", "Rounds of the scrub over everything stored.", (), [((), node.scrub.rounds)])
    yield gauge(
        "scrub_damaged_ranges",
        "Ranges of the log that did not verify when the scrub last read them.",
        node.scrub.damaged_ranges,
    )


def _segments(stats: BrokerStats) -> Iterator[Metric]:
    segments = stats.node.segments
    yield counters("segments_sent_bytes", "Bytes of the log sent to readers of segments.", (), [((), segments.bytes)])
    yield counters(
        "segments_requests",
        "Requests of readers of segments, by HTTP status.",
        ("status",),
        [((status,), count) for status, count in segments.requests],
    )
    yield gauge("segments_connections", "Open connections of readers of segments.", segments.connections)


def _publishing(stats: BrokerStats) -> Iterator[Metric]:
    node = stats.node
    yield counters(
        "publish_errors", "Publishes that were not answered OK.", ("code",), [((c,), n) for c, n in node.publish_errors]
    )
    yield counters(
        "access_refused_requests",
        "Requests that the access file refused, by HTTP status.",
        ("status",),
        [((status,), count) for status, count in node.access_refused],
    )
    yield counters(
        "auth_refused_logins",
        "Clients that auth servers did not let in: refused, no_answer that can be used, or nothing_allowed.",
        ("why",),
        [((why,), count) for why, count in node.auth_refused],
    )
    yield counters(
        "audit_lost_records", "Records of changes that the audit topic did not take.", (), [((), node.audit_lost)]
    )
    yield gauge("ephemeral_bytes", "Memory that #ephemeral topics hold.", node.ephemeral_bytes)
    yield counters(
        "ephemeral_dropped_messages",
        "Messages that #ephemeral topics dropped unread, to stay within their bounds.",
        (),
        [((), node.ephemeral_dropped)],
    )
    yield histogram("publish_seconds", "From the flush of a batch to its commit.", node.publish_seconds)
    yield histogram("publish_group_commit_messages", "Messages committed together.", node.batch_messages)


def _cluster(stats: BrokerStats) -> Iterator[Metric]:
    """The metrics of a cluster's node; a single node has none of them."""
    cluster = stats.node.cluster
    if cluster is None:
        return
    yield gauge(
        "cluster_registered", "1 while the node's lease is valid for the other nodes.", float(cluster.registered)
    )
    yield gauge("cluster_nodes", "Live nodes, as far as this node knows.", cluster.nodes)
    yield gauge("cluster_leaders", "Partitions that this node leads.", cluster.leaders)
    yield gauge("cluster_followers", "Partitions that this node follows.", cluster.followers)
    yield gauge(
        "cluster_followers_behind",
        "Partitions that this node follows and that catch up, or have no leader.",
        cluster.followers_behind,
    )
    yield gauges(
        "catch_up_left_bytes",
        "What replicas here lack of their leaders' logs: those that fell behind (follower) or began empty (rebuild).",
        ("kind",),
        [(("follower",), cluster.catch_up_bytes), (("rebuild",), cluster.rebuild_bytes)],
    )
    yield gauge(
        "cluster_under_replicated",
        "Partitions led here with fewer in-sync replicas than the topic is to have.",
        cluster.under_replicated,
    )
    yield gauge(
        "cluster_below_min_isr",
        "Partitions led here with fewer in-sync replicas than min_isr: they acknowledge nothing.",
        cluster.below_min_isr,
    )
    lags = [((lag.name or f"{lag.node:016x}",), lag) for lag in cluster.push_lag]
    yield gauges(
        "push_lag_entries",
        "Batches of all partitions led here that a follower node has not acknowledged.",
        _FOLLOWER,
        [(labels, lag.entries) for labels, lag in lags],
    )
    yield gauges(
        "push_lag_bytes",
        "Bytes of all partitions led here that a follower node has not acknowledged.",
        _FOLLOWER,
        [(labels, lag.bytes) for labels, lag in lags],
    )
    yield gauges(
        "push_lag_seconds",
        "Since the oldest batch was sent that a follower node has not acknowledged; 0 if it has all.",
        _FOLLOWER,
        [(labels, lag.seconds) for labels, lag in lags],
    )
    yield _histograms(
        "replication_seconds",
        "From sending batches to a follower node to its acknowledgement.",
        _FOLLOWER,
        [(labels, lag.acknowledged_seconds) for labels, lag in lags],
    )
    yield gauge(
        "lease_remaining_seconds", "How long this node's lease lasts if it is not renewed.", cluster.lease_seconds
    )
    yield histogram("metadata_request_seconds", "Calls to etcd, each with all its attempts.", cluster.metadata_seconds)
    yield counters(
        "metadata_requests_failed",
        "Calls to etcd that failed, or whose outcome is not known.",
        (),
        [((), cluster.metadata_failures)],
    )
    yield counters(
        "forwarded_messages",
        "Messages that were published at other nodes and sent here, to their leader.",
        (),
        [((), cluster.forwarded)],
    )
    yield counters(
        "relayed_messages",
        "Messages of partitions led here that consumers at other nodes got.",
        (),
        [((), cluster.relayed)],
    )
    yield gauges(
        "clock_offset_seconds",
        "What the wall clock of another node is ahead of the one here.",
        ("peer",),
        [((offset.name or f"{offset.node:016x}",), offset.seconds) for offset in cluster.clock_offsets],
    )


# Name, help, field. Counters are among the first of topics and channels, all others are gauges.

_OF_TOPIC = (
    ("publish_messages", "Messages published.", "message_count"),
    ("publish_bytes", "Bytes of message bodies published.", "message_bytes"),
    (
        "topic_depth",
        "Messages that have not been copied to any channel yet (topic paused or without channels).",
        "depth",
    ),
    ("topic_paused", "1 if the topic is paused.", "paused"),
)
_TOPIC_COUNTERS = 2
_TOPIC_CHANGES = 1 + len(ISR_CHANGES)  # series, in a cluster

_OF_PARTITION = (
    ("partition_epoch", "Leader epoch.", "leader_epoch"),
    ("partition_start_offset", "Oldest message that is kept.", "start_offset"),
    ("partition_end_offset", "One past the newest message written.", "end_offset"),
    ("partition_committed_offset", "One past the newest message committed.", "committed_offset"),
    (
        "partition_start_position_bytes",
        "Position of the oldest byte that is kept; it grows by what retention removes.",
        "start_position_bytes",
    ),
    ("partition_end_position_bytes", "Position one past the newest byte.", "end_position_bytes"),
    ("partition_segments", "Segment files.", "segments"),
    ("partition_waiting_bytes", "Bytes of publishes that are not written yet.", "waiting_bytes"),
    ("partition_unsynced_messages", "Messages written and not yet fdatasync'ed.", "unsynced_messages"),
    ("segment_holds", "Holds of batch readers, which keep the partition's files from retention.", "holds"),
)
_OF_REPLICATED_PARTITION = (
    (
        "partition_isr_size",
        "Members of the ISR as recorded; an unreachable one may still be among them.",
        "isr_size",
    ),
    ("partition_replicas", "Replicas.", "replicas"),
    ("partition_min_isr", "Replicas that must have a message before it is acknowledged.", "min_isr"),
    (
        "partition_below_min_isr",
        "1 while the partition has too few in-sync replicas and acknowledges nothing.",
        "below_min_isr",
    ),
)

_OF_CHANNEL = (
    ("channel_messages", "Messages copied to the channel.", "message_count"),
    ("channel_acked", "Messages finished by consumers.", "finish_count"),
    ("channel_requeued", "REQ commands of consumers.", "requeue_count"),
    ("channel_timed_out", "Deliveries that were not answered in time.", "timeout_count"),
    ("channel_skipped", "Messages passed over, as a policy says skip.", "skipped_count"),
    ("channel_dropped", "Messages passed over, as a policy bounds the depth.", "dropped_count"),
    ("channel_expired", "Messages passed over, as a policy bounds their age.", "expired_count"),
    ("channel_clients", "Consumers.", "client_count"),
    ("channel_paused", "1 if the channel is paused.", "paused"),
)
_CHANNEL_COUNTERS = 7

_OF_TIMES = (
    ("channel_delivery_seconds", "From publish to the first delivery; a sample, one message at a time.", "handed_out"),
    ("channel_process_seconds", "From the first delivery to FIN; a sample, one message at a time.", "processed"),
    ("channel_attempts", "At which attempt messages were finished; all of them.", "attempts"),
)
_TIMES_SERIES = 2 * (len(MESSAGE_BOUNDS) + 3) + len(ATTEMPT_BOUNDS) + 3  # +Inf, count and sum

_OF_CURSOR = (
    ("channel_depth", "Messages waiting, deferred ones that are due included, those in flight not.", "depth"),
    ("channel_in_flight", "Messages delivered and not answered yet.", "in_flight_count"),
    ("channel_deferred", "Messages deferred until a time that is not over.", "deferred_count"),
    ("channel_dead", "Dead letters, which nobody gets until an operator says so.", "dead_count"),
    ("channel_dead_oldest_seconds", "Time since the oldest dead letter died; 0: there is none.", "dead_oldest_seconds"),
    ("channel_finished_ranges", "Ranges finished above the floor.", "finished_ranges"),
    (
        "channel_uncommitted_progress",
        "Messages finished whose progress is not committed yet.",
        "uncommitted_progress",
    ),
)
_CURSOR_SERIES = len(_OF_CURSOR) + 2  # the age and `stuck`


def _widths(stats: BrokerStats) -> Generator[None, None, Widths]:
    quantiles = 0
    for topic in stats.topics:
        found = (len(channel.e2e_processing_latency.percentiles or ()) for channel in topic.channels)
        quantiles = max(quantiles, *found, 0)
        yield
    return Widths(
        topic=len(_OF_TOPIC) + _TOPIC_CHANGES * (stats.node.cluster is not None),
        partition=len(_OF_PARTITION) + len(_OF_REPLICATED_PARTITION) * (stats.node.cluster is not None),
        channel=len(_OF_CHANNEL) + len(Reason) + _TIMES_SERIES + quantiles,
        cursor=_CURSOR_SERIES,
    )


def _topics(rows: list[Row], *, in_cluster: bool) -> Iterator[SeriesTable]:
    for index, (name, text, field) in enumerate(_OF_TOPIC):
        yield _table(name, "counter" if index < _TOPIC_COUNTERS else "gauge", text, _TOPIC, rows, field)
    if not in_cluster:
        return
    yield _table(
        "partition_leader_changes",
        "counter",
        "Times that this node became leader of a partition of the topic.",
        _TOPIC,
        rows,
        "leader_changes",
    )
    yield _table(
        "partition_isr_changes",
        "counter",
        "Changes of in-sync replica sets that this node, as leader, asked for: shrink, expand, swap.",
        (*_TOPIC, "kind"),
        rows,
        lambda topic: zip(_ISR_CHANGES, topic.isr_changes, strict=True),
        further=True,
    )


def _partitions(tables: _Tables, *, in_cluster: bool) -> Iterator[SeriesTable]:
    for name, text, field in _OF_PARTITION + _OF_REPLICATED_PARTITION * in_cluster:
        yield _table(name, "gauge", text, _PARTITION, tables.partitions, field)
    yield _table(
        "partition_sync_mode",
        "gauge",
        "1 for what OK means: always, interval or none.",
        (*_PARTITION, "mode"),
        tables.sync_modes,
        lambda _: 1,
    )


def _channels(rows: list[Row]) -> Iterator[SeriesTable]:
    for index, (name, text, field) in enumerate(_OF_CHANNEL):
        yield _table(name, "counter" if index < _CHANNEL_COUNTERS else "gauge", text, _CHANNEL, rows, field)
    yield _table(
        "channel_died",
        "counter",
        "Messages that were given up, by reason; kept as dead letters, unless the policy drops them.",
        (*_CHANNEL, "reason"),
        rows,
        lambda channel: [(why, count) for why, count in zip(_REASONS, channel.died, strict=True) if count],
        further=True,
    )
    yield _table(
        "channel_end_to_end_seconds",
        "gauge",
        "Message age at FIN over the sliding window, by configured quantile.",
        (*_CHANNEL, "quantile"),
        rows,
        lambda channel: [
            (f'quantile="{quantile}"', nanoseconds / 1e9)
            for quantile, nanoseconds in channel.e2e_processing_latency.percentiles or ()
        ],
        further=True,
    )
    for name, text, field in _OF_TIMES:
        value = attrgetter(f"times.{field}")
        found = [(labels, channel) for labels, channel in rows if any(value(channel).counts)]
        yield _table(name, "histogram", text, _CHANNEL, found, value)


def _cursors(rows: list[Row]) -> Iterator[SeriesTable]:
    for name, text, field in _OF_CURSOR:
        yield _table(name, "gauge", text, _CURSOR, rows, field)
    yield _table(
        "channel_oldest_unfinished_seconds",
        "gauge",
        "Age of the oldest message that is not finished, by its publish time; 0 if all are.",
        _CURSOR,
        rows,
        lambda cursor: cursor.oldest_unfinished_seconds or 0,
    )
    yield _table(
        "channel_stuck",
        "gauge",
        "1 if the channel cannot read further, for example at a damaged part of the log.",
        _CURSOR,
        rows,
        lambda cursor: bool(cursor.stuck),
    )


def _table(
    name: str,
    kind: str,
    text: str,
    labels: tuple[str, ...],
    rows: Sequence[Row],
    value: Callable[[Any], Any] | str,
    *,
    further: bool = False,
) -> SeriesTable:
    return SeriesTable(f"nsqha_{name}", kind, text, labels, rows, value, further)
