"""What leaders on other nodes may ask of the replicas here: a promise, then to follow.

    Open --decide (not confirmed: read the record)--> refused | step down, promise, free the files --> follow
    follow --> in sync: Opened | else: Opened(behind), CatchUp .. until near, Opened

Owner of the streams that leaders push on (`Receiver`), and of what one partition's leader is answered on them. An Open
is answered under the lock of the partition (`ReplicaTable`), with its record; what does not fit the answer is changed
first, by those who give roles (`FollowerRoles.make`, `LeaderRoles.step_down`). Spec: the promise half of `Push`.

Invariants: no answer leaves before the promise it rests on is durable; from the decision on, nothing is taken from an
earlier leader, nor from an earlier stream of this one; a log counts as in sync only if it is the beginning of the
leader's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from nsqha.commitlog.entry import BatchCorrupt
from nsqha.errors import NotFound, NsqhaError, Poisoned, Unavailable
from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.replication.acceptance import Accepted, Fenced, NotConfirmed, Opening, PromiseNeeded, decide_open
from nsqha.replication.pace import SharedRate
from nsqha.server.replica.following.catch_up import CALL_SECONDS, CatchUp
from nsqha.server.replica.following.receiver import Receiver

if TYPE_CHECKING:
    from nsqha.election.model import TopicRecord, Versioned
    from nsqha.server.integrity.log_integrity import LogIntegrity
    from nsqha.server.peers.api import PeerStream
    from nsqha.server.replica.follower_roles import FollowerRoles
    from nsqha.server.replica.following.follower import Follower
    from nsqha.server.replica.following.receiver import LeaderNodes
    from nsqha.server.replica.leader_roles import LeaderRoles
    from nsqha.server.replica.replica_files import ReplicaFiles
    from nsqha.server.replica.replica_runtime import ReplicaRuntime
    from nsqha.server.replica.replica_table import ReplicaTable

logger = Logger("follower_service", waits=True)


CATCH_UP_RETRY_SECONDS = 0.5
LOST_SECONDS = 1.0  # in which other leaders are elected for those whose stream ended, or will not be soon


class CatchUpRunner:
    """Runs the catching up of one node's followers, again and again until each is near its leader's end.

    What recovery found damaged is mended first, or cut off: a leader's batches go behind what can be vouched for. What
    is found only then, at the end of an epoch, is told, and waited for: without it the place where two logs part is not
    known."""

    def __init__(
        self, runtime: ReplicaRuntime, files: ReplicaFiles, integrity: LogIntegrity, bytes_per_second: int
    ) -> None:
        self._runtime = runtime
        self._files = files
        self._integrity = integrity
        self._pace = SharedRate(bytes_per_second)  # of all partitions that catch up here

    async def run(self, follower: Follower, receiver: Receiver) -> None:
        """Come near the leader's end, or give up because the leader is another."""
        while follower.port is receiver and not follower.closed:
            leader = self._runtime.nodes().get(receiver.leader)
            try:
                if leader is None:
                    raise Unavailable(f"node {receiver.leader:016x} is not registered")
                bad = self._integrity.suspects.unsound_from(follower.key)
                if bad is not None and follower.log.doubtful_from is not None:  # else what is above came again
                    mended = await self._integrity.corrupt.mend_before_following(
                        follower.key, leader.grpc_address, follower.epoch
                    )
                    if follower.port is not receiver or follower.closed:
                        return
                    if mended:
                        follower.log.doubtful_from = None
                    else:
                        text = "%s: from log id %d on, which is damaged"
                        logger.warning("refetching", text, follower.log.directory, bad)
                        self._integrity.suspects.cut_off(follower.key)
                        await self._files.cut(follower, bad)
                if self._runtime.journal.dirty:
                    await (
                        self._runtime.journal_writer.promise()
                    )  # of a cut that is done, before anything is appended again
                ask = self._caller(leader.grpc_address)
                await CatchUp(follower, receiver, self._files, ask, self._runtime.cluster_id, self._pace).run()
            except Poisoned:
                raise  # nothing is tried twice on such a disk
            except BatchCorrupt as error:  # of our own log: what others say of theirs comes as another error
                logger.info("catch_up_delayed", "%s: it waits for a repair: %s", follower.log.directory, error)
                self._integrity.corrupt.found(follower.key, error.first.log_id, error.end.log_id)
                await asyncio.sleep(CATCH_UP_RETRY_SECONDS)
            except (NsqhaError, ValueError, OSError) as error:
                logger.info("catch_up_delayed", "%s: %s", follower.log.directory, error)
                await asyncio.sleep(CATCH_UP_RETRY_SECONDS)
            else:
                self._integrity.suspects.renewed(follower.key)
                if follower.port is receiver:  # else its channel state turned out not to fit, and is rebuilt
                    receiver.opened(follower, behind=False)
                return

    def _caller(self, address: str) -> Callable[[str, Any], Any]:
        return lambda method, request: self._runtime.peers.call(address, method, request, timeout=CALL_SECONDS)


class FollowerService:
    """Answers the leaders of one node's replicas."""

    def __init__(
        self,
        runtime: ReplicaRuntime,
        table: ReplicaTable,
        integrity: LogIntegrity,
        follower_roles: FollowerRoles,
        leader_roles: LeaderRoles,
        *,
        nodes: LeaderNodes,
        catching_up: CatchUpRunner,
    ) -> None:
        self._runtime = runtime
        self._table = table
        self._integrity = integrity
        self._follower_roles = follower_roles
        self._leader_roles = leader_roles
        self._nodes = nodes
        self._catching_up = catching_up
        self._receivers: list[Receiver] = []
        self._lost: tuple[float, int] = (-math.inf, 0)  # when leaders' streams ended, and of how many partitions

    # ---- streams

    def receive(self, stream: PeerStream) -> Receiver:
        """A node opens its stream of appends to us."""
        receiver = Receiver(self, self._nodes, stream)
        self._receivers = [r for r in self._receivers if not r.ended()] + [receiver]
        return receiver

    @property
    def streams(self) -> Sequence[Receiver]:
        """Those that nodes have opened; perhaps some have ended."""
        return self._receivers

    @property
    def without_leader(self) -> int:
        """How many partitions lost the stream of their leader a moment ago, and may begin to lead here soon."""
        since, partitions = self._lost
        return partitions if self._runtime.clock.monotonic() - since < LOST_SECONDS else 0

    def leader_lost(self, partitions: int) -> None:
        """The stream on which their leader spoke has ended."""
        self._lost = self._runtime.clock.monotonic(), self.without_leader + partitions

    def greet(self) -> None:
        """This process life has a new name: leaders need it to take us into an ISR."""
        for receiver in self._receivers:
            receiver.greet()

    def hello(self) -> pb.PushHello:
        return pb.PushHello(
            cluster_id=self._runtime.cluster_id, node_uid=self._runtime.node, registration=self._table.registration
        )

    def following(self, key: PartitionKey) -> Follower | None:
        return self._table.followers.get(key)

    # ---- Open

    def open(self, receiver: Receiver, opened: pb.Open) -> None:
        self._runtime.spawn(self._open(receiver, opened))

    async def _open(self, receiver: Receiver, opened: pb.Open) -> None:
        key = (opened.key.topic_uid, opened.key.partition)
        try:
            async with self._table.changing(key):
                await self._answer_open(receiver, opened, key)
        except Exception as error:
            # Whatever it was: a leader that hears nothing does not ask again as long as the stream stands.
            if not isinstance(error, (NsqhaError, OSError)):
                logger.error("open_failed", "%s/%d", opened.topic, key[1], error=error)
            receiver.refused(opened.key, opened.epoch, pb.REFUSAL_UNKNOWN, 0, str(error))

    async def _answer_open(self, receiver: Receiver, opened: pb.Open, key: PartitionKey) -> None:
        """Decide, give up leading, promise, follow; in this order, and behind each wait it may be too late."""
        table, epoch = self._table, opened.epoch
        times = [self._runtime.clock.monotonic()]
        decision = await self._decision(opened, key, receiver.leader)
        if receiver.ended() or table.stopping:
            return
        match decision:
            case Fenced(promised):
                receiver.refused(opened.key, epoch, pb.REFUSAL_FENCED, promised, "a later epoch has begun")
                return
            case NotConfirmed(why):
                receiver.refused(opened.key, epoch, pb.REFUSAL_UNKNOWN, self.promised(key), why)
                return
            case Accepted() | PromiseNeeded():
                pass
        if (leadership := table.leading.get(key)) is not None:
            await self._leader_roles.step_down(leadership, f"epoch {epoch} has begun")
        follower = table.followers[key]
        if follower.stopped is not None:
            receiver.refused(opened.key, epoch, pb.REFUSAL_FAILED, follower.epoch, follower.stopped)
            return
        # From here on nothing is taken from an earlier leader, nor from an earlier stream of this one.
        follower.fence(epoch, receiver)
        times.append(self._runtime.clock.monotonic())
        await self._promise(follower, epoch, needed=isinstance(decision, PromiseNeeded))
        times.append(self._runtime.clock.monotonic())
        await follower.jobs.finish()  # the last wait: housekeeping takes them too
        if receiver.ended() or follower.closed:
            return
        times.append(self._runtime.clock.monotonic())
        took = [round(1000 * (after - before), 1) for before, after in pairwise(times)]
        text = "%s/%d: following node %016x in epoch %d; took %s ms to check the record, promise, free the files"
        logger.info("following", text, opened.topic, key[1], receiver.leader, epoch, took, took_ms=took)
        self._follow(follower, receiver, opened)

    async def _decision(self, opened: pb.Open, key: PartitionKey, leader: int) -> Opening:
        """By the record as it was last seen; read again if that is not enough, or no log is here yet. NotFound."""
        table = self._table
        decision = self._decide(key, opened.epoch, leader, table.record_of(key))
        here = key in table.followers or key in table.leading
        if here and not isinstance(decision, NotConfirmed):
            return decision
        topic = await self._runtime.metadata.topic(opened.topic)
        if topic is None or topic.record.uid != key[0] or key[1] not in topic.record.partitions:
            raise NotFound(f"there is no partition {key[1]} of topic {opened.topic}")
        table.saw(key, topic)
        meta = topic.record.partitions[key[1]]
        if key not in table.followers and key not in table.leading:
            if self._runtime.node not in meta.replicas and self._runtime.node not in meta.isr:
                raise NotFound(f"{opened.topic}/{key[1]} has no replica on this node")
            await self._follower_roles.make(topic, key[1])
        return self._decide(key, opened.epoch, leader, topic)

    async def _promise(self, follower: Follower, epoch: int, *, needed: bool) -> None:
        """Make the promise of `epoch` durable, unless it is. With it goes the log's name, if that of a damaged log was
        kept: from here on this leader's log is what counts."""
        early = follower.leader_log.early
        if not needed and early is not None and early.is_of(follower, epoch):
            with suppress(NsqhaError):
                await early.round.outcome()
                return
        known = self._runtime.journal.record(follower.key)
        if needed or known is None or known.log_uid != follower.log_uid:
            opener, log = self._runtime.opener, follower.log
            opener.stage_promise(follower.key, epoch, log, follower.log_uid, follower.sync)
        if needed or self._runtime.journal.dirty:
            # Also if it is only staged: the write of an earlier attempt may have failed.
            await self._runtime.journal_writer.promise()

    def _follow(self, follower: Follower, receiver: Receiver, opened: pb.Open) -> None:
        follower.follow(receiver, opened.epoch, opened.start)
        receiver.followed_by(follower)
        if self._in_sync(follower.key, follower, opened):
            follower.caught_up()
            if follower.port is receiver:  # as above
                receiver.opened(follower, behind=False)
        else:
            follower.behind = True
            receiver.opened(follower, behind=True)
            follower.jobs.take(partial(self._catching_up.run, follower, receiver), interruptible=True)

    def _decide(self, key: PartitionKey, epoch: int, leader: int, topic: Versioned[TopicRecord] | None) -> Opening:
        leadership = self._table.leading.get(key)
        return decide_open(
            epoch=epoch,
            leader=leader,
            promise=self.promised(key),
            meta=None if topic is None else topic.record.partitions.get(key[1]),
            leading=None if leadership is None else leadership.epoch,
        )

    def promised(self, key: PartitionKey) -> int:
        """The highest epoch that this node has promised to, 0 if none."""
        known = self._runtime.journal.record(key)
        return 0 if known is None else known.promise

    def _in_sync(self, key: PartitionKey, follower: Follower, opened: pb.Open) -> bool:
        """Whether our log is the beginning of the leader's, without asking."""
        log = follower.log
        end = log.end.log_id
        if self._integrity.suspects.unsound_from(key) is not None or follower.applier.state is None:
            return False
        if end < opened.first or follower.leader_log.differs_at is not None:
            return False
        last = log.entry_before(end)
        # What we have of this epoch came from this leader, who takes nothing back.
        return last.epoch == opened.epoch or (end == opened.start and last.chain == opened.chain)
