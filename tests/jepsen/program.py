"""Starts a daemon of ours with switches that only tests have: `python tests/jepsen/program.py nsqd [SWITCHES] -- ARGS`.

    --clock-file FILE     its wall clock is off by what the file says      (tests.jepsen.switches.clock)
    --stall-file FILE     it stands still when the file says so            (tests.jepsen.switches.stalls)
    --names-file FILE     it notes which names it makes and syncs          (tests.jepsen.switches.names)
    --states-file FILE    it compares channel states with its logs         (tests.jepsen.switches.states)
    --failpoint NAME:N    it kills itself at the Nth visit there           (tests.jepsen.switches.failpoints)
    --plant [MODULE:]NAME a bug of a suite of mutants is in it             (tests.mutation)

MODULE has the suite of mutants; tests.sim.mutants if not said. The product has no switch for tests: it is changed in
this process, and then its ordinary main function runs. What is switched on is said on stderr, where a fault that has to
prove itself finds it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # it is started by its path: the folder of the caller may be another one
if sys.path[1:2] == [str(Path(__file__).parent)]:
    del sys.path[1]  # its neighbours are not top-level modules
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")  # see tests/conftest.py

MAINS = {"nsqd": "nsqha.cli.nsqd", "nsqlookupd": "lookupd.__main__"}
PLANTS = "tests.sim.mutants"


def command(
    daemon: str,
    *,
    clock_file: Path | None = None,
    stall_file: Path | None = None,
    names_file: Path | None = None,
    states_file: Path | None = None,
    failpoints: Sequence[str] = (),
    plants: Sequence[str] = (),
) -> tuple[str, ...]:
    """What is to stand where the command of the daemon stands, before its arguments."""
    words = [sys.executable, str(Path(__file__).resolve()), daemon]
    for option, values in (
        ("--clock-file", [clock_file] if clock_file else []),
        ("--stall-file", [stall_file] if stall_file else []),
        ("--names-file", [names_file] if names_file else []),
        ("--states-file", [states_file] if states_file else []),
        ("--failpoint", failpoints),
        ("--plant", plants),
    ):
        words += [f"{option}={value}" for value in values]
    return (*words, "--")


def main() -> NoReturn:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("daemon", choices=list(MAINS))
    parser.add_argument("--clock-file", type=Path)
    parser.add_argument("--stall-file", type=Path)
    parser.add_argument("--names-file", type=Path)
    parser.add_argument("--states-file", type=Path)
    parser.add_argument("--failpoint", action="append", default=[], metavar="NAME:N")
    parser.add_argument("--plant", action="append", default=[], metavar="[MODULE:]NAME")
    options = parser.parse_args(sys.argv[1:at])
    with contextlib.ExitStack() as stack:
        try:
            switch_on(options, stack)
        except ValueError as error:
            parser.error(str(error))
        sys.argv = [options.daemon, *sys.argv[at + 1 :]]
        import_module(MAINS[options.daemon]).main()
    sys.exit(0)


def switch_on(options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    """ValueError says what there is not."""
    if options.clock_file is not None:
        from tests.jepsen.switches import clock

        clock.follow(options.clock_file)
        say(f"the wall clock follows {options.clock_file}")
    if options.stall_file is not None:
        from tests.jepsen.switches import stalls

        stalls.follow(options.stall_file)
        say(f"stalls follow {options.stall_file}")
    if options.names_file is not None:
        from tests.jepsen.switches import names

        names.follow(options.names_file)
        say(f"names are noted in {options.names_file}")
    if options.states_file is not None:
        from tests.jepsen.switches import states

        states.follow(options.states_file)
        say(f"channel states are compared as {options.states_file} says")
    for text in options.failpoint:
        from tests.jepsen.switches.failpoints import Failpoint

        Failpoint.parsed(text).arm()
        say(f"failpoint {text} is armed")
    for name in options.plant:
        plant(name, stack)
        say(f"planted: {name}")


def plant(name: str, stack: contextlib.ExitStack) -> None:
    """For the whole life of the process."""
    module, _, short = name.rpartition(":")
    mutants = import_module(module or PLANTS).SUITE.mutants
    if short not in mutants:
        raise ValueError(f"no bug {short} is in {module or PLANTS}; there are {', '.join(sorted(mutants))}")
    stack.enter_context(mutants[short].plant())


def say(text: str) -> None:
    print(f"tests.jepsen.program: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
