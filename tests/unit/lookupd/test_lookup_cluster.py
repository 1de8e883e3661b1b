"""The daemon with a cluster behind it, over HTTP: what clients and nsqadmin are told, and what operators change."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from lookupd import cluster_api
from lookupd.daemon import Lookupd
from lookupd.directory import LookupDirectory, never_reached
from lookupd.fork_api import moved
from lookupd.http_api import LookupdApi
from nsqha.access.roles import GRANTED, granted
from nsqha.access.surfaces import LOOKUPD_HTTP
from nsqha.access.tokens import entry
from nsqha.clock import ManualClock, SystemClock, read
from nsqha.election.elect import ReplicaReport
from nsqha.election.model import NodeInfo, PartitionMeta, TopicSettings
from nsqha.election.moves import hidden_name, is_hidden
from nsqha.election.observed.answers import LeaderState
from nsqha.election.observed.page import decode
from nsqha.election.placement import PartitionName
from nsqha.errors import Unavailable
from nsqha.options import LookupdOptions
from nsqha.server.authorization.guard import Guard
from nsqha.server.http import cluster_page
from nsqha.server.http.server import ApiError
from nsqha.server.runtime import measures
from tests.unit.lookupd.nodes_rig import World


class Site:
    """A cluster of three nodes and one daemon."""

    def __init__(self, world: World, daemon: Lookupd, clock: ManualClock) -> None:
        self.world = world
        self.daemon = daemon
        self.clock = clock

    async def ask(self, method: str, target: str) -> tuple[int, Any]:
        host, _, port = self.daemon.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else body

    async def get(self, target: str) -> Any:
        status, answer = await self.ask("GET", target)
        assert status == 200, answer
        return answer

    async def post(self, target: str) -> int:
        return (await self.ask("POST", target))[0]

    async def made(self, target: str, method: str = "POST") -> int:
        """The status of /topic/create, while the leaders have their followers join as soon as they lead."""
        asked = asyncio.create_task(self.ask(method, target))
        topic = target.partition("topic=")[2].partition("&")[0]
        while not asked.done():
            found = self.world.store.records.topic(topic)
            if found is not None and all(meta.leader for meta in found.record.partitions.values()):
                self.world.join_all(topic)
                break
            await asyncio.sleep(0.01)
        return (await asked)[0]

    async def register(self, topic: str, host: str, tcp_port: int) -> asyncio.StreamWriter:
        """An nsqd registers a topic, or a topic and a channel."""
        address, _, port = self.daemon.tcp_address.rpartition(":")
        reader, writer = await asyncio.open_connection(address, int(port))
        body = {"version": "1.3.0", "hostname": "h", "broadcast_address": host, "tcp_port": tcp_port, "http_port": 1}
        data = json.dumps(body).encode()
        writer.write(b"  V1IDENTIFY\n" + struct.pack(">i", len(data)) + data + f"REGISTER {topic}\n".encode())
        (size,) = struct.unpack(">i", await reader.readexactly(4))
        await reader.readexactly(size + 4 + 2)
        return writer


@asynccontextmanager
async def site(**flags: Any) -> AsyncIterator[Site]:
    world, clock = World(3), ManualClock()
    options = LookupdOptions(tcp_address="127.0.0.1:0", http_address="127.0.0.1:0", broadcast_address="me", **flags)
    daemon = Lookupd(options, clock=clock, store=world.store, peers=world.peers)
    assert daemon.controller is not None
    daemon.controller.clock = SystemClock()
    await daemon.start()
    try:
        yield Site(world, daemon, clock)
    finally:
        await daemon.stop()


def run(story: Callable[[Site], Awaitable[None]], **flags: Any) -> None:
    async def main() -> None:
        async with site(**flags) as found:
            await asyncio.wait_for(story(found), 60)

    uvloop.run(main())


def ports(answer: dict[str, Any]) -> list[int]:
    return sorted(producer["tcp_port"] for producer in answer["producers"])


def test_lookup_names_the_leaders_as_upstream_names_an_nsqd() -> None:
    async def story(s: Site) -> None:
        assert (await s.ask("GET", "/lookup?topic=t"))[0] == 404
        s.world.create(partitions=2)
        await s.world.until(lambda: all(s.world.meta("t", n).leader for n in range(2)))
        leaders = sorted(4000 + s.world.meta("t", n).leader for n in range(2))
        answer = await s.get("/lookup?topic=t")
        assert list(answer) == ["channels", "producers"] and ports(answer) == leaders
        number = leaders[0] - 4000
        assert answer["producers"][0] == {
            "remote_address": f"b{number}:400{number}",
            "hostname": f"host{number}",
            "broadcast_address": f"b{number}",
            "tcp_port": 4000 + number,
            "http_port": 5000 + number,
            "version": "1.3.0",
            "topology_zone": "",
            "topology_region": "",
        }

    run(story)


@pytest.mark.parametrize("address", ["b:-1", ""])
def test_a_node_without_a_port_is_named_to_nobody(address: str) -> None:
    """It listens on a unix socket, or not at all."""

    async def story(s: Site) -> None:
        s.world.create(partitions=2)
        directory, now = LookupDirectory(45), read(s.clock)
        await s.world.until(lambda: len(directory.leaders(s.world.store.watch.view(), "t", now) or ()) == 2)
        view = s.world.store.watch.view()
        leaders = directory.leaders(view, "t", now) or {}
        leader = leaders[0].node_uid
        changed = replace(view.nodes[leader], tcp_address=address)
        without = replace(view, nodes={**view.nodes, leader: changed})
        found = directory.leaders(without, "t", now)
        assert found == {n: node for n, node in leaders.items() if node.node_uid != leader}
        assert directory.led(without).keys() == view.nodes.keys() - {leader}

    run(story)


def test_lookup_follows_the_leader_and_forgets_a_node_without_a_lease() -> None:
    async def story(s: Site) -> None:
        s.world.create()
        await s.world.led()
        s.world.join_all()
        before = s.world.meta().leader
        s.world.nodes[before].kill()
        await s.world.until(lambda: s.world.meta().leader != before)
        assert ports(await s.get("/lookup?topic=t")) == [4000 + s.world.meta().leader]
        s.world.nodes[before].session.close()
        assert 4000 + before not in ports(await s.get("/nodes"))

    run(story)


def test_stock_nsqds_are_merged_and_nodes_of_the_cluster_are_not_named_twice() -> None:
    async def story(s: Site) -> None:
        s.world.create()
        await s.world.led()
        leader = s.world.meta().leader
        other = leader % 3 + 1
        writers = [await s.register("t", "elsewhere", 4150), await s.register("t", f"b{other}", 4000 + other)]
        assert ports(await s.get("/lookup?topic=t")) == sorted([4000 + leader, 4150])
        assert ports(await s.get("/nodes")) == [4001, 4002, 4003, 4150]
        assert (await s.get("/topics"))["topics"] == ["t"]
        writers.append(await s.register("e#ephemeral", "b1", 4001))
        assert ports(await s.get("/lookup?topic=e%23ephemeral")) == [4001], "what only a node knows"
        (first,) = [node for node in (await s.get("/nodes"))["producers"] if node["tcp_port"] == 4001]
        assert "e#ephemeral" in first["topics"] and len(first["topics"]) == len(first["tombstones"])
        for writer in writers:
            writer.close()

    run(story)


def test_nodes_show_what_they_lead_and_as_many_tombstones() -> None:
    async def story(s: Site) -> None:
        s.world.create()
        await s.world.led()
        leader = s.world.meta().leader
        assert await s.post(f"/topic/tombstone?topic=t&node=b{leader}:{5000 + leader}") == 200
        for node in (await s.get("/nodes"))["producers"]:
            mine = node["tcp_port"] == 4000 + leader
            assert node["topics"] == (["t"] if mine else []) and node["tombstones"] == ([True] if mine else [])
        assert ports(await s.get("/lookup?topic=t")) == []
        assert ports(await s.get("/lookup?topic=t&access=r")) == [4000 + leader]
        s.clock.advance(46)
        assert ports(await s.get("/lookup?topic=t")) == [4000 + leader]

    run(story)


def test_the_parameters_of_the_fork() -> None:
    async def story(s: Site) -> None:
        target = "/topic/create?topic=t&partition_num=2&replicator=3&syncdisk=1&retention=2&orderedmulti=true"
        assert await s.made(target) == 200
        assert await s.post(target) == 200, "again is fine"
        assert await s.post("/topic/create?topic=t") == 200
        assert await s.post("/topic/create?topic=t&partition_num=3") == 409
        found = s.world.store.records.topic("t")
        assert found is not None
        wanted = TopicSettings(sync="always", retention_ms=2 * 86_400_000, ordered=True, partitions=2, replicas=3)
        assert found.record.settings == wanted
        await s.world.until(lambda: all(s.world.meta("t", n).leader for n in range(2)))
        answer = await s.get("/lookup?topic=t&access=r&metainfo=true")
        assert sorted(answer["partitions"]) == ["0", "1"]
        assert answer["meta"]["partition_num"] == 2 and answer["meta"]["replica"] == 3 and answer["meta"]["ordered"]
        assert list((await s.get("/lookup?topic=t&partition=1"))["partitions"]) == ["1"]
        s.world.join_all(followers=False)
        # One member is below min_isr: nothing can be acknowledged.
        assert ports(await s.get("/lookup?topic=t&access=w")) == []
        s.world.join_all()
        assert len(ports(await s.get("/lookup?topic=t&access=w"))) == 2
        assert (await s.get("/topics?metaInfo=true"))["meta_info"][0]["topic_name"] == "t"

    run(story)


@pytest.mark.parametrize(
    "bad",
    [
        "partition_num=0",
        "partition_num=1024",
        "partition_num=00000000029999",
        f"partition_num=0000000001{'0' * 5000}",
        "replicator=x",
        "syncdisk=-1",
        "retention=99999",
        "extend=true",
    ],
)
def test_settings_that_can_not_be_are_refused(bad: str) -> None:
    async def story(s: Site) -> None:
        assert await s.post(f"/topic/create?topic=t&{bad}") == 400
        assert s.world.store.records.topic("t") is None

    run(story)


def test_more_replicas_than_nodes_are_refused_before_anything_is_made() -> None:
    async def story(s: Site) -> None:
        target = "/topic/create?topic=t&replicator=4"
        status, answer = await s.ask("POST", target)
        assert (status, answer["message"]) == (400, "INVALID_REQUEST")
        assert "replicas is 4, and the cluster has 3 nodes" in answer["why"]
        assert s.world.store.records.topic("t") is None
        s.world.store.records.create_topic("t", TopicSettings(replicas=4))
        assert await s.post(target) == 200, "it is there, made when there were more"

    run(story)


@pytest.mark.parametrize("settings", ["", "&partition_num=2"])
def test_a_new_topic_is_answered_when_all_partitions_are_led(settings: str) -> None:
    async def story(s: Site) -> None:
        assert await s.made(f"/topic/create?topic=t{settings}") == 200
        found = s.world.store.watch.view().topics["t"].record.partitions
        assert len(found) == (2 if settings else 1)
        assert all(meta.leader for meta in found.values())

    run(story)


def test_right_after_the_answer_lookup_names_all_partitions_that_can_be_written_to() -> None:
    async def story(s: Site) -> None:
        assert await s.made("/topic/create?topic=t&partition_num=4") == 200
        for access in ("r", "w"):
            assert len((await s.get(f"/lookup?topic=t&access={access}&metainfo=true"))["partitions"]) == 4

    run(story)


def test_new_partitions_that_cannot_be_written_to_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_api, "LED_SECONDS", 0.5)

    async def story(s: Site) -> None:
        status, answer = await s.ask("POST", "/topic/create?topic=t&partition_num=2")
        assert (status, answer["message"]) == (504, "OUTCOME_UNKNOWN")
        assert "topic t is stored" in answer["why"] and "too few replicas in sync" in answer["why"]
        assert await s.post("/topic/create?topic=t") == 200, "it is not new any more"
        view = s.world.store.watch.view()
        assert cluster_api.below_min_isr(view, "t") == [0, 1]
        alone = dict(list(view.nodes.items())[:1])
        assert cluster_api.below_min_isr(replace(view, nodes=alone), "t") == [], "nothing to wait for"

    run(story)


def test_partitions_that_get_no_leader_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic is there all the same, and led as soon as its replicas answer."""
    monkeypatch.setattr(cluster_api, "LED_SECONDS", 0.5)

    async def story(s: Site) -> None:
        for node in s.world.nodes.values():
            node.frozen = True
        status, answer = await s.ask("POST", "/topic/create?topic=t&partition_num=2")
        assert (status, answer["message"]) == (504, "OUTCOME_UNKNOWN")
        assert "topic t is stored" in answer["why"] and "have no leader: 0, 1; they get one" in answer["why"]
        assert s.world.store.records.topic("t") is not None
        monkeypatch.setattr(cluster_api, "LED_SECONDS", 60.0)
        again = asyncio.create_task(s.made("/topic/create?topic=t&partition_num=2"))
        for node in s.world.nodes.values():
            node.frozen = False
        assert await again == 200

    run(story)


def test_a_leader_without_a_lease_is_none() -> None:
    async def story(s: Site) -> None:
        s.world.create()
        await s.world.led()
        view = s.world.store.watch.view()
        leader = view.topics["t"].record.partitions[0].leader
        assert cluster_api.without_leader(view, "t") == []
        nodes = {uid: node for uid, node in view.nodes.items() if uid != leader}
        assert cluster_api.without_leader(replace(view, nodes=nodes), "t") == [0]
        assert cluster_api.without_leader(view, "unheard") is None

    run(story)


def test_what_is_refused_names_what_is_taken() -> None:
    async def story(s: Site) -> None:
        _, answer = await s.ask("POST", "/topic/create?topic=t&extend=true")
        assert answer["message"] == "INVALID_ARG_EXTEND"
        assert "partition_num, replicator, syncdisk, retention and orderedmulti are taken" in answer["why"]

    run(story)


def test_channels_and_topics_are_changed_in_the_metadata() -> None:
    async def story(s: Site) -> None:
        assert await s.post("/channel/create?topic=t&channel=c") == 200
        assert await s.post("/channel/create?topic=t&channel=c") == 200
        assert await s.post("/channel/create?topic=t&channel=e%23ephemeral") == 200
        found = s.world.store.records.topic("t")
        assert found is not None and list(found.record.channels.channels) == ["c"]
        assert (await s.get("/channels?topic=t"))["channels"] == ["c", "e#ephemeral"]
        found = s.world.store.records.topic("t")  # a controller may have led a partition meanwhile
        assert found is not None
        with_reader = replace(found.record, channels=found.record.channels.with_channel("r", 9, reader=True))
        s.world.store.records.replace("t", found.version, with_reader)
        assert (await s.get("/channels?topic=t"))["channels"] == ["c", "e#ephemeral"], "nobody makes it from hearsay"

    run(story)


def test_deleting_a_channel_drops_registrations_and_no_message() -> None:
    async def story(s: Site) -> None:
        assert await s.post("/channel/create?topic=t&channel=c") == 200
        assert await s.post("/channel/create?topic=t&channel=e%23ephemeral") == 200
        assert await s.post("/channel/delete?topic=t&channel=c") == 200
        assert await s.post("/channel/delete?topic=t&channel=e%23ephemeral") == 200
        assert await s.post("/channel/delete?topic=t&channel=e%23ephemeral") == 404
        assert await s.post("/channel/delete?topic=t&channel=never") == 404
        found = s.world.store.records.topic("t")
        assert found is not None and list(found.record.channels.channels) == ["c"]

    run(story)


def test_a_topic_gets_no_more_channels_than_it_may_have() -> None:
    async def story(s: Site) -> None:
        for n in range(3):
            assert await s.post(f"/channel/create?topic=t&channel=c{n}") == 200
        assert await s.post("/channel/create?topic=t&channel=c3") == 507
        assert await s.post("/channel/create?topic=t&channel=c2") == 200
        found = s.world.store.records.topic("t")
        assert found is not None and len(found.record.channels.channels) == 3

    run(story, max_topic_channels=3)


def test_deleting_a_topic_drops_registrations_and_no_message() -> None:
    """As upstream's daemon: this port asks nobody who they are."""

    async def story(s: Site) -> None:
        s.world.create()
        writer = await s.register("t", "elsewhere", 4150)
        assert 4150 in ports(await s.get("/lookup?topic=t"))
        assert await s.post("/topic/delete?topic=t") == 200
        assert await s.post("/topic/delete?topic=never") == 200
        assert 4150 not in ports(await s.get("/lookup?topic=t"))
        assert s.world.store.records.topic("t") is not None and not s.world.store.records.tombstones()
        writer.close()

    run(story)


def test_brokers_know_for_a_while_which_node_a_tombstone_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(s: Site) -> None:
        s.world.create()
        await s.world.led()
        store, uid = s.world.store, s.world.store.records.topic("t").record.uid
        monkeypatch.setattr(cluster_api, "HIDDEN_SECONDS", 3600)
        for target in ("topic=t&node=b9:5009", "topic=other&node=b2:5002", "topic=e%23ephemeral&node=b2:5002"):
            assert await s.post(f"/topic/tombstone?{target}") == 200
        assert not [name for name in store.intents.all() if name.startswith("hidden/")]
        assert await s.post("/topic/tombstone?topic=t&node=b2:5002") == 200
        assert is_hidden(store.intents.all(), uid, 2, s.clock.wall_ns())
        assert not is_hidden(store.intents.all(), uid, 1, s.clock.wall_ns())
        s.clock.advance(1)
        monkeypatch.setattr(cluster_api, "HIDDEN_SECONDS", 0.01)
        assert await s.post("/topic/tombstone?topic=t&node=b2:5002") == 200
        await s.world.until(lambda: hidden_name(uid, 2) not in store.intents.all())

    run(story)


@pytest.mark.parametrize(
    "target", ["/topic/create?topic=t", "/topic/create?topic=t&partition_num=2", "/channel/create?topic=t&channel=mine"]
)
def test_a_topic_begins_with_the_channels_that_other_lookup_daemons_know(target: str) -> None:
    """Brokers say what theirs know; what nsqds registered here counts too."""

    async def story(s: Site) -> None:
        writers = [await s.register(f"t {name}", "elsewhere", 4150) for name in ("here", "e#ephemeral")]
        for uid, known in ((1, ["archive"]), (2, ["archive", "metrics"]), (3, ["unheard"])):
            s.world.nodes[uid].known_channels = known
        s.world.nodes[3].up = False
        assert await (s.post if target.startswith("/channel") else s.made)(target) == 200
        found = s.world.store.records.topic("t")
        assert found is not None
        assert {"archive", "here", "metrics"} == found.record.channels.channels.keys() - {"mine"}
        s.world.nodes[1].known_channels = ["late"]
        assert await s.post(target) == 200
        again = s.world.store.records.topic("t")
        assert again is not None and again.record.channels == found.record.channels
        for writer in writers:
            writer.close()

    run(story)


def test_the_daemon_is_ready_as_long_as_it_answers() -> None:
    async def story(s: Site) -> None:
        await s.world.until(lambda: s.daemon.controller is not None and s.daemon.controller.term is not None)
        assert await s.get("/healthz") == await s.get("/readyz") == b"OK"
        first, metadata = (await s.get("/readyz?verbose")).decode().split("\n")
        assert first == "OK" and "3 nodes, controller me:" in metadata

    run(story)


def test_a_daemon_is_ready_with_a_certificate_that_has_expired_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(s: Site) -> None:
        monkeypatch.setattr(measures, "certificates_end", {"a.pem": s.clock.wall_ns() / 1e9 + 60})
        assert b"certificates" not in await s.get("/readyz?verbose")
        s.clock.advance(60)
        said = await s.get("/readyz?verbose")
        assert b"\n[+] certificates: a.pem expired at 2023-11-14 22:14:20 UTC: replace" in said
        assert await s.get("/readyz") == b"OK"

    run(story)


def test_a_store_that_is_away_is_said_so() -> None:
    async def story(s: Site) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise Unavailable("etcd is away")

        s.world.store.records.topic = refuse
        status, answer = await s.ask("POST", "/topic/create?topic=t")
        assert status == 503 and answer["message"] == "METADATA_UNAVAILABLE" and "etcd" in answer["why"]

    run(story)


def test_what_is_known_is_shown_while_the_store_is_away() -> None:
    async def story(s: Site) -> None:
        s.world.create()
        await s.world.led()
        s.world.join_all()

        def refuse(*_: object, **__: object) -> None:
            raise Unavailable("etcd is away")

        s.world.store.intents.all = refuse
        state = await s.get("/controller")
        assert "etcd is away" in state["store_doubt"]
        assert len(state["nodes"]) == 3 and state["partitions"] == 1 and state["below_min_isr"] == []

    run(story)


def test_the_controller_shows_itself_and_takes_intents() -> None:
    async def story(s: Site) -> None:
        s.world.create()
        await s.world.led()
        s.world.join_all()
        state = await s.get("/controller")
        assert state["here"] and len(state["nodes"]) == 3 and state["leaderless"] == []
        assert await s.post("/cluster/decommission?node=n2") == 200
        (emptied,) = (await s.get("/controller"))["decommissions"]
        assert emptied["node"] == f"{2:016x}"
        (request,) = [i.record for n, i in s.world.store.intents.all().items() if n.startswith("decommissions/")]
        assert [2 in replicas for replicas in request["held"].values()] == [True], "what is to be brought back"
        assert await s.post("/cluster/recommission?node=n2") == 200
        assert await s.post("/cluster/recommission?node=n2") == 404
        assert await s.post("/cluster/decommission?node=nobody") == 404
        assert await s.post("/cluster/balance?paused=true") == 200
        assert (await s.get("/cluster/balance"))["paused"] is True
        assert await s.post("/cluster/balance?window=01:00-05:00") == 200
        shown = await s.get("/cluster/balance")
        assert (shown["paused"], shown["window"]) == (True, "01:00-05:00"), "one change keeps what the other one said"
        assert (await s.get("/controller"))["balance_window"] == "01:00-05:00"
        assert await s.post("/cluster/balance?paused=false") == 200
        assert (await s.get("/cluster/balance"))["window"] == "01:00-05:00"
        assert await s.post("/cluster/balance?window=5-1") == 400
        assert await s.post("/cluster/balance") == 400
        assert await s.post("/cluster/balance?window=always") == 200
        assert (await s.get("/cluster/balance"))["window"] is None
        assert await s.post("/cluster/spread?limit=0") == 400
        assert (await s.ask("POST", "/cluster/spread"))[1] == {"moves": []}

    run(story)


def test_the_page_of_a_cluster_has_its_records_and_what_the_leaders_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whoever only looks. A leader that runs and does not lead is named, and counted by the metrics."""
    monkeypatch.setattr(cluster_page, "FRESH_SECONDS", 0.0)

    async def story(s: Site) -> None:
        s.world.create()
        await s.world.led()
        s.world.join_all()
        view = s.world.store.watch.view()
        name = PartitionName("t", view.topics["t"].record.uid, 0)
        page = decode(await s.get("/cluster"))
        assert (page.cluster, page.stale, page.doubt, page.unreadable) == ("nsqha", "", "", ())
        assert page.metas[name] == s.world.meta() and page.nodes == view.nodes and page.controller == view.controller
        assert page.observed.of(name, s.world.meta()) == LeaderState(True)
        leader = s.world.nodes[s.world.meta().leader]
        leader.idle = True
        page = decode(await s.get("/cluster"))
        said = page.observed.of(name, s.world.meta())
        assert said is not None and not said.leads and page.observed.silent == {}
        leader.up = False
        page = decode(await s.get("/cluster"))
        assert page.observed.of(name, s.world.meta()) is None and list(page.observed.silent) == [leader.uid]

    run(story)


def test_a_leader_that_runs_and_does_not_lead_is_counted_as_none() -> None:
    async def story(s: Site) -> None:
        s.world.create()
        await s.world.led()
        s.world.join_all()
        term = s.daemon.controller.term  # type: ignore[union-attr]
        assert term is not None
        check, part = term.machine.state.leader_check, next(iter(term.machine.state.parts.values()))
        assert "nsqha_cluster_partitions_leaderless 0.0" in (await s.get("/metrics")).decode()
        declined = ReplicaReport(1, 1, declines="its clock is wrong", declined_epoch=part.meta.epoch)
        check.answered(part, part.meta.leader, declined, 0.0)
        assert "nsqha_cluster_partitions_leaderless 1.0" in (await s.get("/metrics")).decode()
        assert (await s.get("/controller"))["leaderless"] == [{"topic": "t", "partition": 0}]

    run(story)


def test_a_page_is_given_while_the_store_is_away() -> None:
    async def story(s: Site) -> None:
        s.world.create()
        await s.world.led()
        s.world.join_all()

        def refuse(*_: object, **__: object) -> None:
            raise Unavailable("etcd is away")

        s.world.store.intents.all = s.world.store.records.cluster = refuse
        page = decode(await s.get("/cluster"))
        assert page.stale == "etcd is away" and page.intents is None and len(page.nodes) == 3
        assert list(page.observed.answers) == [s.world.meta().leader], "the nodes are asked all the same"

    run(story)


def test_lookup_names_no_leader_that_others_cannot_reach_and_that_never_led() -> None:
    unused = PartitionMeta(leader=1, isr={1: 5}, replicas=(1, 2, 3), min_isr=2, nothing_acked=True)
    joining = NodeInfo(1, joining="n2 does not reach it")
    assert never_reached(unused, joining)
    assert not never_reached(unused, NodeInfo(1))
    assert not never_reached(replace(unused, nothing_acked=False), joining), "a leader that serves is named"


def test_a_move_is_carried_out() -> None:
    async def story(s: Site) -> None:
        s.world.store.records.create_topic("t", TopicSettings(replicas=1))
        await s.world.led()
        leader = s.world.meta().leader
        other = leader % 3 + 1
        assert await s.post(f"/cluster/move?topic=t&partition=0&replicas=n{leader},n{leader}") == 400
        assert await s.post(f"/cluster/move?topic=t&partition=1&replicas=n{other}") == 400
        node = s.world.nodes[other]
        node.session.update(replace(node.info, joining="n1 does not reach it"))
        status, answer = await s.ask("POST", f"/cluster/move?topic=t&partition=0&replicas=n{other}")
        assert status == 400 and answer["why"] == f"node n{other} has not joined: n1 does not reach it"
        shown = {node["name"]: node["joining"] for node in (await s.get("/controller"))["nodes"]}
        assert shown == {f"n{uid}": "n1 does not reach it" if uid == other else "" for uid in (1, 2, 3)}
        node.session.update(node.info)
        assert await s.post(f"/cluster/move?topic=t&partition=0&replicas=n{other}") == 200
        await s.world.until(lambda: len(s.world.meta().replicas) == 2)
        s.world.join_all()
        await s.world.until(lambda: s.world.meta().leader == other and s.world.meta().replicas == (other,))
        meta = s.world.meta()
        assert meta.isr == {other: 100 + other} and meta.min_isr == 1
        await s.world.until(lambda: not [name for name in s.world.store.intents.all() if name.startswith("moves/")])

    run(story)


def test_metrics_have_stable_names() -> None:
    async def story(s: Site) -> None:
        s.world.create()
        await s.world.led()
        daemon = s.daemon
        assert daemon.controller is not None
        counts = daemon.controller.counts
        await s.world.until(lambda: counts.elections.total() == 1)
        text = (await s.get("/metrics")).decode()
        assert 'nsqha_elections_total{why="no leader yet"} 1.0' in text
        assert "nsqha_controller 1.0" in text and "nsqha_election_seconds_count 1.0" in text
        assert "nsqha_cluster_partitions_below_min_isr 1.0" in text
        assert "nsqha_cluster_replicas_owed 0.0" in text
        page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
        for family in text_string_to_metric_families(text):
            assert family.documentation.endswith("."), family.name
            assert f"| `{family.name}" in page, f"{family.name} is not in docs/metrics.md"

    run(story)


def test_replicas_without_a_node_are_counted() -> None:
    async def story(s: Site) -> None:
        s.world.create(replicas=5)
        await s.world.led()
        assert "nsqha_cluster_replicas_owed 2.0" in (await s.get("/metrics")).decode()

    run(story)


def test_without_a_cluster_settings_are_not_taken_silently() -> None:
    async def main() -> None:
        daemon = Lookupd(LookupdOptions(tcp_address="127.0.0.1:0", http_address="127.0.0.1:0"))
        await daemon.start()
        try:
            alone = Site(None, daemon, None)  # type: ignore
            assert await alone.post("/topic/create?topic=t&partition_num=2") == 400
            assert await alone.post("/topic/create?topic=t") == 200
            assert (await alone.ask("GET", "/controller"))[0] == 404
        finally:
            await daemon.stop()

    uvloop.run(main())


def test_a_node_that_leaves_is_shown() -> None:
    async def story(s: Site) -> None:
        node = s.world.nodes[1]
        node.session.update(replace(node.info, leaving=True))
        assert [n["leaving"] for n in (await s.get("/controller"))["nodes"]] == [True, False, False]

    run(story)


def test_a_move_by_the_url_of_the_fork_is_carried_out() -> None:
    async def story(s: Site) -> None:
        s.world.store.records.create_topic("t", TopicSettings(replicas=1))
        await s.world.led()
        leader = s.world.meta().leader
        other = leader % 3 + 1
        url = f"/topic/partition/move?topic=t&partition=0&move_from=n{leader}&move_to=n{other}"
        assert await s.post(url) == 400, "the leader is moved only when that is said"
        assert await s.post(url.replace("partition=0", "partition=1") + "&move_leader=true") == 400
        assert await s.post(url.replace("topic=t", "topic=u") + "&move_leader=true") == 404
        assert await s.post(url.replace(f"move_to=n{other}", "move_to=n9") + "&move_leader=true") == 404
        assert await s.post(url + "&move_leader=true") == 200
        await s.world.until(lambda: len(s.world.meta().replicas) == 2)
        s.world.join_all()
        await s.world.until(lambda: s.world.meta().leader == other and s.world.meta().replicas == (other,))

    run(story)


@pytest.mark.parametrize(
    ("source", "target", "leader", "wanted"),
    [
        (1, 2, True, (2, 1, 3)),  # a follower takes over, nothing is moved
        (1, 4, True, (4, 2, 3)),
        (2, 4, False, (1, 4, 3)),
        (4, 2, False, "INVALID_ARG_MOVE_FROM"),
        (1, 4, False, "INVALID_ARG_MOVE_LEADER"),
        (2, 4, True, "INVALID_ARG_MOVE_LEADER"),
        (2, 3, False, "INVALID_ARG_MOVE_TO"),
        (1, 1, True, "INVALID_ARG_MOVE_TO"),
    ],
)
def test_what_a_move_of_the_fork_means(source: int, target: int, leader: bool, wanted: tuple[int, ...] | str) -> None:
    meta = PartitionMeta(leader=1, isr={1: 0, 2: 0, 3: 0}, replicas=(1, 2, 3))
    if isinstance(wanted, tuple):
        assert moved(meta, source, target, leader=leader) == wanted
    else:
        with pytest.raises(ApiError) as refused:
            moved(meta, source, target, leader=leader)
        assert (refused.value.status, refused.value.code) == (400, wanted)


def test_a_node_is_removed_and_daemons_are_listed_by_the_urls_of_the_fork() -> None:
    async def story(s: Site) -> None:
        assert await s.post("/cluster/node/remove?remove_node=n2") == 200
        assert [each["node"] for each in (await s.get("/controller"))["decommissions"]] == [f"{2:016x}"]
        assert await s.post("/cluster/node/remove?remove_node=n9") == 404
        found = await s.get("/listlookup")
        port = s.daemon.http_address.rpartition(":")[2]
        assert found["lookupdleader"] == found["lookupdnodes"][0]
        assert (found["lookupdleader"]["NodeIP"], found["lookupdleader"]["HttpPort"]) == ("me", port)

    run(story)


def test_a_topic_grows_and_changes_by_the_urls_of_the_fork() -> None:
    async def story(s: Site) -> None:
        assert await s.made("/topic/create?topic=t&replicator=1&syncdisk=1") == 200
        await s.world.led()
        assert await s.ask("POST", "/topic/partition/expand?topic=t&partition_num=3") == (200, b"")
        await s.world.until(lambda: all(s.world.meta("t", n).leader for n in range(3)))
        assert await s.post("/topic/partition/expand?topic=t&partition_num=3") == 200, "again is fine"
        assert await s.post("/topic/partition/expand?topic=t&partition_num=2") == 400, "only more"
        update = "/topic/meta/update?topic=t&replicator=3&syncdisk=2500&retention=2&upgradeext=false"
        assert await s.ask("POST", update) == (200, b"")
        found = s.world.store.records.topic("t")
        assert found is not None
        wanted = TopicSettings(sync="interval", retention_ms=2 * 86_400_000, partitions=3, replicas=3)
        assert found.record.settings == wanted
        assert await s.post("/topic/meta/update?topic=t&syncdisk=0&retention=0") == 200
        found = s.world.store.records.topic("t")
        assert found is not None and found.record.settings == TopicSettings(partitions=3, replicas=3)

    run(story)


@pytest.mark.parametrize(
    ("target", "status", "code"),
    [
        ("/topic/partition/expand?partition_num=2", 400, "MISSING_ARG_TOPIC"),
        ("/topic/partition/expand?topic=t", 400, "MISSING_ARG_TOPIC_PARTITION_NUM"),
        ("/topic/partition/expand?topic=t&partition_num=0", 400, "INVALID_ARG_TOPIC_PARTITION_NUM"),
        ("/topic/partition/expand?topic=u&partition_num=2", 404, "TOPIC_NOT_FOUND"),
        ("/topic/partition/expand?topic=e%23ephemeral&partition_num=2", 400, "INVALID_REQUEST"),
        ("/topic/meta/update?topic=t&replicator=16", 400, "INVALID_ARG_TOPIC_REPLICATOR"),
        ("/topic/meta/update?topic=t&syncdisk=x", 400, "INVALID_ARG_TOPIC_SYNC_DISK"),
        ("/topic/meta/update?topic=t&retention=-1", 400, "INVALID_ARG_TOPIC_RETENTION"),
        ("/topic/meta/update?topic=t&retention=1&upgradeext=true", 400, "INVALID_ARG_UPGRADEEXT"),
        ("/topic/meta/update?topic=u&retention=1", 404, "TOPIC_NOT_FOUND"),
    ],
)
def test_changes_by_the_urls_of_the_fork_that_can_not_be(target: str, status: int, code: str) -> None:
    async def story(s: Site) -> None:
        for name in ("t", "e#ephemeral"):
            s.world.store.records.create_topic(name, TopicSettings())
        got, answer = await s.ask("POST", target)
        assert (got, answer["message"]) == (status, code)
        found = s.world.store.records.topic("t")
        assert found is not None and found.record.settings == TopicSettings()

    run(story)


def test_parameters_of_the_fork_that_mean_nothing_here_are_taken() -> None:
    async def story(s: Site) -> None:
        assert await s.made("/topic/create?topic=t&partition_num=2&multipart=true&suggestload=3", "PUT") == 200
        await s.world.until(lambda: all(s.world.meta("t", n).leader for n in range(2)))
        assert sorted((await s.get("/lookup?topic=t&access=r&consistent=true"))["partitions"]) == ["0", "1"]

    run(story)


def test_each_role_at_each_route_of_a_cluster(tmp_path: Path) -> None:
    """What is asked for lacks what it needs, so nothing changes where it is allowed."""
    path = tmp_path / "access.toml"
    path.write_text("".join(entry(role, f"token-of-{role}", [role]) for role in GRANTED))
    path.chmod(0o600)
    wrong = []

    async def main() -> None:
        world, guard = World(3), Guard.of(str(path), ManualClock())
        options = LookupdOptions(tcp_address="127.0.0.1:0", http_address="127.0.0.1:0", broadcast_address="me")
        daemon = Lookupd(options, clock=ManualClock(), store=world.store, peers=world.peers, guard=guard)
        await daemon.start()
        for name, caller in product(LOOKUPD_HTTP, (*GRANTED, None)):
            method, target = name.split()
            reader, writer = await asyncio.open_connection(*daemon.http_address.rsplit(":", 1))
            shown = "" if caller is None else f"Authorization: Bearer token-of-{caller}\r\n"
            head = f"{method} {target}?topic=t&limit=x HTTP/1.1\r\nHost: x\r\n{shown}Connection: close\r\n\r\n"
            writer.write(head.encode())
            status = int((await reader.read()).split()[1])
            writer.close()
            may = granted("x", [] if caller is None else [caller]).may(LOOKUPD_HTTP[name], "t")
            refused = 401 if caller is None else 403
            if (status == refused) is may or (status in (404, 405) and target not in ("/lookup", "/topic/meta/update")):
                wrong.append((name, caller, status))
        routes = LookupdApi(daemon.registry, ManualClock(), daemon._cluster).routes()
        assert {*routes.names} == {*LOOKUPD_HTTP}
        await daemon.stop()

    uvloop.run(main())
    assert not wrong
