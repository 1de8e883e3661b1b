"""The logs that this node leads, for the segment service (`segments.log_source`)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from nsqha.server.peers.identity import may_read
from nsqha.server.segments.log_source import ServingReplica
from nsqha.server.segments.ranges import Refusal

if TYPE_CHECKING:
    import asyncio

    from nsqha.commitlog.log import PartitionLog
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic
    from nsqha.server.peers.api import PeerIdentity
    from nsqha.server.topics.topics import Topics


class SingleNodeLogs:
    """The `LogSource` of a single node: every topic is led here, and no other node has a replica."""

    def __init__(
        self,
        topics: Topics,
        *,
        node: int,
        loop: asyncio.AbstractEventLoop,
        spawn: Callable[[Coroutine[Any, Any, object]], object],
        address: Callable[[], str],
    ) -> None:
        """`address`: where others reach the byte server; empty: it does not serve."""
        self.loop = loop
        self.spawn = spawn
        self._topics = topics
        self._node = node
        self._address = address

    def may_read(self, peer: PeerIdentity) -> bool:
        return may_read(None, peer)

    def log_of(self, topic_uid: int, number: int) -> PartitionLog:
        for topic in self._topics.values():
            if topic.record.uid != topic_uid:
                continue
            if topic.ephemeral:
                raise Refusal(404, f"{topic.name} is #ephemeral: it has no files")
            partition = topic.leads(number)
            if partition is not None:
                return partition.log
        raise Refusal(404, f"this node has no replica of partition {number} of topic {topic_uid:016x}")

    def led(self) -> Iterator[Partition]:
        return (partition for topic in self._topics.values() for partition in topic.led)

    def followed(self) -> tuple[()]:
        return ()

    def replicas_of(self, topic: Topic, number: int) -> list[ServingReplica]:
        address = self._address()
        return [ServingReplica(self._node, address, leader=True, in_sync=True)] if address else []
