"""The channels of topics: how they are made, deleted, paused, emptied and moved on every node that leads a part.

The channel list is one record in the metadata. A change of it is a compare-and-set, then every leader brings its log in
line: what is led here at once (`Topic.reconcile`), the others through the `Reconciler`, whose questions to this node
are answered here too (`follow`, `carry_out`, `led_elsewhere`). What is not in the record (#ephemeral channels, empty,
seek) is an event in the logs alone. A topic is paused in the same record and emptied by the same events.

Owns nothing: the record is the store's, the newest seen of it the `Topic`'s, cursors the partitions'. Invariants: a
change is answered when every partition has it in its committed log, or as Unavailable; changes of one topic come one
after the other, run to their end (`Changes`), and look at the world again when their turn comes. Moving the floor of a
reader channel is none: it changes one partition's log alone, so one that commits nothing keeps nobody from the others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.cursor.events import TARGET_END
from nsqha.cursor.seek import SeekPlan
from nsqha.election.model import ChannelList
from nsqha.errors import LimitReached, NotFound, NsqhaError, OutcomeUnknown, Unavailable, WrongKind
from nsqha.nsqlog import Logger
from nsqha.options import Options
from nsqha.server.partition.partition import Partition
from nsqha.server.partition.topic import Topic
from nsqha.server.routing.leaders import Administration
from nsqha.server.runtime.metadata import NodeMetadata
from nsqha.server.runtime.tasks import Changes, Unfinished

if TYPE_CHECKING:
    from nsqha.server.routing.channel_sync import Reconciler
    from nsqha.server.topics.topics import Topics

LEADER_RETRY_SECONDS = 0.02  # a leader whose epoch has only begun
MOVE_SECONDS = 3.0  # for one partition to commit a reader's floor: less than another node waits for all of them
READERS_MAX = 64  # reader channels of one topic: each holds its retention, and any reader may make them

logger = Logger("channels")


Change = Callable[[ChannelList], ChannelList]


def wrong_kind(topic: str, channel: str, *, reader: bool) -> WrongKind:
    """Why a channel that is there, and is a reader's or not, does not do."""
    if reader:
        what = "is a reader's: it is moved by nsqha spark, not by consumers"
    else:
        what = "is one for consumers: a reader needs a channel of its own"
    return WrongKind(f"channel {channel} of topic {topic} {what}")


async def add_channel(
    change: Callable[[Topic, Change], Awaitable[None]],
    rng: random.Random,
    topic: Topic,
    channel: str,
    *,
    reader: bool = False,
) -> None:
    """Into the record, by `change`; an #ephemeral one, which has no place there, into the logs that are led here.

    The logs of the others follow by `Topic.reconcile`. WrongKind: it is there, and of the other kind. LimitReached:
    there are READERS_MAX others for readers."""
    if ids.is_ephemeral(channel):
        for partition in topic.led:
            if partition.serving:  # another leader's epoch may have only begun; it is asked again
                partition.cursors.requests.create_ephemeral(channel, ids.new_uid(rng))
        return
    uid = ids.new_uid(rng)

    def added(channels: ChannelList) -> ChannelList:
        there = channels.channels.get(channel)
        if there is None:
            if reader and sum(other.reader for other in channels.channels.values()) >= READERS_MAX:
                raise LimitReached(
                    f"topic {topic.name} has {READERS_MAX} reader channels, as many as there may be: delete one that "
                    f"nobody uses (nsqha channel delete)"
                )
            return channels.with_channel(channel, uid, reader=reader)
        if there.reader != reader:
            raise wrong_kind(topic.name, channel, reader=there.reader)
        return channels

    await change(topic, added)


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
        self.reconciler: Reconciler | None = None  # None: this node is alone, and leads everything
        self._topics = topics
        self._wait_seconds = options.publish_wait_ns / 1e9
        self._node_uid = node_uid
        self._rng = rng
        self._metadata = metadata
        self._changes = changes
        self._moves = Unfinished[tuple[Partition, str]]()  # of readers' floors

    # ---- made and deleted

    def has(self, topic: str, channel: str) -> bool:
        found = self._topics.get(topic)
        return found is not None and found.has_channel(channel)

    def _existing(self, topic: str, channel: str) -> Topic:
        found = self._topics.topic(topic)
        if not found.has_channel(channel):
            raise NotFound(f"there is no channel {channel} of topic {topic}")
        return found

    async def create(self, topic: str, channel: str) -> None:
        if not await self.ensure(self._topics.topic(topic), channel):
            raise Unavailable("deleted topic/channel")

    async def ensure_reader(self, topic: str, channel: str) -> None:
        """Make a reader's channel if it is not there. WrongKind: it is one for consumers. ValueError: in an #ephemeral
        topic, or of an #ephemeral name, there can be none. NotFound, Unavailable, LimitReached."""
        found = self._topics.topic(topic)
        if found.ephemeral or ids.is_ephemeral(channel):
            raise ValueError(f"channel {channel} of topic {topic}: what is #ephemeral keeps nothing for a reader")
        if not await self.ensure(found, channel, reader=True):
            raise Unavailable("deleted topic/channel")

    async def ensure(self, topic: Topic, channel: str, *, reader: bool = False) -> bool:
        """Make the channel if it is not there; False if its topic is being deleted. WrongKind: one of the other kind
        is there."""
        self._check_kind(topic, channel, reader)
        if not self._has(topic, channel):
            await self._changes.once((topic.record.uid, channel), lambda: self._create(topic, channel, reader))
            self._check_kind(topic, channel, reader)  # somebody else may have made it
        return not topic.deleting

    def _check_kind(self, topic: Topic, channel: str, reader: bool) -> None:
        there = topic.is_reader(channel)
        if there not in (None, reader):
            raise wrong_kind(topic.name, channel, reader=there)

    def _has(self, topic: Topic, channel: str) -> bool:
        return topic.serves(channel) if self.reconciler is None else topic.knows(channel)

    async def _create(self, topic: Topic, channel: str, reader: bool) -> None:
        async with self._changes.of(topic.name):
            if topic.deleting or self._has(topic, channel):
                return
            await add_channel(self._change, self._rng, topic, channel, reader=reader)
            await self._all_follow(topic)
            logger.info("channel_created", "TOPIC(%s): new channel(%s)", topic.name, channel)
        self._topics.announce(topic.name)

    async def delete(self, topic: str, channel: str) -> None:
        self._existing(topic, channel)
        await self._changes.whole(self._delete(topic, channel))

    async def delete_if_unused(self, topic: str, channel: str) -> None:
        """Delete it, unless it has a consumer when its turn comes."""
        await self._changes.once(("unused", topic, channel), lambda: self._delete(topic, channel, unless_used=True))

    async def leave(self, topic: str, channel: str) -> None:
        """Nobody may be left who reads this #ephemeral channel."""
        with suppress(NotFound, Unavailable, OutcomeUnknown):  # somebody else deleted it, or it goes on
            await self.delete_if_unused(topic, channel)

    async def _delete(self, topic: str, channel: str, *, unless_used: bool = False) -> None:
        async with self._changes.of(topic):
            found = self._existing(topic, channel)
            if unless_used and found.used(channel):
                return
            with found.leaves(channel):  # a SUB that comes now waits for the lock, and makes it anew
                if ids.is_ephemeral(channel):
                    for partition in found.led:
                        partition.cursors.requests.delete_ephemeral(channel)
                    await found.commit_events()
                else:
                    await self._change(found, lambda channels: channels.without_channel(channel))
                    await self._all_follow(found)
            logger.info("channel_deleted", "TOPIC(%s): deleted channel(%s)", topic, channel)
            self._topics.announce(topic)
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
                await self._everywhere(found, what, channel)
            else:
                await self._change(found, lambda channels: channels.with_channel_paused(channel, paused))
                await self._all_follow(found)
        found.wake(channel)

    async def pause_topic(self, topic: str, paused: bool) -> None:
        self._topics.topic(topic)
        await self._changes.whole(self._pause_topic(topic, paused))

    async def _pause_topic(self, topic: str, paused: bool) -> None:
        async with self._changes.of(topic):
            found = self._topics.topic(topic)
            await self._change(found, lambda channels: channels.with_topic_paused(paused))
            await self._all_follow(found)

    async def empty(self, topic: str, channel: str) -> None:
        self._existing(topic, channel)
        await self._changes.whole(self._empty(topic, channel))

    async def _empty(self, topic: str, channel: str) -> None:
        async with self._changes.of(topic):
            await self._everywhere(self._existing(topic, channel), Administration.EMPTY_CHANNEL, channel)

    async def empty_topic(self, topic: str) -> None:
        self._topics.topic(topic)
        await self._changes.whole(self._empty_topic(topic))

    async def _empty_topic(self, topic: str) -> None:
        async with self._changes.of(topic):
            await self._everywhere(self._topics.topic(topic), Administration.EMPTY_TOPIC)

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
        try:
            plan = cursors.requests.undo(channel) if target is None else cursors.requests.seek(channel, target)
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

    # ---- moved by readers

    async def commit_reader(
        self, topic: str, channel: str, offsets: Mapping[int, int], *, back: bool, topic_uid: int = 0
    ) -> dict[int, int | NsqhaError]:
        """A reader has read up to these offsets (partition -> next offset): the floors in those that are led here, or
        why one was not moved. `back`: floors may go down too. The channel is made if it is not there; asking again does
        no harm. `topic_uid`: only in this life of the topic; 0: whichever there is. Errors as of `ensure_reader`;
        WrongKind also if it is another life."""
        found = self.life(topic, topic_uid)
        if found.is_reader(channel) is None:
            await self.ensure_reader(topic, channel)
            self.life(topic, topic_uid)  # as it may be another one by now
            found = self._existing(topic, channel)
        self._check_kind(found, channel, True)
        moving = [p for p in found.led if p.number in offsets]
        moves = [self._moved(found, p, channel, offsets[p.number], back) for p in moving]
        return dict(zip((p.number for p in moving), await asyncio.gather(*moves), strict=True))

    def life(self, name: str, uid: int) -> Topic:
        """The topic of this name, in the life of this uid; 0: any. NotFound, WrongKind."""
        found = self._topics.topic(name)
        if uid not in (0, found.record.uid):
            raise WrongKind(
                f"topic {name} was deleted and made anew: it is {found.record.uid:016x}, and {uid:016x} is meant"
            )
        return found

    async def _moved(
        self, topic: Topic, partition: Partition, channel: str, target: int, back: bool
    ) -> int | NsqhaError:
        def move() -> Coroutine[Any, Any, int | NsqhaError]:
            return self._move_reader(topic, partition, channel, target, back)

        def waits_for() -> str:
            return partition.leader.waits_for or "its leader commits nothing"

        try:
            return await self._moves.do((partition, channel), move, MOVE_SECONDS, waits_for)
        except NsqhaError as error:
            return error

    async def _move_reader(
        self, topic: Topic, partition: Partition, channel: str, target: int, back: bool
    ) -> int | NsqhaError:
        cursors = partition.cursors
        try:
            if not partition.serving:
                raise Unavailable(partition.begins)
            if channel not in cursors.channels:  # its log does not follow the record yet
                cursors.requests.reconcile(topic.record.channels)
                await partition.commit_events()
            moved = cursors.channels.get(channel)
            if moved is not None and moved.committed.reader:
                floor, goal = moved.committed.floor, cursors.state.clamp(moved.committed, target)
                if goal > floor or (back and goal < floor):
                    (cursors.requests.seek if back else cursors.requests.advance)(channel, target)
                    await partition.commit_events()
        except NsqhaError as error:
            return error
        if moved is None or cursors.channels.get(channel) is not moved:
            return NotFound(f"channel {channel} was deleted meanwhile")
        return moved.committed.floor if moved.committed.reader else wrong_kind(topic.name, channel, reader=False)

    # ---- all leaders have what the record says

    async def _change(self, topic: Topic, change: Change) -> None:
        """Change the record alone; `_all_follow` has the logs follow."""
        changed = await self._metadata.change_channels(topic.versioned, change)
        if self.reconciler is None:
            topic.versioned = changed
        elif self._topics.get(topic.name) is topic:
            # Other nodes change it too: perhaps the settings just before, or the whole of it since.
            self._topics.adopt(changed)

    async def _all_follow(self, topic: Topic) -> None:
        """Every leader has what the record says in its log, the ones on other nodes included. Unavailable if not."""
        if self.reconciler is None:
            await topic.reconcile()
        else:
            await self._led_follow(topic)
            await self.reconciler.others_follow(topic)

    async def _led_follow(self, topic: Topic) -> list[int]:
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
        """Another node changed the record: which partitions are led here and follow it now. NotFound, Unavailable.

        No lock is taken: whoever asks holds his, and may be asked by us at the same time.
        """
        topic = self._topics.of_uid(name, uid)
        if topic is None or topic.record.channels.version < version:
            topic = await self._read_again(name, uid)
        if topic.record.channels.version < version:
            raise Unavailable(f"the record of topic {name} is not as new as version {version} of its channels")
        return await self._led_follow(topic)

    async def _read_again(self, name: str, uid: int) -> Topic:
        """The topic with its record as it is now."""
        fresh = await self._metadata.read(lambda: self._metadata.store.topic(name))
        if fresh is None or fresh.record.uid != uid:
            raise NotFound(f"there is no topic {name} any more")
        return self._topics.take(fresh)

    async def ensure_here(self, topic: Topic, channel: str) -> None:
        """A client of another node reads a channel of what is led here. NotFound: the record does not have it.
        WrongKind: nobody reads it, it is a reader's."""
        if ids.is_ephemeral(channel):
            await self.ensure(topic, channel)
        elif not topic.knows(channel):
            topic = await self._read_again(topic.name, topic.record.uid)
            if channel not in topic.record.channels.channels:
                raise NotFound("deleted topic/channel")
        self._check_kind(topic, channel, False)

    async def led_elsewhere(self, name: str, uid: int) -> dict[int, str]:
        """Who leads partitions of a topic on other nodes, by a linearizable read: number -> address, without those
        whose leader has no lease. NotFound, Unavailable."""
        store = self._metadata.store
        found, nodes = await self._metadata.read(lambda: (store.topic(name), store.nodes()))
        if found is None or found.record.uid != uid:
            raise NotFound(f"there is no topic {name} any more")
        leaders = {number: meta.leader for number, meta in found.record.partitions.items()}
        return {n: nodes[at].grpc_address for n, at in leaders.items() if at != self._node_uid and at in nodes}

    # ---- what is not in the record

    async def _everywhere(self, topic: Topic, what: Administration, channel: str = "") -> None:
        """Have it done in every partition, those that are led elsewhere included. Unavailable if not."""
        if self.reconciler is not None:
            await self.reconciler.everybody_does(topic, what, channel)
        else:
            await self.carry_out(topic.name, topic.record.uid, what, channel)

    async def carry_out(
        self, name: str, uid: int, what: Administration, channel: str, numbers: Collection[int] | None = None
    ) -> list[int]:
        """Do it in what is led here of these partitions, None: of all; the numbers of those in which it is done.
        NotFound, Unavailable: in none of them, or not in all if all were asked for."""
        topic = self._topics.of_uid(name, uid)
        if topic is None:
            raise NotFound(f"there is no topic {name} any more")
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
