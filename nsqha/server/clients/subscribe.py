"""Consumers find their place at a topic's channel, and leave it.

SUB makes topic and channel if need be, then attaches the consumer to every partition of the topic (`ConsumerRoutes`: a
single node leads all of them; in a cluster other nodes lead some). Between making and attaching there are awaits, so
both are checked again, and made again if they vanished, also behind a consumer that is attached already. An ephemeral
channel lives as long as it has a consumer: the last consumer that leaves it has it deleted, and so has one that is gone
before it was attached.

Invariants: a channel never has more than --max-channel-consumers, however many come at once; a consumer is attached to
all partitions of its topic that are led here and serve it, or to none.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from nsqha import ids
from nsqha.clock import Now
from nsqha.errors import NotFound, OutcomeUnknown, Unavailable
from nsqha.options import Options
from nsqha.server.partition.delivery import Consumer, Sub
from nsqha.server.partition.topic import Topic
from nsqha.server.topics.channels import Channels
from nsqha.server.topics.topics import Topics

SUB_RETRIES = 5  # a channel or topic that vanishes between create and attach


class ConsumerRoutes(Protocol):
    """Attaches consumers to the partitions of their topics, and detaches them."""

    async def attach(self, topic: Topic, consumer: Consumer) -> bool:
        """Make the channel if need be, and attach the consumer to every partition. False if it is to be tried again,
        as the topic or the channel vanished meanwhile (the caller detaches what is attached); Unavailable."""

    def detach(self, consumer: Consumer) -> None:
        """Detach it from the partitions that other nodes lead."""


class SingleNodeConsumerRoutes:
    """The `ConsumerRoutes` of a single node: every partition is led here."""

    def __init__(self, channels: Channels, options: Options) -> None:
        self._channels = channels
        self._consumers_max = options.max_channel_consumers

    async def attach(self, topic: Topic, consumer: Consumer) -> bool:
        if not (await self._channels.ensure(topic, consumer.channel) and topic.serves(consumer.channel)):
            return False
        check_room(topic, consumer, self._consumers_max)
        topic.attach(consumer)
        return True

    def detach(self, consumer: Consumer) -> None:
        """No other node leads anything."""


def check_room(topic: Topic, consumer: Consumer, consumers_max: int) -> None:
    """Raise Unavailable if the channel has its maximum of consumers (0: there is none)."""
    if consumers_max and len(topic.consumers.here.get(consumer.channel, ())) >= consumers_max:
        raise Unavailable(f"consumers for {consumer.topic}:{consumer.channel} exceeds limit of {consumers_max}")


class Subscriptions:
    """The consumers of one node."""

    def __init__(
        self,
        topics: Topics,
        channels: Channels,
        options: Options,
        *,
        routes: ConsumerRoutes,
        exiting: Callable[[], bool],
        now: Callable[[], Now],
        spawn: Callable[[Coroutine[Any, Any, Any]], object],
    ) -> None:
        self._topics = topics
        self._channels = channels
        self._routes = routes
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
                check_room(topic, consumer, self._consumers_max)
                if await self._routes.attach(topic, consumer) and consumer.sub is not Sub.DISMISSED:
                    consumer.sub = Sub.ANSWERED
                    return
                self._routes.detach(consumer)
                topic.detach(consumer, self._now())  # there may be another one of its name
                consumer.sub = Sub.ASKED
            raise Unavailable("deleted topic/channel")
        except BaseException:
            self.unsubscribe(consumer)
            # It may never have been attached: then no consumer leaves the ephemeral channel that was made for it.
            self._release(consumer.topic, consumer.channel)
            raise

    def unsubscribe(self, consumer: Consumer) -> None:
        """A consumer is gone; an ephemeral channel goes with its last one."""
        self._routes.detach(consumer)
        topic = self._topics.get(consumer.topic)
        if topic is not None and topic.detach(consumer, self._now()) and not topic.deleting:
            self._release(consumer.topic, consumer.channel)

    def unsubscribe_all(self) -> None:
        """The node stops."""
        for consumer in [c for topic in self._topics.values() for c in topic.consumers.all()]:
            self.unsubscribe(consumer)

    def _release(self, topic: str, channel: str) -> None:
        """The channel may have no consumer any more: an ephemeral one is deleted then."""
        if ids.is_ephemeral(channel) and not self._exiting():
            self._spawn(self._delete_if_unused(topic, channel))

    async def _delete_if_unused(self, topic: str, channel: str) -> None:
        with suppress(NotFound, Unavailable, OutcomeUnknown):  # it is deleted already, or the deletion continues
            await self._channels.delete_if_unused(topic, channel)
