"""What happened when: rates, faults, leaders, in-sync sets and memory over the time of a run, from its history."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from tests.jepsen.checkers.view import Checker, Connection, Delivery, Key, Op, PartitionName, Sent
from tests.jepsen.history import (
    AdminEnded,
    AdminSent,
    AnyEvent,
    FaultBegun,
    FaultEnded,
    Killed,
    Message,
    Sample,
    SeekEnded,
    SeekSent,
)


@dataclass
class FaultSpan:
    """`end` is None if it was not healed in this history."""

    fault: str
    what: str
    begin: float
    end: float | None = None
    proof: str = ""
    bit: bool = True


@dataclass(frozen=True)
class State:
    """Of a partition, from `t` on."""

    t: float
    leader: str
    epoch: int
    isr: int
    replicas: int


class Timeline(Checker):
    """Not a rule: it only takes down what the report draws."""

    name = "timeline"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.faults: list[FaultSpan] = []
        self.moves: list[tuple[float, str]] = []  # what operators did
        self.oks: Counter[int] = Counter()  # messages OK'd, by second
        self.unknown: Counter[int] = Counter()  # messages that were not OK'd
        self.deliveries: Counter[int] = Counter()
        self.repeated: Counter[int] = Counter()
        self.partitions: defaultdict[PartitionName, list[State]] = defaultdict(list)  # changes only
        self.memory: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)  # MiB
        self.descriptors: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self._open: dict[int, FaultSpan] = {}

    @property
    def seconds(self) -> float:
        return max(self.view.t, 1.0)

    def ended(self, op: Op) -> None:
        counter = self.oks if op.result == "ok" else self.unknown
        counter[int(op.ended)] += len(op.sent)

    def delivered(self, t: float, by: Connection, key: Key, sent: Sent, message: Message, last: Delivery) -> None:
        second = int(t)
        self.deliveries[second] += 1
        self.repeated[second] += last.count > 0

    def begun(self, event: FaultBegun | SeekSent | AdminSent) -> None:
        if isinstance(event, FaultBegun):
            span = self._open[event.op] = FaultSpan(event.fault, event.what, event.t)
            self.faults.append(span)
        elif isinstance(event, SeekSent):
            self.moves.append((event.t, f"seek {event.topic}/{event.channel} to {event.to}"))
        else:
            self.moves.append((event.t, f"{event.verb} {event.topic}/{event.channel} {event.what}".strip()))

    def over(self, event: FaultEnded | SeekEnded | AdminEnded) -> None:
        if isinstance(event, FaultEnded):
            span = self._open.pop(event.op)
            span.end, span.proof, span.bit = event.t, event.proof, event.result != "fail"

    def other(self, event: AnyEvent) -> None:
        if isinstance(event, Sample):
            self._sample(event)
        elif isinstance(event, Killed):
            self.faults.append(FaultSpan("kill", f"kill -9, {event.moment}", event.t, event.t))

    def _sample(self, event: Sample) -> None:
        if event.rss:
            self.memory[event.node].append((event.t, event.rss / (1 << 20)))
            self.descriptors[event.node].append((event.t, float(event.fds)))
        for led in event.led:
            state = State(event.t, event.node, led.epoch, len(led.isr), led.replicas)
            states = self.partitions[led.topic, led.partition]
            if not states or (states[-1].leader, states[-1].epoch, states[-1].isr) != (
                state.leader,
                state.epoch,
                state.isr,
            ):
                states.append(state)
