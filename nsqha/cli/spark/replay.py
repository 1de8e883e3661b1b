"""`nsqha spark replay`: send messages of the log again, into another topic; or move a channel back to their start."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsqha.cli.brokers.admin import Admin, record
from nsqha.cli.spark.checks import check_lake, near_misses, status_of
from nsqha.cli.spark.flags import (
    TIME_HELP,
    Within,
    add_common,
    administration,
    connection,
    place,
    say_range,
    started,
    time_range,
)
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import TCP_ADDRESS, Parser, add_verb, add_yes, count_up_to, duration, name
from nsqha.cli.terminal.screen import ProgressLine, confirm, print_json, say, show_bytes, show_count, table
from nsqha.cli.terminal.times import show_duration
from nsqha.ids import is_ephemeral

if TYPE_CHECKING:
    from pyspark_nsqha.writing.replay import Replay, Size
    from pyspark_nsqha.writing.replay_state import ReplaySpan, ReplayState

RATE_MAX = 100_000_000
SPLIT_BYTES = 16 << 20  # log per task: a wave of tasks lasts seconds
IDS_MAX = 100_000
IDS_BYTES_MAX = 4 << 20
OFFSETS = re.compile(r"(\d{1,4}):(\d{1,15})-(\d{1,15})?")
DESCRIPTION = f"""\
Send messages of TOPIC again: those of a range of time or of offsets, those that a query selects, or a list of ids.

--into publishes them into another topic, as new messages. It reads what is committed when it begins. A message may be
sent twice where a connection or a run was lost; such messages are counted. With --state the same command continues a
run that was killed: what was finished is not sent again. Order is kept only within a part of a partition. --channel
instead moves that channel of TOPIC back to where the range begins, as `nsqha seek` does; other channels are not
affected.

{TIME_HELP}"""
SHAPE = (
    '{"topic", "into", "channel", "done", "messages", "bytes", "sent", "possible_duplicates", "missing", "left", '
    '"failed": [why], "partitions": [as `seek` has them, with --channel], "seconds"}'
)


def add_replay(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "replay",
        run_replay,
        help="send messages of the log to another topic, or move one channel back to them",
        description=DESCRIPTION,
        examples=(
            "nsqha spark replay orders --from -2h --into orders-again --rate 1000 --yes",
            "nsqha spark replay orders --from -2h --channel billing --plan",
        ),
        shape=SHAPE,
        statuses=(
            exits.FAILED, exits.USAGE, exits.NOT_FOUND, exits.UNREACHABLE, exits.PARTLY, exits.NOT_CONFIRMED,
            exits.INTERRUPTED,
        ),
        times=True,
    )  # fmt: skip
    verb.add_argument("topic", metavar="TOPIC", type=name)
    what = verb.add_argument_group("what")
    what.add_argument("--from", dest="since", metavar="TIME", help="start at the first message that is not older")
    what.add_argument("--until", metavar="TIME", help="end before this time (default: what is committed)")
    what.add_argument("--to", dest="until", help=argparse.SUPPRESS)
    what.add_argument(
        "--offsets", metavar="P:FIRST-END", type=offsets, action="append", default=[],
        help="offsets of partition P; without END up to what is committed; may be repeated",
    )  # fmt: skip
    what.add_argument("--ids", metavar="FILE", help="message ids of 16 hex digits, one per line")
    what.add_argument("--lake", metavar="URI", default="", help="read from this lake what the log no longer has")
    what.add_argument("--where", metavar="SQL", help="only messages for which this condition on their columns is true")
    where = verb.add_argument_group("destination")
    where.add_argument("--into", metavar="TOPIC", type=name, help="publish them into this topic")
    where.add_argument("--channel", metavar="NAME", type=name, help="or move this channel of TOPIC back")
    where.add_argument("--allow-same", action="store_true", help="allow TOPIC as --into: all its channels get them")
    where.add_argument("--rate", metavar="N", type=count_up_to(RATE_MAX), help="messages per second, in all")
    where.add_argument("--defer", metavar="TIME", type=duration, default=0, help="deliver each after this time")
    _add_publishing(verb)
    verb.add_argument("--skip-missing", action="store_true", help="skip what the log has lost, and count it")
    verb.add_argument("--state", metavar="FILE", type=Path, help="record progress in this file, and continue from it")
    verb.add_argument("--plan", action="store_true", help="show how many messages it is and stop")
    add_yes(verb)
    add_common(verb)


def _add_publishing(verb: Parser) -> None:
    group = verb.add_argument_group("publishing; the files must be on the machines where tasks run")
    group.add_argument(
        "--nsqd",
        metavar="HOST:PORT",
        action="append",
        help=f"--tcp-address of a broker, may be repeated (default {TCP_ADDRESS}, $NSQHA_TCP_ADDRESS)",
    )
    group.add_argument("--tls", action="store_true", help="use TLS; each of the following flags implies it")
    group.add_argument("--tls-root-ca-file", metavar="PATH", default="", help="certificate authority of the broker")
    group.add_argument("--tls-cert", metavar="PATH", default="", help="client certificate")
    group.add_argument("--tls-key", metavar="PATH", default="", help="key of --tls-cert")
    group.add_argument("--tls-insecure-skip-verify", action="store_true", help="accept any certificate")
    secret = "file with the secret for AUTH (or $NSQHA_AUTH_SECRET on those machines)"
    group.add_argument("--auth-secret-file", metavar="PATH", default="", help=secret)


def offsets(text: str) -> tuple[int, int, int | None]:
    """Parse (partition, first, end)."""
    found = OFFSETS.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not PARTITION:FIRST-END such as 0:100-200")
    first, end = int(found[2]), int(found[3]) if found[3] else None
    if end is not None and end < first:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins")
    return int(found[1]), first, end


def run_replay(args: argparse.Namespace) -> int:
    check(args)
    args.now_ns = time.time_ns()
    if args.channel:
        if args.since is not None:
            at = place(args.parser, "--from", args.since, args.now_ns)  # a usage error comes before any request
            if at.kind == "time" and not args.json:
                say_range(Within(at.value, None))
        return _move_channel(args)
    args.within = time_range(args.parser, args.since, args.until, args.now_ns)
    if not args.json:
        say_range(args.within)
    return _send(args)


def check(args: argparse.Namespace) -> None:
    """Raise usage errors that need no broker."""
    error = args.parser.error
    if bool(args.into) == bool(args.channel):
        error("give either --into TOPIC or --channel NAME")
    if is_ephemeral(args.topic):
        error(f"{args.topic} is ephemeral: it does not keep its log")
    ranged = args.since is not None or args.until is not None
    if args.offsets and ranged:
        error("--offsets says where a range begins and ends: leave out --from and --until")
    if args.ids and (ranged or args.offsets or args.where):
        error("--ids selects messages by itself: leave out --from, --until, --offsets and --where")
    if not (args.ids or args.where or args.offsets or args.since is not None):
        error("say which messages: --from TIME (start: everything), --offsets, --ids or --where")
    if len({number for number, _, _ in args.offsets}) < len(args.offsets):
        error("--offsets names a partition twice")
    if args.channel:
        for flag, given in (
            ("--ids", args.ids), ("--where", args.where), ("--until", args.until), ("--rate", args.rate),
            ("--lake", args.lake),
            ("--defer", args.defer), ("--state", args.state), ("END of --offsets", any(o[2] for o in args.offsets)),
        ):  # fmt: skip
            if given:
                error(f"a channel is moved to where a range begins and gets all that follows: leave out {flag}")
    if args.into == args.topic and not args.allow_same:
        error(f"--into is {args.topic} itself: all its channels would get them again; add --allow-same to do that")


# ---- a channel


def _move_channel(args: argparse.Namespace) -> int:
    """Move the channel back in every partition where the range begins below its position."""
    started_s = time.monotonic()
    with administration(args, *(args.broker or [args.broker_default])) as admin:
        plans = list(_seeks(args, admin, plan_only=True, only=None))
        back = {one.partition for one in plans if not one.error and one.to_offset < one.from_offset}
        ahead = [one.partition for one in plans if not one.error and one.to_offset > one.from_offset]
        if ahead:
            numbers = ", ".join(map(str, ahead))
            say(f"{args.parser.prog}: not moved, because the channel is not that far yet: partition {numbers}")
        done = plans
        if not args.plan and back:
            messages = sum(one.messages for one in plans if one.partition in back)
            confirm(f"move channel {args.channel} of {args.topic} back by {show_count(messages)}?", yes=args.yes)
            done = [one for one in plans if one.error] + list(_seeks(args, admin, plan_only=False, only=back))
    moved = [one for one in done if one.partition in back or one.error]
    failed = [f"partition {one.partition}: {one.error}" for one in moved if one.error]
    for why in failed:
        say(f"{args.parser.prog}: {why}")
    messages = sum(one.messages for one in moved if not one.error)
    size = sum(one.bytes for one in moved if not one.error)
    if args.json:
        totals = {"messages": messages, "bytes": size, "left": 0, "failed": failed}
        _print(args, not args.plan and not failed, totals, started_s, partitions=[record(one) for one in moved])
    else:
        well = [one for one in moved if not one.error]
        rows = [(p.partition, p.from_offset, p.to_offset, p.messages, show_bytes(p.bytes)) for p in well]
        if rows:
            table(("PARTITION", "FROM", "TO", "MESSAGES AGAIN", "BYTES"), rows, sys.stdout)
        else:
            print("nothing to move", flush=True)
    return exits.OK if not failed else exits.PARTLY if len(failed) < len(moved) else exits.FAILED


def _seeks(args: argparse.Namespace, admin: Admin, *, plan_only: bool, only: set[int] | None) -> Iterator[Any]:
    """Yield the answers of all partitions, or of these."""
    fields: dict[str, Any] = {"topic": args.topic, "channel": args.channel, "plan_only": plan_only}
    targets: list[tuple[int | None, dict[str, Any]]]
    if args.offsets:
        targets = [(number, {"offset": first}) for number, first, _ in args.offsets]
    else:
        at = place(args.parser, "--from", args.since, args.now_ns)
        target: dict[str, Any] = {"timestamp_ns": at.value} if at.kind == "time" else {at.kind: True}
        targets = [(None, target)] if only is None else [(number, target) for number in sorted(only)]
    for number, target in targets:
        if only is None or number in only:
            yield from admin.call("Seek", **fields, target=target, partition=number).partitions


# ---- into a topic


def _send(args: argparse.Namespace) -> int:
    from pyspark_nsqha import jobs
    from pyspark_nsqha.model import ReadFailed
    from pyspark_nsqha.writing.replay_state import BadState

    began = time.monotonic()
    ids = _ids(args)
    if args.lake:
        check_lake(args.lake)
    try:
        with near_misses(args, [args.topic]), _planned(args, ids) as replay:
            if (args.plan and not args.where) or not replay.state.left:
                return _tell_plan(args, replay, began) if args.plan else _tell_sent(args, replay.state, [], began)
            if not args.where:
                _ask(args, replay)
            with started(args, "nsqha replay") as replay.session:
                return _run(args, replay, began)
    except (jobs.CannotStart, BadState) as error:
        raise exits.Exit(exits.FAILED, str(error)) from None
    except ReadFailed as error:
        raise exits.Exit(status_of(error), str(error)) from None


def _ids(args: argparse.Namespace) -> list[str]:
    """The ids in the file, without duplicates."""
    if not args.ids:
        return []
    try:
        with open(args.ids, "rb") as file:
            raw = file.read(IDS_BYTES_MAX + 1)
    except OSError as error:
        raise exits.Exit(exits.FAILED, f"--ids {args.ids} cannot be read: {error.strerror}") from None
    found = list(dict.fromkeys(raw.decode("ascii", "replace").split()))
    if len(raw) > IDS_BYTES_MAX or len(found) > IDS_MAX:
        raise exits.Exit(exits.USAGE, f"--ids {args.ids} has more than {IDS_MAX:,} ids: use several files")
    for number, one in enumerate(found, 1):
        if not re.fullmatch(r"[0-9a-f]{16}", one):
            raise exits.Exit(exits.USAGE, f"--ids {args.ids}: {one[:40]!r}, number {number}, is not 16 hex digits")
    if not found:
        raise exits.Exit(exits.USAGE, f"--ids {args.ids} is empty")
    return found


@contextmanager
def _planned(args: argparse.Namespace, ids: list[str]) -> Iterator[Replay]:
    """Plan what is sent; the log is held until the block ends."""
    from pyspark_nsqha.lake.store import Store
    from pyspark_nsqha.model import ReadFailed
    from pyspark_nsqha.snapshot import Segments
    from pyspark_nsqha.writing.replay import Replay, order_of, pinned, planned_ids, planned_range
    from pyspark_nsqha.writing.replay_state import ReplaySpan, ReplayState

    asked = connection(args)
    log = Segments(asked)
    since, until = args.within
    found = pinned(log, args.topic, [at for at in (since, until) if at is not None], lake=args.lake)
    try:
        order = order_of(found, args.topic, args.into, _asked(args, ids))
        state = ReplayState.load(args.state) if args.state is not None else None
        if state is not None:
            state.check(order)
        else:
            missing = 0
            spans: list[ReplaySpan]
            if ids:
                spans, missing = planned_ids(found, ids, skip_missing=args.skip_missing)
            else:
                ends = {pin.identity.partition: pin.end.offset for pin in found.pins}
                given = [
                    ReplaySpan(n, first, ends.get(n, first) if end is None else end) for n, first, end in args.offsets
                ]
                spans = planned_range(found, since_ns=since, until_ns=until, offsets=given)
            state = ReplayState(order, spans, args.state)
            state.missing = missing
        yield Replay(
            asked,
            found,
            state,
            where=args.where or "",
            lake=Store(args.lake).uri if args.lake else "",  # tasks run in other folders
            single_messages=bool(ids),
            skip_missing=args.skip_missing,
            split_bytes=SPLIT_BYTES,
            to=_destination(args),
            rate=args.rate,
        )
    finally:
        try:
            log.release_hold(found.hold_id)
        except ReadFailed:
            pass  # the hold ends by itself


def _asked(args: argparse.Namespace, ids: list[str]) -> dict[str, Any]:
    """The flags that identify a replay, as the user wrote them."""
    asked: dict[str, Any] = {
        "--from": args.since,
        "--until": args.until,
        "--offsets": ",".join(f"{number}:{first}-{'' if end is None else end}" for number, first, end in args.offsets),
        "--ids": hashlib.sha256(" ".join(ids).encode()).hexdigest() if ids else "",
        "--where": args.where,
        "--defer": args.defer // 10**6,
    }
    return {flag: value for flag, value in asked.items() if value}


def _destination(args: argparse.Namespace) -> Any:
    from pyspark_nsqha.writing.publisher import LinkSecurity, split_address
    from pyspark_nsqha.writing.replay_task import Destination
    from pyspark_nsqha.writing.sink import SinkOptions

    brokers = args.nsqd or [os.environ.get("NSQHA_TCP_ADDRESS", TCP_ADDRESS)]
    for broker in brokers:
        try:
            split_address(broker)
        except ValueError as error:
            args.parser.error(f"--nsqd: {error}")
    if bool(args.tls_cert) != bool(args.tls_key):
        args.parser.error("--tls-cert and --tls-key go together")
    skip = args.tls_insecure_skip_verify
    tls = args.tls or skip or bool(args.tls_root_ca_file or args.tls_cert)
    security = LinkSecurity(tls, args.tls_root_ca_file, args.tls_cert, args.tls_key, skip)
    sink = SinkOptions(
        tuple(brokers),
        args.into,
        message_bytes_max=1 << 30,  # the broker enforces its own limit
        security=security,
        auth_secret_file=args.auth_secret_file,
    )
    return Destination(sink, defer_ms=args.defer // 10**6)


def _run(args: argparse.Namespace, replay: Replay, began: float) -> int:
    if args.where:
        try:
            replay.check_query()
        except ValueError as error:
            args.parser.error(f"--where: {error}")
        if args.plan:
            return _tell_plan(args, replay, began)
        _ask(args, replay)
    progress = ProgressLine("replay", line=progress_line)
    failed = replay.run(progress)
    progress.close()
    return _tell_sent(args, replay.state, failed, began)


def _ask(args: argparse.Namespace, replay: Replay) -> None:
    """Show what would be sent, and ask for confirmation."""
    state = replay.state
    if state.done:
        say(f"{args.parser.prog}: continues from {args.state}: {show_count(state.sent)} sent before")
    if args.yes:
        return
    if args.where:
        what = f"send those of {show_count(state.left)} of {args.topic} for which the condition is true"
    else:
        what = f"send {show_count(state.left)}, {show_bytes(replay.size().bytes)}, of {args.topic}"
    rate = f" at {args.rate:,}/s" if args.rate else ""
    confirm(f"{what} into {args.into}{rate}?", yes=False)


def _tell_sent(args: argparse.Namespace, state: ReplayState, failed: list[str], began: float) -> int:
    for why in failed:
        say(f"{args.parser.prog}: {why}")
    if failed and args.state is not None:
        say(f"{args.parser.prog}: {show_count(state.left)} left; the same command continues there")
    if args.json:
        _print(args, not failed, {"messages": state.total, "left": state.left, "failed": failed}, began, state=state)
    else:
        print(words_of(state, time.monotonic() - began), flush=True)
    if not failed:
        return exits.OK
    return exits.PARTLY if state.sent else exits.FAILED


def words_of(state: ReplayState, seconds: float) -> str:
    text = f"{show_count(state.sent - state.sent_before)} sent in {show_duration(seconds)}"
    if state.sent_before:
        text += f", {state.sent_before:,} by earlier runs"
    if state.possible_duplicates:
        text += f"; up to {state.possible_duplicates:,} of them may be stored twice"
    if state.missing:
        text += f"; {show_count(state.missing)} missing in the log"
    return text


def _tell_plan(args: argparse.Namespace, replay: Replay, began: float) -> int:
    size: Size = replay.size()
    if args.json:
        totals = {"messages": size.messages, "bytes": size.bytes, "left": size.messages, "failed": []}
        _print(args, False, totals, began)
        return exits.OK
    took = f", {show_duration(size.messages / args.rate)} at {args.rate:,}/s" if args.rate else ""
    print(f"{show_count(size.messages)}, {show_bytes(size.bytes)}{took}", flush=True)
    return exits.OK


def _print(
    args: argparse.Namespace,
    done: bool,
    totals: dict[str, Any],
    began: float,
    *,
    state: ReplayState | None = None,
    partitions: list[Any] | None = None,
) -> None:
    print_json(
        {
            "topic": args.topic,
            "into": args.into,
            "channel": args.channel,
            "done": done,
            "messages": totals["messages"],
            "bytes": totals.get("bytes"),
            "sent": state.sent if state is not None else 0,
            "possible_duplicates": state.possible_duplicates if state is not None else 0,
            "missing": state.missing if state is not None else 0,
            "left": totals["left"],
            "failed": totals["failed"],
            "partitions": partitions or [],
            "seconds": round(time.monotonic() - began, 3),
        }
    )


def progress_line(what: str, done: int, total: int, seconds: float) -> str:
    """`screen.progress_line` for messages instead of bytes."""
    rate = done / seconds if seconds > 0 else 0.0
    left = show_duration((total - done) / rate) if rate else "?"
    share = 100 * done // total if total else 100
    return f"{what}  {share}%  {done:,} of {show_count(total)}  {rate:,.0f}/s  {left} left"
