"""`nsqha channel set`, and what `nsqha channel show` says of policies."""

from __future__ import annotations

import argparse
from typing import Any

from nsqha.cli.brokers.admin import USUAL, Admin, record
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import add_grpc, add_json, add_verb, add_yes, count, duration, name
from nsqha.cli.terminal.screen import confirm, never_finished, print_json, say
from nsqha.cli.terminal.times import show_duration

EVERY_CHANNEL = "*"
POLICY = (
    '{"retry_ms", "retry_max_ms", "retry_factor", "retry_jitter", "retry_instead", "max_depth", "skip", "ttl_ms", '
    '"max_attempts", "dead_letter", "dead_max"}'
)
_CLEARED = (
    *("retry", "retry-max", "retry-factor", "retry-jitter", "retry-instead", "max-attempts", "dead-letter", "dead-max"),
    *("max-depth", "skip", "ttl"),
)


def add_set(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "set",
        run_set,
        help="change the policy of a channel: how its messages come again, die, and are passed over",
        examples=(
            "nsqha channel set orders billing --retry 1s --retry-max 10m",
            "nsqha channel set orders '*' --retry 5s --retry-factor 1 --retry-jitter 0%",
            "nsqha channel set orders audit --max-attempts 5 --dead-letter topic:orders-dead",
            "nsqha channel set orders audit --max-depth 1000000 --yes",
            "nsqha channel set orders billing --clear retry --clear retry-max",
        ),
        description="Change the policy of a channel, or of '*': all channels of the topic that say nothing themselves. "
        "It returns when every leader follows it. What waits already keeps its time.",
        shape=f'{{"topic", "channel", "policy": {POLICY}, "default_policy": {POLICY}}}',
        statuses=(*USUAL, exits.CONFLICT, exits.NOT_CONFIRMED),
    )
    verb.add_argument("topic", metavar="TOPIC", type=name)
    verb.add_argument("channel", metavar="CHANNEL", type=_name_or_every, help="its name, or '*'")
    verb.add_argument("--retry", metavar="D", type=_milliseconds, help="wait after the first failure: 500ms, 10s, 1h")
    verb.add_argument("--retry-max", metavar="D", type=_milliseconds, help="the longest wait, however often it failed")
    verb.add_argument("--retry-factor", metavar="N", type=_number, help="1 to 10: each failure makes it longer (2)")
    verb.add_argument("--retry-jitter", metavar="P", type=_percent, help="spread the waits by up to this (20%%)")
    verb.add_argument(
        "--retry-instead",
        action="store_true",
        default=None,
        help="also in place of a longer delay that a consumer asks for",
    )
    attempts = "a message that fails at this delivery is a dead letter: nsqha dead list"
    verb.add_argument("--max-attempts", metavar="N", type=count, help=attempts)
    verb.add_argument("--dead-letter", metavar="WHAT", type=_fate, help="keep, drop, or topic:NAME: moved there")
    held = "with so many dead letters in a partition nothing dies any more (100000)"
    verb.add_argument("--dead-max", metavar="N", type=count, help=held)
    verb.add_argument(
        "--ttl", metavar="D", type=_milliseconds, help="pass over unread messages older than this: 1h, 7d"
    )
    bound = "keep so many unread messages per partition, pass over older ones"
    verb.add_argument("--max-depth", metavar="N", type=count, help=bound)
    verb.add_argument("--skip", action="store_true", default=None, help="pass over everything, until --clear skip")
    verb.add_argument(
        "--clear", metavar="FIELD", choices=_CLEARED, action="append", default=[], help=f"one of {', '.join(_CLEARED)}"
    )
    add_yes(verb)
    add_json(verb)
    add_grpc(verb)


def run_set(args: argparse.Namespace) -> int:
    wanted = {
        "retry_ms": args.retry,
        "retry_max_ms": args.retry_max,
        "retry_factor": args.retry_factor,
        "retry_jitter": args.retry_jitter,
        "retry_instead": args.retry_instead,
        "max_attempts": args.max_attempts,
        "dead_letter": args.dead_letter,
        "dead_max": args.dead_max,
        "ttl_ms": args.ttl,
        "max_depth": args.max_depth,
        "skip": args.skip,
    }
    fields = {name: value for name, value in wanted.items() if value is not None}
    clear = [_field(word) for word in args.clear]
    if not fields and not clear:
        args.parser.error("nothing to change: give --retry, --retry-max, ..., or --clear FIELD")
    with Admin.of(args) as admin:
        before = admin.call("GetChannelPolicy", topic=args.topic, channel=args.channel)
        _confirm(admin, args)
        answer = admin.call(
            "UpdateChannelPolicy",
            topic=args.topic,
            channel=args.channel,
            set=admin.messages.ChannelPolicy(**fields),
            clear=clear,
            expected=before.default_policy if args.channel == EVERY_CHANNEL else before.policy,
        )
    if args.json:
        print_json({"topic": args.topic, "channel": args.channel, **record(answer)})
    else:
        say(f"set {args.topic} {args.channel}: {described(answer.policy, answer.default_policy)}")
    return exits.OK


def _confirm(admin: Admin, args: argparse.Namespace) -> None:
    """What is passed over is gone for the consumers, unless somebody seeks back while the log has it."""
    if not (args.skip or args.max_depth or args.ttl or args.dead_letter == "drop"):
        return
    there, unread = "of each channel that says nothing itself", 0
    if args.channel != EVERY_CHANNEL:
        channel = admin.call("DescribeChannel", topic=args.topic, channel=args.channel).channel
        partitions, unread = len(channel.partitions), channel.depth
        there = f"of channel {args.channel}, which has {channel.depth:,} in {partitions} partition(s),"
    parts = ["all unread messages"] if args.skip else []
    if args.ttl:
        parts.append(f"unread messages older than {show_duration(args.ttl / 1000)}")
    if args.max_depth:
        parts.append(f"the oldest unread messages beyond {args.max_depth:,} per partition")
    what = [f"pass over {', '.join(parts)}"] if parts else []
    if args.dead_letter == "drop":
        what.append("drop what dies")
    confirm(f"{' and '.join(what)} {there} from now on?", yes=args.yes, skips=unread if args.skip else 0)
    if unread and args.skip and not args.json:
        say(f"it skips {never_finished(unread)}")


def show(own: Any, defaults: Any) -> None:
    """Print what a channel follows, unless it is what nsqd does."""
    if own.ListFields() or defaults.ListFields():
        print(f"\npolicy: {described(own, defaults)}")


def described(own: Any, defaults: Any) -> str:
    """What is in force, and where it comes from: `retry 1s (channel), at most 10m00s (*), ...`."""
    said = []
    for field in own.DESCRIPTOR.fields:
        source, origin = (own, "channel") if own.HasField(field.name) else (defaults, EVERY_CHANNEL)
        if source.HasField(field.name):
            said.append(f"{_value(field.name, getattr(source, field.name))} ({origin})")
    return ", ".join(said) or "as nsqd: a message comes again when the consumer says so"


def _value(field: str, value: Any) -> str:
    if field.endswith("_ms"):
        word = {"retry_ms": "retry", "retry_max_ms": "at most", "ttl_ms": "ttl"}[field]
        return f"{word} {show_duration(value / 1000)}"
    if field == "retry_jitter":
        return f"jitter {value * 100:g}%"
    if field == "skip":
        return "all skipped" if value else "nothing skipped"
    if field == "max_attempts":
        return f"dead after {value:,} attempts"
    if field == "dead_letter":
        kept = {"keep": "dead letters kept", "drop": "dead letters dropped"}
        return kept.get(value, f"dead letters moved to {value.removeprefix('topic:')}")
    if field == "dead_max":
        return f"at most {value:,} dead per partition"
    if field == "max_depth":
        return f"at most {value:,} unread per partition"
    if field == "retry_instead":
        return "in place of what consumers ask for" if value else "or longer if consumers ask for it"
    return f"factor {value:g}"


def _field(word: str) -> str:
    return word.replace("-", "_") + ("_ms" if word in ("retry", "retry-max", "ttl") else "")


def _name_or_every(text: str) -> str:
    return text if text == EVERY_CHANNEL else name(text)


def _fate(text: str) -> str:
    if text not in ("keep", "drop") and not text.startswith("topic:"):
        raise argparse.ArgumentTypeError(f"{text!r} is unknown: one of keep, drop, topic:NAME")
    return text


def _milliseconds(text: str) -> int:
    ns = duration(text)
    if ns % 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of milliseconds")
    return ns // 1_000_000


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _percent(text: str) -> float:
    if not text.endswith("%"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage such as 20%")
    return _number(text[:-1]) / 100
