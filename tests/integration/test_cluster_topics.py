"""Topics of a cluster from their first moment: made anywhere, used at once, deleted everywhere."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nsqha.cli.brokers.admin import Admin
from nsqha.cli.log import folders
from nsqha.cli.terminal.exits import Exit
from nsqha.errors import NotFound
from tests.integration.cluster import Cluster, Member, UnderLoad, posted
from tests.integration.servers import Lookupd, wait_until

pytestmark = pytest.mark.timeout(180)

TIMES = 15


def published(node: Member, topic: str, body: bytes) -> bool:
    try:
        node.request(f"/pub?topic={topic}", body)
    except OSError:
        return False
    return True


def depth(node: Member, topic: str, channel: str) -> int | None:
    found = node.channel(topic, channel)
    return None if found is None else int(found["depth"])


@pytest.mark.parametrize("first", [0, 2], ids=["where it is made", "at another node"])
def test_a_new_topic_takes_publishes_at_every_node(cluster: Cluster, first: int) -> None:
    """Its replicas join within the time that a publish waits, so not even the first one fails."""
    for n in range(TIMES):
        name = f"new-{first}-{n}"
        made = time.monotonic()
        assert posted(cluster.nodes[0], f"/topic/create?topic={name}")
        for node in (cluster.nodes[first], *cluster.nodes):
            assert published(node, name, b"hello"), (name, node)
        print(f"{name}: four publishes OK'd {time.monotonic() - made:.3f} s after its creation began")


def test_a_creation_is_answered_when_all_partitions_are_led(cluster: Cluster) -> None:
    with Admin(cluster.nodes[0].grpc, 20) as admin:
        for n in range(5):
            admin.call("CreateTopic", topic=f"wide-{n}", settings={"partitions": 12})
            metas = [cluster.meta(f"wide-{n}", number) for number in range(12)]
            assert all(meta is not None and meta.leader for meta in metas)
        with pytest.raises(Exit, match="replicas is 4, and the cluster has 3 nodes"):
            admin.call("CreateTopic", topic="many", settings={"partitions": 1, "replicas": 4})


def test_the_first_publish_makes_a_topic_at_any_node(cluster: Cluster) -> None:
    for n in range(TIMES):
        assert published(cluster.nodes[n % 3], f"unheard-{n}", b"hello")
    for n in range(TIMES):
        meta = cluster.wait_isr(f"unheard-{n}", 3)
        assert cluster.member(meta.leader) is cluster.nodes[n % 3], "who is asked leads"


def test_a_topic_begins_with_the_channels_that_a_stock_lookup_daemon_knows(tmp_path: Path) -> None:
    """Which the brokers know of, and the cluster's own lookup daemon does not."""
    with Lookupd(tmp_path / "stock") as stock:
        flags = [f"--lookupd-tcp-address={stock.tcp}"]
        with Cluster.running(tmp_path, nodes=1, flags=flags) as cluster:
            stock.request("/channel/create?topic=orders&channel=archive", b"")
            posted(cluster.nodes[0], "/topic/create?topic=first")
            wait_until(lambda: stock.json("/lookup?topic=first")["producers"], "the broker knows it as a lookup daemon")
            cluster.lookupd.request("/topic/create?topic=orders", b"")
            assert published(cluster.nodes[0], "orders", b"hello")
            assert depth(cluster.nodes[0], "orders", "archive") == 1


def test_everybody_makes_the_same_topic_at_once(cluster: Cluster) -> None:
    for n in range(5):
        name = f"together-{n}"
        with ThreadPoolExecutor(3) as at_once:
            outcomes = list(at_once.map(published, cluster.nodes, [name] * 3, [b"hello"] * 3))
        assert outcomes == [True, True, True], name
        cluster.wait_isr(name, 3)
        assert len(cluster.believing_leaders(name)) == 1


def test_a_deleted_topic_goes_from_every_node_and_may_come_again(cluster: Cluster) -> None:
    for n in range(3):
        cluster.create("come-and-go", "steady", at=cluster.nodes[n])
        with UnderLoad(cluster, "come-and-go"):
            pass
        assert posted(cluster.nodes[(n + 1) % 3], "/topic/delete?topic=come-and-go"), "a node that does not lead"
        assert cluster.meta("come-and-go") is None
        for node in cluster.nodes:
            wait_until(lambda node=node: not has_files(node, "come-and-go"), f"the files go from {node}")  # type: ignore[misc]


def test_the_cross_of_nsqadmin_at_a_node_deletes_no_message(cluster: Cluster) -> None:
    """A tombstone at the lookup daemons, then /topic/delete at that node: the others have the topic, and lead it."""
    cluster.create("crossed", "steady")
    leader, follower = cluster.leader("crossed"), cluster.followers("crossed")[0]
    assert published(leader, "crossed", b"hello")
    for node in (follower, leader):
        info = node.json("/info")
        where = f"{info['broadcast_address']}:{info['http_port']}"
        cluster.lookupd.request(f"/topic/tombstone?topic=crossed&node={where}", b"")
        assert posted(node, "/topic/delete?topic=crossed")
    mine = cluster.uid(leader)
    wait_until(lambda: (meta := cluster.meta("crossed")) and meta.leader not in (0, mine), "another node leads it")
    meta = cluster.meta("crossed")
    assert meta is not None
    now = cluster.member(meta.leader)
    assert now is not None
    wait_until(lambda: depth(now, "crossed", "steady") == 1, "the message is there")
    assert has_files(leader, "crossed")
    cluster.lookupd.request("/topic/delete?topic=crossed", b"")
    assert cluster.meta("crossed") is not None, "registrations are dropped, no message is"
    (other,) = [node for node in cluster.nodes if node not in (leader, follower)]
    assert posted(other, "/topic/delete?topic=crossed")
    assert cluster.meta("crossed") is None


def test_deletions_of_nsqadmin_answer_200_at_every_leader(cluster: Cluster) -> None:
    """It asks the lookup daemon, then each leader; the first of them deletes everywhere."""
    name = "swept"
    cluster.lookupd.request(f"/topic/create?topic={name}&partition_num=3&replicator=3", b"")
    wait_until(lambda: all(cluster.meta(name, n).leader for n in range(3)), "all are led")  # type: ignore[union-attr]
    wait_until(lambda: posted(cluster.nodes[0], f"/channel/create?topic={name}&channel=c"), "the channel is made")
    for node in cluster.nodes:
        wait_until(lambda node=node: node.channel(name, "c"), f"{node} has the channel")  # type: ignore[misc]
    cluster.lookupd.request(f"/channel/delete?topic={name}&channel=c", b"")
    for node in cluster.nodes:
        node.request(f"/channel/delete?topic={name}&channel=c", b"")
    assert not posted(cluster.nodes[0], f"/channel/delete?topic={name}&channel=c"), "404 where it was deleted"
    cluster.lookupd.request(f"/topic/delete?topic={name}", b"")
    for node in cluster.nodes:
        node.request(f"/topic/delete?topic={name}", b"")
    assert cluster.meta(name) is None
    assert not posted(cluster.nodes[0], f"/topic/delete?topic={name}"), "404 where it was deleted"
    assert not posted(cluster.nodes[1], "/topic/delete?topic=never")


def has_files(node: Member, topic: str) -> bool:
    try:
        return bool(folders(str(node.data), topic, None))
    except NotFound:
        return False
