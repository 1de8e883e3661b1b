"""Consumers find their place at a topic's channel, and leave it.

SUB makes topic and channel if need be, then attaches the consumer to the partitions of the topic that this node leads.
Between making and attaching there are awaits, so both are looked at again and made again if they vanished. An ephemeral
channel lives as long as it has a consumer: whoever leaves it last, or is gone before he arrived, has it deleted.

Invariants: a channel never has more than --max-channel-consumers, however many come at once; a consumer is attached to
all partitions of its topic that are led here, or to none.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from nsqha import ids
from nsqha.clock import Now
from nsqha.errors import NotFound, Unavailable
from nsqha.options import Options
from nsqha.server.delivery import Consumer
from nsqha.server.topic import Topic
from nsqha.server.topics import Topics

SUB_RETRIES = 5  # a channel or topic that vanishes between create and attach


class Subscriptions:
    """The consumers of one node."""

    def __init__(
        self,
        topics: Topics,
        options: Options,
        *,
        exiting: Callable[[], bool],
        now: Callable[[], Now],
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
    ) -> None:
        self._topics = topics
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
                if await self._topics.ensure_channel(topic, consumer.channel) and topic.serves(consumer.channel):
                    self._check_consumers(topic, consumer)
                    topic.attach(consumer)
                    return
            raise Unavailable("deleted topic/channel")
        except BaseException:
            # The client may be gone, and an ephemeral channel that was made for it with nobody to leave it.
            self._release(consumer.topic, consumer.channel)
            raise

    def _check_consumers(self, topic: Topic, consumer: Consumer) -> None:
        limit = self._consumers_max
        if limit and len(topic.consumers.get(consumer.channel, ())) >= limit:
            raise Unavailable(f"consumers for {consumer.topic}:{consumer.channel} exceeds limit of {limit}")

    def unsubscribe(self, consumer: Consumer) -> None:
        """A consumer is gone; an ephemeral channel goes with its last one."""
        topic = self._topics.get(consumer.topic)
        if topic is not None and topic.detach(consumer, self._now()) and not topic.deleting:
            self._release(consumer.topic, consumer.channel)

    def unsubscribe_all(self) -> None:
        """The node stops."""
        for consumer in [c for topic in self._topics.values() for c in topic.all_consumers()]:
            self.unsubscribe(consumer)

    def _release(self, topic: str, channel: str) -> None:
        """Nobody may be left who reads this channel: if it is an ephemeral one, it goes."""
        if ids.is_ephemeral(channel) and not self._exiting():
            self._spawn(self._delete_if_unused(topic, channel))

    async def _delete_if_unused(self, topic: str, channel: str) -> None:
        with suppress(NotFound, Unavailable):  # somebody else deleted it
            await self._topics.delete_channel_if_unused(topic, channel)
