"""`nsqha spark`: jobs that read the log in parallel. pyspark is imported when a verb runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import wraps
from typing import Any

from nsqha.cli import exits
from nsqha.cli.parser import add_verb
from nsqha.cli.spark_lag import add_lag
from nsqha.cli.spark_lake import add_archive, add_backfill, add_compact, add_verify
from nsqha.cli.spark_replay import add_replay
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
        verb.set_defaults(run=_with_packages(verb.get_default("run")))


def _with_packages(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The same, in one line where a package of the extra `spark` is not installed."""

    @wraps(run)
    def checked(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in PACKAGES:
                raise
            raise exits.Exit(exits.FAILED, f"{error.name} is not installed here: pip install 'nsqha[spark]'") from None

    return checked
