"""Publishes at a node that does not lead: they reach the leader in order, once, or their client is told why not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nsqha import hot
from nsqha.election.model import TopicRecord, Versioned
from nsqha.pb.v1 import replication_pb2, routing_pb2
from nsqha.server.routing import forward_client as forwarding
from nsqha.server.routing import forward_server as forward_service
from nsqha.server.routing import publisher as publishers
from tests.fakes.partitions import CLUSTER
from tests.unit.server.peer_rig import Recorder
from tests.unit.server.routing_rig import ForwardNode, Nodes, answered, publish
from tests.unit.server.shell_rig import Outcome


def test_a_publish_goes_to_the_leader():
    async def story(nodes: Any) -> None:
        partition = nodes[2].lead("t", 0, nodes[2].log)
        nodes.appoint("t", 0, 2)
        outcomes = [publish(nodes[1], b"%d" % n) for n in range(5)]
        outcomes.append(publish(nodes[1], b"later", delay_ms=70))
        assert nodes[1].budget.used > 0
        await answered(*outcomes)
        assert [outcome.answers for outcome in outcomes] == [["OK"]] * 6
        assert nodes[2].log == [b"0", b"1", b"2", b"3", b"4", b"later"]
        assert partition.delays == [None] * 5 + [70]
        assert nodes[1].budget.used == nodes[2].budget.used == 0

    Nodes().run(story)


def test_partitions_led_here_come_first_and_a_publisher_keeps_to_one():
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 2)
        nodes.appoint("t", 1, 1)
        nodes[1].lead("t", 1, nodes[1].log)
        nodes[2].lead("t", 0, nodes[2].log)
        await answered(*[publish(nodes[1], b"x", publisher) for publisher in range(4)])
        assert (len(nodes[1].log), len(nodes[2].log)) == (4, 0)
        publisher = nodes[1].forwarder.publisher("t", 9)
        nodes[1].step_down("t")
        nodes[2].lead("t", 1, nodes[2].log)
        nodes.appoint("t", 1, 2, 2)
        assert nodes[1].forwarder.publisher("t", 9) is publisher
        await answered(publish(nodes[1], b"y", 9))
        assert nodes[2].log == [b"y"]

    Nodes().run(story)


def test_a_partition_that_is_named_is_the_one():
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 2)
        nodes.appoint("t", 1, 1)
        nodes[1].lead("t", 1, nodes[1].log)
        nodes[2].lead("t", 0, nodes[2].log)
        forwarder = nodes[1].forwarder
        named = forwarder.publisher("t", 9, 0)
        chosen = forwarder.publisher("t", 9)
        assert named is not chosen and (named.number, chosen.number) == (0, 1)
        assert forwarder.publisher("t", 9, 0) is named, "or its publishes could overtake each other"
        assert forwarder.publisher("t", 9, 1) is forwarder.publisher("t", 9) is chosen
        outcome = Outcome()
        named.publish(hot.frame(b"x"), outcome)
        await answered(outcome)
        assert (nodes[1].log, nodes[2].log) == ([], [b"x"])

    Nodes().run(story)


def test_an_unknown_topic_has_no_lane():
    async def story(nodes: Any) -> None:
        assert nodes[1].forwarder.publisher("t", 1) is None

    Nodes().run(story)


def test_a_forwarded_publish_is_never_passed_on():
    """Node 2 does not lead either, and knows who does."""

    async def story(nodes: Any) -> None:
        nodes[1].leaders.appoint("t", 0, 2)
        nodes[2].leaders.appoint("t", 0, 3)
        nodes[3].lead("t", 0, nodes[3].log)
        outcome = publish(nodes[1], b"x")
        await asyncio.sleep(1)
        assert outcome.answers == []
        assert nodes[3].log == []
        nodes[1].leaders.appoint("t", 0, 3, 2)
        await answered(outcome)
        assert nodes[3].log == [b"x"]

    Nodes(3).run(story)


def test_a_leader_that_steps_down_has_its_publishes_sent_to_the_next_one_in_order():
    async def story(nodes: Any) -> None:
        nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        nodes.appoint("t", 0, 2)
        outcomes = [publish(nodes[1], b"%d" % n) for n in range(5)]
        await asyncio.sleep(0.1)
        nodes[2].step_down("t")
        outcomes.append(publish(nodes[1], b"5"))
        await asyncio.sleep(0.5)
        nodes[3].lead("t", 0, nodes[3].log)
        nodes.appoint("t", 0, 3, 2)
        await answered(*outcomes)
        assert nodes[3].log == [b"%d" % n for n in range(6)]
        assert {tuple(outcome.answers) for outcome in outcomes} == {("OK",)}

    Nodes(3).run(story)


def test_what_comes_to_a_leader_before_its_epoch_has_begun_waits_there_in_order(monkeypatch: Any):
    refused: list[str] = []
    was = publishers.Publish.refused
    monkeypatch.setattr(publishers.Publish, "refused", lambda self, why: (refused.append(why), was(self, why)))

    async def story(nodes: Any) -> None:
        nodes[1].leaders.appoint("t", 0, 2)
        nodes[2].leaders.appoint("t", 0, 2)
        outcomes = [publish(nodes[1], b"0")]
        await asyncio.sleep(0.1)
        outcomes += [publish(nodes[1], b"%d" % n) for n in range(1, 4)]
        await asyncio.sleep(0.1)
        nodes[2].lead("t", 0, nodes[2].log)
        nodes[2].leaders.tell("t")
        await answered(*outcomes)
        assert nodes[2].log == [b"0", b"1", b"2", b"3"] and not refused

    Nodes().run(story)


@pytest.mark.parametrize("ends", ["leads", "never leads", "connection breaks"])
def test_what_waits_at_a_node_for_its_epoch_counts_in_its_budget(ends: str):
    """So its own clients are not read when too much waits."""

    async def story(nodes: Any) -> None:
        nodes[1].leaders.appoint("t", 0, 2)
        nodes[2].leaders.appoint("t", 0, 2)
        nodes[2].budget.bytes_max = 5000
        outcomes = [publish(nodes[1], b"x" * 2000, n) for n in range(3)]
        await asyncio.sleep(0.1)
        assert 6000 < nodes[2].budget.used < 6200 and nodes[2].budget.full
        room: list[str] = []
        nodes[2].budget.when_room(lambda: room.append("room"))
        if ends == "leads":
            partition = nodes[2].lead("t", 0, nodes[2].log, at_once=False)
            nodes[2].leaders.tell("t")
            assert 6000 < nodes[2].budget.used < 6200, "they count once"
            partition.store()
        elif ends == "never leads":
            nodes[1].leaders.appoint("t", 0, None, 2)
            nodes[2].leaders.appoint("t", 0, None, 2)
        else:
            for link in list(nodes[1].forwarder._links.values()):
                link.close("cut")
        await answered(*outcomes)
        await asyncio.sleep(0.1)  # the end of a stream takes a moment; less than what is parked may wait
        assert nodes[2].budget.used == 0 and room == ["room"]

    Nodes().run(story)


@pytest.mark.parametrize("told", [True, False])
def test_what_waits_at_a_node_that_never_leads_goes_elsewhere(told: bool):
    async def story(nodes: Any) -> None:
        nodes[1].leaders.appoint("t", 0, 2)
        nodes[2].leaders.appoint("t", 0, 2)
        outcomes = [publish(nodes[1], b"%d" % n) for n in range(3)]
        await asyncio.sleep(0.1)
        nodes[3].lead("t", 0, nodes[3].log)
        nodes[1].leaders.appoint("t", 0, 3, 2)
        if told:
            nodes[2].leaders.appoint("t", 0, 3, 2)
        began = asyncio.get_running_loop().time()
        await answered(*outcomes)
        waited = asyncio.get_running_loop().time() - began
        assert nodes[3].log == [b"0", b"1", b"2"]
        assert waited < forward_service.PARK_SECONDS / 2 if told else waited < 2 * forward_service.PARK_SECONDS

    Nodes(3).run(story)


def test_a_publisher_on_the_old_leader_notices_only_a_pause():
    async def story(nodes: Any) -> None:
        nodes[1].lead("t", 0, nodes[1].log, at_once=False)
        nodes.appoint("t", 0, 1)
        outcomes = [publish(nodes[1], b"%d" % n) for n in range(3)]
        nodes[1].step_down("t")
        nodes[2].lead("t", 0, nodes[2].log)
        nodes.appoint("t", 0, 2, 2)
        await answered(*outcomes)
        assert nodes[2].log == [b"0", b"1", b"2"]
        assert nodes[1].budget.used == 0

    Nodes().run(story)


def test_a_leader_that_is_dead_already_costs_a_wait_and_no_unknown_outcome():
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 2)
        nodes.net.crash("n2")
        outcomes = [publish(nodes[1], b"%d" % n) for n in range(3)]
        await asyncio.sleep(1)
        nodes[3].lead("t", 0, nodes[3].log)
        nodes[1].leaders.appoint("t", 0, 3, 2)
        await answered(*outcomes)
        assert nodes[3].log == [b"0", b"1", b"2"]

    Nodes(3).run(story)


def test_thousands_that_hear_of_a_lost_link_leave_turns_to_others():
    """Each may close a connection, and a controller waits for this node's answers meanwhile."""

    async def story(nodes: Any) -> None:
        nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        nodes.appoint("t", 0, 2)
        outcomes = [publish(nodes[1], b"%d" % n, n) for n in range(3 * forwarding.TOLD_A_TURN)]
        await asyncio.sleep(0.1)
        (link,) = nodes[1].forwarder._links.values()
        told = []
        link.close("cut")
        while not told or told[-1] < len(outcomes):
            told.append(sum(bool(outcome.answers) for outcome in outcomes))
            await asyncio.sleep(0)
        assert told[0] == forwarding.TOLD_A_TURN and len(set(told)) == 3, told

    Nodes().run(story)


def test_clients_of_hundreds_of_partitions_hear_of_a_lost_link_one_after_another():
    """All come again at once, and would take the processor from the elections that they wait for."""

    async def story(nodes: Any) -> None:
        outcomes = []
        for n in range(partitions := 4 * forwarding.PACED_PARTITIONS):
            nodes[2].lead(f"t{n}", 0, nodes[2].log, at_once=False)
            nodes.appoint(f"t{n}", 0, 2)
            outcomes.append(publish(nodes[1], b"x", topic=f"t{n}"))
        await asyncio.sleep(0.1)
        (link,) = nodes[1].forwarder._links.values()
        seconds, told = partitions * forwarding.PARTITION_SECONDS, []
        link.close("cut")
        for _ in range(4):
            await asyncio.sleep(seconds / 4)
            told.append(sum(bool(outcome.answers) for outcome in outcomes))
        assert told == sorted(told) and 0 < told[0] < told[1] < told[2] and told[3] == partitions, told

    Nodes().run(story)


def test_links_are_looked_at_once_for_all_topics_that_change_together(monkeypatch: Any):
    async def story(nodes: Any) -> None:
        nodes[2].lead("t", 0, nodes[2].log)
        nodes.appoint("t", 0, 2)
        await answered(publish(nodes[1], b"x"))
        leaders, asked = nodes[1].leaders, []
        registration = leaders.registration
        monkeypatch.setattr(leaders, "registration", lambda node: asked.append(node) or registration(node))
        for number in range(100):
            leaders.tell(f"other{number}")
        await asyncio.sleep(0)
        assert asked == [2]

    Nodes().run(story)


def test_a_thousand_publishers_of_a_node_that_died_dial_it_no_more_often_than_one(monkeypatch: Any):
    async def story(nodes: Any) -> None:
        topics = [f"t{n}" for n in range(1000)]
        dials, stream = [], nodes[1].peers.stream
        monkeypatch.setattr(nodes[1].peers, "stream", lambda *how: dials.append(how) or stream(*how))
        for topic in topics:
            nodes.appoint(topic, 0, 2)
        nodes.net.crash("n2")
        lanes = [nodes[1].forwarder.publisher(topic, 1) for topic in topics]
        outcomes = [Outcome() for _ in topics]
        for lane, outcome in zip(lanes, outcomes, strict=True):
            lane.publish(hot.frame(b"x"), outcome)
            await asyncio.sleep(0.0003)  # as clients do: not all in one turn
        await asyncio.sleep(0.7)
        assert len(dials) <= 1.0 / forwarding.DIAL_AGAIN_SECONDS + 1
        for topic in topics:
            nodes[3].lead(topic, 0, nodes[3].log)
            nodes[1].leaders.appoint(topic, 0, 3, 2)
        await answered(*outcomes)
        assert len(nodes[3].log) == 1000

    Nodes(3).run(story)


def test_a_machine_that_went_silent_holds_nobody_up_longer_than_its_lease():
    async def story(nodes: Any) -> None:
        nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        nodes.appoint("t", 0, 2)
        sent = publish(nodes[1], b"sent")
        await asyncio.sleep(0.1)
        later = publish(nodes[1], b"later", source=2)
        await asyncio.sleep(0.1)
        assert not sent.answers and not later.answers
        nodes[1].leaders.dead.add(2)
        nodes[3].lead("t", 0, nodes[3].log)
        nodes[1].leaders.appoint("t", 0, 3, 2)
        await asyncio.sleep(0)
        assert ["unknown" in answer for answer in sent.answers + later.answers] == [True, True]
        await answered(new := publish(nodes[1], b"new", source=3))
        assert new.answers == ["OK"] and nodes[3].log == [b"new"]

    Nodes(3).run(story)


def test_publishes_leave_a_silent_machine_once_another_node_leads():
    """It has its lease; what it was sent may be stored there."""

    async def story(nodes: Any) -> None:
        nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        nodes.appoint("t", 0, 2)
        sent = publish(nodes[1], b"sent")
        await asyncio.sleep(0.1)
        nodes.net.partition("n1", "n2")
        await asyncio.sleep(1.5)
        assert not sent.answers, "nobody else leads"
        nodes[3].lead("t", 0, nodes[3].log)
        nodes[1].leaders.appoint("t", 0, 3, 2)
        await asyncio.sleep(0)
        assert ["unknown" in answer for answer in sent.answers] == [True]
        await answered(new := publish(nodes[1], b"new", source=3))
        assert new.answers == ["OK"] and nodes[3].log == [b"new"]

    Nodes(3).run(story)


def test_publishes_leave_a_silent_machine_once_it_has_registered_anew():
    """It lost its power and was back soon: the end of its lease may have been missed here."""

    async def story(nodes: Any) -> None:
        nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        nodes.appoint("t", 0, 2)
        sent = publish(nodes[1], b"sent")
        await asyncio.sleep(0.1)
        nodes.net.crash("n2", silent=True)
        await nodes[2].stop()
        back = nodes.all[2] = ForwardNode(nodes.net, 2)
        back.lead("t", 0, back.log)
        nodes[1].leaders.registrations[2] = 2
        nodes.appoint("t", 0, 2, 2)
        await asyncio.sleep(0)
        assert ["unknown" in answer for answer in sent.answers] == [True]
        async with asyncio.timeout(0.5):
            await answered(new := publish(nodes[1], b"new", source=3))
        assert new.answers == ["OK"] and back.log == [b"new"]

    Nodes(2).run(story)


def test_publishes_stay_with_a_leader_that_answers_though_another_one_leads():
    """It knows best which are stored."""

    async def story(nodes: Any) -> None:
        nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        nodes.appoint("t", 0, 2)
        sent = publish(nodes[1], b"sent")
        await asyncio.sleep(2.0)
        nodes[3].lead("t", 0, nodes[3].log)
        nodes[1].leaders.appoint("t", 0, 3, 2)
        await asyncio.sleep(2.0)
        assert not sent.answers
        nodes[2].step_down("t")
        await answered(sent)

    Nodes(3).run(story)


def test_publishes_that_wait_for_room_at_a_silent_machine_go_to_the_next_leader(monkeypatch: Any):
    monkeypatch.setattr(forwarding, "WINDOW_BYTES", 1)

    async def story(nodes: Any) -> None:
        nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        nodes.appoint("t", 0, 2)
        sent, waits = publish(nodes[1], b"sent", source=1), publish(nodes[1], b"waits", source=2)
        await asyncio.sleep(0.1)
        nodes.net.partition("n1", "n2")
        await asyncio.sleep(1.5)
        nodes[3].lead("t", 0, nodes[3].log)
        nodes[1].leaders.appoint("t", 0, 3, 2)
        await answered(sent, waits)
        assert "unknown" in sent.answers[0] and waits.answers == ["OK"] and nodes[3].log == [b"waits"]

    Nodes(3).run(story)


def test_a_silent_machine_is_given_up_when_it_does_not_greet():
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 2)
        nodes.net.partition("n2", "n1", both=False)
        outcome = publish(nodes[1], b"x")
        await asyncio.sleep(2.5)
        nodes[3].lead("t", 0, nodes[3].log)
        nodes[1].leaders.appoint("t", 0, 3, 2)
        await answered(outcome)
        assert nodes[3].log == [b"x"]

    Nodes(3).run(story)


def test_what_was_sent_when_the_connection_broke_is_of_unknown_outcome():
    async def story(nodes: Any) -> None:
        nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        nodes.appoint("t", 0, 2)
        first = publish(nodes[1], b"1")
        await asyncio.sleep(0.1)
        nodes.net.cut("n1", "n2")
        await answered(first)
        assert first.answers[0].startswith("outcome unknown: the connection to n2 was lost")
        other = publish(nodes[1], b"2", source=2)
        await asyncio.sleep(0.1)
        nodes[2].topics["t"].led[0].store()
        await answered(other)
        assert nodes[2].log == [b"1", b"2"]

    Nodes().run(story)


@pytest.mark.parametrize(
    ("why", "answer"),
    [("not stored: disk full", "not stored: disk full"), ("outcome unknown: too late", "outcome unknown: too late")],
)
def test_what_the_leader_says_is_what_the_client_hears(why: str, answer: str):
    async def story(nodes: Any) -> None:
        partition = nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        nodes.appoint("t", 0, 2)
        outcome = publish(nodes[1], b"1")
        await asyncio.sleep(0.1)
        partition.refuse(why)
        await answered(outcome)
        assert outcome.answers == [answer]

    Nodes().run(story)


def test_a_low_disk_refuses_at_the_leader_and_not_at_who_forwards():
    async def story(nodes: Any) -> None:
        nodes[2].lead("t", 0, nodes[2].log)
        nodes.appoint("t", 0, 2)
        nodes[1].low = "disk low"
        good = publish(nodes[1], b"1", 1)
        await answered(good)
        assert good.answers == ["OK"]
        nodes[2].low = "disk low"
        bad, mine = publish(nodes[1], b"2", 2), publish(nodes[2], b"3", 3)
        await answered(bad, mine)
        assert bad.answers == mine.answers == ["not stored: disk low"]

    Nodes().run(story)


def test_the_time_a_publish_has_waited_goes_with_it():
    async def story(nodes: Any) -> None:
        partition = nodes[2].lead("t", 0, nodes[2].log)
        nodes.appoint("t", 0, None)
        outcome = publish(nodes[1], b"1")
        await asyncio.sleep(2)
        nodes.appoint("t", 0, 2)
        await answered(outcome)
        assert partition.waited[0] == pytest.approx(2, abs=0.05)

    Nodes().run(story)


def test_only_so_much_is_under_way_at_one_node(monkeypatch: Any):
    monkeypatch.setattr(forwarding, "WINDOW_BYTES", 10_000)

    async def story(nodes: Any) -> None:
        partition = nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        nodes.appoint("t", 0, 2)
        outcomes = [publish(nodes[1], b"x" * 3000, n) for n in range(10)]
        big = publish(nodes[1], b"y" * 30_000, 99)
        most = 0
        while not all(outcome.answers for outcome in [*outcomes, big]):
            await asyncio.sleep(0.1)
            most = max(most, nodes[2].budget.used)
            partition.store()
        assert 30_000 < most < 31_000, "the big one goes alone"
        assert len(nodes[2].log) == 11

    Nodes().run(story)


def test_a_node_that_sends_more_than_the_window_loses_its_stream(monkeypatch: Any):
    async def story(nodes: Any) -> None:
        partition = nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        nodes.appoint("t", 0, 2)
        first = [publish(nodes[1], b"x" * 3000, n) for n in range(3)]
        await asyncio.sleep(0.1)
        monkeypatch.setattr(forwarding, "WINDOW_BYTES", 10_000)
        monkeypatch.setattr(forwarding.ForwardLink, "_send", unbounded(forwarding.ForwardLink._send))
        late = publish(nodes[1], b"y" * 3000, 9)
        await answered(*first, late)
        assert all("outcome unknown" in outcome.answers[0] for outcome in [*first, late])
        assert "bytes are under way already" in late.answers[0]
        assert nodes[2].budget.used == 3 * 3034, "it was checked before it was kept"
        partition.store()

    def unbounded(send: Any) -> Any:
        def sent(link: Any) -> None:
            link._window.bytes = 0
            send(link)

        return sent

    Nodes().run(story)


def test_a_publish_that_is_never_confirmed_is_answered():
    async def story(nodes: Any) -> None:
        nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        nodes.appoint("t", 0, 2)
        outcome = publish(nodes[1], b"1")
        await answered(outcome)
        assert outcome.answers == ["outcome unknown: not confirmed in time"]

    Nodes().run(story)


def test_a_window_of_what_was_given_up_is_free_again_when_it_is_answered_at_last(monkeypatch: Any):
    monkeypatch.setattr(forwarding, "WINDOW_BYTES", 10_000)

    async def story(nodes: Any) -> None:
        partition = nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        nodes.appoint("t", 0, 2)
        given_up = [publish(nodes[1], b"x" * 3000, n) for n in range(3)]
        await answered(*given_up)
        assert {outcome.answers[0] for outcome in given_up} == {"outcome unknown: not confirmed in time"}
        waits = publish(nodes[1], b"z" * 3000, 20)
        await asyncio.sleep(2)
        assert nodes[2].budget.used < 10_000, "the other node may still have what was given up"
        partition.store()
        await asyncio.sleep(1)
        partition.store()
        await answered(waits)
        assert waits.answers == ["OK"]
        outcomes = [publish(nodes[1], b"y" * 3000, n) for n in range(10, 13)]
        await asyncio.sleep(1)
        assert nodes[2].budget.used > 9000, "all three at once"
        partition.store()
        await answered(*outcomes)

    Nodes().run(story)


def test_another_life_of_the_topic_gets_nothing():
    async def story(nodes: Any) -> None:
        nodes[2].lead("t", 0, nodes[2].log)
        nodes[2].topics["t"].versioned = Versioned(TopicRecord("t", 6, 3), 1)
        nodes.appoint("t", 0, 2)
        outcome = publish(nodes[1], b"1")
        await answered(outcome)
        assert outcome.answers[0].startswith("not stored: t/0 is not led by this node")
        assert nodes[2].log == []

    Nodes().run(story)


@pytest.mark.parametrize("wrong", ["cluster_id", "target_uid", "nothing"])
def test_a_stream_without_the_right_greeting_is_refused(wrong: str):
    async def story(nodes: Any) -> None:
        nodes[2].lead("t", 0, nodes[2].log)
        heard = Recorder()
        stream = nodes[1].peers.stream("n2", "Forward", heard)
        fields = {"cluster_id": CLUSTER, "node_uid": 1, "target_uid": 2}
        if wrong == "nothing":
            key = replication_pb2.PartitionKey(topic_uid=5, partition=0)
            one = routing_pb2.ForwardedPublish(sequence=1, key=key, topic="t", frames=hot.frame(b"x"))
            stream.send(routing_pb2.ForwardRequest(publishes=[one]))
        else:
            stream.send(routing_pb2.ForwardRequest(greeting=routing_pb2.Greeting(**{**fields, wrong: 99})))
        await heard.end()
        assert heard.messages == []
        assert nodes[2].log == []

    Nodes().run(story)


def test_bytes_that_are_no_frames_are_not_stored():
    async def story(nodes: Any) -> None:
        nodes[2].lead("t", 0, nodes[2].log)
        nodes.appoint("t", 0, 2)
        outcome = Outcome()
        publisher = nodes[1].forwarder.publisher("t", 1)
        publisher.publish(hot.frame(b"x") + b"junk", outcome)
        await answered(outcome)
        assert outcome.answers[0].startswith("outcome unknown")
        assert nodes[2].log == []

    Nodes().run(story)


def test_answers_leave_before_a_stopping_leader_ends_its_streams():
    async def story(nodes: Any) -> None:
        partition = nodes[2].lead("t", 0, nodes[2].log, at_once=False)
        nodes.appoint("t", 0, 2)
        outcome = publish(nodes[1], b"1")
        await asyncio.sleep(0.1)
        draining = asyncio.ensure_future(nodes[2].service.drain(1.0))
        await asyncio.sleep(0.05)
        assert not draining.done()
        partition.store()
        await draining
        await answered(outcome)
        assert outcome.answers == ["OK"]

    Nodes().run(story)
