"""SIGSTOP: members that are silent and know nothing of it. A leader that wakes up late must not be believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cluster import Cluster, UnderLoad, freeze, thaw
from tests.integration.servers import wait_until

pytestmark = pytest.mark.timeout(180)


def test_a_leader_that_slept_beyond_its_lease_is_fenced(cluster: Cluster, topic: str) -> None:
    epoch = cluster.wait_isr(topic, 3).epoch
    with UnderLoad(cluster, topic) as load:
        leader = cluster.leader(topic)
        load.clients.avoid = cluster.nodes.index(leader)
        freeze(leader)
        try:
            wait_until(lambda: cluster.leader_now(topic) not in (None, leader), "another one leads", 20)
            cluster.wait_registered(2)  # its lease is over
        finally:
            thaw(leader)
        after = cluster.wait_isr(topic, 3)
        assert after.epoch > epoch
        wait_until(lambda: len(cluster.believing_leaders(topic)) == 1, "one leads, and one believes that it does")


def test_a_frozen_leader_is_replaced_before_its_lease_ends(tmp_path: Path) -> None:
    """With a lease of a minute the only news of it is its silence; publishes that other nodes had forwarded to it come
    to an end, and go on at the next leader."""
    with Cluster.running(tmp_path, flags=["--lease-ttl=60s"]) as cluster:
        cluster.create("orders", "steady")
        epoch = cluster.wait_isr("orders", 3).epoch
        with UnderLoad(cluster, "orders", "steady") as load:
            leader = cluster.leader("orders")
            load.clients.avoid = cluster.nodes.index(leader)
            freeze(leader)
            try:
                wait_until(lambda: cluster.leader_now("orders") not in (None, leader), "another one leads", 40)
                assert len(cluster.store.watch.view().nodes) == 3, "its node key is there, as its lease is not over"
                load.goes_on()
            finally:
                thaw(leader)
            assert cluster.wait_isr("orders", 3).epoch > epoch
        said = [lookupd.log() for lookupd in cluster.lookupds]
        assert any("(leader does not answer)" in text for text in said)
        assert sum(node.log().count("nothing is heard of node") for node in cluster.nodes) >= 2, "two witnesses"


def test_what_only_the_leader_has_is_not_acknowledged(cluster: Cluster, topic: str) -> None:
    with UnderLoad(cluster, topic) as load:
        leader, followers = cluster.leader(topic), cluster.followers(topic)
        load.clients.avoid = cluster.nodes.index(leader)
        for follower in followers:
            freeze(follower)
        try:
            load.falls_silent()
            leader.kill()
        finally:
            for follower in followers:
                thaw(follower)
        cluster.wait_isr(topic, 2)
        leader.start()
        cluster.wait_isr(topic, 3)


def test_a_follower_that_slept_is_left_behind_and_comes_back(cluster: Cluster, topic: str) -> None:
    epoch = cluster.wait_isr(topic, 3).epoch
    with UnderLoad(cluster, topic):
        follower = cluster.followers(topic)[0]
        freeze(follower)
        try:
            cluster.wait_isr(topic, 2)
            cluster.wait_registered(2)  # its lease is over
        finally:
            thaw(follower)
        assert cluster.wait_isr(topic, 3).epoch == epoch, "the leader had no reason to go"


def test_etcd_sleeps_and_publishing_goes_on(cluster: Cluster, topic: str) -> None:
    cluster.wait_isr(topic, 3)
    with UnderLoad(cluster, topic) as load:
        cluster.etcd.freeze()
        since = load.clients.now()
        try:
            cluster.wait_leases_over()
            load.goes_on()
        finally:
            until = load.clients.now()
            cluster.etcd.thaw()
        cluster.wait_registered(3)
        cluster.wait_isr(topic, 3)
    assert load.clients.gap(since, until) < 3, "a full ISR acknowledges without etcd"
