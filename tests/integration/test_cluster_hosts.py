"""A cluster on several hosts, with addresses that are not loopback, and a network between them that breaks.

host h1: n1 n2 (zone a)    h2: n3 (zone a)    h3: n4 (zone b)    c1, c2: lookup daemons    e1, e2, e3: etcd
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.etcd_server import EtcdMembers, EtcdServer
from tests.integration.cluster import (
    LEASE_SECONDS,
    Cluster,
    Member,
    UnderLoad,
    pause,
    posted,
    published_and_read_through,
)
from tests.integration.servers import Host, free_port, wait_until
from tests.jepsen.hosts.network import Network, NotPossible

pytestmark = pytest.mark.timeout(180)

PLACES = {"n1": "h1", "n2": "h1", "n3": "h2", "n4": "h3", "lookupd1": "c1", "lookupd2": "c2"}
ZONES = {"h1": "a", "h2": "a", "h3": "b"}
ETCD = ("e1", "e2", "e3")
EVERYBODY = (*ZONES, "c1", "c2", *ETCD)

names = count(1)


class HostsCluster(Cluster):
    """Members on the hosts of `PLACES`."""

    network: Network

    def host(self, name: str) -> Host:
        return self.network.host(PLACES[name])

    def place_of(self, member: Member) -> str:
        return PLACES[member.name]

    def hosts_of(self, topic: str, number: int = 0) -> list[str]:
        """Where the replicas of a partition are; empty if one is not registered."""
        meta = self.meta(topic, number)
        members = [] if meta is None else [self.member(uid) for uid in meta.replicas]
        return [self.place_of(member) for member in members if member is not None]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        with Network.made() as network:
            yield network
    except NotPossible as error:
        pytest.skip(f"hosts can not be made here: {error}")


@pytest.fixture(scope="module")
def cluster(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsCluster]:
    etcd = EtcdMembers([member_of(network.host(name), name, tmp_path_factory.mktemp(name)) for name in ETCD])
    HostsCluster.network = network
    whole = HostsCluster(
        tmp_path_factory.mktemp("cluster"),
        etcd,
        nodes=4,
        lookupds=2,
        flags=lambda name: [
            f"--host={PLACES[name]}",
            f"--topology-zone={ZONES[PLACES[name]]}",
            "--insecure-cluster",
        ],
    )
    try:
        etcd.start()
        with whole.started() as cluster:
            assert isinstance(cluster, HostsCluster)
            yield cluster
            cluster.check_replicas()
    finally:
        etcd.kill()


def member_of(host: Host, name: str, folder: Path) -> EtcdServer:
    return EtcdServer(folder, client_port=free_port(), name=name, ip=host.ip, peer_port=free_port(), prefix=host.prefix)


@pytest.fixture
def topic(cluster: HostsCluster, network: Network) -> Iterator[str]:
    """A topic on three hosts; whatever was cut is healed afterwards, and the replicas meet."""
    name = f"orders-{next(names)}"
    cluster.create(name, "steady")
    yield name
    network.heal()
    cluster.wait_registered(4)
    cluster.wait_isr(name, 3, seconds=40)
    cluster.wait_level(name)


def others(cluster: HostsCluster, member: Member) -> list[str]:
    return [place for place in EVERYBODY if place != cluster.place_of(member)]


def test_everybody_is_told_addresses_that_other_hosts_can_reach(cluster: HostsCluster, topic: str) -> None:
    nodes = cluster.store.watch.view().nodes.values()
    assert {node.grpc_address for node in nodes} == {node.grpc for node in cluster.nodes}
    assert {node.tcp_address for node in nodes} == {node.tcp for node in cluster.nodes}
    found = cluster.lookupd.json(f"/lookup?topic={topic}")["producers"]
    leader = cluster.leader(topic)
    assert [(each["broadcast_address"], each["tcp_port"]) for each in found] == [(leader.host.ip, leader.tcp_port)]
    with UnderLoad(cluster, topic, any_node=True):
        pass


def test_replicas_are_on_different_hosts_and_in_different_zones(cluster: HostsCluster) -> None:
    name = f"spread-{next(names)}"
    cluster.lookupd.request(f"/topic/create?topic={name}&partition_num=6&replicator=2", b"")
    for number in range(6):
        wait_until(lambda n=number: len(cluster.hosts_of(name, n)) == 2, f"{name}/{number} is placed", 30)  # type: ignore[misc]
        cluster.wait_isr(name, 2, number=number)
        assert {ZONES[host] for host in cluster.hosts_of(name, number)} == {"a", "b"}
    whole = f"whole-{next(names)}"
    cluster.create(whole)
    assert sorted(cluster.hosts_of(whole)) == ["h1", "h2", "h3"], "n1 and n2 are one host"


def test_leader_and_follower_lose_each_other(cluster: HostsCluster, network: Network, topic: str) -> None:
    with UnderLoad(cluster, topic, any_node=True) as load:
        before = cluster.wait_isr(topic, 3)
        leader, follower = cluster.leader(topic), follower_of(cluster, topic)
        network.cut(cluster.place_of(leader), cluster.place_of(follower))
        after = cluster.wait_isr(topic, 2)
        assert (after.leader, after.epoch) == (before.leader, before.epoch), "the controller reaches the leader"
        load.goes_on()
        network.heal()
        cluster.wait_isr(topic, 3, seconds=40)


def follower_of(cluster: HostsCluster, topic: str) -> Member:
    meta = cluster.wait_isr(topic, 3)
    members = [cluster.member(uid) for uid in meta.isr if uid != meta.leader]
    return next(member for member in members if member is not None)


def test_a_leader_is_cut_off_from_everybody_but_clients(cluster: HostsCluster, network: Network, topic: str) -> None:
    with UnderLoad(cluster, topic) as load:
        before = cluster.wait_isr(topic, 3)
        leader = cluster.leader(topic)
        load.clients.avoid = cluster.nodes.index(leader)
        network.cut_off(cluster.place_of(leader), EVERYBODY)
        wait_until(lambda: (cluster.meta(topic) or before).epoch > before.epoch, "another leader is elected", 20)
        assert cluster.leader(topic) is not leader
        cluster.wait_isr(topic, 2)
        load.goes_on()
        network.heal()
        cluster.wait_isr(topic, 3, seconds=40)


def test_a_leader_that_only_lost_etcd_is_replaced_and_stops_leading(
    cluster: HostsCluster, network: Network, topic: str
) -> None:
    with UnderLoad(cluster, topic) as load:
        before = cluster.wait_isr(topic, 3)
        leader = cluster.leader(topic)
        load.clients.avoid = cluster.nodes.index(leader)
        network.cut_off(cluster.place_of(leader), ETCD)
        wait_until(lambda: (cluster.meta(topic) or before).epoch > before.epoch, "another leader is elected", 20)
        load.goes_on()
        # It can not read who leads, but its followers tell it that another epoch has begun.
        wait_until(lambda: leader.name not in cluster.believing_leaders(topic), "it leads no more")
        network.heal()
        cluster.wait_isr(topic, 3, seconds=40)


def test_a_follower_that_only_lost_etcd_goes_on_acknowledging(
    cluster: HostsCluster, network: Network, topic: str
) -> None:
    with UnderLoad(cluster, topic) as load:
        before = cluster.wait_isr(topic, 3)
        follower = follower_of(cluster, topic)
        network.cut_off(cluster.place_of(follower), ETCD)
        cluster.wait_leases_over(follower)
        load.goes_on()
        after = cluster.meta(topic)
        assert after is not None and (after.leader, after.epoch) == (before.leader, before.epoch)
        network.heal()
        cluster.wait_registered(4)
        cluster.wait_isr(topic, 3, seconds=40)


def test_the_controller_is_cut_off_and_another_one_decides(cluster: HostsCluster, network: Network, topic: str) -> None:
    controller = wait_until(cluster.active_lookupd, "there is a controller")
    other = next(daemon for daemon in cluster.lookupds if daemon is not controller)
    network.cut_off(PLACES[controller.directory.name], EVERYBODY)
    wait_until(lambda: other.json("/controller")["here"], "the other one is controller", 20)
    name = f"decided-{next(names)}"
    wait_until(lambda: posted(other, f"/topic/create?topic={name}"), "a topic is made", 20)
    cluster.wait_isr(name, 3)


def test_an_etcd_member_that_lost_the_others_is_left(cluster: HostsCluster, network: Network, topic: str) -> None:
    """It still takes connections, and knows nothing new."""
    assert isinstance(cluster.etcds, EtcdMembers)
    with UnderLoad(cluster, topic) as load:
        before = cluster.wait_isr(topic, 3)
        lost = random.choice(cluster.etcds.members)
        network.cut_off(lost.name, [name for name in ETCD if name != lost.name])
        name = f"decided-{next(names)}"
        wait_until(lambda: posted(cluster.nodes[0], f"/topic/create?topic={name}"), "a topic is made", 30)
        cluster.wait_isr(name, 3, seconds=30)
        pause(LEASE_SECONDS + 1)  # who still asks the lost member has no lease then
        load.goes_on()
        network.heal()
        after = cluster.wait_isr(topic, 3)
        assert after.leader == before.leader or after.epoch > before.epoch


def test_clients_of_a_leader_that_only_lost_etcd_are_served_through_it(
    cluster: HostsCluster, network: Network, topic: str
) -> None:
    """Its own view goes on to say that it leads itself."""
    before = cluster.wait_isr(topic, 3)
    cut = cluster.leader(topic)
    network.cut_off(cluster.place_of(cut), ETCD)
    wait_until(lambda: (cluster.meta(topic) or before).epoch > before.epoch, "another leader is elected", 20)
    published_and_read_through(cut, topic)


def test_clients_of_a_node_that_only_lost_etcd_follow_a_leader_that_moves(
    cluster: HostsCluster, network: Network, topic: str
) -> None:
    cluster.lookupd.request("/cluster/balance?paused=true", b"")  # or the old leader leads again in a moment
    before = cluster.wait_isr(topic, 3)
    cut, leader = follower_of(cluster, topic), cluster.leader(topic)
    published_and_read_through(cut, topic)
    network.cut_off(cluster.place_of(cut), ETCD)
    cluster.wait_leases_over(cut)
    leader.kill()
    wait_until(lambda: (cluster.meta(topic) or before).epoch > before.epoch, "another leader is elected", 20)
    assert cluster.leader(topic) is not leader
    leader.start()  # without it, and without whoever is not registered, nothing is acknowledged
    published_and_read_through(cut, topic)
    cluster.lookupd.request("/cluster/balance?paused=false", b"")
