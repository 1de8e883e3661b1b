"""The channels of topics: how they are made, deleted, paused, emptied and moved on every node that leads a part.

The channel list is one record in the metadata. A change of it is a compare-and-set, then every leader brings its log in
line (`ChannelLeaders.follow`). What is not in the record (#ephemeral channels, empty, seek) is an event in the logs
alone (`ChannelLeaders.everywhere`). A topic is paused in the same record and emptied by the same events.

Owns nothing: the record is the store's, the newest seen of it the `Topic`'s, cursors the partitions'. Invariants: a
change is answered when every partition has it in its committed log, or as Unavailable; changes of one topic come one
after the other, run to their end (`Changes`), and read the state again when their turn comes. Moving the floor of a
reader's channel (`ReaderChannels`) is none.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.cursor.events import TARGET_END
from nsqha.cursor.requests import Planning
from nsqha.cursor.seek import SeekPlan
from nsqha.election.model import ChannelList
from nsqha.election.policy import EVERY_CHANNEL, TO_TOPIC, ChannelPolicy
from nsqha.errors import NotFound, NsqhaError, OutcomeUnknown, Unavailable
from nsqha.nsqlog import Logger
from nsqha.options import Options
from nsqha.server.partition.partition import Partition
from nsqha.server.partition.topic import Topic
from nsqha.server.routing.leaders import Administration
from nsqha.server.runtime.metadata import NodeMetadata
from nsqha.server.runtime.tasks import Changes
from nsqha.server.topics.channel_leaders import ChannelLeaders, LedChannels, SingleLeader
from nsqha.server.topics.channel_list import Change, add_channel, check_kind, check_there
from nsqha.server.topics.reader_channels import ReaderChannels

if TYPE_CHECKING:
    from nsqha.server.topics.topics import Topics

logger = Logger("channels")


async def in_steps(planning: Planning) -> SeekPlan:
    """The plan, once it is counted; other work on the loop gets its turn in between."""
    while True:
        try:
            next(planning)
        except StopIteration as end:
            plan: SeekPlan = end.value
            return plan
        await asyncio.sleep(0)


class Channels:
    """The channels of all topics of this node."""

    def __init__(
        self,
        topics: Topics,
        options: Options,
        *,
        node_uid: int,
        rng: random.Random,
        metadata: NodeMetadata,
        changes: Changes,
    ) -> None:
        self.led = LedChannels(topics, metadata, node_uid=node_uid, wait_seconds=options.publish_wait_ns / 1e9)
        self.leaders: ChannelLeaders = SingleLeader(self.led)  # of a cluster: set by the broker
        self.readers = ReaderChannels(topics, lambda topic, channel: self.ensure(topic, channel, reader=True))
        self._topics = topics
        self._channels_max = options.max_topic_channels
        self._rng = rng
        self._metadata = metadata
        self._changes = changes

    # ---- made and deleted

    def has(self, topic: str, channel: str) -> bool:
        found = self._topics.get(topic)
        return found is not None and found.has_channel(channel)

    def _existing(self, topic: str, channel: str) -> Topic:
        found = self._topics.topic(topic)
        check_there(found, channel)
        return found

    async def create(self, topic: str, channel: str) -> None:
        if not await self.ensure(self._topics.topic(topic), channel):
            raise Unavailable("deleted topic/channel")

    async def ensure(self, topic: Topic, channel: str, *, reader: bool = False) -> bool:
        """Make the channel if it is not there; False if its topic is being deleted. WrongKind: one of the other kind
        is there."""
        check_kind(topic, channel, reader=reader)
        if not self.leaders.have(topic, channel):
            await self._changes.once((topic.record.uid, channel), lambda: self._create(topic, channel, reader))
            check_kind(topic, channel, reader=reader)  # another request may have made it
        return not topic.deleting

    async def ensure_here(self, topic: Topic, channel: str) -> None:
        """A client of another node reads a channel of what is led here. NotFound: the record does not have it.
        WrongKind: it is a reader's, which consumers do not read."""
        if ids.is_ephemeral(channel):
            await self.ensure(topic, channel)
        elif not topic.knows(channel):
            topic = await self.led.read_again(topic.name, topic.record.uid)
            if channel not in topic.record.channels.channels:
                raise NotFound("deleted topic/channel")
        check_kind(topic, channel, reader=False)

    async def _create(self, topic: Topic, channel: str, reader: bool) -> None:
        async with self._changes.of(topic.name):
            if topic.deleting or self.leaders.have(topic, channel):
                return
            if ids.is_ephemeral(channel):
                await self._topics.first_channels.learn(topic)  # its event must not come before theirs
            begun = await self._topics.first_channels.change(topic)

            async def change(topic: Topic, added: Change) -> None:
                await self._change(topic, lambda channels: added(begun(channels)))

            await add_channel(change, self._rng, topic, channel, reader=reader, channels_max=self._channels_max)
            await self.leaders.follow(topic)
            logger.info("channel_created", "TOPIC(%s): new channel(%s)", topic.name, channel)
        self._topics.announce(topic.name, [channel])

    async def delete(self, topic: str, channel: str) -> None:
        self._existing(topic, channel)
        await self._changes.whole(self._delete(topic, channel))

    async def delete_if_unused(self, topic: str, channel: str) -> None:
        """Delete it, unless it has a consumer when its turn comes."""
        await self._changes.once(("unused", topic, channel), lambda: self._delete(topic, channel, unless_used=True))

    async def leave(self, topic: str, channel: str) -> None:
        """A consumer left this #ephemeral channel, perhaps the last one."""
        with suppress(NotFound, Unavailable, OutcomeUnknown):  # it is deleted already, or the deletion continues
            await self.delete_if_unused(topic, channel)

    async def _delete(self, topic: str, channel: str, *, unless_used: bool = False) -> None:
        async with self._changes.of(topic):
            found = self._existing(topic, channel)
            if unless_used and found.consumers.reads(channel):
                return
            with found.leaves(channel):  # a SUB that comes now waits for the lock, and makes it again
                if ids.is_ephemeral(channel):
                    for partition in found.led:
                        partition.cursors.requests.delete_ephemeral(channel)
                    await found.commit_events()
                else:
                    try:
                        await self._change(found, lambda channels: channels.without_channel(channel))
                    except NotFound:
                        return  # another node was faster, and has every leader follow
                    await self.leaders.follow(found)
            logger.info("channel_deleted", "TOPIC(%s): deleted channel(%s)", topic, channel)
            self._topics.announce(topic, [channel])
            if found.ephemeral and not found.channel_names():
                await self._topics.bury(found)

    # ---- paused, emptied, moved

    async def pause(self, topic: str, channel: str, paused: bool) -> None:
        self._existing(topic, channel)
        await self._changes.whole(self._pause(topic, channel, paused))

    async def _pause(self, topic: str, channel: str, paused: bool) -> None:
        async with self._changes.of(topic):
            found = self._existing(topic, channel)
            if ids.is_ephemeral(channel):
                what = Administration.PAUSE_CHANNEL if paused else Administration.UNPAUSE_CHANNEL
                await self.leaders.everywhere(found, what, channel)
            else:
                await self._change(found, lambda channels: channels.with_channel_paused(channel, paused))
                await self.leaders.follow(found)
        found.wake(channel)

    async def ask(
        self, topic: str, channel: str, changes: Mapping[str, Any], *, expected: ChannelPolicy | None = None
    ) -> ChannelList:
        """Change the policy of a channel, or `*`; as `ChannelList.with_policy`. The list as every leader follows it."""
        if ids.is_ephemeral(channel):
            raise ValueError(
                f"channel {channel} is in no record, so it has no policy of its own: set that of {EVERY_CHANNEL!r}, "
                "which holds for all channels that say nothing themselves"
            )
        if changes.get("dead_letter") == f"{TO_TOPIC}{topic}":
            raise ValueError(f"dead_letter is the topic itself: {topic} would get its own dead letters again")
        if channel != EVERY_CHANNEL:
            self._existing(topic, channel)
        return await self._changes.whole(self._ask(topic, channel, changes, expected))

    async def _ask(
        self, topic: str, channel: str, changes: Mapping[str, Any], expected: ChannelPolicy | None
    ) -> ChannelList:
        async with self._changes.of(topic):
            found = self._topics.topic(topic)
            await self._change(found, lambda channels: channels.with_policy(channel, changes, expected=expected))
            await self.leaders.follow(found)
            logger.info("policy_changed", "TOPIC(%s): policy of channel(%s)", topic, channel, fields=[*changes])
            return found.record.channels

    async def pause_topic(self, topic: str, paused: bool) -> None:
        self._topics.topic(topic)
        await self._changes.whole(self._pause_topic(topic, paused))

    async def _pause_topic(self, topic: str, paused: bool) -> None:
        async with self._changes.of(topic):
            found = self._topics.topic(topic)
            await self._change(found, lambda channels: channels.with_topic_paused(paused))
            await self.leaders.follow(found)

    async def empty(self, topic: str, channel: str, partition: int | None = None) -> None:
        """`partition`: only this one."""
        self._existing(topic, channel)
        await self._changes.whole(self._empty(topic, channel, partition))

    async def _empty(self, topic: str, channel: str, partition: int | None) -> None:
        async with self._changes.of(topic):
            found, what = self._existing(topic, channel), Administration.EMPTY_CHANNEL
            await self.leaders.everywhere(found, what, channel, partition=partition)

    async def empty_topic(self, topic: str, partition: int | None = None) -> None:
        """`partition`: only this one."""
        self._topics.topic(topic)
        await self._changes.whole(self._empty_topic(topic, partition))

    async def _empty_topic(self, topic: str, partition: int | None) -> None:
        async with self._changes.of(topic):
            found = self._topics.topic(topic)
            await self._topics.first_channels.learn(found)  # what the topic keeps for them is not what is emptied
            await self.leaders.everywhere(found, Administration.EMPTY_TOPIC, partition=partition)

    async def seek(
        self, topic: str, channel: str, targets: Mapping[int, int | None]
    ) -> dict[int, SeekPlan | NsqhaError]:
        """Move the channel in these partitions (None: undo its last seek); what was done in each, or why it was not."""
        self._existing(topic, channel)
        return await self._changes.whole(self._seek(topic, channel, targets))

    async def _seek(
        self, topic: str, channel: str, targets: Mapping[int, int | None]
    ) -> dict[int, SeekPlan | NsqhaError]:
        async with self._changes.of(topic):
            found = self._existing(topic, channel)
            moving = [p for p in found.led if p.number in targets]
            moves = [self._move(p, channel, targets[p.number]) for p in moving]
            outcomes = await asyncio.gather(*moves)
        return dict(zip((p.number for p in moving), outcomes, strict=True))

    async def _move(self, partition: Partition, channel: str, target: int | None) -> SeekPlan | NsqhaError:
        cursors = partition.cursors
        if not partition.serving:
            return Unavailable(partition.begins)  # before an event is queued
        moved = cursors.channels.get(channel)
        requests = cursors.requests
        try:
            if target is None:
                plan = await in_steps(requests.planning_undo(channel))
                requests.undo(channel)
            else:
                plan = await in_steps(requests.planning_seek(channel, target))
                requests.seek(channel, target)
            await partition.commit_events()
        except NsqhaError as error:
            return error
        if moved is None or cursors.channels.get(channel) is not moved:
            return NotFound(f"channel {channel} was deleted meanwhile")  # another node's change takes no lock here
        # The event is applied and no later progress can be: this is where the seek came from and where it went.
        committed = moved.committed
        before = committed.undo
        assert before is not None
        clamped = plan.clamped or target not in (None, TARGET_END, committed.floor)
        return replace(
            plan, floor=before.floor, target=committed.floor, exact=before.ranges is not None, clamped=clamped
        )

    async def _change(self, topic: Topic, change: Change) -> None:
        """Change the record alone; `ChannelLeaders.follow` has the logs follow."""
        self.leaders.changed(topic, await self._metadata.change_channels(topic.versioned, change))
