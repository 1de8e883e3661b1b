"""The verbs `check node`, `check cluster` and `check channel`: how they ask, and what it means when nobody answers.

A node that does not answer is critical: it is down, hangs, or still reads its log. What could not be looked at for any
other reason is unknown, a wrong flag too, as monitoring expects it.
"""

from __future__ import annotations

import argparse
import http.client
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nsqha.cli.check import judging
from nsqha.cli.check.verdict import MEANING, CheckResult, Observation, Severity
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import (
    Parser,
    add_grpc,
    add_look,
    add_timeout,
    add_verb,
    duration,
    name,
)
from nsqha.cli.terminal.screen import print_json
from nsqha.cli.verbs import VERBS
from nsqha.errors import NsqhaError, StaleMetadata

HTTP_ADDRESS = "127.0.0.1:4151"
ANSWER_BYTES_MAX = 1 << 20
SHAPE = '{"what", "status", "reasons": [{"status", "text"}], "figures": {name: value}}'
STATUSES = {int(severity): meaning for severity, meaning in MEANING.items()}


def add_parser(commands: Any) -> None:
    check = add_verb(commands, "check", None, help=VERBS["check"], description=f"{VERBS['check'].capitalize()}.")
    verbs = check.add_subparsers(title="verbs", metavar="VERB", required=True)
    check.usage_status = Severity.UNKNOWN
    _add_node(verbs)
    _add_cluster(verbs)
    _add_channel(verbs)


def _add(verbs: Any, name: str, judge: Callable[[argparse.Namespace], CheckResult], **texts: Any) -> Parser:
    verb = add_verb(verbs, name, _run, shape=SHAPE, statuses=STATUSES, **texts)
    verb.usage_status = Severity.UNKNOWN
    verb.set_defaults(judge=judge, what=name)
    verb.add_argument("--format", choices=("text", "json", "nagios"), default="text", help="default text")
    return verb


def _add_node(verbs: Any) -> None:
    verb = _add(
        verbs,
        "node",
        _node,
        help="whether a broker or a lookup daemon serves",
        description="Check a broker or a lookup daemon, by its health endpoints. Critical: it does not answer, its "
        "disk failed, it refuses publishes, or it is cut off. Warning: it catches up, is leaving, or does without "
        "etcd. --live asks only for what a restart can repair, never for etcd, replicas or lag: so does HEALTHCHECK, "
        "where a warning, too, would have the container restarted.",
        examples=(
            "nsqha check node",
            "nsqha check node --live",
            "nsqha check node --address 127.0.0.1:4151 --format json",
        ),
    )
    help = f"any port of a broker, or a lookup daemon's HTTP port (default {HTTP_ADDRESS}, $NSQHA_ADDRESS)"
    verb.add_argument("--address", metavar="HOST:PORT", help=help)
    verb.add_argument("--live", action="store_true", help="only whether it is alive")
    add_timeout(verb, "3s")


def _add_cluster(verbs: Any) -> None:
    verb = _add(
        verbs,
        "cluster",
        _cluster,
        help="whether everything is acknowledged, and in sync",
        description="Check the cluster. Any broker or lookup daemon is asked, and that one asks the leaders. Critical: "
        "a partition has no leader, or one that acknowledges nothing; there is no controller; or the metadata are not "
        "trusted. Warning: replicas are missing, a node is away, unfit or silent, publishes wait, or etcd is away.",
        examples=("nsqha check cluster", "nsqha check cluster --format nagios"),
    )
    add_look(verb)


def _add_channel(verbs: Any) -> None:
    verb = _add(
        verbs,
        "channel",
        _channel,
        help="whether a channel is worked off",
        description="Check a channel. Critical: its oldest unfinished message is older than --oldest, or a "
        "partition does not answer or is stopped by damage. Warning: it is older than --oldest-warning, the channel is "
        "paused, or has messages and no consumers.",
        examples=(
            "nsqha check channel orders billing --oldest 5m || true",
            "nsqha check channel orders billing --oldest 5m --oldest-warning 1m --format nagios || true",
        ),
    )
    verb.add_argument("topic", metavar="TOPIC", type=name)
    verb.add_argument("channel", metavar="CHANNEL", type=name)
    verb.add_argument("--oldest", metavar="TIME", type=duration, help="critical above this age")
    verb.add_argument("--oldest-warning", metavar="TIME", type=duration, help="warning above this age")
    add_grpc(verb)


def _run(args: argparse.Namespace) -> int:
    try:
        verdict: CheckResult = args.judge(args)
    except StaleMetadata as error:  # what runs goes on, and nothing is decided until an operator comes
        verdict = CheckResult(args.what.upper(), [Observation(Severity.CRITICAL, str(error))])
    except NsqhaError as error:
        verdict = CheckResult(args.what.upper(), [Observation(Severity.UNKNOWN, str(error))])
    except Exception as error:  # a check that ends with a traceback and status 1 would be a warning
        verdict = CheckResult(args.what.upper(), [Observation(Severity.UNKNOWN, f"{type(error).__name__}: {error}")])
    if args.format == "json":
        print_json(verdict.json())
    else:
        print(verdict.nagios() if args.format == "nagios" else verdict.text())
    return int(verdict.severity)


def _node(args: argparse.Namespace) -> CheckResult:
    address = args.address or os.environ.get("NSQHA_ADDRESS") or HTTP_ADDRESS
    seconds = args.timeout / 1e9
    try:
        where = _http_of(address, seconds)
        alive = _answer(where, "/healthz", seconds)
        checks = None if args.live or alive != "OK" else _answer(where, "/readyz?verbose", seconds)
    except exits.Exit as error:
        if error.status != exits.UNREACHABLE:
            raise
        text = f"{error}; it is down, hangs, or still reads its log"
        return CheckResult("NODE", [Observation(Severity.CRITICAL, text)])
    return judging.of_node(alive, checks)


def _http_of(address: str, seconds: float) -> str:
    """The HTTP port of what listens at that address."""
    from nsqha.cli.brokers.discovery import LookupDaemon, discover

    try:
        found = discover(address, seconds)
    except exits.Exit as error:
        if error.status != exits.NOT_ALLOWED:
            raise
        # An HTTP port that wants a token for everything but health.
        with suppress(exits.Exit):
            _answer(address, "/healthz", seconds)
            return address
        raise
    if not isinstance(found, LookupDaemon) and not found.http:
        raise exits.Exit(exits.FAILED, f"{address} does not say where its HTTP port is: give that")
    return found.http


def _answer(address: str, path: str, seconds: float) -> str:
    from nsqha.cli.brokers.discovery import host_and_port

    host, port = host_and_port(address, "--address")
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read(ANSWER_BYTES_MAX).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        raise exits.Exit(exits.UNREACHABLE, f"{address}{path}: {error or type(error).__name__}") from None
    finally:
        connection.close()
    if answer.status not in (200, 503):
        raise exits.Exit(exits.FAILED, f"{address}{path} answers {answer.status}: is this a broker of ours?")
    return text


def _cluster(args: argparse.Namespace) -> CheckResult:
    from nsqha.cli.cluster.looking import status_page

    shown, _ = status_page(args)
    return judging.of_cluster(shown)


def _channel(args: argparse.Namespace) -> CheckResult:
    from nsqha.cli.brokers.admin import Admin, unserved

    with Admin.of(args) as admin:
        channel = admin.call("DescribeChannel", topic=args.topic, channel=args.channel).channel
        topic = admin.call("DescribeTopic", topic=args.topic).topic
    stopped = {p.partition: why for p in topic.partitions if (why := unserved(p))}
    return judging.of_channel(channel, stopped, oldest_ns=args.oldest, oldest_warning_ns=args.oldest_warning)
