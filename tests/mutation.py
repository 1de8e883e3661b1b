"""Mutants: rules of the product that are broken on purpose, each of which a random run has to notice.

    python -m tests.unit.cursor.mutants [NAME ...] [--runs N] [--first SEED] [--seconds S] [--workers N]

A suite says nothing when it finds nothing, unless it finds what was planted. A mutant replaces functions for the time
of a run; the product has no switches. Exit status 1 if a mutant survives: then nothing checks its rule.

A suite of mutants has one way to look for them, `attempt(mutant, seed)`: a run with the mutant planted, which returns
what was noticed, or None. It raises OutOfDate for a mutant that does not fit the product any more.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar
from unittest.mock import patch

H = TypeVar("H")
M = TypeVar("M", bound=Callable[[], Any])
Patch = Any  # of unittest.mock


class OutOfDate(Exception):
    """A mutant breaks the run itself and no rule: what it replaces has changed."""


class Noticed(NamedTuple):
    """How many runs it took, and what was seen in the last."""

    runs: int
    how: str


@dataclass(frozen=True)
class Mutant(Generic[H]):
    """One broken rule."""

    name: str
    rule: str
    plant: Callable[[], AbstractContextManager[None]]
    hint: H  # what `attempt` has to know of it: where the rule matters, which check it breaks


def instead(owner: object, name: str, function: object) -> Patch:
    """A patch that puts `function` in the place of an attribute."""
    return patch.object(owner, name, function)


@contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    """All of these; a later one wins."""
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


class Suite(Generic[H]):
    """The mutants of one body of rules. `module` defines them all when it is imported, and has the suite as `SUITE`."""

    def __init__(self, module: str, attempt: Callable[[Mutant[H], int], str | None], *, runs: int) -> None:
        self.mutants: dict[str, Mutant[H]] = {}
        self._module = module
        self._attempt = attempt
        self._runs = runs

    def add(self, make: M, rule: str, hint: H) -> M:
        """`make` returns patches, or is a generator that yields once while the rule is broken."""
        plant = contextmanager(make) if inspect.isgeneratorfunction(make) else lambda: applied(make())
        self.mutants[make.__name__] = Mutant(make.__name__, rule, plant, hint)
        return make

    def noticed(self, name: str, seeds: Iterable[int], seconds: float = float("inf")) -> Noticed | None:
        """The first run that notices the mutant; None if it survives all, or the time."""
        end = time.monotonic() + seconds
        for n, seed in enumerate(seeds, 1):
            how = self._attempt(self.mutants[name], seed)
            if how is not None:
                return Noticed(n, how)
            if time.monotonic() > end:
                return None
        return None

    def main(self, arguments: list[str] | None = None) -> int:
        """The command line; returns the exit status."""
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
        parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
        parser.add_argument("--runs", type=int, default=self._runs, help="for one mutant at most")
        parser.add_argument("--first", type=int, default=0, help="seed of the first run")
        parser.add_argument("--seconds", type=float, default=float("inf"), help="for one mutant at most")
        parser.add_argument("--workers", type=int, default=2)
        options = parser.parse_args(arguments)
        names = options.names or list(self.mutants)
        if unknown := [name for name in names if name not in self.mutants]:
            parser.error(f"there is no mutant {unknown[0]}; there are {', '.join(sorted(self.mutants))}")
        started, survivors = time.monotonic(), []
        seeds = range(options.first, options.first + options.runs)
        work = [(self._module, name, seeds, options.seconds) for name in names]
        with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=1) as pool:
            for name, found, wrong in pool.imap_unordered(_look_for, work):
                said = f"{found.runs:5}  {found.how.splitlines()[0][:100] if found.how else ''}" if found else wrong
                print(f"{name:40} {said or 'SURVIVED'}", flush=True)
                if found is None:
                    survivors.append(name)
        for name in survivors:
            print(f"no run notices that this is broken: {self.mutants[name].rule}")
        print(f"{len(names) - len(survivors)} of {len(names)} mutants noticed in {time.monotonic() - started:.0f} s")
        return 1 if survivors else 0


def _look_for(work: tuple[str, str, range, float]) -> tuple[str, Noticed | None, str]:
    module, name, seeds, seconds = work
    suite: Suite[Any] = import_module(module).SUITE
    try:
        return name, suite.noticed(name, seeds, seconds), ""
    except OutOfDate as error:
        return name, None, f"OUT OF DATE {error}"


def run(suite: Suite[Any]) -> None:
    """The `__main__` of a module of mutants."""
    sys.exit(suite.main())
