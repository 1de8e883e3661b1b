"""Turns of partitions that begin to lead: so many at once, and one that waits for its followers ends its turn."""

from __future__ import annotations

import asyncio

from nsqha.server.replica.leading.turns import TURN_SECONDS, EpochTurns
from tests.unit.server.replica_rig import pause, run


def test_the_next_one_begins_when_the_first_batch_of_an_earlier_one_is_committed() -> None:
    async def scenario() -> None:
        turns, begun, order = EpochTurns(asyncio.get_running_loop(), at_once=2), asyncio.Future[None](), list[int]()

        async def begin(number: int) -> None:
            await turns.begin()
            order.append(number)

        tasks = [asyncio.create_task(begin(number)) for number in range(4)]
        await pause(0)
        assert order == [0, 1]
        turns.end(begun)
        turns.end(None)
        await pause(TURN_SECONDS / 2)
        assert order == [0, 1, 2], "of two that began, one leads nothing, and one waits for its followers"
        begun.set_result(None)
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3], "in the order in which they were elected"

    run(scenario)


def test_one_whose_followers_do_not_answer_holds_up_the_others_for_a_moment_only() -> None:
    async def scenario() -> None:
        turns, never = EpochTurns(asyncio.get_running_loop(), at_once=1), asyncio.Future[None]()
        await turns.begin()
        turns.end(never)
        waiting = asyncio.create_task(turns.begin())
        await pause(TURN_SECONDS * 0.9)
        assert not waiting.done()
        await pause(TURN_SECONDS * 0.2)
        assert waiting.done()
        never.set_result(None)  # in the end it is committed: that turn is over already
        third = asyncio.create_task(turns.begin())
        await pause(TURN_SECONDS * 2)
        assert not third.done(), "a turn is given back once"
        third.cancel()

    run(scenario)


def test_a_partition_that_can_not_lead_gives_its_turn_back_at_once() -> None:
    async def scenario() -> None:
        turns, done = EpochTurns(asyncio.get_running_loop(), at_once=1), asyncio.Future[None]()
        done.set_result(None)
        for begun in (None, done, None):
            await asyncio.wait_for(turns.begin(), TURN_SECONDS / 10)
            turns.end(begun)

    run(scenario)
