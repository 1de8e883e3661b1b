"""`nsqha channel`: list, show, create, set, delete, pause, unpause, empty. To move one: `nsqha seek`."""

from __future__ import annotations

import argparse
from typing import Any

from nsqha.cli.brokers.admin import USUAL, Admin, done, record, warn
from nsqha.cli.channel import policies
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import Parser, add_grpc, add_json, add_verb, add_yes, name
from nsqha.cli.terminal.screen import Cell, confirm, never_finished, print_json, say, show_count, table
from nsqha.cli.terminal.times import show_duration
from nsqha.cli.verbs import VERBS

SHAPE = (
    '{"topic", "name", "paused", "ephemeral", "depth", "in_flight", "deferred", "consumers", '
    '"oldest_unfinished_seconds", "partitions": [{"partition", "floor", "next_read", "finished_above_floor", '
    '"uncommitted_progress", "stuck", "depth", "in_flight", "deferred", "oldest_unfinished_seconds", "message_count", '
    '"finished", "requeued", "timed_out", "leader_epoch", "error", "skipped", "dropped", "expired", "dead", "died"}], '
    f'"message_count", "finished", "requeued", "timed_out", "reader", "policy": {policies.POLICY}, '
    f'"default_policy": {policies.POLICY}, "skipped", "dropped", "expired", "dead", "died"}}'
)
HEADERS = ("CHANNEL", "DEPTH", "IN FLIGHT", "DEFERRED", "CONSUMERS", "OLDEST", "STATE")


def add_parser(commands: Any) -> None:
    noun = add_verb(commands, "channel", None, help=VERBS["channel"])
    verbs = noun.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_looks(verbs)
    _add_changes(verbs)


def _add_looks(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "list",
        run_list,
        help="list the channels of a topic, or of all topics",
        examples=("nsqha channel list orders", "nsqha channel list --json"),
        shape=f"{SHAPE} per line",
        statuses=USUAL,
    )
    verb.add_argument("topic", metavar="TOPIC", type=name, nargs="?")
    verb.add_argument("--names", action="store_true", help="print names only")
    add_json(verb, "print one line of JSON per channel")
    add_grpc(verb)

    verb = _of_channel(
        verbs,
        "show",
        run_show,
        "show a channel: depth, in flight, position in each partition",
        ("nsqha channel show orders billing", "nsqha channel show orders billing --json"),
        shape=SHAPE,
    )


def _add_changes(verbs: Any) -> None:
    verb = _of_channel(
        verbs,
        "create",
        run_create,
        "create a channel (subscribing to one creates it too)",
        ("nsqha channel create orders audit", "nsqha channel create orders spark --reader"),
        shape=SHAPE,
        statuses=(*USUAL, exits.CONFLICT),
    )
    reader = "for a reader of log files such as nsqha spark: it delivers nothing, keeps files from retention, shows lag"
    verb.add_argument("--reader", action="store_true", help=reader)

    policies.add_set(verbs)

    for word, what in (("pause", "deliver nothing until it is unpaused"), ("unpause", "go on after a pause")):
        examples = (f"nsqha channel {word} orders billing",)
        verb = _of_channel(verbs, word, run_pause, what, examples, shape='{"topic", "channel", "paused"}')
        verb.set_defaults(paused=word == "pause")

    verb = _of_channel(
        verbs,
        "empty",
        run_empty,
        "drop all messages of a channel: waiting, in flight, deferred",
        ("nsqha channel empty orders billing --yes",),
        shape='{"topic", "channel", "emptied", "dead", "skipped"}',
        statuses=(*USUAL, exits.NOT_CONFIRMED),
    )
    add_yes(verb)

    verb = _of_channel(
        verbs,
        "delete",
        run_delete,
        "delete a channel; its consumers are disconnected",
        ("nsqha channel delete orders audit --yes",),
        shape='{"topic", "channel", "deleted", "dead", "skipped"}',
        statuses=(*USUAL, exits.NOT_CONFIRMED),
    )
    add_yes(verb)


def _of_channel(
    verbs: Any, word: str, run: Any, help: str, examples: tuple[str, ...], *, shape: str, statuses: Any = USUAL
) -> Parser:
    verb = add_verb(verbs, word, run, help=help, examples=examples, shape=shape, statuses=statuses)
    verb.add_argument("topic", metavar="TOPIC", type=name)
    verb.add_argument("channel", metavar="CHANNEL", type=name)
    add_json(verb)
    add_grpc(verb)
    return verb


def run_list(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        answer = admin.call("ListChannels", topic=args.topic or "")
    channels = answer.channels
    warn(args, answer)
    if args.names:
        for channel in channels:
            print(channel.name)
    elif args.json:
        for channel in channels:
            print_json(record(channel))
    elif not channels:
        say("no channels yet; subscribing creates one: nsqha sub TOPIC CHANNEL")
    elif args.topic:
        table(HEADERS, [row(channel) for channel in channels])
    else:
        table(("TOPIC", *HEADERS), [(channel.topic, *row(channel)) for channel in channels])
    return exits.OK


def run_show(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        answer = admin.call("DescribeChannel", topic=args.topic, channel=args.channel)
    channel = answer.channel
    warn(args, answer)
    if args.json:
        print_json(record(channel))
        return exits.OK
    table(HEADERS, [row(channel)])
    if channel.reader:
        age = show_duration(channel.oldest_unfinished_seconds)
        lag = f"{channel.depth:,} messages behind, the oldest {age} old" if channel.depth else "not behind"
        print(f"\na reader's channel: {lag}; it keeps them from retention\n")
        _print_places(args, channel)
        return exits.OK
    policies.show(channel.policy, channel.default_policy)
    counts = f"{channel.message_count:,} messages, {channel.finished:,} finished, {channel.requeued:,} requeued"
    print(f"\nsince the leaders were elected: {counts}, {channel.timed_out:,} timed out")
    if channel.skipped or channel.dropped or channel.expired:
        passed = f"{channel.skipped:,} skipped, {channel.expired:,} too old, {channel.dropped:,} beyond its depth"
        print(f"passed over by its policy: {passed}")
    if channel.dead or channel.died:
        where = f"nsqha dead list {channel.topic} {channel.name}"
        print(f"dead letters: {channel.dead:,} kept, {channel.died:,} died ({where})")
    print()
    _print_places(args, channel)
    return exits.OK


def _print_places(args: argparse.Namespace, channel: Any) -> None:
    places = [
        (p.partition, p.floor, p.next_read, p.finished_above_floor, p.uncommitted_progress, p.depth)
        for p in channel.partitions
        if not p.error
    ]
    table(("PARTITION", "FLOOR", "NEXT", "RANGES ABOVE", "UNCOMMITTED", "DEPTH"), places)
    for p in channel.partitions:
        if p.error:
            say(f"{args.parser.prog}: partition {p.partition}: {p.error}")


def run_create(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        channel = admin.call("CreateChannel", topic=args.topic, channel=args.channel, reader=args.reader).channel
    return done(args, record(channel) | ({} if args.json else {"channel": args.channel}), "created")


def run_pause(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        admin.call("PauseChannel", topic=args.topic, channel=args.channel, paused=args.paused)
    return done(args, _named(args) | {"paused": args.paused}, "paused" if args.paused else "unpaused")


def run_empty(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        _confirm(admin, args, "empty")
        answer = admin.call("EmptyChannel", topic=args.topic, channel=args.channel)
    dead, skipped = answer.dead, answer.skipped
    if skipped and not args.json:
        say(f"skipped {never_finished(skipped)}; nsqha seek {args.topic} {args.channel} --undo brings them back")
    if dead and not args.json:
        say(f"it keeps {show_count(dead, 'dead letter')}: nsqha dead list {args.topic} {args.channel}")
    return done(args, _named(args) | {"emptied": True, "dead": dead, "skipped": skipped}, "emptied")


def run_delete(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        dead = _confirm(admin, args, "delete").dead
        skipped = admin.call("DeleteChannel", topic=args.topic, channel=args.channel).skipped
    if skipped and not args.json:
        say(f"skipped {never_finished(skipped)}")
    if dead and not args.json:
        say(f"it dropped {show_count(dead, 'dead letter')}")
    return done(args, _named(args) | {"deleted": True, "dead": dead, "skipped": skipped}, "deleted")


def _confirm(admin: Admin, args: argparse.Namespace, word: str) -> Any:
    """The channel as it was then."""
    c = admin.call("DescribeChannel", topic=args.topic, channel=args.channel).channel
    what = f"{c.depth:,} waiting, {c.in_flight:,} in flight, {c.deferred:,} deferred, {c.consumers} consumers"
    if c.dead and word == "delete":
        what += f", {show_count(c.dead, 'dead letter')}"
    skips = 0 if c.reader else c.depth + c.in_flight + c.deferred
    confirm(f"{word} channel {args.channel} of topic {args.topic} ({what})?", yes=args.yes, skips=skips)
    return c


def _named(args: argparse.Namespace) -> dict[str, Any]:
    return {"topic": args.topic, "channel": args.channel}


def row(channel: Any) -> tuple[Cell, ...]:
    """One line of a table of channels."""
    oldest = show_duration(channel.oldest_unfinished_seconds) if channel.oldest_unfinished_seconds else ""
    state = state_of(channel)
    return channel.name, channel.depth, channel.in_flight, channel.deferred, channel.consumers, oldest, state


def state_of(channel: Any) -> str:
    """The reason why a channel delivers nothing, in a few words."""
    if any(partition.stuck for partition in channel.partitions):
        return "stopped by damage: nsqha log skip"
    if any(partition.error for partition in channel.partitions):
        return "not all partitions answered"
    if channel.reader:
        return "a reader's"
    return "paused" if channel.paused else ""
