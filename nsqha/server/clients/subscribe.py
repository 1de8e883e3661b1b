"""Consumers find their place at a topic's channel, and leave it.

SUB makes topic and channel if need be, then attaches the consumer to the partitions of the topic that this node leads.
Between making and attaching there are awaits, so both are looked at again and made again if they vanished. An ephemeral
channel lives as long as it has a consumer: whoever leaves it last, or is gone before he arrived, has it deleted.

In a cluster a consumer reads all partitions of the topic: those led here, the others through `Relaying`. SUB answers
when each of them whose leader is there has the consumer, so that nothing published later is missed; that needs no
metadata if the channel is known. An ephemeral channel does not outlive its leader's epoch: it is made anew.

Invariants: a channel never has more than --max-channel-consumers, however many come at once; a consumer is attached to
all partitions of its topic that are led here and serve it, or to none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.clock import Now
from nsqha.errors import NotFound, OutcomeUnknown, Unavailable
from nsqha.options import Options
from nsqha.server.partition.delivery import Consumer
from nsqha.server.partition.topic import Topic
from nsqha.server.topics.channels import Channels
from nsqha.server.topics.topics import Topics

if TYPE_CHECKING:
    from nsqha.server.routing.relay_client import Relaying

PLACES_RETRY_SECONDS = 0.005
MAKE_AGAIN_SECONDS = 0.05
SUB_RETRIES = 5  # a channel or topic that vanishes between create and attach


class Subscriptions:
    """The consumers of one node."""

    def __init__(
        self,
        topics: Topics,
        channels: Channels,
        options: Options,
        *,
        exiting: Callable[[], bool],
        now: Callable[[], Now],
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
    ) -> None:
        self.relaying: Relaying | None = None  # None: this node is alone
        self._topics = topics
        self._channels = channels
        self._wait_seconds = options.publish_wait_ns / 1e9
        self._consumers_max = options.max_channel_consumers
        self._exiting = exiting
        self._now = now
        self._spawn = spawn

    async def subscribe(self, consumer: Consumer) -> None:
        """Give a consumer its place; makes topic and channel if need be."""
        try:
            for _ in range(SUB_RETRIES):
                if self._exiting():
                    raise Unavailable("exiting")
                topic = await self._topics.topic_for_client(consumer.topic)
                self._check_consumers(topic, consumer)
                if self.relaying is not None:
                    await self._read_all(self.relaying, topic, consumer)
                    return
                if await self._channels.ensure(topic, consumer.channel) and topic.serves(consumer.channel):
                    self._check_consumers(topic, consumer)
                    topic.attach(consumer)
                    return
            raise Unavailable("deleted topic/channel")
        except BaseException:
            # The client may be gone, and an ephemeral channel that was made for it with nobody to leave it.
            self._release(consumer.topic, consumer.channel)
            raise

    async def _read_all(self, relaying: Relaying, topic: Topic, consumer: Consumer) -> None:
        """Places at every partition, here and elsewhere. Unavailable if a leader does not know the channel in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_seconds
        if not await self._channels.ensure(topic, consumer.channel):
            raise Unavailable("deleted topic/channel")
        self._check_consumers(topic, consumer)
        consumer.direct = bool(topic.led)
        topic.attach(consumer)
        places = relaying.attach(consumer)
        try:
            while missing := sorted([*topic.places_missing(consumer), *places.missing]):
                if topic.deleting or self._exiting():
                    raise Unavailable("exiting" if self._exiting() else "deleted topic/channel")
                if loop.time() > deadline:
                    raise Unavailable(f"the leaders of partitions {missing} of {topic.name} did not answer in time")
                await asyncio.sleep(PLACES_RETRY_SECONDS)
                if topic.places_missing(consumer):
                    await self._channels.ensure(topic, consumer.channel)
        except BaseException:
            self.unsubscribe(consumer)
            raise

    def leaders_changed(self, name: str) -> None:
        """A partition may be led here now whose #ephemeral channels ended with its last leader."""
        topic = self._topics.get(name)
        if topic is not None and not self._exiting():
            for channel in [channel for channel in topic.consumers.here if ids.is_ephemeral(channel)]:
                if any(topic.places_missing(consumer) for consumer in topic.consumers.here[channel]):
                    self._spawn(self._make_again(topic, channel))

    async def _make_again(self, topic: Topic, channel: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_seconds
        while loop.time() < deadline and not topic.deleting and not self._exiting():
            if not any(topic.places_missing(consumer) for consumer in topic.consumers.here.get(channel, ())):
                return
            with suppress(NotFound, Unavailable, OutcomeUnknown):  # led elsewhere again, or it goes on
                await self._channels.ensure(topic, channel)
            await asyncio.sleep(MAKE_AGAIN_SECONDS)

    def _check_consumers(self, topic: Topic, consumer: Consumer) -> None:
        limit = self._consumers_max
        if limit and len(topic.consumers.here.get(consumer.channel, ())) >= limit:
            raise Unavailable(f"consumers for {consumer.topic}:{consumer.channel} exceeds limit of {limit}")

    def unsubscribe(self, consumer: Consumer) -> None:
        """A consumer is gone; an ephemeral channel goes with its last one."""
        if self.relaying is not None:
            self.relaying.detach(consumer)
        topic = self._topics.get(consumer.topic)
        if topic is not None and topic.detach(consumer, self._now()) and not topic.deleting:
            self._release(consumer.topic, consumer.channel)

    def unsubscribe_all(self) -> None:
        """The node stops."""
        for consumer in [c for topic in self._topics.values() for c in topic.consumers.all()]:
            self.unsubscribe(consumer)

    def _release(self, topic: str, channel: str) -> None:
        """Nobody may be left who reads this channel: if it is an ephemeral one, it goes."""
        if ids.is_ephemeral(channel) and not self._exiting():
            self._spawn(self._delete_if_unused(topic, channel))

    async def _delete_if_unused(self, topic: str, channel: str) -> None:
        with suppress(NotFound, Unavailable, OutcomeUnknown):  # somebody else deleted it, or it goes on
            await self._channels.delete_if_unused(topic, channel)
