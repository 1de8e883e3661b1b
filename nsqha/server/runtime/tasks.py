"""Every task of the program begins here, so each has an owner: something that ends it, or waits for its end.

    TaskGroup   the tasks of one owner that no caller waits for
    begin       one task that its owner keeps
    awaited     one task whose outcome is for those who wait for it
    Shared      one task that many wait for; whoever is cancelled ends it for no other
    beside      runs work beside a block, and ends it with the block
    first_done  waits for the first of several things
    some_at_once  runs many pieces of work, so many of them at a time
    whole       runs one piece of work to its end; a cancellation of its caller is passed on when it has ended
    Unfinished  runs work that may take for ever: at most one piece per key, and callers wait for a bounded time
    Changes     runs changes of topics: one at a time per topic, each to its end
    in_thread   runs work in a thread of its own, which may be given up

With the last three, work continues when its callers are cancelled or gone.

A change of files and of the journal has several steps that belong together; a task that is cancelled between two of
them would leave the log in neither the old nor the new state (`whole`).

Work such as a commit that waits for replicas may take for ever, and callers wait for a bounded time only. A caller that
wants the next piece first waits for the one under way, so callers that retry do not pile up behind a partition that
commits nothing (`Unfinished`).

A change of a topic awaits the metadata and the logs several times. Two changes of one topic must not interleave there:
each holds the topic's lock (`Changes.of`), and reads the state again once it has the lock, as the topic may have been
created or deleted meanwhile. Half a change would leave metadata and logs inconsistent, so a change that began runs to
its end, even if its caller goes away (`Changes.whole`). That may take as long as the disk is full or the ISR too small.
The caller waits for a bounded time and is then answered that the outcome is unknown; a caller that asks for the same
again waits for the change that is under way (`Changes.once`), so that they do not pile up.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from nsqha.errors import OutcomeUnknown, Unavailable
from nsqha.nsqlog import Logger

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

logger = Logger("background")


def log_failure(error: BaseException) -> None:
    """Log the error of a task that no caller waits for."""
    logger.error("task_failed", "a background task failed", error=error)


def begin(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that its owner keeps, waits for and cancels. `work` handles its errors; the loop reports any other."""
    return loop.create_task(work)


def awaited(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose result or error is for those who wait for it; if none does any more, an error is dropped."""
    task = loop.create_task(work)
    task.add_done_callback(_seen)
    return task


def _seen(task: asyncio.Task[Any]) -> None:
    """Retrieve the error, or the loop would report one that no caller wants any more."""
    if not task.cancelled():
        task.exception()


class Shared(Generic[T]):
    """One piece of work that many wait for; it goes on when they are cancelled. `asyncio.shield` for each of them would
    cost two more turns of the loop and several callbacks, for each of thousands in a failover."""

    __slots__ = ("_loop", "_waiting", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._waiting: list[asyncio.Future[T]] = []
        self.task = awaited(loop, work)
        self.task.add_done_callback(self._done)

    async def outcome(self) -> T:
        """What the work returns or raises; for any number of callers."""
        if self.task.done():
            return self.task.result()
        waiter: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append(waiter)
        return await waiter

    def _done(self, task: asyncio.Task[T]) -> None:
        waiting, self._waiting = self._waiting, []
        error = None if task.cancelled() else task.exception()
        for waiter in waiting:
            if waiter.done():
                continue  # its caller was cancelled
            if task.cancelled():
                waiter.cancel()
            elif error is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(task.result())


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run `work` beside the block; it is cancelled when the block ends, and has ended when this returns."""
    task = awaited(asyncio.get_running_loop(), work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def some_at_once(works: Iterable[Coroutine[Any, Any, None]], at_once: int) -> None:
    """Run all `works`, `at_once` of them at a time, begun in their order. If some fail, those that have begun end, no
    other begins, and the error of the first is raised."""
    left = iter(works)
    while some := list(itertools.islice(left, at_once)):
        for outcome in await asyncio.gather(*some, return_exceptions=True):
            if outcome is not None:
                for work in left:
                    work.close()
                raise outcome


async def first_done(*works: Awaitable[Any]) -> None:
    """Return when the first of these is done; the coroutines among them are cancelled then, futures are not."""
    loop = asyncio.get_running_loop()
    begun = [awaited(loop, work) for work in works if isinstance(work, Coroutine)]
    given = [work for work in works if isinstance(work, asyncio.Future)]
    try:
        await asyncio.wait([*begun, *given], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in begun:
            task.cancel()


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; a cancellation is passed on when it has ended."""
    task = awaited(asyncio.get_running_loop(), work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return task.result()


class TaskGroup:
    """The tasks of one owner. The group lives as long as its owner, and a task that fails ends no other one.

    It keeps its tasks because the loop has only weak references to them.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        failed: Callable[[BaseException], object] | None = None,
    ) -> None:
        """`loop`: None for the one that runs at `spawn`. `failed` is called with the error of a task; if it is None the
        loop reports the error."""
        self._loop = loop
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a task."""
        task = (self._loop or asyncio.get_running_loop()).create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self._failed is not None and not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def cancel(self) -> None:
        """The owner stops: cancel its tasks."""
        for task in list(self._tasks):
            task.cancel()

    async def wait(self) -> None:
        """Return when its tasks have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel its tasks, and return when they have ended."""
        self.cancel()
        await self.wait()


class StillUnderWay(Unavailable):
    """The earlier work for the same key has not ended; the new work has not begun."""


class Unfinished(Generic[K]):
    """Runs at most one piece of work per key."""

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[Any]] = {}

    def keys(self) -> list[K]:
        """The keys that have work under way."""
        return list(self._tasks)

    async def do(
        self, key: K, work: Callable[[], Coroutine[Any, Any, T]], seconds: float, waits_for: Callable[[], str]
    ) -> T:
        """The result of `work`, if it ends within `seconds`. `waits_for` says in an error what the work waits for.

        StillUnderWay: `work` did not begin. OutcomeUnknown: it has not ended and continues. Else what `work` raises.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (earlier := self._tasks.get(key)) is not None:
            await asyncio.wait([earlier], timeout=max(deadline - loop.time(), 0))
            if not earlier.done():
                raise StillUnderWay(f"an earlier request of this kind has not ended: {waits_for()}; try again")
            self._ended(key, earlier)
        task = awaited(loop, work())  # the caller may be gone when it fails; if it is not, it gets the error
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))
        await asyncio.wait([task], timeout=max(deadline - loop.time(), 0))
        if not task.done():
            raise OutcomeUnknown(f"not committed within {seconds:g} s: {waits_for()}; the work continues")
        return task.result()

    def _ended(self, key: K, task: asyncio.Task[Any]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]


class Locks(Generic[K]):
    """Locks by key; a lock exists only while a task holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: dict[K, tuple[asyncio.Lock, int]] = {}  # with the number of tasks that hold it or wait

    def __iter__(self) -> Iterator[K]:
        return iter(self._locks)

    def __contains__(self, key: K) -> bool:
        return key in self._locks

    def held(self, key: K) -> HeldLock[K]:
        """An asynchronous context that holds the lock of `key`; tasks get it one at a time, in the order in which they
        came."""
        return HeldLock(self._locks, key)


class HeldLock(Generic[K]):
    """One task's use of a lock by key. A class, as a generator costs several times as much: in a failover of thousands
    of partitions each takes its lock a few times."""

    __slots__ = ("_key", "_locks")

    def __init__(self, locks: dict[K, tuple[asyncio.Lock, int]], key: K) -> None:
        self._locks = locks
        self._key = key

    async def __aenter__(self) -> None:
        lock, users = self._locks.get(self._key) or (asyncio.Lock(), 0)
        self._locks[self._key] = lock, users + 1
        try:
            await lock.acquire()
        except BaseException:
            self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._locks[self._key][0].release()
        self._leave()

    def _leave(self) -> None:
        lock, users = self._locks[self._key]
        if users > 1:
            self._locks[self._key] = lock, users - 1
        else:
            del self._locks[self._key]


class Changes:
    """Runs the changes of topics on one node."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wait_seconds: float | None = None) -> None:
        """`wait_seconds`: how long a caller waits for its change; None: until it has ended."""
        self._loop = loop
        self.wait_seconds = wait_seconds
        self._topics = Locks[str]()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._same: dict[Hashable, asyncio.Task[Any]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def of(self, topic: str) -> HeldLock[str]:
        """The lock that lets one change of `topic` run at a time."""
        return self._topics.held(topic)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a change that continues when its caller goes away."""
        task = awaited(self._loop, work)  # as `Unfinished.do`
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, also if its caller goes away meanwhile."""
        return await self.outcome(self.begin(work))

    async def once(self, what: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """As `whole`; callers that ask for the same `what` at once wait for one change."""
        task = self._same.get(what)
        if task is None or task.done():
            task = self._same[what] = self.begin(work())
            task.add_done_callback(lambda done: self._forget(what, done))
        return await self.outcome(task)

    def _forget(self, what: Hashable, task: asyncio.Task[Any]) -> None:
        if self._same.get(what) is task:
            del self._same[what]

    async def outcome(self, change: asyncio.Task[T]) -> T:
        """The result of a change that was begun. OutcomeUnknown after `wait_seconds`; the change continues."""
        await asyncio.wait([change], timeout=self.wait_seconds)
        if not change.done():
            raise OutcomeUnknown("the change is not committed yet; it continues")
        return change.result()

    async def wait(self, seconds: float) -> None:
        """Wait for the changes under way, at most `seconds`."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=seconds)

    def cancel(self) -> None:
        """The node ends: cancel the changes that have not ended."""
        for task in list(self._under_way):
            task.cancel()


async def in_thread(work: Callable[[], T]) -> T:
    """As asyncio.to_thread, in a thread of its own for which the process does not wait when it ends: for work on files
    that may take for ever. Whoever is cancelled gives the thread up; it goes on, and its outcome is dropped."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(cast(T, value))

    def run() -> None:
        value, raised = None, None
        try:
            value = work()
        except BaseException as error:
            raised = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, value, raised)

    threading.Thread(target=run, daemon=True, name="given up at the end").start()
    return await result
