"""What the verbs of `nsqha spark` share: whom to ask, where Spark runs, and a session of it."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nsqha.cli import exits
from nsqha.cli.parser import GRPC_ADDRESS, Parser, add_certificate, add_json, add_timeout
from nsqha.cli.topic import size


def add_spark(verb: Parser) -> None:
    """Flags of a verb that starts Spark, and asks no broker."""
    verb.add_argument("--master", metavar="URL", default="local[*]", help="Spark's master (default local[*])")
    verb.add_argument(
        "--conf", metavar="KEY=VALUE", action="append", default=[], help="a setting of Spark, may be repeated"
    )
    add_json(verb)


def add_common(verb: Parser) -> None:
    """Flags of a verb that asks brokers and starts Spark."""
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
    add_certificate(verb)


def add_split_bytes(verb: Parser) -> None:
    """How the log is divided into tasks."""
    verb.add_argument("--split-bytes", metavar="SIZE", type=size, default="64MB", help="log per task (default 64MB)")


def connection(args: argparse.Namespace) -> Any:
    """The brokers that were named, as `pyspark_nsqha` takes them."""
    from pyspark_nsqha.options import Connection, Tls

    files = (args.cluster_tls_cert, args.cluster_tls_key, args.cluster_tls_ca)
    if any(files) and not all(files):
        args.parser.error("--cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca go together")
    brokers = tuple(args.broker or [args.broker_default])
    for broker in brokers:
        if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:,\[\]/]+):\d{1,5}", broker):
            args.parser.error(f"--broker {broker!r} is not HOST:PORT")
    tls = Tls(*files) if all(files) else None
    return Connection(brokers, tls, timeout_ms=max(args.timeout // 10**6, 1))


@contextmanager
def started(args: argparse.Namespace, what: str) -> Iterator[Any]:
    """A session at --master; it ends with the block. What it lacks is one line and an exit status."""
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
