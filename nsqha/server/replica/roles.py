"""The replicas of this node and the role that each plays: leader, follower, or neither any more.

    metadata record --begin_to_settle, settle--> make the log | lead | step down | follow | remove

Owner of which role each replica has, and of the newest record seen of it (`ReplicaTable`). One partition's changes come
one after the other (its lock, `changing`); each looks at the record again before it acts. A role is given up before
another is taken; the log and the channel state are handed over, never shared. Spec: `Become`, `Restart`.

Parts: `LeaderRoles` and `FollowerRoles` carry a role out, `ReplicaRemoval` ends both. `ReplicaLogs` opens logs,
`ReplicaFiles` changes the files of those that catch up, `LogIntegrity` knows what is wrong with them. `FollowerService`
answers the leaders of other nodes, `ReplicaAnswers` tells others what is here. They read the table, in which only the
first three give and end roles. Of many that are to lead at once, `LeadTurns` says which begin first.

Invariants: a process life leads an epoch at most once; no role is taken before the promise it rests on is durable;
files go only by a tombstone, or because the record no longer names this node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nsqha import ids
from nsqha.election.model import PartitionMeta, TopicRecord, Versioned
from nsqha.errors import LogCorrupt, NsqhaError
from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger
from nsqha.server.integrity.log_integrity import LogIntegrity
from nsqha.server.partition.scrub import ScrubbedReplica as Scrubbed
from nsqha.server.replica.follower_roles import FollowerRoles
from nsqha.server.replica.follower_service import CatchUpRunner, FollowerService
from nsqha.server.replica.following.follower import Follower, FollowerRuntime
from nsqha.server.replica.following.receiver import LeaderNodes
from nsqha.server.replica.leader_roles import LeaderRoles
from nsqha.server.replica.leading.leadership import Leadership
from nsqha.server.replica.replica_files import ReplicaFiles, ReplicaLogs
from nsqha.server.replica.replica_runtime import ReplicaRuntime
from nsqha.server.replica.replica_table import ReplicaTable
from nsqha.server.replica.status import ReplicaAnswers

if TYPE_CHECKING:
    from nsqha.replication.followers import IsrLimits
    from nsqha.server.partition.topic import Topic
    from nsqha.server.replica.leading.sender import FollowerStreams
    from nsqha.server.runtime.measures import Measures

logger = Logger("replicas", waits=True)

SETTLE_RETRY_SECONDS = 0.5


class ReplicaCluster(LeaderNodes, Protocol):
    """The cluster, as its replicas on this node see it."""

    def changed(self, topic: str) -> None:
        """Other nodes, or this one, lead partitions of a topic."""


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """The operator's choices for all replicas of a node."""

    sync_every: int  # messages per fsync with sync=interval
    sync_seconds: float
    catch_up_bytes_per_second: int = 0  # of all partitions that catch up here, or are filled from here; 0: no limit
    isr: IsrLimits | None = None  # None: the defaults


class Replicas:
    """All replicas of one node."""

    def __init__(
        self,
        runtime: ReplicaRuntime,
        *,
        links: FollowerStreams,
        cluster: ReplicaCluster,
        topic_of: Callable[[str, int], Topic | None],
        limits: ReplicaLimits,
    ) -> None:
        """`topic_of(name, uid)`: where partitions that are led here are shown to publishers and consumers."""
        self.table = table = ReplicaTable()
        self.leading, self.followers = table.leading, table.followers
        self._runtime = runtime
        self.links = links
        self._topic_of = topic_of
        self._again: dict[PartitionKey, asyncio.TimerHandle] = {}  # roles that could not be taken
        self.integrity = integrity = LogIntegrity(
            runtime,
            table,
            look_behind=lambda key: self._follower_roles.look_behind_damage(key),
            on_whole=lambda key, name: runtime.spawn(self._follower_roles.whole_again(key, name)),
        )
        runtime.opener.on_mended = integrity.corrupt.mended_alone
        self.logs = ReplicaLogs(runtime, integrity)
        self.files = ReplicaFiles(
            runtime, record_of=lambda key: table.records[key].record, log_replaced=integrity.suspects.renewed
        )
        self._follower_roles = FollowerRoles(
            runtime,
            table,
            integrity,
            self.logs,
            self.files,
            lent=FollowerRuntime(
                runtime.loop,
                runtime.disk,
                runtime.on_failure,
                on_damage=integrity.corrupt.found,
                distrust=self.files.distrust,
                sync_every=limits.sync_every,
                sync_seconds=limits.sync_seconds,
            ),
        )
        self._leader_roles = LeaderRoles(
            runtime,
            table,
            self._follower_roles,
            integrity,
            self.files,
            links=links,
            topic_of=topic_of,
            leaders_changed=cluster.changed,
            limits=limits.isr,
            push_bytes_per_second=limits.catch_up_bytes_per_second,
        )
        self.removal = ReplicaRemoval(runtime, table, self._leader_roles, integrity, self.logs)
        self.service = FollowerService(
            runtime,
            table,
            integrity,
            self._follower_roles,
            self._leader_roles,
            nodes=cluster,
            catching_up=CatchUpRunner(runtime, self.files, integrity, limits.catch_up_bytes_per_second),
        )
        self.answers = ReplicaAnswers(runtime, table, integrity)

    @property
    def registration(self) -> int:
        """This process life; 0: not registered yet."""
        return self.table.registration

    @property
    def beginning(self) -> int:
        """How many partitions are on their way to lead here, or do so without a committed batch, or may soon begin to:
        their leader was lost a moment ago."""
        return self._leader_roles.beginning + self.service.without_leader

    @property
    def measures(self) -> Measures:
        """What the node counts."""
        return self._runtime.opener.measures

    # ---- start and end

    async def recover(self, topic: Versioned[TopicRecord]) -> None:
        """Open the logs that this node has of a topic; no role is settled yet."""
        for number, meta in topic.record.partitions.items():
            key = (topic.record.uid, number)
            if self._runtime.node not in meta.replicas and self._runtime.node not in meta.isr:
                if await self._runtime.disk.run(lambda n=number: self._runtime.opener.folders.exists(topic.record, n)):  # type: ignore[misc]
                    self.removal.strays.add(key)
            else:
                async with self.table.changing(key):
                    if not ids.is_ephemeral(topic.record.name):
                        with suppress(LogCorrupt):
                            # The others on this disk are not to blame; this replica is as if it were down.
                            await self._follower_roles.make(topic, number)

    def registered(self, registration: int) -> None:
        """This process life has a new name."""
        self.table.registration = registration
        self.service.greet()

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
                    self._runtime.opener.stage_durable(key, follower.log)

    def abandon(self, why: str) -> None:
        """The data directory is closed: nothing is acknowledged any more."""
        self.table.stopping = True
        for leadership in self.leading.values():
            leadership.stop()
        for follower in self.followers.values():
            follower.stopped = follower.stopped or why
            follower.closed = True

    # ---- the record says

    def begin_to_settle(self, topic: Versioned[TopicRecord]) -> None:
        """As `settle`, for a caller that does not wait: what needs no waiting is done when this returns, so most news
        of a record begin no task."""
        if keys := [key for key in self._concerned(topic) if not self._done_at_once(topic, key)]:
            self.table.settles(keys)
            self._runtime.spawn(self._settle_each(topic, keys))

    async def settle(self, topic: Versioned[TopicRecord], *, written: bool = False) -> None:
        """Play the roles that this record gives the node; what fails is tried again. `written`: this process has just
        written the record, so it need not be read again."""
        keys = self._concerned(topic)
        self.table.settles(keys)
        await self._settle_each(topic, keys, written)

    def _concerned(self, topic: Versioned[TopicRecord]) -> list[PartitionKey]:
        """The partitions of a topic of which something is here, or is to be."""
        uid, concerned = topic.record.uid, list[PartitionKey]()
        for number, meta in topic.record.partitions.items():
            key = (uid, number)
            here = key in self.leading or key in self.followers or key in self.removal.strays
            # An earlier record that named this node may have a replica in the making, which nothing shows yet.
            here = here or key in self.table.settling or key in self._again
            if here or self._runtime.node in meta.replicas or self._runtime.node in meta.isr:
                concerned.append(key)
        return concerned

    def _done_at_once(self, topic: Versioned[TopicRecord], key: PartitionKey) -> bool:
        """The role stays, and nothing is under way that this would have to wait for."""
        if key in self.table.locks or key in self.table.settling or key in self._again:
            return False
        try:
            return self._stays(topic, key[1])
        except Exception:
            return False  # it is found, said and tried again where there is time

    async def _settle_each(
        self, topic: Versioned[TopicRecord], keys: Sequence[PartitionKey], written: bool = False
    ) -> None:
        try:
            if len(keys) == 1:
                await self._try_to_settle(topic, keys[0][1], written)
            else:
                # Side by side: whichever has to wait (for its files, its lock, the metadata) holds up no other.
                await asyncio.gather(*[self._try_to_settle(topic, number, written) for _, number in keys])
        finally:
            self.table.settled(keys)

    async def _try_to_settle(self, topic: Versioned[TopicRecord], number: int, written: bool = False) -> None:
        key = (topic.record.uid, number)
        if (handle := self._again.pop(key, None)) is not None:
            handle.cancel()
        try:
            # Before the lock: who waits for a turn keeps no other leader's question waiting.
            turn = self._leader_roles.turns.turn() if self._is_to_lead(topic, number) else nullcontext()
            async with turn, self.table.changing(key):
                await self._settle(topic, number, written)
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
            self._again[key] = self._runtime.loop.call_later(
                SETTLE_RETRY_SECONDS,
                lambda: self._runtime.spawn(self._try_to_settle(self.table.records.get(key, topic), number)),
            )

    def _is_to_lead(self, topic: Versioned[TopicRecord], number: int) -> bool:
        """The record names this node as leader, and it has not begun."""
        meta, leadership = topic.record.partitions[number], self.leading.get((topic.record.uid, number))
        return meta.leader == self._runtime.node and (leadership is None or leadership.epoch < meta.epoch)

    def _stays(self, topic: Versioned[TopicRecord], number: int) -> bool:
        """Whether this record leaves the role of a partition as it is; then it is told of the record."""
        key, meta = (topic.record.uid, number), topic.record.partitions[number]
        known = self.table.records.get(key)
        if self.table.stopping or (known is not None and known.record.partitions[number].version > meta.version):
            return True
        leadership, follower = self.leading.get(key), self.followers.get(key)
        if leadership is None and follower is None and self._topic_of(topic.record.name, key[0]) is None:
            return True  # deleted while this waited for its turn: nothing is made that would stay for ever
        if self._runtime.node not in meta.replicas and self._runtime.node not in meta.isr:
            return False
        if leadership is not None:
            if meta.epoch > leadership.epoch:
                return False
            self.table.records[key] = topic
            leadership.refreshed(meta)
            return True
        leads = meta.leader == self._runtime.node
        if follower is None or leads or follower.sync != self._follower_roles.sync_of(topic.record, meta):
            return False
        self.table.records[key] = topic
        self._follower_roles.promise_early(follower, meta)
        self._prepare(meta)
        return True

    async def _settle(self, topic: Versioned[TopicRecord], number: int, written: bool) -> None:
        if self._stays(topic, number):
            return
        key, meta = (topic.record.uid, number), topic.record.partitions[number]
        known, leadership = self.table.records.get(key), self.leading.get(key)
        self.table.records[key] = topic
        if self._runtime.node not in meta.replicas and self._runtime.node not in meta.isr:
            if known is not None and key not in self.followers and leadership is None:
                self.removal.strays.add(key)  # it was to be made, and what was made of it before that failed is there
            await self.removal.remove(topic.record, number)
            return
        if leadership is not None:
            await self._leader_roles.step_down(leadership, f"epoch {meta.epoch} has begun")
        if key not in self.followers:
            await self._follower_roles.make(topic, number)
        follower, sync = self.followers[key], self._follower_roles.sync_of(topic.record, meta)
        if sync != follower.sync:
            if self._runtime.opener.syncs.changes(key, sync, follower.log):
                await self._runtime.journal_writer.promise()
            follower.set_sync(sync)
        if meta.leader == self._runtime.node:
            await self._leader_roles.lead(topic, number, written=written)
        else:
            self._prepare(meta)

    def _prepare(self, meta: PartitionMeta) -> None:
        """A follower may have to lead at once: streams to the other replicas are open by then."""
        nodes = self._runtime.nodes()
        for node in {*meta.replicas, *meta.isr} - {self._runtime.node, meta.leader}:
            if node in nodes and nodes[node].peer_address:
                self.links.prepare(node, nodes[node].peer_address)

    def retire(self) -> None:
        """The node shuts down soon: others are to lead what it leads."""
        for leadership in list(self.leading.values()):
            leadership.retire()

    # ---- time

    def tick(self) -> None:
        """Every 100 ms."""
        if self._runtime.opener.runtime.pause.tick(self._runtime.clock.monotonic()):
            for leadership in list(self.leading.values()):
                leadership.partition.deliveries.wake_all()
        self._leader_roles.tick()

    def keep_house(self) -> None:
        """About once a second."""
        self.integrity.keep_house()
        followers = self.table.idle_turns.choose()
        declined = [self.followers[key] for key in self.table.declined if key in self.followers]
        for follower in dict.fromkeys([*followers, *declined]):
            key = follower.key
            if self.followers.get(key) is not follower:
                continue
            try:
                follower.keep_house()
                if self._leader_roles.could_lead_now(key, follower):
                    self._runtime.spawn(self._try_to_settle(self.table.records[key], key[1]))
                self._follower_roles.look_for_state(key, follower)
            except Exception as error:
                # The others go on, and so does the journal, which comes next.
                logger.error("housekeeping_failed", "%s: %s", follower.log.directory, error)
            # Not while files are exchanged: the journal already speaks of the new ones.
            if follower.jobs.running is None and not ids.is_ephemeral(self.table.records[key].record.name):
                self._runtime.opener.stage_durable(key, follower.log)
            self.table.idle_turns.looked(follower)

    def followed(self) -> list[Scrubbed]:
        """The logs of partitions that are followed, for the scrub."""
        return [self._scrubbed(key, follower) for key, follower in self.followers.items()]

    def _scrubbed(self, key: PartitionKey, follower: Follower) -> Scrubbed:
        name = self.table.records[key].record.name
        return Scrubbed(name, key[1], follower.log, lambda: follower.applier.committed, lambda: follower.closed)

    def nodes_changed(self) -> None:
        """A node came, went or moved."""
        for node, info in self._runtime.nodes().items():
            if info.peer_address:
                self.links.registered(node, info.peer_address, info.registration)
        self._leader_roles.each(Leadership.nodes_changed)
        self.integrity.corrupt.nodes_changed()
        for key in self.followers:
            if (topic := self.table.records.get(key)) is not None and key[1] in topic.record.partitions:
                self._prepare(topic.record.partitions[key[1]])


class ReplicaRemoval:
    """Ends replicas that this node is not to have any more: their roles, what is known of them, their files."""

    def __init__(
        self,
        runtime: ReplicaRuntime,
        table: ReplicaTable,
        leader_roles: LeaderRoles,
        integrity: LogIntegrity,
        logs: ReplicaLogs,
    ) -> None:
        self.strays: set[PartitionKey] = set()  # were moved away, perhaps while this node was down: files that go
        self._runtime = runtime
        self._table = table
        self._leader_roles = leader_roles
        self._integrity = integrity
        self._logs = logs

    async def remove(self, record: TopicRecord, number: int) -> None:
        """This node is not to have the partition any more, by a linearizable read: files go."""
        key = (record.uid, number)
        if key not in self._table.leading and key not in self._table.followers and key not in self.strays:
            return
        fresh = await self._runtime.metadata.read(lambda: self._runtime.metadata.records.topic(record.name))
        meta = fresh.record.partitions.get(number) if fresh is not None and fresh.record.uid == record.uid else None
        if meta is None or self._runtime.node in meta.replicas or self._runtime.node in meta.isr:
            return
        if (leadership := self._table.leading.get(key)) is not None:
            await self._leader_roles.step_down(leadership, "the partition was moved away")
        follower = self._table.followers.pop(key, None)
        if follower is None and key not in self.strays:
            return
        logger.info("replica_removed", "%s/%d: moved away from this node", record.name, number)
        self.strays.add(key)  # until all of it is gone
        if follower is not None:
            await follower.close()
        self._runtime.opener.forget_partition(key)
        self._forget(key)
        await self._runtime.disk.removed(lambda: self._runtime.opener.folders.remove_partition(record, number))
        self.strays.discard(key)

    async def drop(self, uid: int, numbers: Iterable[int]) -> None:
        """The topic was deleted: its tombstone was seen. Its files are the caller's business."""
        for number in numbers:
            key = (uid, number)
            async with self._table.changing(key):
                leadership = self._table.leading.pop(key, None)
                if leadership is not None:
                    leadership.stop()
                    await leadership.partition.end("the topic was deleted")
                follower = self._table.followers.pop(key, None)
                if follower is not None:
                    await follower.close()
                self._forget(key)

    def _forget(self, key: PartitionKey) -> None:
        self._table.records.pop(key, None)
        self._table.declined.pop(key, None)
        self._integrity.gone(key)
        self._logs.gone(key)
