"""The channels that a topic begins with: those that lookup daemons know of it.

A single node makes a topic without asking, as its first PUB would wait for every daemon. Its record says so
(`unasked`), durably, before anything is published. The topic keeps all messages as long as it has no channel (the pump
stands still), so the channels that are made of the answer, all in one change, get everything published meanwhile:

    PUB -> record {unasked} -> log -> OK
                  10 ms later  ask -> record {channels} -> `channels` event in every log

A channel that was made before them would move the pump, and what the topic had kept would go to that one alone. So
whatever makes a channel, or empties the topic, asks first if that is still to be done (`learn`, `change`); it holds the
topic's lock. A node that is killed before the answer finds the mark at its start, and asks then.

An #ephemeral topic keeps little, and drops what is more, so it is made when they have answered; and so is a topic of a
cluster, where other nodes make channels under locks of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from nsqha import ids
from nsqha.errors import NsqhaError
from nsqha.nsqlog import Logger
from nsqha.server.runtime.backoff import Backoff

if TYPE_CHECKING:
    from nsqha.election.model import ChannelList, TopicRecord, Versioned
    from nsqha.server.partition.topic import Topic
    from nsqha.server.topics.placement import Announcer, TopicContext

ASK_SECONDS = (0.01, 15.0)
"""From when the topic is there, so that the OK of its first PUB does not wait for the question; and the longest pause
before it is tried again to store what came of it."""

logger = Logger("topics")


class BegunTopics(Protocol):
    """The topics of the node, as they begin."""

    announcer: Announcer

    def values(self) -> Iterable[Topic]: ...

    def take(self, versioned: Versioned[TopicRecord], /) -> Topic:
        """Adopt a record that was written here. NotFound: that topic is gone."""

    def announce(self, name: str, /) -> None:
        """The channels of the topic may have changed: the lookup daemons hear."""


class FirstChannels:
    """Asks which channels the topics of one node begin with, and makes these."""

    def __init__(self, topics: BegunTopics, context: TopicContext) -> None:
        self._topics = topics
        self._context = context

    def ask_later(self, name: str) -> bool:
        """Whether a new topic of this name is made unasked: there is a lookup daemon, and the topic keeps messages."""
        return not ids.is_ephemeral(name) and self._topics.announcer.may_know

    def begin(self, topic: Topic) -> None:
        """Ask soon, if that is still to be done; nobody waits for it."""
        if topic.record.channels.unasked:
            self._context.spawn(self._soon(topic))

    def begin_all(self) -> None:
        """The node has started: ask what a life that was killed had still to ask."""
        for topic in self._topics.values():
            self.begin(topic)

    async def _soon(self, topic: Topic) -> None:
        backoff = Backoff(*ASK_SECONDS)
        while topic.record.channels.unasked and not topic.deleting:
            await asyncio.sleep(backoff.next_pause())
            try:
                await self.finish(topic)
            except NsqhaError as error:
                text = "TOPIC(%s): the channels that lookup daemons know are made later: %s"
                logger.warning("first_channels_delayed", text, topic.name, error)

    async def finish(self, topic: Topic) -> None:
        """Return when the topic has the channels that it begins with. Unavailable, NotFound, OutcomeUnknown."""
        if topic.record.channels.unasked:
            await self._context.changes.whole(self._finish(topic))

    async def _finish(self, topic: Topic) -> None:
        async with self._context.changes.of(topic.name):
            await self.learn(topic)
        self._topics.announce(topic.name)

    async def learn(self, topic: Topic) -> None:
        """As `finish`; the caller holds the topic's lock."""
        if topic.record.channels.unasked and not topic.deleting:
            change = await self.change(topic)
            self._topics.take(await self._context.metadata.change_channels(topic.versioned, change))
            await topic.reconcile()

    async def change(self, topic: Topic) -> Callable[[ChannelList], ChannelList]:
        """The change of the channel list that brings these channels; none if it was asked before. The caller holds the
        topic's lock."""
        if not topic.record.channels.unasked:
            return lambda channels: channels
        known = await self._topics.announcer.known_channels(topic.name, patient=True)
        uids = {channel: ids.new_uid(self._context.rng) for channel in known}
        return lambda channels: channels.begun_with(uids) if channels.unasked else channels
