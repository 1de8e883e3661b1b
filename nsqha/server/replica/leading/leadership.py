"""Leading one partition for one epoch: its log goes to the followers, their acks to the commit rule.

    Partition (log, commit) <--- acks that count --- Leadership ---> FollowerStreams (one stream per follower node)
                                                        |
                              IsrKeeper.step -> Propose, Fence, Reread -> metadata (worker thread) -> replied

The keeper decides (nsqha.replication.isr); this shell carries out what it says, in the order in which it says it: the
effective ISR is widened before a proposal leaves. What the store answers late or never is the keeper's business too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from nsqha.election.model import NodeInfo, PartitionMeta
from nsqha.errors import Conflict, LogCorrupt, NotFound, NsqhaError, Unavailable
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.replication.isr import (
    Applied,
    Effective,
    Fence,
    IsrKeeper,
    ProposalRefused,
    Propose,
    Reread,
    StepDown,
    Unknown,
)

if TYPE_CHECKING:
    from nsqha.clock import Clock
    from nsqha.replication.isr import Action, IsrLimits, Outcome
    from nsqha.server.partition.partition import Partition
    from nsqha.server.replica.leading.sender import FollowerProgress, FollowerStreams, PushPiece
    from nsqha.server.runtime.metadata import NodeMetadata

HOLD_SECONDS_MAX = 3.0  # that publishes wait for a successor

logger = Logger("leadership")

_NODE = re.compile(r"\bnode (\d+)\b")


class RecordStore(Protocol):
    """The partition's record in the metadata store; each call runs in a worker thread."""

    async def propose(self, meta: PartitionMeta, registered: Mapping[int, int]) -> PartitionMeta:
        """Compare-and-set on `meta.version` and on the registrations. Conflict, NotFound; anything else: unknown."""

    async def fence(self, version: int) -> PartitionMeta:
        """Make the record newer than `version`."""

    async def read(self) -> PartitionMeta | None:
        """As it is now, linearizably; None: the topic is gone."""


class PartitionRecords:
    """One partition's record, as its leadership reads and writes it: a `RecordStore`."""

    def __init__(self, metadata: NodeMetadata, name: str, uid: int, number: int) -> None:
        self._metadata = metadata
        self._name = name
        self._uid = uid
        self._number = number

    async def propose(self, meta: PartitionMeta, registered: Mapping[int, int]) -> PartitionMeta:
        store = self._metadata.store
        return await self._metadata.write(
            lambda: store.replace_partition(self._name, self._uid, self._number, meta, registered=registered)
        )

    async def fence(self, version: int) -> PartitionMeta:
        store = self._metadata.store
        return await self._metadata.write(lambda: store.fence_partition(self._name, self._uid, self._number, version))

    async def read(self) -> PartitionMeta | None:
        topic = await self._metadata.read(lambda: self._metadata.store.topic(self._name))
        return None if topic is None or topic.record.uid != self._uid else topic.record.partitions.get(self._number)


class Leadership:
    """One epoch of one partition on the node that leads it."""

    def __init__(
        self,
        partition: Partition,
        meta: PartitionMeta,
        *,
        key: tuple[int, int],
        topic: str,
        log_uid: int,
        node: int,
        clock: Clock,
        links: FollowerStreams,
        records: RecordStore,
        nodes: Callable[[], Mapping[int, NodeInfo]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        step_down: Callable[[Leadership, str], None],
        limits: IsrLimits | None = None,
    ) -> None:
        self.partition = partition
        self.log = partition.log
        self.topic = topic
        self.key = key
        self.log_uid = log_uid
        self.epoch = meta.epoch
        self.epoch_start = partition.log.end.log_id
        self.wire_key = pb.PartitionKey(topic_uid=key[0], partition=key[1])
        self.piece: PushPiece | None = None  # of `push`
        self.ended = False
        self._holding_for = 0  # the node that is to lead next
        self._retiring = False  # this node shuts down
        self._holding_since = 0.0
        self._reading = False  # the record, at the moment
        self._read_again = False  # what that finds may be older than what it is needed for
        self._promised = 0  # the highest epoch that a follower says it has promised
        self._node = node
        self._clock = clock
        self._links = links
        self._records = records
        self._nodes = nodes
        self._spawn = spawn
        self._step_down = step_down
        self._followers: dict[int, FollowerProgress] = {}
        self._keeper = IsrKeeper(
            node,
            meta,
            epoch_start=self.epoch_start,
            now=clock.monotonic(),
            limits=limits,
            sync_always=partition.leader.sync_always,
        )
        partition.batches.set_followers(self._appended, self._committed)

    def start(self) -> None:
        """Push to everybody who has a replica."""
        self.nodes_changed()

    def stop(self) -> None:
        """This node does not lead any more, or ends."""
        self.ended = True
        self.partition.batches.set_followers(None, None)
        for progress in self._followers.values():
            progress.stop()
        self._followers.clear()

    @property
    def meta(self) -> PartitionMeta:
        """The newest record that is known."""
        return self._keeper.meta

    @property
    def committed(self) -> int:
        return self.partition.leader.committed

    def lags(self) -> Iterator[tuple[int, int, int]]:
        """(node, commitlog entries, bytes) that each follower has not acknowledged."""
        log = self.partition.log
        end = log.end
        for node in self._followers:
            acked = max(self._keeper.end_of(node), log.start.log_id)
            try:
                position = log.entry(acked).position if acked < end.log_id else end.position
            except LogCorrupt:
                position = end.position  # its channels and the scrub say so; the other figures are still wanted
            yield node, max(end.log_id - acked, 0), end.position - position

    # ---- the partition

    def _appended(self) -> None:
        for progress in self._followers.values():
            progress.wake()

    def _committed(self) -> None:
        self.piece = None
        self._links.committed(self)
        if self._holding_for:
            self._step()  # perhaps that was the last batch before the next leader's

    def tick(self) -> None:
        """Every 100 ms."""
        if self.ended:
            return
        held = self._clock.monotonic() - self._holding_since
        if self._holding_for and held >= HOLD_SECONDS_MAX and self._keeper.ended is None:
            # Whoever was to take over did not, and nobody said that it is given up: the metadata may be away.
            self.partition.hand_over(False)
        self._step()

    def _hold(self) -> None:
        """Write nothing while somebody is to lead next, who has to reach our end: it must not move away from it."""
        successor = self._keeper.heir
        if successor != self._holding_for:
            self._holding_for, self._holding_since = successor, self._clock.monotonic()
            self.partition.hand_over(bool(successor))

    # ---- followers

    def heard(
        self, node: int, *, registration: int, log_uid: int, end: int, durable: int, fit: bool = True, opened: bool
    ) -> None:
        if self.ended:
            return
        keeper, now = self._keeper, self._clock.monotonic()
        keeper.heard(node, registration=registration, log_uid=log_uid, end=end, durable=durable, fit=fit, now=now)
        counts = keeper.countable(node, log_uid)
        if opened:
            end, durable = keeper.counted(node)
            if self.partition.leader.opened(node, end=end, durable=durable):
                self.partition.committed_moved()
        elif counts:
            self.partition.replica_acked(node, end, durable)
        if not counts or opened:
            self._step()

    def lost(self, node: int) -> None:
        if not self.ended:
            self._keeper.lost(node, self._clock.monotonic())
            self._step()

    def fenced(self, node: int, promised: int) -> None:
        if not self.ended:
            logger.info("fenced", "%s/%d: node %016x has promised epoch %d", self.topic, self.key[1], node, promised)
            self._keeper.lost(node, self._clock.monotonic())
            self._promised = max(self._promised, promised)
            self._read_again = self._reading
            self._reread()

    # ---- the record

    def refreshed(self, meta: PartitionMeta) -> None:
        """The metadata brought a newer record."""
        if not self.ended:
            self._do(self._keeper.refreshed(meta, self._clock.monotonic()))
            self._feed(self._keeper.meta)
            self._keeper.sync_always = self.partition.leader.sync_always
            self._hold()

    def _feed(self, meta: PartitionMeta) -> None:
        """Push to every replica of the record, and to nobody else."""
        if self.ended:
            return
        wanted = set(meta.replicas) | set(meta.isr)
        wanted.discard(self._node)
        for node in set(self._followers) - wanted:
            self._followers.pop(node).stop()
        nodes = self._nodes()
        for node in sorted(wanted - set(self._followers)):
            info = nodes.get(node)
            if info is not None and info.peer_address:
                self._followers[node] = self._links.add(self, node, info.peer_address)

    def nodes_changed(self) -> None:
        """A node came, went, moved or shuts down."""
        if self.ended:
            return
        departing = {node for node, info in self._nodes().items() if info.leaving}
        if self._retiring:
            departing.add(self._node)
        self._keeper.depart(frozenset(departing), self._clock.monotonic())
        self._feed(self._keeper.meta)
        self._step()

    def retire(self) -> None:
        """This node shuts down: another one is to lead, as soon as it has everything."""
        self._retiring = True
        self.nodes_changed()

    # ---- what the keeper wants

    def _step(self) -> None:
        self._hold()  # before the keeper may name the next leader: what is written behind that is of unknown outcome
        partition = self.partition
        end = partition.log.end.log_id
        self._do(
            self._keeper.step(
                committed=partition.leader.committed,
                end=end,
                end_durable=min(partition.log.local_durable, end),
                complete=not partition.batches.last_progress_due,
                now=self._clock.monotonic(),
            )
        )

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if self.ended:
                return
            match action:
                case Effective(nodes, recorded, min_isr, acked):
                    if self.partition.leader.set_isr(recorded, nodes, min_isr=min_isr, acked=acked):
                        self.partition.committed_moved()
                case Propose(meta, registered, "transfer"):
                    text = "%s/%d: node %016x has everything up to log id %d and is to lead epoch %d"
                    logger.info(
                        "handing_over", text, self.topic, self.key[1], meta.leader, self.log.end.log_id, meta.epoch
                    )
                    self._spawn(self._write(self._records.propose(meta, registered), fence=False))
                case Propose(meta, registered, change, why):
                    members = sorted(f"{node:016x}" for node in meta.isr)
                    told = _NODE.sub(lambda found: f"node {int(found[1]):016x}", why)  # as everybody else names them
                    event = change if change == "transfer_given_up" else f"isr_{change}"
                    logger.info(event, "%s/%d: %s; proposed: %s", self.topic, self.key[1], told, members)
                    self._spawn(self._write(self._records.propose(meta, registered), fence=False))
                case Fence(version):
                    self._spawn(self._write(self._records.fence(version), fence=True))
                case Reread():
                    self._reread()
                case StepDown(why):
                    self._step_down(self, why)

    async def _write(self, work: Coroutine[Any, Any, PartitionMeta], *, fence: bool) -> None:
        outcome: Outcome
        try:
            outcome = Applied(await work)
        except (Conflict, NotFound):
            outcome = ProposalRefused()
        except Unavailable as error:
            # Definitely not done; a fence that was not done has ended no doubt.
            logger.debug("metadata_unavailable", "%s/%d: %s", self.topic, self.key[1], error)
            outcome = Unknown() if fence else ProposalRefused()
        except NsqhaError as error:
            # Also StaleMetadata: the store that is not the right one, or an older state of it, may have done it.
            logger.info("outcome_unknown", "%s/%d: %s", self.topic, self.key[1], error)
            outcome = Unknown()
        except Exception as error:
            logger.error("metadata_failed", "%s/%d", self.topic, self.key[1], error=error)
            outcome = Unknown()
        if self.ended:
            return
        self._do(self._keeper.replied(outcome, self._clock.monotonic()))
        self._feed(self._keeper.meta)
        if not self.ended:
            self._hold()

    def _reread(self) -> None:
        """One read at a time: while the metadata are away each takes seconds, and one is asked for ten times a second.
        They would fill the memory, and whatever has to be read or written first when the metadata are back."""
        if not self._reading:
            self._reading = True
            self._spawn(self._read())

    async def _read(self) -> None:
        try:
            await self._read_once()
            while self._read_again and not self.ended:
                self._read_again = False
                await self._read_once()
        finally:
            self._reading = False

    async def _read_once(self) -> None:
        try:
            meta = await self._records.read()
        except NsqhaError as error:
            logger.debug("metadata_unavailable", "%s/%d: %s", self.topic, self.key[1], error)
            if self._promised > self.epoch and not self.ended:
                # Whoever promises has read a record of that epoch, so this one is over. Clients would wait here in
                # vain for as long as this node alone has lost the metadata.
                self._step_down(self, f"epoch {self._promised} has begun, and the metadata can not be read here")
            return  # else the keeper asks again
        if self.ended:
            return
        if meta is None:
            self._step_down(self, "the topic was deleted")
        else:
            self.refreshed(meta)

    def __repr__(self) -> str:
        return f"Leadership({self.topic}/{self.key[1]}, epoch {self.epoch})"
