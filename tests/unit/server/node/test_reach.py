"""A node that registers tries its connections with the others, and says in its record which ones it lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from nsqha.election.model import JUST_REGISTERED, TRIED_SECONDS, Controller, NodeInfo
from nsqha.errors import Unavailable
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.node.cluster.reach.dialler import Dialler, ReachAnswers
from nsqha.server.node.cluster.reach.reach import AGAIN_SECONDS, Reach
from nsqha.server.peers.api import UNIMPLEMENTED, CallRefused, PeerIdentity
from nsqha.server.runtime.tasks import TaskGroup, log_failure
from tests.fakes.loop import VirtualLoop
from tests.fakes.peers import FakePeers, FakeStream

ME, A, B = 1, 2, 3
CLUSTER = 9


def node(uid: int) -> NodeInfo:
    return NodeInfo(
        uid, name=f"n{uid}", registration=uid * 10, grpc_address=f"n{uid}:4152", peer_address=f"n{uid}:4153"
    )


class Greeting(FakePeers):
    """Peers that greet on a stream, but for those at `deaf`."""

    def __init__(self, loop: Any) -> None:
        super().__init__(loop)
        self.deaf: set[str] = set()

    def stream(self, address: str, method: str, handler: Any) -> FakeStream:
        stream = super().stream(address, method, handler)
        if address in self.deaf:
            self._loop.call_soon(handler.on_closed, "refused")
        else:
            self._loop.call_soon(handler.on_message, pb.LiveMessage(node_uid=int(address[1]), registration=1))
        return stream


class JoiningNode:
    """This node, registered beside A and B."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.peers = Greeting(loop)
        self.peers.serves = self.serve
        self.why: dict[str, str] = {}  # what the others answer that were asked to reach this node
        self.info: NodeInfo | None = replace(node(ME), joining=JUST_REGISTERED)
        self.is_open = True
        self.nodes = {uid: node(uid) for uid in (ME, A, B)}
        self.controller: Controller | None = None
        self.updates: list[str] = []
        self.tries, self.away = 0, False  # changes of the record; etcd
        view = lambda: SimpleNamespace(nodes=self.nodes, controller=self.controller)  # noqa: E731
        dialler = Dialler(cast(Any, self.peers), node=ME, cluster_id=CLUSTER)
        self.answers = ReachAnswers(dialler, cast(Any, view))
        self.reach = Reach(self, cast(Any, view), dialler, TaskGroup(loop, log_failure).spawn)

    def serve(self, method: str, request: Any) -> Any:
        if method == "Status":
            return pb.StatusReply(node_uid=A if self.why.get("other") else ME)
        if "old" in self.why:
            raise CallRefused("it does not serve this method", UNIMPLEMENTED)
        return pb.ReachReply(why_not=self.why.get("reach", ""))

    async def update(self, **changes: Any) -> None:
        self.tries += 1
        if self.away:
            raise Unavailable("etcd is away")
        self.updates.append(changes["joining"])
        self.info = replace(cast(NodeInfo, self.info), **changes)

    async def looks(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            self.reach.look()
            await asyncio.sleep(0.1)


def story(told: Callable[[JoiningNode], Awaitable[None]]) -> None:
    async def run() -> None:
        await told(JoiningNode())

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


def test_a_node_that_is_connected_both_ways_has_joined_at_once():
    async def told(rig: JoiningNode) -> None:
        await rig.looks(0.1)
        assert rig.updates == [""] and rig.reach.joined.is_set() and not rig.reach.missing

    story(told)


def test_the_record_says_what_is_missing_and_later_that_nothing_is():
    async def told(rig: JoiningNode) -> None:
        rig.why["reach"] = "n1:4153: no connection within 1 s"
        await rig.looks(TRIED_SECONDS + 0.5)
        (said,) = rig.updates
        assert "n2 does not reach this node at n1:4153: no connection within 1 s" in said
        assert rig.reach.missing == said and not rig.reach.joined.is_set()
        rig.why.clear()
        await rig.looks(AGAIN_SECONDS[1])
        assert rig.updates[1:] == [""] and rig.reach.joined.is_set()

    story(told)


def test_a_broker_whose_port_refuses_this_node_is_the_side_that_is_named():
    async def told(rig: JoiningNode) -> None:
        rig.peers.deaf |= {"n2:4153", "n3:4153"}
        await rig.looks(TRIED_SECONDS + 0.5)
        assert "n2 is not reached from here at n2:4153: refused" in rig.reach.missing

    story(told)


def test_another_node_at_the_address_of_this_one_is_not_this_one():
    async def told(rig: JoiningNode) -> None:
        rig.nodes = {ME: node(ME)}
        rig.why["other"] = "yes"
        await rig.looks(TRIED_SECONDS + 0.5)
        assert "this node itself is not reached at n1:4152: another node answers there" in rig.reach.missing

    story(told)


def test_a_broker_of_an_older_build_counts_when_it_is_reached():
    async def told(rig: JoiningNode) -> None:
        rig.why["old"] = "yes"
        await rig.looks(0.1)
        assert not rig.reach.missing

    story(told)


def test_a_controller_that_is_named_is_waited_for():
    async def told(rig: JoiningNode) -> None:
        rig.controller = Controller("l1")
        await rig.looks(0.5)
        assert rig.reach.missing == "controller l1 has not connected to the peer port of this node"
        rig.reach.controller_came()
        await rig.looks(0.1)
        assert rig.updates == [""]
        calls = len(rig.peers.calls)
        await rig.looks(30.0)
        assert len(rig.peers.calls) == calls, "a node that has joined costs nothing"

    story(told)


def test_a_record_that_cannot_be_changed_is_tried_again_and_not_ten_times_a_second():
    async def told(node: JoiningNode) -> None:
        node.away = True
        await node.looks(3.0)
        assert 2 <= node.tries <= 4 and node.info is not None and node.info.joining
        node.away = False
        await node.looks(2.0)
        assert node.updates == [""]

    story(told)


def test_only_a_registered_life_is_reached_and_where_it_registered():
    async def told(rig: JoiningNode) -> None:
        request = pb.ReachRequest(cluster_id=CLUSTER, node_uid=A, registration=20)

        async def refusal(changed: pb.ReachRequest) -> str:
            try:
                await rig.answers.reach(PeerIdentity(), changed)
            except Unavailable as error:
                return str(error)
            return ""

        assert "is not registered here yet" in await refusal(pb.ReachRequest(cluster_id=CLUSTER, node_uid=8))
        assert "is not registered here yet" in await refusal(
            pb.ReachRequest(cluster_id=CLUSTER, node_uid=A, registration=19)
        )
        assert "of cluster" in await refusal(pb.ReachRequest(cluster_id=1, node_uid=A, registration=20))
        rig.peers.deaf.add("n2:4153")
        reply = await rig.answers.reach(PeerIdentity(), request)
        assert reply.why_not == "n2:4153: refused"

    story(told)
