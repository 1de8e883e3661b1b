"""What code and tests rely on of an event loop: the loops of tests keep it, and so do those of asyncio and uvloop."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from nsqha.clock import ManualClock
from tests.fakes.loop import VirtualLoop
from tests.sim.loop import NodeLoop, Scheduler

LONG = 0.05  # seconds; each timer of these tests is due before
TURNS = 20  # of a real loop, until what was due has had its consequences


class Driven:
    """A loop, and how to let time pass there."""

    def __init__(self, loop: Any, run: Callable[[], None]) -> None:
        self.loop = loop
        self.run = run  # everything that is due within LONG seconds

    def run_until(self, condition: Callable[[], bool]) -> None:
        """A real loop may be slow."""
        for _ in range(100):
            self.run()
            if condition():
                break


def real(loop: asyncio.AbstractEventLoop) -> Driven:
    def end(turns: int) -> None:
        if turns:
            loop.call_soon(end, turns - 1)
        else:
            loop.stop()

    def run() -> None:
        loop.call_later(LONG, end, TURNS)
        loop.run_forever()

    return Driven(loop, run)


def simulated() -> Driven:
    scheduler = Scheduler(random.Random(1))
    return Driven(NodeLoop(scheduler, "n"), lambda: scheduler.run_until(scheduler.now + LONG))


def virtual() -> Driven:
    loop = VirtualLoop()
    return Driven(loop, lambda: loop.pass_time(LONG))


@pytest.fixture(params=["asyncio", "uvloop", "virtual", "simulated"])
def driven(request: pytest.FixtureRequest) -> Iterator[Driven]:
    match request.param:
        case "asyncio":
            found = real(asyncio.SelectorEventLoop())
        case "uvloop":
            found = real(uvloop.new_event_loop())
        case "virtual":
            found = virtual()
        case _:
            found = simulated()
    yield found
    if not isinstance(found.loop, NodeLoop) or isinstance(found.loop, VirtualLoop):
        found.loop.close()


def test_callbacks_run_in_the_order_in_which_they_were_given(driven: Driven) -> None:
    ran: list[int] = []
    for n in range(3):
        driven.loop.call_soon(ran.append, n)
    driven.loop.call_soon_threadsafe(ran.append, 3)
    assert ran == [], "nothing runs inside of call_soon"
    driven.run()
    assert ran == [0, 1, 2, 3]


def test_what_a_callback_gives_runs_after_all_that_were_there(driven: Driven) -> None:
    ran: list[str] = []

    def first() -> None:
        driven.loop.call_soon(ran.append, "given by the first")
        ran.append("first")

    driven.loop.call_soon(first)
    driven.loop.call_soon(ran.append, "second")
    driven.run()
    assert ran == ["first", "second", "given by the first"]


def test_a_callback_that_is_cancelled_does_not_run(driven: Driven) -> None:
    ran: list[str] = []
    handle = driven.loop.call_soon(ran.append, "cancelled")
    driven.loop.call_soon(ran.append, "other")
    handle.cancel()
    driven.run()
    assert ran == ["other"] and handle.cancelled()


def test_timers_fire_in_the_order_of_their_times(driven: Driven) -> None:
    ran: list[int] = []
    now = driven.loop.time()
    driven.loop.call_at(now + 0.01, ran.append, 2)
    driven.loop.call_at(now + 0.005, ran.append, 1)
    driven.loop.call_later(0.015, ran.append, 3)  # last: this thread may have stood still since `now`
    driven.loop.call_soon(ran.append, 0)
    driven.run()
    assert ran == [0, 1, 2, 3]


def test_a_timer_fires_once_and_not_before_its_time(driven: Driven) -> None:
    fired: list[float] = []
    due = driven.loop.time() + 0.01
    handle = driven.loop.call_at(due, lambda: fired.append(driven.loop.time()))
    late = driven.loop.time() + 0.01 - due  # this thread may have stood still since
    assert -0.002 < handle.when() - due < late + 0.002  # uvloop counts milliseconds
    driven.run()
    driven.run()
    (at,) = fired
    assert at >= due - 0.002


def test_a_timer_whose_time_is_past_fires_with_the_next_turns(driven: Driven) -> None:
    ran: list[str] = []
    driven.loop.call_later(-1.0, ran.append, "late")
    driven.loop.call_later(0.0, ran.append, "now")
    assert ran == []
    driven.run()
    assert sorted(ran) == ["late", "now"]


def test_a_timer_that_is_cancelled_does_not_fire(driven: Driven) -> None:
    ran: list[str] = []
    handle = driven.loop.call_later(0.01, ran.append, "cancelled")
    driven.loop.call_later(0.005, handle.cancel)
    driven.loop.call_later(0.015, ran.append, "other")
    driven.run()
    assert ran == ["other"] and handle.cancelled()


def test_a_callback_runs_in_its_context_and_sees_its_loop(driven: Driven) -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="none")
    context = contextvars.copy_context()
    context.run(name.set, "given")
    seen: list[object] = []
    driven.loop.call_soon(lambda: seen.append(name.get()), context=context)
    driven.loop.call_later(0.005, lambda: seen.append(asyncio.get_running_loop()))
    driven.run()
    assert seen == ["given", driven.loop]
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


def test_a_task_begins_with_a_later_turn_and_hands_on_its_result(driven: Driven) -> None:
    ran: list[str] = []

    async def work() -> int:
        ran.append("begun")
        await asyncio.sleep(0.005)
        return 7

    task = driven.loop.create_task(work(), name="work")
    assert ran == [] and not task.done() and task.get_name() == "work"
    task.add_done_callback(lambda done: ran.append(f"ended with {done.result()}"))
    driven.run_until(task.done)
    assert ran == ["begun", "ended with 7"]


def test_who_waits_for_a_future_goes_on_with_a_later_turn(driven: Driven) -> None:
    ran: list[str] = []
    future = driven.loop.create_future()

    async def wait() -> None:
        ran.append(await future)

    def resolve() -> None:
        future.set_result("result")
        ran.append("set")

    task = driven.loop.create_task(wait())
    driven.loop.call_later(0.005, resolve)
    driven.run_until(task.done)
    assert ran == ["set", "result"]


def test_a_task_that_is_cancelled_ends_where_it_waits(driven: Driven) -> None:
    ran: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ran.append("ended")

    task = driven.loop.create_task(work())
    driven.loop.call_later(0.005, task.cancel)
    driven.run_until(task.done)
    assert ran == ["ended"] and task.cancelled()


def test_a_timeout_ends_what_takes_longer(driven: Driven) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            async with asyncio.timeout(0.005):
                await asyncio.sleep(1e6)
        except TimeoutError:
            ended.append("timeout")

    task = driven.loop.create_task(work())
    driven.run_until(task.done)
    assert ended == ["timeout"]


def test_the_error_of_a_callback_goes_to_the_handler_and_the_others_run(driven: Driven) -> None:
    told: list[dict[str, Any]] = []
    ran: list[str] = []

    def broken() -> None:
        raise ValueError("broken")

    driven.loop.set_exception_handler(lambda loop, context: told.append(context))
    driven.loop.call_soon(broken)
    driven.loop.call_soon(ran.append, "other")
    driven.loop.call_later(0.005, broken)
    driven.loop.call_later(0.01, ran.append, "timer")
    driven.run()
    assert ran == ["other", "timer"]
    assert [str(context["exception"]) for context in told] == ["broken", "broken"]


def test_jobs_of_an_executor_hand_on_results_and_errors(driven: Driven) -> None:
    ended: list[object] = []

    def broken() -> None:
        raise ValueError("broken")

    async def work() -> None:
        ended.append(await driven.loop.run_in_executor(None, lambda: 7))
        with pytest.raises(ValueError, match="broken"):
            await driven.loop.run_in_executor(None, broken)
        ended.append("failed")

    task = driven.loop.create_task(work())
    driven.run_until(task.done)
    task.result()
    assert ended == [7, "failed"]


RUNNERS: list[Any] = [asyncio.SelectorEventLoop, uvloop.new_event_loop, VirtualLoop]


@pytest.mark.parametrize("new_loop", RUNNERS)
def test_a_runner_runs_until_its_task_ends_and_cancels_the_rest(new_loop: Callable[[], Any]) -> None:
    ended: list[str] = []

    async def endless() -> None:
        try:
            while True:
                await asyncio.sleep(0.001)
        finally:
            ended.append("cancelled")

    async def main() -> str:
        asyncio.get_running_loop().create_task(endless())
        await asyncio.sleep(0.005)
        asyncio.get_running_loop().call_soon(ended.append, "not before the end")
        return "result"

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(main()) == "result"
        assert runner.run(asyncio.sleep(0.001, "another")) == "another" and "cancelled" not in ended
        loop = runner.get_loop()
    assert ended[-1] == "cancelled" and loop.is_closed()


@pytest.mark.parametrize("new_loop", RUNNERS)
def test_a_runner_ends_with_its_task_though_callbacks_remain(new_loop: Callable[[], Any]) -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_soon(again)

        again()
        await asyncio.sleep(0)
        return "result"

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(main()) == "result"


@pytest.mark.parametrize("new_loop", RUNNERS)
def test_the_error_of_the_task_is_the_error_of_the_runner(new_loop: Callable[[], Any]) -> None:
    async def main() -> None:
        await asyncio.sleep(0.001)
        raise ValueError("broken")

    with asyncio.Runner(loop_factory=new_loop) as runner, pytest.raises(ValueError, match="broken"):
        runner.run(main())


# ---- what only the virtual loop can do


def test_time_moves_by_the_test_alone_and_the_clock_with_it() -> None:
    clock = ManualClock()
    loop = VirtualLoop(clock)
    ran: list[float] = []
    for seconds in (1.0, 2.5):
        loop.call_later(seconds, lambda: ran.append(clock.monotonic()))
    loop.turn()
    assert ran == [] and loop.time() == 1000.0 and loop.armed == [1001.0, 1002.5]
    loop.pass_time(1.0)
    assert ran == [1001.0]
    loop.pass_time(4.0)
    assert ran == [1001.0, 1002.5] and loop.time() == clock.monotonic() == 1005.0 and loop.armed == []


def test_a_clock_that_a_test_moves_makes_timers_due() -> None:
    clock = ManualClock()
    loop = VirtualLoop(clock)
    ran: list[str] = []
    loop.call_later(5.0, ran.append, "due")
    clock.advance(5.0)
    loop.turn()
    assert ran == ["due"]


def test_an_error_of_a_callback_is_raised_where_the_test_drives_the_loop() -> None:
    loop = VirtualLoop()
    ran: list[str] = []

    def broken() -> None:
        raise ValueError("broken")

    loop.call_soon(broken)
    with pytest.raises(ValueError, match="broken"):
        loop.turn()
    loop.call_later(1.0, broken)
    loop.call_later(2.0, ran.append, "later")
    with pytest.raises(ValueError, match="broken"):
        loop.pass_time(5.0)
    assert ran == []
    loop.pass_time(5.0)
    assert ran == ["later"]


def test_a_loop_that_does_not_come_to_rest_is_an_error() -> None:
    loop = VirtualLoop()

    def again() -> None:
        loop.call_soon(again)

    def timer() -> None:
        loop.call_later(0.001, timer)

    loop.call_soon(again)
    with pytest.raises(AssertionError, match="come to rest"):
        loop.turn()
    loop = VirtualLoop()
    loop.call_soon(timer)
    with pytest.raises(AssertionError, match="for ever"):
        loop.pass_time(1.0, most=100)


def test_waiting_for_what_never_comes_is_an_error() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner, pytest.raises(RuntimeError, match="never comes"):
        runner.run(main())
