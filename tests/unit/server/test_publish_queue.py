"""The queue in front of a partition's log: what goes together, and who waits for which run."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqha.errors import OutcomeUnknown, Unavailable
from nsqha.server import budget as budget_module
from nsqha.server.budget import PublishBudget
from nsqha.server.publish_queue import BATCH_BYTES, NOT_STORED, OUTCOME_UNKNOWN, PublishQueue, Reply
from nsqha.server.publishing import PublishWaiter


class Nobody:
    def stored(self) -> None: ...

    def failed(self, why: str) -> None: ...


def filled(sizes: list[int], *, since: list[float] | None = None) -> tuple[PublishQueue, list[Reply], PublishBudget]:
    loop = asyncio.new_event_loop()
    budget = PublishBudget(loop, 1 << 40)
    loop.close()  # nobody waits for room here
    queue = PublishQueue(budget)
    replies: list[Reply] = [Nobody() for _ in sizes]
    for n, (size, reply) in enumerate(zip(sizes, replies, strict=True)):
        queue.add(bytes([n % 256]) * size, reply, since[n] if since else float(n), n if n % 3 == 0 else None)
    return queue, replies, budget


@given(st.lists(st.integers(1, BATCH_BYTES * 2), max_size=8), st.integers(0, 2**32))
def test_every_run_is_taken_once_in_order_with_its_waiter_and_its_delay(sizes, seed):
    queue, replies, budget = filled(sizes)
    assert budget.used == queue.bytes_waiting == sum(sizes)
    rng, runs, waiters, delayed = random.Random(seed), [], [], []
    while queue.runs:
        taken = queue.take_since(float(len(waiters) + rng.randrange(3))) if rng.random() < 0.3 else queue.take()
        assert taken.size == sum(map(len, taken.runs)) and len(taken.runs) == len(taken.waiters)
        delayed += [(len(runs) + index, delay) for index, delay in taken.delays]
        runs += taken.runs
        waiters += [reply for reply, _ in taken.waiters]
        assert queue.bytes_waiting == sum(map(len, queue.runs))
    assert [len(run) for run in runs] == sizes
    assert waiters == replies
    assert delayed == [(n, n) for n in range(0, len(sizes), 3)]


def test_a_batch_ends_before_the_run_that_is_too_much_and_a_large_run_goes_alone():
    queue, _, _ = filled([BATCH_BYTES - 10, 10, 1, 3 * BATCH_BYTES, 5])
    assert [len(queue.take().runs) for _ in range(4)] == [2, 1, 1, 1]


def test_only_the_first_ones_are_overdue():
    queue, _, _ = filled([1, 1, 1, 1], since=[1.0, 2.0, 9.0, 2.0])
    assert len(queue.take_since(5.0).runs) == 2
    assert len(queue.take_since(5.0).runs) == 0
    assert len(queue.runs) == 2


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
