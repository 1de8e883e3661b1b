"""Virtual time for a whole cluster in one thread: an event loop for each process, one scheduler for all of them.

    scheduler = Scheduler(random.Random(seed))
    n1, n2 = scheduler.loop("n1"), scheduler.loop("n2")
    n1.call_soon(...); scheduler.run_until(10.0)

A turn runs what one process has ready, as an event loop does; which process is next is drawn by the seed. Within one
process nothing is reordered: code may rely on the order of `call_soon`. Time moves only when nobody has anything to do,
so a process has an infinitely fast processor and only disks, networks and timers take time.

Blocking work (`run_in_executor`, a `SimPool`) takes a drawn time, then runs at once and whole; a pool of one thread
runs its jobs in order. A call that would block there raises `Again` and is made again later; one that takes long to
answer says so in `reply_seconds`.

    freeze / thaw   SIGSTOP: what becomes ready waits, threads included
    kill            nothing of the process runs any more; its tasks are kept, so that nobody collects them half way
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context
from typing import Any

START = 1000.0
WALL_NS = 1_700_000_000_000_000_000
BURST_MAX = 200_000  # turns without time moving: a busy loop


class Again(Exception):
    """A blocking call that is not done yet: make it again after so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds

    def later(self, loop: NodeLoop, run: Callable[..., object], *args: Any) -> None:
        """Have `run` make the call again."""
        loop.call_later(self.seconds, run, *args)


class Scheduler:
    """All processes, and the time they share."""

    def __init__(self, rng: random.Random, start: float = START) -> None:
        self.rng = rng
        self.now = start
        self.turns = 0
        self.current: NodeLoop | None = None
        self.on_turn: Callable[[NodeLoop], None] = lambda loop: None
        self.on_error: Callable[[NodeLoop, dict[str, Any]], None] = lambda loop, context: None
        self._timers: list[tuple[float, int, asyncio.TimerHandle, NodeLoop]] = []
        self._serial = 0
        self._ready: dict[NodeLoop, None] = {}

    def loop(self, name: str) -> NodeLoop:
        """A new process."""
        return NodeLoop(self, name)  # type: ignore[abstract]  # it has no sockets, signals or child processes

    # ---- for loops

    def at(self, when: float, handle: asyncio.TimerHandle, loop: NodeLoop) -> None:
        self._serial += 1
        heapq.heappush(self._timers, (when, self._serial, handle, loop))

    def ready(self, loop: NodeLoop) -> None:
        self._ready[loop] = None

    def not_ready(self, loop: NodeLoop) -> None:
        self._ready.pop(loop, None)

    # ---- time

    def run_until(self, deadline: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let everything happen up to this time, or until `stop`, which is asked when time is about to move."""
        burst = 0
        while True:
            while self._ready:
                burst += 1
                assert burst < BURST_MAX, f"busy at {self.now - START:.3f}: {[loop.name for loop in self._ready]}"
                self._turn()
            if stop():
                return
            timers = self._timers
            self._drop_cancelled()
            if not timers or timers[0][0] > deadline:
                self.now = max(self.now, deadline)
                return
            burst = 0
            when = timers[0][0]
            self.now = max(self.now, when)
            while timers and timers[0][0] <= when:
                _, _, handle, loop = heapq.heappop(timers)
                loop.due(handle)

    @property
    def armed(self) -> list[float]:
        """When timers are due, in order."""
        return sorted(when for when, _, handle, _ in self._timers if not handle.cancelled())

    @property
    def first_timer(self) -> asyncio.TimerHandle | None:
        """The timer that is due first."""
        self._drop_cancelled()
        return self._timers[0][2] if self._timers else None

    def _drop_cancelled(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)

    def _turn(self) -> None:
        ready = self._ready
        if len(ready) == 1:
            loop = next(iter(ready))
        else:
            loop = list(ready)[self.rng.randrange(len(ready))]
        self.turns += 1
        self.current = loop
        try:
            loop.run_ready()
        finally:
            self.current = None
        self.on_turn(loop)


class NodeLoop(asyncio.AbstractEventLoop):
    """The event loop and the threads of one process."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.name = name
        self.dead = False
        self.frozen = False
        self.reply_seconds = 0.0  # set by a blocking call: its result comes so much later
        self.job_seconds: Callable[[str], float] = lambda kind: 0.0  # how long a job of this kind waits
        self.held_jobs: dict[str, list[Callable[[], object]]] = {}  # of kinds that wait in a SimPool for `let_go`
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.scheduler = scheduler
        self._callbacks: deque[asyncio.Handle] = deque()
        self._handler: Callable[[Any, dict[str, Any]], Any] | None = None
        self._lanes: dict[Any, _Lane] = {}

    # ---- what asyncio uses

    def time(self) -> float:
        return self.scheduler.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self.scheduler.current is self

    def is_closed(self) -> bool:
        return self.dead

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._put(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.scheduler.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self.dead:
            self.scheduler.at(max(when, self.scheduler.now), handle, self)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays in the heap until its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not self.dead:
            self.tasks.pop(task, None)

    def set_exception_handler(self, handler: Callable[[Any, dict[str, Any]], Any] | None) -> None:
        self._handler = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._handler is None:
            self.default_exception_handler(context)
        else:
            self._handler(self, context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.scheduler.on_error(self, context)

    # ---- threads

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        lane = self._lanes.get(executor)
        if lane is None:
            lane = self._lanes[executor] = _Lane(self, executor)
        lane.submit(lambda: func(*args), future)
        return future

    def let_go(self, kind: str) -> None:
        """Run the jobs of a kind in `held_jobs` that wait."""
        jobs, self.held_jobs[kind] = self.held_jobs[kind], []
        for job in jobs:
            self.call_soon(self.in_thread, job)

    def in_thread(self, job: Callable[[], Any]) -> Any:
        """Run something as a thread of this process would: without a running loop."""
        asyncio._set_running_loop(None)
        try:
            return job()
        finally:
            asyncio._set_running_loop(self)

    # ---- for the scheduler

    def _put(self, handle: asyncio.Handle) -> None:
        if self.dead:
            return
        self._callbacks.append(handle)
        if not self.frozen:
            self.scheduler.ready(self)

    def due(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            self._put(handle)

    def run_ready(self) -> None:
        """What is ready now; what becomes ready meanwhile comes with the next turn."""
        callbacks = self._callbacks
        asyncio._set_running_loop(self)
        try:
            for _ in range(len(callbacks)):
                handle = callbacks.popleft()
                if not handle.cancelled():
                    handle._run()
                if self.dead or self.frozen:
                    break
        finally:
            asyncio._set_running_loop(None)
        if not callbacks or self.frozen:
            self.scheduler.not_ready(self)

    # ---- what happens to processes

    def freeze(self) -> None:
        self.frozen = True
        self.scheduler.not_ready(self)

    def thaw(self) -> None:
        self.frozen = False
        if self._callbacks:
            self.scheduler.ready(self)

    def kill(self) -> None:
        self.dead = True
        self._callbacks.clear()
        self.scheduler.not_ready(self)

    def bury(self) -> None:
        """At the end of a simulation: close what was under way, so that it is not done by the collector."""
        self.kill()
        asyncio._set_running_loop(self)
        try:
            while self.tasks:
                task, _ = self.tasks.popitem()
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine: Any = task.get_coro()
                with suppress(RuntimeError):  # one that awaits in its `finally`
                    coroutine.close()
        finally:
            asyncio._set_running_loop(None)
        self._lanes.clear()

    def __repr__(self) -> str:
        return f"NodeLoop({self.name})"


class _Lane:
    """The threads of one executor."""

    def __init__(self, loop: NodeLoop, executor: Any) -> None:
        self._loop = loop
        self._free = getattr(executor, "_max_workers", 1)
        self._kind = str(getattr(executor, "_thread_name_prefix", ""))
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()

    def submit(self, job: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self._waiting.append((job, future))
        self._next()

    def _next(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            job, future = self._waiting.popleft()
            self._loop.call_later(self._loop.job_seconds(self._kind), self._run, job, future)

    def _run(self, job: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        loop = self._loop
        loop.reply_seconds = 0.0
        result: Any = None
        failure: BaseException | None = None
        try:
            result = loop.in_thread(job)
        except Again as again:
            again.later(loop, self._run, job, future)
            return
        except Exception as error:
            failure = error
        if loop.reply_seconds:
            loop.call_later(loop.reply_seconds, self._ended, future, result, failure)
        else:
            self._ended(future, result, failure)

    def _ended(self, future: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
        self._free += 1
        self._next()
        if future.done():
            return
        if failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(result)


class SimPool(Executor):
    """Threads for whoever calls `submit` and wants no future."""

    def __init__(self, loop: NodeLoop, kind: str) -> None:
        self._loop = loop
        self._kind = kind

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        job = lambda: fn(*args, **kwargs)  # noqa: E731
        if (held := self._loop.held_jobs.get(self._kind)) is not None:
            held.append(job)
        else:
            self._loop.call_later(self._loop.job_seconds(self._kind), self._loop.in_thread, job)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


class SimClock:
    """The clocks of one process; its wall clock may be wrong."""

    trusted = True

    def __init__(self, scheduler: Scheduler, skew_ns: Callable[[], int] = lambda: 0) -> None:
        self._scheduler = scheduler
        self._skew_ns = skew_ns

    def monotonic(self) -> float:
        return self._scheduler.now

    def wall_ns(self) -> int:
        return WALL_NS + round((self._scheduler.now - START) * 1e9) + self._skew_ns()

    raw_wall_ns = wall_ns
