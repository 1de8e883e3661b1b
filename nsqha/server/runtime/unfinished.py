"""Work that may take for ever, such as a commit that waits for replicas, and for which nobody waits so long.

Of each thing one piece of work is under way at most: whoever wants the next one waits for it first. So callers that
come back do not pile up behind a partition that commits nothing. What has begun goes on to its end, whoever leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from nsqha.errors import OutcomeUnknown, Unavailable

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


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
