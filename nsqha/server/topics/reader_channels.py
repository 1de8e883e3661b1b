"""Channels of readers of the log's files: how they are made, and how their floors move.

A reader commits the next offset that it has not read. Its channel is made at the first commit. Moving a floor changes
one partition's log alone, so it takes no lock of the topic, and a partition that commits nothing keeps no other one
from moving; what has not ended there is waited for before the next move of it begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.errors import NotFound, NsqhaError, Unavailable, WrongKind
from nsqha.server.partition.partition import Partition
from nsqha.server.partition.topic import Topic
from nsqha.server.runtime.tasks import Unfinished
from nsqha.server.topics.channel_list import check_kind, check_there, wrong_kind

if TYPE_CHECKING:
    from nsqha.server.topics.topics import Topics

MOVE_SECONDS = 3.0  # for one partition to commit a reader's floor: less than another node waits for all of them


class ReaderChannels:
    """The channels of readers in all topics of this node."""

    def __init__(self, topics: Topics, make: Callable[[Topic, str], Awaitable[bool]]) -> None:
        """`make`: a channel of a reader, if it is not there; False if its topic is being deleted."""
        self._topics = topics
        self._make = make
        self._moves = Unfinished[tuple[Partition, str]]()  # of floors

    async def ensure(self, topic: str, channel: str) -> None:
        """Make a reader's channel if it is not there. WrongKind: it is one for consumers. ValueError: in an #ephemeral
        topic, or of an #ephemeral name, there can be none. NotFound, Unavailable, LimitReached."""
        found = self._topics.topic(topic)
        if found.ephemeral or ids.is_ephemeral(channel):
            raise ValueError(f"channel {channel} of topic {topic}: what is #ephemeral keeps nothing for a reader")
        if not await self._make(found, channel):
            raise Unavailable("deleted topic/channel")

    async def commit(
        self, topic: str, channel: str, offsets: Mapping[int, int], *, back: bool, topic_uid: int = 0
    ) -> dict[int, int | NsqhaError]:
        """A reader has read up to these offsets (partition -> next offset): the floors in those that are led here, or
        why one was not moved. `back`: floors may go down too. The channel is made if it is not there; asking again does
        no harm. `topic_uid`: only in this life of the topic; 0: whichever there is. Errors as of `ensure`; WrongKind
        also if it is another life."""
        found = self.topic_of_life(topic, topic_uid)
        if found.is_reader(channel) is None:
            await self.ensure(topic, channel)
            found = self.topic_of_life(topic, topic_uid)  # as it may be another one by now
            check_there(found, channel)
        check_kind(found, channel, reader=True)
        moving = [p for p in found.led if p.number in offsets]
        moves = [self._moved(found, p, channel, offsets[p.number], back) for p in moving]
        return dict(zip((p.number for p in moving), await asyncio.gather(*moves), strict=True))

    def topic_of_life(self, name: str, uid: int) -> Topic:
        """The topic of this name, in the life of this uid; 0: any. NotFound, WrongKind."""
        found = self._topics.topic(name)
        if uid not in (0, found.record.uid):
            raise WrongKind(
                f"topic {name} was deleted and made again: it is {found.record.uid:016x}, and {uid:016x} is meant"
            )
        return found

    async def _moved(
        self, topic: Topic, partition: Partition, channel: str, target: int, back: bool
    ) -> int | NsqhaError:
        def move() -> Coroutine[Any, Any, int | NsqhaError]:
            return _move(topic, partition, channel, target, back)

        def waits_for() -> str:
            return partition.leader.waits_for or "its leader commits nothing"

        try:
            return await self._moves.do((partition, channel), move, MOVE_SECONDS, waits_for)
        except NsqhaError as error:
            return error


async def _move(topic: Topic, partition: Partition, channel: str, target: int, back: bool) -> int | NsqhaError:
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
