"""One moment of the broker as the immutable records of `server.http.stats`.

Taken only on request. Figures of a channel are the sums over the partitions this node leads. For /stats, /metrics and
statsd it is looked at in turns, partition by partition: 60 topics of 16 partitions take 50 ms. Where many messages are
deferred, what a channel must count before its figures are known is done in turns, too. A topic whose partitions
change hands meanwhile is looked at again, as what was counted in one that is not led here any more is in `Topic.ended`
then: a sum must have it once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Protocol

import nsqha
from nsqha import hot
from nsqha.clock import Now
from nsqha.cursor.deferred.dead import DEAD_FROM, Reason, death_of
from nsqha.cursor.live import counts
from nsqha.cursor.live.followed import ChannelTimes
from nsqha.errors import LogCorrupt
from nsqha.quantile import NOTHING, merged
from nsqha.server.clients.figures import client_stats
from nsqha.server.http.metrics.turns import in_turns, to_end
from nsqha.server.http.stats import (
    BrokerStats,
    ChannelStats,
    ClientStats,
    CursorStats,
    DamagedRangeStats,
    NodeStats,
    PartitionStats,
    ScrubStats,
    SegmentStats,
    TopicStats,
)
from nsqha.server.partition.holding import live_holds
from nsqha.server.runtime.measures import certificates_end

if TYPE_CHECKING:
    from nsqha.cursor.deferred.overlay import DeferredOverlay
    from nsqha.cursor.live.channel import Channel
    from nsqha.options import Options
    from nsqha.server.clients.connection import Connections
    from nsqha.server.node.availability import Availability
    from nsqha.server.node.cluster_side import ClusterSide
    from nsqha.server.node.parts import Endpoints, NodeParts
    from nsqha.server.node.scrubbing import NodeScrub
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.scrub import Scrubber
    from nsqha.server.partition.topic import Topic
    from nsqha.server.topics.topics import Topics

LOOKS_MAX = 3  # at a topic in turns, whose partitions change hands each time; then in one turn
RANGES_MAX = 100  # damaged ranges that are shown one by one


class NodeFigures(Protocol):
    """The parts of a node that have figures, and what it knows of itself."""

    options: Options
    start_time_ns: int
    topics: Topics
    side: ClusterSide
    connections: Connections
    availability: Availability
    parts: NodeParts
    scrub: NodeScrub
    endpoints: Endpoints

    def now(self) -> Now: ...

    def health(self) -> str: ...


def broker_stats(node: NodeFigures, topic: str, clients: bool) -> BrokerStats:
    """All topics, or `topic` alone; connections only if `clients`."""
    now = node.now()
    topics = [t for t in node.topics.values() if topic in ("", t.name)]
    return _broker_stats(node, [topic_stats(t, now, clients, node.side) for t in topics], clients)


async def broker_stats_in_turns(node: NodeFigures, topic: str, clients: bool) -> BrokerStats:
    """The same. Each partition is as it was at one moment, and clients are served between two."""
    return _broker_stats(node, await in_turns(_topics_in_steps(node, topic, clients)), clients)


def _broker_stats(node: NodeFigures, topics: Iterable[TopicStats], clients: bool) -> BrokerStats:
    producers = [client_stats(c, None) for c in node.connections if c.publisher.counts] if clients else []
    return BrokerStats(
        health=node.health(),
        start_time_ns=node.start_time_ns,
        topics=tuple(topics),
        producers=tuple(producers),
        node=node_stats(node),
    )


def _topics_in_steps(node: NodeFigures, topic: str, clients: bool) -> Generator[None, None, list[TopicStats]]:
    found = []
    for each in [t for t in node.topics.values() if topic in ("", t.name)]:
        for _ in range(LOOKS_MAX):
            if node.topics.get(each.name) is not each:  # it is deleted
                break
            led = each.led
            stats = yield from _topic_in_steps(each, node.now(), clients, node.side)
            if each.led is led and node.topics.get(each.name) is each:
                found.append(stats)
                break
        else:
            now = node.now()
            yield from _prepared(each, now)
            if node.topics.get(each.name) is each:
                found.append(topic_stats(each, now, clients, node.side))
        yield
    return found


def _prepared(topic: Topic, now: Now) -> Generator[None, None, None]:
    """Count what figures of the topic need, until none of its channels has to."""
    led: tuple[Partition, ...] = ()
    while led is not topic.led:
        led = topic.led
        for partition in led:
            for name in topic.channel_names():
                yield from _channel_prepared(topic, partition, name, now)


def _channel_prepared(topic: Topic, partition: Partition, name: str, now: Now) -> Generator[None, None, None]:
    while partition in topic.led and (delivery := partition.deliveries.get(name)) is not None:
        if counts.prepare(delivery.channel.cursor, now.wall_ns):
            return
        yield


def node_stats(node: NodeFigures) -> NodeStats:
    cache, measures, availability = node.parts.opener.cursor_cache, node.parts.opener.measures, node.availability
    endpoints = node.endpoints
    return NodeStats(
        version=nsqha.__version__,
        hot=hot.ACTIVE,
        sync=node.options.sync,
        data_path=node.options.data_path,
        grpc_address=endpoints.ports.grpc_address,
        segments_address=endpoints.segments_address,
        segments=SegmentStats() if endpoints.segments is None else endpoints.segments.figures,
        connections=len(node.connections),
        connections_total=node.connections.total,
        disk_free_bytes=availability.space.free_bytes,
        disk_total_bytes=availability.space.total_bytes,
        disk_refusing=availability.disk_refusing,
        cursor_cache_written=cache.failure is None and cache.delayed is None,
        cursor_cache_waiting=cache.overlaid,
        fsync_seconds=node.parts.disk.round_seconds.data(),
        publish_seconds=measures.publish_seconds.data(),
        batch_messages=measures.batch_messages.data(),
        loop_lag_seconds=measures.loop_lag_seconds.data(),
        publish_errors=tuple(sorted(measures.publish_errors.items())),
        access_refused=() if endpoints.guard is None else endpoints.guard.figures,
        auth_refused=tuple(sorted(endpoints.auth_refused.items())),
        grpc_requests=tuple(sorted(endpoints.grpc_requests.items())),
        audit_lost=0 if endpoints.audit_topic is None else endpoints.audit_topic.lost,
        log_events=tuple(sorted(measures.log_events.items())),
        retention_removed_bytes=measures.retention_removed_bytes,
        certificates=tuple(sorted(certificates_end.items())),
        ephemeral_bytes=node.parts.opener.folders.ephemeral.used,
        ephemeral_dropped=node.parts.opener.folders.ephemeral.dropped,
        scrub=scrub_stats(node.scrub.scrubber),
        cluster=node.side.stats(),
    )


def scrub_stats(scrubber: Scrubber) -> ScrubStats:
    ranges = [(key, damage) for key, found in scrubber.damage.items() for damage in found]
    shown = [
        DamagedRangeStats(
            topic_name=key.topic,
            partition=key.partition,
            first_offset=damage.first.offset,
            end_offset=damage.end.offset,
            why=damage.why,
        )
        for key, damage in ranges[:RANGES_MAX]
    ]
    return ScrubStats(
        rounds=scrubber.rounds, read_bytes=scrubber.bytes_read, damaged_ranges=len(ranges), damage=tuple(shown)
    )


def topic_stats(topic: Topic, now: Now, clients: bool, side: ClusterSide) -> TopicStats:
    return to_end(_topic_in_steps(topic, now, clients, side))


def _topic_in_steps(topic: Topic, now: Now, clients: bool, side: ClusterSide) -> Generator[None, None, TopicStats]:
    channels, partitions = [], []
    for name in topic.channel_names():
        channel = yield from _channel_in_steps(topic, name, now, clients)
        channels.append(channel)
    for partition in topic.led:
        partitions.append(partition_stats(partition, topic, side))
        yield
    unhanded = sum(p.log.end.offset - p.cursors.state.pump for p in topic.led)
    published = [p.batches.publishes for p in topic.led]
    windows = [w for p in topic.led for d in p.deliveries.values() if (w := d.latency) is not None]
    return TopicStats(
        topic_name=topic.name,
        channels=tuple(channels),
        depth=unhanded,
        backend_depth=0 if topic.ephemeral else unhanded,
        message_count=sum(p.message_count for p in published) + topic.ended.topic["message_count"],
        inherited_count=sum(p.inherited_count for p in published) + topic.ended.topic["inherited_count"],
        message_bytes=sum(p.message_bytes for p in published) + topic.ended.topic["message_bytes"],
        paused=topic.record.channels.paused,
        e2e_processing_latency=merged(windows, now.mono) if windows else NOTHING,
        partitions=tuple(partitions),
        **side.changes(topic),
    )


def partition_stats(partition: Partition, topic: Topic, side: ClusterSide) -> PartitionStats:
    log = partition.log
    return PartitionStats(
        partition=partition.number,
        leader_epoch=partition.leader.epoch,
        sync=partition.batches.sync.setting,
        start_offset=log.start.offset,
        start_position_bytes=log.start.position,
        end_offset=log.end.offset,
        end_position_bytes=log.end.position,
        committed_offset=partition.high_watermark,
        segments=len(log.pairs),
        waiting_bytes=partition.batches.publishes.queue.bytes_waiting,
        unsynced_messages=partition.batches.sync.unsynced_messages,
        holds=len(live_holds(partition)),
        **side.replication(topic, partition.number),
    )


def _channel_in_steps(topic: Topic, name: str, now: Now, clients: bool) -> Generator[None, None, ChannelStats]:
    cursors = []
    windows = []
    times = [topic.ended.times(name)]
    listed = topic.record.channels.channels.get(name)
    inherited = 0
    paused = listed is not None and listed.paused  # where it is led, the channel itself knows
    died = Counter[Reason]()
    for partition in topic.led:
        yield from _channel_prepared(topic, partition, name, now)
        delivery = partition.deliveries.get(name)
        if delivery is None or partition not in topic.led:  # not led: the topic is looked at again
            continue
        channel = delivery.channel
        paused = channel.committed.paused if channel.committed.reader else channel.paused
        if delivery.latency is not None:
            windows.append(delivery.latency)
        if channel.answers.finished or not channel.answers.followed.handed_out.empty:
            times.append(channel.answers.times())
        cursors.append(cursor_stats(partition, channel, delivery.stuck or "", now))
        inherited += channel.cursor.counted.inherited
        if cursors[-1].died_count:
            died.update(channel.cursor.dead.died)
        yield
    consumers = topic.consumers.here.get(name, [])
    relayed = _relayed(topic, name)
    depth = sum(c.depth for c in cursors)
    ended = topic.ended.channel(name)
    return ChannelStats(
        channel_name=name,
        depth=depth,
        backend_depth=0 if name.endswith("#ephemeral") or topic.ephemeral else depth,
        in_flight_count=sum(c.in_flight_count for c in cursors),
        deferred_count=sum(c.deferred_count for c in cursors),
        message_count=sum(c.message_count for c in cursors) + ended["message_count"],
        inherited_count=inherited + ended["inherited_count"],
        requeue_count=sum(c.requeue_count for c in cursors) + ended["requeue_count"],
        timeout_count=sum(c.timeout_count for c in cursors) + ended["timeout_count"],
        finish_count=sum(c.finish_count for c in cursors) + ended["finish_count"],
        skipped_count=sum(c.skipped_count for c in cursors) + ended["skipped_count"],
        dropped_count=sum(c.dropped_count for c in cursors) + ended["dropped_count"],
        expired_count=sum(c.expired_count for c in cursors) + ended["expired_count"],
        died=tuple(died[reason] + ended[reason.label] for reason in Reason),
        client_count=len(consumers),
        clients=tuple(client_stats(consumer.wire, consumer) for consumer in consumers) if clients else (),
        relayed_count=len(relayed),
        relayed=relayed if clients else (),
        paused=paused,
        reader=bool(topic.is_reader(name)),
        e2e_processing_latency=merged(windows, now.mono) if windows else NOTHING,
        cursors=tuple(cursors),
        times=ChannelTimes.sum(times) if len(times) > 1 else times[0],
    )


def cursor_stats(partition: Partition, channel: Channel, stuck: str, now: Now) -> CursorStats:
    cursor = channel.cursor
    depth, deferred = counts.held(cursor, now.wall_ns)
    return CursorStats(
        partition=partition.number,
        floor=cursor.floor,
        next_read=cursor.next_read,
        finished_ranges=len(cursor.written.ranges),
        depth=depth,
        in_flight_count=channel.in_flight,
        deferred_count=deferred,
        uncommitted_progress=cursor.uncommitted_progress,
        oldest_unfinished_seconds=oldest_unfinished_seconds(partition, channel, now),
        stuck=stuck,
        leader_epoch=partition.leader.epoch,
        message_count=cursor.message_count,
        requeue_count=channel.answers.requeued,
        timeout_count=channel.answers.timed_out,
        finish_count=channel.finished_count,
        skipped_count=cursor.passing.skipped,
        dropped_count=cursor.passing.dropped,
        expired_count=cursor.passing.expired,
        dead_count=cursor.deferred_overlay.dead,
        dead_oldest_seconds=_oldest_dead_seconds(cursor.deferred_overlay, now),
        died_count=sum(cursor.dead.died.values()),
    )


def _relayed(topic: Topic, channel: str) -> tuple[ClientStats, ...]:
    consumers = topic.consumers.relayed.get(channel)
    if not consumers:
        return ()
    from nsqha.server.routing.relayed_clients import relayed_stats  # only nodes of a cluster load it

    return relayed_stats(consumers)


def _oldest_dead_seconds(deferred: DeferredOverlay, now: Now) -> float:
    if not deferred.dead:
        return 0.0
    (first,) = deferred.dead_letters((DEAD_FROM, -1), 1)
    return max(0.0, (now.wall_ns - death_of(first.due_ns)[0]) / 1e9)


def oldest_unfinished_seconds(partition: Partition, channel: Channel, now: Now) -> float | None:
    """Age of the oldest message that the channel has not finished, by publish time; None if all are."""
    offset = channel.cursor.oldest_unfinished(channel.cursor.end)
    if offset is None:
        return None
    try:
        published_ns = _published_ns(partition, channel, offset)
    except LogCorrupt:
        return None  # its channel says that it is stuck; the other figures are still wanted
    return max(0.0, (now.wall_ns - published_ns) / 1e9) if published_ns is not None else None


def _published_ns(partition: Partition, channel: Channel, offset: int) -> int | None:
    if (entry := partition.log.entry_for_offset(offset)) is not None:
        return entry.timestamp_ns
    ref = channel.cursor.deferred_overlay.get(offset)  # its place in the log is gone, and its frame was carried
    if ref is None or not ref.position:
        return None
    return int.from_bytes(partition.log.message(offset, ref.position)[8:16])
