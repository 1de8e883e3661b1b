"""SIGSTOP: members that are silent and know nothing of it. A leader that wakes up late must not be believed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.integration.cluster import LEASE_SECONDS, Cluster, UnderLoad, freeze, pause, thaw
from tests.integration.servers import wait_until

pytestmark = pytest.mark.timeout(180)

names = count(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster.running(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster
        cluster.check_replicas()


@pytest.fixture
def topic(cluster: Cluster) -> Iterator[str]:
    name = f"frozen-{next(names)}"
    cluster.create(name, "steady")
    yield name
    cluster.wait_isr(name, 3)
    cluster.wait_level(name)


def test_a_leader_that_slept_beyond_its_lease_is_fenced(cluster: Cluster, topic: str) -> None:
    epoch = cluster.wait_isr(topic, 3).epoch
    with UnderLoad(cluster, topic) as load:
        leader = cluster.leader(topic)
        load.clients.avoid = cluster.nodes.index(leader)
        freeze(leader)
        try:
            wait_until(lambda: cluster.leader_now(topic) not in (None, leader), "another one leads", 20)
            pause(LEASE_SECONDS + 1)
        finally:
            thaw(leader)
        after = cluster.wait_isr(topic, 3)
        assert after.epoch > epoch
        wait_until(lambda: len(cluster.believing_leaders(topic)) == 1, "one leads, and one believes that it does")
    assert load.report.figures.ok > 200


def test_what_only_the_leader_has_is_not_acknowledged(cluster: Cluster, topic: str) -> None:
    with UnderLoad(cluster, topic) as load:
        leader, followers = cluster.leader(topic), cluster.followers(topic)
        load.clients.avoid = cluster.nodes.index(leader)
        for follower in followers:
            freeze(follower)
        try:
            pause(0.2)
            since = load.clients.now()
            pause(1)  # less than a lease
            until = load.clients.now()
            leader.kill()
        finally:
            for follower in followers:
                thaw(follower)
        cluster.wait_isr(topic, 2)
        leader.start()
        cluster.wait_isr(topic, 3)
    assert load.clients.gap(since, until) >= 0.9, "what one replica has is nothing"
    assert load.report.figures.ok > 200


def test_a_follower_that_slept_is_left_behind_and_comes_back(cluster: Cluster, topic: str) -> None:
    epoch = cluster.wait_isr(topic, 3).epoch
    with UnderLoad(cluster, topic) as load:
        follower = cluster.followers(topic)[0]
        freeze(follower)
        try:
            cluster.wait_isr(topic, 2)
            pause(LEASE_SECONDS + 1)
        finally:
            thaw(follower)
        assert cluster.wait_isr(topic, 3).epoch == epoch, "the leader had no reason to go"
    assert load.report.figures.ok > 200


def test_etcd_sleeps_and_publishing_goes_on(cluster: Cluster, topic: str) -> None:
    cluster.wait_isr(topic, 3)
    with UnderLoad(cluster, topic) as load:
        cluster.etcd.freeze()
        since = load.clients.now()
        try:
            pause(5)
        finally:
            until = load.clients.now()
            cluster.etcd.thaw()
        cluster.wait_registered(3)
        cluster.wait_isr(topic, 3)
    assert load.clients.gap(since, until) < 3, "a full ISR acknowledges without etcd"
