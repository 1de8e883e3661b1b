"""The event loop of tests: no sockets, no threads, and time that moves only when there is nothing else to do.

    loop = VirtualLoop(clock)        time is that of the clock, which a test may move as well
    loop.turn()                      run what there is to do now
    loop.pass_time(5)                and the timers of the next five seconds, in order

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())           time jumps from timer to timer until `main` has ended

It is the loop of one simulated process (`tests/sim/loop.py`), alone with its scheduler; there is no other. Tests with
sockets or threads use the loops of asyncio and uvloop. `tests/contract/test_loops.py` checks all of them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from typing import Any

from nsqha.clock import ManualClock
from tests.sim.loop import NodeLoop, Scheduler

CALLBACKS_MAX = 10_000  # of one `turn`: more is a busy loop
TIMERS_MAX = 10_000  # of one `pass_time`


class ClockScheduler(Scheduler):
    """Moves a clock that others may read and move as well."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        super().__init__(random.Random(0), clock.monotonic())

    @property
    def now(self) -> float:
        return self._clock.monotonic()

    @now.setter
    def now(self, when: float) -> None:
        self._clock.advance(max(0.0, when - self._clock.monotonic()))


class VirtualLoop(NodeLoop):
    """The loop of a test, driven by `turn` and `pass_time`, or by an `asyncio.Runner`.

    An exception of a callback is raised by the call that drives the loop; `errors` are those of tasks that nothing
    awaits."""

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.errors: list[BaseException] = []
        super().__init__(ClockScheduler(self.clock), "test")
        self.scheduler.on_error = self._failed
        self._raised: list[BaseException] = []
        self._callbacks_left = self._timers_left = math.inf

    @property
    def armed(self) -> list[float]:
        """When timers are due, in order."""
        return self.scheduler.armed

    def turn(self, most: int = CALLBACKS_MAX) -> None:
        """Run until nothing is left to do now, at most so many callbacks."""
        self._callbacks_left = most
        self._run_until(self.time())

    def pass_time(self, seconds: float, most: int = TIMERS_MAX) -> None:
        """Let timers fire in order, at most so many."""
        self.turn()
        self._timers_left = most
        self._run_until(self.time() + seconds)

    def _run_until(self, deadline: float, stop: Callable[[], bool] = lambda: False) -> None:
        try:
            self.scheduler.run_until(deadline, lambda: bool(self._raised) or stop())
        finally:
            self._callbacks_left = self._timers_left = math.inf
        if self._raised:
            raised, self._raised = self._raised, []
            raise raised[0]

    def run_ready(self) -> None:
        self._callbacks_left -= len(self._callbacks)
        assert self._callbacks_left >= 0, "the loop does not come to rest"
        super().run_ready()

    def due(self, handle: asyncio.Handle) -> None:
        self._timers_left -= not handle.cancelled()
        assert self._timers_left >= 0, "timers are armed for ever"
        super().due(handle)

    def _failed(self, loop: NodeLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and "handle" in context:  # a callback
            self._raised.append(error)
            return
        if error is not None:
            self.errors.append(error)
        logging.getLogger("asyncio").error("%s", context.get("message"), exc_info=error)

    # ---- what an `asyncio.Runner` uses besides

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)
        ends = self._end_turn
        task.add_done_callback(ends)
        try:
            self._run_until(math.inf, lambda: task.done() or self.scheduler.first_timer is None)
        finally:
            task.remove_done_callback(ends)
            self.thaw()
        if not task.done():
            raise RuntimeError("every task waits for something that never comes")
        return task.result()

    def _end_turn(self, _: object) -> None:
        self.freeze()

    def set_debug(self, enabled: bool) -> None:
        pass

    async def shutdown_asyncgens(self) -> None:
        pass

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        pass

    def close(self) -> None:
        self.kill()
