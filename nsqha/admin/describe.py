"""Descriptions of topics and channels, merged from the answers of all nodes.

    every node that is alive --what it leads, who consumes there--> one answer

A partition's figures are its leader's. While leadership moves two nodes may both report a partition; the later epoch
counts, so nothing is counted twice. A partition that no node reports has an `error` that says why, and nodes that did
not answer are named. Figures of a channel are sums over its partitions; its consumers are those connected to any node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.admin.fan_out import NO_LEADER
from nsqha.admin.peer_admins import PeerAdmins
from nsqha.admin.policies import message_of
from nsqha.admin.replay import timestamp_of
from nsqha.election.health import under_replicated
from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord
from nsqha.election.session import called
from nsqha.errors import NotFound, NsqhaError
from nsqha.pb.v1 import admin_pb2
from nsqha.server.partition.holding import live_holds, log_time

if TYPE_CHECKING:
    from nsqha.server.http.stats import ChannelStats
    from nsqha.server.node.broker import Broker
    from nsqha.server.partition.topic import Topic

ASK_SECONDS = 2.0

SYNC = {"always": admin_pb2.SYNC_ALWAYS, "interval": admin_pb2.SYNC_INTERVAL, "none": admin_pb2.SYNC_NONE}

_COUNTS = ("message_count", "finished", "requeued", "timed_out", "skipped", "dropped", "expired", "died")
_SUMS = ("depth", "in_flight", "deferred", "dead", *_COUNTS)


@dataclass(frozen=True)
class NodeAnswers:
    """The answers of the other nodes."""

    replies: Sequence[Any] = ()
    unreachable: Mapping[int, Any] = field(default_factory=dict)  # node -> admin_pb2.Unreachable

    def why(self, leader: int) -> str:
        """Why nothing is known about a partition with this leader."""
        if not leader:
            return NO_LEADER
        lost = self.unreachable.get(leader)
        if lost is not None:
            return f"its leader {lost.name} does not answer: {lost.why}"
        return "its leader has only just begun, or is gone"

    @property
    def lost(self) -> list[Any]:
        return list(self.unreachable.values())


class Describer:
    """Describes the topics and channels of the cluster, as one node sees them."""

    def __init__(self, broker: Broker, others: PeerAdmins | None) -> None:
        """`others`: None for a single node."""
        self._broker = broker
        self._others = others

    # ---- topics

    async def topics(self, request: Any) -> Any:
        broker = self._broker
        names = sorted(broker.topics)
        if request.HasField("here"):
            return admin_pb2.ListTopicsResponse(topics=[self.topic_here(broker.topics.topic(n)) for n in names])
        elsewhere = await self._ask("ListTopics", admin_pb2.ListTopicsRequest(here=admin_pb2.Here()))
        parts: dict[tuple[str, int], list[Any]] = {}
        for reply in elsewhere.replies:
            for part in reply.topics:
                parts.setdefault((part.name, part.uid), []).append(part)
        shown = []
        for name in names:
            topic = broker.topics.get(name)
            if topic is not None and not topic.deleting:
                shown.append(self._whole_topic(topic, parts.get((name, topic.record.uid), []), elsewhere))
        return admin_pb2.ListTopicsResponse(topics=shown, unreachable=elsewhere.lost)

    async def topic(self, request: Any) -> Any:
        topic = self._broker.topics.topic(request.topic)
        if request.HasField("here"):
            if request.here.topic_uid not in (0, topic.record.uid):
                raise NotFound(f"topic {request.topic} has another uid here")
            return admin_pb2.DescribeTopicResponse(topic=self.topic_here(topic))
        here = admin_pb2.Here(topic_uid=topic.record.uid)
        elsewhere = await self._ask("DescribeTopic", admin_pb2.DescribeTopicRequest(topic=request.topic, here=here))
        parts = [reply.topic for reply in elsewhere.replies if reply.topic.uid == topic.record.uid]
        whole = self._whole_topic(topic, parts, elsewhere)
        return admin_pb2.DescribeTopicResponse(topic=whole, unreachable=elsewhere.lost)

    def _whole_topic(self, topic: Topic, parts: Sequence[Any], elsewhere: NodeAnswers) -> Any:
        record = self._record(topic)

        def missing(number: int) -> Any:
            state = self._membership(record, number)
            state.error = elsewhere.why(state.leader)
            return state

        return merged_topic(self.topic_here(topic), parts, sorted(record.partitions), missing)

    def topic_here(self, topic: Topic) -> Any:
        """The topic, with the partitions that this node leads."""
        record = topic.record
        settings = record.settings
        return admin_pb2.Topic(
            name=topic.name,
            uid=record.uid,
            paused=topic.record.channels.paused,
            settings=admin_pb2.TopicSettings(
                sync=SYNC[settings.sync or self._broker.options.sync],
                partitions=settings.partitions,
                retention_ms=settings.retention_ms or 0,
                retention_bytes=settings.retention_bytes or 0,
                abandoned_after_ms=settings.abandoned_after_ms or 0,
                ordered=settings.ordered,
                replicas=settings.replicas or 0,
                min_isr=settings.min_isr or 0,
            ),
            partitions=[self._partition(topic, partition) for partition in topic.led],
            channels=topic.channel_names(),
            message_count=sum(partition.batches.publishes.message_count for partition in topic.led),
        )

    def _partition(self, topic: Topic, partition: Any) -> Any:
        log = partition.log
        last = log.last
        cluster = self._broker.cluster
        leadership = cluster and cluster.replicas.leading.get((topic.record.uid, partition.number))
        state = self._membership(topic.record, partition.number, leadership.meta if leadership else None)
        state.leader = self._broker.parts.journal.identity.node_uid
        state.log_start_offset = log.start.offset
        state.log_end_offset = log.end.offset
        state.high_watermark = partition.high_watermark
        state.pump_offset = partition.cursors.state.pump
        state.leader_epoch = partition.leader.epoch
        state.bytes = log.end.position - log.start.position
        state.first_timestamp_ns = timestamp_of(partition, log.start.offset)
        state.last_timestamp_ns = last.timestamp_ns if last else 0
        state.message_count = partition.batches.publishes.message_count
        state.holds.extend(holds_of(partition))
        return state

    def _membership(self, record: TopicRecord, number: int, meta: PartitionMeta | None = None) -> Any:
        """Leader and replicas of a partition, by the record as the leader, or else this node, knows it."""
        meta = meta or record.partitions[number]
        cluster = self._broker.cluster
        names = cluster.view().names if cluster is not None else {}
        wanted = record.settings.replicas if self._others else None
        return membership(number, meta, self._nodes(), names, wanted=wanted)

    def _nodes(self) -> Mapping[int, NodeInfo]:
        broker = self._broker
        if broker.cluster is not None:
            return broker.cluster.nodes()
        options, uid = broker.options, broker.parts.journal.identity.node_uid
        name = options.node_name or f"{options.broadcast_address}:{options.broadcast_tcp_port or broker.ports.tcp}"
        return {uid: NodeInfo(uid, name=name)}

    def _record(self, topic: Topic) -> TopicRecord:
        """The newest record known here: a topic's own copy is renewed only when its settings or channels change."""
        record, cluster = topic.record, self._broker.cluster
        found = None if cluster is None else cluster.view().topics.get(topic.name)
        if found is None or found.record.uid != record.uid or len(found.record.partitions) < len(record.partitions):
            return record  # the view is late
        return found.record

    # ---- channels

    async def channels(self, request: Any) -> Any:
        if request.topic and not request.HasField("here"):
            self._broker.topics.topic(request.topic)
        own = await self._channels_here(request.topic)
        if request.HasField("here"):
            return admin_pb2.ListChannelsResponse(channels=own)
        asked = admin_pb2.ListChannelsRequest(topic=request.topic, here=admin_pb2.Here())
        elsewhere = await self._ask("ListChannels", asked)
        parts: dict[tuple[str, str], list[Any]] = {}
        for channel in [*own, *(channel for reply in elsewhere.replies for channel in reply.channels)]:
            parts.setdefault((channel.topic, channel.name), []).append(channel)
        shown = []
        for (name, channel), found in sorted(parts.items()):
            topic = self._broker.topics.get(name)
            if topic is not None and not topic.deleting:
                shown.append(self._whole_channel(topic, channel, found, elsewhere))
        return admin_pb2.ListChannelsResponse(channels=shown, unreachable=elsewhere.lost)

    async def channel(self, request: Any) -> Any:
        """NotFound if no node knows it."""
        topic = self._broker.topics.topic(request.topic)
        parts = await self._channels_here(request.topic, request.channel)
        elsewhere = NodeAnswers()
        if not request.HasField("here"):
            asked = admin_pb2.DescribeChannelRequest(
                topic=request.topic, channel=request.channel, here=admin_pb2.Here(topic_uid=topic.record.uid)
            )
            elsewhere = await self._ask("DescribeChannel", asked)
            parts += [reply.channel for reply in elsewhere.replies]
        if not parts:
            raise NotFound(f"there is no channel {request.channel} of topic {request.topic}")
        if request.HasField("here"):
            return admin_pb2.DescribeChannelResponse(channel=parts[0])
        whole = self._whole_channel(topic, request.channel, parts, elsewhere)
        return admin_pb2.DescribeChannelResponse(channel=whole, unreachable=elsewhere.lost)

    async def unfinished(self, topic: str, channel: str = "", partition: int | None = None) -> int:
        """Messages that consumers of the channel still have to do with, or that no channel of the topic got yet; of
        partitions whose leader does not answer none. NotFound."""
        if not channel:
            of_topic = (await self.topic(admin_pb2.DescribeTopicRequest(topic=topic))).topic
            counts = {p.partition: max(p.log_end_offset - p.pump_offset, 0) for p in of_topic.partitions}
        else:
            wanted = admin_pb2.DescribeChannelRequest(topic=topic, channel=channel)
            one = (await self.channel(wanted)).channel
            counts = {p.partition: 0 if one.reader else p.depth + p.in_flight + p.deferred for p in one.partitions}
        return sum(counts.values()) if partition is None else counts.get(partition, 0)

    def _whole_channel(self, topic: Topic, name: str, parts: Sequence[Any], elsewhere: NodeAnswers) -> Any:
        record = self._record(topic)

        def missing(number: int) -> Any:
            meta = record.partitions[number]
            lost = elsewhere.unreachable.keys()
            if ids.is_ephemeral(name) and meta.leader and meta.leader not in lost:
                return None  # no consumer has read it there
            return admin_pb2.ChannelPartition(
                partition=number, leader_epoch=meta.epoch, error=elsewhere.why(meta.leader)
            )

        listed = topic.record.channels
        info = listed.channels.get(name)
        whole = merged_channel(parts, sorted(record.partitions), missing, paused=None if info is None else info.paused)
        if info is None or not info.reader:
            whole.policy.CopyFrom(message_of(listed.own_policy(name)))
            whole.default_policy.CopyFrom(message_of(listed.defaults))
        return whole

    async def _channels_here(self, topic: str, channel: str = "") -> list[Any]:
        found = await self._broker.snapshot_in_turns(topic)
        return [
            channel_message(one.topic_name, stats)
            for one in sorted(found.topics, key=lambda t: t.topic_name)
            for stats in sorted(one.channels, key=lambda c: c.channel_name)
            if channel in ("", stats.channel_name)
        ]

    # ---- other nodes

    async def _ask(self, rpc: str, request: Any) -> NodeAnswers:
        """Ask every other node that is alive; a node that does not know the name gives no answer."""
        cluster = self._broker.cluster
        if cluster is None or self._others is None:
            return NodeAnswers()
        others = self._others
        nodes = [info for uid, info in sorted(cluster.nodes().items()) if uid != cluster.node and info.grpc_address]
        calls = [others.call(info.grpc_address, rpc, request, seconds=ASK_SECONDS) for info in nodes]
        replies, unreachable = [], {}
        for info, outcome in zip(nodes, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(outcome, NotFound):
                continue
            if isinstance(outcome, (NsqhaError, ValueError)):
                why = str(outcome) or type(outcome).__name__
                unreachable[info.node_uid] = admin_pb2.Unreachable(node=info.node_uid, name=info.name, why=why)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                replies.append(outcome)
        return NodeAnswers(replies, unreachable)


# ---- pure


def membership(
    number: int,
    meta: PartitionMeta,
    nodes: Mapping[int, NodeInfo],
    names: Mapping[int, str],
    *,
    wanted: int | None,
) -> Any:
    """The part of a partition's state that its record has. `names`: names of nodes, also of those that are away."""
    leader = meta.leader if meta.leader in nodes else 0
    listed = [*meta.replicas, *(node for node in meta.isr if node not in meta.replicas)]
    return admin_pb2.PartitionState(
        partition=number,
        leader=leader,
        leader_name=nodes[leader].name if leader else "",
        leader_epoch=meta.epoch,
        replicas=[
            admin_pb2.Replica(node=node, name=called(node, nodes, names), alive=node in nodes, in_sync=node in meta.isr)
            for node in listed
        ],
        min_isr=meta.min_isr,
        under_replicated=under_replicated(meta, nodes, wanted),
    )


def latest(parts: Iterable[Any]) -> dict[int, Any]:
    """Partitions by number; of one that two nodes report, the state of the later epoch."""
    found: dict[int, Any] = {}
    for partition in parts:
        known = found.get(partition.partition)
        if known is None or partition.leader_epoch > known.leader_epoch:
            found[partition.partition] = partition
    return found


def merged_topic(own: Any, parts: Sequence[Any], numbers: Sequence[int], missing: Any) -> Any:
    """One topic merged from the nodes' answers; `missing(number)` is used for a partition that no node reports."""
    found = latest(partition for part in (own, *parts) for partition in part.partitions)
    states = [found.get(number) or missing(number) for number in numbers]
    topic = admin_pb2.Topic()
    topic.CopyFrom(own)
    del topic.partitions[:]
    topic.partitions.extend(states)
    channels = sorted({channel for part in (own, *parts) for channel in part.channels})
    del topic.channels[:]
    topic.channels.extend(channels)
    topic.message_count = sum(state.message_count for state in states)
    return topic


def holds_of(partition: Any) -> list[Any]:
    """The holds of batch readers on a partition that is led here."""
    now_ns = log_time(partition)
    return [
        admin_pb2.LogHold(id=f"{id_:016x}", offset=hold.offset, left_ms=(hold.until_ns - now_ns) // 1_000_000)
        for id_, hold in sorted(live_holds(partition).items())
    ]


def merged_channel(parts: Sequence[Any], numbers: Sequence[int], missing: Any, *, paused: bool | None = None) -> Any:
    """One channel merged from the nodes' answers; the first part is this node's if it has one.

    `missing(number)` is used for a partition that no node reports, it may return None; `paused`: as the record says,
    None: as the parts say."""
    found = latest(partition for part in parts for partition in part.partitions)
    states = [state for n in numbers if (state := found.get(n) or missing(n)) is not None]
    channel = admin_pb2.Channel(
        topic=parts[0].topic,
        name=parts[0].name,
        paused=any(part.paused for part in parts) if paused is None else paused,
        ephemeral=parts[0].ephemeral,
        reader=any(part.reader for part in parts),
        consumers=sum(part.consumers for part in parts),
        oldest_unfinished_seconds=max((state.oldest_unfinished_seconds for state in states), default=0.0),
        partitions=states,
    )
    for name in _SUMS:
        setattr(channel, name, sum(getattr(state, name) for state in states))
    return channel


def channel_message(topic: str, stats: ChannelStats) -> Any:
    """A channel with the partitions that this node leads."""
    part = admin_pb2.Channel(
        topic=topic,
        name=stats.channel_name,
        paused=stats.paused,
        ephemeral=ids.is_ephemeral(stats.channel_name),
        reader=stats.reader,
        consumers=stats.client_count,
        partitions=[
            admin_pb2.ChannelPartition(
                partition=c.partition,
                floor=c.floor,
                next_read=c.next_read,
                finished_above_floor=c.finished_ranges,
                uncommitted_progress=c.uncommitted_progress,
                stuck=c.stuck,
                depth=c.depth,
                in_flight=c.in_flight_count,
                deferred=c.deferred_count,
                oldest_unfinished_seconds=c.oldest_unfinished_seconds or 0.0,
                message_count=c.message_count,
                finished=c.finish_count,
                requeued=c.requeue_count,
                timed_out=c.timeout_count,
                skipped=c.skipped_count,
                dropped=c.dropped_count,
                expired=c.expired_count,
                dead=c.dead_count,
                died=c.died_count,
                leader_epoch=c.leader_epoch,
            )
            for c in stats.cursors
        ],
    )
    return merged_channel([part], [c.partition for c in stats.cursors], lambda _: None, paused=stats.paused)
