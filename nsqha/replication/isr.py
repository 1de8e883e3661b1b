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
- A replica that left for being late joins only after it has kept up for a while, longer each time.
- A node that says that it shuts down leaves the set before its stream ends, so that nothing waits for it. A leader that
  has a successor, or shuts down itself, names the next leader in the record as soon as everything it has is committed:
  the controller's election, written by the one who knows best that the successor lacks nothing (HandOver). A replica
  that says that it could not lead, as its log is damaged, is passed over. A successor that has not taken over for long
  is taken out of the record: no other node sends this one anything meanwhile, and there may be no controller.

Invariants, asserted after each call: at most one proposal may be in force; effective is a superset of recorded and of
that proposal; this node is recorded, and whom a proposal names as leader is a member of it; nothing is proposed below
the floor.

Times are monotonic seconds. A span in which nobody called (this process was stopped) counts for at most
`IsrLimits.unwatched_seconds`: the acks of that time may still wait in our own sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from nsqha.election.model import PartitionMeta
from nsqha.replication.leader import NOTHING

SAMPLES = 32  # of our own end, within `replica_timeout`: how exactly it is kept


@dataclass(frozen=True, slots=True)
class IsrLimits:
    """When a replica is late, gone, or good enough."""

    replica_timeout: float = 2.0  # a member that leaves something unacknowledged for so long leaves
    lost_seconds: float = 0.3  # ... or whose stream is lost and not back for so long
    join_lag: int = 16  # batches: a replica further from our end does not join (it would hold everybody up)
    settle_seconds: float = 1.0  # one that was removed keeps up for so long before it joins again; doubles each time
    settle_seconds_max: float = 30.0
    retry_seconds: float = 0.1  # between attempts to learn an outcome
    refused_seconds: float = 1.0  # a join that the store refused is not tried again before
    successor_seconds: float = 10.0  # a successor has so long to take over; a controller gives it up before
    unwatched_seconds: float = 0.25  # a pause between two calls counts for no more than this


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


@dataclass(slots=True)
class _Follower:
    """What one replica has told us in its present life, and since when it is good or bad."""

    since: float  # it is a member, or known
    gone_at: float | None = None  # its stream is lost since then; None: it is there
    registration: int = 0  # 0: never heard of
    log_uid: int = 0
    end: int = 0
    durable: int = 0
    near_since: float | None = None  # it has been within `join_lag` of our end since then
    removals: int = 0
    fit: bool = True  # to lead, as it says
    refused_at: float | None = None


@dataclass(slots=True)
class _Proposal:
    """A compare-and-set that may be in force, or be applied later."""

    meta: PartitionMeta  # `version` is the one it compares
    joiner: int | None  # or heir: whose registration it compares
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
        self.sync_always = sync_always  # may be changed at any time
        self.ended: str | None = None  # why
        self._epoch_start = epoch_start
        self._called_at = now
        self._time = now  # as watched: without the pauses of this process
        self._committed = 0
        self._end = epoch_start
        self._complete = True
        self._proposal: _Proposal | None = None
        self._awaiting = False  # a compare-and-set of ours has no reply yet
        self._unread = False  # the record is to be read before anything is proposed
        self._retry_at = now
        self._named_at = now  # since then the record names the successor that it does
        self._departing: frozenset[int] = frozenset()
        self._followers = {n: _Follower(now) for n in meta.isr if n != node}
        self._ends = deque([(now, epoch_start)])  # (time, our end then), back to `replica_timeout` ago
        self._told = self._counting()

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

    def end_of(self, node: int) -> int:
        """Where a follower's log ended when it was last heard; 0: not known. For figures."""
        follower = self._followers.get(node)
        return 0 if follower is None else follower.end

    def counted(self, node: int) -> tuple[int, int]:
        """The (end, durable) of a follower that count for a commit: zeros unless its log is one that counts.

        For `LeaderReplica.opened`, after the Opened was `heard`.
        """
        follower = self._followers.get(node)
        if follower is None or not self.countable(node, follower.log_uid):
            return NOTHING
        return follower.end, follower.durable

    @property
    def heir(self) -> int:
        """Who is to lead next: whom the record names or, if this node shuts down, the first that may lead; 0: none.
        Nobody waits for one that says that it could not."""
        named = self._followers.get(self.meta.successor)
        if self.meta.successor and (named is None or named.fit):
            return self.meta.successor
        if self.node not in self._departing:
            return 0
        members = [*self.meta.replicas, *(node for node in sorted(self.meta.isr) if node not in self.meta.replicas)]
        return next((node for node in members if self._may_lead(node)), 0)

    # ---- what happens

    def depart(self, nodes: frozenset[int], now: float) -> None:
        """These nodes, and no others, say that they shut down; this one may be among them."""
        self._watch(now)
        self._departing = nodes

    def heard(
        self, node: int, *, registration: int, log_uid: int, end: int, durable: int, now: float, fit: bool = True
    ) -> None:
        """An Opened or an Ack, of a member or not. The newest one is the truth, also when it says less. `fit`: it could
        lead; one whose log is damaged would not, and everybody would wait for the controller to notice.

        `end` must have been found to lie in a common past with our own log (`acceptance.same_past`); else give 0.
        """
        assert durable <= end, f"node {node} reports durable {durable} behind its end {end}"
        self._watch(now)
        follower = self._follower(node)
        if registration != follower.registration or log_uid != follower.log_uid:
            follower.near_since = None
            follower.refused_at = None
        follower.gone_at = None
        follower.registration = registration
        follower.log_uid = log_uid
        follower.end = end
        follower.durable = durable
        follower.fit = fit

    def lost(self, node: int, now: float) -> None:
        """Its stream ended, can not be opened, or it refuses."""
        self._watch(now)
        follower = self._follower(node)
        follower.near_since = None
        if follower.gone_at is None:
            follower.gone_at = self._time

    def step(self, *, committed: int, end: int, end_durable: int, now: float, complete: bool = True) -> list[Action]:
        """What to do now. `end` and `end_durable` are our own log's; `complete`: the next leader needs nothing more.

        To be called after a commit, an ack of a replica outside of the ISR, a loss or a reply, and every 100 ms.
        """
        self._watch(now)
        if self.ended is not None:
            return []
        assert committed <= end and end_durable <= end, f"committed {committed}, durable {end_durable}, end {end}"
        self._committed = committed
        self._end = end
        self._complete = complete
        self._sample()
        for follower in self._followers.values():
            self._observe(follower)
        if self._proposal is None and not self._awaiting and not self._unread:
            return self._checked(self._improve())
        return self._checked(self._insist())

    def replied(self, outcome: Outcome, now: float) -> list[Action]:
        """What became of the Propose or Fence that was last asked for (Reply)."""
        self._watch(now)
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
                        self._follower(proposal.joiner).refused_at = self._time
                if meta is not None and moved:
                    return self._checked(self._adopt(meta))
                self._unread = meta is None or proposal.doubted
                return self._checked([*self._changed(), *self._insist()])
            case Unknown():
                proposal.doubted = True
                return self._checked(self._insist())

    def refreshed(self, meta: PartitionMeta, now: float) -> list[Action]:
        """The record was read, or a watch brought it (Refresh). An old copy changes nothing."""
        self._watch(now)
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
            self._follower(node).removals += 1
            self._follower(node).near_since = None
        for node in set(meta.isr) - set(self.meta.isr):
            self._follower(node).since = self._time
        if meta.successor != self.meta.successor:
            self._named_at = self._time
        self.meta = meta
        self._proposal = None
        return self._changed()

    def _end_here(self, why: str) -> list[Action]:
        self.ended = why
        return [StepDown(why)]

    def _insist(self) -> list[Action]:
        """Ask again for what is needed to know where we are."""
        doubted = self._proposal is not None and self._proposal.doubted and not self._awaiting
        if not (doubted or self._unread) or self._time < self._retry_at:
            return []
        self._retry_at = self._time + self.limits.retry_seconds
        if self._unread:
            return [Reread()]
        self._awaiting = True
        return [Fence(self.meta.version)]

    def _counting(self) -> tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]], int]:
        recorded = frozenset(self.meta.isr.items())
        return recorded, recorded.union(self._proposal.meta.isr.items() if self._proposal else ()), self.meta.min_isr

    def _changed(self) -> list[Action]:
        """Effective, if who counts is not what was last told."""
        counting = self._counting()
        if counting == self._told:
            return []
        self._told = counting
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
        if heir and self._complete and self._committed == self._end and self._may_lead(heir):
            return self._transfer(heir)
        if self.meta.successor and self._time - self._named_at >= self.limits.successor_seconds:
            text = f"node {self.meta.successor} has not taken over for {self.limits.successor_seconds} s"
            return self._ask(replace(self.meta, successor=0), None, "transfer_given_up", text, {})
        joiner = next((node for node in self.meta.replicas if node not in isr and self._may_join(node)), None)
        if joiner is not None and len(isr) < floor:
            return self._propose("expand", joins=joiner, why=f"node {joiner} caught up; nothing commits without it")
        renewed = next((node for node in sorted(isr) if self._renewed(node) and self._may_join(node)), None)
        if renewed is not None:
            return self._propose("expand", joins=renewed, why=f"node {renewed} caught up with another log")
        leaver, why = self._leaver()
        if leaver is not None and len(isr) > floor:
            return self._propose("shrink", leaves=leaver, why=why)
        if leaver is not None and joiner is not None:
            return self._propose("swap", leaves=leaver, joins=joiner, why=f"{why}; node {joiner} caught up")
        if joiner is not None:
            return self._propose("expand", joins=joiner, why=f"node {joiner} caught up")
        return []

    def _propose(self, change: str, *, leaves: int | None = None, joins: int | None = None, why: str) -> list[Action]:
        """Shrink, Expand or Swap: widen the effective ISR first, then ask."""
        isr = {node: uid for node, uid in self.meta.isr.items() if node != leaves}
        registered: dict[int, int] = {}
        if joins is not None:
            isr[joins] = self._followers[joins].log_uid
            registered[joins] = self._followers[joins].registration
        return self._ask(replace(self.meta, isr=isr), joins, change, why, registered)

    def _ask(
        self, meta: PartitionMeta, joiner: int | None, change: str, why: str, registered: Mapping[int, int]
    ) -> list[Action]:
        self._proposal = _Proposal(meta, joiner)
        self._awaiting = True
        self._retry_at = self._time
        return [*self._changed(), Propose(meta, registered, change, why)]

    def _transfer(self, heir: int) -> list[Action]:
        """HandOver: it has all that we have, as that is committed. If we shut down, nobody is to wait for us."""
        isr = dict(self.meta.isr)
        if self.node in self._departing and len(isr) > self._floor:
            del isr[self.node]
        registration = self._followers[heir].registration
        meta = replace(self.meta, leader=heir, epoch=self.epoch + 1, registration=registration, successor=0, isr=isr)
        return self._ask(meta, heir, "transfer", f"node {heir} is to lead", {heir: registration})

    def _may_lead(self, node: int) -> bool:
        """A member that is there, with the log that the record names, fit, and did not just lose its registration."""
        follower = self._followers.get(node)
        if follower is None or node in self._departing or follower.gone_at is not None or not follower.registration:
            return False
        if not follower.fit:
            return False
        return self.countable(node, follower.log_uid) and node in self.meta.isr and not self._refused(follower)

    def _leaver(self) -> tuple[int | None, str]:
        """The member that should leave first, and why."""
        members = [node for node in sorted(self.meta.isr) if node != self.node]
        for node in members:
            if node in self._departing:
                return node, f"node {node} is leaving"
        for node in members:
            gone_at = self._followers[node].gone_at
            if gone_at is not None and self._time - gone_at >= self.limits.lost_seconds:
                return node, f"node {node} is gone"
        for node in members:
            if self._renewed(node):
                return node, f"node {node} has another log"
        for node in members:
            if self._late(self._followers[node]):
                return node, f"node {node} has left batches unacknowledged for {self.limits.replica_timeout} s"
        if self.meta.replicas and all(node in self.meta.isr for node in self.meta.replicas):
            for node in members:
                if node not in self.meta.replicas:
                    return node, f"node {node} is no replica any more"
        return None, ""

    def _late(self, follower: _Follower) -> bool:
        """It lacks something that was here `replica_timeout` ago, and was to have it all that time."""
        then = self._time - self.limits.replica_timeout
        return follower.since <= then and self._acked(follower) < self._ends[0][1]

    def _renewed(self, node: int) -> bool:
        """A member that has told us of another log than the one that the record names."""
        follower = self._followers.get(node)
        return follower is not None and follower.log_uid not in (0, self.meta.isr[node])

    def _may_join(self, node: int) -> bool:
        """It has what a member must have (CaughtUp in the spec), keeps up, and was not refused just now."""
        follower = self._followers.get(node)
        if follower is None or follower.gone_at is not None or not follower.registration or not follower.log_uid:
            return False
        if node in self._departing:
            return False
        acked = self._acked(follower)
        if acked < self._committed or acked < self._epoch_start or follower.near_since is None:
            return False
        if self._refused(follower):
            return False
        needed = len(self.meta.isr) < self.meta.min_isr
        return needed or self._time - follower.near_since >= self._settle_seconds(follower)

    def _refused(self, follower: _Follower) -> bool:
        return follower.refused_at is not None and self._time - follower.refused_at < self.limits.refused_seconds

    def _settle_seconds(self, follower: _Follower) -> float:
        if not follower.removals:
            return 0.0
        return min(self.limits.settle_seconds * 2.0 ** min(follower.removals - 1, 30), self.limits.settle_seconds_max)

    # ---- what is known of followers

    def _follower(self, node: int) -> _Follower:
        assert node != self.node, "a leader does not follow itself"
        follower = self._followers.get(node)
        if follower is None:
            follower = self._followers[node] = _Follower(self._time)
        return follower

    def _acked(self, follower: _Follower) -> int:
        return follower.durable if self.sync_always else follower.end

    def _sample(self) -> None:
        """Remember our end, so that the age of what is not acknowledged is known without a time per batch."""
        ends = self._ends
        if self._time - ends[-1][0] >= self.limits.replica_timeout / SAMPLES:
            ends.append((self._time, self._end))
        while len(ends) > 1 and ends[1][0] <= self._time - self.limits.replica_timeout:
            ends.popleft()

    def _observe(self, follower: _Follower) -> None:
        acked = self._acked(follower)
        if follower.gone_at is not None or self._end - acked > self.limits.join_lag:
            follower.near_since = None
        elif follower.near_since is None:
            follower.near_since = self._time

    def _watch(self, now: float) -> None:
        self._time += min(max(now - self._called_at, 0.0), self.limits.unwatched_seconds)
        self._called_at = now

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
