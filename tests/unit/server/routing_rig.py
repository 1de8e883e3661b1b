"""Nodes that forward and relay for each other over the simulated network, with leaders that a test appoints."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from nsqha import hot
from nsqha.pb.v1 import routing_pb2
from nsqha.server.routing.forward_client import Forwarder
from nsqha.server.routing.forward_server import ForwardService
from nsqha.server.routing.hints import Hints
from nsqha.server.routing.leaders import LeaderAt
from nsqha.server.runtime.budget import PublishBudget
from tests.fakes.loop import VirtualLoop
from tests.sim.net import Network
from tests.unit.server.shell_rig import Outcome

CLUSTER = 77
TOPIC_UID = 5
SERVICES = (routing_pb2.DESCRIPTOR.services_by_name["Routing"],)


class FakeLeaders:
    """What one node believes: a test changes it. With `hear`, also by what other nodes say."""

    cluster_id = CLUSTER

    def __init__(self, node: int) -> None:
        self.node = node
        self.topics: dict[str, dict[int, LeaderAt | None]] = {}
        self.epochs: dict[tuple[str, int], int] = {}
        self.callbacks: list[Callable[[str], None]] = []
        self.dead: set[int] = set()
        self.cut_off = False
        self.hints: Hints | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    def hear(self, peers: Any, server: Any, nodes: int) -> None:
        """Take hints; `nodes`: how many there are."""
        loop = asyncio.get_running_loop()

        def spawn(work: Any) -> None:
            self.tasks.add(task := loop.create_task(work))
            task.add_done_callback(self.tasks.discard)

        self.hints = Hints(
            self,
            peers,
            epoch_of=lambda topic, key: self.epochs.get((topic, key[1])),
            addresses=lambda: {n: f"n{n}" for n in range(1, nodes + 1)},
            cut_off=lambda: self.cut_off,
            spawn=spawn,
        )
        self.hints.register(server)

    def close(self) -> None:
        for task in list(self.tasks):
            task.cancel()

    def name_of(self, node: int) -> str:
        return f"n{node}"

    def alive(self, node: int) -> bool:
        return node not in self.dead

    def partitions(self, topic: str) -> int:
        return len(self.topics.get(topic, ()))

    def leader(self, topic: str, number: int) -> LeaderAt | None:
        hint = None
        if self.hints is not None:
            hint = self.hints.leader((TOPIC_UID, number), self.epochs.get((topic, number), 0))
        return hint or self.recorded(topic, number)

    def recorded(self, topic: str, number: int) -> LeaderAt | None:
        return self.topics[topic].get(number)

    def not_led(self, topic: str, number: int, *, by: int = 0, hint: LeaderAt | None = None) -> bool:
        return self.hints is not None and self.hints.not_led(topic, (TOPIC_UID, number), by, hint)

    def when_changed(self, callback: Callable[[str], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def appoint(self, topic: str, number: int, node: int | None, epoch: int = 1, *, tell: bool = True) -> None:
        """`node` leads; None: nobody."""
        at = None if node is None else LeaderAt(node, f"n{node}", f"n{node}", epoch, TOPIC_UID)
        self.topics.setdefault(topic, {})[number] = at
        self.epochs[topic, number] = epoch
        if tell:
            self.tell(topic)

    def tell(self, topic: str) -> None:
        for callback in list(self.callbacks):
            callback(topic)


class FakePartition:
    """Takes publishes, and stores them when told, or at once."""

    def __init__(self, number: int, log: list[bytes], budget: PublishBudget) -> None:
        self.number = number
        self.log = log
        self.closed = False
        self.at_once = True
        self.waited: list[float] = []
        self.delays: list[int | None] = []
        self.held: list[tuple[bytes, Any]] = []
        self._budget = budget

    def publish(self, frames: bytes, reply: Any, delay_ms: int | None = None, *, waited: float = 0.0) -> None:
        if self.closed:
            reply.failed("not stored: closed")
            return
        self._budget.take(len(frames))
        self.waited.append(waited)
        self.delays.append(delay_ms)
        self.held.append((frames, reply))
        if self.at_once:
            self.store()

    def store(self) -> None:
        while self.held:
            frames, reply = self.held.pop(0)
            self._budget.give(len(frames))
            self.log += bodies(frames)
            reply.stored()

    def refuse(self, why: str) -> None:
        while self.held:
            frames, reply = self.held.pop(0)
            self._budget.give(len(frames))
            reply.failed(why)

    def abandon(self) -> None:
        self.closed = True
        self.refuse("not stored: this node does not lead any more")


def bodies(frames: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(frames):
        end, _ = hot.walk(frames, at, len(frames), 1)
        found.append(frames[at + hot.HEADER : end])
        at = end
    return found


class ForwardNode:
    """A node as far as publishes are concerned."""

    def __init__(self, net: Network, number: int) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.log: list[bytes] = []
        self.low: str | None = None
        self.topics: dict[str, Any] = {}
        self.leaders = FakeLeaders(number)
        self.budget = PublishBudget(loop, 1 << 20)
        self.peers = net.peers(f"n{number}")
        self.server = net.server(f"n{number}")
        self.service = ForwardService(
            self.topics, self.leaders, loop=loop, budget=self.budget, refusal=lambda: self.low
        )
        self.service.register(self.server)
        self.leaders.hear(self.peers, self.server, 4)
        self.forwarder = Forwarder(
            self.topics,
            self.leaders,
            self.peers,
            loop=loop,
            budget=self.budget,
            wait_seconds=5.0,
            outcome_seconds=30.0,
            refusal=lambda: self.low,
        )

    def lead(self, topic: str, number: int, log: list[bytes], *, at_once: bool = True) -> FakePartition:
        """Become leader, as far as this node itself is concerned."""
        made = FakePartition(number, log, self.budget)
        made.at_once = at_once
        found = self.topics.setdefault(topic, FakeTopic())
        found.led = (*found.led, made)
        return made

    def step_down(self, topic: str) -> None:
        led, self.topics[topic].led = self.topics[topic].led, ()
        for partition in led:
            partition.abandon()

    async def stop(self) -> None:
        self.forwarder.close()
        self.leaders.close()
        await self.peers.close()
        self.server.close()


class FakeTopic:
    deleting = False
    record = SimpleNamespace(uid=TOPIC_UID)

    def __init__(self) -> None:
        self.led: tuple[FakePartition, ...] = ()

    def leads(self, number: int) -> FakePartition | None:
        return next((partition for partition in self.led if partition.number == number), None)


class Nodes:
    """`count` nodes numbered from 1, on a loop whose time jumps."""

    def __init__(self, count: int = 2, seed: int = 1, make: Callable[[Network, int], Any] = ForwardNode) -> None:
        self._count = count
        self._seed = seed
        self._make = make
        self.net: Network
        self.all: dict[int, Any] = {}

    def __getitem__(self, number: int) -> Any:
        return self.all[number]

    def appoint(self, topic: str, number: int, node: int | None, epoch: int = 1) -> None:
        """Everybody comes to know who leads."""
        for each in self.all.values():
            each.leaders.appoint(topic, number, node, epoch)

    def run(self, scenario: Callable[[Any], Awaitable[None]]) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            self.net = Network(loop, random.Random(self._seed), SERVICES)
            self.all = {n: self._make(self.net, n) for n in range(1, self._count + 1)}
            try:
                await scenario(self)
            finally:
                for node in self.all.values():
                    await node.stop()
            await asyncio.sleep(0.01)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks left behind: {left}"

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(main())


def publish(node: Any, body: bytes, source: int = 1, **how: Any) -> Outcome:
    """A client of `node` publishes to topic t."""
    outcome = Outcome()
    publisher = node.forwarder.publisher("t", source)
    assert publisher is not None
    publisher.publish(hot.frame(body), outcome, **how)
    node.kept = [*getattr(node, "kept", []), publisher]  # as a connection does
    return outcome


async def answered(*outcomes: Outcome) -> None:
    async with asyncio.timeout(60):
        while not all(outcome.answers for outcome in outcomes):
            await asyncio.sleep(0.001)
