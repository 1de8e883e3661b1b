"""Checker 9: for how long nothing is OK'd: per partition, per kind of fault, and as one publish at a time sees it.

    gap        the longest time without an OK in a partition while a fault lasts and AFTER_SECONDS on
    failover   the longest that a prober's publish took there, retries included, from its first attempt to the OK; not
               one that was held up before the fault began: a connection to a host that had no power, or no network,
               comes back as late as TCP tries again

Where there are probers only their partitions count, until their last OK: else nobody may have wanted anything.

docs/guarantees.md has bounds for some kinds; what is above one is told, and no problem: a busy machine adds to it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from itertools import pairwise

from tests.jepsen.checkers.findings import Promise, quantile
from tests.jepsen.checkers.view import Checker, Op, PartitionName
from tests.jepsen.history import AdminEnded, AdminSent, FaultBegun, FaultEnded, SeekEnded, SeekSent

AFTER_SECONDS = 3.0  # from the healing on: what it costs to come back belongs to the fault
HELD_UP_SECONDS = 0.5  # a publish that takes longer was held up
RETRY_SECONDS = 0.5  # attempts of a prober that follow one another so closely belong to one publish

# Seconds without an OK, by docs/guarantees.md ("Faults that stay"), and what that is about.
BOUNDS = {
    "N1": (1.2, "a leader that is cut off from all is replaced after 1.2 s"),
    "N4": (5.0, "a leader that other brokers do not reach is replaced after 3 to 5 s"),
    "N6": (5.0, "a leader that other brokers do not reach is replaced after 3 to 5 s"),
    "N8": (2.0, "loss costs latency; a follower that falls behind leaves after 2 s"),
    "P1": (1.2, "a leader that dies is replaced as soon as its connections end"),
    "P2": (1.2, "a leader that is frozen is replaced after 1.2 s"),
    "P3": (1.2, "a leader that is stopped hands over"),
    "E1": (0.5, "nothing waits for etcd while replicas answer"),
    "E2": (0.5, "nothing waits for etcd while replicas answer"),
    "E3": (0.5, "nothing waits for etcd while replicas answer"),
    "D4": (4.0, "a leader whose disk is full is replaced after 2 to 4 s"),
    "D5": (1.0, "a leader whose disk fails is replaced at once"),
    "D7": (8.0, "a leader whose disk takes 5 s for a round is replaced; publishes wait 8 s"),
    "C1": (0.5, "nothing waits for a clock that is wrong"),
}


class Availability(Checker):
    name = "availability"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._oks: defaultdict[tuple[str, int], list[tuple[float, Op]]] = defaultdict(list)
        self._probes: list[tuple[float, float]] = []  # first sent, OK'd
        self._trying: dict[PartitionName, tuple[float, float]] = {}  # first sent, last ended
        self._faults: dict[int, tuple[FaultBegun, float]] = {}  # with its end

    def begun(self, event: FaultBegun | SeekSent | AdminSent) -> None:
        if isinstance(event, FaultBegun):
            self._faults[event.op] = event, float("inf")

    def over(self, event: FaultEnded | SeekEnded | AdminEnded) -> None:
        if isinstance(event, FaultEnded):
            self._faults[event.op] = self._faults[event.op][0], event.t

    def ended(self, op: Op) -> None:
        if op.event.probe:
            self._probe(op)
        if op.result == "ok":
            self._oks[op.event.topic, op.event.process].append((op.ended, op))

    def _probe(self, op: Op) -> None:
        name = (op.event.topic, op.event.partition)
        first, last = self._trying.get(name, (op.event.t, op.event.t))
        if op.event.t > last + RETRY_SECONDS:
            first = op.event.t
        if op.result == "ok":
            self._probes.append((first, op.ended))
            self._trying.pop(name, None)
        else:
            self._trying[name] = first, op.ended

    def end(self) -> None:
        partitions: defaultdict[PartitionName, list[float]] = defaultdict(list)
        until: dict[PartitionName, float] = {}  # when a prober was OK'd for the last time
        for (topic, _), oks in self._oks.items():
            for ended, op in oks:
                if op.event.probe:
                    name = (topic, op.partition)
                    until[name] = max(until.get(name, 0.0), ended)
        for (topic, _), oks in self._oks.items():
            for ended, op in oks:
                name = (topic, op.partition)
                if not until or ended <= until.get(name, -1.0):
                    partitions[name].append(ended)
        for name, times in partitions.items():
            times.sort()
            self.findings.series[f"{name[0]}/{name[1]}"] = gaps_of(times)
        spans = [(fault, end) for fault, end in self._faults.values()]
        gaps: defaultdict[str, list[float]] = defaultdict(list)
        failovers: defaultdict[str, list[float]] = defaultdict(list)
        for fault, end in spans:
            end = min(end, self.view.t) + AFTER_SECONDS
            worst = max((longest(times, fault.t, end) for times in partitions.values()), default=0.0)
            gaps[fault.fault].append(worst)
            under_way = (b - a for a, b in self._probes if b > fault.t and fault.t - HELD_UP_SECONDS < a < end)
            failovers[fault.fault].append(max(under_way, default=0.0))
        for kind, values in gaps.items():
            self._tell(kind, "gap", values)
            self._tell(kind, "failover", failovers[kind])
            if kind in BOUNDS:
                bound, text = BOUNDS[kind]
                seen = f"p50 {quantile(values, 0.5):.2f} s, worst {max(values):.2f} s of {len(values)}"
                self.findings.promises.append(Promise(f"{kind}: {text}", f"{bound:.1f} s", seen, max(values) <= bound))

    def _tell(self, kind: str, what: str, values: list[float]) -> None:
        self.findings.times[f"{kind} {what}"] = values
        for name, q in (("p50", 0.5), ("p99", 0.99), ("worst", 1.0)):
            self.findings.figures[f"{kind} {what} {name} s"] = round(quantile(values, q), 3)


def longest(times: list[float], since: float, until: float) -> float:
    """The longest time without one of these, within a span, if there is one before and one behind; of times that are
    sorted. What ends the span counts as one: nobody knows what would have followed."""
    first, last = bisect_left(times, since), bisect_right(times, until)
    if first == 0:
        return 0.0  # nothing had been OK'd yet
    marks = [times[first - 1], *times[first:last]]
    marks.append(times[last] if last < len(times) else marks[-1])
    return max(b - max(a, since) for a, b in pairwise(marks))


def gaps_of(times: list[float], at_least: float = 0.25) -> list[tuple[float, float]]:
    """(begin, seconds) of the longer gaps, for the report."""
    return [(a, b - a) for a, b in pairwise(times) if b - a >= at_least]
