"""Checker 10: once everything is healed, everything is well within the time that was given, and nothing has leaked.

    below floor  a partition's ISR had fewer members than `min_isr`, and had had as many: what it acknowledges is on
                 too few disks
    not healed   a partition's ISR was not full within `settle` seconds after the healing
    memory       a node has much more resident memory at the end than at the beginning
    descriptors  a node has many more descriptors open than the files of its logs need
    did not bite a fault could not prove that it had any effect: the run says nothing of it

How long the ISR takes to be full after each single fault is a figure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable

from tests.jepsen.checkers.findings import quantile
from tests.jepsen.checkers.view import Checker, PartitionName
from tests.jepsen.history import (
    AdminEnded,
    AdminSent,
    AnyEvent,
    FaultBegun,
    FaultEnded,
    Healed,
    Led,
    Sample,
    SeekEnded,
    SeekSent,
)

# At the beginning, of which the middle one counts, as a process may have begun to serve only just now; and at the end,
# of which the lowest counts: a peak is no leak.
FLAT_SAMPLES = 10
START_UP_SAMPLES = 6
STARTING_DESCRIPTORS = 8  # a process with so few serves nobody yet; on a busy machine that may take a minute
CHANGES_A_MINUTE = 3
MEMORY_GROWTH_MAX = 1.5
MEMORY_FREE_BYTES = 96 << 20  # that a run may add: caches of messages and indexes have bounds of that size
DESCRIPTORS_FREE = 80  # clients come from nodes that are away
LOG_DESCRIPTORS = 10  # of a log that was not there at the beginning, and has five pairs of files open


class Liveness(Checker):
    name = "liveness"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._kinds: dict[int, str] = {}
        self._ended: list[tuple[float, str]] = []  # faults that wait for a full ISR
        self._rejoins: defaultdict[str, list[float]] = defaultdict(list)
        self._last: dict[PartitionName, tuple[float, Led]] = {}
        self._samples: defaultdict[str, list[Sample]] = defaultdict(list)
        self._began: set[PartitionName] = set()  # as many were in sync as it takes to acknowledge
        self._full_at: float | None = None
        self._elections = 0
        self._changes: defaultdict[PartitionName, list[float]] = defaultdict(list)  # when a leader was another one

    def begun(self, event: FaultBegun | SeekSent | AdminSent) -> None:
        if isinstance(event, FaultBegun):
            self._kinds[event.op] = event.fault

    def over(self, event: FaultEnded | SeekEnded | AdminEnded) -> None:
        if isinstance(event, FaultEnded):
            kind = self._kinds.pop(event.op)
            if event.result == "fail":
                self.findings.add("did not bite", f"{kind} healed at {event.t:.3f}: {event.proof}")
            self._ended.append((event.t, kind))

    def other(self, event: AnyEvent) -> None:
        if isinstance(event, Healed):
            self._full_at = None
        elif isinstance(event, Sample):
            self._samples[event.node].append(event)
            for name in [each for each in self._last if each[0] in event.deleted]:
                del self._last[name]
            for led in event.led:
                if len(led.isr) >= led.floor:
                    self._began.add((led.topic, led.partition))
                elif (led.topic, led.partition) in self._began:
                    text = f"{led.topic}/{led.partition}, epoch {led.epoch}: ISR {led.isr}, min_isr {led.floor}"
                    self.findings.add("below floor", f"{text} at {event.t:.3f}")
                before = self._last.get((led.topic, led.partition))
                if before is not None and before[1].epoch != led.epoch:
                    self._elections += 1
                    self._changes[led.topic, led.partition].append(event.t)
                self._last[led.topic, led.partition] = event.t, led
            self._look()

    def _look(self) -> None:
        """Whether all partitions were seen whole since the last faults ended."""
        if not self._last or not all(len(led.isr) >= led.replicas for _, led in self._last.values()):
            return
        seen = min(t for t, _ in self._last.values())  # the oldest that is known
        now = max(t for t, _ in self._last.values())
        for t, kind in [each for each in self._ended if each[0] <= seen]:
            self._rejoins[kind].append(now - t)
        self._ended = [each for each in self._ended if each[0] > seen]
        healed = self.view.healed
        if healed is not None and self._full_at is None and seen >= healed.t:
            self._full_at = now

    def end(self) -> None:
        for kind, values in self._rejoins.items():
            self.findings.times[f"{kind} to full ISR"] = values
            for name, q in (("p50", 0.5), ("worst", 1.0)):
                self.findings.figures[f"{kind} to full ISR {name} s"] = round(quantile(values, q), 2)
        self.findings.figures["changes of leader"] = self._elections
        if self._changes:
            most = max(most_within(times, 60.0) for times in self._changes.values())
            text = "a partition's leader changes at most three times a minute for each fault that stays"
            faults = max(1, len(self._kinds) + sum(map(len, self._rejoins.values())) + len(self._ended))
            bound = CHANGES_A_MINUTE * faults
            self.findings.promise(text, f"{bound} with {faults} faults", f"{most} at most", kept=most <= bound)
        if self.view.healed is not None and self._last:
            self._check_healed(self.view.healed)
        for node, samples in self._samples.items():
            self._check_flat(node, samples)

    def _check_healed(self, healed: Healed) -> None:
        late = self._full_at is None or self._full_at > healed.t + healed.settle
        seen = "never" if self._full_at is None else f"after {self._full_at - healed.t:.1f} s"
        if late:
            open_ = [
                f"{topic}/{number} {led.isr}"
                for (topic, number), (_, led) in self._last.items()
                if len(led.isr) < led.replicas
            ]
            self.findings.add("not healed", f"every ISR was full {seen}, healed at {healed.t:.3f}: {open_[:5]}")
        text = "every replica is in sync again after the healing"
        self.findings.promise(text, f"{healed.settle:.0f} s", seen, kept=not late)

    def _check_flat(self, node: str, samples: list[Sample]) -> None:
        lives = settled(samples)
        if len(lives) < 2 * FLAT_SAMPLES:
            return
        first, last = lives[:FLAT_SAMPLES], lives[-FLAT_SAMPLES:]
        begin, end = middle(each.rss for each in first), min(each.rss for each in last)
        if end > begin * MEMORY_GROWTH_MAX + MEMORY_FREE_BYTES:
            self.findings.add("memory", f"{node}: {begin >> 20} MiB at the beginning, {end >> 20} MiB at the end")
        few, many = middle(each.fds for each in first), min(each.fds for each in last)
        if many > few + DESCRIPTORS_FREE + LOG_DESCRIPTORS * len(self._last):
            self.findings.add("descriptors", f"{node}: {few} at the beginning, {many} at the end")
        self.findings.figures[f"{node} MiB, begin"] = begin >> 20
        self.findings.figures[f"{node} MiB, end"] = end >> 20
        self.findings.figures[f"{node} descriptors, begin"] = few
        self.findings.figures[f"{node} descriptors, end"] = many


def most_within(times: list[float], seconds: float) -> int:
    """The largest number of these, which are sorted, within so many seconds."""
    return max(n - bisect_left(times, t - seconds) + 1 for n, t in enumerate(times))


def middle(values: Iterable[int]) -> int:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def settled(samples: list[Sample]) -> list[Sample]:
    """Those of a process that has served for START_UP_SAMPLES: one that begins has little memory and few files."""
    kept, pid, seen = [], 0, 0
    for sample in samples:
        seen = seen + 1 if sample.pid == pid and sample.fds > STARTING_DESCRIPTORS else 0
        pid = sample.pid
        if sample.rss and seen >= START_UP_SAMPLES:
            kept.append(sample)
    return kept
