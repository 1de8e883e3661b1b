"""`nsqha config show`: what a daemon that is started here would use, and where each value comes from.

It reads the flags, the environment and the file as the daemon does, with the same checks, and starts nothing.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import add_json, add_verb
from nsqha.cli.terminal.screen import print_json, say, table
from nsqha.cli.verbs import VERBS

DAEMONS = ("broker", "lookupd")
SHAPE = (
    '{"setting", "value", "from", "default"} per setting; it is from a flag, env, a file or the default. '
    '{"unknown", "nearest"} per variable that is named as a daemon\'s and is none'
)
DESCRIPTION = """\
Show the settings of a daemon as it would be started in this shell: from its flags, which follow DAEMON and `--`, else
from the environment (NSQD_..., NSQLOOKUPD_...), else from the file, else the default. Without --all only what is not
the default. What would keep the daemon from starting, such as a setting that is unknown, is an error here, too.
Variables that are named like a daemon's (NSQD_..., NSQHA_...) and are none are listed as unknown, with the nearest
name: they have no effect. Their values are not shown."""


def add_parser(commands: Any) -> None:
    noun = add_verb(commands, "config", None, help=VERBS["config"])
    verbs = noun.add_subparsers(title="verbs", metavar="VERB", required=True)
    verb = add_verb(
        verbs,
        "show",
        run_show,
        help="show the settings of a daemon, and where each comes from",
        description=DESCRIPTION,
        examples=(
            "nsqha config show",
            "nsqha config show lookupd --all",
            "nsqha config show broker --json -- --sync=interval --data-path=/var/lib/nsqha",
        ),
        shape=SHAPE,
        statuses=(exits.FAILED, exits.USAGE),
    )
    names = " or ".join(DAEMONS)
    verb.add_argument("daemon", metavar="DAEMON", nargs="?", choices=DAEMONS, default="broker", help=names)
    verb.add_argument("flags", metavar="-- FLAG", nargs="*", help="flags of the daemon")
    verb.add_argument("--config", metavar="PATH", help="the daemon's config file")
    verb.add_argument("--all", action="store_true", help="also settings at their default")
    add_json(verb)


def run_show(args: argparse.Namespace) -> int:
    """Print the settings; ConfigError for what the daemon would refuse."""
    from nsqha.options import load_nsqd, load_nsqlookupd, misspelt

    load = load_nsqd if args.daemon == "broker" else load_nsqlookupd
    given = [f"--config={args.config}"] if args.config else []
    loaded = load([*given, *args.flags], os.environ)
    rows = [row for row in _rows(loaded.options, loaded.sources) if args.all or row["from"] != "default"]
    unknown = loaded.unknown
    if args.json:
        for row in (*rows, *({"unknown": variable, "nearest": nearest} for variable, nearest in unknown.items())):
            print_json(row)
    else:
        shown = [(row["setting"], row["value"], row["from"]) for row in rows]
        meant = {variable: f": did you mean {nearest}?" if nearest else "" for variable, nearest in unknown.items()}
        shown += [(variable, "(no effect)", f"unknown{what}") for variable, what in meant.items()]
        table(("SETTING", "VALUE", "FROM"), shown)
    said = misspelt(unknown)
    for notice in loaded.notices:
        if notice not in said:
            say(notice)
    return exits.OK


def _rows(options: Any, sources: Any) -> list[dict[str, str]]:
    from nsqha.options import flags_with_values

    return [
        {
            "setting": flag.key,
            "value": flag.written(value),
            "from": sources.get(flag.name, "default"),
            "default": flag.written(flag.default),
        }
        for flag, value in flags_with_values(options)
        if not flag.inert or flag.name in sources
    ]
