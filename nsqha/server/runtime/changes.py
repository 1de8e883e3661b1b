"""Changes of topics that run one at a time for each topic, and to their end.

A change awaits the metadata and the logs several times. Two changes of one topic must not interleave there: each holds
the topic's lock (`of`), and looks at the world again once it has it, as a topic may have come or gone meanwhile. Half a
change would leave metadata and logs apart, so one that began ends, whoever goes away meanwhile (`whole`).

That may take as long as a disk is full, or an ISR too small. Whoever asked waits a while and is told that nobody knows;
who asks for the same again waits for the change that is under way (`once`), so that they do not pile up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, TypeVar

from nsqha.errors import OutcomeUnknown

K = TypeVar("K")
T = TypeVar("T")


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
