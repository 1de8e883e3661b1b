"""The batches of this node's replicas that do not verify, until they are mended from other replicas.

    recovery, scrub, readers, pushes --found--> damaged --Repairer--> as it was: readers in front of it go on
                                                      '-- no other replica: LocalRepair of the leader --> made good

Owner of what is known to be damaged. A range is mended in place as soon as another replica has it, led or not. What
none has, the leader may have given up (LOST, see `mark_lost`) or trimmed: then a follower does as its leader did.

Invariants: what neither is committed nor has an entry behind it, and so may be cut yet, is not mended. A range counts
as damage as long as its own bytes are not here: what was given up is asked for again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nsqha.errors import LogCorrupt, NsqhaError, Poisoned
from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger
from nsqha.ranges import RangeSet
from nsqha.server.integrity.peer_repair import Repairer, lost_of

if TYPE_CHECKING:
    from nsqha.commitlog.corruption.verdict import RecoveryReport
    from nsqha.commitlog.log import PartitionLog
    from nsqha.election.model import NodeInfo, TopicRecord, Versioned
    from nsqha.server.integrity.suspect_logs import SuspectLogs
    from nsqha.server.partition.local_repair import LocalRepair
    from nsqha.server.partition.partition import Partition
    from nsqha.server.peers.api import Peers
    from nsqha.server.runtime.disk import DiskRounds

logger = Logger("integrity")


class DamagedRange(NamedTuple):
    """Batches that do not verify. Both offsets 0: not known, as the entries around do not verify either."""

    first: int  # log ids
    end: int
    first_offset: int
    end_offset: int


class RepairRuntime(Protocol):
    """What repairs need of the node."""

    @property
    def node(self) -> int:
        """Its uid."""

    @property
    def cluster_id(self) -> int:
        """The cluster it belongs to."""

    @property
    def disk(self) -> DiskRounds:
        """Where logs are read and written."""

    @property
    def peers(self) -> Peers:
        """The other nodes."""

    @property
    def nodes(self) -> Callable[[], Mapping[int, NodeInfo]]:
        """Those that are alive."""

    @property
    def spawn(self) -> Callable[[Coroutine[Any, Any, None]], object]:
        """Begins a task that nothing waits for."""

    @property
    def on_failure(self) -> Callable[[BaseException], None]:
        """The disk failed."""


class LedReplica(Protocol):
    """A replica that leads, as far as its repair goes."""

    @property
    def partition(self) -> Partition:
        """Its log, and the channels that read it."""


class FollowedLeader(Protocol):
    """The leader of a partition that is followed here."""

    leader: int  # its uid


class FollowedState(Protocol):
    """The channel state of a replica that follows, as far as its repair goes."""

    committed: int
    damage: tuple[int, int] | None  # log ids that are committed and can not be read here

    def mended(self) -> None:
        """Go on with what can be read now."""


class FollowedReplica(Protocol):
    """A replica that follows, as far as its repair goes."""

    epoch: int
    behind: bool  # it catches up

    @property
    def applier(self) -> FollowedState:
        """What waits for a repair."""

    @property
    def complete(self) -> bool:
        """Whether it has all that was committed."""

    @property
    def port(self) -> FollowedLeader | None:
        """None: there is no stream from a leader."""


class RepairableReplicas(Protocol):
    """The replicas of the node, as far as their repair goes."""

    @property
    def leading(self) -> Mapping[PartitionKey, LedReplica]:
        """Those that lead."""

    @property
    def followers(self) -> Mapping[PartitionKey, FollowedReplica]:
        """Those that follow."""

    def record_of(self, key: PartitionKey) -> Versioned[TopicRecord] | None:
        """The newest record seen of a partition that has a replica here."""

    def log_of(self, key: PartitionKey) -> PartitionLog | None:
        """The log of a replica; None: there is none here."""

    def committed_of(self, key: PartitionKey) -> int:
        """The high watermark of a replica; 0 if there is none here."""


class CorruptRanges:
    """What is damaged in the replicas of one node."""

    def __init__(
        self,
        runtime: RepairRuntime,
        replicas: RepairableReplicas,
        suspects: SuspectLogs,
        *,
        look_behind: Callable[[PartitionKey], Awaitable[None]],
    ) -> None:
        """`look_behind`: no replica has what a follower's channels wait for; they may be known from further on."""
        self.on_mended: Callable[[PartitionLog, int, int], None] = lambda log, first_log_id, end_log_id: None
        self._replicas = replicas
        self._suspects = suspects
        self._look_behind = look_behind
        self._node = runtime.node
        self._nodes = runtime.nodes
        self._disk = runtime.disk
        self._on_failure = runtime.on_failure
        self._bad: dict[PartitionKey, RangeSet] = {}  # log ids that are known not to verify
        self._repairer = Repairer(
            runtime.peers,
            cluster_id=runtime.cluster_id,
            log_of=replicas.log_of,
            others=self._others,
            mended=self.mended,
            missed=self._follow_leader,
            run=runtime.disk.run,
            on_failure=runtime.on_failure,
            spawn=runtime.spawn,
        )

    # ---- what is known

    def recovered(self, key: PartitionKey, report: RecoveryReport) -> RangeSet:
        """A log was opened; what does not verify of it."""
        bad = self._bad.get(key, RangeSet())
        for damage in report.damage:
            if not damage.readable and damage.first.log_id < damage.end.log_id:
                bad.add(damage.first.log_id, damage.end.log_id)
        if bad:
            self._bad[key] = bad
        return bad

    def found(self, key: PartitionKey, first: int, end: int) -> bool:
        """Batches of a replica of this node do not verify. Whether that is news."""
        if (log := self._replicas.log_of(key)) is None:
            return False
        first, end = log.repair.whole_damage(first, end)
        if first >= end:
            return False
        bad = self._bad.setdefault(key, RangeSet())
        news = bad.end_of_range(first) < end
        bad.add(first, end)
        if (own := self._own(key)) is not None:
            own.found(first, end)  # also what was looked at before: it was good since, perhaps
        else:
            self._see_to(key, log)
        return news

    def leads(self, key: PartitionKey, partition: Partition) -> None:
        """It is led here: what is found of it is mended by others, or, as long as there are none, by itself."""
        partition.on_damage = lambda first, end: self.found(key, first, end)
        if partition.local_repair is not None:
            partition.local_repair.alone = lambda: self._only_here(key)

    def known(self, key: PartitionKey) -> list[tuple[int, int]]:
        """The log ids that are known not to verify."""
        return list(self._bad.get(key, ()))

    def shown(self, key: PartitionKey) -> list[DamagedRange]:
        """The damaged ranges, for people, with what recovery found missing at the end."""
        if key not in self._bad and not self._suspects.left(key):
            return []
        if (log := self._replicas.log_of(key)) is None:
            return []
        missing = [(first, end) for first, end in self._suspects.left(key) if first >= log.end.log_id]
        return [damaged_range(log, first, end) for first, end in self.known(key) + missing]

    def keep_house(self) -> None:
        """About once a second: what could not be mended when it was found can be now, perhaps."""
        for key, bad in list(self._bad.items()):
            log = self._replicas.log_of(key)
            if log is None and self._replicas.record_of(key) is None:
                self.gone(key)
                self._suspects.gone(key)
            elif log is not None:
                bad.cut_below(log.start.log_id)
                bad.discard(log.end.log_id, 1 << 63)
                if bad:
                    self._see_to(key, log)
                else:
                    del self._bad[key]

    def nodes_changed(self) -> None:
        """A node came, perhaps: what no replica had may be there now."""
        self._repairer.ask_again()

    def gone(self, key: PartitionKey) -> None:
        """The replica is not here any more."""
        self._bad.pop(key, None)

    # ---- repair

    def _see_to(self, key: PartitionKey, log: PartitionLog) -> None:
        if (own := self._own(key)) is not None:
            for first, end in self._bad[key]:
                own.known(first, end)
            return
        if not self._others(key):
            return
        committed = self._replicas.committed_of(key)
        for first, end in self._bad[key]:
            # The entry behind says what was here, committed or not: without it no leader that knows could be elected.
            if end < log.end.log_id or end <= committed:
                self._repairer.damaged(key, first, end)

    def mended(self, key: PartitionKey, first: int, end: int) -> None:
        """[first, end) is as it was: readers that stopped in front of it continue."""
        if (bad := self._bad.get(key)) is not None:
            bad.discard(first, end)
        self._suspects.mended(key, first, end)
        if (log := self._replicas.log_of(key)) is not None:
            self.on_mended(log, first, end)
        if (leadership := self._replicas.leading.get(key)) is not None:
            for delivery in leadership.partition.deliveries.values():
                delivery.mended()
        if (follower := self._replicas.followers.get(key)) is not None:
            follower.applier.mended()
        self._suspects.look(key)

    def mended_alone(self, log: PartitionLog, first: int, end: int) -> None:
        """A log that no other node has reports that a range is mended."""
        self.mended((log.identity.topic_uid, log.identity.partition), first, end)

    async def ask_all(self, key: PartitionKey, log: PartitionLog) -> None:
        """Ask all other replicas, once, for all that is damaged."""
        for first, end in self.known(key):
            if self._others(key):
                await self._repairer.mend(key, log, first, end)

    async def mend_before_following(self, key: PartitionKey, leader: str, epoch: int) -> bool:
        """Mend what recovery found of a log that is about to follow, instead of cutting it off: behind the damage may
        be batches that its leader has lost. Whether there is nothing left to cut. Unavailable: not yet."""
        if self._suspects.unsound_from(key) is None or (log := self._replicas.log_of(key)) is None:
            return True
        for first, end in [(first, min(end, log.end.log_id)) for first, end in self._suspects.left(key)]:
            if first < end and not await self._repairer.mend(key, log, first, end):
                try:
                    await self._as_leader(key, log, leader, epoch, first, end)
                except LogCorrupt as error:
                    logger.info("not_mended", "%s: the leader has another log: %s", log.directory, error)
                    return False
                self._suspects.mended(key, first, end)
        if (follower := self._replicas.followers.get(key)) is not None:
            follower.applier.mended()
        return True

    async def _as_leader(
        self, key: PartitionKey, log: PartitionLog, leader: str, epoch: int, first: int, end: int
    ) -> None:
        await self._repairer.mend_as_leader(key, log, leader, epoch, first, end)
        lost = await self._lost_of(log, first, end)
        bad = self._bad.get(key)
        if bad is not None and self._replicas.log_of(key) is log:  # else it has gone, or begun again, meanwhile
            at = first
            for first_lost, end_lost in [*lost, (end, end)]:
                bad.discard(at, first_lost)
                at = end_lost

    async def _lost_of(self, log: PartitionLog, first: int, end: int) -> RangeSet:
        snapshot = log.snapshot()
        return await self._disk.read(lambda: lost_of(snapshot, first, end))

    async def _follow_leader(self, key: PartitionKey, first: int, end: int) -> None:
        """What no replica has, the leader may have given up: then it is given up here too, as this node may lead next.
        Also in a log that catches up: it may not find its place at the leader's before. Or retention has passed it:
        then a checkpoint behind it says where the channels are."""
        log, follower = self._replicas.log_of(key), self._replicas.followers.get(key)
        if log is None or follower is None or follower.port is None:
            return
        applier = follower.applier
        if not follower.behind and applier.damage is not None and applier.damage[1] <= applier.committed:
            await self._look_behind(key)
        try:
            if (await self._lost_of(log, first, end)).total() == end - first or (port := follower.port) is None:
                return
            if (leader := self._nodes().get(port.leader)) is None:
                return
            await self._as_leader(key, log, leader.grpc_address, follower.epoch, first, end)
        except Poisoned as error:
            self._on_failure(error)
        except (NsqhaError, ValueError, OSError) as error:
            logger.info("not_mended", "%s: %s", log.directory, error)
        else:
            applier.mended()

    def _only_here(self, key: PartitionKey) -> bool:
        """Whether no other node has a replica, or is to have one."""
        topic = self._replicas.record_of(key)
        if topic is None or key[1] not in topic.record.partitions:
            return False
        meta = topic.record.partitions[key[1]]
        return {*meta.replicas, *meta.isr} == {self._node}

    def _own(self, key: PartitionKey) -> LocalRepair | None:
        """What repairs a partition that is led here and that no other node has; None for any other."""
        leadership = self._replicas.leading.get(key)
        return leadership.partition.local_repair if leadership is not None and self._only_here(key) else None

    def _others(self, key: PartitionKey) -> list[str]:
        """Where the other replicas of a partition are, members of the ISR first."""
        topic, nodes = self._replicas.record_of(key), self._nodes()
        if topic is None:
            return []
        meta = topic.record.partitions[key[1]]
        order = [*meta.isr, *(node for node in meta.replicas if node not in meta.isr)]
        return [nodes[node].grpc_address for node in order if node != self._node and node in nodes]


def damaged_range(log: PartitionLog, first: int, end: int) -> DamagedRange:
    """The log ids [first, end) with their offsets, as far as these are known."""
    if first < log.start.log_id:  # retention went past it meanwhile
        return DamagedRange(first, end, 0, 0)
    try:
        first_offset = log.entry_before(first).end_offset if first <= log.end.log_id else log.end.offset
        end_offset = log.entry_before(end).end_offset if end <= log.end.log_id else 0
    except LogCorrupt:
        return DamagedRange(first, end, 0, 0)
    return DamagedRange(first, end, first_offset, end_offset)
