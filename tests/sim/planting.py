"""How a planted bug is found: by whole lives of a cluster under virtual time, in which the changed code matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from tests.mutation import Mutant, OutOfDate, Suite
from tests.sim.plan import Plan
from tests.sim.run import run_seed

Make = Callable[[], Iterator[None]]
SEEDS_MAX = 500


@dataclass(frozen=True, slots=True)
class Where:
    """Where it is looked for."""

    matters: Callable[[Plan], bool]  # in all other lives nothing is changed by it
    # [module.]test, of `test_damage` if not said, and its arguments: where drawn lives do not come to it
    scene: tuple[Any, ...]


def anywhere(plan: Plan) -> bool:
    return True


def topics_go(plan: Plan) -> bool:
    return "delete_topic" in plan.operations


def in_order(plan: Plan) -> bool:
    return plan.ordered


def batch_readers(plan: Plan) -> bool:
    return plan.batch_readers > 0


def damage(plan: Plan) -> bool:
    return "bit_flip" in plan.faults


def losses(plan: Plan) -> bool:
    return plan.losses > 0


def parting(plan: Plan) -> bool:
    return "part_ways" in plan.faults


def carried(plan: Plan) -> bool:
    return plan.stubborn


def _attempt(mutant: Mutant[Where], seed: int) -> str | None:
    """Lives in which it changes nothing are counted and not lived."""
    if mutant.hint.scene:
        return _play(mutant)
    if not mutant.hint.matters(Plan.draw(seed)):
        return None
    with mutant.plant():
        violation = run_seed(seed).violation
    if "TypeError" in violation or "AttributeError" in violation:
        raise OutOfDate(violation)
    return violation or None


def _play(mutant: Mutant[Where]) -> str | None:
    """The scene that it is to spoil: it goes well without, and not with it."""
    scene, *arguments = mutant.hint.scene
    module, _, test = scene.rpartition(".")
    play: Callable[..., None] = getattr(import_module(f"tests.sim.{module or 'test_damage'}"), test)
    play(*arguments)
    try:
        with mutant.plant():
            play(*arguments)
    except AssertionError as error:
        return f"{scene}: {error}"
    raise OutOfDate(f"{scene} goes well with it, too")


SUITE: Suite[Where] = Suite("tests.sim.mutants", _attempt, runs=SEEDS_MAX)


def mutant(matters: Callable[[Plan], bool] = anywhere, scene: tuple[Any, ...] = ()) -> Callable[[Make], Make]:
    """Count it among those that have to be noticed; its docstring is the rule that it breaks."""
    return lambda make: SUITE.add(make, (make.__doc__ or "").strip(), Where(matters, scene))
