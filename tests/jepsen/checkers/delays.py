"""What was deferred does not come before its time.

    early  a DPUB before its time, a REQ before its delay was over

Due times follow the wall clock as far as it is believed. A message that was deferred before a fault of clocks (C1 ..)
was over, and came after it had begun, may be early by `--max-clock-skew`, and by what brokers may be wrong about each
other's clocks. By twice as much under C3: the clock was behind when it was deferred, and ahead when it came.

A REQ has no reply: that it took effect is known when the broker has read what the connection sent after it, or not at
all, when the broker dies or another leader takes over.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.jepsen.checkers.view import Checker, Connection, Delivery, Fin, Key, Req, Sent, where
from tests.jepsen.history import AdminEnded, AdminSent, FaultBegun, FaultEnded, Message, SeekEnded, SeekSent

CLOCK_SLACK = 0.05  # between the broker's timers and a client's clock
MAX_CLOCK_SKEW = 10.0  # a broker's default
CLOCK_ERROR = 0.3  # of what a broker knows of another one's: half of the time that a good answer may take


@dataclass
class WrongClock:
    """A fault of a wall clock."""

    began: float
    slack: float  # how much earlier a message may come meanwhile
    end: float = float("inf")


class Delays(Checker):
    name = "delays"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._earliest = float("inf")
        self._latest = 0.0
        self._seen = 0
        self._clocks: dict[int, WrongClock] = {}

    def begun(self, event: FaultBegun | SeekSent | AdminSent) -> None:
        if isinstance(event, FaultBegun) and event.fault.startswith("C"):
            times = 2 if event.fault == "C3" else 1
            self._clocks[event.op] = WrongClock(event.t, times * (MAX_CLOCK_SKEW + CLOCK_ERROR))

    def over(self, event: FaultEnded | SeekEnded | AdminEnded) -> None:
        if event.op in self._clocks:
            self._clocks[event.op].end = event.t

    def _slack(self, deferred: float, came: float) -> float:
        """How early a message may come."""
        wrong = [clock.slack for clock in self._clocks.values() if deferred <= clock.end and clock.began <= came]
        return max(wrong, default=CLOCK_SLACK)

    def delivered(self, t: float, by: Connection, key: Key, sent: Sent, message: Message, last: Delivery) -> None:
        event, req = sent.op.event, last.req
        if event.delay:
            slack = self._slack(event.t, t)
            if not last.count and slack == CLOCK_SLACK:
                late = t - event.t - event.delay
                self._seen += 1
                self._earliest, self._latest = min(self._earliest, late), max(self._latest, late)
            if t < event.t + event.delay - slack:
                self.findings.add("early", f"{where(t, by, key)}: DPUB {event.delay:.3f} s at {event.t:.3f}")
        if req is not None and req.gen == by.gen and not self.view.cluster and t < req.due - CLOCK_SLACK:
            text = f"{where(t, by, key)}: requeued until {req.due:.3f}"
            if req.confirmed:
                self.findings.add("early", text)
            else:
                req.early = text

    def confirmed(self, act: Fin | Req, t: float, by: Connection) -> None:
        if isinstance(act, Req) and act.early is not None:
            self.findings.add("early", act.early)

    def end(self) -> None:
        if self._seen:
            text = "a deferred message does not come before its time"
            seen = f"of {self._seen} the earliest {self._earliest * 1000:+.0f} ms, the latest {self._latest:+.1f} s"
            self.findings.promise(text, f"-{CLOCK_SLACK * 1000:.0f} ms", seen, kept=not self.findings.problems["early"])
