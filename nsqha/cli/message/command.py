"""`nsqha message`: list, show, finish, requeue, defer and kill single messages of a channel."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from nsqha.cli.brokers.admin import USUAL, Admin
from nsqha.cli.message import paging
from nsqha.cli.message.shown import SHAPE, print_messages
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import Parser, add_grpc, add_json, add_verb, add_yes, count, duration, name
from nsqha.cli.terminal.screen import confirm, print_json, say, show_count
from nsqha.cli.verbs import VERBS

CHANGED = (
    '{"topic", "channel", "action", "messages", "done", "ids": [{"id", "error"}]}  "ids": of those that were named'
)
DUE_NS_END = 1 << 62
_STATUSES = (*USUAL, exits.CONFLICT, exits.PARTLY, exits.NOT_CONFIRMED)
_SORTED: dict[str | None, Callable[[Any], int]] = {
    "age": lambda message: message.published_ns,
    "attempts": lambda message: -message.attempts,
}
_DONE = {"finish": "finished", "requeue": "requeued", "defer": "deferred", "kill": "killed"}


def add_parser(commands: Any) -> None:
    noun = add_verb(commands, "message", None, help=VERBS["message"])
    verbs = noun.add_subparsers(title="verbs", metavar="VERB", required=True)
    verb = add_verb(
        verbs,
        "list",
        run_list,
        help="messages that are in flight, wait, are deferred, or dead",
        examples=(
            "nsqha message list orders billing --state in-flight",
            "nsqha message list orders billing --state deferred --bodies --limit 10",
            "nsqha message list orders billing --state waiting --sort attempts --json",
        ),
        shape=SHAPE,
        statuses=(*USUAL, exits.PARTLY),
    )
    _add_channel(verb)
    verb.add_argument("--state", choices=paging.STATES, required=True, help="which messages")
    add_listing(verb)
    verb.add_argument("--sort", choices=("age", "attempts"), help="the oldest, or the most often delivered, of all")
    verb = add_verb(
        verbs,
        "show",
        run_show,
        help="one message: where it is, since when, how often it was delivered, its body",
        examples=("nsqha message show orders billing 0000000000000002",),
        shape=SHAPE,
        statuses=USUAL,
    )
    _add_channel(verb)
    verb.add_argument("id", metavar="ID", help="16 hex digits, as consumers and publishers see it")
    add_json(verb)
    add_grpc(verb)
    _add_change(verbs, "finish", "finish messages: nobody gets them any more; also unread ones, by id")
    _add_change(verbs, "requeue", "have messages come again now: bring deferred ones forward, take others back")
    later = _add_change(verbs, "defer", "have messages come again later, also those that are in flight")
    later.add_argument("--by", metavar="D", type=duration, required=True, help="this long from now: 90s, 2h, 3d")
    _add_change(verbs, "kill", "make dead letters of messages")


def _add_channel(verb: Parser) -> None:
    verb.add_argument("topic", metavar="TOPIC", type=name)
    verb.add_argument("channel", metavar="CHANNEL", type=name)


def add_listing(verb: Parser) -> None:
    """How much is listed."""
    verb.add_argument("--limit", metavar="N", type=count, default=100, help="so many messages (100)")
    verb.add_argument("--bodies", action="store_true", help="their bodies, too")
    add_partition(verb)
    add_json(verb)
    add_grpc(verb)


def add_partition(verb: Parser) -> None:
    verb.add_argument("--partition", metavar="N", type=int, help="only of this one")


def _add_change(verbs: Any, word: str, help: str) -> Parser:
    more = {"defer": " --by 2h"}.get(word, "")
    verb = add_verb(
        verbs,
        word,
        run_change,
        help=help,
        examples=(
            f"nsqha message {word} orders billing 0000000000000002{more}",
            f"nsqha message {word} orders billing --state deferred{more} --yes",
        ),
        shape=CHANGED,
        statuses=_STATUSES,
    )
    _add_channel(verb)
    verb.add_argument("ids", metavar="ID", nargs="*", help="16 hex digits")
    verb.add_argument("--state", choices=paging.STATES, help="instead of ids: all messages in this state")
    verb.add_argument("--older", metavar="D", type=duration, default=0, help="only those published so long ago")
    add_partition(verb)
    add_changing(verb)
    verb.set_defaults(action=word, reason=None, selection="--state")
    return verb


def add_changing(verb: Parser) -> None:
    """How a selection is changed."""
    verb.add_argument("--plan", action="store_true", help="say how many it would be, and stop")
    verb.add_argument("--rate", metavar="N", type=count, help="at most so many messages a second")
    add_yes(verb)
    add_json(verb)
    add_grpc(verb)


def run_list(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        found = paging.select(admin, args, args.state, _SORTED.get(args.sort))
    if not found and not args.json:
        say(f"no messages of {args.topic} {args.channel} are {args.state.replace('-', ' ')}")
    else:
        print_messages(found, json=args.json, bodies=args.bodies)
    return paging.status(args)


def run_show(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        answer = admin.call("ListMessages", topic=args.topic, channel=args.channel, message_id=args.id, bodies=True)
    held = answer.partitions[0]
    if held.error:
        raise exits.Exit(exits.UNREACHABLE, f"partition {held.partition}: {held.error}")
    print_messages([(held.partition, held.messages[0])], json=args.json, bodies=True)
    return exits.OK


def run_change(args: argparse.Namespace) -> int:
    """Change messages by id, or a selection after showing how many it is."""
    if bool(args.ids) == bool(args.state):
        args.parser.error(f"give ids, or {args.selection} for a selection")
    if args.ids and (args.older or args.reason):
        args.parser.error(f"--older and --reason narrow a selection: they need {args.selection}, not ids")
    if len(args.ids) > paging.PAGE:
        args.parser.error(f"{len(args.ids)} ids; {paging.PAGE} at most at a time")
    with Admin.of(args) as admin:
        action = admin.messages.MessageAction.Value(f"MESSAGE_ACTION_{args.action.upper()}")
        fields: dict[str, Any] = {"action": action}
        if args.action == "defer":
            fields["due_ns"] = time.time_ns() + args.by
            if fields["due_ns"] >= DUE_NS_END:
                args.parser.error("--by ends after the year 2115; to have nobody get it: nsqha message finish, or kill")
        if not args.ids:
            fields |= {
                "state": paging.state(admin, args.state),
                "reason": paging.reason(admin, args.reason),
                "older_than_ms": args.older // 1_000_000,
            }
        return _change(admin, args, fields)


def _change(admin: Admin, args: argparse.Namespace, fields: dict[str, Any]) -> int:
    if args.ids:
        return _said(args, paging.change_ids(admin, args, args.ids, plan=args.plan, **fields), done=not args.plan)
    planned = paging.change(admin, args, plan=True, **fields)
    if args.plan or not planned.messages:
        return _said(args, planned, done=not args.plan)
    confirm(f"{args.action} {show_count(planned.messages)} of {args.topic} {args.channel}?", yes=args.yes)
    return _said(args, paging.change(admin, args, plan=False, planned=planned, **fields), done=True)


def _said(args: argparse.Namespace, changed: paging.Changed, *, done: bool) -> int:
    shown = show_count(changed.messages)
    if args.json:
        said = {"topic": args.topic, "channel": args.channel, "action": args.action, "messages": changed.messages}
        ids = [{"id": id_, "error": error} for id_, error in changed.ids.items()] if args.ids else []
        print_json({**said, "done": done, "ids": ids})
        return paging.status(args)
    if getattr(args, "partly", False):  # else all of them
        for id_ in (id_ for id_, error in changed.ids.items() if args.ids and not error):
            say(f"{id_}: {_DONE[args.action] if done else f'it would {args.action} it'}")
    say(f"{_DONE[args.action]} {shown}" if done else f"it would {args.action} {shown}")
    return paging.status(args)
