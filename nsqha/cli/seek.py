"""`nsqha seek`: move a channel to another place of the log, after showing what that means; undo it."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from nsqha.cli.brokers.admin import Admin, record
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import Parser, add_grpc, add_json, add_verb, add_yes, duration, name, topic_and_partition
from nsqha.cli.terminal.screen import confirm, never_finished, print_json, say, show_bytes, table
from nsqha.cli.terminal.times import LogTarget, parse_place, show_duration, show_time
from nsqha.cli.verbs import VERBS

DESCRIPTION = """\
Move a channel: replay messages that it delivered, or skip messages that it did not deliver yet. Shows the plan, then
asks.

TO is a time (-2h, -1d12h, @2026-11-20T10:00, local unless it ends with Z or +01:00), start, end, an offset, or a
message id of 16 hex digits. A time means the first batch at or after it, less --clock-skew. The plan counts finished
messages that come again, messages that were never finished and are skipped, and those that stay: deferred ones, dead
letters. Messages in flight are taken from their consumers, whose FIN fails: behind TO they come again, before it they
are skipped. To skip messages that were never finished, type skip, or add --yes. Repeating a seek is safe. --undo goes
back to where the channel was before the last seek or empty; it is a seek itself, so a second --undo reverts the first.
It defers again what empty dropped, up to 2,000 messages of a partition; the plan counts those that stay dropped.
Offsets count per partition; TOPIC/PARTITION moves only that one."""

SHAPE = (
    '{"topic", "channel", "done", "partitions": [{"partition", "from_offset", "to_offset", "clamped", "messages", '
    '"bytes", "undo_repeats", "error", "to_timestamp_ns", "deferred_again", "deferred_lost", "again", "skipped", '
    '"deferred", "dead", "in_flight"}]}'
)
CLOCK_SKEW_NS = 10**9  # the broker's default
PLACE_FIELDS = {"time": "timestamp_ns", "offset": "offset"}


def add_parser(commands: Any) -> None:
    verb = add_verb(
        commands,
        "seek",
        run,
        help=VERBS["seek"],
        description=DESCRIPTION,
        examples=(
            "nsqha seek orders billing -2h --plan",
            "nsqha seek orders billing start --yes",
            "nsqha seek orders billing --undo --yes",
            "nsqha seek orders/0 billing 3 --yes --json",
        ),
        shape=SHAPE + '  messages: again less skipped; "done": false for a plan',
        statuses=(exits.FAILED, exits.USAGE, exits.NOT_FOUND, exits.UNREACHABLE, exits.PARTLY, exits.NOT_CONFIRMED),
        times=True,
    )
    verb.add_argument("topic", metavar="TOPIC[/PARTITION]", type=topic_and_partition)
    verb.add_argument("channel", metavar="CHANNEL", type=name)
    verb.add_argument("to", metavar="TO", nargs="?")
    verb.add_argument("--plan", action="store_true", help="show what would be done and stop")
    verb.add_argument("--undo", action="store_true", help="go back to where the channel was before the last seek")
    verb.add_argument("--clock-skew", metavar="TIME", type=duration, help="start this much before a time (default 1s)")
    add_yes(verb)
    add_json(verb)
    add_grpc(verb)


def run(args: argparse.Namespace) -> int:
    if args.to == "undo":
        args.parser.error("to go back to before the last seek: --undo")
    if args.undo == (args.to is not None):
        args.parser.error("give either TO or --undo")
    place = None if args.undo else place_of(args.parser, args.to)
    topic, partition = args.topic
    fields: dict[str, Any] = {"topic": topic, "channel": args.channel, "partition": partition}
    with Admin.of(args) as admin:
        rpc = "UndoSeek" if place is None else "Seek"
        if place is not None:
            fields["target"] = _target(admin, place, args.clock_skew)
        if place is not None and place.kind == "time" and not args.json:
            skew_ns = CLOCK_SKEW_NS if args.clock_skew is None else args.clock_skew
            say(f"to {show_time(place.value)}, less {show_duration(skew_ns / 1e9)} for clocks that differ")
        plan = admin.call(rpc, **fields, plan_only=True)
        if args.plan or all(p.error for p in plan.partitions):
            return _tell(args, plan)
        if not args.yes:
            _show(plan, sys.stderr)
            skips = sum(_again_and_skipped(p)[1] for p in plan.partitions)
            confirm(f"move channel {args.channel} of topic {topic}?", yes=False, skips=skips)
        return _tell(args, admin.call(rpc, **fields))


def place_of(parser: Parser, text: str) -> LogTarget:
    try:
        return parse_place(text, time.time_ns())
    except ValueError as error:
        parser.error(str(error))


def _target(admin: Admin, place: LogTarget, clock_skew_ns: int | None) -> Any:
    target = admin.messages.SeekTarget(clock_skew_ns=clock_skew_ns)
    if place.kind in ("start", "end"):
        setattr(target, place.kind, True)
    elif place.kind == "id":
        target.message_id = place.id
    else:
        setattr(target, PLACE_FIELDS[place.kind], place.value)
    return target


def _tell(args: argparse.Namespace, answer: Any) -> int:
    """Print the plan, or what was done, on stdout; return the exit status."""
    if args.json:
        print_json({"topic": args.topic[0], "channel": args.channel, "done": answer.done, **_partitions(answer)})
    else:
        _show(answer, sys.stdout)
        if skips := sum(_again_and_skipped(p)[1] for p in answer.partitions):
            say(f"skipped {never_finished(skips)}" if answer.done else f"it would skip {never_finished(skips)}")
    failed = [p for p in answer.partitions if p.error]
    for partition in failed:
        say(f"{args.parser.prog}: partition {partition.partition}: {partition.error}")
    if len(failed) == len(answer.partitions):
        return exits.FAILED
    return exits.PARTLY if failed else exits.OK


def _partitions(answer: Any) -> dict[str, Any]:
    return {"partitions": [record(p) for p in answer.partitions]}


def _show(answer: Any, out: Any) -> None:
    rows = [
        (
            p.partition,
            p.from_offset,
            p.to_offset,
            _messages(p),
            show_bytes(p.bytes),
            show_time(p.to_timestamp_ns) if p.to_timestamp_ns else "(end)",
            "; ".join(_remarks(p)),
        )
        for p in answer.partitions
        if not p.error
    ]
    if rows:
        table(("PARTITION", "FROM", "TO", "MESSAGES", "BYTES", "PUBLISHED", ""), rows, out)


def _again_and_skipped(partition: Any) -> tuple[int, int]:
    """Finished messages that come again, and messages that were never finished and are skipped."""
    if partition.again or partition.skipped:
        return partition.again, partition.skipped
    return max(partition.messages, 0), max(-partition.messages, 0)  # a broker of an older version


def _messages(partition: Any) -> str:
    again, skipped = _again_and_skipped(partition)
    parts = [f"{again:,} again"] if again else []
    return ", ".join([*parts, f"{skipped:,} skipped"] if skipped else parts) or "0"


def _remarks(partition: Any) -> list[str]:
    remarks = []
    if _again_and_skipped(partition)[1]:
        remarks.append("skipped: never finished")
    stay = (("deferred", partition.deferred), ("dead", partition.dead), ("in flight", partition.in_flight))
    if any(count for _, count in stay):
        remarks.append("stay: " + ", ".join(f"{count:,} {what}" for what, count in stay if count))
    if partition.clamped:
        remarks.append("clamped to the log")
    if partition.undo_repeats:
        remarks.append("an undo will repeat finished messages")
    if partition.deferred_again:
        remarks.append(f"{partition.deferred_again:,} deferred again")
    if partition.deferred_lost:
        remarks.append(f"{partition.deferred_lost:,} that were deferred are lost")
    return remarks
