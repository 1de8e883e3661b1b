"""One more channel of a topic is the same work for a node whether it has ten or hundreds; counted, not timed."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from types import FrameType
from typing import Any

from nsqha.server.node.broker import Broker
from tests.unit.server.broker_rig import led, on_a_broker, subscribed, until
from tests.unit.server.node.test_broker import ONE

FEW, MANY = 10, 200
SLACK = 5  # calls: a turn of housekeeping may come
OURS = ("nsqha/cursor/", "nsqha/election/", "nsqha/server/partition/", "nsqha/server/topics/", "node/registrar.py")


class Calls:
    """Counts calls of functions, and the values that generators yield, on the thread that made it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Counter[str]:
        sys.setprofile(self._event)
        return self.counts

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and any(part in frame.f_code.co_filename for part in OURS):
            self.counts[frame.f_code.co_qualname] += 1


async def grow(broker: Broker, count: int, suffix: str = "") -> None:
    topic = broker.topics.topic("t")
    for number in range(len(topic.channel_names()), count):
        await subscribed(broker, "t", f"c{number:04}{suffix}")


async def work(broker: Broker, channel: str) -> Counter[str]:
    """Of a channel that comes with a consumer, and goes."""
    with Calls() as counts:
        reader = await subscribed(broker, "t", channel, 1)
        await broker.channels.delete("t", channel)
    assert reader.wire.closed and channel not in led(broker).deliveries
    return counts


async def more_work(broker: Broker, suffix: str = "") -> dict[str, int]:
    """What is called more often where there are many, each with a consumer."""
    await broker.topics.ensure_topic("t")
    found = []
    for count in (FEW, MANY):
        await grow(broker, count, suffix)
        found.append(await work(broker, f"c0005-{suffix}"))
    few, many = found
    return {name: many[name] - few[name] for name in many if many[name] - few[name] > SLACK}


@on_a_broker
async def test_the_number_of_channels_does_not_count(broker: Broker) -> None:
    assert await more_work(broker) == {}


@on_a_broker
async def test_the_number_of_ephemeral_channels_does_not_count(broker: Broker) -> None:
    assert await more_work(broker, "#ephemeral") == {}


@on_a_broker
async def test_a_channel_that_is_not_paused_any_more_is_looked_at(broker: Broker) -> None:
    """Nothing else is handed out when a list was committed; whoever changed the record is another node, perhaps."""
    reader = await subscribed(broker, "t", "c", 1)
    topic, partition = broker.topics.topic("t"), led(broker)
    partition.deliveries.watch_clock(partition.now())  # the first look pumps everything
    for paused in (True, False):
        topic.versioned = await broker.channels._metadata.change_channels(
            topic.versioned, lambda channels, paused=paused: channels.with_channel_paused("c", paused)
        )
        await topic.reconcile()
        if paused:
            await broker.publishing.publish("t", ONE)
            assert not reader.wire.bodies
    await asyncio.wait_for(until(lambda: reader.wire.bodies), 2)
