"""What the simulated network does to streams and calls when it is told to."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from nsqha.errors import OutcomeUnknown, Unavailable
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers.api import PeerIdentity
from tests.fakes.loop import VirtualLoop
from tests.sim.net import Network
from tests.sim.peers import SimPeers
from tests.sim.wire import CONNECT_SECONDS, PING_SECONDS
from tests.unit.server.peer_rig import SERVICES, Acceptor, Recorder, SimWorld, push, reply


async def connected(world: Any) -> tuple[Recorder, Any, Recorder]:
    """A stream over which one message went: the caller's handler and end, and the handler that accepted it."""
    acceptor = Acceptor()
    world.server.on_stream("Push", acceptor)
    handler = Recorder()
    stream = world.peers.stream("b", "Push", handler)
    stream.send(push(0))
    accepted = await acceptor.next()
    await accepted.until(lambda: accepted.messages)
    return handler, stream, accepted


@pytest.mark.parametrize("both", [True, False])
def test_a_partition_holds_messages_until_it_is_healed(both: bool) -> None:
    async def scenario(world: Any) -> None:
        handler, stream, accepted = await connected(world)
        world.net.partition("a", "b", both=both)
        stream.send(push(1))
        assert accepted.stream is not None
        accepted.stream.send(reply(7))
        await asyncio.sleep(PING_SECONDS / 3)
        assert accepted.numbers == [0]
        assert handler.numbers == ([] if both else [7]), "one way only"
        stream.send(push(2))
        world.net.heal("a", "b")
        await accepted.until(lambda: len(accepted.messages) == 3)
        await handler.until(lambda: handler.messages)
        assert accepted.numbers == [0, 1, 2]
        assert not handler.closed
        assert not accepted.closed

    SimWorld(1).run(scenario)


def test_a_lasting_partition_ends_streams_at_both_ends() -> None:
    async def scenario(world: Any) -> None:
        handler, _, accepted = await connected(world)
        world.net.partition("a", "b")
        await asyncio.sleep(1)
        world.net.heal("a", "b")  # this one did not last
        await asyncio.sleep(0)
        world.net.partition("a", "b")
        start = asyncio.get_running_loop().time()
        await handler.end()
        await accepted.end()
        assert PING_SECONDS / 2 <= asyncio.get_running_loop().time() - start <= PING_SECONDS
        assert handler.closed == accepted.closed == ["ping timeout"]
        again = Recorder()
        start = asyncio.get_running_loop().time()
        world.peers.stream("b", "Push", again)
        with pytest.raises(Unavailable, match="nothing was sent"):
            await world.peers.call("b", "Status", pb.StatusRequest(), timeout=5)
        await again.end()
        assert asyncio.get_running_loop().time() - start == pytest.approx(CONNECT_SECONDS)

    SimWorld(2).run(scenario)


def test_what_is_under_way_when_a_stream_is_cut_arrives_up_to_some_message() -> None:
    arrived: set[int] = set()

    async def scenario(world: Any) -> None:
        handler, stream, accepted = await connected(world)
        for n in range(1, 6):
            stream.send(push(n))
        assert world.net.cut("a", "b") == 1
        await handler.end()
        await accepted.end()
        assert accepted.numbers == list(range(len(accepted.messages)))
        arrived.add(len(accepted.messages))

    for seed in range(60):
        SimWorld(seed).run(scenario)
    assert arrived == {1, 2, 3, 4, 5, 6}, "every outcome is possible"


def test_a_crashed_process_says_nothing_more_and_others_notice_at_once() -> None:
    async def scenario(world: Any) -> None:
        handler, stream, accepted = await connected(world)
        running = asyncio.Event()

        async def answer(peer: PeerIdentity, request: Any) -> Any:
            running.set()
            await asyncio.sleep(3600)

        world.server.on_call("Status", answer)
        call = asyncio.ensure_future(world.peers.call("b", "Status", pb.StatusRequest(), timeout=5))
        await running.wait()
        start = asyncio.get_running_loop().time()
        world.net.crash("b")
        await handler.end()
        with pytest.raises(OutcomeUnknown):
            await call
        assert asyncio.get_running_loop().time() - start < 0.01
        stream.send(push(1))
        await asyncio.sleep(1)
        assert accepted.closed == []
        assert accepted.numbers == [0]
        with pytest.raises(Unavailable):
            await world.peers.call("b", "Status", pb.StatusRequest(), timeout=5)
        world.server = world.net.server("b")  # the next process
        await connected(world)

    SimWorld(3).run(scenario)


def test_a_machine_that_is_gone_is_noticed_by_its_silence() -> None:
    async def scenario(world: Any) -> None:
        handler, _, accepted = await connected(world)
        start = asyncio.get_running_loop().time()
        world.net.crash("b", silent=True)
        await handler.end()
        assert asyncio.get_running_loop().time() - start >= PING_SECONDS / 2
        assert accepted.closed == []

    SimWorld(4).run(scenario)


def test_a_slow_link_is_late_and_still_in_order() -> None:
    async def scenario(world: Any) -> None:
        _, stream, accepted = await connected(world)
        world.net.slow("a", "b", 0.5)
        stream.send(push(1))
        world.net.slow("a", "b", 0.0)
        stream.send(push(2))
        start = asyncio.get_running_loop().time()
        await accepted.until(lambda: len(accepted.messages) == 3)
        assert accepted.numbers == [0, 1, 2]
        assert asyncio.get_running_loop().time() - start >= 0.5

    SimWorld(5).run(scenario)


def test_pending_is_what_the_window_does_not_take() -> None:
    async def scenario(world: Any) -> None:
        _, stream, accepted = await connected(world)
        world.net.partition("a", "b")
        for n in range(1, 11):
            stream.send(push(n, size=1000))
        assert stream.pending == 7
        world.net.heal("a", "b")
        await accepted.until(lambda: len(accepted.messages) == 11)
        assert stream.pending == 0

    SimWorld(6, window_bytes=3500).run(scenario)


def test_a_request_that_arrives_late_may_be_carried_out_for_nobody() -> None:
    carried_out: set[bool] = set()

    async def scenario(world: Any) -> None:
        asked: list[int] = []

        async def answer(peer: PeerIdentity, request: Any) -> Any:
            asked.append(1)
            return pb.StatusReply()

        world.server.on_call("Status", answer)
        world.net.slow("a", "b", 0.2)
        call = asyncio.ensure_future(world.peers.call("b", "Status", pb.StatusRequest(), timeout=0.5))
        await asyncio.sleep(0.3)  # connected, and the request is under way
        world.net.partition("a", "b", both=False)
        with pytest.raises(OutcomeUnknown):
            await call
        world.net.heal("a", "b")
        await asyncio.sleep(1)
        carried_out.add(bool(asked))

    for seed in range(20):
        SimWorld(seed).run(scenario)
    assert carried_out == {False, True}


def test_the_same_seed_is_the_same_history() -> None:
    def history(seed: int) -> list[tuple[float, str, int]]:
        events: list[tuple[float, str, int]] = []

        async def scenario(world: Any) -> None:
            loop = asyncio.get_running_loop()
            world.server.on_stream(
                "Push", lambda _: Recorder(lambda m: events.append((loop.time(), "got", m.hello.registration)))
            )
            streams = [world.peers.stream("b", "Push", Recorder()) for _ in range(5)]
            for n in range(50):
                streams[n % 5].send(push(n))
                await asyncio.sleep(0.0001)
            world.net.cut("a", "b")
            await asyncio.sleep(1)

        SimWorld(seed).run(scenario)
        return events

    assert history(7) == history(7)
    assert history(7) != history(8)


def test_identities_are_what_the_certificate_says() -> None:
    async def scenario(world: Any) -> None:
        forged = PeerIdentity("a", 7, verified=True)
        peers: SimPeers = world.net.peers("a", forged)
        acceptor = Acceptor()
        world.server.on_stream("Push", acceptor)
        peers.stream("b", "Push", Recorder())
        accepted = await acceptor.next()
        assert accepted.stream is not None
        assert accepted.stream.peer == forged
        await peers.close()

    SimWorld(1).run(scenario)


def test_random_faults_leave_no_stream_half_open() -> None:
    """Whatever happened: after all is healed, both ends of every stream are open, or both have ended."""

    async def scenario(world: Any) -> None:
        net: Network = world.net
        rng = random.Random(world.seed)
        acceptor = Acceptor()
        world.server.on_stream("Push", acceptor)
        callers: list[Recorder] = []
        for n in range(40):
            handler = Recorder()
            handler.stream = world.peers.stream("b", "Push", handler)
            handler.stream.send(push(n))
            callers.append(handler)
            await asyncio.sleep(rng.uniform(0, 0.5))
            chosen = rng.choice(callers)
            match rng.randrange(7):
                case 0:
                    net.partition("a", "b", both=rng.random() < 0.5)
                case 1:
                    net.partition("b", "a", both=False)
                case 2 | 3:
                    net.heal_all()
                case 4:
                    net.cut("a", "b")
                case 5 if chosen.stream is not None:
                    chosen.stream.close()
                case _:
                    net.slow("a", "b", rng.uniform(0, 2))
        net.heal_all()
        await asyncio.sleep(3 * PING_SECONDS)
        for handler in callers:
            assert len(handler.closed) <= 1
        by_number = {accepted.numbers[0]: accepted for accepted in acceptor.accepted if accepted.messages}
        for n, handler in enumerate(callers):
            if not handler.closed:
                assert not by_number[n].closed
        for n, accepted in by_number.items():
            assert len(accepted.closed) == len(callers[n].closed)

    for seed in range(30):
        SimWorld(seed).run(scenario)


def test_the_loop_of_these_tests_never_sleeps() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(asyncio.sleep(1e6))
        assert runner.get_loop().time() >= 1e6
    assert SERVICES
