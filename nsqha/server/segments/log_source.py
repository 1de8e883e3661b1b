"""What the segment service needs from its node; a single node and a node of a cluster implement it differently."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nsqha.server.runtime.listen import split_host_port

if TYPE_CHECKING:
    import asyncio

    from nsqha.commitlog.log import PartitionLog
    from nsqha.cursor.committed.state import PartitionState
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic
    from nsqha.server.peers.api import PeerIdentity

WILDCARDS = ("", "0.0.0.0", "::")


class ServingReplica(NamedTuple):
    """A replica of a partition whose bytes can be fetched."""

    node: int
    address: str
    leader: bool
    in_sync: bool
    name: str = ""
    host: str = ""


class LogSource(Protocol):
    """The logs of one node. Its methods are called on `loop`."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def spawn(self, work: Coroutine[Any, Any, object]) -> object:
        """Run `work` in a task that ends with the node."""

    def may_read(self, peer: PeerIdentity) -> bool:
        """Whether this peer may read segments."""

    def log_of(self, topic_uid: int, number: int) -> PartitionLog:
        """The log of a replica on this node's disk. Refusal (404): there is none."""

    def led(self) -> Iterable[Partition]:
        """The partitions that are led here."""

    def followed(self) -> Iterable[PartitionState | None]:
        """The states of the replicas that follow here; None for one whose state has not arrived yet."""

    def replicas_of(self, topic: Topic, number: int) -> list[ServingReplica]:
        """The nodes that serve the bytes of a partition: its live replicas, the in-sync ones first."""


def reachable(address: str, name: str) -> str:
    """The address that other hosts dial: a wildcard is replaced by `name`."""
    if not address:
        return ""
    host, port = split_host_port(address)
    return f"{name}:{port}" if host in WILDCARDS else address
