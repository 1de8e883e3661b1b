"""What leaders on other nodes may ask of the replicas here: a promise, then to follow.

    Open --decide (not confirmed: read the record)--> refused | step down, promise, free the files --> follow
    follow --> in sync: Opened | else: Opened(behind), CatchUp .. until near, Opened

Owner of the streams that leaders push on (`Receiver`), and of what one partition's leader is answered on them. Which
role a replica plays is `Replicas`' business: an Open is answered under its lock of the partition, with its record, and
what does not fit the answer is done there (`make`, `step_down`). Spec: the promise half of `Push`.

Invariants: no answer leaves before the promise it rests on is durable; from the decision on, nothing is taken from an
earlier leader, nor from an earlier stream of this one; a log counts as in sync only if it is the beginning of the
leader's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from nsqha.errors import NotFound, NsqhaError, Poisoned, Unavailable
from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.replication.acceptance import Accepted, Fenced, NotConfirmed, Opening, PromiseNeeded, decide_open
from nsqha.server.replica.following.catch_up import CALL_SECONDS, CatchUp, SharedRate
from nsqha.server.replica.following.receiver import Receiver

if TYPE_CHECKING:
    from nsqha.election.model import TopicRecord, Versioned
    from nsqha.server.integrity.corrupt_ranges import CorruptRanges
    from nsqha.server.integrity.suspect_logs import SuspectLogs
    from nsqha.server.peers.api import PeerStream
    from nsqha.server.replica.following.follower import Follower
    from nsqha.server.replica.leading.leadership import Leadership
    from nsqha.server.replica.replica_files import ReplicaFiles
    from nsqha.server.replica.replica_runtime import ReplicaRuntime
    from nsqha.server.replica.replica_table import ReplicaTable

logger = Logger("promises")


CATCH_UP_RETRY_SECONDS = 0.5


class FollowerService:
    """Answers the leaders of one node's replicas."""

    def __init__(
        self,
        runtime: ReplicaRuntime,
        table: ReplicaTable,
        files: ReplicaFiles,
        damage: CorruptRanges,
        trust: SuspectLogs,
        *,
        make: Callable[[Versioned[TopicRecord], int], Awaitable[None]],
        step_down: Callable[[Leadership, str], Awaitable[None]],
        name_of: Callable[[int], str],
        stream_lost: Callable[[int], None],
        stream_found: Callable[[int], None],
        catch_up_bytes_per_second: int,
    ) -> None:
        """`make(topic, number)`: open the log, or begin an empty one, and follow with it. `step_down(leadership, why)`:
        lead no longer, but follow. Both hold the partition (`ReplicaTable.changing`)."""
        self._clock = runtime.clock
        self._node = runtime.node
        self._cluster_id = runtime.cluster_id
        self._journal = runtime.journal
        self._journal_writer = runtime.journal_writer
        self._metadata = runtime.metadata
        self._opener = runtime.opener
        self._peers = runtime.peers
        self._nodes = runtime.nodes
        self._spawn = runtime.spawn
        self._table = table
        self._make = make
        self._step_down = step_down
        self._files = files
        self._damage = damage
        self._trust = trust
        self.name_of = name_of  # of a node, in its certificate
        self._stream_lost = stream_lost
        self._stream_found = stream_found
        self._pace = SharedRate(catch_up_bytes_per_second)  # of all partitions that catch up here
        self._receivers: list[Receiver] = []

    # ---- streams

    def receive(self, stream: PeerStream) -> Receiver:
        """A node opens its stream of appends to us."""
        receiver = Receiver(self, stream)
        self._receivers = [r for r in self._receivers if not r.ended()] + [receiver]
        return receiver

    def greet(self) -> None:
        """This process life has a new name: leaders need it to take us into an ISR."""
        for receiver in self._receivers:
            receiver.greet()

    def hello(self) -> pb.PushHello:
        return pb.PushHello(cluster_id=self._cluster_id, node_uid=self._node, registration=self._table.registration)

    def following(self, key: PartitionKey) -> Follower | None:
        return self._table.followers.get(key)

    def stream_lost(self, node: int) -> None:
        self._stream_lost(node)

    def stream_found(self, node: int) -> None:
        self._stream_found(node)

    # ---- Open

    def open(self, receiver: Receiver, opened: pb.Open) -> None:
        self._spawn(self._open(receiver, opened))

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
        times = [self._clock.monotonic()]
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
            await self._step_down(leadership, f"epoch {epoch} has begun")
        follower = table.followers[key]
        if follower.stopped is not None:
            receiver.refused(opened.key, epoch, pb.REFUSAL_FAILED, follower.epoch, follower.stopped)
            return
        # From here on nothing is taken from an earlier leader, nor from an earlier stream of this one.
        follower.fence(epoch)
        times.append(self._clock.monotonic())
        await self._promise(follower, epoch, needed=isinstance(decision, PromiseNeeded))
        times.append(self._clock.monotonic())
        await follower.jobs.finish()  # the last wait: housekeeping takes them too
        if receiver.ended() or follower.closed:
            return
        times.append(self._clock.monotonic())
        took = [round(1000 * (after - before), 1) for before, after in pairwise(times)]
        text = "%s/%d: following node %016x in epoch %d; took %s ms to check the record, promise, free the files"
        logger.info("following", text, opened.topic, key[1], receiver.leader, epoch, took, took_ms=took)
        self._follow(follower, receiver, opened)

    async def _decision(self, opened: pb.Open, key: PartitionKey, leader: int) -> Opening:
        """By the record as it was last seen; read anew if that is not enough, or there is no log here yet. NotFound."""
        table = self._table
        decision = self._decide(key, opened.epoch, leader, table.record_of(key))
        here = key in table.followers or key in table.leading
        if here and not isinstance(decision, NotConfirmed):
            return decision
        topic = await self._metadata.read(lambda: self._metadata.store.topic(opened.topic))
        if topic is None or topic.record.uid != key[0] or key[1] not in topic.record.partitions:
            raise NotFound(f"there is no partition {key[1]} of topic {opened.topic}")
        table.saw(key, topic)
        meta = topic.record.partitions[key[1]]
        if key not in table.followers and key not in table.leading:
            if self._node not in meta.replicas and self._node not in meta.isr:
                raise NotFound(f"{opened.topic}/{key[1]} has no replica on this node")
            await self._make(topic, key[1])
        return self._decide(key, opened.epoch, leader, topic)

    async def _promise(self, follower: Follower, epoch: int, *, needed: bool) -> None:
        """Make the promise of `epoch` durable, unless it is. With it goes the log's name, if that of a damaged log was
        kept: from here on this leader's log is what counts."""
        known = self._journal.record(follower.key)
        if needed or known is None or known.log_uid != follower.log_uid:
            self._opener.stage_promise(follower.key, epoch, follower.log, follower.log_uid)
        if needed or self._journal.dirty:
            # Also if it is only staged: the write of an earlier attempt may have failed.
            await self._journal_writer.promise()

    def _follow(self, follower: Follower, receiver: Receiver, opened: pb.Open) -> None:
        follower.follow(receiver, opened.epoch, opened.start)
        receiver.followed_by(follower)
        if self._in_sync(follower.key, follower, opened):
            follower.caught_up()
            receiver.opened(follower, behind=False)
        else:
            follower.behind = True
            receiver.opened(follower, behind=True)
            follower.jobs.take(self._catch_up(follower, receiver), interruptible=True)

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
        known = self._journal.record(key)
        return 0 if known is None else known.promise

    def _in_sync(self, key: PartitionKey, follower: Follower, opened: pb.Open) -> bool:
        """Whether our log is the beginning of the leader's, without asking."""
        log = follower.log
        end = log.end.log_id
        if self._trust.unsound_from(key) is not None or follower.applier.state is None:
            return False
        if end < opened.first or follower.leader_log.differs_at is not None:
            return False
        last = log.entry_before(end)
        # What we have of this epoch came from this leader, who takes nothing back.
        return last.epoch == opened.epoch or (end == opened.start and last.chain == opened.chain)

    # ---- catch-up

    async def _catch_up(self, follower: Follower, receiver: Receiver) -> None:
        """Until we are near, or the leader is another."""
        while follower.port is receiver and not follower.closed:
            leader = self._nodes().get(receiver.leader)
            try:
                if leader is None:
                    raise Unavailable(f"node {receiver.leader:016x} is not registered")
                bad = self._trust.unsound_from(follower.key)
                if bad is not None and follower.log.doubtful_from is not None:  # else what is above came anew
                    mended = await self._damage.mend_before_following(follower.key, leader.grpc_address, follower.epoch)
                    if follower.port is not receiver or follower.closed:
                        return
                    if mended:
                        follower.log.doubtful_from = None
                    else:
                        text = "%s: from log id %d on, which is damaged"
                        logger.warning("refetching", text, follower.log.directory, bad)
                        self._trust.cut_off(follower.key)
                        await self._files.cut(follower, bad)
                        follower.applier.forget_pending()
                if self._journal.dirty:
                    await self._journal_writer.promise()  # of a cut that is done, before anything is appended again
                ask = self._caller(leader.grpc_address)
                await CatchUp(follower, receiver, self._files, ask, self._cluster_id, self._pace).run()
            except Poisoned:
                raise  # nothing is tried twice on such a disk
            except (NsqhaError, ValueError, OSError) as error:
                logger.info("catch_up_delayed", "%s: %s", follower.log.directory, error)
                await asyncio.sleep(CATCH_UP_RETRY_SECONDS)
            else:
                self._trust.renewed(follower.key)
                receiver.opened(follower, behind=False)
                return

    def _caller(self, address: str) -> Callable[[str, Any], Any]:
        return lambda method, request: self._peers.call(address, method, request, timeout=CALL_SECONDS)
