"""`nsqha spark lag`: how far readers of the log, and a lake, are behind what is committed. No Spark is started."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nsqha.cli import exits
from nsqha.cli.admin import Admin, credentials
from nsqha.cli.parser import (
    GRPC_ADDRESS,
    add_certificate,
    add_json,
    add_timeout,
    add_verb,
    duration,
    name,
)
from nsqha.cli.screen import Cell, print_json, say, show_bytes, some, table
from nsqha.cli.times import parse_duration, show_duration

if TYPE_CHECKING:
    from pyspark_nsqha.lag import Lag, Limit, Rates

SHAPE = (
    '{"channels": [{"topic", "channel", "messages", "bytes", "oldest_seconds", "lake_messages", "read_per_second", '
    '"published_per_second", "seconds_left", "partitions": [{"partition", "start", "end", "floor", "messages", '
    '"bytes", "oldest_seconds", "lake_end", "lake_messages", "error"}]}], "above": ["TOPIC/CHANNEL"]} per look'
)


def add_lag(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "lag",
        run_lag,
        help="show how far reader channels, and a lake, are behind the log",
        description="Show for every reader channel what is committed and unread: messages, bytes in the log, age of "
        "the oldest one. --interval looks again and again and adds rates; --lake adds what is not in a lake yet.",
        examples=("nsqha spark lag", "nsqha spark lag orders --fail-above 10m --json"),
        shape=SHAPE,
        statuses=(
            exits.FAILED, exits.USAGE, exits.NOT_FOUND, exits.UNREACHABLE, exits.PARTLY, exits.INTERRUPTED,
        ),
    )  # fmt: skip
    verb.add_argument("topic", metavar="TOPIC", nargs="*", type=name)
    verb.add_argument("--pattern", metavar="REGEX", help="topics whose whole name matches (default: all topics)")
    verb.add_argument("--channel", metavar="NAME", type=name, help="only this reader channel")
    verb.add_argument("--lake", metavar="URI", help="compare with what is in this lake, too")
    verb.add_argument(
        "--interval", metavar="TIME", type=duration, help="look again and again, and show rates since the last look"
    )
    verb.add_argument(
        "--fail-above", metavar="TIME|MESSAGES", type=limit, help="status 1 if one is older, or more (10m, 100000)"
    )
    verb.add_argument(
        "--broker",
        metavar="HOST:PORT",
        default=os.environ.get("NSQHA_GRPC_ADDRESS", GRPC_ADDRESS),
        help=f"--grpc-address of a broker (default {GRPC_ADDRESS}, $NSQHA_GRPC_ADDRESS)",
    )
    add_timeout(verb)
    add_json(verb, "print JSON, one line per look")
    add_certificate(verb)


def limit(text: str) -> tuple[int | None, float | None]:
    """Messages, or seconds."""
    if re.fullmatch(r"\d{1,18}", text):
        return int(text), None
    try:
        ns = parse_duration(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a time such as 10m nor a number of messages") from None
    if ns < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative")
    return None, ns / 1e9


def run_lag(args: argparse.Namespace) -> int:
    if args.topic and args.pattern is not None:
        args.parser.error("give topics by name, or --pattern")
    if args.interval == 0:
        args.parser.error("--interval needs a time above zero")
    try:
        from pyspark_nsqha.lag import Limit, look, rates
    except ImportError as error:
        raise exits.Exit(exits.FAILED, f"{error}: pip install 'nsqha[spark]'") from None

    allowed = Limit(*(args.fail_above or (None, None)))
    lake = _lake(args.lake)
    before: dict[tuple[str, str], Lag] = {}
    looked = 0.0
    with Admin(args.broker, args.timeout / 1e9, credentials(args)) as admin:
        while True:
            found = look(
                admin.call,
                admin.call_segments,
                topics=tuple(dict.fromkeys(args.topic)),
                pattern=args.pattern or "",
                channel=args.channel or "",
                lake=lake(),
            )
            now = time.monotonic()
            looks = {(lag.topic, lag.channel): lag for lag in found}
            measured = {key: rates(before[key], lag, now - looked) for key, lag in looks.items() if key in before}
            status = _tell(args, found, measured, allowed)
            if args.interval is None or status != exits.OK:
                return status
            before, looked = looks, now
            time.sleep(args.interval / 1e9)


def _lake(uri: str | None) -> Any:
    """What tells the state of the lake; nothing if there is none."""
    if uri is None:
        return lambda: None
    from pyspark_nsqha.lake.commit import ManifestCommits
    from pyspark_nsqha.lake.manifest import BadManifest
    from pyspark_nsqha.lake.store import Store, StoreFailed

    commits = ManifestCommits(Store(uri))

    def state() -> Any:
        try:
            return commits.state()
        except (StoreFailed, BadManifest) as error:
            raise exits.Exit(exits.FAILED, str(error)) from None

    return state


def _tell(
    args: argparse.Namespace, found: list[Lag], measured: dict[tuple[str, str], Rates], allowed: Limit
) -> int:
    """One look on stdout; what is above the limit, or not known, on stderr."""
    above = [lag for lag in found if allowed.exceeded(lag)]
    if args.json:
        rows = [record(lag, measured.get((lag.topic, lag.channel))) for lag in found]
        print_json({"channels": rows, "above": [f"{lag.topic}/{lag.channel}" for lag in above]})
    else:
        _show(args, found, measured)
    errors = [error for lag in found for error in lag.errors]
    for error in dict.fromkeys(errors):
        say(f"{args.parser.prog}: {error}")
    if above:
        names = some([f"{lag.topic}/{lag.channel}" if lag.channel else lag.topic for lag in above])
        say(f"{args.parser.prog}: above the limit: {names}")
        return exits.FAILED
    if errors:
        return exits.PARTLY
    return exits.OK


def record(lag: Lag, rates: Rates | None) -> dict[str, Any]:
    """As --json shows it."""
    left = rates.seconds_left(lag.messages) if rates is not None else None
    return {
        "topic": lag.topic,
        "channel": lag.channel,
        "messages": lag.messages,
        "bytes": lag.bytes,
        "oldest_seconds": round(lag.oldest_seconds, 3),
        "lake_messages": lag.lake_messages,
        "read_per_second": None if rates is None else round(rates.read, 3),
        "published_per_second": None if rates is None else round(rates.published, 3),
        "seconds_left": None if left is None else round(left, 3),
        "partitions": [asdict(one) for one in lag.partitions],
    }


def _show(args: argparse.Namespace, found: list[Lag], measured: dict[tuple[str, str], Rates]) -> None:
    if not found:
        say("no reader channel; `nsqha spark archive` and commitChannel of a stream make one")
        return
    headers = ["TOPIC", "CHANNEL", "END", "UNREAD", "BYTES", "OLDEST"]
    headers += ["READ/S", "IN/S", "LEFT"] if args.interval is not None else []
    headers += ["NOT IN LAKE"] if args.lake is not None else []
    rows = []
    for lag in found:
        row: list[Cell] = [lag.topic, lag.channel, sum(one.end for one in lag.partitions), lag.messages]
        row += [show_bytes(lag.bytes), show_duration(lag.oldest_seconds) if lag.oldest_seconds else ""]
        if args.interval is not None:
            rates = measured.get((lag.topic, lag.channel))
            left = rates.seconds_left(lag.messages) if rates is not None else None
            shown = "?" if rates is None else "never" if left is None else show_duration(left)
            row += [rates.read if rates else 0.0, rates.published if rates else 0.0, shown]
        if args.lake is not None:
            row.append(lag.lake_messages or 0)
        rows.append(row)
    table(headers, rows, sys.stdout)
