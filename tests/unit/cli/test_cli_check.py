"""What is a warning and what is critical; exit statuses and lines as monitoring has them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.cli import build_parser
from nsqha.cli.brokers.discovery import LookupDaemon
from nsqha.cli.check import command
from nsqha.cli.check.judging import of_channel, of_cluster, of_node
from nsqha.cli.check.verdict import CheckResult, Observation, Severity
from nsqha.cli.cluster import looking
from nsqha.cli.cluster.access import Picture
from nsqha.cli.terminal import exits
from nsqha.election.model import Controller, NodeInfo, PartitionMeta, TopicRecord, TopicSettings
from nsqha.election.moves import Intents
from nsqha.election.observed.answers import Observed, ReplicaAnswer
from nsqha.election.observed.page import ClusterPage, encode
from nsqha.errors import NotFound, Unavailable

OK, WARNING, CRITICAL, UNKNOWN = Severity

READY = "OK\n[+] data_directory\n[+] not_exiting\n[+] partitions\n[+] disk_space\n[+] registered\n[+] replicas"
WITHOUT_ETCD = READY.replace("[+] registered", "[+] registered: this node has no lease; every in-sync replica answers")
BEHIND = READY.replace("OK\n", "NOK\n").replace("[+] replicas", "[-] replicas: orders/0 catches up")
CUT_OFF = READY.replace("OK\n", "NOK\n").replace("[+] registered", "[-] registered: this node has no lease")
FULL = READY.replace("OK\n", "NOK\n").replace("[+] disk_space", "[-] disk_space: disk low: 1 bytes free")


@pytest.mark.parametrize(
    ("checks", "severity", "text"),
    [
        (READY, OK, "alive and ready"),
        (WITHOUT_ETCD, WARNING, "registered: this node has no lease; every in-sync replica answers"),
        (BEHIND, WARNING, "replicas: orders/0 catches up"),
        (f"{READY}\n[+] certificates: c.pem expired at noon", WARNING, "certificates: c.pem expired at noon"),
        (f"{READY}\n[+] leads: this node declines to lead: its clock is wrong", WARNING, "its clock is wrong"),
        ("OK\n[+] certificates: c.pem expired at noon", WARNING, "certificates: c.pem expired at noon"),
        (CUT_OFF, CRITICAL, "registered: this node has no lease"),
        (FULL, CRITICAL, "disk_space: disk low: 1 bytes free"),
        ("OK\n[+] metadata: revision 7, 3 nodes, controller lookupd-1:4161", OK, "metadata: revision 7, 3 nodes"),
        ("OK\n[+] metadata: revision 7, 3 nodes, controller none", WARNING, "controller none"),
        ("<html>", CRITICAL, "/readyz answers: <html>"),
        ("OK", OK, "alive and ready"),
    ],
)
def test_a_node_by_what_it_says_of_itself(checks: str, severity: Severity, text: str) -> None:
    verdict = of_node("OK", checks)
    assert verdict.severity == severity
    assert text in verdict.text()


def test_a_node_whose_disk_failed_is_critical_whatever_else_it_says() -> None:
    failed = "NOK\n[-] data_directory: fdatasync: Input/output error"
    assert of_node(failed, None).severity == CRITICAL
    assert "Input/output error" in of_node(failed, READY).nagios()
    assert of_node("teapot", None).severity == CRITICAL


def test_only_alive_asks_for_nothing_else() -> None:
    assert of_node("OK", None).severity == OK


WELL: dict[str, Any] = {
    "leaderless": [], "below_min_isr": [], "under_replicated": [], "doubt": "", "controller": {"name": "a", "epoch": 1},
    "unreadable": [], "away": [], "owed": {}, "nodes": ["a", "b", "c"], "partitions": 12, "stalled": [], "slow": {},
    "not_led": {}, "unasked": [], "unfit": {}, "silent": {}, "stale": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "severity"),
    [
        ({}, OK),
        ({"leaderless": ["orders/0"]}, CRITICAL),
        ({"below_min_isr": ["orders/0"]}, CRITICAL),
        ({"under_replicated": ["orders/0"]}, WARNING),
        ({"controller": None}, CRITICAL),
        ({"unreadable": ["intents/x: no JSON"]}, CRITICAL),
        ({"away": ["n3"]}, WARNING),
        ({"owed": {"orders/0": 1}}, WARNING),
        ({"doubt": "etcd was restored"}, CRITICAL),
        ({"doubt": "etcd is away", "stale": True, "owed": None}, WARNING),
        ({"doubt": "etcd is away", "stale": True, "owed": None, "leaderless": ["orders/0"]}, CRITICAL),
    ],
)
def test_a_cluster_by_the_page_of_its_status(change: dict[str, Any], severity: Severity) -> None:
    verdict = of_cluster(WELL | change)
    assert verdict.severity == severity
    assert verdict.figures["partitions"] == 12


def test_a_controller_that_waits_for_an_operator_is_not_to_be_started() -> None:
    """Lookup daemons that run elect none with metadata that nodes do not trust: starting another one helps nobody."""
    started = "start nsqha lookupd"
    assert started in of_cluster(WELL | {"controller": None}).nagios()
    assert started in of_cluster(WELL | {"controller": None, "doubt": "etcd is away", "stale": True}).nagios()
    waiting = of_cluster(WELL | {"controller": None, "doubt": "nodes wait for nsqha cluster accept-metadata: a"})
    assert waiting.severity == CRITICAL
    assert started not in waiting.nagios() and "accept-metadata" in waiting.nagios()


def channel(**changes: Any) -> Any:
    usual = {
        "oldest_unfinished_seconds": 90.0, "depth": 3, "in_flight": 1, "deferred": 0, "consumers": 1, "paused": False,
        "reader": False, "partitions": [],
    }  # fmt: skip
    return SimpleNamespace(**usual | changes)


def partition(**changes: Any) -> Any:
    return SimpleNamespace(**{"partition": 2, "error": "", "stuck": False} | changes)


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({}, OK),
        ({"oldest_unfinished_seconds": 301.0}, CRITICAL),
        ({"oldest_unfinished_seconds": 121.0}, WARNING),
        ({"paused": True}, WARNING),
        ({"consumers": 0}, WARNING),
        ({"consumers": 0, "depth": 0}, OK),
        ({"consumers": 0, "reader": True}, OK),
        ({"partitions": [partition(error="no leader")]}, CRITICAL),
        ({"partitions": [partition(stuck=True)]}, CRITICAL),
    ],
)
def test_a_channel_by_its_age_and_its_consumers(changes: dict[str, Any], severity: Severity) -> None:
    verdict = of_channel(channel(**changes), oldest_ns=300 * 10**9, oldest_warning_ns=120 * 10**9)
    assert verdict.severity == severity


def test_a_channel_of_a_partition_that_acknowledges_nothing_is_critical() -> None:
    """It hands out what it has, and no FIN counts."""
    verdict = of_channel(channel(), {1: "below min_isr"}, oldest_ns=None, oldest_warning_ns=None)
    assert verdict.severity == CRITICAL and "partition 1: below min_isr" in verdict.text()


def test_without_a_limit_no_age_is_too_old() -> None:
    assert of_channel(channel(oldest_unfinished_seconds=1e9), oldest_ns=None, oldest_warning_ns=None).severity == OK


def test_what_is_critical_is_not_hidden_by_what_is_unknown() -> None:
    reasons = [Observation(UNKNOWN, "a"), Observation(CRITICAL, "b"), Observation(WARNING, "c")]
    assert CheckResult("NODE", reasons).severity == CRITICAL
    assert CheckResult("NODE", reasons[:1] + reasons[2:]).severity == UNKNOWN


def test_nagios_gets_one_line_and_its_figures_after_one_bar() -> None:
    seen = [Observation(OK, "fine"), Observation(WARNING, "a|b\nc")]
    verdict = CheckResult("CHANNEL", seen, {"depth": 3, "oldest_seconds": 1.5})
    assert verdict.nagios() == "NSQHA CHANNEL WARNING - a/b c | depth=3 oldest_seconds=1.5s"


@pytest.mark.parametrize(
    "line", ["node --formt json", "node --format xml", "channel orders", "knot", "channel a/b c", "node --timeout 0"]
)
def test_a_wrong_flag_is_unknown_and_not_critical(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        build_parser("check").parse_args(["check", *line.split()])
    assert raised.value.code == UNKNOWN
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_error_of_ours_is_unknown_and_not_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: object) -> CheckResult:
        raise ZeroDivisionError("oops")

    args = build_parser("check").parse_args(["check", "node"])
    args.judge = broken
    assert command._run(args) == UNKNOWN
    assert "ZeroDivisionError: oops" in capsys.readouterr().out


def test_a_cluster_is_checked_while_a_live_replica_is_not_in_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes are then asked how far it is, with what the flags say of certificate, secret and time."""
    nodes = {uid: NodeInfo(uid, f"node-{uid}", grpc_address="127.0.0.1:1") for uid in (1, 2, 3)}
    meta = PartitionMeta(1, 4, {1: 11, 2: 12}, (1, 2, 3), 2)
    topics = {"orders": TopicRecord("orders", 7, 0, TopicSettings(), partitions={0: meta})}
    found = Picture("nsqha", 1, "e:1", 5, topics, nodes, Intents({}, frozenset()), Controller("l", epoch=3))
    monkeypatch.setattr(looking, "opened", lambda _: nullcontext(SimpleNamespace(why_not=lambda: "")))
    monkeypatch.setattr(looking, "look", lambda *_, **__: found)
    monkeypatch.setattr(looking, "LOOK_SECONDS", 0.001)
    verdict = command._cluster(build_parser("check").parse_args(["check", "cluster", "--etcd-endpoint", "127.0.0.1:1"]))
    assert verdict.severity == WARNING
    assert "1 partition under-replicated: orders/0" in verdict.text()
    assert "1 partition whose leader does not answer" in verdict.text()


@pytest.mark.parametrize(
    ("words", "environment", "first"),
    [
        ("", {}, False),
        ("", {"NSQHA_ETCD_ENDPOINT": "e:1"}, True),
        ("", {"NSQHA_ETCD_ENDPOINT": "e:1", "NSQHA_ADDRESS": "d:1"}, False),
        ("--address d:1", {"NSQHA_ETCD_ENDPOINT": "e:1"}, False),
        ("--etcd-endpoint e:1", {"NSQHA_ADDRESS": "d:1"}, True),
        ("--etcd-endpoint e:1 --address d:1", {}, True),
    ],
)
def test_a_daemon_is_asked_before_etcd_unless_only_that_is_named(
    words: str, environment: dict[str, str], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NSQHA_ADDRESS", "NSQHA_ETCD_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert looking.etcd_first(build_parser("check").parse_args(["check", "cluster", *words.split()])) is first


def page(cluster: str = "nsqha", stale: str = "") -> dict[str, Any]:
    """What a daemon gives of a cluster with one partition that is led."""
    nodes = {1: NodeInfo(1, "node-1", grpc_address="n1")}
    meta = PartitionMeta(1, 4, {1: 11}, (1,), 1)
    topics = {"orders": TopicRecord("orders", 7, 0, TopicSettings(), partitions={0: meta})}
    observed = Observed({1: {(7, 0): ReplicaAnswer(4)}})
    intents = None if stale else {}
    found = ClusterPage(cluster, 1, 5, topics, nodes, Controller("l", epoch=3), intents, stale=stale, observed=observed)
    return dict(json.loads(encode(found)))


@pytest.mark.parametrize(
    ("answer", "name", "status", "text"),
    [
        (page(), "nsqha", OK, "1 node, 1 partition, all in sync"),
        (page("west"), "nsqha", OK, "all in sync"),
        (page("west"), "west", OK, "all in sync"),
        (page("west"), "east", UNKNOWN, "is of the cluster west, and not of east"),
        (page(stale="etcd is away"), "nsqha", WARNING, "etcd is away; this is what the lookup daemon last knew"),
        ({}, "nsqha", UNKNOWN, "is not one of a cluster, or of an older build"),
        ({"message": "x"}, "nsqha", UNKNOWN, "this is not a page of a cluster"),
    ],
)
def test_what_a_daemon_says_of_its_cluster(
    answer: dict[str, Any],
    name: str,
    status: Severity,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_etcd(_: Any) -> Picture:
        raise Unavailable("etcd does not answer")

    monkeypatch.setattr(looking, "discover", lambda *_: LookupDaemon("d:1"))
    monkeypatch.setattr(looking, "cluster_of", lambda *_: answer)
    monkeypatch.setattr(looking, "_by_etcd", no_etcd)
    args = build_parser("check").parse_args(["check", "cluster", "--address", "d:1", "--cluster-name", name])
    assert command._run(args) == status
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ("--etcd-endpoint e:1", exits.NOT_FOUND, "no cluster"),
        ("", exits.NOT_FOUND, "cannot reach a daemon; and no cluster"),
    ],
)
def test_the_status_is_of_whoever_answers(
    words: str, status: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An etcd without the cluster has answered: no daemon at a usual port is asked for it as well."""

    def no_daemon(_: Any) -> Picture:
        raise exits.Exit(exits.UNREACHABLE, "cannot reach a daemon")

    def no_cluster(_: Any) -> Picture:
        raise NotFound("no cluster")

    monkeypatch.delenv("NSQHA_ETCD_ENDPOINT", raising=False)
    monkeypatch.setattr(looking, "_by_daemon", no_daemon)
    monkeypatch.setattr(looking, "_by_etcd", no_cluster)
    with pytest.raises(exits.Exit) as raised:
        looking.seen(build_parser("check").parse_args(["check", "cluster", *words.split()]))
    assert (raised.value.status, str(raised.value)) == (status, text)
