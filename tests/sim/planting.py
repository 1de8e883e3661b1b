"""How bugs are planted: a mutant is a function that changes the product in this process until it is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.sim.plan import Plan

Make = Callable[[], Iterator[None]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug, and where it is looked for."""

    plant: Callable[[], AbstractContextManager[None]]
    matters: Callable[[Plan], bool]  # in all other lives nothing is changed by it
    scene: tuple[Any, ...]  # a test of `test_damage` and its arguments: where drawn lives do not come to it


MUTANTS: dict[str, Mutant] = {}


def anywhere(plan: Plan) -> bool:
    return True


def topics_go(plan: Plan) -> bool:
    return "delete_topic" in plan.operations


def in_order(plan: Plan) -> bool:
    return plan.ordered


def long_delays(plan: Plan) -> bool:
    return plan.delay_seconds > plan.retention_seconds


def batch_readers(plan: Plan) -> bool:
    return plan.batch_readers > 0


def damage(plan: Plan) -> bool:
    return "bit_flip" in plan.faults


def losses(plan: Plan) -> bool:
    return plan.losses > 0


def mutant(matters: Callable[[Plan], bool] = anywhere, scene: tuple[Any, ...] = ()) -> Callable[[Make], Make]:
    """Count it among those that have to be noticed."""

    def count(make: Make) -> Make:
        MUTANTS[make.__name__] = Mutant(contextmanager(make), matters, scene)
        return make

    return count
