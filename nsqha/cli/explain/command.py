"""`nsqha explain`: what a log event or the code of a refusal means, and what to do about it."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import COLUMNS, add_json, add_verb, did_you_mean
from nsqha.cli.terminal.screen import bold, print_json
from nsqha.cli.verbs import VERBS

SHAPE = '{"name", "meaning", "remedy"} per name'


def add_parser(commands: Any) -> None:
    verb = add_verb(
        commands,
        "explain",
        run,
        help=VERBS["explain"],
        description="Say what names in logs and answers mean, and what to do. docs/errors.md lists all of them.",
        examples=("nsqha explain disk_low", "nsqha explain E_PUB_FAILED OUTCOME_UNKNOWN --json"),
        shape=SHAPE,
        statuses=(exits.USAGE, exits.NOT_FOUND),
    )
    verb.add_argument("names", metavar="NAME", nargs="+", help="an event of the log, or a code of an answer")
    add_json(verb)


def run(args: argparse.Namespace) -> int:
    """Print each explanation; Exit for a name that there is not."""
    import sys

    from nsqha.cli.explain.explanations import explain, explanations

    for name in args.names:
        found = explain(name)
        if found is None:
            raise exits.Exit(exits.NOT_FOUND, f"there is no event or code {name}{did_you_mean(name, explanations())}")
        if args.json:
            print_json({"name": name, "meaning": found.meaning, "remedy": found.remedy})
            continue
        print(bold(name, sys.stdout))
        for text in filter(None, found):
            print(textwrap.fill(text, COLUMNS, initial_indent="  ", subsequent_indent="  "))
    return exits.OK
