"""What nodes tell of their parts becomes one description: nothing twice, nothing left out without a word."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from nsqha.admin.describe import Describer, membership, merged_channel, merged_topic
from nsqha.election.model import PartitionMeta
from nsqha.pb.v1 import admin_pb2 as pb
from tests.unit.admin.leaders_rig import FakeOthers, info


def part(number: int, epoch: int = 1, **figures: Any) -> Any:
    return pb.PartitionState(partition=number, leader_epoch=epoch, **figures)


def missing(number: int) -> Any:
    return pb.PartitionState(partition=number, error="nobody told")


def test_partitions_of_all_nodes_in_order() -> None:
    own = pb.Topic(name="t", uid=7, channels=["a"], partitions=[part(2, message_count=3)])
    theirs = pb.Topic(name="t", uid=7, channels=["b#ephemeral"], partitions=[part(0, message_count=4)])
    topic = merged_topic(own, [theirs], [0, 1, 2], missing)
    assert [(p.partition, p.error) for p in topic.partitions] == [(0, ""), (1, "nobody told"), (2, "")]
    assert list(topic.channels) == ["a", "b#ephemeral"]
    assert topic.message_count == 7


def test_of_two_leaders_the_later_one_counts() -> None:
    own = pb.Topic(name="t", partitions=[part(0, 4, message_count=100)])
    theirs = pb.Topic(name="t", partitions=[part(0, 5, message_count=1)])
    for first, second in ((own, theirs), (theirs, own)):
        topic = merged_topic(first, [second], [0], missing)
        assert [(p.leader_epoch, p.message_count) for p in topic.partitions] == [(5, 1)]
        assert topic.message_count == 1


def place(number: int, epoch: int = 1, **figures: Any) -> Any:
    return pb.ChannelPartition(partition=number, leader_epoch=epoch, **figures)


def test_a_channel_is_the_sum_of_its_partitions_and_of_all_consumers() -> None:
    parts = [
        pb.Channel(topic="t", name="c", consumers=2, partitions=[place(0, depth=5, oldest_unfinished_seconds=1.5)]),
        pb.Channel(topic="t", name="c", consumers=1, partitions=[place(1, depth=7, deferred=2, in_flight=1)]),
        pb.Channel(topic="t", name="c", consumers=4, partitions=[place(0, epoch=0, depth=1000)]),
    ]
    channel = merged_channel(parts, [0, 1, 2], lambda n: place(n, error="nobody told"))
    assert (channel.depth, channel.deferred, channel.in_flight, channel.consumers) == (12, 2, 1, 7)
    assert channel.oldest_unfinished_seconds == 1.5
    assert [p.error for p in channel.partitions] == ["", "", "nobody told"]


def test_membership_says_who_is_missing() -> None:
    nodes = {1: info(1), 2: info(2)}
    meta = PartitionMeta(leader=1, epoch=4, isr={1: 10, 2: 20}, replicas=(2, 1, 3), min_isr=2)
    state = membership(0, meta, nodes, {}, wanted=None)
    assert [(r.name, r.alive, r.in_sync) for r in state.replicas] == [
        ("n2", True, True),
        ("n1", True, True),
        ("", False, False),
    ]
    assert (state.leader, state.leader_name, state.leader_epoch, state.under_replicated) == (1, "n1", 4, True)
    away = [membership(0, meta, nodes, {3: name}, wanted=None).replicas[2].name for name in ("n3", "n2")]
    assert away == ["n3", ""], "its last name, unless another node has it now"
    full = PartitionMeta(leader=3, isr={1: 10, 2: 20}, replicas=(1, 2))
    state = membership(0, full, nodes, {}, wanted=None)
    assert (state.leader, state.under_replicated) == (0, False), "its leader is away"
    assert membership(0, full, nodes, {}, wanted=3).under_replicated
    floor = PartitionMeta(leader=1, isr={1: 10, 3: 30}, replicas=(1, 3), min_isr=2)
    assert membership(0, floor, nodes, {}, wanted=None).under_replicated, "the member at the floor is away"


def test_nodes_that_do_not_answer_are_named() -> None:
    nodes = {n: info(n) for n in (1, 2, 3)}
    cluster = SimpleNamespace(node=1, nodes=lambda: nodes)
    others = FakeOthers(n2=lambda rpc, request: pb.ListTopicsResponse(topics=[pb.Topic(name="t")]))
    describer = Describer(SimpleNamespace(cluster=cluster), others)  # type: ignore[arg-type]
    told = asyncio.run(describer._ask("ListTopics", pb.ListTopicsRequest(here=pb.Here())))
    assert [reply.topics[0].name for reply in told.replies] == ["t"]
    assert [(lost.node, lost.name, lost.why) for lost in told.lost] == [(3, "n3", "n3 is not there")]
    assert told.why(3) == "its leader n3 does not answer: n3 is not there"
    assert told.why(0) == "no node leads it at the moment"
    assert "just begun" in told.why(2)


def test_figures_of_channels_are_taken_in_turns() -> None:
    """What a channel counts for them may take seconds."""
    asked = []

    async def in_turns(topic: str) -> Any:
        await asyncio.sleep(0)
        asked.append(topic)
        return SimpleNamespace(topics=())

    describer = Describer(SimpleNamespace(snapshot_in_turns=in_turns), None)  # type: ignore[arg-type]
    request = pb.ListChannelsRequest(topic="t", here=pb.Here())
    assert not asyncio.run(describer.channels(request)).channels
    assert asked == ["t"]
