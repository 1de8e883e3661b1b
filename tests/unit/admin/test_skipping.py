"""`nsqha log skip`: what is given up, and what is waited for, where a partition is led by somebody who only begins."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.admin.fan_out import FanOut
from nsqha.admin.skipping import skip_damage
from nsqha.pb.v1 import admin_pb2
from tests.fakes.loop import VirtualLoop
from tests.unit.admin.leaders_rig import topic_of


class SkippingRig:
    """A node that leads both partitions of a topic, the second of them without serving yet."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float]] = []  # (partition, when) that other replicas were asked for
        self.topic = topic_of([0, 1], 2)
        for partition in self.topic.led:
            partition.serving, partition.closed, partition.deliveries = partition.number == 0, False, {}
        integrity = SimpleNamespace(mark_lost=SimpleNamespace(give_up=self.give_up))
        cluster = SimpleNamespace(replicas=SimpleNamespace(integrity=integrity))
        self.broker: Any = SimpleNamespace(cluster=cluster, topics=SimpleNamespace(topic=lambda name: self.topic))

    async def give_up(self, key: tuple[int, int], *, seconds: float) -> list[Any]:
        self.asked.append((key[1], asyncio.get_running_loop().time()))
        await asyncio.sleep(0.01)
        return []

    async def skip(self, *, here: bool) -> Any:
        request = admin_pb2.SkipDamageRequest(topic="t")
        if here:  # from another node, which was asked
            request.here.topic_uid = self.topic.record.uid
        leaders: Any = SimpleNamespace(node=1, leader=lambda topic, number: None)
        return await skip_damage(self.broker, request, FanOut(leaders, None))


@pytest.mark.parametrize("here", [True, False])
def test_a_leader_that_does_not_serve_yet_is_waited_for_alone(here: bool) -> None:
    async def scenario() -> None:
        rig = SkippingRig()
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, setattr, rig.topic.led[1], "serving", True)
        began = loop.time()
        reply = await rig.skip(here=here)
        assert not reply.errors and 1.0 <= loop.time() - began < 1.2
        assert sorted(partition for partition, _ in rig.asked) == [0, 1]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scenario())


def test_one_that_never_serves_is_told_and_others_are_asked_now_and_then() -> None:
    async def scenario() -> None:
        rig = SkippingRig()
        reply = await rig.skip(here=False)
        assert [(error.partition, error.error) for error in reply.errors] == [(1, "1 has only begun")]
        times = [when for partition, when in rig.asked if partition == 1]
        assert all(later - earlier > 1.0 for earlier, later in pairwise(times))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scenario())
