"""How a mutant of the channel core is found: by random lives of a partition against the naive model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nsqha.errors import LogCorrupt
from tests.mutation import Mutant, OutOfDate, Patch, Suite
from tests.unit.cursor.history import History

Make = Callable[[], list[Patch]]


@dataclass(frozen=True)
class Channels:
    """Which lives can notice it."""

    ordered: bool


def _attempt(mutant: Mutant[Channels], seed: int) -> str | None:
    with mutant.plant():
        try:
            History(seed, ordered=mutant.hint.ordered).run()
        except (AssertionError, LogCorrupt, LookupError) as error:
            return f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        except TypeError as error:
            raise OutOfDate(str(error)) from error
    return None


SUITE: Suite[Channels] = Suite("tests.unit.cursor.mutants", _attempt, runs=10_000)


def mutant(rule: str, *, ordered: bool = False) -> Callable[[Make], Make]:
    """Break this rule of the channel core."""
    return lambda make: SUITE.add(make, rule, Channels(ordered))
