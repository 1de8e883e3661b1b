"""The leaders of a topic's partitions, as a change of its channels meets them.

    the record changed    -> ChannelLeaders.follow   -> a `channels` event in the log of every partition
    what is in no record  -> ChannelLeaders.everywhere -> an event of its own in each
    questions of other nodes -> LedChannels          -> what is led here does the same

A single node leads everything (`SingleLeader`); in a cluster other leaders are asked (`ClusterChannelLeaders`),
whose questions to this node take no lock: the node that asks holds its own, and may be asked by this one at the same
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from nsqha.election.model import TopicRecord, Versioned
from nsqha.errors import Unavailable
from nsqha.server.partition.topic import Topic
from nsqha.server.routing.leaders import Administration
from nsqha.server.runtime.metadata import NodeMetadata
from nsqha.server.topics.settings import vanished_topic

if TYPE_CHECKING:
    from nsqha.server.routing.channel_sync import Reconciler
    from nsqha.server.topics.topics import Topics

LEADER_RETRY_SECONDS = 0.02  # a leader whose epoch has only begun


class LedChannels:
    """Channels in the logs that are led here: they follow the record, and do what is in no record."""

    def __init__(self, topics: Topics, metadata: NodeMetadata, *, node_uid: int, wait_seconds: float) -> None:
        """`wait_seconds`: for an epoch that has only begun."""
        self._topics = topics
        self._metadata = metadata
        self._node_uid = node_uid
        self._wait_seconds = wait_seconds

    async def reconcile(self, topic: Topic) -> list[int]:
        """What is led here follows; an epoch that has only begun is waited for. The numbers of those partitions."""
        now = asyncio.get_running_loop().time
        deadline = now() + self._wait_seconds
        while True:
            led = topic.led
            try:
                await topic.reconcile()
            except Unavailable:
                if now() > deadline or topic.deleting:
                    raise
                await asyncio.sleep(LEADER_RETRY_SECONDS)
            else:
                return [partition.number for partition in led if not partition.closed]

    async def follow(self, name: str, uid: int, version: int) -> list[int]:
        """Another node changed the record: which partitions are led here and follow it now. NotFound, Unavailable."""
        topic = self._topics.of_uid(name, uid)
        if topic is None or topic.record.channels.version < version:
            topic = await self.read_again(name, uid)
        if topic.record.channels.version < version:
            raise Unavailable(f"the record of topic {name} is not as new as version {version} of its channels")
        return await self.reconcile(topic)

    async def read_again(self, name: str, uid: int) -> Topic:
        """The topic with its record as it is now. NotFound."""
        fresh = await self._metadata.read(lambda: self._metadata.records.topic(name))
        if fresh is None or fresh.record.uid != uid:
            raise vanished_topic(name)
        return self._topics.take(fresh)

    async def led_elsewhere(self, name: str, uid: int) -> dict[int, str]:
        """Who leads partitions of a topic on other nodes, by a linearizable read: number -> address, without those
        whose leader has no lease. NotFound, Unavailable."""
        records = self._metadata.records
        found, nodes = await self._metadata.read(lambda: (records.topic(name), records.nodes()))
        if found is None or found.record.uid != uid:
            raise vanished_topic(name)
        leaders = {number: meta.leader for number, meta in found.record.partitions.items()}
        return {n: nodes[at].grpc_address for n, at in leaders.items() if at != self._node_uid and at in nodes}

    async def carry_out(
        self, name: str, uid: int, what: Administration, channel: str, numbers: Collection[int] | None = None
    ) -> list[int]:
        """Do it in what is led here of these partitions, None: of all; the numbers of those in which it is done.
        NotFound, Unavailable: in none of them, or not in all if all were asked for."""
        topic = self._topics.of_uid(name, uid)
        if topic is None:
            raise vanished_topic(name)
        led = [partition for partition in topic.led if numbers is None or partition.number in numbers]
        for partition in led:
            if not partition.serving:
                raise Unavailable(f"partition {partition.number}: {partition.begins}")  # before any of them does it
        for partition in led:
            cursors = partition.cursors
            if what == Administration.EMPTY_TOPIC:
                cursors.requests.topic_empty()
            elif channel in cursors.channels:
                if what == Administration.EMPTY_CHANNEL:
                    cursors.requests.empty(channel)
                else:
                    cursors.channels[channel].paused = what == Administration.PAUSE_CHANNEL
        ends = await asyncio.gather(*[partition.commit_events() for partition in led], return_exceptions=True)
        topic.wake(channel)
        done = [partition.number for partition, error in zip(led, ends, strict=True) if error is None]
        for error in ends:
            if error is not None and (numbers is None or not done):
                raise error
        return done


class ChannelLeaders(Protocol):
    """All leaders of a topic's partitions."""

    def have(self, topic: Topic, channel: str) -> bool:
        """Whether the channel is there and stays, so that nothing has to be made."""

    def changed(self, topic: Topic, record: Versioned[TopicRecord]) -> None:
        """This node has changed the record of the topic."""

    async def follow(self, topic: Topic) -> None:
        """Returns when every leader has what the record says in its log. Unavailable if not."""

    async def everywhere(
        self, topic: Topic, what: Administration, channel: str = "", *, partition: int | None = None
    ) -> None:
        """Have it done in every partition, or in one; it is in no record. Unavailable if not."""


class SingleLeader:
    """The `ChannelLeaders` of a single node: it leads everything."""

    def __init__(self, led: LedChannels) -> None:
        self._led = led

    def have(self, topic: Topic, channel: str) -> bool:
        return topic.serves(channel)

    def changed(self, topic: Topic, record: Versioned[TopicRecord]) -> None:
        topic.versioned = record

    async def follow(self, topic: Topic) -> None:
        await topic.reconcile()

    async def everywhere(
        self, topic: Topic, what: Administration, channel: str = "", *, partition: int | None = None
    ) -> None:
        numbers = None if partition is None else (partition,)
        done = await self._led.carry_out(topic.name, topic.record.uid, what, channel, numbers)
        if partition is not None and partition not in done:
            raise Unavailable(f"partition {partition} is not led at the moment")


class ClusterChannelLeaders:
    """The `ChannelLeaders` of a cluster: this node, and the nodes that the `Reconciler` asks."""

    def __init__(self, topics: Topics, led: LedChannels, reconciler: Reconciler) -> None:
        self._topics = topics
        self._led = led
        self._reconciler = reconciler

    def have(self, topic: Topic, channel: str) -> bool:
        return topic.knows(channel)

    def changed(self, topic: Topic, record: Versioned[TopicRecord]) -> None:
        if self._topics.get(topic.name) is topic:
            # Other nodes change it too: perhaps the settings just before, or the whole of it since.
            self._topics.adopt(record)

    async def follow(self, topic: Topic) -> None:
        await self._led.reconcile(topic)
        await self._reconciler.others_follow(topic)

    async def everywhere(
        self, topic: Topic, what: Administration, channel: str = "", *, partition: int | None = None
    ) -> None:
        await self._reconciler.do_everywhere(topic, what, channel, partition=partition)
