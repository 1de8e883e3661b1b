"""`nsqha pub`: publish arguments, lines or files."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import add_json, add_tcp, add_verb, duration, name
from nsqha.cli.terminal.screen import ProgressLine, print_json, say, show_count
from nsqha.cli.verbs import VERBS

if TYPE_CHECKING:
    from nsqha.cli.brokers.v2client import V2Publisher

RUN_MESSAGES = 200  # unanswered at once: their answers fit into any socket buffer
RUN_BYTES = 256 << 10
BODY_BYTES_MAX = 64 << 20  # brokers refuse far smaller ones; this bounds a line without end
PACE_SECONDS = 0.05  # with --rate, the messages of this time are sent together

DESCRIPTION = """\
Publish messages: the arguments, else the lines of the files, else the lines of stdin. Empty lines are skipped;
brokers refuse empty messages, so an empty argument, or an empty file with --whole, is an error.
Returns when every message was answered with OK. The topic's sync setting says what OK means.

With the --address of a lookup daemon they go to a producer of the topic; a topic without one is created at a broker
that the daemon knows."""


def add_parser(commands: Any) -> None:
    verb = add_verb(
        commands,
        "pub",
        run,
        help=VERBS["pub"],
        description=DESCRIPTION,
        examples=(
            "nsqha pub orders hello",
            "seq 100 | nsqha pub orders --rate 1000",
            "nsqha pub orders 'remember me' --delay 2d",
            "nsqha pub orders --file orders.jsonl --json",
        ),
        shape='{"topic", "published", "bytes", "skipped_empty", "seconds"}',
        statuses=(exits.FAILED, exits.USAGE, exits.NOT_ALLOWED, exits.UNREACHABLE, exits.PARTLY, exits.INTERRUPTED),
    )
    verb.add_argument("topic", metavar="TOPIC", type=name)
    verb.add_argument("messages", metavar="MESSAGE", nargs="*", default=[], help="put -- before one that begins with -")
    verb.add_argument("--file", "-f", action="append", default=[], metavar="PATH", help="its lines; - is stdin")
    verb.add_argument("--whole", action="store_true", help="each file, or stdin, is one message")
    verb.add_argument("--delay", type=duration, default="0", metavar="TIME", help="deliver after this time: 90s, 2d")
    verb.add_argument("--rate", type=rate, metavar="N", help="at most N messages a second")
    add_json(verb)
    add_tcp(verb)


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.001 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of messages a second")
    return value


def run(args: argparse.Namespace) -> int:
    if args.messages and (args.file or args.whole):
        args.parser.error("give messages or files, not both")
    if "" in args.messages:
        args.parser.error(f"message {args.messages.index('') + 1} is empty, and brokers refuse empty messages")
    from nsqha.cli.brokers.producers import tcp_addresses
    from nsqha.cli.brokers.v2client import V2Publisher
    from nsqha.cli.brokers.v2security import Security

    delay_ms = -(-args.delay // 10**6)
    publisher = V2Publisher(tcp_addresses(args, args.topic)[0], args.timeout / 1e9, security=Security.of(args))
    started = time.monotonic()
    tally = PubTally(args, publisher, started)
    try:
        for bodies in runs(sources(args), args.rate):
            kept = [body for body in bodies if body]
            tally.skipped += len(bodies) - len(kept)
            if kept:
                publisher.publish(args.topic, kept, delay_ms)
                tally.bytes += sum(map(len, kept))
                tally.show()
            if args.rate:
                time.sleep(max(0.0, publisher.published / args.rate - (time.monotonic() - started)))
    except KeyboardInterrupt:
        tally.tell()
        raise
    except exits.Exit as error:
        if publisher.published == 0:
            raise
        tally.tell()
        raise exits.Exit(exits.PARTLY, f"after {show_count(publisher.published)}: {error}") from None
    finally:
        publisher.close()
    tally.tell()
    return exits.OK


def size_of(paths: list[str]) -> int:
    """Bytes of all files together; 0 if that is not known."""
    return sum(map(os.path.getsize, paths)) if all(map(os.path.isfile, paths)) else 0


class PubTally:
    """Counts what was published and skipped so far."""

    def __init__(self, args: argparse.Namespace, publisher: V2Publisher, started: float) -> None:
        self.bytes = 0
        self.skipped = 0
        self._args = args
        self._publisher = publisher
        self._started = started
        self._total = size_of(args.file)
        self._progress = ProgressLine(f"publish to {args.topic}")

    def show(self) -> None:
        """Show progress through the files; each message had a line end."""
        if self._total:
            self._progress(min(self.bytes + self._publisher.published, self._total), self._total)

    def tell(self) -> None:
        """Print the result."""
        self._progress.close()
        n, seconds = self._publisher.published, time.monotonic() - self._started
        if self._args.json:
            print_json(
                {
                    "topic": self._args.topic,
                    "published": n,
                    "bytes": self.bytes,
                    "skipped_empty": self.skipped,
                    "seconds": round(seconds, 6),
                }
            )
        else:
            empty = f", {self.skipped:,} empty skipped" if self.skipped else ""
            say(f"published {show_count(n)} to {self._args.topic}{empty}")


def sources(args: argparse.Namespace) -> Iterator[list[bytes]]:
    """Yield bodies as they become available."""
    if args.messages:
        yield [os.fsencode(message) for message in args.messages]
        return
    for path in args.file or ["-"]:
        if path == "-":
            if sys.stdin.isatty():
                say("one message per line; Ctrl-D ends")
            yield from _bodies(sys.stdin.fileno(), "stdin", args.whole)
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise exits.Exit(exits.USAGE, f"{path}: {error.strerror}") from None
        try:
            yield from _bodies(descriptor, path, args.whole)
        finally:
            os.close(descriptor)


def _bodies(descriptor: int, what: str, whole: bool) -> Iterator[list[bytes]]:
    """Yield lines as soon as they are complete, or everything as one body."""
    rest = bytearray()
    while data := _read(descriptor, what):
        rest += data
        if not whole:
            *lines, last = rest.split(b"\n")
            rest = bytearray(last)
            if lines:
                yield [bytes(line.removesuffix(b"\r")) for line in lines]
        if len(rest) > BODY_BYTES_MAX:
            raise exits.Exit(exits.FAILED, f"{what}: a message of more than {BODY_BYTES_MAX >> 20} MiB")
    if whole and not rest:
        raise exits.Exit(exits.USAGE, f"{what} is empty, and brokers refuse empty messages")
    if rest:
        yield [bytes(rest if whole else rest.removesuffix(b"\r"))]


def _read(descriptor: int, what: str) -> bytes:
    try:
        return os.read(descriptor, RUN_BYTES)
    except OSError as error:
        raise exits.Exit(exits.FAILED, f"{what}: {error.strerror}") from None


def runs(bodies: Iterator[list[bytes]], per_second: float | None) -> Iterator[list[bytes]]:
    """Yield the bodies in runs that may be unanswered at once."""
    count_max = RUN_MESSAGES if per_second is None else max(1, min(RUN_MESSAGES, int(per_second * PACE_SECONDS)))
    for found in bodies:
        first = size = 0
        for n, body in enumerate(found):
            if n > first and (n - first == count_max or size + len(body) > RUN_BYTES):
                yield found[first:n]
                first, size = n, 0
            size += len(body)
        yield found[first:]
