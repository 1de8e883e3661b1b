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

A partition that never had a leader (empty ISR), or none that ever acknowledged anything (`nothing_acked`), has nothing
to lose: the first replica that answers begins it.

Where a loss is possible, `Evidence` says what the logs prove. A log is trusted if it is the one that the record names
and its end was not cut: all that was acknowledged is in the log of every member of the ISR. Without one it is not known
where the log ended: replicas with equal ends may all be older copies. So a loss is excluded only by

- a chosen log that is trusted itself,
- a chosen log that ends with the very entry, by epoch, log id and chain, of a trusted log of a node that cannot lead,
- a record that says that nothing was ever acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from nsqha.election.model import NodeInfo, PartitionMeta, Sync

MAY_BE_LOST = "acknowledged messages may be lost"
NOTHING_LOST = "nothing that was acknowledged is lost"

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
    chain: int = 0  # of the entry before `end`; 0: an older build, which does not say

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


NameOf = Callable[[int], str]


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

    def name(self, uid: int) -> str:
        node = self.nodes.get(uid)
        return node.name if node is not None and node.name else f"{uid:016x}"

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
    if ballot.meta.electable is ballot.meta.replicas:
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
        why = "every member of the ISR that has its log is poisoned or corrupt; repair one"
        others = {uid for uid, r in heard.items() if r.log_uid and not r.poisoned and not r.corrupt}
        return Wait(_with_evidence(ballot, heard, others, why), operator=True)
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
    led = _led(ballot, uid, {uid: heard[uid].log_uid})
    return Elected(replace(led, nothing_acked=True))  # unless this replica alone is enough to acknowledge


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
    able = {uid for uid, r in heard.items() if r.log_uid and not r.poisoned and (alone or not r.corrupt)}
    if ballot.sync == "always" and not alone:
        why = f"{why}; sync=always leaves this decision to an operator (nsqha cluster elect --unclean)"
        return Wait(_with_evidence(ballot, heard, able, why), operator=True)
    if not able:
        return Wait(f"{why}, and every member is poisoned or corrupt; repair one", operator=True)
    uid = _highest(ballot, heard, able)
    return Elected(_led(ballot, uid, {uid: heard[uid].log_uid}), loss=_with_evidence(ballot, heard, able, why))


def _with_evidence(ballot: Ballot, heard: Mapping[int, ReplicaReport], able: set[int], why: str) -> str:
    """Add what is known about acknowledged messages if the best of `able` leads."""
    if not able:
        return why
    found = evidence(ballot.meta, heard, _highest(ballot, heard, able), ballot.name)
    return f"{why}; {found.text}"


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


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known if one replica leads with what it has."""

    proof: str  # why nothing acknowledged is missing; empty: that is not proven
    facts: tuple[str, ...]

    @property
    def text(self) -> str:
        verdict = f"{NOTHING_LOST}: {self.proof}" if self.proof else MAY_BE_LOST
        return f"{verdict}; {', '.join(self.facts)}"


def evidence(meta: PartitionMeta, heard: Mapping[int, ReplicaReport], chosen: int, name: NameOf) -> Evidence:
    """Compare the log of `chosen` with those of all replicas that answered."""
    return Evidence(_proof(meta, heard, chosen, name), tuple(_facts(meta, heard, chosen, name)))


def trusted(meta: PartitionMeta, uid: int, report: ReplicaReport) -> bool:
    """True if everything that was acknowledged is in this log, readable or not."""
    return report.log_uid != 0 and meta.isr.get(uid) == report.log_uid and not report.cut


def same_end(one: ReplicaReport, other: ReplicaReport) -> bool:
    """True if both logs end with the same entry, and so are the same."""
    return (one.reach, one.chain) == (other.reach, other.chain)


def _proof(meta: PartitionMeta, heard: Mapping[int, ReplicaReport], chosen: int, name: NameOf) -> str:
    report = heard[chosen]
    if meta.nothing_acked:
        return "the partition has never acknowledged anything"
    if report.corrupt:
        return ""
    if trusted(meta, chosen, report):
        return f"{name(chosen)} is in the ISR and has all of its log"
    if not report.chain:  # an older build, which does not say
        return ""
    for uid, other in sorted(heard.items()):
        if uid != chosen and trusted(meta, uid, other) and same_end(report, other):
            return f"the log of {name(uid)}, which has all of it, ends with the same entry"
    return ""


def _facts(meta: PartitionMeta, heard: Mapping[int, ReplicaReport], chosen: int, name: NameOf) -> list[str]:
    report = heard[chosen]
    facts = [f"{name(chosen)} has the log up to entry {report.end:,} (epoch {report.last_epoch}, {_chain(report)})"]
    for uid, other in sorted(heard.items()):
        if uid == chosen or not other.log_uid:
            continue
        if same_end(report, other):
            facts.append(f"{name(uid)} ends with the same entry")
        else:
            facts.append(f"{name(uid)} ends at entry {other.end:,} (epoch {other.last_epoch}, {_chain(other)})")
    committed = max(other.committed for other in heard.values())
    if committed > report.end:
        facts.append(f"entries up to {committed:,} were committed, and {name(chosen)} lacks the last of them")
    silent = sorted(uid for uid in meta.isr if uid not in heard)
    if silent:
        facts.append(f"no answer of {', '.join(map(name, silent))}")
    return facts


def _chain(report: ReplicaReport) -> str:
    return f"chain {report.chain:016x}" if report.chain else "chain not known"
