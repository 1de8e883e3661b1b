"""Moves dead letters to the topic that a channel's policy names.

Once a second, for each channel that this node leads and whose policy says `topic:NAME` (if there is one at all; a node
with thousands of topics finds it when the topic's turn comes, `nsqha.cursor.turns`): up to 100 letters, in order of
death, are published there as one unit, bodies unchanged; when that is answered they are finished here. A crash between
the two repeats them. Only deaths that are committed count: what a leader without followers takes for dead may be
delivered by the next one. While NAME takes nothing they stay, as dead letters that can be listed; the log says so once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING

from nsqha import hot
from nsqha.cursor.deferred.dead import DEAD_FROM
from nsqha.cursor.deferred.deferred_set import Deferred
from nsqha.cursor.live.acting import Action, act
from nsqha.cursor.turns import LookTurns
from nsqha.errors import LogCorrupt, NotInLog, NsqhaError
from nsqha.nsqlog import Logger

if TYPE_CHECKING:
    from nsqha.cursor.live.cursor import ChannelCursor
    from nsqha.cursor.passing import PassingChannels
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic

INTERVAL_SECONDS = 1.0
AT_ONCE = 100
BYTES_AT_ONCE = 1 << 20  # unless a single one is larger
_BODY = 34  # where it begins in a message's frame

logger = Logger("dead_letters")

Publish = Callable[[str, bytes], Awaitable[None]]


class DeadLetterMover:
    """Looks once a second which dead letters are to be moved, and moves them."""

    def __init__(self, topics: Mapping[str, Topic], publish: Publish, moving: Collection[PassingChannels]) -> None:
        """`publish` stores frames in a topic as one unit, wherever it is led, and creates it; NsqhaError if not.
        `moving`: of all partitions here that had such a channel."""
        self._topics = topics
        self._publish = publish
        self._moving = moving
        self._refused: set[tuple[str, int, str]] = set()  # topic, partition, channel whose letters wait
        self._turns = LookTurns[str]()  # of topics

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            for topic, partition in self._chosen():
                for cursor in list(partition.cursors.passing.moving):
                    await self._move(topic.name, partition, cursor)

    def _chosen(self) -> list[tuple[Topic, Partition]]:
        """The partitions that have such channels, as far as they are known now."""
        if not any(passing.moving for passing in list(self._moving)):
            return []
        topics = self._turns.choose(self._topics)
        found = [(topic, partition) for topic in topics for partition in topic.led if partition.cursors.passing.moving]
        self._turns.busy(topic.name for topic, _ in found)
        return found

    async def _move(self, topic: str, partition: Partition, cursor: ChannelCursor) -> None:
        key = topic, partition.number, cursor.name
        after = (DEAD_FROM, -1)
        while (to := _target(partition, cursor)) is not None:
            letters = cursor.deferred_overlay.dead_letters(after, AT_ONCE, committed=True)
            if not letters:
                self._refused.discard(key)
                return
            try:
                taken, frames = _read(partition, letters)
                if taken:
                    await self._publish(to, frames)
            except (NsqhaError, OSError) as error:
                if key not in self._refused:
                    self._refused.add(key)
                    text = "dead letters of %s/%s wait: they cannot be moved to %s: %s"
                    logger.warning("dead_letters_wait", text, topic, cursor.name, to, error, channel=cursor.name)
                return
            last = letters[-1] if not taken else taken[-1]
            after = (last.due_ns, last.offset)
            if not partition.closed:
                _finish(partition, cursor, taken)


def _target(partition: Partition, cursor: ChannelCursor) -> str | None:
    """Where the letters of this channel go now; None: they stay."""
    if partition.closed or not partition.serving or partition.cursors.channels.get(cursor.name) is None:
        return None
    policy = cursor.dead.policy
    return policy.topic if policy is not None else None


def _read(partition: Partition, letters: list[Deferred]) -> tuple[list[Deferred], bytes]:
    """As many of them as are moved at once, and their frames. One that cannot be read stays."""
    taken: list[Deferred] = []
    frames: list[bytes] = []
    size = 0
    for letter in letters:
        try:
            frame = hot.frame(bytes(partition.log.message(letter.offset, letter.position)[_BODY:]))
        except NotInLog as error:
            partition.life.wrong_state(partition, error)
            continue
        except LogCorrupt:
            continue
        if taken and size + len(frame) > BYTES_AT_ONCE:
            break
        taken.append(letter)
        frames.append(frame)
        size += len(frame)
    return taken, b"".join(frames)


def _finish(partition: Partition, cursor: ChannelCursor, moved: list[Deferred]) -> None:
    now = partition.now()
    for letter in moved:
        held = cursor.deferred_overlay.get(letter.offset)
        if held is not None and held.due_ns == letter.due_ns:  # else an operator was faster
            act(cursor, letter.offset, Action.FINISH, now)
    partition.deliveries.arm(now.mono)
