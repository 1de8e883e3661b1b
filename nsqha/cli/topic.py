"""`nsqha topic`: list, show, create, delete, pause, unpause, empty, set, release."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable
from typing import Any

from nsqha.cli.brokers.admin import USUAL, Admin, done, record, replication, unserved, warn
from nsqha.cli.channel.command import HEADERS, row
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import Parser, add_grpc, add_json, add_verb, add_yes, count, duration, name
from nsqha.cli.terminal.screen import (
    Cell,
    confirm,
    never_finished,
    print_json,
    say,
    show_bytes,
    show_count,
    some,
    table,
)
from nsqha.cli.terminal.times import show_duration, show_time
from nsqha.cli.verbs import VERBS

SYNC = ("always", "interval", "none")
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
SHAPE = (
    '{"name", "uid", "paused", "settings": {"sync", "partitions", "retention_ms", "retention_bytes", '
    '"abandoned_after_ms", "ordered", "replicas", "min_isr"}, "partitions": [{"partition", "log_start_offset", '
    '"log_end_offset", "high_watermark", "pump_offset", "leader_epoch", "bytes", "first_timestamp_ns", '
    '"last_timestamp_ns", "leader", "leader_name", "replicas": [{"node", "name", "alive", "in_sync"}], "min_isr", '
    '"under_replicated", "error", "message_count", "holds": [{"id", "offset", "left_ms"}]}], "channels": [name], '
    '"message_count"}'
)
REPLICAS_MAX = 15
LOOK_SECONDS = 0.1
SAY_SECONDS = 1.0  # of waiting before the first message about it


def add_parser(commands: Any) -> None:
    noun = add_verb(commands, "topic", None, help=VERBS["topic"])
    verbs = noun.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_looks(verbs)
    _add_create(verbs)
    _add_set(verbs)
    _add_pause_empty_delete(verbs)
    _add_release(verbs)


def _add_looks(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "list",
        run_list,
        help="list all topics",
        examples=("nsqha topic list", "nsqha topic list --json"),
        shape=f"{SHAPE} per line",
        statuses=(exits.UNREACHABLE,),
    )
    verb.add_argument("--names", action="store_true", help="print names only")
    add_json(verb, "print one line of JSON per topic")
    add_grpc(verb)

    verb = _of_topic(
        verbs,
        "show",
        run_show,
        "show a topic: settings, partitions and who leads them, channels",
        ("nsqha topic show orders", "nsqha topic show orders --json"),
        shape=SHAPE,
    )
    add_json(verb)


def _add_create(verbs: Any) -> None:
    verb = _of_topic(
        verbs,
        "create",
        run_create,
        "create a topic (publishing to one creates it too)",
        (
            "nsqha topic create payments",
            "nsqha topic create clicks --partitions 4 --sync interval --channel count --channel archive",
            "nsqha topic create ledger --replicas 5 --min-isr 3",
        ),
        shape=SHAPE,
        statuses=(exits.USAGE, exits.CONFLICT, exits.UNREACHABLE, exits.PARTLY),
        description="Create a topic (publishing to one creates it too). Returns when every partition acknowledges "
        "messages; exit status 7: --timeout ended before that, or there are too few nodes.",
    )
    verb.add_argument("--no-wait", action="store_true", help="return as soon as it is created")
    verb.add_argument("--partitions", type=count, default=1, metavar="N", help="default 1; can only grow later")
    verb.add_argument("--channel", type=name, action="append", default=[], help="create it too; may be repeated")
    verb.add_argument("--ordered", action="store_true", help="deliver a message only after the one before is finished")
    _add_settings(verb, copies="not more than there are nodes")
    add_json(verb)


def _add_set(verbs: Any) -> None:
    verb = _of_topic(
        verbs,
        "set",
        run_set,
        "change settings of a topic",
        (
            "nsqha topic set orders --sync interval",
            "nsqha topic set orders --retention 7d --retention-bytes 10GB --yes",
            "nsqha topic set orders --retention forever --abandoned-after never",
            "nsqha topic set orders --partitions 8",
            "nsqha topic set orders --replicas 3 --min-isr 2",
        ),
        shape=SHAPE,
        statuses=(*USUAL, exits.PARTLY, exits.NOT_CONFIRMED),
        description="Change settings of a topic. With --partitions it returns when the new partitions acknowledge "
        "messages; exit status 7: --timeout ended before that, or there are too few nodes. Other changes take effect "
        "after it has returned; the controller changes replicas. A retention that keeps less than before is shown with "
        "what it concerns, and asked for.",
    )
    verb.add_argument("--no-wait", action="store_true", help="with --partitions: return as soon as it is stored")
    verb.add_argument("--partitions", type=count, metavar="N", help="add partitions until there are N")
    _add_settings(verb, copies="may be more than there are nodes now")
    add_yes(verb)
    add_json(verb)


def _add_pause_empty_delete(verbs: Any) -> None:
    for word, what in (("pause", "hand no more messages to the channels"), ("unpause", "go on after a pause")):
        verb = _of_topic(verbs, word, run_pause, what, (f"nsqha topic {word} orders",), shape='{"topic", "paused"}')
        verb.set_defaults(paused=word == "pause")
        add_json(verb)

    verb = _of_topic(
        verbs,
        "empty",
        run_empty,
        "drop messages that are not in any channel yet (the topic is paused, or has no channel)",
        ("nsqha topic empty orders --yes",),
        shape='{"topic", "emptied", "skipped"}',
        statuses=(*USUAL, exits.NOT_CONFIRMED),
    )
    add_yes(verb)
    add_json(verb)

    verb = _of_topic(
        verbs,
        "delete",
        run_delete,
        "delete a topic, its channels and all its messages",
        ("nsqha topic delete payments --yes",),
        shape='{"topic", "deleted"}',
        statuses=(*USUAL, exits.NOT_CONFIRMED),
    )
    add_yes(verb)
    add_json(verb)


def _add_release(verbs: Any) -> None:
    verb = _of_topic(
        verbs,
        "release",
        run_release,
        "end the hold of a batch reader, so that retention can continue",
        ("nsqha topic release orders 00c0ffee00c0ffee",),
        shape='{"topic", "hold", "partitions"}',
        description="End the hold of a batch reader in all topics that it holds, so that retention can continue. "
        "`nsqha topic show` has its id. A reader that still runs fails at messages that retention removes.",
    )
    verb.add_argument("hold", metavar="HOLD_ID", type=hold_id)
    add_json(verb)


def _of_topic(
    verbs: Any,
    word: str,
    run: Any,
    help: str,
    examples: tuple[str, ...],
    *,
    shape: str,
    statuses: Any = USUAL,
    description: str = "",
) -> Parser:
    verb = add_verb(
        verbs, word, run, help=help, description=description, examples=examples, shape=shape, statuses=statuses
    )
    verb.add_argument("topic", metavar="TOPIC", type=name)
    add_grpc(verb)
    return verb


def _add_settings(verb: Parser, *, copies: str) -> None:
    verb.add_argument("--sync", choices=SYNC, help="what OK means")
    finished = "how long finished messages are kept: 7d, forever, default"
    verb.add_argument("--retention", type=span, metavar="TIME", help=finished)
    most = "how much of each partition is kept: 10GB, unlimited, default"
    verb.add_argument("--retention-bytes", type=size, metavar="SIZE", help=most)
    abandoned = "retention may pass a channel without consumers whose oldest unread message is older: 30d, never"
    verb.add_argument("--abandoned-after", type=span, metavar="TIME", help=abandoned)
    text = f"replicas of each partition: 3, default; {copies}"
    verb.add_argument("--replicas", type=replicas, metavar="N", help=text)
    floor = "replicas that must have a message before OK: 2, default (more than half); at most --replicas"
    verb.add_argument("--min-isr", type=replicas, metavar="N", help=floor)


def run_list(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        answer = admin.call("ListTopics")
    topics = answer.topics
    warn(args, answer)
    if args.names:
        for topic in topics:
            print(topic.name)
    elif args.json:
        for topic in topics:
            print_json(record(topic))
    elif topics:
        rows = [
            (t.name, len(t.partitions), len(t.channels), _kept(t), show_bytes(_bytes(t)), *_state(t)) for t in topics
        ]
        table(("TOPIC", "PARTITIONS", "CHANNELS", "KEPT", "BYTES", "SYNC", "STATE"), rows)
    else:
        say("no topics yet; publishing creates one: nsqha pub TOPIC MESSAGE")
    return exits.OK


def run_show(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        answer = admin.call("DescribeTopic", topic=args.topic)
        topic = answer.topic
        warn(args, answer)
        if args.json:
            print_json(record(topic))
            return exits.OK
        channels = admin.call("ListChannels", topic=args.topic).channels
        _print(topic, admin.call("GetNode"))
    if channels:
        print()
        table(HEADERS, [row(channel) for channel in channels])
    return exits.OK


def run_create(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        settings = admin.messages.TopicSettings(partitions=args.partitions, ordered=args.ordered, **_settings(args))
        fields = {"topic": args.topic, "settings": settings, "channels": args.channel}
        answer = admin.call("CreateTopic", **fields)
        topic = answer.topic if args.no_wait else wait_served(args, admin, answer.topic)
        _show_changed(args, admin, topic, answer.remarks)
    return exits.OK if args.no_wait else _served(topic, f"{args.topic} exists")


def wait_served(args: argparse.Namespace, admin: Admin, topic: Any, *, first: int = 0) -> Any:
    """Return the topic when its partitions from `first` on acknowledge messages, when waiting cannot help, or after
    --timeout. Prints what it waits for."""
    began, said = time.monotonic(), False
    while idle(topic, first) and all(map(_hopeful, topic.partitions[first:])):
        waited = time.monotonic() - began
        if waited > args.timeout / 1e9:
            break
        if waited > SAY_SECONDS and not said:
            most = show_duration(args.timeout / 1e9)
            say(f"{args.parser.prog}: waiting, at most {most}: {idle(topic, first)}")
            said = True
        time.sleep(LOOK_SECONDS)
        topic = admin.call("DescribeTopic", topic=topic.name).topic
    return topic


def _served(topic: Any, done: str, *, first: int = 0) -> int:
    """Return OK. Raises Exit if the change is made but partitions from `first` on acknowledge nothing."""
    if waiting := idle(topic, first):
        raise exits.Exit(exits.PARTLY, f"{done}, but {waiting}")
    return exits.OK


def idle(topic: Any, first: int = 0) -> str:
    """Say which partitions from `first` on acknowledge nothing, and why; empty: all acknowledge."""
    found = {partition.partition: why for partition in topic.partitions[first:] if (why := unserved(partition))}
    places = some([f"{topic.name}/{number}" for number in found])
    return f"{places} cannot acknowledge messages yet: {', '.join(sorted(set(found.values())))}" if found else ""


def _hopeful(partition: Any) -> bool:
    """Whether waiting may help: the partition is not placed yet, or enough of its nodes are alive."""
    alive = sum(replica.alive for replica in partition.replicas)
    return not partition.replicas or alive >= partition.min_isr


def run_set(args: argparse.Namespace) -> int:
    if not _settings(args) and args.partitions is None:
        what = "--partitions, --replicas, --min-isr, --sync, --retention, --retention-bytes or --abandoned-after"
        args.parser.error(f"nothing to change: give {what}")
    with Admin.of(args) as admin:
        settings = _settings(args)
        there = 0
        if args.partitions is not None:
            settings["partitions"] = args.partitions
            there = len(admin.call("DescribeTopic", topic=args.topic).topic.partitions)
        if plan := _removed_by(admin, args):
            confirm(f"{plan}. Change topic {args.topic}? This cannot be undone.", yes=args.yes)
        answer = admin.call("UpdateTopicSettings", topic=args.topic, **settings)
        waits = args.partitions is not None and not args.no_wait
        first = there if there < len(answer.topic.partitions) else 0  # asked for once more: what is left may be any
        topic = wait_served(args, admin, answer.topic, first=first) if waits else answer.topic
        _show_changed(args, admin, topic, answer.remarks)
    return _served(topic, f"{args.topic} has {len(topic.partitions)} partitions", first=first) if waits else exits.OK


def _removed_by(admin: Admin, args: argparse.Namespace) -> str:
    """What the new retention may remove, in a sentence or two; empty: it removes nothing that the old one keeps."""
    if args.retention is None and args.retention_bytes is None and args.abandoned_after is None:
        return ""
    topic = admin.call("DescribeTopic", topic=args.topic).topic
    old, node, said = topic.settings, admin.call("GetNode"), []
    new = args.retention or (node.retention_ms if args.retention == 0 else None)
    if new is not None and _shorter(new, old.retention_ms or node.retention_ms):
        age = show_duration(new / 1e3)
        edge = time.time_ns() - new * 10**6
        firsts = [p.first_timestamp_ns for p in topic.partitions if 0 < p.first_timestamp_ns < edge]
        reach = f"the oldest one is of {show_time(min(firsts))}" if firsts else "none is that old now"
        said.append(f"finished messages are removed when they are older than {age} ({reach})")
    new = args.retention_bytes or (node.retention_bytes if args.retention_bytes == 0 else None)
    if new is not None and _shorter(new, old.retention_bytes or node.retention_bytes):
        over = sum(max(p.bytes - new, 0) for p in topic.partitions)
        most = show_bytes(new)
        said.append(f"finished messages above {most} per partition are removed ({show_bytes(over)} now)")
    if args.abandoned_after and _shorter(args.abandoned_after, old.abandoned_after_ms or -1):
        age = show_duration(args.abandoned_after / 1e3)
        counted = show_count(len(topic.channels), "channel")
        said.append(f"a channel without consumers loses unread messages older than {age} (the topic has {counted})")
    if not said:
        return ""
    return f"{'; '.join(said)}; the topic keeps {show_count(_kept(topic))}, {show_bytes(_bytes(topic))}"


def _shorter(new: int, old: int) -> bool:
    """Whether a bound of retention keeps less than before. -1: there is none."""
    return new >= 0 and (old < 0 or new < old)


def run_pause(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        admin.call("PauseTopic", topic=args.topic, paused=args.paused)
    return done(args, {"topic": args.topic, "paused": args.paused}, "paused" if args.paused else "unpaused")


def run_empty(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        topic = admin.call("DescribeTopic", topic=args.topic).topic
        waiting = sum(max(p.log_end_offset - p.pump_offset, 0) for p in topic.partitions)
        what = f"drop {show_count(waiting)} of topic {args.topic} that are not in any channel yet?"
        confirm(f"{what} This cannot be undone.", yes=args.yes or not waiting, skips=waiting)
        skipped = admin.call("EmptyTopic", topic=args.topic).skipped
    if skipped and not args.json:
        say(f"skipped {never_finished(skipped)}")
    return done(args, {"topic": args.topic, "emptied": True, "skipped": skipped}, "emptied")


def run_delete(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        topic = admin.call("DescribeTopic", topic=args.topic).topic
        what = f"{_kept(topic):,} messages, {show_bytes(_bytes(topic))}, {len(topic.channels)} channels"
        confirm(f"delete topic {args.topic} ({what})? This cannot be undone.", yes=args.yes)
        admin.call("DeleteTopic", topic=args.topic)
    return done(args, {"topic": args.topic, "deleted": True}, "deleted")


def run_release(args: argparse.Namespace) -> int:
    with Admin.of(args) as admin:
        topic = admin.call("DescribeTopic", topic=args.topic).topic
        if not any(hold.id == args.hold for partition in topic.partitions for hold in partition.holds):
            raise exits.Exit(exits.NOT_FOUND, f"topic {args.topic} has no hold {args.hold}: it ended, or was released")
        count_ = admin.call_segments("ReleaseHold", hold_id=args.hold).partitions
    if args.json:
        print_json({"topic": args.topic, "hold": args.hold, "partitions": count_})
    else:
        say(f"released {args.hold} in {show_count(count_, 'partition')}")
    return exits.OK


def _show_changed(args: argparse.Namespace, admin: Admin, topic: Any, remarks: Iterable[str]) -> None:
    for remark in remarks:
        say(f"{args.parser.prog}: {remark}")
    if args.json:
        print_json(record(topic))
    else:
        _print(topic, admin.call("GetNode"))


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if args.sync is not None:
        settings["sync"] = f"SYNC_{args.sync.upper()}"
    if args.retention is not None:
        settings["retention_ms"] = args.retention
    if args.retention_bytes is not None:
        settings["retention_bytes"] = args.retention_bytes
    if args.abandoned_after is not None:
        settings["abandoned_after_ms"] = max(args.abandoned_after, 0)
    if args.replicas is not None:
        settings["replicas"] = args.replicas
    if args.min_isr is not None:
        settings["min_isr"] = args.min_isr
    return settings


def _print(topic: Any, node: Any) -> None:
    settings = topic.settings
    print(f"topic      {topic.name}{'  (paused)' if topic.paused else ''}")
    print(f"sync       {record(settings)['sync']}{'  ordered' if settings.ordered else ''}")
    if settings.replicas or settings.min_isr:
        copies = settings.replicas or "as many as there are hosts, up to 3"
        print(f"replicas   {copies}{_owed(topic)}; min_isr {settings.min_isr or 'more than half'}")
    by_time = _limit(settings, node, "retention_ms", "for ever", lambda ms: show_duration(ms / 1000))
    by_size = _limit(settings, node, "retention_bytes", "no limit", show_bytes)
    print(f"retention  {by_time}; by size: {by_size}")
    if settings.abandoned_after_ms:
        print(f"abandoned  after {show_duration(settings.abandoned_after_ms / 1000)}")
    rows = [
        (
            p.partition,
            p.log_start_offset,
            p.high_watermark,
            show_bytes(p.bytes),
            p.leader_epoch,
            show_time(p.first_timestamp_ns) if p.first_timestamp_ns else "",
            show_time(p.last_timestamp_ns) if p.log_end_offset > p.log_start_offset else "",
        )
        for p in topic.partitions
    ]
    print()
    table(("PARTITION", "START", "END", "BYTES", "EPOCH", "OLDEST", "NEWEST"), rows)
    if any(len(p.replicas) > 1 or p.error or p.under_replicated for p in topic.partitions):
        print()
        headers = ("PARTITION", "LEADER", "EPOCH", "IN SYNC", "MISSING", "LOG END", "COMMITTED", "MIN ISR", "STATE")
        table(headers, [_replicas_row(p) for p in topic.partitions])
    if any(p.holds for p in topic.partitions):
        holds = [(p.partition, hold) for p in topic.partitions for hold in p.holds]
        held = [(number, hold.id, hold.offset, show_duration(hold.left_ms / 1000)) for number, hold in holds]
        print()
        table(("PARTITION", "HELD BY", "FROM OFFSET", "FOR"), held)


def _owed(topic: Any) -> str:
    """Say how many of the wanted replicas have no node; empty: none."""
    owed = sum(max(topic.settings.replicas - len(p.replicas), 0) for p in topic.partitions if p.replicas)
    return f" ({show_count(owed, 'replica')} still without a node)" if owed else ""


def _replicas_row(partition: Any) -> tuple[Cell, ...]:
    in_sync = [_node(replica) for replica in partition.replicas if replica.in_sync]
    missing = [_node(replica) for replica in partition.replicas if not replica.in_sync]
    ends: tuple[Cell, ...] = ("", "") if partition.error else (partition.log_end_offset, partition.high_watermark)
    leader = partition.leader_name or (f"{partition.leader:016x}" if partition.leader else "-")
    return (
        partition.partition,
        leader,
        partition.leader_epoch,
        " ".join(in_sync),
        " ".join(missing) or "-",
        *ends,
        partition.min_isr,
        partition.error or replication(partition),
    )


def _node(replica: Any) -> str:
    return (replica.name or f"{replica.node:016x}") + ("" if replica.alive else " (away)")


def _limit(settings: Any, node: Any, field: str, unlimited: str, show: Any) -> str:
    """A setting, or the node's default for topics without it; older brokers do not send that default."""
    value = getattr(settings, field)
    default = value == 0
    if default and not node.HasField(field):
        return "the node's default"
    if default:
        value = getattr(node, field)
    return (unlimited if value < 0 else show(value)) + (" (the node's default)" if default else "")


def _kept(topic: Any) -> int:
    return sum(p.high_watermark - p.log_start_offset for p in topic.partitions)


def _bytes(topic: Any) -> int:
    return sum(p.bytes for p in topic.partitions)


def _state(topic: Any) -> tuple[str, str]:
    return record(topic.settings)["sync"], "paused" if topic.paused else ""


def replicas(text: str) -> int:
    """Parse a number of replicas; 0 is the default."""
    if text == "default":
        return 0
    if not text.isdecimal() or not 0 < int(text[:9]) <= REPLICAS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {REPLICAS_MAX}, or default")
    return int(text)


def hold_id(text: str) -> str:
    """Parse the id of a hold, as `nsqha topic show` prints it."""
    if not re.fullmatch(r"[0-9a-f]{16}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the id of a hold: 16 hex digits, see nsqha topic show")
    return text


def span(text: str) -> int:
    """Parse a time to milliseconds; -1 is for ever, 0 the default."""
    if text in ("forever", "never"):
        return -1
    ms = 0 if text == "default" else duration(text) // 10**6
    if ms == 0 and text != "default":
        raise argparse.ArgumentTypeError(f"{text!r} is too short: give at least 1ms, forever or default")
    return ms


def size(text: str) -> int:
    """Parse a size to bytes; -1 is no limit, 0 the default."""
    if text in ("unlimited", "default"):
        return -1 if text == "unlimited" else 0
    found = re.fullmatch(r"([0-9]{1,18})([kmgt]?)b?", text.lower())
    if found is None or not 0 < int(found[1]) * _BYTES[found[2]] < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 10GB, unlimited or default")
    return int(found[1]) * _BYTES[found[2]]
