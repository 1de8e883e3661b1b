"""Who was elected first begins first, and nobody holds up the others for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from nsqha.server.replica import lead_turns
from nsqha.server.replica.lead_turns import AT_ONCE, TURN_SECONDS, LeadTurns


class Timers:
    """The timers of a loop, which end when the test says so."""

    def __init__(self) -> None:
        self.due: list[tuple[Callable[[], None], Any]] = []

    def create_future(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    def call_later(self, seconds: float, call: Callable[[], None]) -> Any:
        assert seconds == TURN_SECONDS
        handle = type("Handle", (), {"cancel": lambda me: self.due.remove((call, me))})()
        self.due.append((call, handle))
        return handle


class Turns:
    """Partitions that each begin when their turn comes, and then wait to be let on."""

    def __init__(self, count: int) -> None:
        self.timers = Timers()
        self.turns = LeadTurns(cast(asyncio.AbstractEventLoop, self.timers))
        self.begun: list[int] = []
        self.go_on = [asyncio.Event() for _ in range(count)]
        self.tasks = [asyncio.ensure_future(self._lead(number)) for number in range(count)]

    async def _lead(self, number: int) -> None:
        async with self.turns.turn():
            self.begun.append(number)
            await self.go_on[number].wait()

    async def settled(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def test_those_that_came_first_begin_first_and_so_many_at_once() -> None:
    async def scenario() -> None:
        turns = Turns(2 * AT_ONCE)
        await turns.settled()
        assert turns.begun == list(range(AT_ONCE))
        for number in (7, 3):
            turns.go_on[number].set()
            await turns.settled()
        assert turns.begun == list(range(AT_ONCE + 2))
        for one in turns.go_on:
            one.set()
        await asyncio.gather(*turns.tasks)
        assert turns.begun == list(range(2 * AT_ONCE)) and not turns.timers.due

    asyncio.run(scenario())


def test_those_that_wait_for_something_hold_up_the_others_for_a_moment_only() -> None:
    async def scenario() -> None:
        turns = Turns(2 * AT_ONCE)
        await turns.settled()
        for call, _ in list(turns.timers.due):
            call()
        await turns.settled()
        assert len(turns.begun) == 2 * AT_ONCE
        for one in turns.go_on:
            one.set()
        await asyncio.gather(*turns.tasks)  # a turn that was over ends once
        again = [asyncio.ensure_future(turns.turns.taken()) for _ in range(AT_ONCE + 1)]
        await turns.settled()
        assert sum(task.done() for task in again) == AT_ONCE
        again[-1].cancel()

    asyncio.run(scenario())


def test_who_is_gone_takes_no_turn() -> None:
    async def scenario() -> None:
        turns = Turns(AT_ONCE + 3)
        await turns.settled()
        turns.tasks[AT_ONCE].cancel()
        turns.go_on[0].set()
        await turns.settled()
        assert turns.begun[AT_ONCE:] == [AT_ONCE + 1]
        turns.turns.ended()  # it is given to the last one, which is gone before it hears of that
        turns.tasks[AT_ONCE + 2].cancel()
        await turns.settled()
        assert turns.begun[AT_ONCE:] == [AT_ONCE + 1]
        await turns.turns.taken()
        for one in turns.go_on:
            one.set()
        await asyncio.gather(*turns.tasks, return_exceptions=True)

    asyncio.run(scenario())


def test_a_few_do_not_wait_at_all(monkeypatch: Any) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(lead_turns, "TURN_SECONDS", 3600.0)
        turns = LeadTurns(asyncio.get_running_loop())
        async with turns.turn(), turns.turn():
            pass

    asyncio.run(scenario())
