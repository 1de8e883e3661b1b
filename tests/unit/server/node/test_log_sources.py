"""The logs of this node for the segment service: which it has, and who else serves a partition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord
from nsqha.server.node.cluster.logs import ClusterLogs
from nsqha.server.node.log_sources import SingleNodeLogs
from nsqha.server.partition.topic import Topic
from nsqha.server.segments.log_source import ServingReplica
from nsqha.server.segments.ranges import Refusal
from tests.fakes import partitions

ME, OTHER, BEHIND, SILENT, GONE = 1, 2, 3, 4, 5
UID = 7


def led_topic(*isr: int, name: str = "t") -> Topic:
    """A topic of which partition 0 is led here."""
    meta = PartitionMeta(leader=ME, isr=dict.fromkeys(isr, 9), replicas=(BEHIND, SILENT, GONE, ME, OTHER))
    record = TopicRecord(name, UID, 3, partitions={0: meta})
    return partitions.topic(record, SimpleNamespace(log="the led log", number=0))


def alone(topic: Any, address: str = "me:4154") -> SingleNodeLogs:
    nothing: Any = None
    topics: Any = {topic.name: topic}
    return SingleNodeLogs(topics, node=ME, loop=nothing, spawn=nothing, address=lambda: address)


def member(topic: Any, *, followed: str | None = None, name: str = "t", leading: Any = None) -> ClusterLogs:
    """A member that has the log of `followed` as a replica of partition 0 of topic `name`."""
    nodes = {n: NodeInfo(n, name=f"n{n}", segments_address=f"n{n}:4154") for n in (ME, OTHER, BEHIND)}
    nodes[SILENT] = NodeInfo(SILENT, name="n4")
    record = SimpleNamespace(record=SimpleNamespace(name=name))
    table = SimpleNamespace(log_of=lambda key: followed, record_of=lambda key: record)
    follower = SimpleNamespace(applier=SimpleNamespace(state=None))
    replicas = SimpleNamespace(table=table, leading=leading or {}, followers={(8, 0): follower})
    cluster: Any = SimpleNamespace(node=ME, nodes=lambda: nodes, replicas=replicas)
    return ClusterLogs(alone(topic), cluster)


def why_not(source: Any, uid: int, number: int) -> str:
    with pytest.raises(Refusal) as caught:
        source.log_of(uid, number)
    assert caught.value.status == 404
    return caught.value.why


def test_what_is_led_here_is_found_by_uid_and_number() -> None:
    source: Any = alone(led_topic())
    assert source.log_of(UID, 0) == "the led log"
    assert why_not(source, UID, 1) == "this node has no replica of partition 1 of topic 0000000000000007"
    assert why_not(source, 8, 0) == "this node has no replica of partition 0 of topic 0000000000000008"
    assert [partition.number for partition in source.led()] == [0] and not [*source.followed()]


def test_an_ephemeral_topic_has_no_files() -> None:
    topic = led_topic(name="t#ephemeral")
    assert why_not(alone(topic), UID, 0) == "t#ephemeral is #ephemeral: it has no files"
    assert why_not(member(topic, followed="in memory", name="t#ephemeral"), UID, 0).endswith("it has no files")


def test_a_member_has_the_logs_that_it_follows_as_well() -> None:
    source: Any = member(led_topic(), followed="the followed log")
    assert source.log_of(8, 0) == "the followed log"
    assert [*source.followed()] == [None], "its state has not come yet"
    source = member(led_topic())
    assert source.log_of(UID, 0) == "the led log"


def test_a_node_that_is_alone_names_itself_if_it_serves() -> None:
    topic: Any = led_topic()
    assert alone(topic).replicas_of(topic, 0) == [ServingReplica(ME, "me:4154", leader=True, in_sync=True)]
    assert alone(topic, address="").replicas_of(topic, 0) == []


def test_a_member_names_the_replicas_that_serve_and_those_in_sync_first() -> None:
    topic: Any = led_topic(ME, OTHER)
    found = member(topic).replicas_of(topic, 0)
    assert [(replica.node, replica.leader, replica.in_sync) for replica in found] == [
        (ME, True, True),
        (OTHER, False, True),
        (BEHIND, False, False),
    ]
    assert (found[1].name, found[1].address) == ("n2", "n2:4154")
    newer = SimpleNamespace(meta=PartitionMeta(leader=ME, isr={ME: 9, BEHIND: 9}, replicas=(ME, BEHIND)))
    found = member(topic, leading={(UID, 0): newer}).replicas_of(topic, 0)
    assert [(replica.node, replica.in_sync) for replica in found] == [(ME, True), (BEHIND, True)]
