"""The logs that a member of a cluster has, led and followed, for the segment service (`segments.log_source`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nsqha import ids
from nsqha.server.peers.identity import may_read
from nsqha.server.segments.log_source import ServingReplica

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.cursor.committed.state import PartitionState
    from nsqha.server.node.cluster.membership import Membership
    from nsqha.server.node.log_sources import SingleNodeLogs
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic
    from nsqha.server.peers.api import PeerIdentity


class ClusterLogs:
    """A `LogSource`: this node leads some partitions, follows others, and other nodes have replicas of both."""

    def __init__(self, here: SingleNodeLogs, cluster: Membership) -> None:
        """`here`: what is led here."""
        self.loop = here.loop
        self.spawn = here.spawn
        self._here = here
        self._cluster = cluster

    def may_read(self, peer: PeerIdentity) -> bool:
        return may_read(self._cluster.leaders.members.view(), peer)

    def log_of(self, topic_uid: int, number: int) -> PartitionLog:
        replicas, key = self._cluster.replicas, (topic_uid, number)
        log, record = replicas.table.log_of(key), replicas.table.record_of(key)
        if log is not None and record is not None and not ids.is_ephemeral(record.record.name):
            return log
        return self._here.log_of(topic_uid, number)

    def led(self) -> Iterator[Partition]:
        return self._here.led()

    def followed(self) -> Iterator[PartitionState | None]:
        return (follower.applier.state for follower in self._cluster.replicas.followers.values())

    def replicas_of(self, topic: Topic, number: int) -> list[ServingReplica]:
        cluster = self._cluster
        leadership = cluster.replicas.leading.get((topic.record.uid, number))
        meta = topic.record.partitions[number] if leadership is None else leadership.meta
        nodes = cluster.nodes()
        found = [
            ServingReplica(
                uid,
                nodes[uid].segments_address,
                leader=uid == cluster.node,
                in_sync=uid in meta.isr,
                name=nodes[uid].name,
                host=nodes[uid].host,
            )
            for uid in dict.fromkeys((*meta.replicas, *meta.isr))
            if uid in nodes and nodes[uid].segments_address
        ]
        return sorted(found, key=lambda replica: not replica.in_sync)
