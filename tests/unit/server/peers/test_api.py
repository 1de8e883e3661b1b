"""What `nsqha.server.peers.api` promises, for gRPC and for the simulated network alike."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nsqha.errors import (
    Conflict,
    LogCorrupt,
    NotFound,
    NsqhaError,
    OutcomeUnknown,
    Poisoned,
    StorageError,
    Unavailable,
)
from nsqha.options import BODY_BYTES_LIMIT
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers.api import MESSAGE_BYTES_MAX, PeerIdentity, PeerStream, error_of, kind_and_text, methods_of
from tests.unit.server.peer_rig import SERVICES, Acceptor, GrpcWorld, Recorder, SimWorld, World, push, reply


@pytest.fixture(params=["grpc", "sim-0", "sim-1", "sim-2"])
def world(request: pytest.FixtureRequest) -> World:
    kind, _, seed = request.param.partition("-")
    return GrpcWorld() if kind == "grpc" else SimWorld(int(seed))


def test_messages_arrive_in_order_both_ways(world: World) -> None:
    async def scenario(world: World) -> None:
        acceptor = Acceptor(lambda stream: Recorder(lambda m: stream.send(reply(m.hello.registration + 1000))))
        world.server.on_stream("Push", acceptor)
        handler = Recorder()
        stream = world.peers.stream(world.peer_address, "Push", handler)
        for n in range(300):
            stream.send(push(n, size=n * 7 % 5000))
        assert stream.pending > 0
        await handler.until(lambda: len(handler.messages) == 300)
        assert acceptor.accepted[0].numbers == list(range(300))
        assert handler.numbers == list(range(1000, 1300))
        assert stream.pending == 0
        assert len(acceptor.accepted[0].messages[299].appends[0].data) == 299 * 7 % 5000
        assert not handler.closed

    world.run(scenario)


def test_a_ping_is_answered_by_the_other_side_and_by_no_handler(world: World) -> None:
    async def scenario(world: World) -> None:
        acceptor = Acceptor(lambda stream: Recorder(lambda message: stream.send(reply(1))))
        world.server.on_stream("Push", acceptor)
        handler = Recorder()
        stream = world.peers.stream(world.peer_address, "Push", handler)
        stream.send(push(1))
        await handler.until(lambda: handler.messages)
        accepted = (await acceptor.next()).stream
        assert accepted is not None
        for end in (stream, accepted):
            await asyncio.sleep(0.1)
            before = end.heard
            end.ping()
            for _ in range(500):
                if end.heard > before:
                    break
                await asyncio.sleep(0.01)
            assert end.heard > before > 0
        assert len(handler.messages) == 1
        stream.close()
        await handler.end()
        stream.ping()

    world.run(scenario)


def test_the_called_side_may_speak_first(world: World) -> None:
    async def scenario(world: World) -> None:
        def greet(stream: PeerStream) -> Recorder:
            stream.send(reply(1))
            return Recorder()

        world.server.on_stream("Push", Acceptor(greet))
        handler = Recorder()
        world.peers.stream(world.peer_address, "Push", handler)
        await handler.until(lambda: handler.messages)
        assert handler.numbers == [1]

    world.run(scenario)


def test_a_message_is_sent_as_it_was(world: World) -> None:
    async def scenario(world: World) -> None:
        acceptor = Acceptor()
        world.server.on_stream("Push", acceptor)
        stream = world.peers.stream(world.peer_address, "Push", Recorder())
        message = push(1)
        stream.send(message)
        message.hello.registration = 2
        accepted = await acceptor.next()
        await accepted.until(lambda: accepted.messages)
        assert accepted.numbers == [1]
        assert accepted.messages[0] is not message

    world.run(scenario)


def test_an_end_is_asked_for_messages_when_nothing_is_pending(world: World) -> None:
    async def scenario(world: World) -> None:
        world.server.on_stream("Push", acceptor := Acceptor())
        stream = world.peers.stream(world.peer_address, "Push", Recorder())
        waiting, asked = [2, 3, 4], []

        def give() -> Any:
            asked.append(stream.pending)
            if not waiting:
                return None
            stream.pull(give)
            return push(waiting.pop(0))

        for n in (0, 1):
            stream.send(push(n))
        stream.pull(give)
        stream.pull(give)
        assert not asked, "never from within"
        accepted = await acceptor.next()
        await accepted.until(lambda: len(accepted.messages) == 5)
        await asyncio.sleep(0.05)
        assert accepted.numbers == [0, 1, 2, 3, 4]
        assert asked == [0, 0, 0, 0]
        waiting.append(5)
        stream.pull(give)
        await accepted.until(lambda: len(accepted.messages) == 6)
        stream.pull(give)
        stream.close()
        stream.pull(give)
        await accepted.end()
        assert len(asked) == 6

    world.run(scenario)


def test_an_end_that_fails_when_it_is_asked_ends_its_stream(world: World) -> None:
    async def scenario(world: World) -> None:
        def give() -> Any:
            raise LogCorrupt("can not be read")

        world.server.on_stream("Push", Acceptor(lambda stream: Recorder(lambda m: stream.send(reply(1)))))
        failing, other = Recorder(), Recorder()
        world.peers.stream(world.peer_address, "Push", failing).pull(give)
        assert "can not be read" in await failing.end()
        world.peers.stream(world.peer_address, "Push", other).send(push(1))
        await other.until(lambda: other.messages)

    world.run(scenario)


def test_a_message_of_another_type_is_not_sent(world: World) -> None:
    async def scenario(world: World) -> None:
        acceptor = Acceptor()
        world.server.on_stream("Push", acceptor)
        stream = world.peers.stream(world.peer_address, "Push", Recorder())
        with pytest.raises(TypeError, match="PushReply is not PushMessage"):
            stream.send(reply(1))
        with pytest.raises(TypeError):
            await world.peers.call(world.address, "Status", push(1), timeout=1)
        with pytest.raises(TypeError, match="is a stream"):
            await world.peers.call(world.address, "Push", push(1), timeout=1)
        with pytest.raises(TypeError, match="is a call"):
            world.peers.stream(world.peer_address, "Status", Recorder())
        stream.send(push(1))
        accepted = await acceptor.next()
        await accepted.until(lambda: accepted.messages)

    world.run(scenario)


def test_closing_ends_both_directions_once(world: World) -> None:
    async def scenario(world: World) -> None:
        acceptor = Acceptor()
        world.server.on_stream("Push", acceptor)
        handler = Recorder()
        stream = world.peers.stream(world.peer_address, "Push", handler)
        stream.send(push(1))
        accepted = await acceptor.next()
        await accepted.until(lambda: accepted.messages)
        stream.close()
        assert handler.closed == [], "the handler was called from within close()"
        stream.send(push(2))
        assert stream.pending == 0
        stream.close()
        await handler.end()
        await accepted.end()
        assert accepted.stream is not None
        accepted.stream.send(reply(1))
        await asyncio.sleep(0.02)
        assert len(handler.closed) == len(accepted.closed) == 1
        assert handler.messages == []
        assert accepted.numbers == [1]

    world.run(scenario)


def test_the_side_that_accepted_can_say_why(world: World) -> None:
    async def scenario(world: World) -> None:
        def refuse(stream: PeerStream) -> Recorder:
            return Recorder(lambda _: stream.close("another\ncluster"))

        acceptor = Acceptor(refuse)
        world.server.on_stream("Push", acceptor)
        handler = Recorder()
        world.peers.stream(world.peer_address, "Push", handler).send(push(1))
        assert "another cluster" in " ".join((await handler.end()).split())
        await acceptor.accepted[0].end()

    world.run(scenario)


def test_a_stream_can_be_refused_when_it_comes(world: World) -> None:
    async def scenario(world: World) -> None:
        def refuse(stream: PeerStream) -> Recorder:
            assert isinstance(stream.peer, PeerIdentity)
            assert stream.peer.may_be(7)
            raise Unavailable("not a node of ours")

        world.server.on_stream("Push", refuse)
        handler = Recorder()
        world.peers.stream(world.peer_address, "Push", handler)
        assert "not a node of ours" in await handler.end()

    world.run(scenario)


def test_a_stream_closed_while_it_is_accepted_tells_both(world: World) -> None:
    async def scenario(world: World) -> None:
        def close(stream: PeerStream) -> Recorder:
            stream.close("full")
            return Recorder()

        acceptor = Acceptor(close)
        world.server.on_stream("Push", acceptor)
        handler = Recorder()
        world.peers.stream(world.peer_address, "Push", handler)
        assert "full" in await handler.end()
        assert await acceptor.accepted[0].end() == "full"

    world.run(scenario)


@pytest.mark.parametrize("side", ["caller", "called"])
def test_a_handler_that_fails_ends_its_stream_only(world: World, side: str) -> None:
    def fail(_: Any) -> None:
        raise KeyError("oops")

    async def scenario(world: World) -> None:
        acceptor = Acceptor(lambda stream: Recorder(fail if side == "called" else lambda m: stream.send(reply(1))))
        world.server.on_stream("Push", acceptor)
        calm = Recorder()
        other = world.peers.stream(world.peer_address, "Push", calm)
        handler = Recorder(fail if side == "caller" else None)
        world.peers.stream(world.peer_address, "Push", handler).send(push(1))
        why = await handler.end()
        accepted = await acceptor.next(0)
        failed = next(a for a in [accepted, await acceptor.next(1)] if a.messages)
        await failed.end()
        if side == "called":
            assert "KeyError" in why
            assert "\n" not in why
        assert not calm.closed
        other.close()

    world.run(scenario)


def test_calls_are_answered(world: World) -> None:
    async def scenario(world: World) -> None:
        async def status(peer: PeerIdentity, request: Any) -> Any:
            await asyncio.sleep(0.01 if request.cluster_id % 2 else 0)
            return pb.StatusReply(node_uid=request.cluster_id)

        world.server.on_call("Status", status)
        calls = [
            world.peers.call(world.address, "Status", pb.StatusRequest(cluster_id=n), timeout=5) for n in range(20)
        ]
        assert [answer.node_uid for answer in await asyncio.gather(*calls)] == list(range(20))

    world.run(scenario)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotFound("no such partition"), NotFound),
        (Conflict("twice"), Conflict),
        (Unavailable("busy"), Unavailable),
        (OutcomeUnknown("perhaps"), OutcomeUnknown),
        (StorageError("full"), StorageError),
        (Poisoned("fsync"), Poisoned),
        (LogCorrupt("lies"), LogCorrupt),
        (ValueError("no"), ValueError),
        (KeyError("a bug"), OutcomeUnknown),
        (NsqhaError("unnamed"), OutcomeUnknown),
    ],
)
def test_errors_of_calls_keep_their_meaning(world: World, error: Exception, expected: type[Exception]) -> None:
    async def scenario(world: World) -> None:
        async def answer(peer: PeerIdentity, request: Any) -> Any:
            raise error

        world.server.on_call("Status", answer)
        with pytest.raises(expected) as caught:
            await world.peers.call(world.address, "Status", pb.StatusRequest(), timeout=5)
        assert type(caught.value) is expected
        assert error.args[0] in str(caught.value)
        assert "Status" in str(caught.value)

    world.run(scenario)


def test_a_call_that_is_not_answered_in_time_may_have_been_carried_out(world: World) -> None:
    async def scenario(world: World) -> None:
        called, cancelled = asyncio.Event(), asyncio.Event()

        async def answer(peer: PeerIdentity, request: Any) -> Any:
            called.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        world.server.on_call("Status", answer)
        async with asyncio.timeout(20):
            while not called.is_set():  # beside load one may be over before it has arrived
                with pytest.raises(OutcomeUnknown):
                    await world.peers.call(world.address, "Status", pb.StatusRequest(), timeout=0.2)
            await cancelled.wait()

    world.run(scenario)


def test_nobody_there(world: World) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(Unavailable, match="nothing was sent"):
            await world.peers.call(world.nowhere, "Status", pb.StatusRequest(), timeout=5)
        handler = Recorder()
        stream = world.peers.stream(world.nowhere, "Push", handler)
        stream.send(push(1))
        assert handler.closed == []
        assert "refused" in await handler.end()
        assert stream.pending == 0

    world.run(scenario)


def test_what_is_not_served_yet_is_unavailable(world: World) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(Unavailable, match="not served yet"):
            await world.peers.call(world.address, "Status", pb.StatusRequest(), timeout=5)
        handler = Recorder()
        world.peers.stream(world.peer_address, "Push", handler)
        assert "not served yet" in await handler.end()

    world.run(scenario)


def test_a_node_that_stops_ends_its_streams(world: World) -> None:
    async def scenario(world: World) -> None:
        acceptor = Acceptor()
        world.server.on_stream("Push", acceptor)
        handler = Recorder()
        world.peers.stream(world.peer_address, "Push", handler)
        accepted = await acceptor.next()
        world.server.close()
        assert "stopping" in await handler.end()
        await accepted.end()

    world.run(scenario)


def test_a_caller_that_stops_ends_its_streams_and_calls(world: World) -> None:
    async def scenario(world: World) -> None:
        asked = asyncio.Event()

        async def answer(peer: PeerIdentity, request: Any) -> Any:
            asked.set()
            await asyncio.sleep(3600)

        acceptor = Acceptor()
        world.server.on_stream("Push", acceptor)
        world.server.on_call("Status", answer)
        handler = Recorder()
        world.peers.stream(world.peer_address, "Push", handler)
        accepted = await acceptor.next()
        call = asyncio.ensure_future(world.peers.call(world.address, "Status", pb.StatusRequest(), timeout=5))
        await asked.wait()
        await world.peers.close()
        await handler.end()
        await accepted.end()
        with pytest.raises(OutcomeUnknown):
            await call
        with pytest.raises(Unavailable):
            await world.peers.call(world.address, "Status", pb.StatusRequest(), timeout=5)
        with pytest.raises(Unavailable):
            world.peers.stream(world.peer_address, "Push", Recorder())

    world.run(scenario)


def test_one_loop_after_another(world: World) -> None:
    async def scenario(world: World) -> None:
        acceptor = Acceptor(lambda stream: Recorder(lambda _: stream.send(reply(2))))
        world.server.on_stream("Push", acceptor)
        handler = Recorder()
        world.peers.stream(world.peer_address, "Push", handler).send(push(1))
        await handler.until(lambda: handler.messages)

    for _ in range(3):
        world.run(scenario)


# ---- without a network


def test_who_may_speak_for_whom() -> None:
    assert PeerIdentity("a").may_be(1)
    by_uid = PeerIdentity("a", 1, ("n1", "n2"), verified=True)
    assert by_uid.may_be(1)
    assert not by_uid.may_be(2, "n1"), "a certificate with a uid speaks for no other, whatever its names"
    by_name = PeerIdentity("a", 0, ("n1", "n2"), verified=True)
    assert by_name.name == "n1"
    assert by_name.may_be(5, "n2")
    assert not by_name.may_be(5, "n3")
    assert not by_name.may_be(0, "")
    assert not by_name.may_be(5)


def test_the_largest_message_fits_the_largest_batch_that_flags_allow() -> None:
    """An /mpub of lines becomes one batch, its smallest messages a byte and a newline each."""
    frame = 4 + 4 + 8 + 2 + 16 + 1
    events = 16 << 20
    assert MESSAGE_BYTES_MAX < 1 << 31, "gRPC's sizes are 32 bits, signed"
    assert (BODY_BYTES_LIMIT // 2 + 1) * frame + events < MESSAGE_BYTES_MAX


def test_an_error_of_a_newer_node_is_an_unknown_outcome() -> None:
    assert isinstance(error_of("SomethingNew", "text"), OutcomeUnknown)
    kind, text = kind_and_text(NotFound("a\nb" + "c" * 10_000))
    assert (kind, text[:4]) == ("NotFound", "a bc")
    assert len(text) <= 500


def test_method_names_are_unique() -> None:
    with pytest.raises(TypeError, match="must differ"):
        methods_of([*SERVICES, *SERVICES])
