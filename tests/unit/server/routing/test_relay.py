"""Consumers on a node that does not lead: messages, answers, one RDY window, and changes of leader."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.server.http.stats import Selection, select
from nsqha.server.node.snapshot import topic_stats
from nsqha.server.partition.publishes import BATCH_BYTES
from nsqha.server.routing.relay_server import UNTAKEN_BYTES, joined
from tests.unit.server.relay_rig import RelayNodes, until


def bodies(first: int, end: int) -> list[bytes]:
    return [b"%d" % n for n in range(first, end)]


def test_messages_of_a_leader_elsewhere_reach_the_client_and_fins_come_back():
    async def story(nodes: Any) -> None:
        nodes.elect(2)
        client = nodes[1].subscribe(rdy=100)
        await until(lambda: nodes[2].topic.consumers.relayed)
        nodes[2].publish(*bodies(0, 50))
        await until(lambda: len(client.bodies) == 50)
        assert client.bodies == bodies(0, 50)
        client.fin_all()
        channel = nodes[2].topic.led[0].cursors.channels["c"]
        await until(lambda: channel.in_flight == 0)
        assert channel.cursor.floor == 50
        assert client.errors == []
        assert client.consumer.finish_count == client.consumer.message_count == 50

    RelayNodes().run(story)


def test_the_window_is_kept_and_used():
    async def story(nodes: Any) -> None:
        nodes.elect(2)
        client = nodes[1].subscribe(rdy=5)
        await until(lambda: nodes[2].topic.consumers.relayed)
        nodes[2].publish(*bodies(0, 40))
        await until(lambda: len(client.bodies) == 5)
        await asyncio.sleep(1)
        assert len(client.bodies) == 5
        client.auto = True
        client.fin_all()
        await until(lambda: len(client.bodies) == 40)
        assert client.most_in_flight == 5

    RelayNodes().run(story)


def test_rdy_0_stops_and_a_leaving_client_gives_back_what_it_had():
    async def story(nodes: Any) -> None:
        client = await nodes.relayed(rdy=3)
        nodes[2].publish(*bodies(0, 5))
        await until(lambda: len(client.bodies) == 3)
        client.ready(0)
        client.fin(*client.ids[:1])
        await asyncio.sleep(1)
        assert len(client.bodies) == 3
        client.leave()
        await until(lambda: not nodes[2].topic.consumers.relayed)
        other = nodes[1].subscribe(rdy=10)
        await until(lambda: len(other.bodies) == 4)
        assert sorted(other.bodies) == bodies(1, 5)
        assert {attempts for _, attempts, body in other.messages if body in bodies(1, 3)} == {2}

    RelayNodes().run(story)


def test_req_touch_and_failures_are_answered_by_the_leader():
    async def story(nodes: Any) -> None:
        client = await nodes.relayed(rdy=10, timeout=2.0)
        nodes[2].publish(b"a", b"b")
        await until(lambda: len(client.bodies) == 2)
        a, b = client.ids
        client.verdicts.req(a, 0)
        await until(lambda: len(client.bodies) == 3)
        assert client.messages[2] == (a, 2, b"a")
        await asyncio.sleep(1.5)
        client.verdicts.touch(b)
        await asyncio.sleep(1.5)
        assert client.bodies[3:] == [b"a"], "the one that was not touched has timed out"
        client.fin(b)
        client.fin(b)
        client.verdicts.touch(b)
        client.verdicts.req(b, 0)
        await until(lambda: len(client.errors) == 3)
        assert [error.split()[0] for error in client.errors] == [b"E_FIN_FAILED", b"E_TOUCH_FAILED", b"E_REQ_FAILED"]
        assert client.consumer.finish_count == 1
        assert client.consumer.requeue_count == 1
        client.fin(b"%016x" % (7 << 50))
        assert client.errors[-1].startswith(b"E_FIN_FAILED")

    RelayNodes().run(story)


def test_a_client_with_one_fixed_address_survives_failover_with_a_pause():
    async def story(nodes: Any) -> None:
        client = await nodes.relayed(rdy=10)
        nodes[2].publish(*bodies(0, 5))
        await until(lambda: len(client.bodies) == 5)
        late = client.ids[0]
        client.fin(*client.ids[1:])
        await asyncio.sleep(2)
        nodes.elect(3)
        await until(lambda: len(client.bodies) == 6)
        assert client.bodies[5] == b"0", "what was in flight comes again"
        nodes[3].publish(*bodies(5, 9))
        await until(lambda: len(client.bodies) == 10)
        client.fin(late)
        client.fin_all()
        channel = nodes[3].topic.led[0].cursors.channels["c"]
        await until(lambda: channel.cursor.floor == 9)
        assert not client.closed
        assert client.errors == []

    RelayNodes(3).run(story)


def test_a_leader_that_dies_is_replaced_as_soon_as_the_next_is_known():
    async def story(nodes: Any) -> None:
        client = await nodes.relayed(rdy=10)
        nodes[2].publish(b"a")
        await until(lambda: client.bodies == [b"a"])
        partition = nodes[2].topic.led[0]
        nodes.net.crash("n2")
        await until(lambda: client.consumer.lent_credit == 0)
        await asyncio.sleep(1)
        client.fin(*client.ids)
        assert [error.split()[0] for error in client.errors] == [b"E_FIN_FAILED"], "nobody has it in flight"
        nodes.store.logs[0] = partition.log, partition.cursors.state, 2
        nodes[3].lead()
        nodes.appoint("t", 0, 3, 2)
        await until(lambda: len(client.bodies) == 2)
        assert not client.closed

    RelayNodes(3).run(story)


def test_a_leader_that_lost_its_power_and_leads_again_has_its_consumers_at_once():
    """It ended no stream, and this node may not have seen that its lease ended."""

    async def story(nodes: Any) -> None:
        client = await nodes.relayed(rdy=10)
        nodes[2].publish(b"a")
        await until(lambda: client.bodies == [b"a"])
        partition = nodes[2].topic.led[0]
        nodes.net.crash("n2", silent=True)
        await nodes[2].stop()
        nodes.store.logs[0] = partition.log, partition.cursors.state, 2
        nodes.all[2] = nodes.make(2)
        nodes[2].lead()
        nodes[1].leaders.registrations[2] = 2
        nodes.appoint("t", 0, 2, 2)
        await until(lambda: len(client.bodies) == 2, 0.5)
        assert client.bodies == [b"a", b"a"] and not client.closed

    RelayNodes(2).run(story)


def test_leadership_that_arrives_is_attached_and_one_that_leaves_is_relayed():
    """A client that came when this node led nothing has it as its fixed address."""

    async def story(nodes: Any) -> None:
        client = await nodes.relayed(rdy=10)
        client.auto = True
        nodes[2].publish(b"a")
        await until(lambda: client.bodies == [b"a"])
        await asyncio.sleep(2)
        nodes.elect(1)
        await until(lambda: client.consumer.subscriptions)
        assert client.consumer.lent_credit == 0
        nodes[1].publish(b"b")
        await until(lambda: client.bodies == [b"a", b"b"])
        await asyncio.sleep(2)
        nodes.elect(2)
        await until(lambda: client.consumer.lent_credit == 10)
        nodes[2].publish(b"c")
        await until(lambda: client.bodies == [b"a", b"b", b"c"])
        assert not client.closed

    RelayNodes().run(story)


def test_who_was_served_directly_is_closed_when_the_partition_leaves():
    async def story(nodes: Any) -> None:
        nodes.elect(1)
        client = nodes[1].subscribe(rdy=10)
        await until(lambda: client.consumer.subscriptions)
        nodes.elect(2)
        assert client.closed
        assert client.consumer.subscriptions == {}

    RelayNodes().run(story)


def test_a_leader_with_clients_of_its_own_serves_only_those():
    async def story(nodes: Any) -> None:
        relayed = await nodes.relayed(rdy=10)
        direct = nodes[2].subscribe(rdy=100)
        await until(lambda: relayed.consumer.lent_credit == 0)
        nodes[2].publish(*bodies(0, 10))
        await until(lambda: len(direct.bodies) == 10)
        assert relayed.bodies == []
        direct.fin(*direct.ids[:4])
        direct.leave()
        await until(lambda: len(relayed.bodies) == 6)
        assert sorted(relayed.bodies) == bodies(4, 10)

    RelayNodes().run(story)


@pytest.mark.parametrize("rdy", [0, 5])
def test_clients_of_other_nodes_are_served_while_those_of_the_leader_are_full(rdy: int):
    async def story(nodes: Any) -> None:
        relayed = await nodes.relayed(rdy=5)
        direct = nodes[2].subscribe(rdy=rdy)
        await until(lambda: relayed.consumer.lent_credit == 0)
        nodes[2].publish(*bodies(0, 30))
        await until(lambda: (len(direct.bodies), len(relayed.bodies)) == (rdy, 5))
        assert relayed.most_in_flight == 5

    RelayNodes().run(story)


def test_a_busy_client_of_the_leader_starves_no_other_one():
    """Before, whoever finished at once had room at each look, and all others got nothing."""

    async def story(nodes: Any) -> None:
        relayed = await nodes.relayed(rdy=5)
        direct = nodes[2].subscribe(rdy=5)
        await until(lambda: relayed.consumer.lent_credit == 0)
        for client in (direct, relayed):
            client.auto, client.delay = True, 0.01
        nodes[2].publish(*bodies(0, 400))
        await until(lambda: len(direct.bodies) + len(relayed.bodies) == 400)
        assert len(relayed.bodies) > 100 < len(direct.bodies)

    RelayNodes().run(story)


def test_credit_is_taken_back_when_clients_of_the_leader_have_room_again():
    async def story(nodes: Any) -> None:
        relayed = await nodes.relayed(rdy=5)
        direct = nodes[2].subscribe(rdy=5)
        nodes[2].publish(*bodies(0, 10))
        await until(lambda: len(direct.bodies) + len(relayed.bodies) == 10)
        direct.fin_all()
        relayed.fin_all()
        await until(lambda: relayed.consumer.lent_credit == 0)
        nodes[2].publish(*bodies(10, 14))
        await until(lambda: len(direct.bodies) == 9)
        assert len(relayed.bodies) == 5

    RelayNodes().run(story)


def test_a_channel_that_is_deleted_closes_its_clients_on_other_nodes():
    async def story(nodes: Any) -> None:
        client = await nodes.relayed(rdy=10)
        nodes[2].topic.led[0].cursors.requests.reconcile(nodes.store.channels(2))
        await nodes[2].topic.commit_events()
        await until(lambda: client.closed)

    RelayNodes().run(story)


def test_a_channel_that_the_leader_has_not_heard_of_is_read_from_the_record():
    async def story(nodes: Any) -> None:
        nodes.elect(2)
        await until(lambda: nodes[2].topic.led[0].serving)
        record = nodes.store.record
        object.__setattr__(record, "channels", nodes.store.channels(2, "c", "new"))
        client = nodes[1].subscribe("new", rdy=10)
        assert client.consumer.remote.missing == [0]
        await until(lambda: not client.consumer.remote.missing)
        nodes[2].publish(b"a")
        await until(lambda: client.bodies == [b"a"])
        gone = nodes[1].subscribe("never", rdy=10)
        await until(lambda: gone.closed)

    RelayNodes().run(story)


def test_the_leader_closes_a_client_of_what_has_become_a_reader_channel():
    async def story(nodes: Any) -> None:
        nodes.elect(2)
        await until(lambda: nodes[2].topic.led[0].serving)
        channels = nodes.store.channels(2, "c").with_channel("r", 200, reader=True)
        object.__setattr__(nodes.store.record, "channels", channels)
        client = nodes[1].subscribe("r", rdy=10)
        await until(lambda: client.closed)
        nodes[2].publish(b"a")
        assert nodes[2].topic.led[0].cursors.channels["r"].committed.reader and not client.bodies

    RelayNodes().run(story)


def test_an_ephemeral_channel_lives_as_long_as_it_has_a_client_anywhere():
    async def story(nodes: Any) -> None:
        client = await nodes.relayed("e#ephemeral", rdy=10)
        assert "e#ephemeral" in nodes[2].topic.led[0].cursors.channels
        await asyncio.sleep(2)
        nodes.elect(3)
        await until(lambda: client.consumer.lent_credit == 10)
        nodes[3].publish(b"a")
        await until(lambda: client.bodies == [b"a"])
        client.leave()
        await until(lambda: "e#ephemeral" not in nodes[3].topic.led[0].cursors.channels)

    RelayNodes(3).run(story)


@pytest.mark.parametrize("goes", [True, False])
def test_who_comes_while_an_ephemeral_channel_goes_gets_the_next_one(goes: bool):
    """The last client has left, another one comes, and the event that deletes the channel is not committed yet."""

    async def story(nodes: Any) -> None:
        first = await nodes.relayed("e#ephemeral", rdy=10)
        topic = nodes[2].topic
        (partition,) = topic.led
        partition.hand_over(True)
        if not goes:  # the log refuses it
            partition.cursors.requests.delete_ephemeral = lambda name: None
        first.leave()
        await until(lambda: topic.leaving)
        second = nodes[1].subscribe("e#ephemeral", rdy=10)
        await until(lambda: topic.consumers.reads("e#ephemeral"))
        await asyncio.sleep(0.2)
        partition.hand_over(False)
        await until(lambda: second.consumer.lent_credit == 10)
        nodes[2].publish(b"for the second")
        await until(lambda: second.bodies == [b"for the second"])
        assert not second.closed

    RelayNodes().run(story)


@pytest.mark.parametrize("rdy", [1, 2, 3, 10, 100])
@pytest.mark.parametrize("seed", range(4))
def test_one_window_serves_all_partitions_and_is_never_exceeded(rdy: int, seed: int):
    async def story(nodes: Any) -> None:
        for number, leader in enumerate((1, 2, 3, 3)):
            nodes.elect(leader, number)
        client = nodes[1].subscribe(rdy=rdy)
        client.auto, client.delay = True, 0.003
        await until(lambda: not client.consumer.remote.missing)
        for number, leader in enumerate((1, 2, 3, 3)):
            nodes[leader].publish(*bodies(0, 60), number=number)
        await until(lambda: len(client.ids) == 240)
        assert client.most_in_flight <= rdy
        assert len(set(client.ids)) == 240
        assert client.errors == []

    RelayNodes(3, seed, partitions=4).run(story)


def test_one_busy_partition_gets_most_of_the_window():
    async def story(nodes: Any) -> None:
        nodes.elect(2, 0)
        nodes.elect(3, 1)
        client = nodes[1].subscribe(rdy=100)
        await until(lambda: client.consumer.lent_credit == 100)
        nodes[2].publish(*bodies(0, 200), number=0)
        await until(lambda: len(client.bodies) >= 85)
        nodes[3].publish(b"x", number=1)
        await until(lambda: b"x" in client.bodies)
        assert client.most_in_flight <= 100

    RelayNodes(3, partitions=2).run(story)


def test_a_client_that_does_not_read_stops_its_leader():
    async def story(nodes: Any) -> None:
        client = await nodes.relayed(rdy=2500)
        client.writable = False
        for _ in range(100):
            nodes[2].publish(b"x" * 100_000)
        await asyncio.sleep(2)
        held = sum(map(len, client.bodies))
        assert UNTAKEN_BYTES - 100_000 <= held <= UNTAKEN_BYTES + BATCH_BYTES, "and one run"
        client.writable = True
        client.consumer.remote.resumed()
        await until(lambda: len(client.bodies) == 100)

    RelayNodes().run(story)


def test_a_lost_connection_between_nodes_is_a_pause():
    async def story(nodes: Any) -> None:
        client = await nodes.relayed(rdy=10)
        client.auto = True
        nodes[2].publish(b"a")
        await until(lambda: client.bodies == [b"a"])
        nodes.net.cut("n1", "n2")
        await until(lambda: client.consumer.lent_credit == 0)
        nodes[2].publish(b"b")
        await until(lambda: b"b" in client.bodies)
        assert len(nodes[2].topic.consumers.relayed["c"]) == 1
        assert not client.closed

    RelayNodes().run(story)


def test_a_stream_is_not_kept_for_nobody():
    async def story(nodes: Any) -> None:
        client = await nodes.relayed(rdy=10)
        client.leave()
        await until(lambda: not nodes[2].service.streams)

    RelayNodes().run(story)


def test_large_runs_are_not_joined_to_messages_that_no_stream_takes():
    pieces = [b"a" * 400, b"b" * 500, b"c" * 200, b"d" * 5000, b"e"]
    assert [len(data) for data in joined(pieces, 1000)] == [900, 200, 5000, 1]
    assert b"".join(joined(pieces, 1000)) == b"".join(pieces)
    assert list(joined([], 1000)) == []


def test_counters_do_not_go_back_when_a_partition_moves():
    """Else a feed of differences takes all that is left for new."""

    async def story(nodes: Any) -> None:
        def counted(node: int) -> tuple[int, int, int, int]:
            alone: Any = SimpleNamespace(replication=lambda topic, number: {}, changes=lambda topic: {})
            stats = topic_stats(nodes[node].topic, nodes[node].now(), False, alone)
            (channel,) = [c for c in stats.channels if c.channel_name == "c"]
            return stats.message_count, stats.message_bytes, channel.message_count, channel.finish_count

        for number in (0, 1):
            nodes.elect(1, number)
        client = nodes[1].subscribe(rdy=100)
        await until(lambda: all(p.serving for p in nodes[1].topic.led))
        for number, bodies_ in ((0, [b"a", b"b"]), (1, [b"ccc"])):
            nodes[1].publish(*bodies_, number=number)
        await until(lambda: len(client.bodies) == 3)
        client.fin_all()
        await until(lambda: counted(1) == (3, 5, 3, 3))
        nodes.elect(2, 0)
        assert counted(1) == (3, 5, 3, 3)
        await until(lambda: all(p.serving for p in nodes[2].topic.led))
        nodes[2].publish(b"dd", number=0)
        await until(lambda: counted(2)[0] == 1)
        assert counted(2)[:2] == (1, 2) and counted(1)[:2] == (3, 5)
        nodes.elect(1, 0)
        await until(lambda: all(p.serving for p in nodes[1].topic.led))
        nodes[1].publish(b"e", number=0)
        await until(lambda: counted(1)[:2] == (4, 6))

    RelayNodes(partitions=2).run(story)


def test_after_a_leader_moves_no_more_messages_wait_than_are_counted():
    side: Any = SimpleNamespace(replication=lambda *_: {}, changes=lambda _: {})

    async def story(nodes: Any) -> None:
        def figures(node: int) -> tuple[int, int, int, int]:
            """Depth and count of the channel, count of the topic, and what it has published here."""
            stats = topic_stats(nodes[node].topic, nodes[node].now(), False, side)
            in_cluster: Any = SimpleNamespace(topics=(stats,), producers=(), node=SimpleNamespace(cluster=True))
            (shown,) = select(in_cluster, Selection()).topics or ()
            (channel,) = [c for c in shown.channels if c.channel_name == "c"]
            return channel.depth, channel.message_count, shown.message_count, stats.message_count

        nodes.elect(1)
        await until(lambda: all(p.serving for p in nodes[1].topic.led))
        nodes[1].publish(b"a", b"b", b"c")
        await until(lambda: figures(1) == (3, 3, 3, 3))
        nodes.elect(2)
        await until(lambda: all(p.serving for p in nodes[2].topic.led))
        assert figures(2) == (3, 3, 3, 0), "metrics add up what nodes have published"
        nodes[2].publish(b"d")
        await until(lambda: figures(2) == (4, 4, 4, 1))
        nodes.elect(1)
        await until(lambda: all(p.serving for p in nodes[1].topic.led))
        assert figures(2)[2:] == (4, 1), "it does not go back"

    RelayNodes().run(story)


def test_a_consumer_that_names_a_partition_gets_that_one_alone_wherever_it_is_led():
    async def story(nodes: Any) -> None:
        for number, leader in enumerate((1, 2, 2)):
            nodes.elect(leader, number)
        here, there = nodes[1].subscribe(rdy=9, only=0), nodes[1].subscribe(rdy=9, only=2)
        await until(lambda: nodes[2].topic.consumers.relayed and there.consumer.lent_credit == 9)
        for number, leader in enumerate((1, 2, 2)):
            nodes[leader].publish(b"%d" % number, number=number)
        await until(lambda: here.bodies and there.bodies)
        await asyncio.sleep(1)
        assert (here.bodies, there.bodies) == ([b"0"], [b"2"])

    RelayNodes(partitions=3).run(story)


def test_a_consumer_of_another_node_stands_by_for_those_of_its_partition_alone():
    async def story(nodes: Any) -> None:
        nodes.elect(2, 0)
        nodes.elect(2, 1)
        relayed, direct = nodes[1].subscribe(rdy=9), nodes[2].subscribe(rdy=9, only=0)
        await until(lambda: len(nodes[2].topic.consumers.relayed.get("c", ())) == 2 and relayed.consumer.lent_credit)
        for number in (0, 1):
            nodes[2].publish(b"%d" % number, number=number)
        await until(lambda: relayed.bodies and direct.bodies)
        await asyncio.sleep(1)
        assert (direct.bodies, relayed.bodies) == ([b"0"], [b"1"])

    RelayNodes(partitions=2).run(story)


# ---- what the leader's statistics show, where NSQ's tools look


def shown(node: Any, clients: bool = True) -> Any:
    alone = SimpleNamespace(replication=lambda *_: {}, changes=lambda _: {})
    (channel,) = topic_stats(node.topic, node.now(), clients, alone).channels
    return channel


def test_a_leader_shows_the_clients_of_other_nodes_once_each():
    async def story(nodes: Any) -> None:
        nodes.elect(2)
        nodes.elect(2, 1)
        client = nodes[1].subscribe(rdy=10)
        await until(lambda: len(nodes[2].topic.consumers.relayed.get("c", ())) == 2)
        nodes[2].publish(*bodies(0, 2))
        nodes[2].publish(*bodies(2, 5), number=1)
        await until(lambda: len(client.bodies) == 5)
        client.fin(*client.ids[:2])
        await until(lambda: shown(nodes[2]).in_flight_count == 3)
        channel = shown(nodes[2])
        (relayed,) = channel.relayed
        assert (relayed.client_id, relayed.hostname, relayed.remote_address) == ("me", "h1", "10.0.0.9:5")
        assert (relayed.message_count, relayed.finish_count, relayed.in_flight_count) == (5, 2, 3)
        assert (channel.relayed_count, channel.client_count) == (1, 0)
        client.leave()
        await until(lambda: not shown(nodes[2]).relayed)

    RelayNodes(partitions=2).run(story)


def test_all_leaders_together_show_each_client_once():
    async def story(nodes: Any) -> None:
        nodes.elect(2)
        nodes.elect(3, 1)
        elsewhere = nodes[1].subscribe(rdy=10)
        pinned = nodes[1].subscribe(rdy=10, only=1)
        at_a_leader = nodes[3].subscribe(rdy=10)
        for node in (nodes[2], nodes[3]):
            await until(lambda node=node: len(node.topic.consumers.relayed.get("c", ())) == 2)

        def both() -> list[tuple[int, int]]:
            found = [shown(node, clients=False) for node in (nodes[2], nodes[3])]
            return [(channel.client_count, channel.relayed_count) for channel in found]

        assert both() == [(0, 1), (1, 1)], "the first leader has the one elsewhere, the second its own and the pinned"
        nodes[2].subscribe(rdy=10)
        assert both() == [(1, 1), (1, 1)], "it is there, although it stands by"
        assert not elsewhere.closed and not pinned.closed and not at_a_leader.closed

    RelayNodes(3, partitions=2).run(story)
