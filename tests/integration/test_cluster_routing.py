"""Clients with one fixed address on a real cluster: any node takes PUB and SUB for topics that others lead."""

from __future__ import annotations

import time
import urllib.error
from typing import Any

import pytest

from nsqha.cli.brokers.v2client import RefusedByServer, Subscriber, V2Publisher
from nsqha.cli.terminal.exits import Exit
from tests.integration.cluster import Cluster, Member, posted
from tests.integration.servers import wait_until

pytestmark = pytest.mark.timeout(180)


class Reader:
    """A consumer that finishes what it gets."""

    def __init__(self, node: Any, topic: str, channel: str = "steady", window: int = 50) -> None:
        self.client = Subscriber(node.tcp, 20, topic, channel, window=window)
        self.client.wait_at_most(0.05)
        self.bodies: list[bytes] = []

    def read(self, wanted: int, seconds: float = 20.0) -> set[bytes]:
        """Until so many different messages have come."""
        deadline = time.monotonic() + seconds
        while len(set(self.bodies)) < wanted:
            assert time.monotonic() < deadline, f"{len(set(self.bodies))} of {wanted} messages came"
            messages = self.client.messages()
            self.bodies += [message.body for message in messages]
            if messages:
                self.client.answer(messages, None, None)
        return set(self.bodies)


def published(publisher: V2Publisher, node: Any, topic: str, bodies: list[bytes]) -> V2Publisher:
    """Publish, and again what had no certain outcome: it was on its way to a leader that died. The publisher to go on
    with: an error ends the connection."""
    try:
        publisher.publish(topic, bodies)
    except RefusedByServer as refused:
        assert "outcome unknown" in str(refused)
        publisher.close()
        publisher = V2Publisher(node.tcp, 20)
        publisher.publish(topic, bodies)
    return publisher


def bodies(first: int, end: int) -> list[bytes]:
    return [b"%d" % n for n in range(first, end)]


def test_a_publisher_and_a_consumer_at_followers(cluster: Cluster, topic: str) -> None:
    first, second = cluster.followers(topic)
    reader = Reader(first, topic)
    publisher = V2Publisher(second.tcp, 20)
    publisher.publish(topic, bodies(0, 500))
    reader.read(500)
    assert reader.bodies == bodies(0, 500), "in order, each once"
    leader = cluster.leader(topic)
    channel = leader.json(f"/stats?format=json&topic={topic}")["topics"][0]["channels"][0]
    assert channel["in_flight_count"] == 0
    stats = first.json(f"/stats?format=json&topic={topic}")["topics"][0]["channels"][0]
    assert stats["client_count"] == 1
    reader.client.leave()
    publisher.close()


def test_fixed_addresses_survive_the_death_of_the_leader(cluster: Cluster, topic: str) -> None:
    first, second = cluster.followers(topic)
    leader = cluster.leader(topic)
    reader = Reader(first, topic)
    publisher = V2Publisher(second.tcp, 20)
    publisher.publish(topic, bodies(0, 100))
    reader.read(100)
    leader.kill()
    publisher = published(publisher, second, topic, bodies(100, 200))
    assert reader.read(200) == set(bodies(0, 200))
    publisher.publish(topic, bodies(200, 300))
    assert reader.read(300) == set(bodies(0, 300))
    leader.start()
    cluster.wait_isr(topic, 3)
    reader.client.leave()
    publisher.close()


def test_a_new_channel_is_known_to_the_leader_when_sub_answers(cluster: Cluster, topic: str) -> None:
    first, second = cluster.followers(topic)
    for n in range(5):
        reader = Reader(first, topic, f"new{n}")
        publisher = V2Publisher(second.tcp, 20)
        publisher.publish(topic, [b"%d" % n])
        reader.read(1)
        assert reader.bodies == [b"%d" % n]
        reader.client.close()
        publisher.close()


def test_channels_are_changed_from_any_node(cluster: Cluster, topic: str) -> None:
    first, second = cluster.followers(topic)
    publisher = V2Publisher(second.tcp, 20)
    reader, other = Reader(second, topic), Reader(second, topic, "other")

    def change(how: str, node: Member) -> None:
        assert posted(node, f"/channel/{how}?topic={topic}&channel=steady"), how

    change("pause", first)
    publisher.publish(topic, [b"a"])
    other.read(1)  # so channels have been given it
    assert reader.client.messages() == []
    change("unpause", second)
    reader.read(1)
    change("pause", second)
    publisher.publish(topic, [b"b"])
    change("empty", first)
    publisher.publish(topic, [b"c"])
    change("unpause", first)
    reader.read(2)
    assert reader.bodies == [b"a", b"c"]
    change("delete", first)
    with pytest.raises(Exit, match="closed the connection"):
        wait_until(lambda: reader.client.messages(), "never")
    other.client.leave()
    publisher.close()


def test_an_ephemeral_channel_at_a_follower(cluster: Cluster, topic: str) -> None:
    first, second = cluster.followers(topic)
    reader = Reader(first, topic, "e#ephemeral")
    publisher = V2Publisher(second.tcp, 20)
    publisher.publish(topic, bodies(0, 10))
    reader.read(10)
    reader.client.close()

    def channels() -> set[str]:
        topics = cluster.leader(topic).json(f"/stats?format=json&topic={topic}")["topics"]
        return {channel["channel_name"] for channel in topics[0]["channels"]}

    wait_until(lambda: channels() == {"steady"}, "the channel is gone")
    publisher.close()


def test_a_leader_that_stops_hands_over_and_nobody_notices(cluster: Cluster, topic: str) -> None:
    first, second = cluster.followers(topic)
    leader = cluster.leader(topic)
    reader = Reader(first, topic)
    publisher = V2Publisher(second.tcp, 20)
    publisher.publish(topic, bodies(0, 10))
    leader.stop()
    publisher.publish(topic, bodies(10, 20))
    assert reader.read(20) == set(bodies(0, 20))
    leader.start()
    cluster.wait_isr(topic, 3)
    reader.client.leave()
    publisher.close()


def test_partitions_that_clients_name_are_honoured_at_any_node(cluster: Cluster) -> None:
    """As clients of the Youzan fork name them. Nodes that do not lead the partition forward and relay."""
    name = "named"
    cluster.lookupd.request(f"/topic/create?topic={name}&partition_num=3&replicator=3", b"")
    wait_until(lambda: posted(cluster.nodes[0], f"/channel/create?topic={name}&channel=steady"), "the channel is made")
    for number in range(3):
        cluster.wait_isr(name, 3, number=number)
    readers = [Reader(cluster.nodes[0], name, f"steady {number}") for number in range(3)]
    everything = Reader(cluster.nodes[1], name, "all")
    for number in range(3):
        wanted = [b"%d %d" % (number, n) for n in range(60)]
        for node, first in zip(cluster.nodes, (0, 19, 38), strict=True):
            publisher = V2Publisher(node.tcp, 20)
            publisher.publish(f"{name} {number}", wanted[first : first + 19])
            publisher.close()
        answer = cluster.nodes[2].request(f"/pub?topic={name}&partition={number}", wanted[57])
        assert answer == b"OK"
        cluster.nodes[2].request(f"/mpub?topic={name}&partition={number}", b"\n".join(wanted[58:]))
    for number, reader in enumerate(readers):
        assert reader.read(60) == {b"%d %d" % (number, n) for n in range(60)}
    assert len(everything.read(180)) == 180
    for word in ("3", "abc"):
        publisher = V2Publisher(cluster.nodes[0].tcp, 20)
        with pytest.raises(RefusedByServer, match="E_BAD_PARTITION PUB topic partition"):
            publisher.publish(f"{name} {word}", [b"x"])
        publisher.close()
        with pytest.raises(RefusedByServer, match="E_BAD_PARTITION SUB topic partition"):
            Reader(cluster.nodes[0], name, f"steady {word}")
        with pytest.raises(urllib.error.HTTPError, match="400"):
            cluster.nodes[0].request(f"/pub?topic={name}&partition={word}", b"x")
    for reader in [*readers, everything]:
        reader.client.leave()
