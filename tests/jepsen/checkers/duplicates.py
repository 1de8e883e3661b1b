"""Checker 3: which repeated deliveries had to be, and which not.

A message may come again as long as it is not finished, and after its FIN, if a crash or a change of leader forgot that
one. It may not (`backwards`) when the FIN is *settled*:

    one broker   the broker read the FIN and lives, or has served for `window` seconds after it
    a cluster    the broker that led the partition read the FIN, was still the leader with the same epoch when it OK'd
                 a publish to the partition that was sent COMMIT_SECONDS later: progress rides with batches

Samples say who led, so without them nothing of a cluster is settled. Of a cluster's unneeded duplicates 0.1 % are
borne, of an ordered channel's none. A seek that may have taken place after the FIN excuses everything. A leader that
stood still for longer than it takes to replace it delivers what timed out meanwhile until it hears of that: a figure of
its own.
"""

from __future__ import annotations

from collections import defaultdict, deque

from tests.jepsen.checkers.findings import quantile
from tests.jepsen.checkers.view import (
    Checker,
    Connection,
    Delivery,
    Fin,
    Key,
    Op,
    PartitionName,
    Req,
    Sent,
    where,
)
from tests.jepsen.history import (
    AdminEnded,
    AdminSent,
    AnyEvent,
    FaultBegun,
    FaultEnded,
    Message,
    Sample,
    SeekEnded,
    SeekSent,
    Started,
)

COMMIT_SECONDS = {"": 1.6, "always": 1.6, "interval": 3.6}  # by sync: progress may take a second, its disk round more
UNNEEDED_SHARE = 0.001
STILL = ("P2", "P7", "P8", "L1")  # kinds of faults under which a process stands still
WOKEN_SECONDS = 1.0  # until it knows that others lead
FORGOTTEN_SECONDS = 1.0


class Duplicates(Checker):
    name = "duplicates"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._unsettled: deque[tuple[float, Fin]] = deque()  # of one broker: confirmed in this life
        self._waiting: defaultdict[PartitionName, deque[tuple[float, str, Fin]]] = defaultdict(deque)
        self._served: dict[PartitionName, float] = {}  # when the last publish was sent that was OK'd
        self._unneeded = self._by_woken = 0
        self._still: dict[int, FaultBegun] = {}
        self._woken: dict[str, float] = {}  # node -> when it went on
        self._fault: FaultBegun | None = None  # the last one
        self._forgotten: defaultdict[str, list[float]] = defaultdict(list)  # by its kind: age of a FIN when it began

    # ---- what is settled

    def other(self, event: AnyEvent) -> None:
        if isinstance(event, Started):
            self._unsettled.clear()
        elif isinstance(event, Sample):
            for led in event.led:
                self._settle_led((led.topic, led.partition))

    def begun(self, event: FaultBegun | SeekSent | AdminSent) -> None:
        if isinstance(event, FaultBegun):
            self._fault = event
            if event.fault in STILL:
                self._still[event.op] = event

    def over(self, event: FaultEnded | SeekEnded | AdminEnded) -> None:
        if event.op in self._still:
            self._woken.update(dict.fromkeys(self._still.pop(event.op).victims, event.t))

    def _just_woken(self, by: Connection, t: float) -> bool:
        still = any(by.node in fault.victims for fault in self._still.values())
        return still or t <= self._woken.get(by.node, -WOKEN_SECONDS) + WOKEN_SECONDS

    def confirmed(self, act: Fin | Req, t: float, by: Connection) -> None:
        if not isinstance(act, Fin):
            return
        if self.view.cluster:
            self._waiting[act.partition].append((t, by.node, act))
        elif act.gen == self.view.gen:
            self._unsettled.append((t, act))

    def ended(self, op: Op) -> None:
        if op.result != "ok":
            return
        view = self.view
        if view.cluster:
            name = (op.event.topic, op.partition)
            self._served[name] = max(self._served.get(name, 0.0), op.event.t)
        elif op.event.gen == view.gen:
            while self._unsettled and self._unsettled[0][0] + view.run.window <= op.event.t:
                self._unsettled.popleft()[1].settled = True
                view.figures.settled += 1

    def _settle_led(self, name: PartitionName) -> None:
        """A sample says who leads: what was confirmed under the same leader, long enough ago, is settled."""
        waiting, reign = self._waiting[name], self.view.reigns[name]
        seconds = COMMIT_SECONDS.get(self.view.run.sync, float("inf"))
        served = self._served.get(name, 0.0)
        while waiting:
            t, node, fin = waiting[0]
            if fin.t < reign.since or node != reign.node:
                waiting.popleft()
            elif t + seconds <= served:
                waiting.popleft()
                fin.settled = True
                self.view.figures.settled += 1
            else:
                return

    # ---- what is repeated

    def delivered(self, t: float, by: Connection, key: Key, sent: Sent, message: Message, last: Delivery) -> None:
        figures, channel = self.view.figures, by.channel
        if last.count == 0:
            return
        if not last.fins:
            figures.redelivered += 1
            return
        figures.repeated += 1
        if channel.moving:
            return
        for fin in last.fins:
            if fin.t <= channel.moved_at:
                continue
            if fin.settled or (fin.confirmed and fin.gen == by.gen and not self.view.cluster):
                if self.view.cluster and not channel.ordered and self._just_woken(by, t):
                    self._by_woken += 1
                    return
                self._unneeded += 1
                text = where(t, by, key)
                if not self.view.cluster or channel.ordered:
                    self.findings.add("backwards", f"{text}: its FIN at {fin.t:.3f} in life {fin.gen} had taken effect")
                else:
                    self.findings.examples.setdefault("unneeded", []).append(f"{text}: its FIN at {fin.t:.3f}")
                return
            if channel.durable and fin.gen in self.view.killed_at:
                age = self.view.killed_at[fin.gen] - fin.t
                figures.oldest_forgotten = max(figures.oldest_forgotten, age)

        fault, newest = self._fault, last.fins[-1].t
        if fault is not None and channel.moved_at < newest <= fault.t:
            self._forgotten[fault.fault].append(fault.t - newest)

    def end(self) -> None:
        view, figures = self.view, self.findings.figures
        for kind, ages in self._forgotten.items():
            for name, q in (("p50", 0.5), ("p99", 0.99), ("worst", 1.0)):
                figures[f"{kind} forgotten FINs, age {name} s"] = round(quantile(ages, q), 3)
            if kind == "P1":
                text = "P1: a leader that dies takes FINs of the last 50 ms with it, of a second at most"
                seen = f"p50 {quantile(ages, 0.5):.2f} s, p99 {quantile(ages, 0.99):.2f} s of {len(ages)}"
                kept = quantile(ages, 0.99) <= FORGOTTEN_SECONDS
                self.findings.promise(text, f"{FORGOTTEN_SECONDS:.1f} s", seen, kept=kept)
        figures["again, unfinished"] = view.figures.redelivered
        figures["again after a FIN"] = view.figures.repeated
        figures["again after a settled FIN"] = self._unneeded
        figures["again by a leader that had stood still"] = self._by_woken
        if view.figures.settled:
            bound = UNNEEDED_SHARE if view.cluster else 0.0
            share = self._unneeded / view.figures.settled
            text = "what was finished and committed does not come again"
            seen = f"{self._unneeded} of {view.figures.settled} ({share:.2%})"
            self.findings.promise(text, f"at most {bound:.1%}" if bound else "0", seen, kept=share <= bound)
            if view.cluster and share > bound:
                self.findings.problems["unneeded"] = self._unneeded
        if not view.cluster and view.figures.kills:
            oldest, window = view.figures.oldest_forgotten, view.run.window
            text = "a FIN older than the window is not forgotten by a kill, if the broker served since"
            seen = f"the oldest forgotten was {oldest:.2f} s old"
            self.findings.promise(text, f"{window:.1f} s", seen, kept=not self.findings.problems["backwards"])
