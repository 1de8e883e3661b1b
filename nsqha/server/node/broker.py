"""The node: its parts put together, their start, failure and stop in order.

Topics, channels, publishes and subscriptions are parts with files of their own; so are what a cluster adds
(`ClusterSide`), whether anything can be stored (`Availability`), the housekeeping and the scrub. Owner of the end: a
stop in order, or the data directory closed for good after the first write to it that failed.

Invariants: nothing is promised before the journal holds it; nothing listens before every log is recovered and in line
with its record; a stop answers the publishes that are under way before it closes their connections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from nsqha import nsqlog
from nsqha.clock import Now, read
from nsqha.errors import StorageError
from nsqha.options import Options
from nsqha.quantile import LatencyWindow
from nsqha.server.clients.connection import Connections
from nsqha.server.clients.context import ClientContext
from nsqha.server.clients.publish import Publishing
from nsqha.server.clients.subscribe import Subscriptions
from nsqha.server.clients.token_auth import TokenAuth
from nsqha.server.clients.unfinished import ReadingBudget
from nsqha.server.http.broker_api import BoundPorts, Check
from nsqha.server.node.availability import Availability
from nsqha.server.node.cluster_side import ClusterSide, NoCluster
from nsqha.server.node.dead_letters import DeadLetterMover
from nsqha.server.node.disk_use import kept_for_replay
from nsqha.server.node.housekeeping import Housekeeping
from nsqha.server.node.log_sources import SingleNodeLogs
from nsqha.server.node.parts import Endpoints, NodeParts, RoutedNode
from nsqha.server.node.scrubbing import NodeScrub
from nsqha.server.partition.delivery import Delivery
from nsqha.server.partition.partition import Partition
from nsqha.server.partition.topic import Topic
from nsqha.server.runtime.budget import SharedTurns
from nsqha.server.runtime.cache import CacheWriter
from nsqha.server.runtime.journal import JournalWriter
from nsqha.server.runtime.measures import expired_certificates
from nsqha.server.runtime.metadata import NodeMetadata
from nsqha.server.runtime.rare_warnings import RefusalLog
from nsqha.server.runtime.tasks import Changes, TaskGroup, log_failure
from nsqha.server.segments.log_source import reachable
from nsqha.server.topics.channels import Channels
from nsqha.server.topics.placement import TopicContext
from nsqha.server.topics.topics import Topics

if TYPE_CHECKING:
    import ssl

    from nsqha.clock import Clock
    from nsqha.cursor.live.channel import Channel
    from nsqha.server.clients.auth import AuthClient
    from nsqha.server.http.stats import BrokerStats
    from nsqha.server.node.cluster.membership import Membership
    from nsqha.wire.limits import ProtocolLimits

CHANGES_SECONDS_MAX = 5.0  # a stop waits so long for changes that are under way

logger = nsqlog.Logger("broker")


class Broker:
    """One node."""

    def __init__(self, options: Options, parts: NodeParts, cluster: Membership | None = None) -> None:
        loop, opener, journal = parts.loop, parts.opener, parts.journal
        self.options = options
        self.parts = parts
        self.cluster = cluster
        self.endpoints = Endpoints()
        self.start_time_ns = parts.clock.wall_ns()
        self.on_failure: Callable[[str], None] = lambda why: None
        self.availability = Availability(
            options,
            lambda: opener.cursor_cache.overfull,
            lambda: kept_for_replay(self.topics.values(), parts.clock.wall_ns()),
        )
        self._clean = True  # unless a partition could not be closed
        self._tasks = TaskGroup(loop, log_failure)
        self.spawn = self._tasks.spawn  # ends with the broker
        self.changes = Changes(loop, options.publish_outcome_wait_ns / 1e9)
        self.connections = Connections(lambda: self.exiting, lambda consumer: self.subscriptions.unsubscribe(consumer))
        self.journal_writer = JournalWriter(journal, parts.disk, self.fail)
        self._cache_writer = CacheWriter(opener.cursor_cache, loop, parts.disk)
        run = parts.disk.run if cluster is None else cluster.registration.run
        metadata = NodeMetadata(parts.store.records, run, journal, self.fail)
        topic_context = self._topic_context(metadata)
        self.topics = Topics(topic_context, ending=lambda: self.availability.ending)
        self.channels = Channels(
            self.topics,
            options,
            node_uid=journal.identity.node_uid,
            rng=parts.rng,
            metadata=metadata,
            changes=self.changes,
        )
        self.side = self._cluster_side(topic_context)
        self.log_source = self.side.log_source
        routes = self.side.route(self._routed())
        self.publishing = Publishing(
            self.topics,
            options,
            loop=loop,
            budget=opener.budget,
            routes=routes.publishes,
            refusal=routes.refusal,
            next_number=self.connections.next_number,
        )
        self.subscriptions = Subscriptions(
            self.topics,
            self.channels,
            options,
            routes=routes.consumers,
            exiting=lambda: self.exiting,
            now=self.now,
            spawn=self.spawn,
        )
        self.scrub = NodeScrub(options, parts, self.topics, self.side, spawn=self.spawn, fail=self.fail)
        self.housekeeping = Housekeeping(
            parts,
            self.topics,
            self.side,
            self.availability,
            journal_writer=self.journal_writer,
            cache_writer=self._cache_writer,
            spawn=self.spawn,
            forget_targets=self.connections.forget_targets,
        )

    def _topic_context(self, metadata: NodeMetadata) -> TopicContext:
        parts = self.parts
        return TopicContext(
            self.options,
            node_uid=parts.journal.identity.node_uid,
            rng=parts.rng,
            metadata=metadata,
            disk=parts.disk,
            journal_writer=self.journal_writer,
            opener=parts.opener,
            changes=self.changes,
            new_delivery=self._new_delivery,
            spawn=self.spawn,
            forget_targets=self.connections.forget_targets,
        )

    def _cluster_side(self, topic_context: TopicContext) -> ClusterSide:
        here = SingleNodeLogs(
            self.topics,
            node=self.parts.journal.identity.node_uid,
            loop=self.parts.loop,
            spawn=self.spawn,
            address=lambda: reachable(self.endpoints.segments_address, self.options.broadcast_address),
        )
        if self.cluster is None:
            return NoCluster(self.parts, self.topics, topic_context, here)
        from nsqha.server.node.cluster.member import ClusterMember

        return ClusterMember(
            self.cluster,
            self.parts,
            self.topics,
            topic_context,
            here,
            refuses=self.availability.lacks_space,
            spawn=self.spawn,
            fail=self.fail,
        )

    def _routed(self) -> RoutedNode:
        return RoutedNode(
            options=self.options,
            loop=self.parts.loop,
            budget=self.parts.opener.budget,
            topics=self.topics,
            channels=self.channels,
            availability=self.availability,
            now=self.now,
            spawn=self.spawn,
        )

    def _new_delivery(self, partition: Partition, channel: Channel) -> Delivery:
        percentiles = self.options.e2e_processing_latency_percentiles
        window = self.options.e2e_processing_latency_window_time_ns / 1e9
        latency = LatencyWindow(window, percentiles, self.clock.monotonic()) if percentiles else None
        return Delivery(partition, channel, self.parts.rng, latency)

    # ---- start and stop

    async def open_topics(self) -> None:
        """Recover everything that the metadata names; nothing listens yet."""
        journal = self.parts.journal
        await self.side.recover()
        journal.node.clear_poison()  # every log was read from the disk and verified
        await self.journal_writer.promise()
        await self.side.begin()
        self.parts.opener.cursor_cache.sweep()
        self.housekeeping.start()
        self.spawn(self.scrub.scrubber.run())
        self.spawn(DeadLetterMover(self.topics, self.publishing.publish, self.parts.opener.runtime.moving).run())

    async def stop(self) -> None:
        """Refuse publishes, close clients, write the last progress, sync."""
        self.availability.exiting = True
        self.housekeeping.stop()
        self.connections.stop_reading()
        self._tasks.cancel()
        self.subscriptions.unsubscribe_all()
        await self.changes.wait(CHANGES_SECONDS_MAX)
        for topic in list(self.topics.values()):
            for partition in topic.led:
                await self._close(topic, partition)
        await self.side.drain()
        self.connections.close()  # only now: publishes that were under way have had their answers
        self.changes.cancel()
        self.scrub.scrubber.close()
        await self.side.close_routes()
        await self._close_files()
        await self.side.close()
        self.parts.disk.close()

    async def _close(self, topic: Topic, partition: Partition) -> None:
        try:
            await partition.close()
        except StorageError as error:
            self.fail(error)
        except Exception as error:
            # The others are still closed well; but this stop was not a clean one.
            logger.error("close_failed", "%s could not be closed", partition.log.directory, error=error)
            partition.abandon("shutting down")
            self._clean = False
        if not topic.ephemeral and not self.availability.failure:
            self.parts.opener.stage_durable((topic.record.uid, partition.number), partition.log)

    async def _close_files(self) -> None:
        journal, failure = self.parts.journal, self.availability.failure
        await self._cache_writer.close(write=not failure)
        if self._clean and not failure:
            await self.journal_writer.end(journal.stop)
        else:
            with suppress(StorageError, OSError):
                await self.journal_writer.end(journal.commit)
            journal.close()

    def fail(self, error: BaseException) -> None:
        """The disk failed: close the data directory for good. The process ends; a restart recovers or refuses."""
        if self.availability.failure is not None:
            return
        why = self.availability.failure = str(error) or type(error).__name__
        logger.error("poisoned", "the data directory failed and is closed: %s", why)
        self.parts.journal.node.poison(why)
        self.spawn(self.journal_writer.write())  # if the disk still takes it, the next start knows
        for topic in self.topics.values():
            for partition in topic.led:
                partition.abandon(f"the disk failed: {why}")
        self.side.fail(why)
        self.on_failure(why)

    # ---- what others ask and set

    @property
    def clock(self) -> Clock:
        return self.parts.clock

    @property
    def ports(self) -> BoundPorts:
        return self.endpoints.ports

    @property
    def exiting(self) -> bool:
        """Whether a stop has begun."""
        return self.availability.exiting

    def now(self) -> Now:
        return read(self.parts.clock)

    def client_context(
        self, limits: ProtocolLimits, auth: AuthClient | None, tls_context: ssl.SSLContext | None
    ) -> ClientContext:
        """What clients' connections work with."""
        return ClientContext(
            options=self.options,
            limits=limits,
            loop=self.parts.loop,
            clock=self.parts.clock,
            now=self.now,
            auth=auth,
            tls_context=tls_context,
            budget=self.parts.opener.budget,
            reading=ReadingBudget(self.parts.loop, self.options.publish_queue_bytes, limits.body_bytes_max),
            turns=SharedTurns(self.parts.loop, between=self.parts.disk.look),
            measures=self.parts.opener.measures,
            topics=self.topics,
            publishing=self.publishing,
            subscriptions=self.subscriptions,
            tls_refused=RefusalLog(logger.warning, "tls_refused"),
            tokens=None if self.endpoints.guard is None else TokenAuth(self.endpoints.guard),
        )

    def set_lookupds(self, addresses: Sequence[str]) -> None:
        self.options = replace(self.options, lookupd_tcp_addresses=tuple(addresses))
        if self.endpoints.registrar is not None:
            self.endpoints.registrar.set_peers(addresses)

    def set_log_level(self, level: str) -> None:
        nsqlog.set_level(level)
        self.options = replace(self.options, log_level=level)

    def snapshot(self, topic: str = "", clients: bool = True) -> BrokerStats:
        from nsqha.server.node.snapshot import broker_stats  # a tenth of a start, and nothing asks before the end of it

        return broker_stats(self, topic, clients)

    async def snapshot_in_turns(self, topic: str = "", clients: bool = False) -> BrokerStats:
        from nsqha.server.node.snapshot import broker_stats_in_turns

        return await broker_stats_in_turns(self, topic, clients)

    def health(self) -> str:
        return self.availability.health()

    def checks(self) -> list[Check]:
        stopped = {f"{name}/{p.number}": p.life.stopped for name, topic in self.topics.items() for p in topic.led}
        shown = "; ".join(f"{partition} {why}" for partition, why in stopped.items() if why is not None)
        expired = expired_certificates(self.parts.clock.raw_wall_ns() / 1e9)
        return [*self.availability.checks(shown), Check("certificates", True, expired), *self.side.checks()]
