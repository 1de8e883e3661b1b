"""Whether a member of a cluster may be sent clients: what /readyz asks beyond what a node that is alone is asked.

Only what this node can do something about counts. A partition that nobody leads does not: its replicas would all be
taken out of service for it, and with them the other topics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqha.server.http.broker_api import Check

if TYPE_CHECKING:
    from nsqha.election.model import PartitionMeta
    from nsqha.server.node.membership import Membership

SHOWN_MAX = 5


def cluster_checks(cluster: Membership) -> list[Check]:
    """`registered`: the others count on this node. `replicas`: each one here is led, or followed and not behind."""
    registered = cluster.has_lease
    late = [
        f"{name}/{number} {why}"
        for name, topic in sorted(cluster.view().topics.items())
        for number, meta in sorted(topic.record.partitions.items())
        if (why := lateness(cluster, (topic.record.uid, number), meta))
    ]
    shown = "; ".join(late[:SHOWN_MAX]) + (f"; and {len(late) - SHOWN_MAX} more" if len(late) > SHOWN_MAX else "")
    return [
        Check("registered", registered, "" if registered else "this node has no lease in the cluster's metadata"),
        Check("replicas", not late, shown),
    ]


def lateness(cluster: Membership, key: tuple[int, int], meta: PartitionMeta) -> str:
    """Why a partition that has a replica here is not as it should be; empty: it is, or it is no fault of this node."""
    replicas, me = cluster.replicas, cluster.node
    if me not in meta.replicas and me not in meta.isr:
        return ""
    if key in replicas.leading:
        return ""  # if it should not any more, its successor says so and clients are sent on
    if meta.leader == me:
        return "is not led yet"
    if meta.leader not in cluster.nodes():
        return ""
    follower = replicas.followers.get(key)
    if follower is None:
        return "is not open yet"
    if follower.stopped:
        return f"is stopped: {follower.stopped}"
    if follower.port is None:
        return "is not followed yet"
    return "catches up" if follower.behind else ""
