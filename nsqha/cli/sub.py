"""`nsqha sub`: print the messages of a channel and finish them."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import Parser, add_json, add_tcp, add_verb, count, duration, name
from nsqha.cli.terminal.screen import body_json, print_json, say
from nsqha.cli.verbs import VERBS

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqha.cli.brokers.producers import ProducerGroup
    from nsqha.cli.brokers.v2client import Message, Subscriber

WINDOW = 200
WAIT_SECONDS = 1.0
"""The longest wait for messages. Ctrl-C in the moment before a wait begins is noticed only when that wait ends."""

AGAIN_SECONDS = 60.0  # of trying to connect again, before a lost connection is an error
AGAIN_PAUSE, AGAIN_PAUSE_MAX = 0.1, 3.0  # between two tries

DESCRIPTION = """\
Print the bodies of a channel's messages, one per line, and finish each after it was printed. The channel and the
topic are created if they do not exist. Runs until Ctrl-C, -n messages, or --idle without a message. A connection that
ends is opened again, for up to a minute; messages that were not finished then come again.

With the --address of a lookup daemon they come from all producers of the topic.

--requeue gives every message back after printing, with a delay, instead of finishing it."""
SHAPE = '{"id", "timestamp_ns", "attempts", "body"} per line; "body_base64" instead of "body" if it is not UTF-8'
STATUSES = (exits.FAILED, exits.USAGE, exits.NOT_ALLOWED, exits.UNREACHABLE, exits.INTERRUPTED)


def add_parser(commands: Any) -> None:
    verb = add_verb(
        commands,
        "sub",
        run,
        help=VERBS["sub"],
        description=DESCRIPTION,
        examples=(
            "nsqha sub orders billing",
            "nsqha sub orders billing -n 10 --json",
            "nsqha sub orders billing --idle 2s > orders.txt",
            "nsqha sub orders billing -n 1 --requeue 5m",
        ),
        shape=SHAPE,
        statuses=STATUSES,
    )
    verb.add_argument("topic", metavar="TOPIC", type=name)
    verb.add_argument("channel", metavar="CHANNEL", type=name)
    verb.add_argument("--requeue", type=duration, metavar="TIME", help="requeue messages instead, delayed; needs -n")
    add_common(verb)


def add_common(verb: Parser) -> None:
    verb.add_argument("-n", "--count", type=count, metavar="N", help="end after N messages")
    verb.add_argument("--idle", type=duration, metavar="TIME", help="end when no message came for this time")
    add_json(verb, "print one line of JSON per message")
    add_tcp(verb)


def run(args: argparse.Namespace) -> int:
    if args.requeue is not None and args.count is None:
        args.parser.error("--requeue needs -n: a message that was requeued comes again")
    return consume(args, args.topic, args.channel, None if args.requeue is None else -(-args.requeue // 10**6))


def consume(args: argparse.Namespace, topic: str, channel: str, requeue_ms: int | None) -> int:
    """Print messages until a limit, an idle time or an interrupt ends it. A message is answered only after its line
    has left this process."""
    from nsqha.cli.brokers.producers import ProducerGroup, tcp_addresses
    from nsqha.cli.brokers.v2client import RefusedByServer, Subscriber
    from nsqha.cli.brokers.v2security import Security

    wanted: int | None = args.count
    idle_s = None if args.idle is None else args.idle / 1e9
    security = Security.of(args)

    def connect(address: str, sharing: int) -> Subscriber:
        window = max((WINDOW if wanted is None else min(WINDOW, wanted)) // sharing, 1)
        return Subscriber(address, args.timeout / 1e9, topic, channel, window=window, security=security)

    def connected() -> ProducerGroup:
        return ProducerGroup(lambda: tcp_addresses(args, topic), connect)

    subscriber = connected()
    last = time.monotonic()
    try:
        while wanted != 0:
            # A heartbeat, or half a message, ends a wait early.
            left = WAIT_SECONDS if idle_s is None else last + idle_s - time.monotonic()
            try:
                subscriber.wait_at_most(min(max(left, 0.001), WAIT_SECONDS))
                messages = subscriber.messages()[:wanted]
                if messages:
                    last = time.monotonic()
                    _print(messages, args.json)
                    wanted = None if wanted is None else wanted - len(messages)
                    subscriber.answer(messages, requeue_ms, wanted)
            except RefusedByServer:
                raise
            except exits.Exit as error:
                if error.status != exits.UNREACHABLE or wanted == 0:
                    raise
                subscriber.close()
                say(f"{args.parser.prog}: {error}; connecting again, messages that were not finished come again")
                subscriber = _again(connected, error, None if idle_s is None else last + idle_s)
                continue
            if not messages and idle_s is not None and time.monotonic() - last >= idle_s:
                break
        subscriber.wait_at_most(args.timeout / 1e9)
        subscriber.leave()
    finally:
        subscriber.close()
    if wanted:
        missing = f"{args.count - wanted} of {args.count} messages came"
        raise exits.Exit(exits.UNREACHABLE, f"{missing} before {idle_s:g} s without one")
    return exits.OK


def _again(connected: Callable[[], ProducerGroup], lost: exits.Exit, until: float | None) -> ProducerGroup:
    """Connect again. Raises `lost` if that fails until `until`, if given, and for AGAIN_SECONDS."""
    ends = time.monotonic() + AGAIN_SECONDS
    pause = AGAIN_PAUSE
    while (now := time.monotonic()) < min(ends, until or ends):
        time.sleep(min(pause, max(min(ends, until or ends) - now, 0.0)))
        pause = min(2 * pause, AGAIN_PAUSE_MAX)
        try:
            return connected()
        except exits.Exit as error:
            if error.status != exits.UNREACHABLE:
                raise
    raise lost


def _print(messages: list[Message], as_json: bool) -> None:
    if as_json:
        for message in messages:
            print_json(
                {
                    "id": message.id.decode("ascii", "replace"),
                    "timestamp_ns": message.timestamp_ns,
                    "attempts": message.attempts,
                    **body_json(message.body),
                }
            )
    else:
        sys.stdout.buffer.write(b"".join(part for message in messages for part in (message.body, b"\n")))
        sys.stdout.buffer.flush()
