"""Bugs planted on purpose: each breaks one rule of the product and has to be noticed within 500 lives.

    python -m tests.sim.mutants                 all of them
    python -m tests.sim.mutants floor_ignored   one

A suite that does not find them all says little when it finds nothing. The seeds are those of `make sim`; where drawn
lives do not come to what a rule is for, a scene does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from importlib import import_module

from tests.sim import planted_damage, planted_operations, planted_replication
from tests.sim.plan import Plan
from tests.sim.planting import MUTANTS
from tests.sim.run import run_seed

__all__ = ["MUTANTS", "find", "planted_damage", "planted_operations", "planted_replication"]

SEEDS_MAX = 500


def find(name: str, seeds_max: int, first: int = 0) -> tuple[str, int, str]:
    """(name, lives until it was noticed or 0, how). Lives in which it changes nothing are counted and not lived."""
    mutant = MUTANTS[name]
    if mutant.scene:
        return _play(name)
    with mutant.plant():
        for n in range(seeds_max):
            if not mutant.matters(Plan.draw(first + n)):
                continue
            life = run_seed(first + n)
            if "TypeError" in life.violation or "AttributeError" in life.violation:
                return name, 0, f"it does not fit the product any more: {life.violation}"
            if life.violation:
                return name, n + 1, life.violation.splitlines()[0]
    return name, 0, ""


def _play(name: str) -> tuple[str, int, str]:
    """The scene that it is to spoil: it goes well without, and not with it."""
    scene, *arguments = MUTANTS[name].scene
    play: Callable[..., None] = getattr(import_module("tests.sim.test_damage"), scene)
    play(*arguments)
    try:
        with MUTANTS[name].plant():
            play(*arguments)
    except AssertionError as error:
        return name, 1, f"{scene}: {next(iter(str(error).splitlines()), '')}"
    return name, 0, ""


def _find(arguments: tuple[str, int, int]) -> tuple[str, int, str]:
    return find(*arguments)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    names = options.names or sorted(MUTANTS)
    if unknown := [name for name in names if name not in MUTANTS]:
        parser.error(f"there is no mutant {unknown[0]}; there are {', '.join(sorted(MUTANTS))}")
    started, survivors = time.monotonic(), []
    work = [(name, options.seeds, options.first) for name in names]
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=1) as pool:
        for name, lives, how in pool.imap_unordered(_find, work):
            print(f"{name}: {f'noticed in life {lives}: {how[:150]}' if lives else f'SURVIVED {how}'}", flush=True)
            if not lives:
                survivors.append(name)
    print(f"{len(names) - len(survivors)} of {len(names)} mutants noticed in {time.monotonic() - started:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
