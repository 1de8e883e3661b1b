"""What callers rely on of the other nodes: over gRPC, over the simulated network, and where a test plays them.

What the two ends of a stream promise each other is in tests/unit/server/peers/test_api.py.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from nsqha.errors import NotFound, OutcomeUnknown, Unavailable
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers import api
from nsqha.server.peers.calls import GrpcPeers
from nsqha.server.peers.http2_stream import Http2Stream
from tests.fakes.loop import VirtualLoop
from tests.fakes.peers import FakePeers, FakeStream
from tests.unit.server.peer_rig import Acceptor, GrpcWorld, Recorder, SimWorld, World, push

REQUEST = pb.StatusRequest(cluster_id=7)


class PlayedServer:
    """The other side, which `FakePeers` leaves to the test."""

    def __init__(self, peers: FakePeers) -> None:
        self._answers: dict[str, Any] = {}
        peers.serves = lambda method, request: self._answers[method](None, request)

    def on_call(self, method: str, answer: Any) -> None:
        self._answers[method] = answer

    def on_stream(self, method: str, accept: Any) -> None: ...


class PlayedWorld(World):
    """One node, and the test in the place of the other."""

    nowhere = "nowhere"
    address = peer_address = "b"

    def runner(self) -> asyncio.Runner:
        return asyncio.Runner(loop_factory=VirtualLoop)

    async def start(self) -> None:
        self.peers = FakePeers(asyncio.get_running_loop())
        self.peers.away.add(self.nowhere)
        self.server = PlayedServer(self.peers)

    async def stop(self) -> None:
        await self.peers.close()


@pytest.fixture(params=[GrpcWorld, lambda: SimWorld(1), PlayedWorld], ids=["grpc", "simulated", "played"])
def world(request: pytest.FixtureRequest) -> World:
    found: World = request.param()
    return found


def described(method: Any) -> Any:
    parameters = inspect.signature(method).parameters.values()
    return inspect.iscoroutinefunction(method), [(p.name, p.kind, p.default) for p in parameters]


@pytest.mark.parametrize(
    ("protocol", "kinds"), [(api.Peers, (GrpcPeers, FakePeers)), (api.PeerStream, (Http2Stream, FakeStream))]
)
def test_the_fake_has_the_methods_of_the_real_thing(protocol: Any, kinds: tuple[Any, ...]) -> None:
    names = [name for name, found in vars(protocol).items() if inspect.isfunction(found) and not name.startswith("_")]
    assert len(names) >= 3
    for name in names:
        for kind in kinds:
            assert described(getattr(kind, name)) == described(getattr(protocol, name)), (kind, name)


def test_a_call_brings_the_answer_to_its_request(world: World) -> None:
    async def scenario(world: World) -> None:
        seen: list[int] = []

        async def answer(peer: Any, request: Any) -> pb.StatusReply:
            seen.append(request.cluster_id)
            return pb.StatusReply(node_uid=5)

        world.server.on_call("Status", answer)
        found = await world.peers.call(world.address, "Status", REQUEST, timeout=10)
        assert seen == [7] and found == pb.StatusReply(node_uid=5)

    world.run(scenario)


def test_where_no_node_answers_a_call_was_not_carried_out(world: World) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(Unavailable):
            await world.peers.call(world.nowhere, "Status", REQUEST, timeout=5)

    world.run(scenario)


@pytest.mark.parametrize("error", [NotFound("there is no topic t"), ValueError("that is no name")])
def test_the_error_of_the_other_side_is_the_error_of_the_call(world: World, error: Exception) -> None:
    async def scenario(world: World) -> None:
        async def answer(peer: Any, request: Any) -> pb.StatusReply:
            raise error

        world.server.on_call("Status", answer)
        with pytest.raises(type(error), match=str(error)):
            await world.peers.call(world.address, "Status", REQUEST, timeout=10)

    world.run(scenario)


def test_a_call_without_an_answer_in_time_may_have_been_carried_out(world: World) -> None:
    async def scenario(world: World) -> None:
        slow = False

        async def answer(peer: Any, request: Any) -> pb.StatusReply:
            if slow:
                await asyncio.sleep(60)
            return pb.StatusReply()

        world.server.on_call("Status", answer)
        await world.peers.call(world.address, "Status", REQUEST, timeout=60)  # or it may be late to connect
        slow = True
        with pytest.raises(OutcomeUnknown):
            await world.peers.call(world.address, "Status", REQUEST, timeout=1)

    world.run(scenario)


class Received:
    """What the other side of a stream got, in each of the worlds."""

    def __init__(self, world: World) -> None:
        self.acceptor = Acceptor()
        self._world = world
        world.server.on_stream("Push", self.acceptor)

    async def numbers(self, count: int) -> list[int]:
        """Of the messages, after so many have come."""
        if isinstance(self._world, PlayedWorld):
            (stream,) = self._world.peers.streams
            await asyncio.sleep(0.01)
            stream.room()
            return [message.hello.registration for message in stream.sent]
        accepted = await self.acceptor.next()
        await accepted.until(lambda: len(accepted.messages) >= count)
        await asyncio.sleep(0.05)
        return accepted.numbers


def test_a_message_is_sent_as_it_is_and_what_is_pulled_comes_behind_it(world: World) -> None:
    async def scenario(world: World) -> None:
        received = Received(world)
        stream = world.peers.stream(world.peer_address, "Push", Recorder())
        asked: list[int] = []

        def give() -> Any:
            asked.append(1)
            return push(3) if len(asked) == 1 else None

        message = push(1)
        stream.send(message)
        message.hello.registration = 9
        stream.send(push(2))
        stream.pull(give)
        stream.pull(give)
        assert asked == [], "never from within"
        assert await received.numbers(3) == [1, 2, 3]
        assert asked == [1], "once, however often it is called"
        stream.close()

    world.run(scenario)


def test_the_end_is_told_once_and_later_and_nothing_is_sent_after_it(world: World) -> None:
    async def scenario(world: World) -> None:
        received = Received(world)
        handler = Recorder()
        stream = world.peers.stream(world.peer_address, "Push", handler)
        stream.send(push(1))
        assert await received.numbers(1) == [1]
        asked: list[int] = []
        stream.close("enough")
        assert handler.closed == [], "never from within"
        stream.close()
        stream.send(push(2))
        stream.pull(lambda: asked.append(1))
        await handler.end()
        assert await received.numbers(1) == [1]
        assert len(handler.closed) == 1 and asked == [] and stream.pending == 0

    world.run(scenario)


def test_a_call_that_is_held_is_answered_when_it_is_let_go() -> None:
    async def scenario(world: World) -> None:
        peers = world.peers
        peers.serves = lambda method, request: pb.StatusReply(node_uid=5)
        peers.gate.clear()
        call = asyncio.ensure_future(peers.call("b", "Status", REQUEST, timeout=10))
        await asyncio.sleep(1)
        assert not call.done() and peers.calls == ["Status"]
        peers.gate.set()
        assert (await call).node_uid == 5

    PlayedWorld().run(scenario)
