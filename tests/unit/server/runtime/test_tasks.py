"""Work that takes long, or does not end: who waits, how long and for which, and one piece at a time for each thing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from nsqha.errors import NotFound, OutcomeUnknown
from nsqha.server.partition.partition import Partition
from nsqha.server.runtime.tasks import (
    Changes,
    Locks,
    Shared,
    StillUnderWay,
    TaskGroup,
    Unfinished,
    beside,
    first_done,
    some_at_once,
)
from tests.unit.server.broker_rig import running, until

LONG, SHORT = 10.0, 0.02


class Works:
    """What was begun, and what lets it end."""

    def __init__(self) -> None:
        self.unfinished = Unfinished[str]()
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    def work(self, name: str) -> Callable[[], Coroutine[Any, Any, str]]:
        async def until_it_may() -> str:
            self.begun.append(name)
            await self.ends.setdefault(name, asyncio.Event()).wait()
            return name

        return until_it_may

    async def do(self, key: str, name: str, seconds: float = LONG) -> str:
        return await self.unfinished.do(key, self.work(name), seconds, lambda: "node 3")


def test_what_does_not_end_in_time_goes_on_and_the_next_has_not_begun() -> None:
    async def story() -> None:
        works = Works()
        with pytest.raises(OutcomeUnknown, match=r"not committed within 0\.02 s: node 3; the work continues"):
            await works.do("a", "first", SHORT)
        with pytest.raises(StillUnderWay, match="node 3"):
            await works.do("a", "second", SHORT)
        assert (works.begun, works.unfinished.keys()) == (["first"], ["a"])
        third = asyncio.create_task(works.do("a", "third"))
        await asyncio.sleep(0)
        works.ends["first"].set()
        works.ends["third"] = asyncio.Event()
        works.ends["third"].set()
        assert await third == "third"
        assert (works.begun, works.unfinished.keys()) == (["first", "third"], [])

    asyncio.run(story())


def test_so_many_at_a_time_and_none_begins_after_one_that_failed() -> None:
    async def story() -> None:
        under_way, most, ended = 0, 0, list[int]()

        async def work(number: int, wrong: int) -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            under_way -= 1
            if number == wrong:
                raise NotFound(f"{number}")
            ended.append(number)

        await some_at_once((work(number, -1) for number in range(10)), 4)
        assert (ended, most) == (list(range(10)), 4)
        ended.clear()
        with pytest.raises(NotFound, match="5"):
            await some_at_once((work(number, 5) for number in range(10)), 4)
        assert ended == [0, 1, 2, 3, 4, 6, 7]

    asyncio.run(story())


def test_other_things_go_on_and_whoever_leaves_ends_nothing() -> None:
    async def story() -> None:
        works = Works()
        leaves = asyncio.create_task(works.do("a", "first"))
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        works.ends["other"] = asyncio.Event()
        works.ends["other"].set()
        assert await works.do("b", "other") == "other"
        assert works.unfinished.keys() == ["a"]
        works.ends["first"].set()
        while works.unfinished.keys():
            await asyncio.sleep(0)

    asyncio.run(story())


def test_an_error_is_the_callers() -> None:
    async def fails() -> None:
        raise LookupError("no")

    async def story() -> None:
        unfinished = Unfinished[str]()
        for _ in range(2):
            with pytest.raises(LookupError):
                await unfinished.do("a", fails, LONG, str)

    asyncio.run(story())


def test_who_asks_for_the_same_waits_for_the_change_that_is_under_way():
    async def story() -> None:
        changes = Changes(asyncio.get_running_loop(), 0.01)
        begun: list[str] = []
        over = asyncio.Event()

        async def change(what: str) -> int:
            begun.append(what)
            await over.wait()
            return len(begun)

        for what in ("a", "a", "b"):
            with pytest.raises(OutcomeUnknown):
                await changes.once(what, lambda what=what: change(what))  # type: ignore[misc]
        assert begun == ["a", "b"] and len(changes) == 2
        over.set()
        assert await changes.once("a", lambda: change("again")) == 2, "that one"
        assert await changes.once("a", lambda: change("again")) == 3, "the next"
        assert not len(changes)

    asyncio.run(story())


def test_all_who_wait_hear_why_it_failed_and_the_next_try_is_a_new_one():
    async def story() -> None:
        changes = Changes(asyncio.get_running_loop(), 10)
        tries = 0

        async def fails() -> None:
            nonlocal tries
            tries += 1
            await asyncio.sleep(0)
            raise NotFound("not here")

        outcomes = await asyncio.gather(*[changes.once("a", fails) for _ in range(3)], return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [NotFound] * 3 and tries == 1
        with pytest.raises(NotFound):
            await changes.once("a", fails)
        assert tries == 2

    asyncio.run(story())


def test_a_topic_whose_log_takes_nothing_is_made_once_however_many_ask(tmp_path: Path):
    async def story() -> None:
        async with running(tmp_path, publish_outcome_wait_ns=50_000_000) as broker:
            lead, held = broker.parts.opener.lead, list[Partition]()

            def stalled(*args: Any) -> list[Partition]:
                held.extend(lead(*args))
                for each in held:
                    each.hand_over(True)
                return held

            broker.parts.opener.lead = stalled  # type: ignore[method-assign]
            for _ in range(3):
                with pytest.raises(OutcomeUnknown):
                    await broker.topics.topic_for_client("t")
            assert len(held) == 1 and "t" not in broker.topics
            held[0].hand_over(False)
            await until(lambda: not len(broker.changes))
            assert (await broker.topics.topic_for_client("t")).led == tuple(held)

    asyncio.run(story())


# ---- who owns a task


def test_a_failed_task_of_a_group_is_reported_and_ends_no_other_one() -> None:
    async def story() -> None:
        failures: list[BaseException] = []
        group = TaskGroup(failed=failures.append)
        waiting = group.spawn(asyncio.Event().wait())
        failing = group.spawn(raising(NotFound("gone")))
        await asyncio.wait([failing])
        await asyncio.sleep(0)
        assert [str(error) for error in failures] == ["gone"]
        assert len(group) == 1 and not waiting.done()
        await group.close()
        assert waiting.cancelled() and len(group) == 0 and len(failures) == 1

    asyncio.run(story())


def test_the_loop_reports_an_error_that_a_group_has_no_use_for() -> None:
    async def story() -> None:
        reported: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
        group = TaskGroup()
        group.spawn(raising(NotFound("gone")))
        await group.wait()
        await asyncio.sleep(0)
        gc.collect()
        assert reported == ["gone"]

    asyncio.run(story())


async def raising(error: Exception) -> None:
    raise error


def test_work_beside_a_block_has_ended_when_the_block_is_left() -> None:
    async def story() -> None:
        ended: list[str] = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.append("work")

        with pytest.raises(NotFound):
            async with beside(work()):
                await asyncio.sleep(0)
                raise NotFound("the block fails")
        assert ended == ["work"]

    asyncio.run(story())


def test_the_first_of_several_ends_the_waiting_and_spares_futures() -> None:
    async def story() -> None:
        future = asyncio.get_running_loop().create_future()
        late, early = asyncio.Event(), asyncio.Event()
        early.set()
        await first_done(future, late.wait(), early.wait())
        await asyncio.sleep(0)
        assert not future.done()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        future.set_result(None)
        await first_done(future, late.wait())

    asyncio.run(story())


def test_a_lock_goes_to_who_waited_longest_and_is_gone_with_the_last() -> None:
    async def story() -> None:
        locks, got, go = Locks[str](), list[int](), asyncio.Event()

        async def change(number: int) -> None:
            async with locks.held("a"):
                got.append(number)
                await go.wait()
                if number == 2:
                    raise NotFound("its change failed")

        tasks = [asyncio.create_task(change(number)) for number in range(4)]
        await asyncio.sleep(0)
        assert got == [0] and "a" in locks and "b" not in locks
        tasks[1].cancel()
        await asyncio.sleep(0)
        go.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert got == [0, 2, 3] and [type(outcome) for outcome in outcomes] == [
            type(None),
            asyncio.CancelledError,
            NotFound,
            type(None),
        ]
        assert not list(locks)

    asyncio.run(story())


def test_what_is_shared_goes_on_for_the_others_when_one_leaves() -> None:
    async def story() -> None:
        begun, end = 0, asyncio.Event()

        async def work() -> str:
            nonlocal begun
            begun += 1
            await end.wait()
            return "done"

        shared = Shared(asyncio.get_running_loop(), work())
        waiting = [asyncio.create_task(shared.outcome()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.sleep(0)
        assert waiting[1].cancelled() and not shared.task.done()
        end.set()
        assert await waiting[0] == await waiting[2] == await shared.outcome() == "done" and begun == 1

    asyncio.run(story())


@pytest.mark.parametrize("error", [NotFound("it failed"), asyncio.CancelledError()])
def test_all_who_wait_for_what_is_shared_hear_how_it_ended(error: BaseException) -> None:
    async def story() -> None:
        async def work() -> None:
            await asyncio.sleep(0)
            raise error

        shared = Shared(asyncio.get_running_loop(), work())
        early = await asyncio.gather(*[shared.outcome() for _ in range(2)], return_exceptions=True)
        late = await asyncio.gather(shared.outcome(), return_exceptions=True)
        assert [type(outcome) for outcome in [*early, *late]] == [type(error)] * 3

    asyncio.run(story())
