"""Tasks whose work goes on whatever becomes of their callers.

    whole       one piece of work to its end; a cancellation of its caller is passed on when it has ended
    Background  tasks that no caller waits for: what fails in one is logged
    Unfinished  work that may take for ever: one piece at most for each thing, and callers wait only as long as asked
    Changes     changes of topics: one at a time for each topic, and to their end

Changes of files and of the journal belong together in steps; a task that is cancelled between two of them would leave
a log that is neither the one nor the other (`whole`).

Work such as a commit that waits for replicas may take for ever, and nobody waits so long for it. Whoever wants the next
one waits for the one under way first, so callers that come back do not pile up behind a partition that commits nothing
(`Unfinished`).

A change of a topic awaits the metadata and the logs several times. Two changes of one topic must not interleave there:
each holds the topic's lock (`Changes.of`), and looks at the world again once it has it, as a topic may have come or
gone meanwhile. Half a change would leave metadata and logs apart, so one that began ends, whoever goes away meanwhile
(`Changes.whole`). That may take as long as a disk is full, or an ISR too small. Whoever asked waits a while and is told
that nobody knows; who asks for the same again waits for the change that is under way (`Changes.once`), so that they do
not pile up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, TypeVar

from nsqha.errors import OutcomeUnknown, Unavailable
from nsqha.nsqlog import Logger

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

logger = Logger("background")


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; a cancellation is passed on when it has ended."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not task.cancelled():
            task.exception()  # seen: whoever was cancelled does not want it
        raise asyncio.CancelledError
    return task.result()


class Background:
    """The background tasks of one owner. Without it the loop would hold them by weak references alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begin a task."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("task_failed", "a background task failed", error=error)

    def cancel(self) -> None:
        """The owner stops."""
        for task in list(self._tasks):
            task.cancel()


class StillUnderWay(Unavailable):
    """What was asked for before has not ended; this has not begun."""


class Unfinished(Generic[K]):
    """The work under way, by what it is for."""

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[Any]] = {}

    def keys(self) -> list[K]:
        """What has work under way."""
        return list(self._tasks)

    async def do(
        self, key: K, work: Callable[[], Coroutine[Any, Any, T]], seconds: float, waits_for: Callable[[], str]
    ) -> T:
        """What comes of `work`, within so long. `waits_for` says in an error what it hangs on.

        StillUnderWay. OutcomeUnknown: it goes on. Else what `work` raises.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (earlier := self._tasks.get(key)) is not None:
            await asyncio.wait([earlier], timeout=max(deadline - loop.time(), 0))
            if not earlier.done():
                raise StillUnderWay(f"what was asked for before has not ended: {waits_for()}; try again")
            self._ended(key, earlier)
        task = loop.create_task(work())
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))
        await asyncio.wait([task], timeout=max(deadline - loop.time(), 0))
        if not task.done():
            raise OutcomeUnknown(f"not committed within {seconds:g} s: {waits_for()}; it goes on")
        return task.result()

    def _ended(self, key: K, task: asyncio.Task[Any]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled():
            task.exception()  # whoever asked may be gone; if not, he has heard of it


class Locks(Generic[K]):
    """A lock for each key that somebody holds or waits for, and for no other."""

    def __init__(self) -> None:
        self._locks: dict[K, tuple[asyncio.Lock, int]] = {}  # with how many hold it or wait

    def __iter__(self) -> Iterator[K]:
        return iter(self._locks)

    @asynccontextmanager
    async def held(self, key: K) -> AsyncIterator[None]:
        """One at a time, in the order in which they came."""
        lock, users = self._locks.get(key) or (asyncio.Lock(), 0)
        self._locks[key] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[key]
            if users > 1:
                self._locks[key] = lock, users - 1
            else:
                del self._locks[key]


class Changes:
    """The changes under way on one node."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wait_seconds: float | None = None) -> None:
        """`wait_seconds`: whoever asks for a change from now on waits so long for it; None: to its end."""
        self._loop = loop
        self.wait_seconds = wait_seconds
        self._topics = Locks[str]()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._same: dict[Hashable, asyncio.Task[Any]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def of(self, topic: str) -> AbstractAsyncContextManager[None]:
        """One change of a topic at a time."""
        return self._topics.held(topic)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a change that nobody's leaving may interrupt."""
        task = self._loop.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone; if not, he has heard of it

    async def whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, also if whoever asked for it goes away meanwhile."""
        return await self.outcome(self.begin(work))

    async def once(self, what: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """As `whole`; all who ask for the same at once wait for one change."""
        task = self._same.get(what)
        if task is None or task.done():
            task = self._same[what] = self.begin(work())
            task.add_done_callback(lambda done: self._forget(what, done))
        return await self.outcome(task)

    def _forget(self, what: Hashable, task: asyncio.Task[Any]) -> None:
        if self._same.get(what) is task:
            del self._same[what]

    async def outcome(self, change: asyncio.Task[T]) -> T:
        """What comes of a change that was begun. OutcomeUnknown if it takes too long; it goes on."""
        await asyncio.wait([change], timeout=self.wait_seconds)
        if not change.done():
            raise OutcomeUnknown("the change is not committed yet; it goes on")
        return change.result()

    async def wait(self, seconds: float) -> None:
        """Let what is under way end, for so long."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=seconds)

    def cancel(self) -> None:
        """The node ends: give up what has not ended by now."""
        for task in list(self._under_way):
            task.cancel()
