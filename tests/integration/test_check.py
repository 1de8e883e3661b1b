"""`nsqha check` and the probes that it asks, against a node that starts, is ready, falls behind, has lost etcd, has no
room, and whose disk is dead; and against clusters and channels that are not well."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import urllib.error
from pathlib import Path

import pytest

from nsqha.cli import build_parser
from nsqha.cli.brokers.v2client import V2Publisher
from nsqha.cli.check.verdict import Severity
from nsqha.election.model import TopicSettings
from nsqha.errors import NsqhaError
from tests.integration.cluster import Cluster, Member, freeze, thaw
from tests.integration.servers import BIN, Host, Node, free_port, wait_until

OK, WARNING, CRITICAL, UNKNOWN = Severity
CLUSTER = {"nodes": 3, "lookupds": 1, "flags": ["--lease-ttl=60s"]}  # longer than any test leaves a node silent
DYING_DISK = """
import os
sync = os.fdatasync
def fdatasync(fd):
    if os.path.exists({dead!r}):
        raise OSError(5, "Input/output error")
    return sync(fd)
os.fdatasync = fdatasync
from nsqha.commitlog.storage import OsFile
OsFile.synced = lambda self: None  # disk rounds call it too
"""
"""For a daemon to import at its start: no write reaches the disk from the moment on when that file is there."""


def check(*words: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(BIN / "nsqha"), "check", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={name: value for name, value in os.environ.items() if not name.startswith("NSQHA_")} | environment,
    )
    assert not done.stderr, done
    return done.returncode, done.stdout


def node_is(node: Node, *words: str) -> tuple[int, str]:
    return check("node", "--address", node.http, *words)


# ---- a node alone


def test_a_node_from_its_start_to_its_dead_disk(tmp_path: Path) -> None:
    dead = tmp_path / "dead"
    (tmp_path / "sitecustomize.py").write_text(DYING_DISK.format(dead=str(dead)))
    node = Node(tmp_path / "node", host=Host(prefix=("env", f"PYTHONPATH={tmp_path}")))
    assert node_is(node)[0] == CRITICAL, "nobody is there"
    with node:
        assert node_is(node) == (OK, "NODE OK\n  ok       alive and ready\n")
        assert node_is(node, "--live")[0] == OK
        freeze(node)
        assert node_is(node, "--timeout", "500ms", "--live")[0] == CRITICAL, "it hangs"
        thaw(node)
        dead.touch()  # the data directory is closed, and the process ends
        with pytest.raises(NsqhaError):
            V2Publisher(node.tcp, 20).publish("orders", [b"lost"])
        status, said = wait_until(lambda: (seen := node_is(node))[0] and seen, "it is not well any more")
        assert status == CRITICAL and ("data_directory" in said or "cannot reach" in said)
        assert node.wait() == 1


def test_a_node_without_room_is_critical_and_alive(tmp_path: Path) -> None:
    with Node(tmp_path, flags=["--disk-low-bytes=9223372036854775807"]) as node:
        status, said = wait_until(lambda: (found := node_is(node))[0] and found, "it has noticed")
        assert status == CRITICAL and "disk_space: disk low" in said
        assert node_is(node, "--live")[0] == OK, "a restart would not make room"


def test_a_channel_that_nobody_works_off(tmp_path: Path) -> None:
    with Node(tmp_path, flags=["--grpc-address=127.0.0.1:0"]) as node:
        node.request("/topic/create?topic=orders", b"")
        node.request("/channel/create?topic=orders&channel=billing", b"")
        at = ("--address", node.http)
        assert check("channel", "orders", "billing", *at, "--oldest", "5m")[0] == OK
        V2Publisher(node.tcp, 20).publish("orders", [b"waits"])
        assert check("channel", "orders", "billing", *at)[0] == WARNING, "it has no consumers"
        status, said = check("channel", "orders", "billing", *at, "--oldest", "0s", "--format", "nagios")
        assert status == CRITICAL and said.startswith("NSQHA CHANNEL CRITICAL - its oldest message is ")
        assert " | depth=1 in_flight=0 deferred=0 consumers=0 oldest_unfinished_seconds=" in said
        status, said = check("channel", "orders", "biling", *at)
        assert status == UNKNOWN and "did you mean billing" in said
        found = json.loads(check("channel", "orders", "billing", *at, "--format", "json")[1])
        assert (found["what"], found["status"], found["figures"]["depth"]) == ("channel", "warning", 1)


# ---- in a cluster


def cluster_is(cluster: Cluster) -> tuple[int, str]:
    lookupd = cluster.lookupds[0].http
    return check("cluster", "--address", lookupd, "--etcd-endpoint", ",".join(cluster.etcds.endpoints))


def test_the_examples_of_the_help_of_check_cluster_run(cluster: Cluster, topic: str) -> None:
    where = {"NSQHA_ETCD_ENDPOINT": cluster.etcds.endpoints[0]}
    for example in build_parser("check").verbs()["check"].verbs()["cluster"].examples:
        wait_until(lambda e=example: check(*shlex.split(e)[2:], **where)[0] == OK, "the cluster is well")  # type: ignore[misc]


def test_any_daemon_is_enough_and_says_what_the_leaders_say(cluster: Cluster, topic: str) -> None:
    """No etcd is given. A single replica restarts while nothing elects: its record names it, and it does not lead."""
    etcd = {"NSQHA_ETCD_ENDPOINT": f"127.0.0.1:{free_port()}"}

    def by(address: str, *words: str) -> tuple[int, str]:
        return check("cluster", "--address", address, *words, **etcd)

    lookupd = cluster.lookupds[0].http
    for address in (lookupd, *(port for node in cluster.nodes for port in (node.tcp, node.http))):
        wait_until(lambda a=address: by(a)[0] == OK, f"{address} says that all is well", 60)  # type: ignore[misc]
    status, said = check("cluster", "--address", etcd["NSQHA_ETCD_ENDPOINT"], **etcd)
    assert status == UNKNOWN and "etcd" in said, "neither a daemon nor etcd is there"

    lone = f"{topic}-lone"
    cluster.store.records.create_topic(lone, TopicSettings(replicas=1))
    owner = cluster.leader(lone)
    other = next(node for node in cluster.nodes if node is not owner)
    wait_until(lambda: by(other.http)[0] == OK, "it is led, too", 60)
    freeze(cluster.lookupd)
    try:
        assert owner.stop() == 0
        missed = lambda: (seen := by(other.http))[0] == CRITICAL and seen  # noqa: E731  a page is shown for a moment
        _, said = wait_until(missed, "its leader is away")
        assert f"without a leader: {lone}/0" in said
        owner.start()
        status, said = by(other.http, "--format", "nagios")
        assert status == CRITICAL and f"{lone}/0: {owner.name} is the leader in the record and does not lead" in said
    finally:
        thaw(cluster.lookupd)
    wait_until(lambda: by(lookupd)[0] == OK, "it is elected again", 60)
    cluster.nodes[0].request(f"/topic/delete?topic={lone}", b"")


def test_a_node_that_is_behind_is_a_warning_and_alive(cluster: Cluster, topic: str) -> None:
    """It comes back, and its leader says nothing; nobody decides meanwhile that another one leads."""
    follower, leader = cluster.followers(topic)[0], cluster.leader(topic)
    wait_until(lambda: node_is(follower)[0] == OK, "it is ready")
    assert follower.stop() == 0  # its lease goes with it
    freeze(cluster.lookupd)  # the controller, who would hear of the silence
    freeze(leader)
    try:
        follower.start()
        status, said = wait_until(lambda: (seen := node_is(follower))[0] and seen, "it is not ready")
        assert status == WARNING and f"{topic}/0 is not followed yet" in said
        assert node_is(follower, "--live")[0] == OK
        assert follower.request("/healthz") == b"OK"
        with pytest.raises(urllib.error.HTTPError, match="503"):
            follower.request("/readyz")
    finally:
        thaw(leader)
        thaw(cluster.lookupds[0])
    wait_until(lambda: node_is(follower)[0] == OK, "it has caught up", 60)


def test_who_lost_etcd_is_a_warning_and_alive(cluster: Cluster, topic: str) -> None:
    node = cluster.nodes[0]
    node.flags.append("--lease-ttl=2s")
    node.restart()
    wait_until(lambda: node_is(node)[0] == OK and cluster_is(cluster)[0] == OK, "the cluster is well", 60)
    cluster.etcd.kill()
    try:
        found = wait_until(lambda: (seen := node_is(node))[0] == WARNING and seen, "it has lost its lease", 60)
        assert "registered: this node has no lease" in found[1]
        assert node_is(node, "--live")[0] == OK
        assert node.request("/healthz") == b"OK", "liveness knows nothing of etcd"
        status, said = cluster_is(cluster)
        assert status in (WARNING, CRITICAL) and "this is what the lookup daemon last knew" in said
        assert check("node", "--address", cluster.lookupds[0].http)[0] in (OK, WARNING)
    finally:
        cluster.etcd.start()
    wait_until(lambda: node_is(node)[0] == OK and cluster_is(cluster)[0] == OK, "all is well again", 60)


def test_a_node_that_cannot_register_yet_is_not_ready(cluster: Cluster, topic: str) -> None:
    """It starts while etcd is silent: its ports are there, and nobody answers, as while it reads its log."""
    node: Member = cluster.followers(topic)[0]
    assert node.stop() == 0
    cluster.etcd.freeze()
    try:
        node.spawn()
        assert node_is(node, "--timeout", "1s")[0] == CRITICAL
    finally:
        cluster.etcd.thaw()

    def ready() -> bool:
        if node._process is not None and node._process.poll() is not None:
            node.wait()  # it gave up, as it says: it is started again
            node.start()
        return node_is(node)[0] == OK

    wait_until(ready, "it is ready", 60)
