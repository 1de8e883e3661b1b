"""What is wrong with the replicas of this node: ends that recovery cut, batches that do not verify, their repair.

    recovery, scrub, readers, pushes --found--> damaged --Repairer--> as it was
                                                   '--an operator--> LOST: copied as such --Repairer--> as it was

Owner of what is known of a log's damage:

- `cut`: its end was cut when it was recovered, and has not come again: others that have more go first;
- `unsound_from`: from some log id on nothing can be vouched for: it does not lead, and follows by fetching that part
  anew. If everything that recovery found there is mended first, nobody leading, the log is what it was before the
  restart, and goes by its old name again;
- the ranges that do not verify. They are mended where they are as soon as anybody has them; readers that stopped in
  front of them hear of it. An operator gives them up (`give_up`): only then others may copy the log without them.

Invariants: what neither is committed nor has an entry behind it, and so may be cut yet, is not mended. Nothing is given
up before all others that are alive were asked for it, and what is given up is asked for again as long as it is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from nsqha.errors import LogCorrupt, NsqhaError, Poisoned
from nsqha.nsqlog import Log
from nsqha.ranges import RangeSet
from nsqha.server.repair import Repairer

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.commitlog.verdict import Report
    from nsqha.election.model import NodeInfo
    from nsqha.server.disk import DiskRounds
    from nsqha.server.peers import Peers
    from nsqha.server.replicas import Replicas

Key = tuple[int, int]  # topic uid, partition

ASK_SECONDS = 20.0  # that others are asked for what is about to be given up; they are asked again afterwards

log = Log("damage")


class Range(NamedTuple):
    """Batches that do not verify. Both offsets 0: not known, as the entries around do not verify either."""

    first: int  # log ids
    end: int
    first_offset: int
    end_offset: int


@dataclass(slots=True)
class Doubt:
    """A log that recovery found damaged."""

    bad: int  # the lowest log id that nothing can be vouched for
    name: int  # its log_uid before, if only this damage is held against it; else 0
    left: RangeSet = field(default_factory=RangeSet)  # what it found and is not mended


class ReplicaDamage:
    """The damage of one node's replicas."""

    def __init__(
        self,
        replicas: Replicas,
        *,
        node: int,
        cluster_id: int,
        peers: Peers,
        nodes: Callable[[], Mapping[int, NodeInfo]],
        disk: DiskRounds,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`nodes`: those that are alive; `on_failure`: the disk failed."""
        self.on_mended: Callable[[PartitionLog, int, int], None] = lambda log_, first_log_id, end_log_id: None
        self.on_whole: Callable[[Key, int], None] = lambda key, name: None
        """All that recovery found is mended, and nothing is held against the log's old name (0: that is gone)."""
        self._replicas = replicas
        self._node = node
        self._nodes = nodes
        self._disk = disk
        self._on_failure = on_failure
        self._cut: set[Key] = set()
        self._doubts: dict[Key, Doubt] = {}
        self._bad: dict[Key, RangeSet] = {}  # log ids that are known not to verify
        self._repairer = Repairer(
            peers,
            cluster_id=cluster_id,
            log_of=replicas.log_of,
            others=self._others,
            mended=self._mended,
            missed=self._follow_leader,
            run=disk.run,
            on_failure=on_failure,
            spawn=spawn,
        )

    # ---- doubts

    def recovered(self, key: Key, log_: PartitionLog, report: Report | None, name: int) -> None:
        """A log was opened; report None: it is new. `name`: its log_uid before, if that was good but for damage."""
        if report is not None and any(cut.why == "torn" for cut in report.cuts):
            self._cut.add(key)
        for damage in () if report is None else report.damage:
            if not damage.readable and damage.first.log_id < damage.end.log_id:
                self._bad.setdefault(key, RangeSet()).add(damage.first.log_id, damage.end.log_id)
        if report is not None and report.serve_end is not None:
            whole = log_.end.log_id >= report.watermark and not (report.unreadable or report.restored_anchors)
            self._doubts[key] = doubt = Doubt(report.serve_end, name if whole else 0)
            doubt.left = self._bad.get(key, RangeSet()).copy()
            if not whole:  # what is missing at the end comes from a leader only
                doubt.left.add(log_.end.log_id, max(report.watermark, log_.end.log_id + 1))

    def leads(self, key: Key) -> None:
        """What this replica has is the truth from now on."""
        self._cut.discard(key)

    def unsound_from(self, key: Key) -> int | None:
        """The log id from which on nothing can be vouched for; None: all can."""
        return doubt.bad if (doubt := self._doubts.get(key)) is not None else None

    def renewed(self, key: Key) -> None:
        """Nothing is left of what could not be vouched for: the leader gave it again, or the log was begun anew."""
        self._doubts.pop(key, None)

    def fetched_anew(self, key: Key) -> None:
        """What is doubted is cut off: the ISR counts on more than this log has, whatever is mended in it later."""
        if (doubt := self._doubts.get(key)) is not None:
            doubt.name = 0

    def doubts(self, key: Key) -> tuple[bool, bool]:
        """Of a replica: whether recovery cut its end, and whether it is so damaged that others go first."""
        follower = self._replicas.followers.get(key)
        if key in self._cut and follower is not None and follower.complete:
            self._cut.discard(key)  # what was cut has come again, as far as it counts
        return key in self._cut, key in self._doubts or (follower is not None and follower.damage is not None)

    # ---- ranges

    def known(self, key: Key) -> list[tuple[int, int]]:
        """The log ids that are known not to verify."""
        return list(self._bad.get(key, ()))

    def told(self, key: Key) -> list[Range]:
        """The same, for people, with what recovery found missing at the end."""
        log_, doubt = self._replicas.log_of(key), self._doubts.get(key)
        if log_ is None:
            return []
        ranges = self.known(key)
        ranges += [part for part in (doubt.left if doubt is not None else ()) if part[0] >= log_.end.log_id]
        return [_told(log_, first, end) for first, end in ranges]

    def found(self, key: Key, first: int, end: int) -> bool:
        """Batches of a replica of this node do not verify. Whether that is news."""
        if (log_ := self._replicas.log_of(key)) is None:
            return False
        first, end = log_.whole_damage(first, end)
        if first >= end:
            return False
        bad = self._bad.setdefault(key, RangeSet())
        news = bad.end_of_range(first) < end
        bad.add(first, end)
        self._see_to(key, log_)
        return news

    def keep_house(self) -> None:
        """About once a second: what could not be mended when it was found can be now, perhaps."""
        for key, bad in list(self._bad.items()):
            log_ = self._replicas.log_of(key)
            if log_ is None and self._replicas.record_of(key) is None:
                self.gone(key)
            elif log_ is not None:
                bad.cut_below(log_.start.log_id)
                bad.discard(log_.end.log_id, 1 << 63)
                if bad:
                    self._see_to(key, log_)
                else:
                    del self._bad[key]
        for key in list(self._doubts):
            self._whole(key)

    def gone(self, key: Key) -> None:
        """The replica is not here any more."""
        self._bad.pop(key, None)
        self._doubts.pop(key, None)
        self._cut.discard(key)

    def _see_to(self, key: Key, log_: PartitionLog) -> None:
        if not self._others(key):
            return
        committed = self._replicas.committed_of(key)
        for first, end in self._bad[key]:
            # The entry behind says what was here, committed or not: nobody may lead before, who could say that it is.
            if end < log_.end.log_id or end <= committed:
                self._repairer.damaged(key, first, end)

    def _mended(self, key: Key, first: int, end: int) -> None:
        if (bad := self._bad.get(key)) is not None:
            bad.discard(first, end)
        if (doubt := self._doubts.get(key)) is not None:
            doubt.left.discard(first, end)
        if (log_ := self._replicas.log_of(key)) is not None:
            self.on_mended(log_, first, end)
        if (leadership := self._replicas.leading.get(key)) is not None:
            for delivery in leadership.partition.deliveries.values():
                delivery.mended()
        if (follower := self._replicas.followers.get(key)) is not None:
            follower.mended()
        self._whole(key)

    async def mend_doubt(self, key: Key, leader: str, epoch: int) -> bool:
        """Mend what recovery found of a log that is about to follow, instead of cutting it off: behind the damage may
        be batches that its leader has lost. Whether there is nothing left to cut. Unavailable: not yet."""
        doubt, log_ = self._doubts.get(key), self._replicas.log_of(key)
        if doubt is None or log_ is None:
            return True
        for first, end in [(first, min(end, log_.end.log_id)) for first, end in doubt.left]:
            if first < end and not await self._repairer.mend(key, log_, first, end):
                try:
                    await self._as_leader(key, log_, leader, epoch, first, end)
                except LogCorrupt as error:
                    log.info("not_mended", "%s: the leader has another log: %s", log_.directory, error)
                    return False
                doubt.left.discard(first, end)
        if (follower := self._replicas.followers.get(key)) is not None:
            follower.mended()
        return True

    async def _as_leader(self, key: Key, log_: PartitionLog, leader: str, epoch: int, first: int, end: int) -> None:
        await self._repairer.mend_as_leader(key, log_, leader, epoch, first, end)
        bad = self._bad.get(key, RangeSet())  # the partition may have gone meanwhile
        for log_id in range(first, end):
            if not self._marked(log_, log_id):
                bad.discard(log_id, log_id + 1)

    async def _follow_leader(self, key: Key, first: int, end: int) -> None:
        """What nobody has, the leader may have given up: then it is given up here, too, should this node lead next. Or
        retention has gone past it: then a checkpoint behind it says where the channels are."""
        log_, follower = self._replicas.log_of(key), self._replicas.followers.get(key)
        if log_ is None or follower is None or follower.port is None or follower.behind:
            return
        if follower.damage is not None and follower.damage[1] <= follower.committed:
            await self._replicas.look_behind_damage(follower)
        leader = self._nodes().get(follower.port.leader)
        if leader is not None and not all(self._marked(log_, log_id) for log_id in range(first, end)):
            try:
                await self._as_leader(key, log_, leader.grpc_address, follower.epoch, first, end)
            except (OSError, Poisoned) as error:
                self._on_failure(error)
            except (NsqhaError, ValueError) as error:
                log.info("not_mended", "%s: %s", log_.directory, error)
            else:
                follower.mended()

    def _whole(self, key: Key) -> None:
        if (doubt := self._doubts.get(key)) is not None and not doubt.left:
            self.on_whole(key, doubt.name)

    # ---- giving up

    async def give_up(self, key: Key, *, seconds: float = ASK_SECONDS) -> list[Range]:
        """An operator's decision: what no other replica gives now is LOST, and the log may be copied and led without.

        `seconds`: they are asked so long; what comes later is written all the same. What was given up by this. Safe to
        repeat. Poisoned: the disk failed."""
        if (log_ := self._replicas.log_of(key)) is None:
            return []
        before = {n for first, end in self.known(key) for n in range(first, end) if self._marked(log_, n)}
        try:
            async with asyncio.timeout(seconds):
                for first, end in self.known(key):
                    if self._others(key):
                        await self._repairer.mend(key, log_, first, end)
        except TimeoutError:
            log.warning("asked_in_vain", "%s: whoever else has a replica takes too long", log_.directory)
        given_up = []
        for first, end in self.known(key):
            if self._replicas.log_of(key) is not log_ or not log_.start.log_id <= first < end <= log_.end.log_id:
                continue  # begun anew or cut meanwhile: nothing is known of that
            try:
                marked = await self._disk.run(log_.giving_up(first, end))
            except (OSError, Poisoned) as error:
                self._on_failure(error)
                raise Poisoned(str(error)) from error
            whole = RangeSet([(first, end)])
            for part in marked:
                whole.discard(*log_.whole_damage(*part))
                given_up += [part] if not before.issuperset(range(*part)) else []
            for part in list(whole):
                self._mended(key, *part)  # their own frames proved the entries, or memory had them
        told = [_told(log_, first, end) for first, end in given_up]
        for lost in told:
            text = "%s: log ids [%d, %d), offsets [%d, %d) are given up: replicas are made without them"
            log.error("given_up", text, log_.directory, *lost)
        if (doubt := self._doubts.pop(key, None)) is not None:
            log.error("sound_again", "%s: what recovery doubted from log id %d on counts", log_.directory, doubt.bad)
            log_.doubtful_from = None
        return told

    @staticmethod
    def _marked(log_: PartitionLog, log_id: int) -> bool:
        try:
            return log_.start.log_id <= log_id < log_.end.log_id and log_.entry(log_id).lost
        except LogCorrupt:
            return False

    def _others(self, key: Key) -> list[str]:
        """Where the other replicas of a partition are, members of the ISR first."""
        topic, nodes = self._replicas.record_of(key), self._nodes()
        if topic is None:
            return []
        meta = topic.record.partitions[key[1]]
        order = [*meta.isr, *(node for node in meta.replicas if node not in meta.isr)]
        return [nodes[node].grpc_address for node in order if node != self._node and node in nodes]


def _told(log_: PartitionLog, first: int, end: int) -> Range:
    try:
        first_offset = log_.entry_before(first).end_offset if first <= log_.end.log_id else log_.end.offset
        end_offset = log_.entry_before(end).end_offset if end <= log_.end.log_id else 0
    except LogCorrupt:
        return Range(first, end, 0, 0)
    return Range(first, end, first_offset, end_offset)
