"""What a process is in its cluster, and what it knows without asking.

`ClusterSession`: one life of this process as the metadata store sees it. Everything that must vanish with the process
hangs on it: its node record, its candidacy for controller, ephemeral topics that it created. Behind it is a lease,
renewed by the store as long as the process says that its loop runs (`ticked`). Two thirds of the lease's time without a
renewal and it is no longer `fresh`: stop leading, whatever else may be true. `lost` is called once when the store has
said that the lease is gone; open another session and register again.

`View`: a copy of all records, as the watch last brought them. It costs no call and may be late. It is for finding a
leader or drawing a page, never for a decision that has to be right: that takes a read and a compare-and-set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from nsqha.election.model import Controller, NodeInfo, PartitionMeta, Tombstone, TopicRecord, Versioned

Lost = Callable[[], None]


class StoreIdentity(NamedTuple):
    """Which store this is, for the journal."""

    etcd_cluster_id: int  # 0: not etcd
    revision: int  # highest seen


@dataclass(frozen=True)
class View:
    """Everything at one revision."""

    revision: int = 0
    topics: Mapping[str, Versioned[TopicRecord]] = field(default_factory=dict)
    tombstones: Mapping[int, Tombstone] = field(default_factory=dict)
    nodes: Mapping[int, NodeInfo] = field(default_factory=dict)
    controller: Controller | None = None
    names: Mapping[int, str] = field(default_factory=dict)  # what nodes that hold something were last called
    unreadable: Mapping[str, str] = field(default_factory=dict)  # records, by key without prefix -> why

    def partition(self, topic: str, number: int) -> PartitionMeta | None:
        found = self.topics.get(topic)
        return None if found is None else found.record.partitions.get(number)

    def name(self, uid: int) -> str:
        """What people call a node, or called it before it went; empty: that is not known."""
        return called(uid, self.nodes, self.names)

    def leader(self, topic: str, number: int) -> NodeInfo | None:
        """Who leads a partition; None if nobody does, or nobody who is alive."""
        meta = self.partition(topic, number)
        return None if meta is None else self.nodes.get(meta.leader)


def called(uid: int, nodes: Mapping[int, NodeInfo], names: Mapping[int, str]) -> str:
    """The name of a node; `names`: the last ones, also of those that are away. Empty: unknown, or another's by now."""
    if (node := nodes.get(uid)) is not None:
        return node.name
    last = names.get(uid, "")
    return "" if any(last == other.name for other in nodes.values()) else last


class ClusterSession(Protocol):
    """One life of this process in the cluster."""

    @property
    def ttl_s(self) -> float:
        """How long the others wait before they take it for dead; what the store granted, not what was asked for."""

    def ticked(self) -> None:
        """The loop runs. Call it several times per `ttl_s`, on the loop."""

    def fresh(self, now: float) -> bool:
        """Whether the lease was renewed less than 2/3 of `ttl_s` ago, counted from before the renewal was sent.

        `now` is the monotonic clock's."""

    def register(self, node: NodeInfo) -> NodeInfo:
        """Announce a node that is alive, with a registration that no other process life had. Once per session.

        Waits while the record of an earlier life is there, up to twice its lease. ConfigError: it is still renewed
        then, so another process has the same node uid: a copied data directory. Conflict: registered already."""

    def update(self, node: NodeInfo) -> NodeInfo:
        """Change the record of the node that is registered here, `registration` kept. NotFound: the session is lost."""

    def campaign(self, candidate: Controller) -> Controller | None:
        """Become controller if there is none. The record with its epoch while this session has it, else None.

        Does not wait: ask again when a hint says "controller"."""

    def resign(self) -> None:
        """Be controller no longer; fine if it never was."""

    def depose(self, controller: Controller) -> None:
        """End the term of a controller whose process is gone, unless it has ended; then anybody may campaign."""

    def close(self) -> None:
        """Let go of everything at once, so that nobody has to wait for the lease; `lost` is not called."""
