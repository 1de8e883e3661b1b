"""Figures of the cluster as one of its nodes knows them, for /stats and /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nsqha.election.health import below_min_isr, under_replicated
from nsqha.quantile import EMPTY_SECONDS
from nsqha.server.http.stats import ISR_CHANGES, ClockOffset, ClusterStats, PushLag

if TYPE_CHECKING:
    from nsqha.election.model import NodeInfo
    from nsqha.replication.clocks import BoundedClock
    from nsqha.server.node.cluster.membership import Membership
    from nsqha.server.partition.topic import Topic
    from nsqha.server.replica.following.follower import Follower
    from nsqha.server.replica.leading.leadership import Leadership
    from nsqha.server.replica.leading.sender import FollowerStream


def cluster_stats(cluster: Membership, clock: BoundedClock) -> ClusterStats:
    replicas, nodes = cluster.replicas, cluster.nodes()
    lags: dict[int, list[tuple[int, int]]] = {}
    under = below = 0
    for leadership in replicas.leading.values():
        under += under_replicated(leadership.meta, nodes, _wanted(cluster, leadership))
        below += below_min_isr(leadership.meta, nodes)
        for node, entries, size in leadership.lags():
            lags.setdefault(node, []).append((entries, size))
    return ClusterStats(
        node=cluster.node,
        registered=cluster.registration.has_lease,
        nodes=len(nodes),
        leaders=len(replicas.leading),
        followers=len(replicas.followers),
        followers_behind=sum(f.behind or f.port is None for f in replicas.followers.values()),
        catch_up_bytes=sum(_lacked(f) for f in replicas.followers.values() if not f.leader_log.rebuilding),
        rebuild_bytes=sum(_lacked(f) for f in replicas.followers.values() if f.leader_log.rebuilding),
        under_replicated=under,
        below_min_isr=below,
        push_lag=tuple(
            _push_lag(node, nodes, found, replicas.links.link(node)) for node, found in sorted(lags.items())
        ),
        clock_offsets=tuple(
            ClockOffset(node=node, name=nodes[node].name if node in nodes else "", seconds=offset / 1e9)
            for node, offset in sorted(clock.offsets().items())
        ),
        lease_seconds=cluster.registration.lease_seconds,
        metadata_seconds=cluster.registration.request_seconds.data(),
        metadata_failures=cluster.registration.requests_failed,
        forwarded=cluster.routing.forward_service.forwarded,
        relayed=cluster.routing.relay_service.relayed,
    )


def _lacked(follower: Follower) -> int:
    return follower.leader_log.lacked_from(follower.log.end.position)


def _push_lag(
    node: int, nodes: Mapping[int, NodeInfo], lags: Sequence[tuple[int, int]], link: FollowerStream | None
) -> PushLag:
    return PushLag(
        node=node,
        name=nodes[node].name if node in nodes else "",
        partitions=len(lags),
        entries=sum(entries for entries, _ in lags),
        bytes=sum(size for _, size in lags),
        seconds=link.lag_seconds() if link is not None else 0.0,
        acknowledged_seconds=link.times.seconds.data() if link is not None else EMPTY_SECONDS,
    )


def changes(cluster: Membership, topic: Topic) -> dict[str, Any]:
    """Fields of `TopicStats` about what changed in a cluster."""
    measures = cluster.replicas.measures
    return {
        "leader_changes": measures.leader_changes[topic.name],
        "isr_changes": tuple(measures.isr_changes[topic.name, kind] for kind in ISR_CHANGES),
    }


def _wanted(cluster: Membership, leadership: Leadership) -> int | None:
    topic = cluster.view().topics.get(leadership.topic)
    return None if topic is None else topic.record.settings.replicas


def replication(cluster: Membership, topic: Topic, number: int) -> dict[str, Any]:
    """Fields of `PartitionStats` about the replicas of a partition; none if this node does not lead it."""
    leadership = cluster.replicas.leading.get((topic.record.uid, number))
    if leadership is None:
        return {}
    meta, nodes = leadership.meta, cluster.nodes()
    return {
        "isr_size": len(meta.isr),
        "replicas": len(meta.replicas),
        "min_isr": meta.min_isr,
        "under_replicated": under_replicated(meta, nodes, topic.record.settings.replicas),
        "below_min_isr": below_min_isr(meta, nodes),
    }
