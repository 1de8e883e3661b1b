"""Dead letters on their way to another topic: in order, once, and kept while that takes nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from nsqha.cursor.deferred.deferred_set import Deferred
from nsqha.cursor.live.acting import Action, act
from nsqha.cursor.passing import PassingChannels
from nsqha.errors import LogCorrupt, Unavailable
from nsqha.server.node.dead_letters import DeadLetterMover
from tests.unit.cursor.tiny import Leader


class TinyPartition:
    """What the mover needs of a partition, over a log in memory."""

    number, closed, serving = 0, False, True

    def __init__(self, leader: Leader) -> None:
        self.cursors = leader.cursors
        self.unreadable: set[int] = set()
        self.log = SimpleNamespace(message=self._message)
        self.deliveries = SimpleNamespace(arm=lambda mono: None)
        self.now = lambda: leader.now
        self._frame_of = leader.log.frame_of

    def _message(self, offset: int, position: int) -> bytes:
        if offset in self.unreadable:
            raise LogCorrupt("damaged")
        return self._frame_of(offset)


class Moving:
    """A channel with dead letters, and the topic that they go to."""

    def __init__(self, count: int) -> None:
        self.leader = Leader()
        self.channel = self.leader.create("c")
        self.leader.ask(max_attempts=1, dead_letter="topic:elsewhere")
        self.leader.publish(count)
        for offset in self.leader.deliver(self.channel):
            self.leader.clock.advance(0.001)
            self.channel.req(offset, 1, 0, self.leader.now)
        self.leader.flush()
        self.partition = TinyPartition(self.leader)
        self.published: list[bytes] = []
        self.away = False
        self.topics: Any = {"t": SimpleNamespace(name="t", led=[self.partition])}
        moving: list[PassingChannels] = []
        self.leader.cursors.passing.when_moving(moving.append)
        self.mover = DeadLetterMover(self.topics, self._publish, moving)

    async def _publish(self, topic: str, frames: bytes) -> None:
        assert topic == "elsewhere"
        if self.away:
            raise Unavailable("no leader")
        self.published += [part for part in frames.split(b"\0\0\0\2")[1:] if part]
        await asyncio.sleep(0)

    def look(self) -> None:
        (cursor,) = self.leader.cursors.passing.moving
        asyncio.run(self.mover._move("t", self.partition, cursor))  # type: ignore[arg-type]

    @property
    def letters(self) -> list[Deferred]:
        return self.channel.cursor.deferred_overlay.dead_letters((0, 0), 1000)


def bodies(published: list[bytes]) -> list[str]:
    return [frame[26:].split(b"\0")[0].decode() for frame in published]


def test_all_are_moved_in_order_of_death():
    moving = Moving(250)
    moving.look()
    assert bodies(moving.published) == [f"m{n}" for n in range(250)]
    assert moving.letters == []
    moving.leader.flush()
    assert len(moving.channel.committed.deferred) == 0


def test_they_stay_while_the_topic_takes_nothing():
    moving = Moving(3)
    moving.away = True
    moving.look()
    assert len(moving.letters) == 3
    moving.away = False
    moving.look()
    assert (bodies(moving.published), moving.letters) == (["m0", "m1", "m2"], [])


def test_one_that_cannot_be_read_stays_and_does_not_hold_up_the_others():
    moving = Moving(3)
    moving.partition.unreadable = {0}
    moving.look()
    assert bodies(moving.published) == ["m1", "m2"]
    assert [letter.offset for letter in moving.letters] == [0]


def test_what_an_operator_raised_meanwhile_is_not_finished():
    moving = Moving(1)
    publish = moving.mover._publish

    async def raised(topic: str, frames: bytes) -> None:
        await publish(topic, frames)
        act(moving.channel.cursor, 0, Action.REQUEUE, moving.leader.now)

    moving.mover._publish = raised  # type: ignore[method-assign]
    moving.look()
    assert [redelivery.offset for redelivery in moving.leader.redeliver(moving.channel)] == [0]


def test_a_channel_whose_policy_says_nothing_is_not_looked_at():
    moving = Moving(1)
    moving.leader.ask(max_attempts=1)
    assert moving.leader.cursors.passing.moving == []


def test_topics_are_looked_through_only_while_some_channel_moves_its_letters():
    moving = Moving(1)
    moving.leader.ask(max_attempts=1)
    moving.topics["t"].led = None  # a look at it would fail
    assert moving.mover._chosen() == []
    moving.topics["t"].led = [moving.partition]
    moving.leader.ask(max_attempts=1, dead_letter="topic:elsewhere")
    assert moving.mover._chosen() == [(moving.topics["t"], moving.partition)]


def test_only_deaths_that_are_committed_are_moved():
    moving = Moving(1)
    moving.leader.publish(1)
    moving.leader.deliver(moving.channel)
    moving.channel.req(1, 1, 0, moving.leader.now)
    assert len(moving.letters) == 2
    moving.look()
    assert bodies(moving.published) == ["m0"]
    moving.leader.flush()
    moving.look()
    assert bodies(moving.published) == ["m0", "m1"]
