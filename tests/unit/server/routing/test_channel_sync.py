"""A change of a topic is answered when every leader follows, whoever leads by then."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.errors import NotFound, Unavailable
from nsqha.pb.v1 import routing_pb2
from nsqha.server.routing.channel_sync import Reconciler
from nsqha.server.routing.leaders import Administration
from tests.fakes.partitions import CLUSTER, TOPIC_UID, FakeLeaders
from tests.sim.net import Network
from tests.unit.server.routing_rig import Nodes

SECONDS = 2.0


class FollowNode:
    """A node that follows when asked, for what it leads."""

    def __init__(self, net: Network, number: int) -> None:
        self.leaders = FakeLeaders(number)
        self.peers = net.peers(f"n{number}")
        self.server = net.server(f"n{number}")
        self.leads: list[int] = []
        self.asked: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.away = False
        self.reads = 0
        loop = asyncio.get_running_loop()
        self.reconciler = Reconciler(
            self.leaders,
            self.peers,
            loop=loop,
            seconds=SECONDS,
            follow=self.follow,
            carry_out=self.carry_out,
            led_elsewhere=self.led_elsewhere,
            known_channels=self.known_channels,
        )
        self.reconciler.register(self.server)
        channels = SimpleNamespace(version=9)
        record = SimpleNamespace(uid=TOPIC_UID, channels=channels)
        self.topic: Any = SimpleNamespace(name="t", record=record, leads=lambda n: n if n in self.leads else None)

    async def led_elsewhere(self, topic: str, uid: int) -> dict[int, str]:
        """As the metadata has it: what a test appoints."""
        self.reads += 1
        await asyncio.sleep(0.001)
        if self.away:
            raise Unavailable("etcd is away")
        leaders = self.leaders.topics[topic]
        return {n: at.address for n, at in leaders.items() if at is not None and at.node != self.leaders.node}

    async def known_channels(self, topic: str) -> list[str]:
        return [f"{topic}-archive"]

    async def follow(self, topic: str, uid: int, *what: Any) -> list[int]:
        self.asked.append((topic, uid, *what))
        if self.error is not None:
            raise self.error
        return list(self.leads)

    async def carry_out(self, topic: str, uid: int, *what: Any) -> list[int]:
        numbers = what[-1]
        led = await self.follow(topic, uid, *what[:-1], sorted(numbers))
        return [number for number in led if number in numbers]

    async def stop(self) -> None:
        await self.peers.close()
        self.server.close()


def nodes_of(count: int) -> Nodes:
    return Nodes(count, make=FollowNode)


def test_every_other_leader_is_asked_once():
    async def story(nodes: Any) -> None:
        for number, node in enumerate((1, 2, 3, 2)):
            nodes.appoint("t", number, node)
            nodes[node].leads.append(number)
        nodes.appoint("t", 4, None)
        await nodes[1].reconciler.others_follow(nodes[1].topic)
        assert [nodes[n].asked for n in (1, 2, 3)] == [[], [("t", TOPIC_UID, 9)], [("t", TOPIC_UID, 9)]]
        nodes.appoint("t", 4, 3)
        nodes[3].leads.append(4)
        await nodes[1].reconciler.do_everywhere(nodes[1].topic, Administration.EMPTY_CHANNEL, "c")
        deed, follow = ("t", TOPIC_UID, Administration.EMPTY_CHANNEL, "c"), ("t", TOPIC_UID, 9)
        assert nodes[1].asked == [(*deed, [0, 1, 2, 3, 4])]
        assert nodes[2].asked == [follow, (*deed, [1, 3])]
        assert nodes[3].asked == [follow, (*deed, [2, 4])]

    nodes_of(3).run(story)


def test_the_leader_of_one_partition_is_asked_for_that_alone():
    async def story(nodes: Any) -> None:
        for number, node in enumerate((1, 2, 3, 2)):
            nodes.appoint("t", number, node)
            nodes[node].leads.append(number)
        deed = ("t", TOPIC_UID, Administration.EMPTY_CHANNEL, "c")
        for number, node in ((3, 2), (0, 1), (1, 2)):
            await nodes[1].reconciler.do_everywhere(nodes[1].topic, deed[2], "c", partition=number)
            assert nodes[node].asked[-1] == (*deed, [number])
        assert [len(nodes[n].asked) for n in (1, 2, 3)] == [1, 2, 0]

    nodes_of(3).run(story)


def test_the_successor_of_a_leader_that_was_replaced_is_asked():
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 2)
        nodes[3].leads.append(0)
        waiting = asyncio.ensure_future(nodes[1].reconciler.others_follow(nodes[1].topic))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        nodes[1].leaders.appoint("t", 0, 3, 2)
        await waiting
        assert len(nodes[3].asked) == 1

    nodes_of(3).run(story)


def test_a_leader_elected_during_the_request_does_what_is_in_no_record():
    """Nobody else would: the leader that was asked did not do it, and its successor has read nothing of it."""

    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 2)  # and does not lead it
        waiting = asyncio.ensure_future(nodes[1].reconciler.do_everywhere(nodes[1].topic, Administration.EMPTY_TOPIC))
        await asyncio.sleep(0.3)
        nodes[1].leaders.appoint("t", 0, None, 2)
        await asyncio.sleep(0.3)
        assert not waiting.done(), "nobody leads it"
        nodes[1].leaders.appoint("t", 0, 1, 3)
        nodes[1].error = Unavailable("its epoch has only begun")
        nodes[1].leads.append(0)
        await asyncio.sleep(0.3)
        assert not waiting.done()
        nodes[1].error = None
        before = len(nodes[1].asked)
        await waiting
        assert len(nodes[1].asked) == before + 1

    nodes_of(2).run(story)


def test_what_is_done_is_not_done_again_while_others_are_waited_for():
    """An empty takes the messages that were acknowledged meanwhile."""

    async def story(nodes: Any) -> None:
        for number, node in enumerate((1, 2, None, None)):
            nodes.appoint("t", number, node)
        nodes[1].leads, nodes[2].leads = [0], [1]
        emptied = asyncio.ensure_future(nodes[1].reconciler.do_everywhere(nodes[1].topic, Administration.EMPTY_TOPIC))
        await asyncio.sleep(0.3)
        for number, node in ((2, 1), (3, 2)):  # elected only now
            nodes[node].leads.append(number)
            nodes[node].leaders.appoint("t", number, node)
            nodes[1].leaders.appoint("t", number, node)
        await emptied
        assert [asked[-1] for asked in nodes[1].asked] == [[0, 1, 2, 3], [2]]
        assert [asked[-1] for asked in nodes[2].asked] == [[1], [3]]

    nodes_of(2).run(story)


def test_an_own_epoch_that_has_only_begun_is_waited_for_as_another_leaders_is():
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 1)
        nodes.appoint("t", 1, 2)
        nodes[1].leads, nodes[2].leads = [0], [1]
        nodes[1].error = Unavailable("its epoch has only begun")
        emptied = asyncio.ensure_future(nodes[1].reconciler.do_everywhere(nodes[1].topic, Administration.EMPTY_TOPIC))
        await asyncio.sleep(0.3)
        assert not emptied.done() and len(nodes[2].asked) == 1
        nodes[1].error = None
        await emptied

    nodes_of(2).run(story)


def test_what_is_led_here_is_done_although_another_leader_is_not_reached():
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 1)
        nodes.appoint("t", 1, 2)
        nodes.appoint("t", 2, None)
        nodes[1].leads = [0]
        nodes.net.crash("n2")
        with pytest.raises(Unavailable, match=r"leaders of partitions \[1\] of t did not follow in time"):
            await nodes[1].reconciler.do_everywhere(nodes[1].topic, Administration.EMPTY_TOPIC)
        assert len(nodes[1].asked) == 1
        nodes.appoint("t", 1, None)
        with pytest.raises(Unavailable, match=r"partitions \[1, 2\] have no leader that could be asked"):
            await nodes[1].reconciler.do_everywhere(nodes[1].topic, Administration.EMPTY_TOPIC)

    nodes_of(2).run(story)


@pytest.mark.parametrize("trouble", ["dead", "refuses", "leads nothing"])
def test_a_leader_that_does_not_follow_in_time_fails_the_change(trouble: str):
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, 2)
        if trouble == "dead":
            nodes.net.crash("n2")
        elif trouble == "refuses":
            nodes[2].error = Unavailable("its epoch has only begun")
        begun = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable, match=r"leaders of partitions \[0\] of t did not follow in time"):
            await nodes[1].reconciler.others_follow(nodes[1].topic)
        assert asyncio.get_running_loop().time() - begun == pytest.approx(SECONDS, abs=0.2)

    nodes_of(2).run(story)


def test_who_leads_is_read_for_each_change_and_no_success_is_reported_without():
    async def story(nodes: Any) -> None:
        nodes.appoint("t", 0, None)
        await nodes[1].reconciler.others_follow(nodes[1].topic)
        assert nodes[1].reads == 1
        nodes.appoint("t", 0, 2)
        nodes[2].leads.append(0)
        nodes[1].away = True
        waiting = asyncio.ensure_future(nodes[1].reconciler.others_follow(nodes[1].topic))
        await asyncio.sleep(0.3)
        assert not waiting.done() and not nodes[2].asked
        nodes[1].away = False
        await waiting
        assert len(nodes[2].asked) == 1
        nodes[1].away = True
        with pytest.raises(Unavailable, match=r"the leaders of t did not follow in time: .*etcd is away"):
            await nodes[1].reconciler.others_follow(nodes[1].topic)

    nodes_of(2).run(story)


def test_another_cluster_is_refused():
    async def story(nodes: Any) -> None:
        request = routing_pb2.ReconcileRequest(cluster_id=CLUSTER + 1, topic="t")
        with pytest.raises(NotFound, match=r"^Reconcile to n2: this node does not belong to cluster 0+4e$"):
            await nodes[1].peers.call("n2", "Reconcile", request, timeout=1)
        assert nodes[2].asked == []

    nodes_of(2).run(story)


def test_the_deeds_have_the_numbers_of_the_protocol():
    known = routing_pb2.Administration.items()
    names = {name.removeprefix("ADMINISTRATION_"): number for name, number in known if number}
    assert names == {deed.name: deed.value for deed in Administration}


def test_a_node_says_what_its_lookup_daemons_know_of_a_topic() -> None:
    async def story(nodes: Any) -> None:
        ask = nodes[1].peers.call
        request = routing_pb2.KnownChannelsRequest(cluster_id=CLUSTER, topic="t")
        assert (await ask("n2", "KnownChannels", request, timeout=1.0)).channels == ["t-archive"]
        with pytest.raises(NotFound):
            await ask("n2", "KnownChannels", routing_pb2.KnownChannelsRequest(cluster_id=9, topic="t"), timeout=1.0)

    nodes_of(2).run(story)
