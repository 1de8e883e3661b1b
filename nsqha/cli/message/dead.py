"""`nsqha dead`: list, requeue and purge the dead letters of a channel."""

from __future__ import annotations

import argparse
from typing import Any

from nsqha.cli.brokers.admin import USUAL, Admin
from nsqha.cli.message import paging
from nsqha.cli.message.command import CHANGED, add_changing, add_listing, add_partition, run_change
from nsqha.cli.message.shown import SHAPE, print_messages
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import add_verb, duration, name
from nsqha.cli.terminal.screen import say
from nsqha.cli.verbs import VERBS


def add_parser(commands: Any) -> None:
    noun = add_verb(commands, "dead", None, help=VERBS["dead"])
    verbs = noun.add_subparsers(title="verbs", metavar="VERB", required=True)
    verb = add_verb(
        verbs,
        "list",
        run_list,
        help="the dead letters of a channel in the order of their deaths, with the reasons",
        examples=("nsqha dead list orders billing", "nsqha dead list orders billing --bodies --limit 10 --json"),
        shape=SHAPE,
        statuses=(*USUAL, exits.PARTLY),
    )
    verb.add_argument("topic", metavar="TOPIC", type=name)
    verb.add_argument("channel", metavar="CHANNEL", type=name)
    add_listing(verb)
    _add_change(verbs, "requeue", "requeue", "deliver dead letters again, from attempt 1")
    _add_change(verbs, "purge", "finish", "finish dead letters: nobody gets them any more")


def _add_change(verbs: Any, word: str, action: str, help: str) -> None:
    verb = add_verb(
        verbs,
        word,
        run_change,
        help=help,
        examples=(
            f"nsqha dead {word} orders billing 0000000000000002",
            f"nsqha dead {word} orders billing --all --reason timed-out --older 1h --plan",
            f"nsqha dead {word} orders billing --all --rate 100 --yes",
        ),
        shape=CHANGED,
        statuses=(*USUAL, exits.CONFLICT, exits.PARTLY, exits.NOT_CONFIRMED),
    )
    verb.add_argument("topic", metavar="TOPIC", type=name)
    verb.add_argument("channel", metavar="CHANNEL", type=name)
    verb.add_argument("ids", metavar="ID", nargs="*", help="16 hex digits")
    verb.add_argument("--all", dest="state", action="store_const", const="dead", help="instead of ids: all of them")
    verb.add_argument("--reason", choices=paging.REASONS, help="with --all: only those that died of this")
    verb.add_argument("--older", metavar="D", type=duration, default=0, help="with --all: that died so long ago")
    add_partition(verb)
    add_changing(verb)
    verb.set_defaults(action=action, selection="--all")


def run_list(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        found = paging.select(admin, args, "dead")
    found.sort(key=lambda one: one[1].died_ns)
    if not found and not args.json:
        say(f"{args.topic} {args.channel} has no dead letters")
    else:
        print_messages(found, json=args.json, bodies=args.bodies)
    return paging.status(args)
