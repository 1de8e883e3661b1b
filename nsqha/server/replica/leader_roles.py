"""The role of a leader: what it takes to begin, how it ends.

    record names us --lead--> read it again, and journal the promise -> files free -> epoch-start batch
    another epoch | the record is lost | a fault --step_down--> the log and its state go to a follower

What makes a leader: the record, read linearizably, names this node, this process life and this log, in an epoch above
the promise; then the promise is journalled. Spec: `Become`. Both ways hold the partition (`ReplicaTable.changing`).

Invariants: a process life leads an epoch at most once; nothing is written in an epoch before its promise is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from nsqha import ids
from nsqha.election.model import PartitionMeta, TopicRecord, Versioned
from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger
from nsqha.replication.pace import SharedRate
from nsqha.server.opening.opener import OpenedLog
from nsqha.server.replica.following.early_promise import EarlyPromise, early_promise
from nsqha.server.replica.lead_turns import LeadTurns
from nsqha.server.replica.leading.leadership import Leadership, LeadershipRuntime
from nsqha.server.replica.leading.records import PartitionRecords
from nsqha.server.runtime.allocator import full_collections

if TYPE_CHECKING:
    from nsqha.replication.followers import IsrLimits
    from nsqha.server.integrity.log_integrity import LogIntegrity
    from nsqha.server.partition.topic import Topic
    from nsqha.server.replica.follower_roles import FollowerRoles
    from nsqha.server.replica.following.follower import Follower
    from nsqha.server.replica.leading.sender import FollowerStreams
    from nsqha.server.replica.replica_files import ReplicaFiles
    from nsqha.server.replica.replica_runtime import ReplicaRuntime
    from nsqha.server.replica.replica_table import ReplicaTable

logger = Logger("replicas", waits=True)
damage_logger = Logger("integrity")

TICKS_MAX = 100  # leaderships that all get a tick; more take turns
ROUND_TICKS = 10  # in so many ticks each gets one, however many they are


class LeaderRoles:
    """Begins and ends the leaderships of one node."""

    def __init__(
        self,
        runtime: ReplicaRuntime,
        table: ReplicaTable,
        following: FollowerRoles,
        integrity: LogIntegrity,
        files: ReplicaFiles,
        *,
        links: FollowerStreams,
        topic_of: Callable[[str, int], Topic | None],
        leaders_changed: Callable[[str], None],
        limits: IsrLimits | None,
        push_bytes_per_second: int = 0,
    ) -> None:
        self._runtime = runtime
        self._table = table
        self._following = following
        self._integrity = integrity
        self._files = files
        self._topic_of = topic_of
        self._leaders_changed = leaders_changed
        self.turns = LeadTurns(runtime.loop)  # of partitions that are to lead
        self._in_turn: list[Leadership] = []  # their tick is still to come, the next one last
        self._uncommitted = 0  # leaderships whose first batch is not committed
        self._lent = LeadershipRuntime(
            runtime.node,
            runtime.clock,
            links,
            runtime.nodes,
            runtime.spawn,
            self._stepping_down,
            table.ticking,
            runtime.opener.measures,
            limits,
            SharedRate(push_bytes_per_second),
        )

    # ---- begin

    @property
    def beginning(self) -> int:
        """How many partitions are on their way to lead, or do so without a committed batch."""
        return self.turns.under_way + self._uncommitted

    async def lead(self, known: Versioned[TopicRecord], number: int, *, written: bool = False) -> None:
        """Become leader, if the record as it is now says so. `written`: `known` was written by this process a moment
        ago; to read it again would say no more, as a read may be overtaken, too."""
        record = known.record
        name, uid, key = record.name, record.uid, (record.uid, number)
        follower = self._table.followers[key]
        times = [self._runtime.clock.monotonic()]
        if (epoch := record.partitions[number].epoch) > follower.epoch:
            logger.debug("elected", "%s/%d: elected in epoch %d", name, number, epoch)
        early = None if written else self._promise_early(record, number, follower)
        fresh = known if written else await self._runtime.metadata.topic(name)
        if fresh is None or fresh.record.uid != uid or self._table.stopping:
            return
        meta = fresh.record.partitions[number]
        topic = self._topic_of(name, uid)
        if meta.leader != self._runtime.node or meta.epoch <= follower.epoch or topic is None:
            return
        ours = meta.registration == self._table.registration and meta.isr.get(self._runtime.node) == follower.log_uid
        if meta.damage_accepted == meta.epoch and ours:
            await self._before_leading(follower, meta.epoch)
        why = self._unfit(key, follower, meta)
        times.append(self._runtime.clock.monotonic())
        if not why:
            follower.fence(meta.epoch)
            await follower.release()
            why = self._unfit(key, follower, meta)  # its last job may have begun another log in its place
            if why:
                self._following.follow_again(fresh, follower)
        if why:
            self._table.declined[key] = meta.epoch, why
            logger.warning("not_leading", "%s/%d: elected in epoch %d, but %s", name, number, meta.epoch, why)
            return
        times.append(self._runtime.clock.monotonic())
        try:
            opened = await self._promise_to_lead(fresh, number, follower, early)
            times.append(self._runtime.clock.monotonic())
            if opened is not None:
                self._begin_leading(fresh, number, topic, opened, times)
        except Exception as error:
            self._table.declined[key] = meta.epoch, f"{type(error).__name__}: {error}"
            raise

    async def _before_leading(self, follower: Follower, epoch: int) -> None:
        """An operator lets this replica lead with what it has: what no other node has of its damage is given up."""
        key = follower.key
        follower.fence(epoch)
        await follower.jobs.finish()
        self._runtime.opener.stage_promise(key, epoch, follower.log, follower.log_uid, follower.sync)
        await self._runtime.journal_writer.promise()
        await self._integrity.mark_lost.give_up(key)
        follower.applier.mended()
        if follower.applier.state is None:
            await self._files.reload(follower)
        if follower.applier.state is None:
            log, end = follower.log, max(follower.applier.committed, follower.log.start.log_id)
            text = "%s: nothing is left that says where its channels were: they begin where the log does"
            damage_logger.error("channels_lost", text, log.directory)
            opener, disk = self._runtime.opener, self._runtime.disk
            follower.applier.know(await disk.run(lambda: opener.states.without_history(key, log, committed=end)))

    def _promise_early(self, record: TopicRecord, number: int, follower: Follower) -> EarlyPromise | None:
        """Begin to journal the promise of our own epoch while the record is read again. The epoch exists, whatever the
        reading says; if that finds a later one, or that we cannot lead, nothing but this promise has been given.
        None: there is nothing to promise."""
        meta = record.partitions[number]
        if ids.is_ephemeral(record.name) or meta.epoch <= follower.epoch or self._unfit(follower.key, follower, meta):
            return None
        return self._promising(follower, meta.epoch)

    def _promising(self, follower: Follower, epoch: int) -> EarlyPromise:
        return early_promise(self._runtime.opener, self._runtime.journal_writer, follower, epoch)

    async def _promise_to_lead(
        self, fresh: Versioned[TopicRecord], number: int, follower: Follower, early: EarlyPromise | None
    ) -> OpenedLog | None:
        """Journal the promise of our own epoch; the log and state to lead with. None: the node stops."""
        record, key = fresh.record, follower.key
        epoch, state = record.partitions[number].epoch, follower.applier.state
        assert state is not None
        opened = OpenedLog(follower.log, follower.log_uid, state, None)
        del self._table.followers[key]
        if not ids.is_ephemeral(record.name):  # whose record goes with this process: no other node ever leads it
            if early is None or not early.is_of(follower, epoch):
                early = self._promising(follower, epoch)
            try:
                await early.round.outcome()
            except Exception:
                self._following.follow_again(fresh, follower)
                raise
        if self._table.stopping:
            self._following.follow(fresh, number, opened, promise=epoch)
            return None
        return opened

    def _begin_leading(
        self, fresh: Versioned[TopicRecord], number: int, topic: Topic, opened: OpenedLog, times: list[float]
    ) -> None:
        """Write the first batch of the epoch; `times`: when the steps up to here ended."""
        name, key, meta = fresh.record.name, (fresh.record.uid, number), fresh.record.partitions[number]
        partition = self._runtime.opener.partition(fresh.record, number, meta, opened)
        # What was changed through this node since that read: no other node knows that its logs have to follow.
        channels = max(fresh.record.channels, topic.record.channels, key=lambda channels: channels.version)
        try:
            started = partition.start_epoch(channels)
        except Exception:  # only now: a leader that never begins would be taken for one
            self._following.follow(fresh, number, opened, promise=meta.epoch)
            raise
        records = PartitionRecords(self._runtime.metadata, name, key[0], number)
        leadership = Leadership(
            self._lent, partition, meta, key=key, topic=name, log_uid=opened.log_uid, records=records
        )
        self._table.leading[key] = leadership
        self._runtime.opener.measures.leader_changes[name] += 1
        self._table.declined.pop(key, None)
        self._table.saw(key, fresh)
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
        self._integrity.leads(key, partition)
        partition.life.on_wrong_state = partial(self._rebuild_state, leadership)
        topic.add_led(partition)
        self._uncommitted += 1
        started.add_done_callback(lambda done: self._begun(leadership, times[-1], done))
        leadership.start()
        self._leaders_changed(name)
        full_collections.made()

    def _begun(self, leadership: Leadership, since: float, done: asyncio.Future[None]) -> None:
        """The epoch-start batch is committed, or never will be."""
        self._uncommitted -= 1
        if not done.cancelled() and done.exception() is None:
            took = 1000 * (self._runtime.clock.monotonic() - since)
            text = "%s/%d: the first batch of epoch %d is committed, %.1f ms later"
            logger.info(
                "epoch_begun", text, leadership.topic, leadership.key[1], leadership.epoch, took, took_ms=round(took, 1)
            )

    def _unfit(self, key: PartitionKey, follower: Follower, meta: PartitionMeta) -> str:
        """Why this node can not lead although it was elected; empty: it can."""
        if meta.registration != self._table.registration:
            return "in an earlier life"
        if meta.isr.get(self._runtime.node) != follower.log_uid:
            return "the ISR names another log"
        if not follower.applier.vouched_for:
            return "its channels are not known yet"
        unsound = self._integrity.suspects.unsound_from(key) is not None
        if len(meta.replicas) > 1 and (unsound or not follower.applier.readable):
            return "its log is damaged"
        return follower.stopped or ""

    def could_lead_now(self, key: PartitionKey, follower: Follower) -> bool:
        """Elected, and what was in the way is mended: the record stays as it is until this node leads or time is up."""
        meta = self._table.records[key].record.partitions[key[1]]
        elected = meta.leader == self._runtime.node and meta.epoch > follower.epoch and not self._table.stopping
        return elected and not self._unfit(key, follower, meta)

    # ---- end

    def _stepping_down(self, leadership: Leadership, why: str) -> None:
        self._runtime.spawn(self._step_down_later(leadership, why))

    def _rebuild_state(self, leadership: Leadership) -> None:
        why = "its channel state does not fit its log"
        self._runtime.spawn(self._step_down_later(leadership, why, wrong_state=True))

    async def _step_down_later(self, leadership: Leadership, why: str, *, wrong_state: bool = False) -> None:
        async with self._table.changing(leadership.key):
            if self._table.leading.get(leadership.key) is leadership and not self._table.stopping:
                await self.step_down(leadership, why, wrong_state=wrong_state)

    async def step_down(self, leadership: Leadership, why: str, *, wrong_state: bool = False) -> None:
        """Lead no longer: the log goes to a follower of the same partition. `wrong_state`: the channel state is rebuilt
        before this node can lead again."""
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
                    logger.error("consumers_not_informed", "%s/%d", name, number, error=error)
        await partition.release(f"this node does not lead any more: {why}")
        del self._table.leading[key]
        record = self._table.records[key]
        opened = OpenedLog(partition.log, leadership.log_uid, partition.cursors.state, None)
        follower = self._following.follow(record, number, opened, promise=leadership.epoch)
        if partition.life.stopped is not None:
            follower.stopped = partition.life.stopped
        if wrong_state:
            self._files.distrust(follower, 0)
            self._following.look_for_state(key, follower)

    def tick(self) -> None:
        """Every 100 ms: for the leaderships that wait for something. When they are many, because another node died or
        is back, some of them each time, in turn: what they wait for comes in events, and needs the processor, most of
        all while many begin."""
        ticking = self._table.ticking
        if len(ticking) <= TICKS_MAX:
            self._in_turn.clear()
            self.each(Leadership.tick, list(ticking))
            return
        if not self._in_turn:
            self._in_turn = list(ticking)[::-1]
        some = max(0 if self.beginning > TICKS_MAX else TICKS_MAX, -(-len(ticking) // ROUND_TICKS))
        chosen, self._in_turn = self._in_turn[-some:][::-1], self._in_turn[:-some]
        self.each(Leadership.tick, [leadership for leadership in chosen if leadership in ticking])

    def each(self, step: Callable[[Leadership], None], chosen: Iterable[Leadership] | None = None) -> None:
        """What goes wrong with one leadership stays there: its epoch ends, and the others' time goes on."""
        for leadership in list(self._table.leading.values()) if chosen is None else chosen:
            try:
                step(leadership)
            except Exception as error:
                logger.error("leadership_failed", "%r", leadership, error=error)
                self._stepping_down(leadership, f"{type(error).__name__}: {error}")
