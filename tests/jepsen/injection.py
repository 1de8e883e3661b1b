"""Faults that are there now, and what each of them cost: the hands of every schedule.

    fault = injector.inject(kind)       # None: not at the moment
    injector.heal(fault)                # healed, and its proof is in the history
    injector.heal_all(); injector.settle()

Measured, when nothing else was broken meanwhile:

    election   from the injection to the record that names another leader
    gap        the longest time in which no client had an OK, until every ISR was full again
    publish    the longest that one publish to another node took, by a client that has one under way at a time
    recovery   from the healing until everybody serves and every ISR is full
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Protocol

from nsqha.errors import Unavailable
from tests.integration.cluster import pause
from tests.jepsen.deployment import Deployment, NotNow
from tests.jepsen.faults.fault import DidNotBite, FaultKind, Injected
from tests.jepsen.logs import TOLD_AFTER, tell

LOOK_SECONDS = 0.01
HEAL_SECONDS = 60.0  # for what has been put off
AGAIN_SECONDS = 0.5
SETTLE_SECONDS = 60.0  # after several faults at a time


class Target(Protocol):
    """What is broken: a deployment, or a node that is alone."""

    broken: set[str]

    @property
    def nodes(self) -> Sequence[Any]: ...
    def leader_of(self) -> Any: ...
    def epoch_and_isr(self) -> tuple[int, int]: ...
    def settle(self, seconds: float) -> float: ...


class Clients(Protocol):
    """What is asked of the load."""

    avoid: int | Collection[int] | None

    @property
    def oks(self) -> Sequence[float]: ...
    def now(self) -> float: ...
    def worst_probe(self, since: float, until: float) -> float: ...
    def fault_begun(self, fault: str, what: str, victims: Iterable[str]) -> int: ...
    def fault_ended(self, op: int, proof: str, *, bit: bool) -> None: ...
    def healed(self, settle: float) -> None: ...


@dataclass
class ActiveFault:
    number: int
    kind: FaultKind
    injected: Injected
    began: float  # to be injected, of the load's clock
    there: float  # all of it
    until: float  # when it is to be healed
    healed: bool = False  # its proof is left

    @property
    def earliest(self) -> float:
        """Before that it could not bite."""
        return self.there + self.kind.seconds[0]


@dataclass
class FaultFigures:
    """Seconds, by the id of the fault."""

    counts: Counter[str] = field(default_factory=Counter)
    elections: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    gaps: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    publishes: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    recoveries: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    invalid: list[str] = field(default_factory=list)  # faults that did not bite

    def __str__(self) -> str:
        lines = [f"faults {self.counts.total()}: " + ", ".join(f"{name} {n}" for name, n in self.counts.most_common())]
        tables = {
            "election": self.elections,
            "gap": self.gaps,
            "publish": self.publishes,
            "recovery": self.recoveries,
        }
        for name in sorted(self.counts):
            lines += [f"{f'{name}, {what}':24s} {quantiles(t[name])}" for what, t in tables.items() if name in t]
        return "\n".join(lines)


def quantiles(values: Sequence[float]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)

    def at(q: float) -> str:
        return f"{ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1000:.0f} ms"

    return f"p50 {at(0.5)}, p90 {at(0.9)}, p99 {at(0.99)}, worst {at(1.0)}, of {len(ordered)}"


def longest_gap(oks: Sequence[float], since: float, until: float) -> tuple[float, float]:
    """The longest time without an OK within a span, and when it began."""
    marks = [since, *sorted(t for t in oks if since < t < until), until]
    return max((b - a, a) for a, b in pairwise(marks))


class Injector:
    """Owner of what is broken in a deployment."""

    def __init__(
        self, deployment: Target, rng: random.Random, clients: Clients, figures: FaultFigures
    ) -> None:
        """`figures`: of all loads of a run."""
        self.active: list[ActiveFault] = []
        self.deployment = deployment
        self.rng = rng
        self.clients = clients
        self.figures = figures
        self.gaps = True  # whether there is one leader, whose silence is everybody's
        self.tell_above = float("inf")  # seconds of a gap or publish beyond which logs are printed

    def say(self, text: str) -> None:
        print(f"{self.clients.now():8.2f} {text}", flush=True)

    def inject(self, kind: FaultKind) -> ActiveFault | None:
        """It is there when this returns. None: nobody is left whom it could hit."""
        if self.active and (kind.alone or any(fault.kind.alone for fault in self.active)):
            return None
        if isinstance(self.deployment, Deployment):
            self.deployment.revive()  # or who ended for want of etcd is hit in vain
        began = self.clients.now()
        try:
            injected = kind.inject(self.deployment, self.rng)
        except NotNow:
            return None
        there = self.clients.now()
        until = there + self.rng.uniform(*kind.seconds)
        number = self.clients.fault_begun(kind.family, injected.what, sorted(injected.victims))
        fault = ActiveFault(number, kind, injected, began, there, until)
        self.active.append(fault)
        self.deployment.broken |= injected.victims
        self.figures.counts[kind.id] += 1
        self.say(f"inject {kind.id}: {injected.what}")
        return fault

    def heal(self, fault: ActiveFault) -> bool:
        """Healed, with its proof; one that did not bite makes the run invalid, which goes on. False: put off, as what
        it needs is away by another fault, or will be there in a moment."""
        try:
            proof, bit = self._healed(fault), True
        except DidNotBite as error:
            proof, bit = str(error), False
        except (NotNow, Unavailable) as error:
            self.say(f"later  {fault.kind.id}: {error}")
            return False
        self.active.remove(fault)
        self.deployment.broken = set().union(*(other.injected.victims for other in self.active))
        if not bit:
            self.figures.invalid.append(f"{fault.kind.id} ({fault.injected.what}): {proof}")
        self.say(f"heal   {fault.kind.id}: {'' if bit else 'DID NOT BITE: '}{proof}")
        self.clients.fault_ended(fault.number, proof, bit=bit)
        return True

    def _healed(self, fault: ActiveFault) -> str:
        """Its proof. A healing that is put off is begun anew, one that is done is not."""
        if not fault.healed:
            fault.injected.heal()
            fault.healed = True
        return fault.injected.proof()

    def heal_surely(self, fault: ActiveFault) -> None:
        """Tried again for a while, and others that are there are healed before."""
        until = time.monotonic() + HEAL_SECONDS
        while not self.heal(fault):
            assert time.monotonic() < until, f"{fault.kind.id} can not be healed"
            pause(AGAIN_SECONDS)
            for other in [each for each in self.active if each is not fault]:
                pause(max(0.0, other.earliest - self.clients.now()))  # or it could not bite
                self.heal(other)

    def heal_all(self) -> None:
        while self.active:
            fault = self.active[0]
            pause(max(0.0, fault.earliest - self.clients.now()))  # or it could not bite
            self.heal_surely(fault)

    def heal_whatever(self) -> None:
        """At the end of a run that failed: threads of faults end, the stopped wake up; what does not heal stays."""
        for fault in self.active:
            with contextlib.suppress(Exception):
                fault.injected.heal()
        self.active.clear()

    def settle(self, seconds: float = SETTLE_SECONDS) -> float:
        """Everything is well again; how long it took."""
        assert not self.active
        took = self.deployment.settle(seconds)
        if isinstance(self.deployment, Deployment):
            self.deployment.check_states()
        return took

    def once(self, kind: FaultKind, seconds: float | None = None) -> bool:
        """One fault from a cluster that is well to one that is well again, measured. False: not at the moment."""
        deployment, clients, figures = self.deployment, self.clients, self.figures
        epoch, _ = deployment.epoch_and_isr()
        leader = deployment.leader_of()
        clients.avoid = deployment.nodes.index(leader)
        clock, wall = time.monotonic(), datetime.now(UTC)
        fault = self.inject(kind)
        if fault is None:
            clients.avoid = None
            return False
        hits_leader = leader.name in fault.injected.victims
        until = fault.until if seconds is None else fault.there + seconds
        while clients.now() < until:
            pause(LOOK_SECONDS)
            if hits_leader and deployment.epoch_and_isr()[0] > epoch:
                figures.elections[kind.id].append(time.monotonic() - clock)
                hits_leader = False
        clients.avoid = None
        self.heal_surely(fault)
        figures.recoveries[kind.id].append(self.settle(kind.settle))
        end = clients.now()
        gap, since = longest_gap(clients.oks, fault.began, end)
        if self.gaps:
            figures.gaps[kind.id].append(gap)
        worst = clients.worst_probe(fault.began, end) if leader.name in fault.injected.victims else 0.0
        if worst:
            figures.publishes[kind.id].append(worst)
        recovery = figures.recoveries[kind.id][-1]
        where = f"from {since - fault.began:.2f} s on"
        steps = deployment.settled if isinstance(deployment, Deployment) else {}
        told = ", ".join(f"{what} {after:.2f}" for what, after in steps.items())
        publish = f"one publish {worst:.2f} s, " if worst else ""
        self.say(f"well   {kind.id}: gap {gap:.2f} s {where}, {publish}recovered in {recovery:.2f} s ({told})")
        if max(gap, worst) > self.tell_above and isinstance(deployment, Deployment):
            tell(deployment, wall, max(TOLD_AFTER, end - fault.began))
        return True
