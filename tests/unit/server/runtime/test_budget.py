"""How much of publishes a node takes, in which order, and what is told of what it did not take."""

from __future__ import annotations

import asyncio

import pytest

from nsqha.errors import OutcomeUnknown, Unavailable
from nsqha.hot import NOT_STORED, OUTCOME_UNKNOWN
from nsqha.server.clients.publish import PublishWaiter
from nsqha.server.runtime import budget as budget_module
from nsqha.server.runtime.budget import PublishBudget


def test_what_waits_for_room_does_not_come_all_at_once() -> None:
    """A disk that stalled for a minute: each request has read its body, and all of them are woken."""

    async def story() -> None:
        budget = PublishBudget(asyncio.get_running_loop(), 100)
        budget.take(101)
        most = 0

        async def publish() -> None:
            nonlocal most
            await budget.wait(10)
            budget.take(101)
            most = max(most, budget.used)
            await asyncio.sleep(0)
            budget.give(101)

        waiting = [asyncio.ensure_future(publish()) for _ in range(20)]
        await asyncio.sleep(0)
        budget.give(101)
        await asyncio.gather(*waiting)
        assert most == 101 and not budget.used

    asyncio.run(story())


def test_who_asks_for_room_first_has_it_first_and_who_leaves_takes_none() -> None:
    async def story() -> None:
        budget = PublishBudget(asyncio.get_running_loop(), 100)
        await budget.enter(101, 10)
        order: list[int] = []

        async def enter(number: int) -> None:
            await budget.enter(101, 10)
            order.append(number)
            await asyncio.sleep(0)
            budget.give(101)

        waiting = [asyncio.ensure_future(enter(n)) for n in range(10)]
        await asyncio.sleep(0)
        waiting[3].cancel()
        with pytest.raises(Unavailable):
            await budget.enter(1, 0)  # not before those who wait
        budget.give(101)
        await asyncio.gather(*waiting, return_exceptions=True)
        assert order == [n for n in range(10) if n != 3] and not budget.used

    asyncio.run(story())


def test_room_that_comes_when_its_taker_has_just_left_is_given_back() -> None:
    async def story() -> None:
        budget = PublishBudget(asyncio.get_running_loop(), 100)
        await budget.enter(101, 10)
        late = asyncio.ensure_future(budget.enter(7, 10))
        await asyncio.sleep(0)
        budget.give(101)
        asyncio.get_running_loop().call_soon(late.cancel)  # behind the one that enters it
        await asyncio.gather(late, return_exceptions=True)
        assert late.cancelled() and not budget.used

    asyncio.run(story())


def test_only_so_many_wait_to_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "WAITING_MAX", 2)

    async def story() -> None:
        budget = PublishBudget(asyncio.get_running_loop(), 100)
        await budget.enter(101, 10)
        waiting = [asyncio.ensure_future(budget.enter(1, 10)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await budget.enter(1, 10)
        budget.give(101)
        await asyncio.gather(*waiting)
        assert budget.used == 2

    asyncio.run(story())


@pytest.mark.parametrize(
    ("why", "error"),
    [(NOT_STORED + "full", Unavailable), (OUTCOME_UNKNOWN + "late", OutcomeUnknown), ("whatever", OutcomeUnknown)],
)
def test_only_what_is_not_stored_for_certain_is_told_so(why: str, error: type[Exception]) -> None:
    async def story() -> None:
        waiter = PublishWaiter(asyncio.get_running_loop().create_future())
        waiter.failed(why)
        with pytest.raises(error):
            await waiter.future

    asyncio.run(story())
