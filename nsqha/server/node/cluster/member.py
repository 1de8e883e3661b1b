"""A node that is one of a cluster: its membership, the replicas that it leads and follows, and its routes.

What /readyz asks of it is here too. Only what this node can do something about counts: a partition that no node leads
does not, or its replicas would all be taken out of service for it, and with them the other topics.

Imported only by nodes that have an etcd endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

from nsqha.errors import NsqhaError
from nsqha.nsqlog import Logger
from nsqha.replication.followers import IsrLimits
from nsqha.server.http.broker_api import Check
from nsqha.server.http.cluster_page import ClusterPages
from nsqha.server.node.cluster.clock_watch import ClockWatch
from nsqha.server.node.cluster.disk_watch import DiskWatch
from nsqha.server.node.cluster.figures import changes, cluster_stats, replication
from nsqha.server.node.cluster.logs import ClusterLogs
from nsqha.server.node.cluster.placement import ClusterPlacement
from nsqha.server.node.cluster.routing import Routing
from nsqha.server.node.parts import ClientRoutes, RoutedNode
from nsqha.server.replica.replica_runtime import ReplicaRuntime
from nsqha.server.replica.roles import ReplicaLimits, Replicas
from nsqha.server.runtime.measures import expired_certificates

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.election.etcd.store import EtcdStore
    from nsqha.election.model import NodeInfo, PartitionMeta
    from nsqha.options import Options
    from nsqha.server.http.stats import ClusterStats
    from nsqha.server.node.cluster.membership import Membership
    from nsqha.server.node.log_sources import SingleNodeLogs
    from nsqha.server.node.parts import NodeParts
    from nsqha.server.partition.scrub import ScrubbedReplica
    from nsqha.server.partition.topic import Topic
    from nsqha.server.runtime.disk import DiskSigns
    from nsqha.server.segments.log_source import LogSource
    from nsqha.server.topics.placement import TopicContext
    from nsqha.server.topics.topics import Topics

SHOWN_MAX = 5  # replicas that /readyz names
DISK_HANGS, CLOCK_WRONG = "its disk hangs", "its clock is wrong: set it (NTP)"

logger = Logger("broker")


class ClusterMember:
    """The `ClusterSide` of a member."""

    def __init__(
        self,
        cluster: Membership,
        parts: NodeParts,
        topics: Topics,
        topic_context: TopicContext,
        here: SingleNodeLogs,
        *,
        refuses: Callable[[], str | None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Topics, replicas and membership know each other from here on. `here`: the logs of what is led here.
        `refuses`: why nothing can be stored on this node."""
        self.log_source: LogSource = ClusterLogs(here, cluster)
        self._cluster = cluster
        self._clock = parts.clock
        self._spawn = spawn
        self._disk_watch = DiskWatch(
            lambda: (parts.disk.running, parts.disk.signs.journalling),
            DiskRefusals(parts.disk.signs, refuses).since_last_look,
            self._disk_in_trouble,
            cluster.spawn,
            slow_seconds=topic_context.options.isr_timeout_ns / 1e9,
        )
        self._clock_watch = ClockWatch(
            parts.clock,
            cluster.peers,
            node=cluster.node,
            cluster_id=cluster.cluster_id,
            nodes=cluster.nodes,
            announce=lambda wrong: cluster.decline("clock", CLOCK_WRONG if wrong else ""),
            spawn=cluster.spawn,
        )
        self._trouble = AnnouncedTrouble(
            lambda: expired_certificates(parts.clock.raw_wall_ns() / 1e9),
            lambda why: cluster.registration.update(trouble=why),
            cluster.spawn,
        )
        cluster.topics = topics
        cluster.replicas = _replicas(cluster, parts, topics, topic_context, fail)
        topics.placement = ClusterPlacement(topics, topic_context, cluster, parts.clock)
        cluster.leaders.when_changed(topics.announce)
        self._pages = ClusterPages(
            topic_context.options.cluster_name,
            cluster.store,
            cluster.routing_peers,
            asyncio.to_thread,
            cluster_id=self._cluster_id,
            why_not=lambda: cast("EtcdStore", cluster.store).why_not(),  # as `open_cluster` opened it
        )

    def route(self, node: RoutedNode) -> ClientRoutes:
        routing = self._cluster.routing = Routing(node, self._cluster.leaders, self._cluster.routing_peers)
        return routing.for_clients

    async def recover(self) -> None:
        await self._cluster.recover()

    async def begin(self) -> None:
        """The records say what this node leads, once it has joined."""

    async def drain(self) -> None:
        await self._cluster.routing.drain()
        await self._cluster.replicas.close()

    async def close_routes(self) -> None:
        await self._cluster.routing.close()

    async def close(self) -> None:
        await self._cluster.close()

    def fail(self, why: str) -> None:
        self._cluster.replicas.abandon(f"the disk failed: {why}")
        self._spawn(self._announce_failure(why))

    async def _disk_in_trouble(self, hangs: bool, declines: str) -> bool:
        """Others are to lead as the disk hangs, or for the reason given, or need not any more. As `unfit`."""
        possible = await self._cluster.unfit(DISK_HANGS, hangs)
        await self._cluster.decline("disk", declines)
        return possible

    async def _announce_failure(self, why: str) -> None:
        try:
            await self._cluster.registration.announce_failure(why)
        except NsqhaError as error:
            logger.info(
                "not_announced", "other nodes could not be informed that the data directory is closed: %s", error
            )

    def look_at_clock(self) -> None:
        self._clock_watch.look()

    def look_around(self) -> None:
        self._disk_watch.look()
        self._trouble.look()
        self._cluster.routing.keep_house()

    @property
    def beginning(self) -> int:
        return self._cluster.replicas.beginning

    def keep_house(self) -> None:
        self._cluster.replicas.keep_house()

    def found_damage(self, replica: ScrubbedReplica, first: int, end: int) -> None:
        """Another replica has them, or their frames say enough."""
        identity = replica.log.identity
        self._cluster.replicas.integrity.corrupt.found((identity.topic_uid, identity.partition), first, end)

    def when_mended(self, mended: Callable[[PartitionLog, int, int], None]) -> None:
        self._cluster.replicas.integrity.corrupt.on_mended = mended

    def followed(self) -> list[ScrubbedReplica]:
        return self._cluster.replicas.followed()

    def stats(self) -> ClusterStats:
        return cluster_stats(self._cluster, self._clock)

    def replication(self, topic: Topic, number: int) -> dict[str, Any]:
        return replication(self._cluster, topic, number)

    def changes(self, topic: Topic) -> dict[str, Any]:
        return changes(self._cluster, topic)

    async def leave(self, seconds: float) -> None:
        await self._cluster.leave(seconds)

    def checks(self) -> list[Check]:
        return cluster_checks(self._cluster)

    async def _cluster_id(self) -> int:
        return self._cluster.cluster_id

    async def page(self) -> bytes:
        return await self._pages.text()


class AnnouncedTrouble:
    """What an operator has to mend on this node, as the other nodes and `nsqha check cluster` are told."""

    def __init__(
        self,
        trouble: Callable[[], str],
        announce: Callable[[str], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._trouble = trouble
        self._announce = announce
        self._spawn = spawn
        self._announced = ""
        self._telling = False

    def look(self) -> None:
        """About once a second."""
        why = self._trouble()
        if why != self._announced and not self._telling:
            self._telling = True
            self._spawn(self._tell(why))

    async def _tell(self, why: str) -> None:
        try:
            await self._announce(why)
            self._announced = why
        except NsqhaError as error:
            logger.info("not_announced", "%s; trying again", error)
        finally:
            self._telling = False


class DiskRefusals:
    """Why the disk of a node takes no writes: too little space is left, or one has just failed."""

    def __init__(self, signs: DiskSigns, refuses: Callable[[], str | None]) -> None:
        self._signs = signs
        self._refuses = refuses
        self._seen = signs.refusals

    def since_last_look(self) -> str:
        """Empty: it takes them."""
        seen, self._seen = self._seen, self._signs.refusals
        return self._refuses() or (self._signs.refused_why if self._seen != seen else "")


class ReplicaNeighbours:
    """The cluster as the replicas of this node see it: a `ReplicaCluster`."""

    def __init__(self, cluster: Membership) -> None:
        self.name_of = cluster.leaders.name_of
        self.changed = cluster.leaders.changed
        self.stream_lost = cluster.suspects.lost
        self.stream_found = cluster.suspects.found


def _replicas(
    cluster: Membership,
    parts: NodeParts,
    topics: Topics,
    topic_context: TopicContext,
    fail: Callable[[BaseException], None],
) -> Replicas:
    options: Options = topic_context.options
    runtime = ReplicaRuntime(
        loop=parts.loop,
        clock=parts.clock,
        node=cluster.node,
        cluster_id=cluster.cluster_id,
        journal=parts.journal,
        journal_writer=topic_context.journal_writer,
        metadata=topic_context.metadata,
        opener=parts.opener,
        disk=parts.disk,
        peers=cluster.peers,
        nodes=cluster.nodes,
        spawn=cluster.spawn,
        on_failure=fail,
    )
    return Replicas(
        runtime,
        links=cluster.links,
        cluster=ReplicaNeighbours(cluster),
        topic_of=topics.of_uid,
        limits=ReplicaLimits(
            sync_every=options.sync_every,
            sync_seconds=options.sync_timeout_ns / 1e9,
            catch_up_bytes_per_second=options.catch_up_bytes_per_second,
            isr=IsrLimits(replica_timeout=options.isr_timeout_ns / 1e9),
        ),
    )


# ---- readiness


def cluster_checks(cluster: Membership) -> list[Check]:
    """`registered`: the others count on this node, or it serves without the metadata store, which may be away for all:
    to send clients elsewhere would turn that into an outage. `joined`: a majority of the brokers, and the controller,
    have been connected with it. `replicas`: each one here is led, or followed and not behind. `leads`: why others are
    to lead, if they are; clients are served here all the same."""
    registered, detail = True, ""
    if not cluster.registration.has_lease:
        detail = "this node has no lease in the cluster's metadata"
        registered = in_contact(cluster)
        detail += (
            "; every in-sync replica of what it leads answers, and so do the leaders of what it follows" * registered
        )
    late = [
        f"{name}/{number} {why}"
        for name, topic in sorted(cluster.view().topics.items())
        for number, meta in sorted(topic.record.partitions.items())
        if (why := lateness(cluster, (topic.record.uid, number), meta))
    ]
    shown = "; ".join(late[:SHOWN_MAX]) + (f"; and {len(late) - SHOWN_MAX} more" if len(late) > SHOWN_MAX else "")
    return [
        Check("registered", registered, detail),
        Check("joined", not cluster.reach.missing, cluster.reach.missing),
        Check("replicas", not late, shown),
        Check("leads", True, refusal_to_lead(cluster.registration.info)),
    ]


def refusal_to_lead(info: NodeInfo | None) -> str:
    """Why this node is not to lead, as it has announced; empty: it may."""
    if info is None:
        return ""
    reasons = [info.leaving_why, info.declines and f"this node declines to lead: {info.declines}"]
    return "; ".join(filter(None, reasons))


def in_contact(cluster: Membership) -> bool:
    """Whether all that this node leads and follows, which is something, goes on without the metadata store."""
    leading, followers = cluster.replicas.leading.values(), cluster.replicas.followers.values()
    if not leading and not followers:
        return False
    return all(led.isr_answers for led in leading) and all(follower.port is not None for follower in followers)


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
