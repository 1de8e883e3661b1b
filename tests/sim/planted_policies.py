"""Planted bugs: policies, dead letters, what an operator does to single messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from nsqha.cursor.deferred.dead import DEAD_FROM
from nsqha.cursor.live import acting
from nsqha.cursor.live.channel import Channel
from nsqha.cursor.live.looking import MessageState, held
from nsqha.cursor.live.requeue import Requeues
from nsqha.cursor.passing import PassingChannels
from nsqha.hot import FINISHED
from nsqha.server.node import dead_letters
from nsqha.server.node.dead_letters import DeadLetterMover
from tests.sim.plan import Plan
from tests.sim.planting import mutant


def policies(plan: Plan) -> bool:
    return "set_policy" in plan.operations


@mutant(policies)
def mover_finishes_before_ok() -> Iterator[None]:
    """A mover that finishes dead letters before they are stored where they belong."""
    move = DeadLetterMover._move

    async def wrong(self: DeadLetterMover, topic: str, partition: Any, cursor: Any) -> None:
        letters = cursor.deferred_overlay.dead_letters((DEAD_FROM, -1), 100, committed=True)
        publish = self._publish

        async def finish_first(to: str, frames: bytes) -> None:
            dead_letters._finish(partition, cursor, letters)
            await publish(to, frames)

        self._publish = finish_first
        try:
            await move(self, topic, partition, cursor)
        finally:
            self._publish = publish

    with patch.object(DeadLetterMover, "_move", wrong):
        yield


@mutant(policies)
def leader_shows_more_attempts() -> Iterator[None]:
    """Attempts above max_attempts, of what was deferred before the policy, or by another leader."""
    with patch.object(Channel, "redelivery", Channel._next_redelivery):
        yield


@mutant(policies)
def death_is_not_in_the_log() -> Iterator[None]:
    """A death that is a finish: nobody knows of it."""

    def wrong(self: Requeues, offset: int, attempts: int, reason: Any, now: Any, *, deferred: bool) -> None:
        cursor = self._cursor
        cursor.dead.letter(offset, attempts, reason, now.wall_ns)
        if deferred:
            cursor.finish_deferred(offset)
        else:
            cursor.ring.set(offset, FINISHED)
        cursor.mark_dirty()

    with patch.object(Requeues, "_die", wrong):
        yield


@mutant(policies)
def requeue_loses_dead_letters() -> Iterator[None]:
    """A requeue of a dead letter that loses it."""
    act = acting.act

    def wrong(cursor: Any, offset: int, action: Any, now: Any, *, due_ns: int = 0) -> int:
        if action is acting.Action.REQUEUE:
            acting.check(cursor, offset, action)
            found = held(cursor, offset)
            if found is not None and found.state is MessageState.DEAD:
                cursor.finish_deferred(offset)
                cursor.mark_dirty()
                return 0
        return act(cursor, offset, action, now, due_ns=due_ns)

    with patch("nsqha.admin.messages.act", wrong):
        yield


@mutant(policies)
def ttl_drops_everything_at_once() -> Iterator[None]:
    """Whatever its age is, a channel with a ttl passes it over."""

    def wrong(self: PassingChannels, wall_ns: int, first_since: Callable[[int], int]) -> bool:
        return expire(self, wall_ns, lambda time_ns: first_since(1 << 62))

    expire = PassingChannels.expire
    with patch.object(PassingChannels, "expire", wrong):
        yield
