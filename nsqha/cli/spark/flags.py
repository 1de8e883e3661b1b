"""Flags that the verbs of `nsqha spark` share: which brokers to ask, where Spark runs; and Spark sessions."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

from nsqha.cli.brokers.admin import Admin, credentials, secret
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import (
    CERTIFICATE_INCOMPLETE,
    GRPC_ADDRESS,
    Parser,
    add_certificate,
    add_json,
    add_timeout,
    add_token,
)
from nsqha.cli.terminal.screen import say
from nsqha.cli.terminal.times import LogTarget, parse_instant, parse_place
from nsqha.cli.topic import size

INSTALL = f"in the clone of nsqha: {sys.executable} -m pip install -e '.[spark]'"
TIMES = "-2h, 2026-11-20T10:00Z, @1795262005, start or end"
TIME_HELP = (
    "TIME is -2h, 2026-11-20T10:00 (local time unless it ends with Z or +01:00; an @ may stand before it), @1795262005 "
    "(seconds since 1970), start or end; --until is exclusive."
)


def add_spark(verb: Parser) -> None:
    """Add flags of a verb that starts Spark and asks no broker."""
    verb.add_argument("--master", metavar="URL", default="local[*]", help="Spark's master (default local[*])")
    verb.add_argument(
        "--conf", metavar="KEY=VALUE", action="append", default=[], help="a setting of Spark, may be repeated"
    )
    add_json(verb)


def add_common(verb: Parser) -> None:
    """Add flags of a verb that asks brokers and starts Spark."""
    default = os.environ.get("NSQHA_GRPC_ADDRESS", GRPC_ADDRESS)
    verb.add_argument(
        "--broker",
        metavar="HOST:PORT",
        action="append",
        help=f"--grpc-address of a broker, may be repeated (default {GRPC_ADDRESS}, $NSQHA_GRPC_ADDRESS)",
    )
    verb.set_defaults(broker_default=default)
    add_spark(verb)
    add_timeout(verb, "30s")
    add_token(verb)
    add_certificate(verb)


def add_split_bytes(verb: Parser) -> None:
    """Add --split-bytes: how the log is divided into tasks."""
    verb.add_argument("--split-bytes", metavar="SIZE", type=size, default="64MB", help="log per task (default 64MB)")


def connection(args: argparse.Namespace) -> Any:
    """The named brokers in the form that `pyspark_nsqha` expects."""
    from pyspark_nsqha.options import ConnectOptions, Tls

    files = (args.cluster_tls_cert, args.cluster_tls_key, args.cluster_tls_ca)
    if any(files) and not all(files):
        args.parser.error(CERTIFICATE_INCOMPLETE)
    brokers = tuple(args.broker or [args.broker_default])
    for broker in brokers:
        if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:,\[\]/]+):\d{1,5}", broker):
            args.parser.error(f"--broker {broker!r} is not HOST:PORT")
    tls = Tls(*files) if all(files) else None
    return ConnectOptions(brokers, tls, timeout_ms=max(args.timeout // 10**6, 1), secret_file=args.cluster_secret_file)


class Within(NamedTuple):
    """A range of time, in nanoseconds; None: no limit."""

    since: int | None
    until: int | None


def place(parser: Parser, flag: str, text: str, now_ns: int) -> LogTarget:
    """Parse a time, start or end; anything else is a usage error."""
    date = re.match(r"\d{4}-\d\d-\d\d", text) is not None
    try:
        found = LogTarget("time", parse_instant(text, now_ns)) if date else parse_place(text, now_ns)
    except ValueError as error:
        if date or text[:1] in "@-":  # a time that is out of range, or misspelled
            parser.error(f"{flag}: {str(error).replace(f'@{text}', text)}")
        parser.error(f"{flag} {text!r} is not a time: {TIMES}")
    if found.kind in ("offset", "id"):
        parser.error(f"{flag} {text!r} is not a time: {TIMES}")
    return found


def is_place(text: str, now_ns: int) -> bool:
    """Whether `text` can be parsed as a place in a log, however unlikely."""
    if re.match(r"\d{4}-\d\d-\d\d", text):
        return True
    try:
        parse_place(text, now_ns)
    except ValueError:
        return False
    return True


def time_range(parser: Parser, since: str | None, until: str | None, now_ns: int) -> Within:
    """Parse --from and --until. An empty or reversed range is a usage error."""
    found: list[int | None] = []
    for flag, text, whole in (("--from", since, "start"), ("--until", until, "end")):
        at = (
            place(parser, flag, text, now_ns) if text is not None else LogTarget("start" if whole == "start" else "end")
        )
        if at.kind != "time" and at.kind != whole:
            parser.error(f"{flag} {text} leaves nothing to read")
        found.append(at.value if at.kind == "time" else None)
    within = Within(*found)
    if within.since is not None and within.until is not None and within.since >= within.until:
        parser.error(f"--from {since} is not before --until {until}")
    return within


def say_range(within: Within) -> None:
    """Print the times with their zone: a time without a zone is local, which may be unexpected."""
    words = [
        f"{word} {datetime.fromtimestamp(ns / 1e9).astimezone().isoformat(' ', 'milliseconds')}"
        for word, ns in zip(("from", "until"), within, strict=True)
        if ns is not None
    ]
    if words:
        say(" ".join(words))


@contextmanager
def administration(args: argparse.Namespace, *addresses: str) -> Iterator[Admin]:
    """Connect to the first of these brokers that can be reached."""
    for address in addresses:
        try:
            admin = Admin(address, args.timeout / 1e9, credentials(args), secret(args))
            break
        except exits.Exit as error:
            # The flag has another name here than elsewhere.
            failed = exits.Exit(error.status, re.sub(r"(^|set )--grpc-address\b", r"\1--broker", str(error)))
            if error.status != exits.UNREACHABLE:
                raise failed from None
    else:
        raise failed
    with admin:
        yield admin


@contextmanager
def started(args: argparse.Namespace, what: str) -> Iterator[Any]:
    """Start a Spark session at --master; it ends with the block. A failure is a one-line error and an exit status."""
    from pyspark_nsqha import jobs

    conf = {}
    for given in args.conf:
        key, equals, value = given.partition("=")
        if not equals or not key:
            args.parser.error(f"--conf {given!r} is not KEY=VALUE")
        conf[key] = value
    try:
        with jobs.session(what, master=args.master, conf=conf) as session:
            yield session
    except jobs.CannotStart as error:
        raise exits.Exit(exits.FAILED, str(error)) from None
