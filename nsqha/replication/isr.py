"""The leader's keeper of the in-sync replica set: who leaves, who joins, and who must be asked until that is certain.

One keeper per partition that this node leads, for one leader epoch. It sees what followers acknowledge and what the
metadata says, and answers with actions. The actions of the spec (docs/spec/Replication.tla) are its transitions:

    STEADY  --Shrink, Expand, Swap, HandOver: Propose-->  WAITING  --Reply: Applied, Refused--------->  STEADY
                                                WAITING  --Reply: Unknown-->  DOUBT  --a newer version-->  STEADY
    any     --Refresh, or Reply to HandOver: another leader or epoch in the record-->  ENDED

EtcdApply happens in the store, at any time after Propose, and the keeper may never hear of it:

- The *effective* ISR is the recorded one and every proposal that may be in force or may yet be applied. It is widened
  before a proposal leaves and narrowed only when the record's version has moved past the one that the proposal
  compares, or the proposal was definitely refused. Time decides what is proposed, never what is safe.
- After Unknown only a newer version ends the doubt. `Fence` asks for one: the same record written again.
- A replica is a node *and* a log_uid. An ack counts only under the log_uid that the record names, or the proposal for
  one that is not in the record. A member that lost its log comes with another log_uid: it leaves, or joins anew in its
  own place (Expand of a stale member), and counts for nothing until that is in force.
- Who joins is compared by registration in the same transaction, so what it acknowledged is not older than its life.
- Floor: no proposal leaves fewer than `min_isr` members, or fewer than there are where there are fewer already. At the
  floor a member that is gone can only be swapped.
- A replica that was removed joins only after it has kept up for a while: longer each time that it was late, up to half
  a minute; a few seconds at most if its stream was lost, which costs publishers less; one if it had announced it.
- A node that says that it shuts down leaves the set before its stream ends, so that nothing waits for it. A leader that
  has a successor, or shuts down itself, names the next leader in the record as soon as everything it has is committed:
  the controller's election, written by the one who knows best that the successor lacks nothing (HandOver). A replica
  that says that it could not lead, as its log is damaged, is passed over. A successor that has not taken over for long
  is taken out of the record: no other node sends this one anything meanwhile, and there may be no controller.

Invariants, asserted after each call: at most one proposal may be in force; effective is a superset of recorded and of
that proposal; this node is recorded, and whom a proposal names as leader is a member of it; nothing is proposed below
the floor.

What followers report goes to `followers`; `handover` knows who leads next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, TypeAlias

from nsqha.election.model import PartitionMeta
from nsqha.replication.followers import FollowerReports, IsrLimits, RemovalCause
from nsqha.replication.handover import LeaderHandOver
from nsqha.replication.leader import NOTHING

# ---- what the keeper wants done


@dataclass(frozen=True, slots=True)
class Effective:
    """Give this to `LeaderReplica.set_isr`, before anything else in the list is done."""

    nodes: frozenset[int]
    recorded: frozenset[int]
    min_isr: int
    acked: Mapping[int, tuple[int, int]]  # follower in `nodes` -> (end, durable) that counts so far


@dataclass(frozen=True, slots=True)
class Propose:
    """Put `meta` by compare-and-set on `meta.version`, if the nodes in `registered` still have those registrations.

    Answer with `replied`, once: a deadline is an `Unknown`.
    """

    meta: PartitionMeta
    registered: Mapping[int, int]
    change: str  # shrink, expand, swap, transfer, transfer_given_up
    why: str


@dataclass(frozen=True, slots=True)
class Fence:
    """Make the record newer than `version`: put `IsrKeeper.meta` as it is, by compare-and-set on `version`.

    Answer with `replied`, once; `ProposalRefused` here says that it is newer already.
    """

    version: int


@dataclass(frozen=True, slots=True)
class Reread:
    """Read the record, linearizably, and hand it to `refreshed`. A read that fails is asked for again by `step`."""


@dataclass(frozen=True, slots=True)
class StepDown:
    """This node does not lead any more. The keeper has ended."""

    why: str


Action: TypeAlias = Effective | Propose | Fence | Reread | StepDown


# ---- what became of a compare-and-set


@dataclass(frozen=True, slots=True)
class Applied:
    """It is in force; `meta` is the record with its new version."""

    meta: PartitionMeta


@dataclass(frozen=True, slots=True)
class ProposalRefused:
    """It was compared and can not be applied any more. `meta` is the record, if the store said it."""

    meta: PartitionMeta | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nobody knows; it may be applied at any later time."""


Outcome: TypeAlias = Applied | ProposalRefused | Unknown


class KeeperState(Enum):
    """Where the keeper is, see the module's drawing."""

    STEADY = "steady"  # nothing under way
    WAITING = "waiting"  # a proposal has no reply yet
    DOUBT = "doubt"  # its outcome is unknown: only a newer version tells
    ENDED = "ended"


class Leaver(NamedTuple):
    """A member that should leave."""

    node: int
    why: str
    cause: RemovalCause


@dataclass(slots=True)
class _Proposal:
    """A compare-and-set that may be in force, or be applied later."""

    meta: PartitionMeta  # `version` is the one it compares
    joiner: int | None  # or heir: whose registration it compares
    leaver: Leaver | None = None
    doubted: bool = False  # its reply was Unknown; what is waited for is a fence's


class IsrKeeper:
    """Keeper of one partition's ISR on the node that leads it."""

    def __init__(
        self,
        node: int,
        meta: PartitionMeta,
        *,
        epoch_start: int,
        now: float,
        limits: IsrLimits | None = None,
        sync_always: bool = True,
    ) -> None:
        """`epoch_start`: this node's log end when the epoch began. `sync_always`: an ack is the durable end."""
        assert meta.leader == node, f"node {node} keeps the ISR of a partition that {meta.leader} leads"
        assert node in meta.isr, f"node {node} leads without being in the ISR {dict(meta.isr)}"
        self.node = node
        self.epoch = meta.epoch
        self.meta = meta  # the newest record that was read or written
        self.limits = limits or IsrLimits()
        self.ended: str | None = None  # why
        self.followers = FollowerReports(
            node, meta.isr, end=epoch_start, now=now, limits=self.limits, sync_always=sync_always
        )
        self.handover = LeaderHandOver(node, self.followers)
        self._epoch_start = epoch_start
        self._committed = 0
        self._complete = True
        self._proposal: _Proposal | None = None
        self._awaiting = False  # a compare-and-set of ours has no reply yet
        self._unread = False  # the record is to be read before anything is proposed
        self._retry_at = now
        self._reported = self._counting()

    # ---- what others ask

    @property
    def effective(self) -> frozenset[int]:
        """Who must acknowledge: every set that may be in force."""
        return frozenset(self.meta.isr).union(() if self._proposal is None else self._proposal.meta.isr)

    @property
    def state(self) -> KeeperState:
        if self.ended is not None:
            return KeeperState.ENDED
        if self._proposal is None:
            return KeeperState.STEADY
        return KeeperState.DOUBT if self._proposal.doubted else KeeperState.WAITING

    def countable(self, node: int, log_uid: int) -> bool:
        """Whether an ack of `node` under `log_uid` counts for a commit."""
        if node in self.meta.isr:
            # A member that is about to join anew is not yet what the record names, and could not be elected.
            return log_uid != 0 and self.meta.isr[node] == log_uid
        return log_uid != 0 and self._proposal is not None and self._proposal.meta.isr.get(node) == log_uid

    def counted(self, node: int) -> tuple[int, int]:
        """The (end, durable) of a follower that count for a commit: zeros unless its log is one that counts.

        For `LeaderReplica.opened`, after the Opened was `heard`.
        """
        follower = self.followers.get(node)
        if follower is None or not self.countable(node, follower.log_uid):
            return NOTHING
        return follower.end, follower.durable

    @property
    def heir(self) -> int:
        """Who is to lead next; 0: none. Whom a proposal names may lead already, whatever became of it since."""
        named = self.node if self._proposal is None else self._proposal.meta.leader
        return self.handover.heir(self.meta) if named == self.node else named

    # ---- what happens

    def depart(self, nodes: frozenset[int], now: float, *, declining: frozenset[int] = frozenset()) -> None:
        """These nodes, and no others, say that they shut down, or that they should lead only where no other can; this
        one may be among them."""
        self.followers.watch(now)
        self.handover.departing, self.handover.declining = nodes, declining

    def step(self, *, committed: int, end: int, end_durable: int, now: float, complete: bool = True) -> list[Action]:
        """What to do now. `end` and `end_durable` are our own log's; `complete`: the next leader needs nothing more.

        To be called after a commit, an ack of a replica outside of the ISR, a loss or a reply, and every 100 ms unless
        the keeper is `quiet`.
        """
        self.followers.watch(now)
        if self.ended is not None:
            return []
        assert committed <= end and end_durable <= end, f"committed {committed}, durable {end_durable}, end {end}"
        self._committed = committed
        self._complete = complete
        self.followers.advanced(end)
        if self._proposal is None and not self._awaiting and not self._unread:
            return self._checked(self._improve())
        return self._checked(self._insist())

    @property
    def quiet(self) -> bool:
        """Whether `step` has nothing to do however late it is, until something is heard, read, written or replied."""
        if self.ended is not None:
            return True
        if self._proposal is not None or self._awaiting or self._unread:
            return False
        if self.meta.successor or self.handover.departing or not self.meta.isr.keys() <= set(self.meta.replicas):
            return False
        return all(self._settled(node) for node in self.meta.replicas if node != self.node)

    def replied(self, outcome: Outcome, now: float) -> list[Action]:
        """What became of the Propose or Fence that was last asked for (Reply)."""
        self.followers.watch(now)
        if self.ended is not None:
            return []
        assert self._awaiting, f"the outcome of nothing: {outcome}"
        self._awaiting = False
        proposal = self._proposal
        if proposal is None:
            # The record has moved past what was asked for; what it says has been read already, or is newer still.
            known = None if isinstance(outcome, Unknown) else outcome.meta
            return self._checked([] if known is None else self._adopt(known))
        match outcome:
            case Applied(meta):
                assert meta.version > proposal.meta.version, f"applied without a new version: {meta}"
                return self._checked(self._adopt(meta))
            case ProposalRefused(meta):
                moved = meta is not None and meta.version > proposal.meta.version
                if not proposal.doubted:  # refused is for ever
                    self._proposal = None
                    if proposal.joiner is not None and not moved:
                        self.followers.of(proposal.joiner).refused_at = self.followers.time
                if meta is not None and moved:
                    return self._checked(self._adopt(meta))
                self._unread = meta is None or proposal.doubted
                return self._checked([*self._changed(), *self._insist()])
            case Unknown():
                proposal.doubted = True
                return self._checked(self._insist())

    def refreshed(self, meta: PartitionMeta, now: float) -> list[Action]:
        """The record was read, or a watch brought it (Refresh). An old copy changes nothing."""
        self.followers.watch(now)
        return [] if self.ended is not None else self._checked(self._adopt(meta))

    # ---- the record

    def _adopt(self, meta: PartitionMeta) -> list[Action]:
        """The record as somebody read it. If it is newer than ours, no proposal of ours can be applied any more."""
        if meta.version < self.meta.version:
            return []
        self._unread = False
        if meta.version == self.meta.version:
            return self._insist()
        if meta.leader != self.node or meta.epoch != self.epoch:
            return self._end_here(f"node {meta.leader} leads in epoch {meta.epoch}, version {meta.version}")
        if self.node not in meta.isr:
            return self._end_here(f"the ISR of version {meta.version} is without its leader")
        for node in set(self.meta.isr) - set(meta.isr):
            leaver = None if self._proposal is None else self._proposal.leaver
            ours = leaver is not None and leaver.node == node  # else another node wrote it
            self.followers.removed(node, leaver.cause if leaver and ours else RemovalCause.ANNOUNCED)
        for node in set(meta.isr) - set(self.meta.isr):
            self.followers.joined(node)
        if meta.successor != self.meta.successor:
            self.handover.named()
        self.meta = meta
        self._proposal = None
        return self._changed()

    def _end_here(self, why: str) -> list[Action]:
        self.ended = why
        return [StepDown(why)]

    def _insist(self) -> list[Action]:
        """Ask again for what is needed to know where we are."""
        doubted = self._proposal is not None and self._proposal.doubted and not self._awaiting
        if not (doubted or self._unread) or self.followers.time < self._retry_at:
            return []
        self._retry_at = self.followers.time + self.limits.retry_seconds
        if self._unread:
            return [Reread()]
        self._awaiting = True
        return [Fence(self.meta.version)]

    def _counting(self) -> tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]], int]:
        recorded = frozenset(self.meta.isr.items())
        return recorded, recorded.union(self._proposal.meta.isr.items() if self._proposal else ()), self.meta.min_isr

    def _changed(self) -> list[Action]:
        """Effective, if who counts is not what was last reported."""
        counting = self._counting()
        if counting == self._reported:
            return []
        self._reported = counting
        effective = self.effective
        acked = {node: self.counted(node) for node in sorted(effective - {self.node})}
        return [Effective(effective, frozenset(self.meta.isr), self.meta.min_isr, acked)]

    # ---- what would be better

    @property
    def _floor(self) -> int:
        return self.meta.min_isr

    def _improve(self) -> list[Action]:
        """One proposal, if one is called for: the most urgent."""
        isr = self.meta.isr
        floor = self._floor
        heir = self.heir
        all_committed = self._complete and self._committed == self.followers.end
        if heir and all_committed and self.handover.may_lead(heir, self.meta):
            meta = self.handover.record(self.meta, heir)
            registered = {heir: meta.registration}
            return self._ask(meta, heir, "transfer", f"node {heir} is to lead", registered)
        if self.meta.successor and self.handover.overdue(self.limits.successor_seconds):
            text = f"node {self.meta.successor} has not taken over for {self.limits.successor_seconds} s"
            return self._ask(replace(self.meta, successor=0), None, "transfer_given_up", text, {})
        joiner = next((node for node in self.meta.replicas if node not in isr and self._may_join(node)), None)
        if joiner is not None and len(isr) < floor:
            return self._propose("expand", joins=joiner, why=f"node {joiner} caught up; nothing commits without it")
        renewed = next((node for node in sorted(isr) if self._renewed(node) and self._may_join(node)), None)
        if renewed is not None:
            return self._propose("expand", joins=renewed, why=f"node {renewed} caught up with another log")
        leaver = self._leaver()
        if leaver is not None and len(isr) > floor:
            return self._propose("shrink", leaves=leaver, why=leaver.why)
        if leaver is not None and joiner is not None:
            return self._propose("swap", leaves=leaver, joins=joiner, why=f"{leaver.why}; node {joiner} caught up")
        if joiner is not None:
            return self._propose("expand", joins=joiner, why=f"node {joiner} caught up")
        return []

    def _propose(
        self, change: str, *, leaves: Leaver | None = None, joins: int | None = None, why: str
    ) -> list[Action]:
        """Shrink, Expand or Swap: widen the effective ISR first, then ask."""
        isr = {node: uid for node, uid in self.meta.isr.items() if leaves is None or node != leaves.node}
        registered: dict[int, int] = {}
        if joins is not None:
            isr[joins] = self.followers.of(joins).log_uid
            registered[joins] = self.followers.of(joins).registration
        return self._ask(replace(self.meta, isr=isr), joins, change, why, registered, leaves)

    def _ask(
        self,
        meta: PartitionMeta,
        joiner: int | None,
        change: str,
        why: str,
        registered: Mapping[int, int],
        leaver: Leaver | None = None,
    ) -> list[Action]:
        self._proposal = _Proposal(meta, joiner, leaver)
        self._awaiting = True
        self._retry_at = self.followers.time
        return [*self._changed(), Propose(meta, registered, change, why)]

    def _leaver(self) -> Leaver | None:
        """The member that should leave first, and why."""
        members = [node for node in sorted(self.meta.isr) if node != self.node]
        for node in members:
            if node in self.handover.departing:
                return Leaver(node, f"node {node} is leaving", RemovalCause.ANNOUNCED)
        for node in members:
            gone_at = self.followers.of(node).gone_at
            if gone_at is not None and self.followers.time - gone_at >= self.limits.lost_seconds:
                return Leaver(node, f"node {node} is gone", RemovalCause.LOST)
        for node in members:
            if self._renewed(node):
                return Leaver(node, f"node {node} has another log", RemovalCause.LOST)
        for node in members:
            if self.followers.late(self.followers.of(node)):
                text = f"node {node} has left batches unacknowledged for {self.limits.replica_timeout} s"
                return Leaver(node, text, RemovalCause.LATE)
        if self.meta.replicas and all(node in self.meta.isr for node in self.meta.replicas):
            for node in members:
                if node not in self.meta.replicas:
                    return Leaver(node, f"node {node} is no replica any more", RemovalCause.ANNOUNCED)
        return None

    def _settled(self, node: int) -> bool:
        """A member that is here and has everything, or no member and not here."""
        follower = self.followers.get(node)
        if node not in self.meta.isr:
            return follower is None or follower.gone_at is not None or not follower.registration
        if follower is None or follower.gone_at is not None:
            return False
        return self.countable(node, follower.log_uid) and self.followers.acked(follower) >= self.followers.end

    def _renewed(self, node: int) -> bool:
        """A member that has reported another log than the one that the record names."""
        follower = self.followers.get(node)
        return follower is not None and follower.log_uid not in (0, self.meta.isr[node])

    def _may_join(self, node: int) -> bool:
        """It has what a member must have (CaughtUp in the spec), keeps up, and was not refused just now."""
        follower = self.followers.get(node)
        if follower is None or follower.gone_at is not None or not follower.registration or not follower.log_uid:
            return False
        if node in self.handover.departing:
            return False
        acked = self.followers.acked(follower)
        if acked < self._committed or acked < self._epoch_start or follower.near_since is None:
            return False
        if self.followers.refused(follower):
            return False
        needed = len(self.meta.isr) < self.meta.min_isr
        return needed or self.followers.time - follower.near_since >= follower.settle_seconds

    def _checked(self, actions: list[Action]) -> list[Action]:
        """The invariants of the module's head."""
        if self.ended is not None:
            return actions
        isr = self.meta.isr
        proposal = self._proposal
        assert self.node in isr, f"the leader {self.node} is not in the ISR {dict(isr)}"
        assert self.effective >= set(isr), f"{sorted(self.effective)} lacks members of {dict(isr)}"
        assert sum(isinstance(action, Propose | Fence) for action in actions) <= 1, f"two changes at once: {actions}"
        if proposal is not None:
            proposed = proposal.meta.isr
            assert proposal.meta.version == self.meta.version, f"{proposal} is outlived by {self.meta}"
            assert proposal.meta.leader in proposed, f"the leader would not be in the ISR: {dict(proposed)}"
            assert self.effective >= set(proposed), f"{sorted(self.effective)} lacks members of {dict(proposed)}"
            assert len(proposed) >= min(self.meta.min_isr, len(isr)), (
                f"below the floor: {dict(isr)} -> {dict(proposed)}"
            )
        return actions
