"""Nodes that forward and relay for each other over the simulated network, with leaders that a test appoints."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from nsqha import hot
from nsqha.pb.v1 import routing_pb2
from nsqha.server.routing.forward_client import Forwarder
from nsqha.server.routing.forward_server import ForwardService
from nsqha.server.runtime.budget import PublishBudget
from tests.fakes import partitions
from tests.fakes.loop import VirtualLoop
from tests.fakes.partitions import FakeLeaders, FakePartition
from tests.sim.net import Network
from tests.unit.server.shell_rig import Outcome

SERVICES = (routing_pb2.DESCRIPTOR.services_by_name["Routing"],)


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
        self._keep_house()

    def _keep_house(self) -> None:
        self.forwarder.keep_house()
        self._housekeeping = asyncio.get_running_loop().call_later(1.0, self._keep_house)

    def lead(self, topic: str, number: int, log: list[bytes], *, at_once: bool = True) -> FakePartition:
        """Become leader, as far as this node itself is concerned."""
        made = FakePartition(asyncio.get_running_loop(), self.budget, number, log, at_once=at_once)
        found = self.topics.setdefault(topic, partitions.topic())
        found.led = (*found.led, made)
        return made

    def step_down(self, topic: str) -> None:
        led, self.topics[topic].led = self.topics[topic].led, ()
        for partition in led:
            partition.abandon("this node does not lead any more")

    async def stop(self) -> None:
        self._housekeeping.cancel()
        self.forwarder.close()
        self.leaders.close()
        await self.peers.close()
        self.server.close()


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


def publish(node: Any, body: bytes, source: int = 1, *, topic: str = "t", **how: Any) -> Outcome:
    """A client of `node` publishes to a topic."""
    outcome = Outcome()
    publisher = node.forwarder.publisher(topic, source)
    assert publisher is not None
    publisher.publish(hot.frame(body), outcome, **how)
    node.kept = [*getattr(node, "kept", []), publisher]  # as a connection does
    return outcome


async def answered(*outcomes: Outcome) -> None:
    async with asyncio.timeout(60):
        while not all(outcome.answers for outcome in outcomes):
            await asyncio.sleep(0.001)
