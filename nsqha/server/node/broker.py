"""The node: it starts, keeps house, fails and stops; topics, publishes and subscriptions are its parts.

Owner of the connections, of whether publishes are taken (`refuses_publish`), and of the end: a stop in order, or the
data directory closed for good after the first write to it that failed. The parts have their own files: `Topics` (which
there are, and their changes), `Channels`, `Publishing`, `Subscriptions`, `Metadata`, `JournalWriter`, `CacheWriter`.

Invariants: nothing is promised before the journal holds it; nothing listens before every log is recovered and in line
with its record; a stop answers the publishes that are under way before it closes their connections.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from nsqha import nsqlog
from nsqha.clock import Clock, Now, read
from nsqha.commitlog.journal import NodeJournal
from nsqha.election.store import MetadataStore
from nsqha.errors import NsqhaError, Poisoned, StorageError
from nsqha.options import Options
from nsqha.quantile import LatencyWindow
from nsqha.server.clients.connection import Connections
from nsqha.server.clients.context import ClientContext
from nsqha.server.clients.publish import Publishing
from nsqha.server.clients.subscribe import Subscriptions
from nsqha.server.http.broker_api import BoundPorts, Check
from nsqha.server.node.log_sources import ClusterLogs, SingleNodeLogs
from nsqha.server.node.readiness import cluster_checks
from nsqha.server.node.snapshot import broker_stats
from nsqha.server.opening.opener import PartitionOpener
from nsqha.server.partition.delivery import Delivery
from nsqha.server.partition.partition import Partition
from nsqha.server.partition.scrub import ScrubbedReplica, Scrubber
from nsqha.server.partition.topic import Topic
from nsqha.server.runtime.cache import CacheWriter
from nsqha.server.runtime.disk import DiskRounds
from nsqha.server.runtime.journal import JournalWriter
from nsqha.server.runtime.measures import disk_space
from nsqha.server.runtime.metadata import NodeMetadata
from nsqha.server.runtime.tasks import Background, Changes
from nsqha.server.segments.log_source import LogSource, reachable
from nsqha.server.topics.channels import Channels
from nsqha.server.topics.placement import TopicContext
from nsqha.server.topics.single_node import SingleNodePlacement
from nsqha.server.topics.topics import Topics
from nsqha.wire.limits import ProtocolLimits

if TYPE_CHECKING:
    import ssl

    from nsqha.commitlog.log import PartitionLog
    from nsqha.cursor.channel import Channel
    from nsqha.server.clients.auth import AuthClient
    from nsqha.server.http.stats import BrokerStats
    from nsqha.server.node.membership import Membership
    from nsqha.server.node.registrar import Registrar
    from nsqha.server.segments.byte_server import ByteServer

HOUSEKEEPING_SECONDS = 1.0
CHANGES_SECONDS_MAX = 5.0  # a stop waits so long for changes that are under way

logger = nsqlog.Logger("broker")


class Broker:
    """One node."""

    def __init__(
        self,
        options: Options,
        limits: ProtocolLimits,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        rng: random.Random,
        journal: NodeJournal,
        store: MetadataStore,
        disk: DiskRounds,
        opener: PartitionOpener,
        cluster: Membership | None = None,
    ) -> None:
        self.options = options
        self.limits = limits
        self.loop = loop
        self.clock = clock
        self.rng = rng
        self.journal = journal
        self.store = store
        self.disk = disk
        self.opener = opener
        self.cache_writer = CacheWriter(opener.cursor_cache, loop, disk)
        self.connections = Connections(lambda consumer: self.subscriptions.unsubscribe(consumer))
        self.start_time_ns = clock.wall_ns()
        self.exiting = False
        self.failure: str | None = None  # why the data directory is closed
        self.disk_refusing = False
        self.ports = BoundPorts()
        self.auth: AuthClient | None = None
        self.registrar: Registrar | None = None  # once it announces
        self.tls_context: ssl.SSLContext | None = None
        self.on_failure: Callable[[str], None] = lambda why: None
        self.space = disk_space(options.data_path)
        self.measures = opener.measures
        self.budget = opener.budget
        self.grpc_address = ""
        self.segments_address = ""
        self.segments: ByteServer | None = None  # once it serves
        self._clean = True  # unless a partition could not be closed
        self._housekeeping: asyncio.TimerHandle | None = None
        self._background = Background(loop)
        self.spawn = self._background.spawn  # ends with the broker
        self.journal_writer = JournalWriter(journal, disk, self.fail)
        self.changes = Changes(loop, options.publish_outcome_wait_ns / 1e9)
        self.cluster = cluster
        metadata = NodeMetadata(store, disk.run if cluster is None else cluster.run, journal, self.fail)
        topic_context = self._topic_context(metadata)
        self.topics = Topics(topic_context, ending=lambda: self.exiting or self.failure is not None)
        self.channels = Channels(
            self.topics,
            options,
            node_uid=journal.identity.node_uid,
            rng=rng,
            metadata=metadata,
            changes=self.changes,
        )
        here = SingleNodeLogs(
            self.topics,
            node=journal.identity.node_uid,
            loop=loop,
            spawn=self.spawn,
            address=lambda: reachable(self.segments_address, options.broadcast_address),
        )
        self.log_source: LogSource = here if cluster is None else ClusterLogs(here, cluster)
        if cluster is None:
            self.topics.placement = SingleNodePlacement(self.topics, topic_context)
        else:
            self._join_parts(cluster, topic_context)
        self.publishing = Publishing(
            self.topics,
            options,
            loop=loop,
            budget=self.budget,
            refusal=self.refuses_publish if cluster is None else self.ends,
            next_number=self.connections.next_number,
        )
        self.subscriptions = Subscriptions(
            self.topics, self.channels, options, exiting=lambda: self.exiting, now=self.now, spawn=self.spawn
        )
        if cluster is not None:
            from nsqha.server.node.routing import Routing

            cluster.routing = Routing(self, cluster, cluster.routing_peers)
        self.scrubber = self._make_scrubber()

    def _topic_context(self, metadata: NodeMetadata) -> TopicContext:
        return TopicContext(
            self.options,
            node_uid=self.journal.identity.node_uid,
            rng=self.rng,
            metadata=metadata,
            disk=self.disk,
            journal_writer=self.journal_writer,
            opener=self.opener,
            changes=self.changes,
            new_delivery=self._new_delivery,
            forget_targets=self.connections.forget_targets,
        )

    def _make_scrubber(self) -> Scrubber:
        scrubber = Scrubber(
            self._replicas,
            bytes_per_second=self.options.scrub_bytes_per_second,
            interval_seconds=self.options.scrub_interval_ns / 1e9,
            measures=self.measures,
            rng=random.Random(self.rng.getrandbits(64)),
        )
        scrubber.on_damage = self._found_damage
        scrubber.on_bad_anchor = self._found_bad_anchor
        if self.cluster is None:
            self.opener.on_mended = scrubber.mended
        else:
            self.cluster.replicas.integrity.corrupt.on_mended = scrubber.mended
        return scrubber

    def _join_parts(self, cluster: Membership, topic_context: TopicContext) -> None:
        """Topics, replicas and membership know each other."""
        from nsqha.replication.isr import IsrLimits
        from nsqha.server.node.disk_watch import DiskWatch
        from nsqha.server.node.placement import ClusterPlacement
        from nsqha.server.replica.replica_runtime import ReplicaRuntime
        from nsqha.server.replica.roles import ReplicaLimits, Replicas

        options = self.options
        cluster.topics = self.topics
        runtime = ReplicaRuntime(
            loop=self.loop,
            clock=self.clock,
            node=cluster.node,
            cluster_id=cluster.cluster_id,
            journal=self.journal,
            journal_writer=self.journal_writer,
            metadata=topic_context.metadata,
            opener=self.opener,
            disk=self.disk,
            peers=cluster.peers,
            nodes=cluster.nodes,
            spawn=cluster.spawn,
            on_failure=self.fail,
        )
        cluster.replicas = Replicas(
            runtime,
            links=cluster.links,
            cluster=cluster,
            topic_of=self.topics.of_uid,
            limits=ReplicaLimits(
                sync_every=options.sync_every,
                sync_seconds=options.sync_timeout_ns / 1e9,
                catch_up_bytes_per_second=options.catch_up_bytes_per_second,
                isr=IsrLimits(replica_timeout=options.isr_timeout_ns / 1e9),
            ),
        )
        cluster.disk_watch = DiskWatch(lambda: self.disk.running, cluster.disk_hangs, cluster.spawn)
        self.topics.placement = ClusterPlacement(self.topics, topic_context, cluster)
        cluster.when_changed(self.topics.announce)

    def _found_damage(self, replica: ScrubbedReplica, first: int, end: int) -> None:
        """The scrub found batches that do not verify: another replica has them, or their frames say enough."""
        if self.cluster is not None:
            identity = replica.log.identity
            self.cluster.replicas.integrity.corrupt.found((identity.topic_uid, identity.partition), first, end)
            return
        for topic in self.topics.values():
            for partition in topic.led:
                if partition.log is replica.log:
                    partition.on_damage(first, end)

    def _found_bad_anchor(self, replica: ScrubbedReplica, first: int) -> None:
        """The same of what says where a pair of files begins: a start would have to guess, and trust the log less."""
        try:
            restore = replica.log.restoring_anchor(first)
        except OSError as error:
            logger.warning("anchor_delayed", "%s: %s; the next round tries again", replica.log.directory, error)
        else:
            self.spawn(self._restore_anchor(replica.log, first, restore))

    async def _restore_anchor(self, log: PartitionLog, first: int, restore: Callable[[], None]) -> None:
        try:
            await self.disk.run(restore)
        except Poisoned as error:
            self.fail(error)
        except OSError as error:
            logger.warning("anchor_delayed", "%s: %s; the next round tries again", log.directory, error)
        else:
            logger.warning("anchor_restored", "%s: the anchor before log id %d is written anew", log.directory, first)
            self.scrubber.mended(log, first - 1, first)

    # ---- start and stop

    async def open_topics(self) -> None:
        """Recover everything that the metadata names; nothing listens yet."""
        if self.cluster is None:
            await self.topics.recover()
        else:
            await self.cluster.recover()
        self.journal.recovered()
        self.journal.clear_poison()  # every log was read from the disk and verified
        await self.journal_writer.promise()
        if self.cluster is None:
            await self.topics.start_epochs()
        self.opener.cursor_cache.sweep()
        self._keep_house()
        self.spawn(self.scrubber.run())

    async def stop(self) -> None:
        """Refuse publishes, close clients, write the last progress, sync."""
        self.exiting = True
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        self.connections.stop_reading()
        self._background.cancel()
        self.subscriptions.unsubscribe_all()
        await self.changes.wait(CHANGES_SECONDS_MAX)
        for topic in list(self.topics.values()):
            for partition in topic.led:
                await self._close(topic, partition)
        if self.cluster is not None:
            await self.cluster.routing.drain()
            await self.cluster.replicas.close()
        self.connections.close()  # only now: publishes that were under way have had their answers
        self.changes.cancel()
        self.scrubber.close()
        if self.cluster is not None:
            await self.cluster.routing.close()
        await self.cache_writer.close(write=not self.failure)
        if self._clean and not self.failure:
            await self.journal_writer.end(self.journal.stop)
        else:
            with suppress(StorageError, OSError):
                await self.journal_writer.end(self.journal.commit)
            self.journal.close()
        if self.cluster is None:
            self.store.close()
        else:
            await self.cluster.close()
        self.disk.close()

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
        if not topic.ephemeral and not self.failure:
            self.opener.stage_durable((topic.record.uid, partition.number), partition.log)

    def fail(self, error: BaseException) -> None:
        """The disk failed: close the data directory for good. The process ends; a restart recovers or refuses."""
        if self.failure is not None:
            return
        self.failure = str(error) or type(error).__name__
        logger.error("poisoned", "the data directory failed and is closed: %s", self.failure)
        self.journal.poison(self.failure)
        self.spawn(self.journal_writer.write())  # if the disk still takes it, the next start knows
        for topic in self.topics.values():
            for partition in topic.led:
                partition.abandon(f"the disk failed: {self.failure}")
        if self.cluster is not None:
            self.cluster.replicas.abandon(f"the disk failed: {self.failure}")
            self.spawn(self._announce_failure(self.cluster, self.failure))
        self.on_failure(self.failure)

    async def _announce_failure(self, cluster: Membership, why: str) -> None:
        try:
            await cluster.update(poisoned=why)
        except NsqhaError as error:
            logger.info("not_announced", "the cluster could not be told that the data directory is closed: %s", error)

    def _keep_house(self) -> None:
        """Once a second: disk space, overdue publishes, the journal, log start."""
        if self._housekeeping is not None:
            self.measures.loop_lag_seconds.observe(max(0.0, self.loop.time() - self._housekeeping.when()))
        self._housekeeping = self.loop.call_later(HOUSEKEEPING_SECONDS, self._keep_house)
        now = self.now()
        self._watch_disk()
        for topic in self.topics.values():
            for partition in topic.led:
                try:
                    partition.keep_house(now)
                except Exception as error:
                    # A log that can not be read keeps its files; the others go on.
                    logger.error("housekeeping_failed", "%s: %s", partition.log.directory, error)
                if not topic.ephemeral:
                    self.opener.stage_durable((topic.record.uid, partition.number), partition.log)
        if self.cluster is not None:
            self.cluster.replicas.keep_house()
            self.cluster.disk_watch.look()
        if self.journal.dirty and not self.journal_writer.writing:
            self.spawn(self.journal_writer.write())
        self.cache_writer.write()

    def _watch_disk(self) -> None:
        self.space = disk_space(self.options.data_path)
        # Deferred messages that can not be written down gather in memory: another reason to take no more.
        refusing = self.space.free_bytes < self.options.disk_low_bytes or self.opener.cursor_cache.overfull
        if refusing != self.disk_refusing:
            self.disk_refusing = refusing
            if refusing:
                text = "%d bytes free, below %d: publishes are refused"
                logger.warning("disk_low", text, self.space.free_bytes, self.options.disk_low_bytes)
            else:
                logger.info("disk_recovered", "%d bytes free: publishes are accepted again", self.space.free_bytes)
            self.connections.forget_targets()

    def now(self) -> Now:
        return read(self.clock)

    # ---- connections

    def client_context(self) -> ClientContext:
        """What clients' connections work with; to be asked for once AUTH and TLS are prepared."""
        return ClientContext(
            options=self.options,
            limits=self.limits,
            loop=self.loop,
            clock=self.clock,
            now=self.now,
            auth=self.auth,
            tls_context=self.tls_context,
            budget=self.budget,
            measures=self.measures,
            topics=self.topics,
            publishing=self.publishing,
            subscriptions=self.subscriptions,
        )

    def ends(self) -> str | None:
        """Why this node takes nothing any more; None if it goes on."""
        if self.exiting:
            return "exiting"
        return None if self.failure is None else f"the disk failed: {self.failure}"

    def refuses_publish(self) -> str | None:
        """Why nothing can be stored on this node now; None if it can."""
        ends = self.ends()
        if ends is not None:
            return ends
        if self.disk_refusing:
            return f"disk low: {self.space.free_bytes} bytes free, {self.options.disk_low_bytes} required"
        return None

    def _replicas(self) -> list[ScrubbedReplica]:
        """The logs that are on this node's disk."""
        return [
            ScrubbedReplica(topic.name, p.number, p.log, lambda p=p: p.leader.committed, lambda p=p: p.closed)  # type: ignore[misc]
            for topic in self.topics.values()
            if not topic.ephemeral
            for p in topic.led
        ] + ([] if self.cluster is None else self.cluster.replicas.followed())

    # ---- what others watch

    def set_lookupds(self, addresses: Sequence[str]) -> None:
        self.options = replace(self.options, lookupd_tcp_addresses=tuple(addresses))
        if self.registrar is not None:
            self.registrar.set_peers(addresses)

    def set_log_level(self, level: str) -> None:
        nsqlog.set_level(level)
        self.options = replace(self.options, log_level=level)

    def snapshot(self, topic: str = "", clients: bool = True) -> BrokerStats:
        return broker_stats(self, topic, clients)

    def _new_delivery(self, partition: Partition, channel: Channel) -> Delivery:
        percentiles = self.options.e2e_processing_latency_percentiles
        window = self.options.e2e_processing_latency_window_time_ns / 1e9
        latency = LatencyWindow(window, percentiles, self.clock.monotonic()) if percentiles else None
        return Delivery(partition, channel, self.rng, latency)

    # ---- health

    def health(self) -> str:
        return "OK" if self.failure is None else f"NOK - {self.failure}"

    def checks(self) -> list[Check]:
        checks = [
            Check("data_directory", self.failure is None, self.failure or "", live=True),
            Check("not_exiting", not self.exiting, "shutting down" if self.exiting else ""),
            Check("partitions", not (stopped := self._stopped()), stopped),
            Check("disk_space", not self.disk_refusing, self.refuses_publish() or ""),
        ]
        return checks if self.cluster is None else [*checks, *cluster_checks(self.cluster)]

    def _stopped(self) -> str:
        """Partitions that a broken invariant stopped."""
        stopped = {f"{name}/{p.number}": p.life.stopped for name, topic in self.topics.items() for p in topic.led}
        return "; ".join(f"{partition} {why}" for partition, why in stopped.items() if why is not None)
