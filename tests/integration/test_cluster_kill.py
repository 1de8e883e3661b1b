"""kill -9 of every part of a cluster under load: nothing that was OK'd is lost, replicas end with the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.integration.cluster import Cluster, UnderLoad, pause
from tests.integration.servers import wait_until

pytestmark = pytest.mark.timeout(180)

names = count(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes and two lookup daemons; every test leaves them as it found them."""
    with Cluster.running(tmp_path_factory.mktemp("cluster"), lookupds=2) as cluster:
        yield cluster
        cluster.check_replicas()


@pytest.fixture
def topic(cluster: Cluster) -> Iterator[str]:
    """A topic of its own for each test, with three replicas in sync; they are compared when the test is over."""
    name = f"orders-{next(names)}"
    cluster.start()
    cluster.create(name, "steady")
    yield name
    cluster.start()
    cluster.wait_isr(name, 3)
    cluster.wait_level(name)


@pytest.mark.parametrize("any_node", [False, True], ids=["consumers at the leader", "consumers anywhere"])
def test_the_leader_is_killed(cluster: Cluster, topic: str, any_node: bool) -> None:
    with UnderLoad(cluster, topic, any_node=any_node) as load:
        epoch = cluster.wait_isr(topic, 3).epoch
        leader = cluster.leader(topic)
        load.clients.avoid = cluster.nodes.index(leader)
        leader.kill()
        pause(2)
        after = cluster.wait_isr(topic, 2)
        assert after.epoch > epoch
        assert cluster.leader(topic) is not leader
        leader.start()
        cluster.wait_isr(topic, 3)
    assert load.report.figures.ok > 200


def test_a_follower_is_killed(cluster: Cluster, topic: str) -> None:
    with UnderLoad(cluster, topic) as load:
        epoch = cluster.wait_isr(topic, 3).epoch
        follower = cluster.followers(topic)[0]
        follower.kill()
        cluster.wait_isr(topic, 2)
        pause(1)
        follower.start()
        assert cluster.wait_isr(topic, 3).epoch == epoch, "the leader had no reason to go"
    assert load.report.figures.ok > 200


def test_the_controller_is_killed_and_another_one_elects(cluster: Cluster, topic: str) -> None:
    with UnderLoad(cluster, topic) as load:
        controller = wait_until(cluster.active_lookupd, "there is a controller")
        other = next(daemon for daemon in cluster.lookupds if daemon is not controller)
        controller.kill()
        leader = cluster.leader(topic)
        load.clients.avoid = cluster.nodes.index(leader)
        leader.kill()
        cluster.wait_isr(topic, 2)
        assert cluster.leader(topic) is not leader
        assert cluster.active_lookupd() is other
        leader.start()
        controller.start()
        cluster.wait_isr(topic, 3)
    assert load.report.figures.ok > 100


def test_etcd_is_killed_and_publishing_goes_on(cluster: Cluster, topic: str) -> None:
    before = cluster.wait_isr(topic, 3)
    with UnderLoad(cluster, topic) as load:
        cluster.etcd.kill()
        since = load.clients.now()
        pause(6)  # beyond every lease
        until = load.clients.now()
        cluster.etcd.start()
        cluster.wait_registered(3)
        after = cluster.wait_isr(topic, 3)
    assert load.clients.gap(since, until) < 3, "a full ISR acknowledges without etcd"
    assert after.leader == before.leader or after.epoch > before.epoch
    assert load.report.figures.ok > 400
