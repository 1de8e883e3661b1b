"""A node that has lost the records and nothing else learns from other nodes where to send, and believes no more."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from nsqha.server.routing import hints
from nsqha.server.routing.hints import from_wire, hint_of
from nsqha.server.routing.leaders import LeaderAt
from tests.fakes.partitions import TOPIC_UID
from tests.unit.server.relay_rig import RelayNodes, until
from tests.unit.server.routing_rig import Nodes, answered, publish


def elect(nodes: Any, leader: int, epoch: int, *, unknown_to: int) -> Any:
    """All nodes but one hear of it."""
    for number, node in nodes.all.items():
        if number != unknown_to:
            node.leaders.appoint("t", 0, leader, epoch)
    made = nodes[leader].lead("t", 0, nodes[leader].log)
    nodes[leader].leaders.tell("t")
    return made


def count_asked(nodes: Any) -> Counter[int]:
    asked: Counter[int] = Counter()
    for number, node in nodes.all.items():

        async def counted(peer: Any, request: Any, number: int = number, node: Any = node) -> Any:
            asked[number] += 1
            return await node.leaders.hints._answer(peer, request)

        node.server.on_call("Leaders", counted)
    return asked


def test_a_publish_that_an_old_leader_refuses_goes_where_that_one_says():
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 2, 1)
        partition = nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        outcomes = [publish(nodes[1], b"%d" % n) for n in range(5)]
        await asyncio.sleep(0.1)
        assert len(partition.waiting) == 5
        elect(nodes, 3, 2, unknown_to=1)
        nodes[2].step_down("t")
        outcomes += [publish(nodes[1], b"%d" % n) for n in range(5, 9)]
        await answered(*outcomes)
        assert {tuple(outcome.answers) for outcome in outcomes} == {("OK",)}
        assert nodes[3].log == [b"%d" % n for n in range(9)], "in the order of the connection"
        assert nodes[1].leaders.leader("t", 0) == LeaderAt(3, "n3", "n3", 2, TOPIC_UID)

    Nodes(3).run(story)


def test_hints_are_followed_to_higher_epochs_only():
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 2, 5)
        nodes[2].leaders.appoint("t", 0, 3, 4)  # older than what node 1 knows
        outcome = publish(nodes[1], b"x")
        await asyncio.sleep(1)
        assert not outcome.answers and nodes[1].leaders.leader("t", 0).node == 2
        nodes[2].leaders.appoint("t", 0, 3, 6)
        nodes[3].leaders.appoint("t", 0, 4, 7)
        nodes[4].leaders.appoint("t", 0, 4, 7)
        nodes[4].lead("t", 0, nodes[4].log)
        await answered(outcome)
        assert outcome.answers == ["OK"] and nodes[4].log == [b"x"]

    Nodes(4).run(story)


def test_nodes_that_name_each_other_are_asked_at_a_walking_pace():
    """Neither leads: whoever follows hints goes on to a higher epoch, and waits when there is none."""

    async def story(nodes: Any) -> None:
        nodes[1].leaders.appoint("t", 0, 2, 1)
        nodes[2].leaders.appoint("t", 0, 3, 2)
        nodes[3].leaders.appoint("t", 0, 2, 1)
        refused: list[int] = []
        was = nodes[1].leaders.not_led
        nodes[1].leaders.not_led = lambda *a, by=0, hint=None: (refused.append(by), was(*a, by=by, hint=hint))[1]
        outcome = publish(nodes[1], b"x")
        await answered(outcome)
        assert outcome.answers[0].startswith("not stored: t/0 is not led by this node")
        assert {2, 3} == set(refused) and len(refused) < 50

    Nodes(3).run(story)


@pytest.mark.parametrize("dead", [True, False])
def test_a_node_that_lost_its_lease_asks_others_who_leads(dead: bool):
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 4 if dead else 1, 1)
        if dead:
            nodes.net.crash("n4")
        else:
            nodes[1].lead("t", 0, nodes[1].log)
        asked = count_asked(nodes)
        outcomes = [publish(nodes[1], b"0")]
        if not dead:
            nodes[1].step_down("t")  # fenced by its followers
        outcomes.append(publish(nodes[1], b"1"))
        await asyncio.sleep(1)
        assert not asked, "as long as it has its lease, it will hear of it"
        nodes[1].leaders.cut_off = True
        elect(nodes, 3, 2, unknown_to=1)
        await answered(*outcomes)
        assert {tuple(outcome.answers) for outcome in outcomes} == {("OK",)}
        assert nodes[3].log == ([b"0", b"1"] if dead else [b"1"])
        assert asked.keys() <= {2, 3, 4}

    Nodes(4).run(story)


def test_a_hint_whose_node_dies_is_given_up_for_the_next():
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 2, 1)
        elect(nodes, 3, 2, unknown_to=1)
        await answered(publish(nodes[1], b"0"))
        assert nodes[3].log == [b"0"]
        nodes[1].leaders.cut_off = True
        nodes.net.crash("n3")
        await asyncio.sleep(0.1)
        elect(nodes, 4, 3, unknown_to=1)
        nodes[2].leaders.appoint("t", 0, None, 3)  # knows of no leader that is alive
        outcome = publish(nodes[1], b"1", source=2)
        await answered(outcome)
        assert outcome.answers == ["OK"] and nodes[4].log == [b"1"]

    Nodes(4).run(story)


def test_a_hint_of_an_epoch_that_its_node_knows_nothing_of_is_dropped():
    """etcd was put back to an older state: the record counts again."""

    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 2, 5)
        elect(nodes, 3, 9, unknown_to=1)
        await answered(publish(nodes[1], b"0"))
        nodes[3].step_down("t")
        for number in (2, 3):
            nodes[number].leaders.appoint("t", 0, 2, 6)
        nodes[2].lead("t", 0, nodes[2].log)
        outcome = publish(nodes[1], b"1", source=2)
        await answered(outcome)
        assert outcome.answers == ["OK"] and nodes[2].log == [b"1"]

    Nodes(3).run(story)


def test_a_hint_whose_node_is_dead_is_dropped_for_the_record():
    """As above, and nobody is left who could say that it is wrong."""

    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 2, 5)
        elect(nodes, 3, 9, unknown_to=1)
        await answered(publish(nodes[1], b"0"))
        nodes.net.crash("n3")
        await asyncio.sleep(0.1)
        nodes[2].leaders.appoint("t", 0, 2, 6)
        nodes[2].lead("t", 0, nodes[2].log)
        outcome = publish(nodes[1], b"1", source=2)
        await answered(outcome)
        assert outcome.answers == ["OK"] and nodes[2].log == [b"1"]

    Nodes(3).run(story)


def test_a_hint_counts_until_the_record_has_caught_up():
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 2, 1)
        leaders = nodes[1].leaders
        leaders.not_led("t", 0, by=2, hint=LeaderAt(3, "n3", "n3", 2, TOPIC_UID))
        assert leaders.leader("t", 0).node == 3 and leaders.recorded("t", 0).node == 2
        assert leaders.hints.names(3)
        leaders.hints.prune()
        assert leaders.hints.names(3)
        leaders.appoint("t", 0, 4, 2, tell=False)
        assert leaders.leader("t", 0).node == 4
        leaders.hints.prune()
        assert not leaders.hints.names(3)

    Nodes(2).run(story)


@pytest.mark.parametrize(
    "hint",
    [
        LeaderAt(1, "n1", "n1", 9, TOPIC_UID),  # this node itself: it knows better
        LeaderAt(3, "n3", "n3", 9, TOPIC_UID + 1),  # another life of the topic
        LeaderAt(3, "", "", 9, TOPIC_UID),
        LeaderAt(0, "n3", "n3", 9, TOPIC_UID),
        LeaderAt(3, "n3", "n3", 1, TOPIC_UID),  # nothing new
    ],
)
def test_what_is_no_hint_for_this_node_changes_nothing(hint: LeaderAt):
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 2, 1)
        nodes[1].leaders.not_led("t", 0, by=2, hint=hint)
        assert nodes[1].leaders.leader("t", 0).node == 2
        assert not nodes[1].leaders.hints.names(hint.node)

    Nodes(2).run(story)


def test_hints_are_not_passed_on():
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 3, 1)
        nodes[2].leaders.not_led("t", 0, by=3, hint=LeaderAt(4, "n4", "n4", 2, TOPIC_UID))
        assert nodes[2].leaders.leader("t", 0).node == 4
        told = hint_of(nodes[2].leaders, "t", (TOPIC_UID, 0))
        assert from_wire(told) == LeaderAt(3, "n3", "n3", 1, TOPIC_UID)
        assert hint_of(nodes[2].leaders, "t", (TOPIC_UID + 1, 0)) is None
        assert hint_of(nodes[2].leaders, "t", (TOPIC_UID, 1)) is None

    Nodes(4).run(story)


def test_a_few_nodes_are_asked_at_a_time_and_each_ones_turn_comes(monkeypatch: Any):
    monkeypatch.setattr(hints, "ASK_NODES", 2)

    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, None, 1)
        asked = count_asked(nodes)
        nodes[1].leaders.cut_off = True
        outcome = publish(nodes[1], b"x")
        await asyncio.sleep(0.1)
        assert sum(asked.values()) == 2
        await answered(outcome)
        assert outcome.answers[0].startswith("not stored: no node leads")
        assert set(asked) == {2, 3, 4} and sum(asked.values()) < 5 / 0.2 * 3

    Nodes(4).run(story)


@pytest.mark.parametrize("case", ["refused", "itself", "dead", "later"])
def test_a_consumer_reads_where_others_say_that_the_partition_is_led(case: str):
    async def story(nodes: Any) -> None:
        if case == "itself":
            nodes.elect(1)
        elif case == "later":
            nodes.appoint("t", 0, None, 0)
        else:
            nodes.elect(2)
        client = nodes[1].subscribe(rdy=10)
        client.auto = True
        await asyncio.sleep(0.1)
        if case == "dead":
            nodes.net.crash("n2")
        if case != "refused":
            nodes[1].leaders.cut_off = True
            nodes[1].leaders.tell("t")  # as a node does that loses its lease
        nodes[1].leaders.appoint = lambda *told, **how: None
        if case == "later":
            await asyncio.sleep(3)
        nodes.elect(3)
        assert nodes[1].leaders.recorded("t", 0) != nodes[3].leaders.recorded("t", 0)
        if case == "itself":  # who was sent here by lookup looks up again; who has a fixed address comes back
            assert client.closed
            client.leave()
            client = nodes[1].subscribe(rdy=10)
        nodes[3].publish(b"a", b"b")
        await until(lambda: client.bodies == [b"a", b"b"])
        assert nodes[1].leaders.leader("t", 0).node == 3

    RelayNodes(3).run(story)
