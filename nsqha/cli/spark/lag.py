"""`nsqha spark lag`: how far readers of the log, and a lake, are behind what is committed. No Spark is started."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nsqha.cli.spark.checks import check_lake
from nsqha.cli.spark.flags import administration
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import (
    GRPC_ADDRESS,
    add_certificate,
    add_json,
    add_timeout,
    add_token,
    add_verb,
    duration,
    name,
)
from nsqha.cli.terminal.screen import Cell, print_json, say, show_bytes, some, table
from nsqha.cli.terminal.times import parse_duration, show_duration

if TYPE_CHECKING:
    from pyspark_nsqha.lag import Lag, LagSample, Limit, Rates

SHAPE = (
    '{"channels": [{"topic", "channel", "messages", "bytes", "oldest_seconds", "lake_messages", "read_per_second", '
    '"published_per_second", "seconds_left", "partitions": [{"partition", "start", "end", "floor", "messages", '
    '"bytes", "oldest_seconds", "lake_end", "lake_messages", "error"}]}], "above": ["TOPIC/CHANNEL"], '
    '"missing": ["WHAT"]} per sample'
)


def add_lag(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "lag",
        run_lag,
        help="show how far reader channels, and a lake, are behind the log",
        description="Show for every reader channel what is committed and unread: messages, bytes in the log, age of "
        "the oldest one. --interval repeats this and adds rates; --lake adds what is not in a lake yet. Exit status "
        "3: a named channel does not exist, or with --fail-above there is no channel to check.",
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
    verb.add_argument("--interval", metavar="TIME", type=duration, help="repeat, and show rates since the last sample")
    verb.add_argument(
        "--fail-above",
        metavar="TIME|MESSAGES",
        type=limit,
        help="exit status 1 if a lag is larger, in time or messages (10m, 100000); 3 if there is no channel to check",
    )
    verb.add_argument(
        "--broker",
        metavar="HOST:PORT",
        default=os.environ.get("NSQHA_GRPC_ADDRESS", GRPC_ADDRESS),
        help=f"--grpc-address of a broker (default {GRPC_ADDRESS}, $NSQHA_GRPC_ADDRESS)",
    )
    add_timeout(verb)
    add_json(verb, "print JSON, one line per sample")
    add_token(verb)
    add_certificate(verb)


def limit(text: str) -> tuple[int | None, float | None]:
    """Parse a limit: (messages, None) or (None, seconds)."""
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
    from pyspark_nsqha.lag import Limit, look, rates

    allowed = Limit(*(args.fail_above or (None, None)))
    lake = _lake(args.lake)
    before: dict[tuple[str, str], Lag] = {}
    looked = 0.0
    with administration(args, args.broker) as admin:
        while True:
            try:
                found = look(
                    admin.call,
                    admin.call_segments,
                    topics=tuple(dict.fromkeys(args.topic)),
                    pattern=args.pattern or "",
                    channel=args.channel or "",
                    lake=lake(),
                )
            except exits.Exit as error:
                # A watch of days must survive a failure; an error at the first sample ends the command at once.
                if not looked or error.status not in (exits.UNREACHABLE, exits.FAILED):
                    raise
                say(f"{args.parser.prog}: {error}; trying again in {show_duration(args.interval / 1e9)}")
            else:
                now = time.monotonic()
                looks = {(lag.topic, lag.channel): lag for lag in found.lags}
                measured = {key: rates(before[key], lag, now - looked) for key, lag in looks.items() if key in before}
                status = _tell(args, found, measured, allowed, before)
                if args.interval is None or status not in (exits.OK, exits.PARTLY):
                    return status
                before, looked = looks, now
            time.sleep(args.interval / 1e9)


def _lake(uri: str | None) -> Any:
    """Return a function that reads the state of the lake; without a lake it returns None."""
    if uri is None:
        return lambda: None
    check_lake(uri)  # a wrong URI is an error before any broker is asked
    from pyspark_nsqha.lake.commits.commit import ManifestCommits
    from pyspark_nsqha.lake.commits.manifest import BadManifest
    from pyspark_nsqha.lake.store import Store, StoreFailed

    commits = ManifestCommits(Store(uri))

    def state() -> Any:
        try:
            return commits.state()
        except (StoreFailed, BadManifest) as error:
            raise exits.Exit(exits.FAILED, str(error)) from None

    return state


def _tell(
    args: argparse.Namespace,
    found: LagSample,
    measured: dict[tuple[str, str], Rates],
    allowed: Limit,
    before: Collection[tuple[str, str]] = (),
) -> int:
    """Print one sample on stdout; what is above the limit, missing or not known on stderr. `before`: channels of the
    last sample."""
    lags, limited = found.lags, args.fail_above is not None
    above = [lag for lag in lags if allowed.exceeded(lag)]
    missing = found.missing(args.topic, args.channel or "") if limited or args.channel else []
    if limited:
        there = {(lag.topic, lag.channel) for lag in lags}
        missing += [f"{topic}/{channel} is gone" for topic, channel in sorted({*before} - there) if channel]
    if args.json:
        rows = [record(lag, measured.get((lag.topic, lag.channel))) for lag in lags]
        print_json({"channels": rows, "above": [f"{lag.topic}/{lag.channel}" for lag in above], "missing": missing})
    elif lags or not missing:
        _show(args, lags, measured)
    errors = list(dict.fromkeys(error for lag in lags for error in lag.errors))
    if missing and found.doubts:
        errors += [f"{one}, as far as is known: {some(found.doubts)}" for one in missing]
        missing = []
    for error in errors:
        say(f"{args.parser.prog}: {error}")
    for one in missing:
        say(f"{args.parser.prog}: {one}: there is no such reader channel; `nsqha channel list` lists channels")
    if above:
        names = some([f"{lag.topic}/{lag.channel}" if lag.channel else lag.topic for lag in above])
        say(f"{args.parser.prog}: above the limit: {names}")
        return exits.FAILED
    if missing:
        return exits.NOT_FOUND
    return exits.PARTLY if errors else exits.OK


def record(lag: Lag, rates: Rates | None) -> dict[str, Any]:
    """The object that --json prints."""
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


def _show(args: argparse.Namespace, found: Sequence[Lag], measured: dict[tuple[str, str], Rates]) -> None:
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
