"""The state of a partition, by its record, the live nodes and what the leader says of itself: the same words in the
command line, pages and metrics.

    ok                     every replica is in sync
    under-replicated       serves with fewer in sync than it has replicas: further losses may stop it
    acknowledges nothing   its leader leads, and has committed nothing of what waits for STALLED_SECONDS
    below min_isr          delivers what it has, acknowledges nothing
    no leader              does not serve: there is none, its node is away, or runs and does not lead this epoch

An ISR that has reached min_isr never gets smaller than that, so that no leader acknowledges with fewer: the last
members stay in it when they die. So the number of members that are alive decides.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from nsqha.election.model import NodeInfo, PartitionMeta, TopicSettings
from nsqha.election.observed.answers import LeaderState
from nsqha.election.placement import Load, PartitionName, fill, host_of, replicas_due

OK = "ok"
UNDER = "under-replicated"
STALLED = "acknowledges nothing"
BELOW = "below min_isr"
LEADERLESS = "no leader"
STALLED_SECONDS = 5.0


def state_of(meta: PartitionMeta, alive: Container[int], said: LeaderState | None = None) -> str:
    """One of the words above; `alive`: the nodes with a lease. `said`: by its leader; None: it is not known."""
    if meta.leader not in alive or (said is not None and not said.leads):
        return LEADERLESS
    if below_min_isr(meta, alive):
        return BELOW
    if said is not None and said.waits_s >= STALLED_SECONDS:
        return STALLED
    return UNDER if in_sync(meta, alive) < len(meta.replicas) else OK


def in_sync(meta: PartitionMeta, alive: Container[int]) -> int:
    """Members of the ISR that are alive."""
    return sum(uid in alive for uid in meta.isr)


def below_min_isr(meta: PartitionMeta, alive: Container[int]) -> bool:
    return in_sync(meta, alive) < meta.min_isr


def owed(meta: PartitionMeta, settings: TopicSettings, nodes: Mapping[int, NodeInfo]) -> int:
    """How many replicas of a partition have no node yet. `nodes`: those that may get replicas."""
    return max(replicas_due(meta, settings, nodes) - len(meta.replicas), 0)


def stays(
    uid: int,
    metas: Mapping[PartitionName, PartitionMeta],
    settings: Mapping[PartitionName, TopicSettings],
    alive: Mapping[int, NodeInfo],
    able: Mapping[int, NodeInfo],
) -> dict[PartitionName, str]:
    """The partitions that cannot be moved away from a node now, and why; by the rules of the planner.

    `able`: the nodes that may get replicas, without this node."""
    found = {}
    hosts = len({host_of(node) for node in able.values()})
    for name, meta in metas.items():
        if uid not in meta.replicas:
            continue
        keep = [replica for replica in meta.replicas if replica != uid]
        wanted = min(len(meta.replicas), replicas_due(meta, settings[name], able))
        if len(fill(keep, wanted, able, Load())) < wanted:
            found[name] = f"it has {wanted} replicas, and {_hosts(hosts)} can have them"
        elif not any(member in alive for member in meta.isr):
            found[name] = "none of its in-sync replicas is alive"
    return found


def _hosts(count: int) -> str:
    return f"{count} other host{'s' if count != 1 else ''}"


def counts(
    metas: Mapping[PartitionName, PartitionMeta], alive: Container[int], unled: Container[PartitionName] = ()
) -> dict[str, int]:
    """How many partitions are in each state; `unled`: those whose leader runs, and says that it does not lead."""
    found = dict.fromkeys((OK, UNDER, BELOW, LEADERLESS), 0)
    for name, meta in metas.items():
        found[state_of(meta, alive, LeaderState(False) if name in unled else None)] += 1
    return found


def progress(node: int, metas: Mapping[PartitionName, PartitionMeta], names: Iterable[PartitionName]) -> dict[str, int]:
    """The progress of emptying a node: partitions with a replica there, led there, and being moved."""
    mine = [name for name, meta in metas.items() if node in meta.replicas]
    return {
        "replicas": len(mine),
        "leaderships": sum(1 for meta in metas.values() if meta.leader == node),
        "moving": len(set(mine) & set(names)),
    }


def under_replicated(meta: PartitionMeta, alive: Container[int], wanted: int | None) -> bool:
    """Whether a partition has fewer in-sync replicas than its record, or the topic's settings, say."""
    return in_sync(meta, alive) < max(len(meta.replicas), wanted or 0)
