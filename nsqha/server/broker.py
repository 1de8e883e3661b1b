"""The node: its topics, who may create and change them, and what the HTTP and gRPC interfaces call.

Every change of a topic or a channel list goes the same way: compare-and-set in the metadata store, then a channel event
in each partition's log, then the answer. Slow work (metadata writes, recovery, deletion) runs on the disk thread in
submission order. After every await the world is looked at again: a topic may have come or gone meanwhile. Changes of
one topic are serialised by its lock, so two of them can not interleave their awaits. A change that began runs to its
end, whoever goes away meanwhile: half a change would leave metadata and logs apart (`_whole`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from nsqha import ids, nsqlog
from nsqha.clock import Clock, Now
from nsqha.commitlog.journal import NodeJournal
from nsqha.cursor.events import TARGET_END
from nsqha.cursor.seek import SeekPlan
from nsqha.election.model import ChannelList, PartitionMeta, TopicRecord, TopicSettings
from nsqha.election.store import MetadataStore
from nsqha.errors import (
    AppendFailed,
    Conflict,
    NotFound,
    NsqhaError,
    OutcomeUnknown,
    Poisoned,
    StorageError,
    Unavailable,
)
from nsqha.options import Options
from nsqha.quantile import LatencyWindow
from nsqha.server import diskspace
from nsqha.server.api import Check, Ports
from nsqha.server.caching import CacheWriter
from nsqha.server.connection import Connection
from nsqha.server.delivery import Consumer, Delivery
from nsqha.server.disk import DiskRounds
from nsqha.server.opening import PartitionOpener, abandoned_of
from nsqha.server.partition import Partition
from nsqha.server.snapshot import broker_stats
from nsqha.server.topic import Topic
from nsqha.wire.limits import Limits

if TYPE_CHECKING:
    import ssl

    from nsqha.cursor.channel import Channel
    from nsqha.server.auth import AuthClient
    from nsqha.server.registrar import Registrar
    from nsqha.server.stats import BrokerStats

CHANGE_RETRIES = 100  # of a compare-and-set that lost against another change of the same topic
HOUSEKEEPING_SECONDS = 1.0
SUB_RETRIES = 5  # a channel or topic that vanishes between create and attach
CHANGES_SECONDS_MAX = 5.0  # a stop waits so long for changes that are under way

log = nsqlog.Log("broker")

T = TypeVar("T")


class PublishWaiter:
    """The outcome of a publish that came over HTTP or gRPC."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future

    def stored(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def failed(self, why: str) -> None:
        if not self.future.done():
            error = OutcomeUnknown if why.startswith("outcome unknown") else Unavailable
            self.future.set_exception(error(why))


class ChangeLock:
    """Held while one topic is changed; gone when nobody holds it or waits for it."""

    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


class Broker:
    """All topics of this node."""

    def __init__(
        self,
        options: Options,
        limits: Limits,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        rng: random.Random,
        journal: NodeJournal,
        store: MetadataStore,
        disk: DiskRounds,
        opener: PartitionOpener,
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
        self.topics: dict[str, Topic] = {}
        self.connections: dict[int, Connection] = {}
        self.connections_total = 0
        self.start_time_ns = clock.wall_ns()
        self.exiting = False
        self.failure: str | None = None  # why the data directory is closed
        self.disk_refusing = False
        self.ports = Ports()
        self.registrar: Registrar | None = None
        self.auth: AuthClient | None = None
        self.tls_context: ssl.SSLContext | None = None
        self.on_failure: Callable[[str], None] = lambda why: None
        self.space = diskspace.of(options.data_path)
        self.measures = opener.measures
        self.grpc_address = ""
        self._numbers = 0
        self._clean = True  # unless a partition could not be closed
        self._creating: dict[str, asyncio.Task[Topic]] = {}
        self._locks: dict[str, ChangeLock] = {}
        self._changes: set[asyncio.Task[Any]] = set()  # under way
        self._half_made: dict[str, TopicRecord] = {}  # in the metadata, but could not be made: nobody ever used them
        self._housekeeping: asyncio.TimerHandle | None = None
        self._journal_writing = False
        self._tasks: set[asyncio.Task[Any]] = set()

    # ---- start and stop

    async def open_topics(self) -> None:
        """Recover everything that the metadata names; nothing listens yet."""
        for tombstone in self.store.tombstones().values():
            await self.disk.run(lambda t=tombstone: self.opener.remove(t.name, t.uid))  # type: ignore[misc]
            self.store.forget_tombstone(tombstone.uid)
        records = self.store.topics()
        recovered = {}
        for name, versioned in records.items():
            recovered[name] = await self.disk.run(lambda r=versioned.record: self.opener.recover(r))  # type: ignore[misc]
        raised = await self._change_metadata(lambda: self.store.raise_epochs(leader=self.journal.identity.node_uid))
        for name, versioned in raised.items():
            if name not in recovered:
                continue
            partitions = self.opener.lead(versioned.record, recovered[name])
            self.topics[name] = Topic(versioned, partitions, self._new_delivery)
        self.journal.recovered()
        self.journal.clear_poison()  # every log was read from the disk and verified
        await self._promise()
        starts = [p.start_epoch() for topic in self.topics.values() for p in topic.partitions]
        for start in starts:
            await start
        for topic in self.topics.values():
            await self._reconcile(topic)
        self.opener.cursor_cache.sweep()
        self._keep_house()

    async def stop(self) -> None:
        """Refuse publishes, close clients, write the last progress, sync."""
        self.exiting = True
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        for connection in list(self.connections.values()):
            connection.read_no_more()
        for task in list(self._tasks):
            task.cancel()
        for consumer in [c for t in self.topics.values() for cs in t.consumers.values() for c in cs]:
            self.unsubscribe(consumer)
        if self._changes:
            await asyncio.wait(self._changes, timeout=CHANGES_SECONDS_MAX)
        for topic in list(self.topics.values()):
            for partition in topic.partitions:
                await self._close(topic, partition)
        for connection in list(self.connections.values()):
            connection.close()  # only now: publishes that were under way have had their answers
        for task in list(self._changes):
            task.cancel()
        await self.cache_writer.close(write=not self.failure)
        self.opener.close()
        if self._clean and not self.failure:
            await self.disk.run(self.journal.stop)
        else:
            with suppress(StorageError, OSError):
                await self.disk.run(self.journal.commit)
            self.journal.close()
        self.store.close()
        self.disk.close()

    async def _close(self, topic: Topic, partition: Partition) -> None:
        try:
            await partition.close()
        except StorageError as error:
            self.fail(error)
        except Exception as error:
            # The others are still closed well; but this stop was not a clean one.
            log.error("close_failed", "%s could not be closed", partition.log.directory, error=error)
            partition.abandon("shutting down")
            self._clean = False
        if not topic.ephemeral and not self.failure:
            self.opener.stage_durable(topic.record, partition)

    def fail(self, error: BaseException) -> None:
        """The disk failed: close the data directory for good. The process ends; a restart recovers or refuses."""
        if self.failure is not None:
            return
        self.failure = str(error) or type(error).__name__
        log.error("poisoned", "the data directory failed and is closed: %s", self.failure)
        self.journal.poison(self.failure)
        self.spawn(self._write_journal())  # if the disk still takes it, the next start knows
        for topic in self.topics.values():
            for partition in topic.partitions:
                partition.abandon(f"the disk failed: {self.failure}")
        self.on_failure(self.failure)

    def _keep_house(self) -> None:
        """Once a second: disk space, overdue publishes, the journal, log start."""
        if self._housekeeping is not None:
            self.measures.loop_lag_seconds.observe(max(0.0, self.loop.time() - self._housekeeping.when()))
        self._housekeeping = self.loop.call_later(HOUSEKEEPING_SECONDS, self._keep_house)
        now = self.now()
        self._watch_disk()
        for topic in self.topics.values():
            for partition in topic.partitions:
                try:
                    partition.keep_house(now)
                except Exception as error:
                    # A log that can not be read keeps its files; the others go on.
                    log.error("housekeeping_failed", "%s: %s", partition.log.directory, error)
                if not topic.ephemeral:
                    self.opener.stage_durable(topic.record, partition)
        if self.journal.dirty and not self._journal_writing:
            self.spawn(self._write_journal())
        self.cache_writer.write()

    def _watch_disk(self) -> None:
        self.space = diskspace.of(self.options.data_path)
        # Deferred messages that can not be written down gather in memory: another reason to take no more.
        refusing = self.space.free_bytes < self.options.disk_low_bytes or self.opener.cursor_cache.overfull
        if refusing != self.disk_refusing:
            self.disk_refusing = refusing
            if refusing:
                text = "%d bytes free, below %d: publishes are refused"
                log.warning("disk_low", text, self.space.free_bytes, self.options.disk_low_bytes)
            else:
                log.info("disk_recovered", "%d bytes free: publishes are accepted again", self.space.free_bytes)
            for connection in self.connections.values():
                connection.forget_targets()

    async def _promise(self) -> None:
        """Make what is staged durable before anything is done on its account."""
        taken = self.journal.take()
        await self.disk.run(lambda: self.journal.write(taken))

    async def _write_journal(self) -> None:
        """Make what is staged durable some time. A full disk is tried again: nothing staged is lost by it."""
        self._journal_writing = True
        try:
            await self._promise()
        except AppendFailed as error:
            log.warning("journal_delayed", "the journal could not be written, trying again: %s", error)
        except StorageError as error:
            self.fail(error)
        finally:
            self._journal_writing = False

    async def _change_metadata(self, change: Callable[[], T]) -> T:
        """One write to the metadata store, on the disk thread; its revision is remembered."""
        try:
            result = await self.disk.run(change)
        except Poisoned as error:
            self.fail(error)
            raise
        self.journal.stage_revision(self.store.revision)
        return result

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a task that belongs to the broker and ends with it."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task_failed", "a background task failed", error=error)

    def now(self) -> Now:
        return Now(self.clock.monotonic(), self.clock.wall_ns())

    # ---- connections

    def next_connection_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def connection_opened(self, connection: Connection) -> None:
        self.connections[connection.number] = connection
        self.connections_total += 1
        if self.exiting:
            connection.close()

    def connection_closed(self, connection: Connection) -> None:
        self.connections.pop(connection.number, None)
        if connection.consumer is not None:
            self.unsubscribe(connection.consumer)

    # ---- publishing

    def refuses_publish(self) -> str | None:
        """Why nothing can be published now; None if it can."""
        if self.exiting:
            return "exiting"
        if self.failure is not None:
            return f"the disk failed: {self.failure}"
        if self.disk_refusing:
            return f"disk low: {self.space.free_bytes} bytes free, {self.options.disk_low_bytes} required"
        return None

    def partition_for_publish(self, topic: str, connection_number: int) -> Partition | None:
        found = self.topics.get(topic)
        return found.partition_for(connection_number) if found is not None and not found.deleting else None

    async def publish(self, topic: str, frames: bytes, count: int, *, deliver_in_ms: int | None = None) -> None:
        """Store blank frames as one unit; returns when they are committed."""
        refusal = self.refuses_publish()
        if refusal is not None:
            raise Unavailable(refusal)
        await self.opener.budget.wait(self.options.publish_wait_ns / 1e9)
        found = await self.topic_for_client(topic)
        partition = found.partition_for(self.next_connection_number())
        waiter = PublishWaiter(self.loop.create_future())
        if deliver_in_ms:
            partition.publish_deferred(frames, deliver_in_ms, waiter)
        else:
            partition.publish(frames, waiter)
        await waiter.future

    # ---- topics

    def has_topic(self, name: str) -> bool:
        return name in self.topics

    def topic_names(self) -> list[str]:
        return sorted(self.topics)

    def topic(self, name: str) -> Topic:
        found = self.topics.get(name)
        if found is None or found.deleting:
            raise NotFound(f"there is no topic {name}")
        return found

    async def create_topic(self, name: str, settings: TopicSettings | None = None) -> None:
        await self.ensure_topic(name, settings)

    async def topic_for_client(self, name: str) -> Topic:
        """The topic that a PUB or SUB names; made if that is allowed."""
        if not self.options.auto_create_topics and name not in self.topics:
            raise Unavailable(f"topic {name} does not exist and --auto-create-topics is off")
        return await self.ensure_topic(name)

    async def ensure_topic(self, name: str, settings: TopicSettings | None = None) -> Topic:
        """The topic, made if it is not there; all who ask at once wait for one creation."""
        while True:
            found = self.topics.get(name)
            if found is not None and not found.deleting:
                return found
            if found is not None:
                async with self._changing(name):
                    continue  # the deletion has ended
            if self.exiting or self.failure:
                raise Unavailable("exiting")
            task = self._creating.get(name)
            if task is None:
                task = self._begin(self._create(name, settings or self._default_settings()))
                self._creating[name] = task
                task.add_done_callback(lambda _: self._creating.pop(name, None))
            return await asyncio.shield(task)

    def _default_settings(self) -> TopicSettings:
        return TopicSettings(partitions=self.options.topic_partitions)

    async def _create(self, name: str, settings: TopicSettings) -> Topic:
        async with self._changing(name):
            await self._bury_half_made(name)
            node = self.journal.identity.node_uid
            log_uids = {n: ids.new_uid(self.rng) for n in range(settings.partitions)}
            metas = {n: PartitionMeta().led_by(node, uid) for n, uid in log_uids.items()}
            versioned = await self._change_metadata(lambda: self.store.create_topic(name, settings, partitions=metas))
            record = versioned.record
            partitions: list[Partition] = []
            try:
                logs = await self.disk.run(lambda: self.opener.create(record, log_uids))
                partitions = self.opener.lead(record, logs)
                if not ids.is_ephemeral(name):
                    await self._promise()
                topic = Topic(versioned, partitions, self._new_delivery)
                for partition in partitions:
                    await partition.start_epoch()
                if self.registrar is not None:
                    for channel in await self.registrar.known_channels(name):
                        await self._add_channel(topic, channel)
                await self._reconcile(topic)
            except (NsqhaError, OSError) as error:
                self._half_made[name] = record
                for partition in partitions:
                    await partition.end("the topic could not be made")
                with suppress(NsqhaError):
                    await self._bury_half_made(name)
                raise Unavailable(f"topic {name} could not be made: {error}") from error
            self.topics[name] = topic
            log.info("topic_created", "TOPIC(%s): created", name)
        if self.registrar is not None:
            self.registrar.topic_added(name)
            for channel in topic.channel_names():
                self.registrar.channel_added(name, channel)
        return topic

    async def _bury_half_made(self, name: str) -> None:
        record = self._half_made.get(name)
        if record is not None:
            await self._change_metadata(lambda: self.store.delete_topic(name))
            del self._half_made[name]
            await self._remove_files(record)

    async def delete_topic(self, name: str) -> None:
        self.topic(name)
        await self._whole(self._delete_topic(name))

    async def _delete_topic(self, name: str) -> None:
        async with self._changing(name):
            await self._bury(self.topic(name))

    async def _bury(self, topic: Topic) -> None:
        """Delete a topic whose lock is held."""
        name, record = topic.name, topic.record
        topic.deleting = True
        self._forget_targets()
        try:
            await self._change_metadata(lambda: self.store.delete_topic(name))
        except BaseException:
            topic.deleting = False
            raise
        # It is gone; whatever fails from here on is work for the next start, and hinders nobody.
        del self.topics[name]
        channels = topic.channel_names()
        for consumer in [c for consumers in topic.consumers.values() for c in consumers]:
            consumer.wire.close()
        for partition in topic.partitions:
            await partition.end("the topic was deleted")
        await self._remove_files(record)
        log.info("topic_deleted", "TOPIC(%s): deleted", name)
        if self.registrar is not None:
            for channel in channels:
                self.registrar.channel_removed(name, channel)
            self.registrar.topic_removed(name)

    async def _remove_files(self, record: TopicRecord) -> None:
        """Remove what is left of a deleted topic; what can not go now goes, by its tombstone, at the next start."""
        self.opener.forget(record)
        try:
            if not ids.is_ephemeral(record.name):
                await self.disk.run(lambda: self.opener.remove(record.name, record.uid))
            await self._change_metadata(lambda: self.store.forget_tombstone(record.uid))
        except (StorageError, OSError) as error:
            log.warning("files_remain", "files of the deleted topic %s are removed later: %s", record.name, error)

    async def empty_topic(self, name: str) -> None:
        self.topic(name)
        await self._whole(self._empty_topic(name))

    async def _empty_topic(self, name: str) -> None:
        async with self._changing(name):
            topic = self.topic(name)
            for partition in topic.partitions:
                partition.cursors.topic_empty()
            await topic.commit_events()

    async def pause_topic(self, name: str, paused: bool) -> None:
        self.topic(name)
        await self._whole(self._pause_topic(name, paused))

    async def _pause_topic(self, name: str, paused: bool) -> None:
        async with self._changing(name):
            topic = self.topic(name)
            await self._change_channels(topic, lambda channels: channels.with_topic_paused(paused))
            await self._reconcile(topic)

    async def change_settings(self, name: str, changes: Mapping[str, Any]) -> None:
        """Change settings that may change while a topic lives. ValueError if they do not fit."""
        self.topic(name)
        await self._whole(self._change_settings(name, changes))

    async def _change_settings(self, name: str, changes: Mapping[str, Any]) -> None:
        async with self._changing(name):
            topic = self.topic(name)
            settings = replace(topic.record.settings, **changes)
            versioned = topic.versioned
            record = replace(versioned.record, settings=settings)
            topic.versioned = await self._change_metadata(lambda: self.store.replace(name, versioned.version, record))
            for partition in topic.partitions:
                partition.set_sync(self.opener.sync_of(record))
                partition.trimmer.change(retention=self.opener.retention_of(record), abandoned=abandoned_of(record))

    # ---- channels

    def has_channel(self, topic: str, channel: str) -> bool:
        found = self.topics.get(topic)
        return found is not None and found.has_channel(channel)

    def channel_names(self, topic: str) -> list[str]:
        return self.topic(topic).channel_names()

    def _existing_channel(self, topic: str, channel: str) -> Topic:
        found = self.topic(topic)
        if not found.has_channel(channel):
            raise NotFound(f"there is no channel {channel} of topic {topic}")
        return found

    async def create_channel(self, topic: str, channel: str) -> None:
        if not await self._ensure_channel(self.topic(topic), channel):
            raise Unavailable("deleted topic/channel")

    async def _ensure_channel(self, topic: Topic, channel: str) -> bool:
        """Make the channel if it is not there; False if its topic is being deleted."""
        if not topic.serves(channel):
            await self._whole(self._create_channel(topic, channel))
        return not topic.deleting

    async def _create_channel(self, topic: Topic, channel: str) -> None:
        async with self._changing(topic.name):
            if topic.deleting or topic.serves(channel):
                return
            await self._add_channel(topic, channel)
            await self._reconcile(topic)
            log.info("channel_created", "TOPIC(%s): new channel(%s)", topic.name, channel)
        if self.registrar is not None:
            self.registrar.channel_added(topic.name, channel)

    async def _add_channel(self, topic: Topic, channel: str) -> None:
        if ids.is_ephemeral(channel):
            for partition in topic.partitions:
                partition.cursors.create_ephemeral(channel, ids.new_uid(self.rng))
            return
        uid = ids.new_uid(self.rng)
        await self._change_channels(
            topic, lambda channels: channels if channel in channels.channels else channels.with_channel(channel, uid)
        )

    async def delete_channel(self, topic: str, channel: str) -> None:
        self._existing_channel(topic, channel)
        await self._whole(self._delete_channel(topic, channel))

    async def _delete_channel(self, topic: str, channel: str, *, unless_used: bool = False) -> None:
        async with self._changing(topic):
            found = self._existing_channel(topic, channel)
            if unless_used and found.consumers.get(channel):
                return
            found.leaving.add(channel)  # a SUB that comes now waits for the lock, and makes it anew
            try:
                if ids.is_ephemeral(channel):
                    for partition in found.partitions:
                        partition.cursors.delete_ephemeral(channel)
                    await found.commit_events()
                else:
                    await self._change_channels(found, lambda channels: channels.without_channel(channel))
                    await self._reconcile(found)
            finally:
                found.leaving.discard(channel)
            log.info("channel_deleted", "TOPIC(%s): deleted channel(%s)", topic, channel)
            if self.registrar is not None:
                self.registrar.channel_removed(topic, channel)
            if found.ephemeral and not found.channel_names():
                await self._bury(found)

    async def empty_channel(self, topic: str, channel: str) -> None:
        self._existing_channel(topic, channel)
        await self._whole(self._empty_channel(topic, channel))

    async def _empty_channel(self, topic: str, channel: str) -> None:
        async with self._changing(topic):
            found = self._existing_channel(topic, channel)
            for partition in found.partitions:
                if channel in partition.cursors.channels:
                    partition.cursors.empty(channel)
            await found.commit_events()

    async def seek_channel(
        self, topic: str, channel: str, targets: Mapping[int, int | None]
    ) -> dict[int, SeekPlan | NsqhaError]:
        """Move the channel in these partitions (None: undo its last seek); what was done in each, or why it was not."""
        self._existing_channel(topic, channel)
        return await self._whole(self._seek_channel(topic, channel, targets))

    async def _seek_channel(
        self, topic: str, channel: str, targets: Mapping[int, int | None]
    ) -> dict[int, SeekPlan | NsqhaError]:
        async with self._changing(topic):
            found = self._existing_channel(topic, channel)
            moving = [p for p in found.partitions if p.number in targets]
            moves = [self._move(p, channel, targets[p.number]) for p in moving]
            outcomes = await asyncio.gather(*moves)
        return dict(zip((p.number for p in moving), outcomes, strict=True))

    async def _move(self, partition: Partition, channel: str, target: int | None) -> SeekPlan | NsqhaError:
        cursors = partition.cursors
        try:
            plan = cursors.undo(channel) if target is None else cursors.seek(channel, target)
            await partition.commit_events()
        except NsqhaError as error:
            return error
        # The event is applied and no later progress can be: this is where the seek came from and where it went.
        committed = cursors.channels[channel].committed
        before = committed.undo
        assert before is not None
        clamped = plan.clamped or target not in (None, TARGET_END, committed.floor)
        return replace(
            plan, floor=before.floor, target=committed.floor, exact=before.ranges is not None, clamped=clamped
        )

    async def pause_channel(self, topic: str, channel: str, paused: bool) -> None:
        self._existing_channel(topic, channel)
        await self._whole(self._pause_channel(topic, channel, paused))

    async def _pause_channel(self, topic: str, channel: str, paused: bool) -> None:
        async with self._changing(topic):
            found = self._existing_channel(topic, channel)
            if ids.is_ephemeral(channel):
                for partition in found.partitions:
                    if channel in partition.cursors.channels:
                        partition.cursors.channels[channel].paused = paused
            else:
                await self._change_channels(found, lambda channels: channels.with_channel_paused(channel, paused))
                await self._reconcile(found)
        found.wake(channel)

    async def _change_channels(self, topic: Topic, change: Callable[[ChannelList], ChannelList]) -> None:
        """Compare-and-set of the topic's channel list; lost races are tried again on what is there now."""
        for _ in range(CHANGE_RETRIES):
            versioned = topic.versioned
            channels = change(versioned.record.channels)
            if channels is versioned.record.channels:
                return
            record = replace(versioned.record, channels=channels)
            try:
                topic.versioned = await self._change_metadata(
                    lambda v=versioned, r=record: self.store.replace(topic.name, v.version, r)  # type: ignore[misc]
                )
                return
            except Conflict:
                current = await self.disk.run(lambda: self.store.topic(topic.name))
                if current is None or current.record.uid != topic.record.uid:
                    raise NotFound(f"there is no topic {topic.name}") from None
                topic.versioned = current
        raise Unavailable(f"topic {topic.name} is being changed by too many at once")

    async def _reconcile(self, topic: Topic) -> None:
        """Bring every partition's log in line with the record; returns when that is committed."""
        for partition in topic.partitions:
            partition.cursors.reconcile(topic.record.channels)
        await topic.commit_events()

    # ---- consumers

    async def subscribe(self, consumer: Consumer) -> None:
        """Give a consumer its place; makes topic and channel if need be."""
        try:
            for _ in range(SUB_RETRIES):
                if self.exiting:
                    raise Unavailable("exiting")
                topic = await self.topic_for_client(consumer.topic)
                self._check_consumers(topic, consumer)
                if await self._ensure_channel(topic, consumer.channel) and topic.serves(consumer.channel):
                    self._check_consumers(topic, consumer)
                    topic.attach(consumer)
                    return
            raise Unavailable("deleted topic/channel")
        except BaseException:
            # The client may be gone, and an ephemeral channel that was made for it with nobody to leave it.
            self._release(consumer.topic, consumer.channel)
            raise

    def _check_consumers(self, topic: Topic, consumer: Consumer) -> None:
        limit = self.options.max_channel_consumers
        if limit and len(topic.consumers.get(consumer.channel, ())) >= limit:
            raise Unavailable(f"consumers for {consumer.topic}:{consumer.channel} exceeds limit of {limit}")

    def unsubscribe(self, consumer: Consumer) -> None:
        """A consumer is gone; an ephemeral channel goes with its last one."""
        topic = self.topics.get(consumer.topic)
        if topic is not None and topic.detach(consumer, self.now()) and not topic.deleting:
            self._release(consumer.topic, consumer.channel)

    def _release(self, topic: str, channel: str) -> None:
        """Nobody may be left who reads this channel: if it is an ephemeral one, it goes."""
        if ids.is_ephemeral(channel) and not self.exiting:
            self.spawn(self._delete_if_unused(topic, channel))

    async def _delete_if_unused(self, topic: str, channel: str) -> None:
        with suppress(NotFound, Unavailable):  # somebody else deleted it
            await self._whole(self._delete_channel(topic, channel, unless_used=True))

    # ---- what others watch

    def registrations(self) -> dict[str, list[str]]:
        """All topics and their channels, for the lookup daemons."""
        return {name: topic.channel_names() for name, topic in self.topics.items()}

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
        return Delivery(partition, channel, self.loop, self.rng, latency)

    # ---- health

    def health(self) -> str:
        return "OK" if self.failure is None else f"NOK - {self.failure}"

    def checks(self) -> list[Check]:
        return [
            Check("data_directory", self.failure is None, self.failure or "", live=True),
            Check("not_exiting", not self.exiting, "shutting down" if self.exiting else ""),
            Check("partitions", not (stopped := self._stopped()), stopped),
            Check("disk_space", not self.disk_refusing, self.refuses_publish() or ""),
        ]

    def _stopped(self) -> str:
        """Partitions that a broken invariant stopped."""
        stopped = {f"{name}/{p.number}": p.stopped for name, topic in self.topics.items() for p in topic.partitions}
        return "; ".join(f"{partition} {why}" for partition, why in stopped.items() if why is not None)

    # ---- odds

    def _forget_targets(self) -> None:
        for connection in self.connections.values():
            connection.forget_targets()

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a change that nobody's leaving may interrupt."""
        task = self.loop.create_task(work)
        self._changes.add(task)
        task.add_done_callback(self._change_ended)
        return task

    def _change_ended(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone; if not, he has heard of it

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, also if whoever asked for it goes away meanwhile."""
        return await asyncio.shield(self._begin(work))

    @asynccontextmanager
    async def _changing(self, topic: str) -> AsyncIterator[None]:
        """One change of a topic at a time."""
        lock = self._locks.setdefault(topic, ChangeLock())
        lock.users += 1
        try:
            async with lock.lock:
                yield
        finally:
            lock.users -= 1
            if not lock.users:
                del self._locks[topic]
