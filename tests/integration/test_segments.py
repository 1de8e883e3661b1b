"""The Segments service of a real node and of a cluster: what a snapshot pins, what a hold keeps, who follows whom."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from nsqha.cli.brokers.v2client import V2Publisher
from nsqha.pb.v1 import admin_pb2, admin_pb2_grpc, segments_pb2, segments_pb2_grpc
from tests.integration.cluster import Cluster
from tests.integration.devnode import DevNode
from tests.integration.servers import wait_until

pytestmark = pytest.mark.timeout(180)


class Segments:
    """The Segments and Admin services at one address."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self._stub: Any = segments_pb2_grpc.SegmentsStub(self.channel)
        self.admin: Any = admin_pb2_grpc.AdminStub(self.channel)

    def snapshot(self, *topics: str, **fields: Any) -> Any:
        return self._stub.Snapshot(segments_pb2.SnapshotRequest(topics=topics, **fields), timeout=20)

    def __call__(self, rpc: str, **fields: Any) -> Any:
        return getattr(self._stub, rpc)(getattr(segments_pb2, f"{rpc}Request")(**fields), timeout=20)

    def create(self, topic: str, partitions: int = 1, channels: tuple[str, ...] = ("c",)) -> None:
        settings = admin_pb2.TopicSettings(partitions=partitions)
        self.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic, channels=channels, settings=settings))

    def holds(self, topic: str) -> list[Any]:
        described = self.admin.DescribeTopic(admin_pb2.DescribeTopicRequest(topic=topic)).topic
        return [hold for partition in described.partitions for hold in partition.holds]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("segments"), "--sync=interval")
    yield node
    assert node.stop() == 0


@pytest.fixture
def segments(node: DevNode) -> Iterator[Segments]:
    found = Segments(node.grpc)
    yield found
    found.channel.close()


def publish(address: str, topic: str, *bodies: bytes) -> None:
    publisher = V2Publisher(address, 10)
    publisher.publish(topic, bodies)
    publisher.close()


def refused(call: Any, code: grpc.StatusCode) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() == code
    return str(caught.value.details())


def test_a_snapshot_pins_what_is_committed(node: DevNode, segments: Segments) -> None:
    segments.create("pinned")
    before = time.time_ns()
    publish(node.tcp, "pinned", b"one", b"two")
    [pin] = segments.snapshot("pinned", cut_points=True, timestamps_ns=[0, before, time.time_ns()]).partitions
    assert (pin.start.offset, pin.end.offset) == (0, 2)
    assert list(pin.offsets_for_times) == [0, 0, 2]
    assert [cut.log_id for cut in (pin.cuts[0], pin.cuts[-1])] == [pin.start.log_id, pin.end.log_id]
    assert before <= pin.end.timestamp_ns <= time.time_ns()
    [replica] = pin.replicas
    assert replica.leader and replica.in_sync and replica.address.startswith("127.0.0.1:")
    publish(node.tcp, "pinned", b"three")
    [later] = segments.snapshot("pinned").partitions
    assert later.end.offset == 3
    assert later.end.log_id > pin.end.log_id
    assert later.chain != pin.chain
    assert not later.cuts


def test_topics_are_named_or_matched(segments: Segments) -> None:
    for name in ("match-a", "match-b", "other"):
        segments.create(name)
    found = segments.snapshot(pattern="match-.*").partitions
    assert [pin.topic for pin in found] == ["match-a", "match-b"]
    wrong = grpc.StatusCode.INVALID_ARGUMENT
    assert "match-nothing" in refused(lambda: segments.snapshot("match-nothing"), grpc.StatusCode.NOT_FOUND)
    assert "one of the two" in refused(lambda: segments.snapshot("other", pattern="x"), wrong)
    assert "no regular expression" in refused(lambda: segments.snapshot(pattern="("), wrong)
    assert "#ephemeral" in refused(lambda: segments.snapshot("gone#ephemeral"), wrong)


def test_ranges_divide_only_what_is_asked_for(node: DevNode, segments: Segments) -> None:
    segments.create("ranged")
    for n in range(6):
        publish(node.tcp, "ranged", b"%d" % n)
    asked = [segments_pb2.OffsetRange(topic="ranged", partition=0, first=2, end=3)]
    [pin] = segments.snapshot("ranged", cut_points=True, ranges=asked).partitions
    assert pin.cuts[0].offset <= 2
    assert pin.cuts[-1].offset == 3
    missing = [segments_pb2.OffsetRange(topic="ranged", partition=7, first=0, end=1)]
    text = refused(lambda: segments.snapshot("ranged", ranges=missing), grpc.StatusCode.NOT_FOUND)
    assert "no partition 7" in text


def test_a_hold_is_made_seen_renewed_and_released(node: DevNode, segments: Segments) -> None:
    segments.create("held", partitions=2)
    reply = segments.snapshot("held", hold_ms=60_000)
    assert len(reply.hold_id) == 16
    assert {hold.id for hold in segments.holds("held")} == {reply.hold_id}
    again = segments.snapshot("held", hold_ms=60_000, hold_id=reply.hold_id)
    assert again.hold_id == reply.hold_id
    renewed = segments("RenewHold", hold_id=reply.hold_id)
    assert renewed.partitions == 2
    assert renewed.until_ns > time.time_ns() + 10 * 60 * 10**9
    assert segments("ReleaseHold", hold_id=reply.hold_id).partitions == 2
    assert not segments.holds("held")
    text = refused(lambda: segments("RenewHold", hold_id=reply.hold_id), grpc.StatusCode.NOT_FOUND)
    assert "nothing is held" in text
    assert "hex digits" in refused(lambda: segments("RenewHold", hold_id="x"), grpc.StatusCode.INVALID_ARGUMENT)
    assert "at most" in refused(lambda: segments.snapshot("held", hold_ms=10**9), grpc.StatusCode.INVALID_ARGUMENT)


def test_a_reader_channel_follows_its_reader(node: DevNode, segments: Segments) -> None:
    segments.create("read")
    publish(node.tcp, "read", *[b"%d" % n for n in range(10)])
    [floor] = segments("CommitReader", topic="read", channel="lake", offsets={0: 0}, back=True).floors
    assert (floor.offset, floor.error) == (0, "")
    [pin] = segments.snapshot("read", channel="lake").partitions
    assert pin.channel_floor == 0
    [floor] = segments("CommitReader", topic="read", channel="lake", offsets={0: 7}).floors
    assert floor.offset == 7
    [floor] = segments("CommitReader", topic="read", channel="lake", offsets={0: 3}).floors
    assert floor.offset == 7, "only `back` lowers a floor"
    text = refused(
        lambda: segments("CommitReader", topic="read", channel="c", offsets={0: 3}), grpc.StatusCode.FAILED_PRECONDITION
    )
    assert "reader" in text
    text = refused(
        lambda: segments("CommitReader", topic="read", channel="lake", offsets={4: 3}), grpc.StatusCode.NOT_FOUND
    )
    assert "no partition 4" in text


def test_any_node_of_a_cluster_answers_for_all(cluster: Cluster) -> None:
    nodes = [Segments(member.grpc) for member in cluster.nodes]
    nodes[0].create("spread", partitions=6)
    wait_until(cluster.all_in_sync, "the new topic in sync")
    for member in cluster.nodes:
        publish(member.tcp, "spread", b"x" * 100)

    def agree() -> Any:
        answers = [{pin.partition: pin for pin in one.snapshot("spread").partitions} for one in nodes]
        ends = [{n: (pin.end.offset, pin.chain) for n, pin in found.items()} for found in answers]
        return answers[0] if all(found == ends[0] for found in ends) else None

    pins = wait_until(agree, "the same snapshot from each node")
    assert sorted(pins) == list(range(6))
    assert not any(pin.error for pin in pins.values())
    assert sum(pin.end.offset for pin in pins.values()) == 3
    for pin in pins.values():
        assert len(pin.replicas) == 3
        assert sum(replica.leader for replica in pin.replicas) == 1
        assert all(replica.address and replica.in_sync for replica in pin.replicas)
    reply = nodes[1].snapshot("spread", hold_ms=60_000)
    assert nodes[2]("RenewHold", hold_id=reply.hold_id).partitions == 6
    floors = nodes[0]("CommitReader", topic="spread", channel="lake", offsets=dict.fromkeys(range(6), 0), back=True)
    assert [(floor.offset, floor.error) for floor in floors.floors] == [(0, "")] * 6
    assert nodes[1]("ReleaseHold", hold_id=reply.hold_id).partitions == 6
    for one in nodes:
        one.channel.close()
