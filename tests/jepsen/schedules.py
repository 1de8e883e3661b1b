"""When faults come: all schedules act by an `Injector`, and know no single fault.

    Scripted    one after the other, each from a cluster that is well to one that is well again: what each costs is
                measured
    Swarm       rounds. Each draws which kinds it has at all (what hides behind one kind shows when that kind is off),
                how many at a time, and how fast they come; they come and go in any order. A quarter of the rounds is
                quiet
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from typing import Protocol

from tests.integration.cluster import pause
from tests.jepsen.faults.fault import FaultKind
from tests.jepsen.injection import Injector

QUIET_SECONDS = (0.4, 1.1)  # between two faults of a script
BETWEEN_SECONDS = (0.05, 4.0)  # two faults, or a fault and a healing, of a swarm
ROUND_SECONDS = 25.0
QUIET = 0.25  # of the rounds of a swarm
PATIENCE = 200  # draws in a row that nobody could be hit by


class Schedule(Protocol):
    def run(self, injector: Injector) -> None:
        """Until it is over; everything is healed and well then."""


@dataclass
class Scripted:
    """`most` faults, or for so many seconds. The kinds come in turn, or are drawn by their weights."""

    kinds: Sequence[FaultKind]
    most: int | None = None
    seconds: float = float("inf")
    drawn: bool = False

    def run(self, injector: Injector) -> None:
        until = time.monotonic() + self.seconds
        done = tried = 0
        for kind in self._turns(injector.rng):
            if time.monotonic() >= until or done == self.most:
                return
            pause(injector.rng.uniform(*QUIET_SECONDS))
            if injector.once(kind):
                done, tried = done + 1, 0
            else:
                tried += 1
                assert tried < PATIENCE, f"{kind.id} can not be had"

    def _turns(self, rng: random.Random) -> Iterator[FaultKind]:
        if not self.drawn:
            return cycle(self.kinds)
        weights = [kind.weight for kind in self.kinds]
        return (rng.choices(self.kinds, weights)[0] for _ in count())


@dataclass
class Swarm:
    """One round."""

    kinds: Sequence[FaultKind]
    seconds: float = ROUND_SECONDS

    def run(self, injector: Injector) -> None:
        rng = injector.rng
        kinds = [kind for kind in self.kinds if rng.random() < 0.5] or [rng.choice(self.kinds)]
        most = rng.choice((1, 2, 3, 6))
        low, high = sorted(rng.uniform(*BETWEEN_SECONDS) for _ in range(2))
        until = time.monotonic() + self.seconds
        if rng.random() < QUIET:
            injector.say("a quiet round")
            pause(self.seconds)
        else:
            names = ", ".join(kind.id for kind in kinds)
            injector.say(f"round with {names}; at most {most} at a time, every {low:.1f}-{high:.1f} s")
        while time.monotonic() < until:
            pause(rng.uniform(low, high))
            self._step(injector, kinds, most)
        injector.heal_all()
        injector.settle()

    def _step(self, injector: Injector, kinds: Sequence[FaultKind], most: int) -> None:
        rng, active = injector.rng, injector.active
        ripe = [fault for fault in active if fault.earliest <= injector.clients.now()]
        if ripe and (len(active) >= most or rng.random() < 0.4):
            injector.heal(rng.choice(ripe))
        elif len(active) < most:
            injector.inject(rng.choice(kinds))


