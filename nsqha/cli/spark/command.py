"""`nsqha spark`: jobs that read the log in parallel. pyspark is imported when a verb runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from nsqha.cli.spark.flags import INSTALL
from nsqha.cli.spark.lag import add_lag, run_lag
from nsqha.cli.spark.lake import add_archive, add_backfill, add_compact, add_verify
from nsqha.cli.spark.replay import add_replay, run_replay
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import add_verb
from nsqha.cli.verbs import VERBS

PACKAGES = ("pyspark", "pyspark_nsqha", "pyarrow", "numpy", "pyiceberg")


def add_parser(commands: Any) -> None:
    noun = add_verb(commands, "spark", None, help=VERBS["spark"])
    verbs = noun.add_subparsers(title="verbs", metavar="VERB", required=True)
    add_archive(verbs)
    add_backfill(verbs)
    add_verify(verbs)
    add_replay(verbs)
    add_lag(verbs)
    add_compact(verbs)
    for verb in verbs.choices.values():
        run = verb.get_default("run")
        verb.set_defaults(run=_with_packages(run, at_once=run not in (run_lag, run_replay)))


def _with_packages(run: Callable[[argparse.Namespace], int], *, at_once: bool) -> Callable[[argparse.Namespace], int]:
    """Wrap `run`: a missing package of the extra `spark` becomes a one-line error. `at_once`: before any work."""

    @wraps(run)
    def checked(args: argparse.Namespace) -> int:
        try:
            if at_once:
                import_module("pyspark")
            return run(args)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in PACKAGES:
                raise
            raise exits.Exit(exits.FAILED, f"{error.name} is not installed here: {INSTALL}") from None

    return checked
