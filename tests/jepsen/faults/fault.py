"""What a fault is: a row of the table `tests.jepsen.faults.table.FAULTS`, and what injecting it gives.

    injected = kind.inject(deployment, rng)      # it is broken now; NotNow: it can not be had at the moment
    ...
    injected.heal()
    print(injected.proof())                      # "413 packets dropped"; DidNotBite: the run is invalid

Ids are those of the lists of faults (N1, P2, ..); variants of one have a word behind it (`P1-leader`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SYNCS = frozenset(("always", "interval", "none"))


class DidNotBite(Exception):
    """The fault can not prove that it happened: what the run shows is worth nothing."""


@dataclass
class Injected:
    """A fault that is there now. `proof` is asked after `heal`, and says in one line what shows that it bit."""

    what: str  # the victims, the parameters
    victims: frozenset[str]  # names of hosts
    heal: Callable[[], None]
    proof: Callable[[], str]


@dataclass(frozen=True)
class FaultKind:
    id: str
    title: str
    promise: str
    inject: Callable[[Any, random.Random], Injected]  # into a Deployment; S1-S6 into a LoneNode
    seconds: tuple[float, float] = (2.0, 6.0)  # between injection and healing
    needs: frozenset[str] = frozenset()  # of the machine, as `tests.jepsen.probing` names it
    syncs: frozenset[str] = SYNCS  # the sync modes that promise that nothing is lost under it
    settle: float = 30.0  # seconds after healing in which every ISR is full
    alone: bool = False  # nothing else may be broken meanwhile
    weight: int = 4  # how often a drawn script has it

    @property
    def family(self) -> str:
        """The id without the variant."""
        return self.id.partition("-")[0]


def bitten(condition: object, otherwise: str) -> None:
    """DidNotBite with the sentence unless the condition holds."""
    if not condition:
        raise DidNotBite(otherwise)
