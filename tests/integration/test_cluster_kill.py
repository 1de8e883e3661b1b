"""kill -9 of every part of a cluster under load: nothing that was OK'd is lost, replicas end with the same bytes."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.integration.cluster import Cluster, UnderLoad
from tests.integration.servers import BIN, wait_until

pytestmark = pytest.mark.timeout(180)

CLUSTER = {"lookupds": 2}


@pytest.mark.parametrize("any_node", [False, True], ids=["consumers at the leader", "consumers anywhere"])
def test_the_leader_is_killed(cluster: Cluster, topic: str, any_node: bool) -> None:
    with UnderLoad(cluster, topic, any_node=any_node) as load:
        epoch = cluster.wait_isr(topic, 3).epoch
        leader = cluster.leader(topic)
        load.clients.avoid = cluster.nodes.index(leader)
        leader.kill()
        after = cluster.wait_isr(topic, 2)
        assert after.epoch > epoch
        assert cluster.member(after.leader) not in (None, leader)
        load.goes_on()
        cluster.wait_registered(2)  # its lease is over: test_cluster_lease.py has who is back before
        leader.start()
        cluster.wait_isr(topic, 3)


def test_a_follower_is_killed(cluster: Cluster, topic: str) -> None:
    with UnderLoad(cluster, topic) as load:
        epoch = cluster.wait_isr(topic, 3).epoch
        follower = cluster.followers(topic)[0]
        follower.kill()
        cluster.wait_isr(topic, 2)
        load.goes_on()
        follower.start()
        assert cluster.wait_isr(topic, 3).epoch == epoch, "the leader had no reason to go"


def test_the_controller_is_killed_and_another_one_elects(cluster: Cluster, topic: str) -> None:
    with UnderLoad(cluster, topic) as load:
        controller = wait_until(cluster.active_lookupd, "there is a controller")
        other = next(daemon for daemon in cluster.lookupds if daemon is not controller)
        controller.kill()
        leader = cluster.leader(topic)
        load.clients.avoid = cluster.nodes.index(leader)
        leader.kill()
        assert cluster.member(cluster.wait_isr(topic, 2).leader) not in (None, leader)
        assert cluster.active_lookupd() is other
        leader.start()
        controller.start()
        cluster.wait_isr(topic, 3)


def cluster_status(cluster: Cluster) -> tuple[int, Any]:
    command = [str(BIN / "nsqha"), "cluster", "status", f"--etcd-endpoint={cluster.etcd.endpoint}", "--json"]
    command += [f"--address={cluster.lookupds[0].http}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_etcd_is_killed_and_publishing_goes_on(cluster: Cluster, topic: str) -> None:
    before = cluster.wait_isr(topic, 3)
    with UnderLoad(cluster, topic) as load:
        cluster.etcd.kill()
        since = load.clients.now()
        cluster.wait_leases_over()
        load.goes_on()
        for node in cluster.nodes:
            assert node.request("/readyz").startswith(b"OK"), "a load balancer keeps sending clients"
        status, said = cluster_status(cluster)
        assert status == 1 and len(said["nodes"]) == 3 and said["leaderless"] == []
        assert "the lookup daemon last knew" in said["doubt"]
        until = load.clients.now()
        cluster.etcd.start()
        cluster.wait_registered(3)
        after = cluster.wait_isr(topic, 3)
    assert load.clients.gap(since, until) < 3, "a full ISR acknowledges without etcd"
    assert after.leader == before.leader or after.epoch > before.epoch
