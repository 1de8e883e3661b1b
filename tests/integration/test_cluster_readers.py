"""Holds and reader channels of a cluster: they outlive their leader, and no node gives a consumer a place there."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from nsqha.cli.brokers.v2client import V2Publisher
from nsqha.pb.v1 import admin_pb2, admin_pb2_grpc, segments_pb2, segments_pb2_grpc
from tests.integration.cluster import Cluster, Member
from tests.integration.servers import wait_until
from tests.integration.test_readers import subscribe

pytestmark = pytest.mark.timeout(120)


def call(member: Member, rpc: str, **fields: Any) -> Any:
    """An RPC of the Segments or the Admin service."""
    messages: Any = segments_pb2
    stub: Any = segments_pb2_grpc.SegmentsStub
    if not hasattr(segments_pb2, f"{rpc}Request"):
        messages, stub = admin_pb2, admin_pb2_grpc.AdminStub
    with grpc.insecure_channel(member.grpc) as channel:
        return getattr(stub(channel), rpc)(getattr(messages, f"{rpc}Request")(**fields), timeout=20)


def publish(member: Member, topic: str, *bodies: bytes) -> None:
    publisher = V2Publisher(member.tcp, 10)
    publisher.publish(topic, bodies)
    publisher.close()


def held(member: Member, topic: str) -> list[str]:
    state = call(member, "DescribeTopic", topic=topic).topic.partitions[0]
    return [hold.id for hold in state.holds]


def test_the_next_leader_has_holds_and_places_of_readers(cluster: Cluster, topic: str) -> None:
    cluster.wait_isr(topic, 3)
    leader = cluster.leader(topic)
    other = cluster.followers(topic)[0]
    publish(other, topic, b"one", b"two", b"three")
    hold = call(other, "Snapshot", topics=[topic], hold_ms=600_000).hold_id
    call(other, "CommitReader", topic=topic, channel="spark", offsets={0: 2}, back=True)
    leader.kill()
    cluster.wait_isr(topic, 2)
    wait_until(lambda: held(other, topic) == [hold], "the next leader has the hold")
    [floor] = call(other, "CommitReader", topic=topic, channel="spark", offsets={0: 1}).floors
    assert (floor.offset, floor.error) == (2, "")
    channel = call(other, "DescribeChannel", topic=topic, channel="spark").channel
    assert channel.reader and channel.depth == 1
    cluster.wait_registered(2)  # before that the dead one is asked, too
    assert call(other, "ReleaseHold", hold_id=hold).partitions == 1
    leader.start()
    cluster.wait_isr(topic, 3)


def test_the_next_leader_gives_the_first_channel_of_consumers_the_backlog(cluster: Cluster, topic: str) -> None:
    cluster.wait_isr(topic, 3)
    alone = f"{topic}-read"
    leader, other = cluster.leader(topic), cluster.followers(topic)[0]
    call(leader, "CreateTopic", topic=alone, settings=admin_pb2.TopicSettings(replicas=3))
    wait_until(cluster.all_in_sync, "the new topic in sync")
    publish(other, alone, b"one", b"two", b"three")
    call(other, "CommitReader", topic=alone, channel="archive", offsets={0: 3})
    cluster.leader(alone).kill()
    cluster.wait_isr(alone, 2)
    wait_until(lambda: not call(other, "Snapshot", topics=[alone]).partitions[0].error, "the next leader")
    depths = [call(other, "CreateChannel", topic=alone, channel=name).channel.depth for name in ("billing", "later")]
    assert depths == [3, 0]


def test_no_node_gives_a_consumer_a_place(cluster: Cluster, topic: str) -> None:
    cluster.wait_isr(topic, 3)
    publish(cluster.leader(topic), topic, b"one")
    call(cluster.nodes[0], "CommitReader", topic=topic, channel="spark", offsets={0: 0}, back=True)
    for member in cluster.nodes:
        assert b"spark of topic " + topic.encode() + b" is a reader's" in subscribe(member.tcp, topic, "spark")


def test_places_are_moved_wherever_partitions_are_led(cluster: Cluster) -> None:
    topic = "wide"
    settings = admin_pb2.TopicSettings(partitions=6)
    call(cluster.nodes[0], "CreateTopic", topic=topic, settings=settings, channels=["c"])
    wait_until(cluster.all_in_sync, "the new topic in sync")
    for member in cluster.nodes:
        publish(member, topic, *[b"%d" % n for n in range(6)])
    ends = {pin.partition: pin.end.offset for pin in call(cluster.nodes[0], "Snapshot", topics=[topic]).partitions}
    for n, member in enumerate(cluster.nodes):
        wanted = {number: max(end - 3 + n, 0) for number, end in ends.items()}
        reply = call(member, "CommitReader", topic=topic, channel="spark", offsets=wanted, back=n == 0)
        assert {floor.partition: floor.offset for floor in reply.floors} == wanted, reply
