"""The broker's statistics: immutable snapshots, and nsqd's /stats made from them.

`BrokerApi.snapshot` returns these dataclasses. Everything that observes the broker (/stats, /metrics, statsd, the gRPC
admin service) reads only them. nsqd's JSON has a fixed set of keys in a fixed order, which clients and nsqadmin decode
into typed structs; so what nsqd does not have (partitions, log ends, fsync times, age of the oldest unfinished
message) goes into one extra object, shown on demand: `include_nsqha=true`.

`depth` counts the waiting messages, also those whose delay is over, without those in flight; `message_count` counts a
message once per channel and ignores requeues. A topic's own depth counts the messages that have not been copied to any
channel yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nsqha import NSQ_VERSION
from nsqha.cursor.deferred.dead import Reason
from nsqha.cursor.live.followed import NO_TIMES, ChannelTimes
from nsqha.quantile import EMPTY_BATCHES, EMPTY_SECONDS, NOTHING, HistogramData, Result
from nsqha.server.runtime.measures import MemoryStats

ISR_CHANGES = ("shrink", "expand", "swap")
"""What a leader may ask of the in-sync replica set (`nsqha.replication.isr`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStats:
    """One TCP connection, as a consumer of a channel or as a producer."""

    client_id: str
    hostname: str
    remote_address: str
    state: int
    connect_ts: int  # seconds since 1970
    user_agent: str = ""
    ready_count: int = 0
    in_flight_count: int = 0
    message_count: int = 0
    finish_count: int = 0
    requeue_count: int = 0
    zone_local_msg_count: int = 0
    region_local_msg_count: int = 0
    global_msg_count: int = 0
    sample_rate: int = 0
    deflate: bool = False
    snappy: bool = False
    authed: bool = False
    auth_identity: str = ""
    auth_identity_url: str = ""
    topology_zone: str = ""
    topology_region: str = ""
    pub_counts: tuple[tuple[str, int], ...] = ()
    tls: bool = False
    tls_cipher_suite: str = ""
    tls_version: str = ""
    tls_negotiated_protocol: str = ""
    tls_negotiated_protocol_is_mutual: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorStats:
    """A channel's position in one partition that this node leads."""

    partition: int
    floor: int
    next_read: int
    finished_ranges: int = 0
    depth: int = 0
    in_flight_count: int = 0
    deferred_count: int = 0
    uncommitted_progress: int = 0  # messages finished in memory whose progress event is not committed yet
    oldest_unfinished_seconds: float | None = None  # age by publish time; None if nothing is unfinished
    stuck: str = ""  # why nothing more can be read; empty if it can
    leader_epoch: int = 0
    message_count: int = 0  # since this node leads the partition, like the following ones
    requeue_count: int = 0
    timeout_count: int = 0
    finish_count: int = 0
    skipped_count: int = 0  # passed over by a policy
    dropped_count: int = 0  # ... that bounds the depth
    expired_count: int = 0  # ... that bounds the age
    dead_count: int = 0  # dead letters that are kept
    dead_oldest_seconds: float = 0.0  # since the first of them died
    died_count: int = 0  # messages that died, also those that were not kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    """A channel, summed over its partitions on this node; the first fields are nsqd's."""

    channel_name: str
    depth: int = 0
    backend_depth: int = 0
    in_flight_count: int = 0
    deferred_count: int = 0
    message_count: int = 0
    inherited_count: int = 0  # messages that waited when this node began to lead
    requeue_count: int = 0
    timeout_count: int = 0
    finish_count: int = 0
    skipped_count: int = 0  # passed over by a policy
    dropped_count: int = 0  # ... that bounds the depth
    expired_count: int = 0  # ... that bounds the age
    died: tuple[int, ...] = (0,) * len(Reason)  # messages that died, by reason
    zone_local_msg_count: int = 0
    region_local_msg_count: int = 0
    global_msg_count: int = 0
    client_count: int = 0
    clients: tuple[ClientStats, ...] = ()
    relayed_count: int = 0
    relayed: tuple[ClientStats, ...] = ()  # connected to other nodes, and served from here
    paused: bool = False
    reader: bool = False  # a reader channel: it delivers nothing; `depth` is how far its reader is behind
    e2e_processing_latency: Result = NOTHING
    cursors: tuple[CursorStats, ...] = ()
    times: ChannelTimes = NO_TIMES


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStats:
    """One partition's log on this node."""

    partition: int
    leader_epoch: int = 0
    sync: str = "always"
    start_offset: int = 0
    start_position_bytes: int = 0
    end_offset: int = 0
    end_position_bytes: int = 0
    committed_offset: int = 0
    segments: int = 0
    waiting_bytes: int = 0  # publishes that are not written yet
    unsynced_messages: int = 0  # written, not fdatasync'ed
    isr_size: int = 1
    replicas: int = 1
    min_isr: int = 1
    under_replicated: bool = False  # fewer in-sync replicas than the topic is to have
    below_min_isr: bool = False  # fewer in-sync replicas than min_isr: nothing is acknowledged
    holds: int = 0  # of batch readers


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStats:
    """A topic as this node has it; the first fields are nsqd's."""

    topic_name: str
    channels: tuple[ChannelStats, ...] = ()
    depth: int = 0
    backend_depth: int = 0
    message_count: int = 0
    message_bytes: int = 0
    paused: bool = False
    e2e_processing_latency: Result = NOTHING
    partitions: tuple[PartitionStats, ...] = ()
    inherited_count: int = 0  # messages that waited when this node began to lead
    leader_changes: int = 0  # epochs that began here, of all partitions
    isr_changes: tuple[int, ...] = (0, 0, 0)  # proposed here: ISR_CHANGES


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedRangeStats:
    """Batches that did not verify when the scrub last read them."""

    topic_name: str
    partition: int
    first_offset: int
    end_offset: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubStats:
    """The scrub, which slowly reads and verifies everything stored."""

    rounds: int = 0  # ended since the start
    read_bytes: int = 0  # since the start
    damaged_ranges: int = 0
    damage: tuple[DamagedRangeStats, ...] = ()  # the first of them


@dataclass(frozen=True, slots=True, kw_only=True)
class PushLag:
    """What a follower node has not acknowledged yet of all partitions led here."""

    node: int  # uid
    name: str  # empty: the node is not registered
    partitions: int = 0
    entries: int = 0  # of the commitlog, so batches
    bytes: int = 0
    seconds: float = 0.0  # since the oldest of these was sent
    acknowledged_seconds: HistogramData = EMPTY_SECONDS  # from a push to its acknowledgement


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """What the wall clock of another node is ahead of the one here."""

    node: int  # uid
    name: str  # empty: the node is not registered
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStats:
    """This node as a member of its cluster."""

    node: int  # uid
    registered: bool = False  # its lease is valid for the other nodes
    nodes: int = 0  # live ones, as far as is known here
    leaders: int = 0  # partitions led here
    followers: int = 0  # partitions followed here
    followers_behind: int = 0  # partitions followed here that catch up or have no leader
    catch_up_bytes: int = 0  # that these still lack, as far as their leaders have said where they end
    rebuild_bytes: int = 0  # the same of replicas that began with nothing
    under_replicated: int = 0  # partitions led here with fewer in-sync replicas than the topic is to have
    below_min_isr: int = 0  # partitions led here that acknowledge nothing
    push_lag: tuple[PushLag, ...] = ()
    clock_offsets: tuple[ClockOffset, ...] = ()
    lease_seconds: float = 0.0  # until the lease ends, if it is not renewed
    metadata_seconds: HistogramData = EMPTY_SECONDS  # of calls to the metadata store, with all their attempts
    metadata_failures: int = 0  # calls that failed, or whose outcome is unknown
    forwarded: int = 0  # messages that clients published at other nodes and this one was sent
    relayed: int = 0  # messages that consumers at other nodes got from here


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStats:
    """The segment service and its readers."""

    bytes: int = 0  # sent since the start
    requests: tuple[tuple[str, int], ...] = ()  # since the start, by HTTP status
    connections: int = 0  # now


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStats:
    """The statistics of the whole process."""

    version: str = ""  # of this product; BrokerStats.version is the nsqd release that it is compatible with
    hot: str = ""  # compiled or pure
    sync: str = "always"  # default for new topics
    data_path: str = ""
    grpc_address: str = ""
    segments_address: str = ""
    segments: SegmentStats = SegmentStats()
    connections: int = 0
    connections_total: int = 0
    disk_free_bytes: int = 0
    disk_total_bytes: int = 0
    disk_refusing: bool = False  # below the watermark: publishes are refused
    cursor_cache_written: bool = True  # the cache of channel state works; the logs have everything in any case
    cursor_cache_waiting: int = 0  # changes of deferred messages that are not in the cache yet
    fsync_seconds: HistogramData = EMPTY_SECONDS
    publish_seconds: HistogramData = EMPTY_SECONDS  # from the flush of a batch to its commit
    batch_messages: HistogramData = EMPTY_BATCHES
    loop_lag_seconds: HistogramData = EMPTY_SECONDS
    publish_errors: tuple[tuple[str, int], ...] = ()  # by error code
    access_refused: tuple[tuple[str, int], ...] = ()  # requests that the access file refused, by status
    auth_refused: tuple[tuple[str, int], ...] = ()  # logins that auth servers did not allow, by reason
    grpc_requests: tuple[tuple[tuple[str, str], int], ...] = ()  # calls answered, by method and status
    audit_lost: int = 0  # records that the audit topic did not take
    log_events: tuple[tuple[str, int], ...] = ()  # recovery cuts, checksum errors, possible losses: event -> count
    retention_removed_bytes: int = 0
    certificates: tuple[tuple[str, float], ...] = ()  # path, Unix time when it expires
    ephemeral_bytes: int = 0  # memory of #ephemeral topics
    ephemeral_dropped: int = 0  # messages of theirs that were not kept, to stay within their bounds
    scrub: ScrubStats = ScrubStats()
    cluster: ClusterStats | None = None  # None: a single node


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerStats:
    """All statistics at one moment; topics and channels in any order."""

    health: str
    start_time_ns: int
    topics: tuple[TopicStats, ...] = ()
    producers: tuple[ClientStats, ...] = ()
    node: NodeStats = NodeStats()
    version: str = NSQ_VERSION


@dataclass(frozen=True, slots=True)
class Selection:
    """What a /stats request asks for. Empty names select everything."""

    topic: str = ""
    channel: str = ""
    clients: bool = True


@dataclass(frozen=True, slots=True)
class Selected:
    """What is shown: nsqd distinguishes "no such topic" (None) from "topics, but none selected" (empty)."""

    topics: tuple[TopicStats, ...] | None
    producers: tuple[ClientStats, ...] | None


def select(stats: BrokerStats, wanted: Selection) -> Selected:
    """Apply nsqd's filters, and its order: by name."""
    topics = [t for t in stats.topics if wanted.topic in ("", t.topic_name)]
    if wanted.topic and not topics:
        return Selected(None, None)
    if stats.node.cluster is not None:
        topics = [_with_inherited(topic) for topic in topics]
    shown = []
    for topic in sorted(topics, key=lambda t: t.topic_name):
        channels = [c for c in topic.channels if wanted.channel in ("", c.channel_name)]
        if wanted.channel and not channels:
            continue
        channels.sort(key=lambda c: c.channel_name)
        shown.append(replace(topic, channels=tuple(channels)))
    # The topic filter applies to the counts of each producer, not to the list of producers.
    producers = tuple(replace(p, pub_counts=_published_to(p, wanted.topic)) for p in stats.producers)
    return Selected(tuple(shown), (producers or None) if wanted.clients else None)


def _with_inherited(topic: TopicStats) -> TopicStats:
    """Count what waited when this node began to lead: else tools show more messages that wait than there are. Metrics
    leave it out: their sum over the nodes would have it twice. A single node counts from its start, as nsqd does."""
    return replace(
        topic,
        message_count=topic.message_count + topic.inherited_count,
        channels=tuple(replace(c, message_count=c.message_count + c.inherited_count) for c in topic.channels),
    )


def _published_to(client: ClientStats, topic: str) -> tuple[tuple[str, int], ...]:
    return tuple((name, count) for name, count in client.pub_counts if topic in ("", name))


# ---- nsqd's JSON


def stats_json(
    stats: BrokerStats, wanted: Selection, memory: MemoryStats | None, extra: bool = False
) -> dict[str, Any]:
    """The object that `/stats?format=json` shows, with keys in nsqd's order."""
    selected = select(stats, wanted)
    shown: dict[str, Any] = {
        "version": stats.version,
        "health": stats.health,
        "start_time": stats.start_time_ns // 1_000_000_000,
        "topics": None if selected.topics is None else [_topic_json(t, wanted) for t in selected.topics],
    }
    if memory is not None:
        shown["memory"] = memory._asdict()
    shown["producers"] = None if selected.producers is None else [_client_json(p) for p in selected.producers]
    if extra:
        shown["nsqha"] = _extra_json(stats, selected.topics or ())
    return shown


def _topic_json(topic: TopicStats, wanted: Selection) -> dict[str, Any]:
    return {
        "topic_name": topic.topic_name,
        "channels": [_channel_json(c, wanted) for c in topic.channels],
        "depth": topic.depth,
        "backend_depth": topic.backend_depth,
        "message_count": topic.message_count,
        "message_bytes": topic.message_bytes,
        "paused": topic.paused,
        "e2e_processing_latency": _latency_json(topic.e2e_processing_latency),
    }


def _channel_json(channel: ChannelStats, wanted: Selection) -> dict[str, Any]:
    clients = channel.clients + channel.relayed
    return {
        "channel_name": channel.channel_name,
        "depth": channel.depth,
        "backend_depth": channel.backend_depth,
        "in_flight_count": channel.in_flight_count,
        "deferred_count": channel.deferred_count,
        "message_count": channel.message_count,
        **_locality_json(channel),
        "requeue_count": channel.requeue_count,
        "timeout_count": channel.timeout_count,
        "client_count": channel.client_count + channel.relayed_count,
        "clients": [_client_json(c, wanted.topic) for c in clients] if wanted.clients else None,
        "paused": channel.paused,
        "e2e_processing_latency": _latency_json(channel.e2e_processing_latency),
    }


def _client_json(client: ClientStats, topic: str = "") -> dict[str, Any]:
    shown: dict[str, Any] = {
        "client_id": client.client_id,
        "hostname": client.hostname,
        "version": "V2",
        "remote_address": client.remote_address,
        "state": client.state,
        "ready_count": client.ready_count,
        "in_flight_count": client.in_flight_count,
        "message_count": client.message_count,
        **_locality_json(client),
        "finish_count": client.finish_count,
        "requeue_count": client.requeue_count,
        "connect_ts": client.connect_ts,
        "sample_rate": client.sample_rate,
        "deflate": client.deflate,
        "snappy": client.snappy,
        "user_agent": client.user_agent,
    }
    # nsqd omits these when they are unset.
    optional = {
        "authed": client.authed,
        "auth_identity": client.auth_identity,
        "auth_identity_url": client.auth_identity_url,
    }
    shown |= {key: value for key, value in optional.items() if value}
    shown["topology_zone"] = client.topology_zone
    shown["topology_region"] = client.topology_region
    if counts := _published_to(client, topic):
        shown["pub_counts"] = [{"topic": name, "count": count} for name, count in counts]
    shown["tls"] = client.tls
    shown["tls_cipher_suite"] = client.tls_cipher_suite
    shown["tls_version"] = client.tls_version
    shown["tls_negotiated_protocol"] = client.tls_negotiated_protocol
    shown["tls_negotiated_protocol_is_mutual"] = client.tls_negotiated_protocol_is_mutual
    return shown


def _locality_json(counts: ChannelStats | ClientStats) -> dict[str, int]:
    shown = {
        "zone_local_msg_count": counts.zone_local_msg_count,
        "region_local_msg_count": counts.region_local_msg_count,
        "global_msg_count": counts.global_msg_count,
    }
    return {key: count for key, count in shown.items() if count}


def _latency_json(latency: Result) -> dict[str, Any]:
    percentiles = latency.percentiles
    return {
        "count": latency.observations,
        "percentiles": percentiles and [{"quantile": quantile, "value": value} for quantile, value in percentiles],
    }


# ---- ours


def _extra_json(stats: BrokerStats, topics: Sequence[TopicStats]) -> dict[str, Any]:
    node = stats.node
    return {
        "version": node.version,
        "hot": node.hot,
        "sync": node.sync,
        "data_path": node.data_path,
        "grpc_address": node.grpc_address,
        "segments_address": node.segments_address,
        "connections": node.connections,
        "disk_free_bytes": node.disk_free_bytes,
        "disk_total_bytes": node.disk_total_bytes,
        "disk_refusing": node.disk_refusing,
        "fsync_seconds": _histogram_json(node.fsync_seconds),
        "publish_seconds": _histogram_json(node.publish_seconds),
        "batch_messages": _histogram_json(node.batch_messages),
        "publish_errors": dict(node.publish_errors),
        "log_events": dict(node.log_events),
        "ephemeral_bytes": node.ephemeral_bytes,
        "ephemeral_dropped": node.ephemeral_dropped,
        "scrub": {
            "rounds": node.scrub.rounds,
            "read_bytes": node.scrub.read_bytes,
            "damaged_ranges": node.scrub.damaged_ranges,
            "damage": [_fields(damage) for damage in node.scrub.damage],
        },
        "cluster": None if node.cluster is None else _cluster_json(node.cluster),
        "topics": [
            {
                "topic_name": topic.topic_name,
                "partitions": [_fields(p) for p in topic.partitions],
                "channels": [
                    {
                        "channel_name": c.channel_name,
                        "finish_count": c.finish_count,
                        "reader": c.reader,
                        "cursors": [_fields(k) for k in c.cursors],
                    }
                    for c in topic.channels
                ],
            }
            for topic in topics
        ],
    }


def _cluster_json(cluster: ClusterStats) -> dict[str, Any]:
    lags = [_fields(lag) | {"node": f"{lag.node:016x}"} for lag in cluster.push_lag]
    offsets = [_fields(offset) | {"node": f"{offset.node:016x}"} for offset in cluster.clock_offsets]
    return _fields(cluster) | {"node": f"{cluster.node:016x}", "push_lag": lags, "clock_offsets": offsets}


def _fields(
    record: PartitionStats | CursorStats | DamagedRangeStats | ClusterStats | PushLag | ClockOffset,
) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _histogram_json(histogram: HistogramData) -> dict[str, Any]:
    """The counts by upper bound, not cumulative, without empty buckets."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return {
        "count": sum(histogram.counts),
        "sum": histogram.sum,
        "buckets": {bound: count for bound, count in zip(bounds, histogram.counts, strict=True) if count},
    }
