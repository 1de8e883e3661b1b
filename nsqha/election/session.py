"""A process's membership in its cluster, and its local copy of the metadata.

`ClusterSession`: one life of this process as the metadata store sees it. Records that must vanish with the process are
bound to it: its node record, its candidacy for controller, ephemeral topics that it created. It has a lease, which the
store renews while the process reports that its loop runs (`ticked`). After two thirds of the TTL without a renewal it
is no longer `fresh`: the node must stop leading, whatever else may be true. `lost` is called once when the store has
reported that the lease is gone; then open another session and register again.

`View`: a copy of all records, after the last update of the watch. It costs no call and may be late. It is for finding
a leader or showing a page, never for a decision that must be right: that needs a read and a compare-and-set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from nsqha.election.model import Controller, NodeInfo, PartitionMeta, Tombstone, TopicRecord, Versioned

Lost = Callable[[], None]


class StoreIdentity(NamedTuple):
    """The identity of a store, for the journal."""

    etcd_cluster_id: int  # 0: not etcd
    revision: int  # highest seen


@dataclass(frozen=True)
class View:
    """All records at one revision."""

    revision: int = 0
    topics: Mapping[str, Versioned[TopicRecord]] = field(default_factory=dict)
    tombstones: Mapping[int, Tombstone] = field(default_factory=dict)
    nodes: Mapping[int, NodeInfo] = field(default_factory=dict)
    controller: Controller | None = None
    names: Mapping[int, str] = field(default_factory=dict)  # last names of nodes that have replicas
    unreadable: Mapping[str, str] = field(default_factory=dict)  # records, by key without prefix -> why

    def partition(self, topic: str, number: int) -> PartitionMeta | None:
        found = self.topics.get(topic)
        return None if found is None else found.record.partitions.get(number)

    def name(self, uid: int) -> str:
        """The name of a node, also of one that is away; empty: not known."""
        return called(uid, self.nodes, self.names)

    def leader(self, topic: str, number: int) -> NodeInfo | None:
        """The leader of a partition; None if there is none, or it is not alive."""
        meta = self.partition(topic, number)
        return None if meta is None else self.nodes.get(meta.leader)


def called(uid: int, nodes: Mapping[int, NodeInfo], names: Mapping[int, str]) -> str:
    """The name of a node; `names`: last names, also of nodes that are away. Empty: unknown, or now another node's."""
    if (node := nodes.get(uid)) is not None:
        return node.name
    last = names.get(uid, "")
    return "" if any(last == other.name for other in nodes.values()) else last


class ClusterSession(Protocol):
    """One life of this process in the cluster."""

    @property
    def ttl_s(self) -> float:
        """How long others wait before this process counts as dead; the TTL that was granted, not the requested one."""

    def ticked(self) -> None:
        """Report that the loop runs. Call it several times per `ttl_s`, on the loop."""

    def fresh(self, now: float) -> bool:
        """Whether the lease was renewed less than 2/3 of `ttl_s` ago, counted from before the renewal was sent.

        `now` is the monotonic clock's."""

    def seconds_left(self, now: float) -> float:
        """How long the lease lasts if it is not renewed any more, counted likewise; 0: it is over."""

    def register(self, node: NodeInfo) -> NodeInfo:
        """Announce this node as alive, with a registration that no other process life had. Once per session.

        Waits while the record of an earlier life exists, up to twice its TTL. ConfigError: it is still renewed then, so
        another process has the same node uid: a copied data directory. Conflict: registered already."""

    def update(self, node: NodeInfo) -> NodeInfo:
        """Change the record of the node that is registered here, `registration` kept. NotFound: the session is lost."""

    def campaign(self, candidate: Controller) -> Controller | None:
        """Become controller if there is none. The record with its epoch while this session is controller, else None.

        Does not wait: ask again after a hint "controller"."""

    def resign(self) -> None:
        """Stop being controller; no error if it never was."""

    def depose(self, controller: Controller) -> None:
        """End the term of a controller whose process is gone, unless it has ended; then all may campaign."""

    def close(self) -> None:
        """Release everything at once, so that others do not wait for the lease to end; `lost` is not called."""
