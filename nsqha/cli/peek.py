"""`nsqha peek`: look at stored messages without a channel."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from nsqha.cli.brokers.admin import Admin
from nsqha.cli.seek import PLACE_FIELDS, place_of
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import add_grpc, add_json, add_verb, count_up_to, topic_and_partition
from nsqha.cli.terminal.screen import body_json, bold, print_json, printable, say
from nsqha.cli.terminal.times import show_time
from nsqha.cli.verbs import VERBS

BODY_SHOWN = 200
PEEK_MAX = 10_000  # the broker's limit for one request

DESCRIPTION = """\
Show committed messages as they are stored, oldest first; no channel is changed. Without FROM: the newest ones.

FROM is a time (-2h, @2026-11-20T10:00), start, an offset, or a message id. Partitions are merged by time;
TOPIC/PARTITION shows one of them. Long bodies are cut on the screen, not with --json or --raw."""


def add_parser(commands: Any) -> None:
    verb = add_verb(
        commands,
        "peek",
        run,
        help=VERBS["peek"],
        description=DESCRIPTION,
        examples=(
            "nsqha peek orders",
            "nsqha peek orders -2h -n 5",
            "nsqha peek orders/0 start -n 1 --raw",
            "nsqha peek orders start --json",
        ),
        shape='{"partition", "offset", "id", "timestamp_ns", "leader_epoch", "deliver_at_ns", "body"} per line; '
        '"body_base64" instead of "body" if it is not UTF-8',
        statuses=(exits.USAGE, exits.NOT_FOUND, exits.UNREACHABLE, exits.PARTLY),
        times=True,
    )
    verb.add_argument("topic", metavar="TOPIC[/PARTITION]", type=topic_and_partition)
    verb.add_argument("place", metavar="FROM", nargs="?", default="end")
    verb.add_argument("-n", "--count", type=count_up_to(PEEK_MAX), default=10, help="messages at most (default 10)")
    verb.add_argument("--raw", action="store_true", help="print bodies only")
    add_json(verb, "print one line of JSON per message")
    add_grpc(verb)


def run(args: argparse.Namespace) -> int:
    place = place_of(args.parser, args.place)
    topic, partition = args.topic
    fields: dict[str, Any] = {"topic": topic, "partition": partition, "count_max": args.count}
    match place.kind:
        case "end":
            fields["last"] = args.count
        case "start":
            fields["start"] = True
        case "id":
            fields["message_id"] = place.id
        case _:
            fields[PLACE_FIELDS[place.kind]] = place.value
    shown = 0
    failed = False
    with Admin.of(args) as admin:
        for message in admin.stream("PeekMessages", **fields):
            if message.error:
                failed = True
                say(f"{args.parser.prog}: partition {message.partition}: {message.error}")
                continue
            shown += 1
            if args.json:
                print_json(json_of(message))
            elif args.raw:
                sys.stdout.buffer.write(message.body + b"\n")
            else:
                _print(message)
    if not shown and not failed:
        say("no messages there")
    return exits.PARTLY if failed else exits.OK


def json_of(message: Any) -> dict[str, Any]:
    return {
        "partition": message.partition,
        "offset": message.offset,
        "id": message.message_id,
        "timestamp_ns": message.timestamp_ns,
        "leader_epoch": message.leader_epoch,
        "deliver_at_ns": message.deliver_at_ns,
        **body_json(message.body),
    }


def body_line(body: bytes) -> str:
    """The body as one line for the screen."""
    text = printable(body[: BODY_SHOWN * 4].decode("utf-8", "replace"))
    if len(text) <= BODY_SHOWN and len(body) <= BODY_SHOWN * 4:
        return text
    return f"{text[:BODY_SHOWN]}… {len(body):,} bytes"


def _print(message: Any) -> None:
    place = bold(f"{message.partition}/{message.offset}", sys.stdout)
    late = f"  deliver at {show_time(message.deliver_at_ns)}" if message.deliver_at_ns else ""
    print(f"{place}  {message.message_id}  {show_time(message.timestamp_ns)}{late}  {body_line(message.body)}")
