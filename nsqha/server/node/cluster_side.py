"""What being one of a cluster adds to a node: `ClusterMember` (cluster), or nothing: `NoCluster`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nsqha.nsqlog import Logger
from nsqha.replication.clocks import STEP_SECONDS
from nsqha.server.clients.publish import SingleNodePublishRoutes
from nsqha.server.clients.subscribe import SingleNodeConsumerRoutes
from nsqha.server.node.parts import ClientRoutes
from nsqha.server.topics.single_node import SingleNodePlacement

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.server.http.broker_api import Check
    from nsqha.server.http.stats import ClusterStats
    from nsqha.server.node.parts import NodeParts, RoutedNode
    from nsqha.server.partition.scrub import ScrubbedReplica
    from nsqha.server.partition.topic import Topic
    from nsqha.server.segments.log_source import LogSource
    from nsqha.server.topics.placement import TopicContext
    from nsqha.server.topics.topics import Topics


logger = Logger("clock")


class ClusterSide(Protocol):
    """The replicas, roles and routes of one node."""

    log_source: LogSource

    def route(self, node: RoutedNode) -> ClientRoutes:
        """Where publishes and consumers of clients go, wherever their partitions are led."""

    async def recover(self) -> None:
        """Open every log that the metadata name."""

    async def begin(self) -> None:
        """The journal holds what was recovered: lead what nothing else has to decide."""

    async def drain(self) -> None:
        """Partitions are closed: let the last answers between nodes come, and follow nothing any more."""

    async def close_routes(self) -> None:
        """Clients are gone."""

    async def close(self) -> None:
        """Leave the cluster, close the metadata store."""

    def fail(self, why: str) -> None:
        """The data directory failed."""

    def look_at_clock(self) -> None:
        """Once a second, before anything is decided by the wall clock."""

    def look_around(self) -> None:
        """Once a second: a disk that hangs or refuses has others lead, and what waits for other nodes does not do so
        for ever."""

    @property
    def beginning(self) -> int:
        """How many partitions are on their way to lead here, or do so without a committed batch."""

    def keep_house(self) -> None:
        """Once a second, or a little later."""

    def found_damage(self, replica: ScrubbedReplica, first: int, end: int) -> None:
        """The scrub found batches that do not verify."""

    def when_mended(self, mended: Callable[[PartitionLog, int, int], None]) -> None:
        """Call this with log and batches that verify again."""

    def followed(self) -> list[ScrubbedReplica]:
        """The logs of partitions that other nodes lead."""

    def stats(self) -> ClusterStats | None:
        """Figures of the cluster; None: there is no cluster."""

    def replication(self, topic: Topic, number: int) -> dict[str, Any]:
        """The fields of `PartitionStats` about the replicas of a partition that is led here, where its defaults, which
        are those of a single node, do not say it."""

    def changes(self, topic: Topic) -> dict[str, Any]:
        """The fields of `TopicStats` about changes of leaders and in-sync replicas, likewise."""

    async def leave(self, seconds: float) -> None:
        """Before a stop: hand over what this node leads, within `seconds`."""

    def checks(self) -> Sequence[Check]:
        """What /readyz asks of a member beyond what it asks of every node."""

    async def page(self) -> bytes | None:
        """The cluster as this node sees it, for whoever only looks; None: there is no cluster."""


class NoCluster:
    """The `ClusterSide` of a single node: it leads every partition, and has the only replica."""

    def __init__(self, parts: NodeParts, topics: Topics, topic_context: TopicContext, log_source: LogSource) -> None:
        self.log_source: LogSource = log_source
        self._topics = topics
        self._opener = parts.opener
        self._clock = parts.clock
        self._store = parts.store
        topics.placement = placement = SingleNodePlacement(topics, topic_context)
        parts.opener.on_wrong_state = placement.rebuild_state

    def route(self, node: RoutedNode) -> ClientRoutes:
        """Every partition is led here, so nothing is taken that this node can not store."""
        publishes, consumers = (
            SingleNodePublishRoutes(node.topics),
            SingleNodeConsumerRoutes(node.channels, node.options),
        )
        return ClientRoutes(publishes, consumers, refusal=node.availability.refuses_publish)

    async def recover(self) -> None:
        await self._topics.recover()

    async def begin(self) -> None:
        await self._topics.start_epochs()

    async def drain(self) -> None:
        """No other node waits for answers."""

    async def close_routes(self) -> None:
        """There are none."""

    async def close(self) -> None:
        self._store.close()

    def fail(self, why: str) -> None:
        """What is led here is all there is."""

    def look_at_clock(self) -> None:
        """Only a step of the own clock can be noticed."""
        before = self._clock.trusted
        self._clock.look()
        if before and not self._clock.trusted:
            text = "the wall clock was set: time-based retention is paused until that has lasted %d s, or a restart"
            logger.warning("clock_set", text, STEP_SECONDS)
        elif self._clock.trusted and not before:
            logger.warning("clock_trusted", "clock trusted; time-based retention resumes")

    def look_around(self) -> None:
        """There are no others."""

    @property
    def beginning(self) -> int:
        return 0

    def keep_house(self) -> None:
        """What is led here is all there is."""

    def found_damage(self, replica: ScrubbedReplica, first: int, end: int) -> None:
        """The partition repairs what its frames say enough about."""
        for topic in self._topics.values():
            for partition in topic.led:
                if partition.log is replica.log:
                    partition.on_damage(first, end)

    def when_mended(self, mended: Callable[[PartitionLog, int, int], None]) -> None:
        self._opener.on_mended = mended

    def followed(self) -> list[ScrubbedReplica]:
        return []

    def stats(self) -> None:
        return None

    def replication(self, topic: Topic, number: int) -> dict[str, Any]:
        return {}

    def changes(self, topic: Topic) -> dict[str, Any]:
        return {}

    async def leave(self, seconds: float) -> None:
        """No other node could lead."""

    def checks(self) -> tuple[()]:
        return ()

    async def page(self) -> None:
        return None
