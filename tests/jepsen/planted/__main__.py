"""Does the suite find what is wrong? Bugs are planted into real brokers, one at a time, until a checker sees each.

    python -m tests.jepsen.planted [NAME ..] [--minutes 30] [--seed 7] [--no-control | --only-control] [--keep DIR]

A table is printed: bug, the faults under which it was found, seed, the checker that saw it, seconds, and how long the
same faults took without it, if they were green. Exit status 1 if a bug survives its minutes, or if they were not green.
Without names: all that have been found so far, which is the table of docs/reliability.md.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.jepsen.hosts.network import NotPossible
from tests.jepsen.planted.bugs import BUGS, FOUND, Bug, Hunt
from tests.jepsen.planted.hunting import control, hunted

SEED = 7  # of the table in docs/reliability.md


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all that were found before")
    parser.add_argument("--minutes", type=float, default=30.0, help="for one bug at most")
    parser.add_argument("--seed", type=int, default=SEED)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--no-control", action="store_true", help="not the same without the bug")
    which.add_argument("--only-control", action="store_true", help="only one round without the bug")
    parser.add_argument("--keep", type=Path, help="folder for data, logs and histories of what was found")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.names if name not in BUGS]:
        parser.error(f"there is no bug {unknown[0]}; there are {', '.join(sorted(BUGS))}")
    return args


class Table:
    """What was found so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rows: list[str] = []
        self.wrong = 0  # bugs that survived, and runs without a bug that were not green
        self._args = args
        self._green: dict[Hunt, tuple[int, str]] = {}  # rounds without a bug that were well, and of whom they were

    def add(self, bug: Bug) -> None:
        """Look for it; its row is printed."""
        args, name = self._args, bug.name
        print(f"==== {name}: {bug.mutant.rule}\n     {bug.hunt}; seed {args.seed}", flush=True)
        if args.only_control:
            self._row(name, bug.hunt, "", "", self._without(bug, 1))
            return
        with kept(args.keep, name) as folder:
            found = hunted(bug, folder, seed=args.seed, seconds=60 * args.minutes)
        if found is None:
            self.wrong += 1
            self._row(name, bug.hunt, "SURVIVED", f"{60 * args.minutes:.0f}", "")
            return
        print(f"---- found by {found.checkers}: {found.text[:1500]}", flush=True)
        said = "not run" if args.no_control else self._without(bug, found.rounds)
        self._row(name, bug.hunt, found.checkers, f"{found.seconds:.0f}", said)

    def _row(self, *cells: object) -> None:
        name, hunt, *rest = cells
        self.rows.append(f"| {' | '.join(map(str, (name, hunt, self._args.seed, *rest)))} |")
        print(self.rows[-1], flush=True)

    def _without(self, bug: Bug, rounds: int) -> str:
        """What the same rounds showed without the bug."""
        done, whose = self._green.get(bug.hunt, (0, ""))
        if done >= rounds:
            return f"green, see `{whose}`"
        print("---- the same without it", flush=True)
        began = time.monotonic()
        with kept(self._args.keep, f"{bug.name}-control") as folder:
            why = control(bug, folder, seed=self._args.seed, rounds=rounds)
        if why:
            self.wrong += 1
            print(why, flush=True)
            return f"NOT GREEN: {why.splitlines()[0]}"
        self._green[bug.hunt] = rounds, bug.name
        return f"green, {time.monotonic() - began:.0f} s"

    def __str__(self) -> str:
        head = ("bug", "found under", "seed", "seen by", "seconds", "without it")
        return "\n".join((f"| {' | '.join(head)} |", "|---" * len(head) + "|", *self.rows))


@contextlib.contextmanager
def kept(folder: Path | None, name: str) -> Iterator[Path]:
    """An empty folder for one run; without `folder` it goes with the block."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="nsqha-planted-") as made:
            yield Path(made)
    else:
        at = folder / f"{name}-{secrets.token_hex(3)}"
        at.mkdir(parents=True)
        yield at


def main() -> int:
    args = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    table = Table(args)
    try:
        for name in args.names or [bug.name for bug in FOUND]:
            table.add(BUGS[name])
    except NotPossible as error:
        print(f"hosts can not be made here, which needs root and network namespaces: {error}")
        return 1
    finally:
        print(table, flush=True)
    return 1 if table.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
