"""The choice of a partition's next leader: a pure function of its record and of its replicas' current reports.

    meta  +  {node: ReplicaReport}  ->  Elected(meta to compare-and-set) | Wait(why)

Safety does not rest on this choice alone: a leader needs the durable promises of the ISR, and the compare-and-set names
the version that was read and the registration of the chosen node. This module decides which node may be tried:

- a member of the ISR that answered live, in its present process life, with the log_uid that the ISR names;
- not one whose data directory is closed, nor one with a range that does not verify (unless it is the only replica);
- one whose recovery cut its end only if no member has more, after all have answered or CUT_WAIT_S;
- of those, the highest (last epoch, log end): not needed for safety, but it keeps what was written and not yet
  acknowledged. Then the order of the replicas; a node that is about to leave comes last.

When no member has its log_uid any more, the members' logs are all that is left. With sync=interval or none, and only
after every member answered, the highest (last epoch, end) is elected and the ISR becomes {it}: `loss` says so. With
sync=always an operator must decide, unless there is only one replica.

A partition that never had a leader (empty ISR) has nothing to lose: the first replica that answers begins it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from nsqha.election.model import NodeInfo, PartitionMeta, Sync

CUT_WAIT_S = 10.0
GATHER_S = 0.05
"""How long to wait for members that neither answer nor refuse, once one that may lead has answered."""
FIRST_WAIT_S = 1.0
"""How long the preferred replica of a new partition, if it is alive, may take to begin its log."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One node's report about its replica of one partition."""

    registration: int  # the process life that reported
    log_uid: int
    last_epoch: int = 0  # of the entry before `end`
    end: int = 0  # exclusive log id
    promise: int = 0
    committed: int = 0
    leading: bool = False
    poisoned: str = ""  # why its data directory is closed
    cut: bool = False  # recovery cut its end
    corrupt: bool = False  # has a range that does not verify
    damage: tuple[tuple[int, int, int, int], ...] = ()  # the first of those: log ids [0, 1), offsets [2, 3)
    damaged_ranges: int = 0
    led_by: int = 0  # the node whose stream for this replica is open; 0: none
    declined_epoch: int = 0  # the epoch that it was elected for last and could not lead
    declines: str = ""  # why it could not

    @property
    def reach(self) -> tuple[int, int]:
        """The log's extent, as elections compare it."""
        return self.last_epoch, self.end


@dataclass(frozen=True, slots=True)
class Elected:
    """The record to put by compare-and-set against the version it carries."""

    meta: PartitionMeta
    loss: str = ""  # not empty: acknowledged messages may be lost, and why

    @property
    def leader(self) -> int:
        return self.meta.leader


@dataclass(frozen=True, slots=True)
class Wait:
    """No node may be elected yet."""

    why: str
    until: float | None = None  # decide again then, even if nothing happens
    operator: bool = False  # only an operator can resolve this


@dataclass(frozen=True, slots=True)
class Ballot:
    """All inputs of one decision. Times are monotonic seconds."""

    meta: PartitionMeta
    sync: Sync
    reports: Mapping[int, ReplicaReport]  # live answers to requests sent after `since`
    failed: frozenset[int]  # refused the connection or did not answer in time
    nodes: Mapping[int, NodeInfo]  # registered now
    since: float
    now: float
    dead: frozenset[int] = frozenset()  # a dead old leader leaves the ISR if min_isr allows
    last: frozenset[int] = frozenset()  # chosen only if no other can be: leaving, or being emptied
    gather_s: float = GATHER_S

    def answered(self, members: Iterable[int]) -> dict[int, ReplicaReport]:
        """Reports of `members`, each from the process life that is registered."""
        found = {}
        for uid in members:
            report, node = self.reports.get(uid), self.nodes.get(uid)
            if report is not None and node is not None and report.registration == node.registration:
                found[uid] = report
        return found


def choose(ballot: Ballot) -> Elected | Wait:
    """Elect a leader, or say what is missing."""
    if not ballot.meta.isr:
        return _first(ballot)
    heard = ballot.answered(ballot.meta.isr)
    named = {uid for uid, report in heard.items() if report.log_uid and report.log_uid == ballot.meta.isr[uid]}
    fit = {uid for uid in named if _fit(ballot.meta, heard[uid])}
    whole = {uid for uid in fit if not heard[uid].cut}
    if whole:
        return _best(ballot, heard, whole)
    if fit:
        return _best_cut(ballot, heard, fit)
    missing = sorted(set(ballot.meta.isr) - set(heard))
    if missing:
        return unanswered(missing)
    if named:
        return Wait("every member of the ISR that has its log is poisoned or corrupt; repair one", operator=True)
    return _lost(ballot, heard, "no member of the ISR has the log that the record names")


def unanswered(missing: Iterable[int]) -> Wait:
    """What is decided while these members of the ISR have not answered, and none that can lead has."""
    return Wait(f"no member of the ISR that can lead has answered; waiting for {_names(missing)}")


def _fit(meta: PartitionMeta, report: ReplicaReport) -> bool:
    return not report.poisoned and (not report.corrupt or len(meta.replicas) == 1)


def _first(ballot: Ballot) -> Elected | Wait:
    heard = ballot.answered(ballot.meta.replicas)
    fit = {uid for uid, report in heard.items() if report.log_uid and not report.poisoned and not report.corrupt}
    if not fit:
        return Wait("no replica has begun a log yet")
    if wait := _gathering(ballot, ballot.meta.replicas, heard):
        return wait
    first, until = ballot.meta.replicas[0], ballot.since + FIRST_WAIT_S
    if first in ballot.nodes and first not in heard and first not in ballot.failed and ballot.now < until:
        return Wait(f"waiting for {_names([first])} to begin its log", until)
    uid = _highest(ballot, heard, fit)
    return Elected(_led(ballot, uid, {uid: heard[uid].log_uid}))


def _best(ballot: Ballot, heard: Mapping[int, ReplicaReport], able: set[int]) -> Elected | Wait:
    if wait := _gathering(ballot, ballot.meta.isr, heard):
        return wait
    uid = _highest(ballot, heard, able)
    return Elected(_led(ballot, uid, _isr_after(ballot, uid)))


def _best_cut(ballot: Ballot, heard: Mapping[int, ReplicaReport], able: set[int]) -> Elected | Wait:
    until = ballot.since + CUT_WAIT_S
    if len(heard) < len(ballot.meta.isr) and ballot.now < until:
        missing = _names(sorted(set(ballot.meta.isr) - set(heard)))
        return Wait(f"only replicas whose end was cut can lead; waiting for {missing}", until)
    uid = _highest(ballot, heard, able)
    more = [other for other, report in heard.items() if report.reach > heard[uid].reach]
    if not more:
        return Elected(_led(ballot, uid, _isr_after(ballot, uid)))
    why = f"the end of {uid:016x} was cut, and {_names(sorted(more))} has more but not the log that the record names"
    if len(heard) < len(ballot.meta.isr):
        return Wait(why)
    return _lost(ballot, heard, why)


def _lost(ballot: Ballot, heard: Mapping[int, ReplicaReport], why: str) -> Elected | Wait:
    """Decide when every member has answered, and none can vouch for everything that was acknowledged."""
    alone = len(ballot.meta.replicas) == 1
    if ballot.sync == "always" and not alone:
        return Wait(f"{why}; sync=always leaves this decision to an operator", operator=True)
    able = {uid for uid, r in heard.items() if r.log_uid and not r.poisoned and (alone or not r.corrupt)}
    if not able:
        return Wait(f"{why}, and every member is poisoned or corrupt; repair one", operator=True)
    uid = _highest(ballot, heard, able)
    return Elected(_led(ballot, uid, {uid: heard[uid].log_uid}), loss=why)


def _gathering(ballot: Ballot, members: Iterable[int], heard: Mapping[int, ReplicaReport]) -> Wait | None:
    """Wait a moment for members that have not answered, so that the most complete log is found."""
    missing = sorted(set(members) - set(heard) - ballot.failed)
    until = ballot.since + ballot.gather_s
    if missing and ballot.now < until:
        return Wait(f"waiting for {_names(missing)}", until)
    return None


def _highest(ballot: Ballot, heard: Mapping[int, ReplicaReport], able: set[int]) -> int:
    order = {uid: place for place, uid in enumerate(ballot.meta.replicas)}

    def rank(uid: int) -> tuple[bool, tuple[int, int], int, int]:
        return uid not in ballot.last, heard[uid].reach, -order.get(uid, len(order)), -uid

    return max(able, key=rank)


def _isr_after(ballot: Ballot, uid: int) -> dict[int, int]:
    """The ISR without the old leader, if that is dead and enough members are left; no other member leaves here."""
    meta = ballot.meta
    if meta.leader == uid or meta.leader not in ballot.dead or len(meta.isr) - 1 < meta.min_isr:
        return dict(meta.isr)
    return {member: log_uid for member, log_uid in meta.isr.items() if member != meta.leader}


def _led(ballot: Ballot, uid: int, isr: Mapping[int, int]) -> PartitionMeta:
    promised = [report.promise for report in ballot.reports.values()]
    epoch = max([ballot.meta.epoch, *promised]) + 1
    registration = ballot.nodes[uid].registration
    return replace(ballot.meta, leader=uid, epoch=epoch, registration=registration, isr=dict(isr), successor=0)


def _names(uids: Iterable[int]) -> str:
    return ", ".join(f"{uid:016x}" for uid in uids)
