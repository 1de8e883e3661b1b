"""Brokers of several builds in one cluster, as real processes: whose levels meet work together, up one version and
back; whose do not are refused at the start with one line, and publishing goes on without them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsqha import __version__
from nsqha.election.model import PEER_LEVEL
from tests.integration.build_of_level import program
from tests.integration.cluster import Cluster, Member
from tests.integration.servers import CannotStart, Lookupd

pytestmark = pytest.mark.timeout(180)

TOPIC = "orders"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster.running(tmp_path / "cluster", sync="none") as cluster:
        cluster.create(TOPIC, "steady")
        yield cluster


def versions(cluster: Cluster) -> list[str]:
    """The builds that `nsqha cluster nodes` shows, by the names of the nodes."""
    words = ["cluster", "nodes", "--etcd-endpoint", cluster.etcd.endpoint, "--json"]
    listed = subprocess.run(
        [sys.executable, "-m", "nsqha", *words], capture_output=True, text=True, timeout=60, check=True
    )
    nodes = [json.loads(line) for line in listed.stdout.splitlines()]
    return [node["version"] for node in sorted(nodes, key=lambda node: str(node["name"]))]


def published(cluster: Cluster, *, at: Member) -> None:
    """Twenty messages, each acknowledged."""
    for number in range(20):
        at.request(f"/pub?topic={TOPIC}", b"%d" % number)


def replaced(cluster: Cluster, node: Member, command: str) -> None:
    """The node is stopped, comes back as another build, and is in sync again."""
    node.stop()
    node.command = command
    node.start()
    cluster.wait_isr(TOPIC, 3)


def test_a_cluster_goes_up_one_version_and_back_node_by_node(cluster: Cluster, tmp_path: Path) -> None:
    next_one = program(tmp_path, build="9.0.0", oldest=PEER_LEVEL, newest=PEER_LEVEL + 1)
    this_one = cluster.nodes[0].command
    builds = [__version__] * 3
    for command, build in ((next_one, "9.0.0"), (this_one, __version__)):
        for index, node in enumerate(cluster.nodes):
            replaced(cluster, node, command)
            builds[index] = build
            assert versions(cluster) == builds
            # Through each node, of whichever build, to a leader of whichever build, with an ISR of both.
            for through in cluster.nodes:
                published(cluster, at=through)
            cluster.wait_level(TOPIC)
    cluster.check_replicas()


def test_a_build_that_skips_a_version_is_refused_and_publishing_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    far = program(tmp_path, build="9.1.0", oldest=PEER_LEVEL + 1, newest=PEER_LEVEL + 2)
    node = cluster.followers(TOPIC)[0]
    node.stop()
    cluster.wait_isr(TOPIC, 2)
    before, node.command = node.command, far
    with pytest.raises(CannotStart):
        node.start()
    mine = f"nsqha 9.1.0 with levels {PEER_LEVEL + 1} to {PEER_LEVEL + 2}"
    refusals = [line for line in node.log().splitlines() if "does not work together with" in line]
    assert len(refusals) == 1, node.log()
    assert mine in refusals[0]
    assert f"nsqha {__version__} with levels" in refusals[0]
    assert "upgrade that one" in refusals[0]
    assert "Traceback" not in node.log()

    others = [other for other in cluster.nodes if other is not node]
    for other in others:
        published(cluster, at=other)
    assert sorted(versions(cluster)) == ["", __version__, __version__], "away, and not registered as what it is"
    node.wait()
    replaced(cluster, node, before)
    cluster.wait_level(TOPIC)
    cluster.check_replicas()


def test_an_older_build_cannot_come_in_when_the_others_have_left_its_level(tmp_path: Path) -> None:
    newer = program(tmp_path, build="9.1.0", oldest=PEER_LEVEL + 1, newest=PEER_LEVEL + 2)
    older = program(tmp_path, build="9.0.0", oldest=PEER_LEVEL, newest=PEER_LEVEL)
    controller = program(
        tmp_path, build="9.1.0", oldest=PEER_LEVEL + 1, newest=PEER_LEVEL + 2, daemon="nsqlookupd"
    )
    Member.command, this_one = newer, Member.command
    Lookupd.command, this_lookupd = controller, Lookupd.command
    try:
        with Cluster.running(tmp_path / "cluster", nodes=2, sync="none") as cluster:
            cluster.create(TOPIC, "steady")
            with cluster.another("n3") as node:
                node.command = older
                with pytest.raises(CannotStart, match=r"nsqha 9\.1\.0 .* does not work together with .*: upgrade this"):
                    node.start()
            published(cluster, at=cluster.nodes[0])
            assert versions(cluster) == ["9.1.0", "9.1.0"]
    finally:
        Member.command, Lookupd.command = this_one, this_lookupd
