"""The replicas of this node and the role that each plays: leader, follower, or neither any more.

    metadata record --settle--> make the log | lead | step down | follow | remove

Owner of which role each replica has, and of the newest record seen of it (`ReplicaTable`). One partition's changes come
one after the other (its lock, `changing`); each looks at the record again before it acts. A role is given up before
another is taken; the log and the channel state are handed over, never shared. What makes a leader: the record, read
linearizably, names this node, this process life and this log, in an epoch above the promise; then the promise is
journalled. Spec: `Become`, `Restart`.

Parts: `ReplicaLogs` opens logs, `SuspectLogs` knows which of them can not be vouched for, `Damage` which batches do not
verify, `MarkLost` does without these. `Promises` answers the leaders of other nodes, `ReplicaFiles` changes the files
of those that catch up, `ReplicaAnswers` tells others what is here. They read the table, in which
only this class gives roles.

Invariants: a process life leads an epoch at most once; no role is taken before the promise it rests on is durable;
files go only by a tombstone, or because the record no longer names this node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from nsqha import ids
from nsqha.election.model import PartitionMeta, TopicRecord, Versioned
from nsqha.errors import LogCorrupt, NsqhaError
from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger
from nsqha.server.integrity.corrupt_ranges import CorruptRanges
from nsqha.server.integrity.mark_lost import MarkLost
from nsqha.server.integrity.suspect_logs import SuspectLogs
from nsqha.server.opening.opener import OpenedLog
from nsqha.server.partition.scrub import ScrubbedReplica as Scrubbed
from nsqha.server.replica.follower_service import FollowerService
from nsqha.server.replica.following.follower import Follower, FollowerRuntime
from nsqha.server.replica.leading.leadership import Leadership, PartitionRecords
from nsqha.server.replica.replica_files import ReplicaFiles, ReplicaLogs
from nsqha.server.replica.replica_runtime import ReplicaRuntime
from nsqha.server.replica.replica_table import ReplicaTable
from nsqha.server.replica.status import ReplicaAnswers

if TYPE_CHECKING:
    from nsqha.replication.isr import IsrLimits
    from nsqha.server.partition.topic import Topic
    from nsqha.server.replica.leading.sender import FollowerStreams

logger = Logger("replicas")
damage_logger = Logger("damage")

SETTLE_RETRY_SECONDS = 0.5


class Replicas:
    """All replicas of one node."""

    def __init__(
        self,
        runtime: ReplicaRuntime,
        *,
        links: FollowerStreams,
        name_of: Callable[[int], str],
        topic_of: Callable[[str, int], Topic | None],
        leaders_changed: Callable[[str], None],
        stream_lost: Callable[[int], None],
        stream_found: Callable[[int], None],
        sync_every: int,
        sync_seconds: float,
        limits: IsrLimits | None = None,
        catch_up_bytes_per_second: int = 0,
    ) -> None:
        """`topic_of(name, uid)`: where partitions that are led here are shown to publishers and consumers;
        `leaders_changed(name)`: who else has to know. `name_of(uid)`: what a node's certificate may call it."""
        self.table = table = ReplicaTable()
        self.leading, self.followers, self._records = table.leading, table.followers, table.records
        self._loop = runtime.loop
        self._clock = runtime.clock
        self._node = runtime.node
        self._journal_writer = runtime.journal_writer
        self._metadata = runtime.metadata
        self._opener = runtime.opener
        self._disk = runtime.disk
        self._nodes = runtime.nodes
        self._spawn = runtime.spawn
        self._links = links
        self._topic_of = topic_of
        self._leaders_changed = leaders_changed
        self._limits = limits
        self._follower_runtime = FollowerRuntime(
            runtime.loop,
            runtime.disk,
            runtime.on_failure,
            on_damage=lambda key, first, end: self.damage.found(key, first, end),
            sync_every=sync_every,
            sync_seconds=sync_seconds,
        )
        self._strays: set[PartitionKey] = set()  # was moved away, perhaps while this node was down: files that go
        self._again: dict[PartitionKey, asyncio.TimerHandle] = {}  # roles that could not be taken
        self.trust = SuspectLogs(self.followers)
        self.trust.on_whole = lambda key, name: self._spawn(self._whole_again(key, name))
        self.damage = CorruptRanges(runtime, table, self.trust, look_behind=self.look_behind_damage)
        runtime.opener.on_mended = self.damage.mended_alone
        self.logs = ReplicaLogs(runtime, self.damage, self.trust)
        self._files = ReplicaFiles(
            runtime, record_of=lambda key: self._records[key].record, begun_anew=self.trust.renewed
        )
        self.giving_up = MarkLost(
            runtime.disk, self.damage, self.trust, log_of=table.log_of, on_failure=runtime.on_failure
        )
        self.promises = FollowerService(
            runtime,
            table,
            self._files,
            self.damage,
            self.trust,
            make=self.make,
            step_down=self.step_down,
            name_of=name_of,
            stream_lost=stream_lost,
            stream_found=stream_found,
            catch_up_bytes_per_second=catch_up_bytes_per_second,
        )
        self.answers = ReplicaAnswers(runtime, table, self.damage, self.trust)

    @property
    def registration(self) -> int:
        """This process life; 0: not registered yet."""
        return self.table.registration

    # ---- start and end

    async def recover(self, topic: Versioned[TopicRecord]) -> None:
        """Open the logs that this node has of a topic; nobody is led or followed yet."""
        for number, meta in topic.record.partitions.items():
            key = (topic.record.uid, number)
            if self._node not in meta.replicas and self._node not in meta.isr:
                if await self._disk.run(lambda n=number: self._opener.has_files(topic.record, n)):  # type: ignore[misc]
                    self._strays.add(key)
            else:
                async with self.table.changing(key):
                    if not ids.is_ephemeral(topic.record.name):
                        with suppress(LogCorrupt):
                            # The others on this disk are not to blame; this replica is as if it were down.
                            await self.make(topic, number)

    def registered(self, registration: int) -> None:
        """This process life has a new name."""
        self.table.registration = registration
        self.promises.greet()

    async def close(self) -> None:
        """The node stops. Partitions that are led have been closed by their owner."""
        self.table.stopping = True
        for handle in self._again.values():
            handle.cancel()
        for leadership in list(self.leading.values()):
            leadership.stop()
        for key in dict.fromkeys((*self.table.locks, *self.followers)):
            async with self.table.changing(key):  # a change of role that is under way leaves a log to be closed
                follower = self.followers.get(key)
                if follower is not None:
                    await follower.close()
                    self._opener.stage_durable(key, follower.log)

    def abandon(self, why: str) -> None:
        """The data directory is closed: nothing is acknowledged any more."""
        self.table.stopping = True
        for leadership in self.leading.values():
            leadership.stop()
        for follower in self.followers.values():
            follower.stopped = follower.stopped or why
            follower.closed = True

    # ---- the record says

    async def settle(self, topic: Versioned[TopicRecord]) -> None:
        """Play the roles that this record gives the node; what fails is tried again."""
        uid = topic.record.uid
        concerned = []
        for number, meta in topic.record.partitions.items():
            key = (uid, number)
            here = key in self.leading or key in self.followers or key in self._strays
            if here or self._node in meta.replicas or self._node in meta.isr:
                concerned.append(number)
        # Side by side: whichever has to wait (for its files, its lock, the metadata) holds up no other.
        await asyncio.gather(*[self._try_to_settle(topic, number) for number in concerned])

    async def _try_to_settle(self, topic: Versioned[TopicRecord], number: int) -> None:
        key = (topic.record.uid, number)
        if (handle := self._again.pop(key, None)) is not None:
            handle.cancel()
        try:
            async with self.table.changing(key):
                await self._settle(topic, number)
        except LogCorrupt as error:
            if key not in self.logs.unusable:
                logger.error("replica_unusable", "%s/%d: %s", topic.record.name, number, error)
            return
        except (NsqhaError, OSError) as error:  # a full disk has no room for a new log
            logger.warning("role_delayed", "%s/%d: %s", topic.record.name, number, error)
        except Exception as error:
            logger.error("role_failed", "%s/%d: trying again", topic.record.name, number, error=error)
        else:
            return
        if not self.table.stopping and key not in self._again:
            # The record may stay as it is for ever: an elected leader that could not read it is waited for.
            self._again[key] = self._loop.call_later(
                SETTLE_RETRY_SECONDS, lambda: self._spawn(self._try_to_settle(self._records.get(key, topic), number))
            )

    async def _settle(self, topic: Versioned[TopicRecord], number: int) -> None:
        key, meta = (topic.record.uid, number), topic.record.partitions[number]
        known = self._records.get(key)
        if self.table.stopping or (known is not None and known.record.partitions[number].version > meta.version):
            return
        leadership = self.leading.get(key)
        if leadership is None and key not in self.followers and self._topic_of(topic.record.name, key[0]) is None:
            return  # deleted while this waited for its turn: nothing is made that nobody would remove
        self._records[key] = topic
        if self._node not in meta.replicas and self._node not in meta.isr:
            await self._remove(topic.record, number)
            return
        if leadership is not None and meta.epoch <= leadership.epoch:
            leadership.refreshed(meta)
            return
        if leadership is not None:
            await self.step_down(leadership, f"epoch {meta.epoch} has begun")
        if key not in self.followers:
            await self.make(topic, number)
        self.followers[key].set_sync(self._sync_of(topic.record, meta))
        if meta.leader == self._node:
            await self._lead(topic.record, number)
        else:
            self._prepare(meta)

    def _prepare(self, meta: PartitionMeta) -> None:
        """Whoever follows may have to lead at once: streams to the other replicas are open by then."""
        nodes = self._nodes()
        for node in {*meta.replicas, *meta.isr} - {self._node, meta.leader}:
            if node in nodes and nodes[node].peer_address:
                self._links.prepare(node, nodes[node].peer_address)

    async def make(self, topic: Versioned[TopicRecord], number: int) -> None:
        """Open the log, or begin an empty one, and follow with it."""
        opened, promise = await self.logs.open(topic.record, number)
        self._follow(topic, number, opened, promise=promise)

    async def _whole_again(self, key: PartitionKey, name: int) -> None:
        """Everything that recovery found damaged is mended: this log is what it was, if no leader has taken it on."""
        async with self.table.changing(key):
            follower = self.followers.get(key)
            idle = follower is not None and follower.port is None and follower.quiet
            if follower is None or not idle or self.trust.unsound_from(key) is None or self.table.stopping:
                return
            text = "%s: all that was damaged is mended from other replicas"
            if name and self._records[key].record.partitions[key[1]].isr.get(self._node) == name:
                # As if the damage had not been found: the ISR counts on this log, and on all that was in it. Who
                # committed without this node has taken it out of the record, and by that alone it is elected: an old
                # copy of the record, looked at here, only makes a name that counts for nothing.
                follower.log.doubtful_from = None
                if not await self.logs.renamed(key, follower.log, follower.log_uid, name):
                    return
                follower.log_uid = name
                text += ", and it goes by its old name again"
            follower.log.doubtful_from = None
            self.trust.renewed(key)
            logger.warning("whole_again", text, follower.log.directory)
            follower.applier.mended()
            if follower.applier.state is None:
                await self._files.reload(follower)

    def _follow(self, topic: Versioned[TopicRecord], number: int, opened: OpenedLog, *, promise: int) -> None:
        key = (topic.record.uid, number)
        self._records[key] = topic
        self.followers[key] = follower = Follower(
            self._follower_runtime,
            key=key,
            log=opened.log,
            log_uid=opened.log_uid,
            state=opened.state,
            sync=self._sync_of(topic.record, topic.record.partitions[number]),
            epoch=promise,
        )
        if opened.damage is not None:
            follower.applier.found(opened.damage)

    def _follow_again(self, topic: Versioned[TopicRecord], released: Follower) -> None:
        """It was to lead, and does not."""
        opened = OpenedLog(released.log, released.log_uid, released.applier.state, None)
        self._follow(topic, released.key[1], opened, promise=released.epoch)
        self.followers[released.key].stopped = released.stopped

    def _sync_of(self, record: TopicRecord, meta: PartitionMeta) -> str:
        return meta.sync or self._opener.sync_of(record)

    async def _lead(self, record: TopicRecord, number: int) -> None:
        """Become leader, if the record as it is now says so."""
        name, uid, key = record.name, record.uid, (record.uid, number)
        follower = self.followers[key]
        times = [self._clock.monotonic()]
        if (epoch := record.partitions[number].epoch) > follower.epoch:
            logger.info("elected", "%s/%d: elected in epoch %d", name, number, epoch)
        fresh = await self._metadata.read(lambda: self._metadata.store.topic(name))
        if fresh is None or fresh.record.uid != uid or self.table.stopping:
            return
        meta = fresh.record.partitions[number]
        topic = self._topic_of(name, uid)
        if meta.leader != self._node or meta.epoch <= follower.epoch or topic is None:
            return
        ours = meta.registration == self.table.registration and meta.isr.get(self._node) == follower.log_uid
        if meta.damage_accepted == meta.epoch and ours:
            await self._before_leading(follower, meta.epoch)
        why = self._unfit(key, follower, meta)
        times.append(self._clock.monotonic())
        if not why:
            follower.fence(meta.epoch)
            await follower.release()
            why = self._unfit(key, follower, meta)  # its last job may have begun the log anew
            if why:
                self._follow_again(fresh, follower)
        if why:
            logger.warning("not_leading", "%s/%d: elected in epoch %d, but %s", name, number, meta.epoch, why)
            return
        times.append(self._clock.monotonic())
        opened = await self._promise_to_lead(fresh, number, follower)
        times.append(self._clock.monotonic())
        if opened is not None:
            self._begin_leading(fresh, number, topic, opened, times)

    async def _before_leading(self, follower: Follower, epoch: int) -> None:
        """An operator lets this replica lead with what it has: what nobody else has of its damage is given up."""
        key = follower.key
        follower.fence(epoch)
        await follower.jobs.finish()
        self._opener.stage_promise(key, epoch, follower.log, follower.log_uid)
        await self._journal_writer.promise()
        await self.giving_up.give_up(key)
        follower.applier.mended()
        if follower.applier.state is None:
            await self._files.reload(follower)
        if follower.applier.state is None:
            log, end = follower.log, max(follower.applier.committed, follower.log.start.log_id)
            text = "%s: nothing is left that says where its channels were: they begin where the log does"
            damage_logger.error("channels_lost", text, log.directory)
            follower.applier.know(await self._disk.run(lambda: self._opener.state_anew(key, log, committed=end)))

    async def _promise_to_lead(
        self, fresh: Versioned[TopicRecord], number: int, follower: Follower
    ) -> OpenedLog | None:
        """Journal the promise of our own epoch; the log and state to lead with. None: the node stops."""
        record, key = fresh.record, follower.key
        epoch, state = record.partitions[number].epoch, follower.applier.state
        assert state is not None
        opened = OpenedLog(follower.log, follower.log_uid, state, None)
        del self.followers[key]
        if not ids.is_ephemeral(record.name):  # whose record goes with this process: nobody else ever leads it
            self._opener.stage_promise(key, epoch, follower.log, follower.log_uid)
            try:
                await self._journal_writer.promise()
            except Exception:
                self._follow_again(fresh, follower)
                raise
        if self._ending():
            self._follow(fresh, number, opened, promise=epoch)
            return None
        return opened

    def _begin_leading(
        self, fresh: Versioned[TopicRecord], number: int, topic: Topic, opened: OpenedLog, times: list[float]
    ) -> None:
        """Write the first batch of the epoch; `times`: when the steps up to here ended."""
        name, key, meta = fresh.record.name, (fresh.record.uid, number), fresh.record.partitions[number]
        partition = self._opener.partition(fresh.record, number, meta, opened)
        # What was changed through this node since that read: nobody else knows that its logs have to follow.
        channels = max(fresh.record.channels, topic.record.channels, key=lambda channels: channels.version)
        try:
            started = partition.start_epoch(channels)
        except Exception:  # only now: a leader that never begins would be taken for one
            self._follow(fresh, number, opened, promise=meta.epoch)
            raise
        leadership = Leadership(
            partition,
            meta,
            key=key,
            topic=name,
            log_uid=opened.log_uid,
            node=self._node,
            clock=self._clock,
            links=self._links,
            records=PartitionRecords(self._metadata, name, key[0], number),
            nodes=self._nodes,
            spawn=self._spawn,
            step_down=self._stepping_down,
            limits=self._limits,
        )
        self.leading[key] = leadership
        self.trust.leads(key)
        self._records[key] = fresh
        end = opened.log.end.log_id
        took = [round(1000 * (after - before), 1) for before, after in pairwise(times)]
        logger.info(
            "leading",
            "%s/%d: leading in epoch %d from log id %d; took %s ms to read the record, free the files, promise",
            name,
            number,
            meta.epoch,
            end,
            took,
            took_ms=took,
        )
        self.damage.leads(key, partition)
        topic.add_led(partition)
        started.add_done_callback(lambda done: self._begun(leadership, times[-1], done))
        leadership.start()
        self._leaders_changed(name)

    def _begun(self, leadership: Leadership, since: float, done: asyncio.Future[None]) -> None:
        """The epoch-start batch is committed, or never will be."""
        if not done.cancelled() and done.exception() is None:
            took = 1000 * (self._clock.monotonic() - since)
            text = "%s/%d: the first batch of epoch %d is committed, %.1f ms later"
            logger.info(
                "epoch_begun", text, leadership.topic, leadership.key[1], leadership.epoch, took, took_ms=round(took, 1)
            )

    def _ending(self) -> bool:
        """Whether the node stops; asked again after every await."""
        return self.table.stopping

    def _unfit(self, key: PartitionKey, follower: Follower, meta: PartitionMeta) -> str:
        """Why this node can not lead although it was elected; empty: it can."""
        if meta.registration != self.table.registration:
            return "in an earlier life"
        if meta.isr.get(self._node) != follower.log_uid:
            return "the ISR names another log"
        if follower.applier.state is None:
            return "its channels are not known yet"
        if len(meta.replicas) > 1 and (self.trust.unsound_from(key) is not None or not follower.applier.readable):
            return "its log is damaged"
        return follower.stopped or ""

    def _could_lead_now(self, key: PartitionKey, follower: Follower) -> bool:
        """Elected, and what was in the way is mended: the record stays as it is until somebody leads, or time is up."""
        meta = self._records[key].record.partitions[key[1]]
        elected = meta.leader == self._node and meta.epoch > follower.epoch and not self.table.stopping
        return elected and not self._unfit(key, follower, meta)

    def _stepping_down(self, leadership: Leadership, why: str) -> None:
        self._spawn(self._step_down_later(leadership, why))

    async def _step_down_later(self, leadership: Leadership, why: str) -> None:
        async with self.table.changing(leadership.key):
            if self.leading.get(leadership.key) is leadership and not self.table.stopping:
                await self.step_down(leadership, why)

    async def step_down(self, leadership: Leadership, why: str) -> None:
        """Lead no longer: the log goes to a follower of the same partition."""
        key, partition = leadership.key, leadership.partition
        name, number = leadership.topic, key[1]
        logger.info("stepping_down", "%s/%d: epoch %d ends here: %s", name, number, leadership.epoch, why)
        leadership.stop()
        topic = self._topic_of(name, key[0])
        if topic is not None:
            for tell in (partial(topic.remove_led, partition, why), partial(self._leaders_changed, name)):
                try:
                    tell()
                except Exception as error:  # whatever a consumer did: there is another leader, and this one ends
                    logger.error("consumers_not_told", "%s/%d", name, number, error=error)
        await partition.release(f"this node does not lead any more: {why}")
        del self.leading[key]
        record = self._records[key]
        opened = OpenedLog(partition.log, leadership.log_uid, partition.cursors.state, None)
        self._follow(record, number, opened, promise=leadership.epoch)
        if partition.stopped is not None:
            self.followers[key].stopped = partition.stopped

    async def _remove(self, record: TopicRecord, number: int) -> None:
        """This node is not to have the partition any more, by a linearizable read: files go."""
        key = (record.uid, number)
        if key not in self.leading and key not in self.followers and key not in self._strays:
            return
        fresh = await self._metadata.read(lambda: self._metadata.store.topic(record.name))
        meta = fresh.record.partitions.get(number) if fresh is not None and fresh.record.uid == record.uid else None
        if meta is None or self._node in meta.replicas or self._node in meta.isr:
            return
        if (leadership := self.leading.get(key)) is not None:
            await self.step_down(leadership, "the partition was moved away")
        follower = self.followers.pop(key, None)
        if follower is None and key not in self._strays:
            return
        logger.info("replica_removed", "%s/%d: moved away from this node", record.name, number)
        self._strays.add(key)  # until all of it is gone
        if follower is not None:
            await follower.close()
        self._opener.forget_partition(key)
        self._records.pop(key, None)
        self.damage.gone(key)
        self.trust.gone(key)
        self.logs.gone(key)
        await self._disk.removed(lambda: self._opener.remove_partition(record, number))
        self._strays.discard(key)

    async def drop(self, uid: int, numbers: Iterable[int]) -> None:
        """The topic was deleted: its tombstone was seen. Its files are the caller's business."""
        for number in numbers:
            key = (uid, number)
            async with self.table.changing(key):
                leadership = self.leading.pop(key, None)
                if leadership is not None:
                    leadership.stop()
                    await leadership.partition.end("the topic was deleted")
                follower = self.followers.pop(key, None)
                if follower is not None:
                    await follower.close()
                self._records.pop(key, None)
                self.damage.gone(key)
                self.trust.gone(key)
                self.logs.gone(key)

    def retire(self) -> None:
        """The node shuts down soon: others are to lead what it leads."""
        for leadership in list(self.leading.values()):
            leadership.retire()

    # ---- what its parts ask for

    async def look_behind_damage(self, key: PartitionKey) -> None:
        """Nobody has what the channels of a follower wait for: they may be known from further on."""
        await self._files.reload(self.followers[key], alone=False)

    # ---- time

    def tick(self) -> None:
        """Every 100 ms."""
        self._each_leadership(Leadership.tick)

    def _each_leadership(self, step: Callable[[Leadership], None]) -> None:
        """What goes wrong with one stays there: its epoch ends, and the others' time goes on."""
        for leadership in list(self.leading.values()):
            try:
                step(leadership)
            except Exception as error:
                logger.error("leadership_failed", "%r", leadership, error=error)
                self._stepping_down(leadership, f"{type(error).__name__}: {error}")

    def keep_house(self) -> None:
        """About once a second."""
        self.damage.keep_house()
        self.trust.keep_house()
        for key, follower in list(self.followers.items()):
            try:
                follower.keep_house()
                if self._could_lead_now(key, follower):
                    self._spawn(self._try_to_settle(self._records[key], key[1]))
                applier = follower.applier
                news = applier.known != applier.tried and not self._files.loading(key)
                if applier.state is None and follower.quiet and news:
                    self._spawn(self._files.reload(follower, alone=False))
            except Exception as error:
                # The others go on, and so does the journal, which comes next.
                logger.error("housekeeping_failed", "%s: %s", follower.log.directory, error)
            # Not while files are exchanged: the journal already speaks of the new ones.
            if follower.jobs.running is None and not ids.is_ephemeral(self._records[key].record.name):
                self._opener.stage_durable(key, follower.log)

    def followed(self) -> list[Scrubbed]:
        """The logs of partitions that are followed, for the scrub."""
        return [self._scrubbed(key, follower) for key, follower in self.followers.items()]

    def _scrubbed(self, key: PartitionKey, follower: Follower) -> Scrubbed:
        name = self._records[key].record.name
        return Scrubbed(name, key[1], follower.log, lambda: follower.applier.committed, lambda: follower.closed)

    def nodes_changed(self) -> None:
        """A node came, went or moved."""
        for node, info in self._nodes().items():
            if info.peer_address:
                self._links.moved(node, info.peer_address)
        self._each_leadership(Leadership.nodes_changed)
        self.damage.nodes_changed()
        for key in self.followers:
            if (topic := self._records.get(key)) is not None and key[1] in topic.record.partitions:
                self._prepare(topic.record.partitions[key[1]])
