"""Work on a partition's files while nothing is appended: beginning new ones, unlinking old ones.

    run -> [a worker thread: job] -> then(result) | failed(error) -> ended

One job at a time; publishes wait meanwhile. Deliveries go on, so a job must not change what readers of the log look at:
what it found or made is taken in by `then`, on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from nsqha.server.disk import DiskRounds

T = TypeVar("T")


class FileJobs:
    """Of one partition."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        disk: DiskRounds,
        *,
        failed: Callable[[Exception], None],
        ended: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._disk = disk
        self._failed = failed
        self._ended = ended
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a job has the files for itself."""
        return self._task is not None

    def run(self, job: Callable[[], T], then: Callable[[T], None]) -> None:
        """Nothing else may be busy."""
        assert self._task is None, "two jobs at once"
        self._task = self._loop.create_task(self._run(job, then))

    async def _run(self, job: Callable[[], T], then: Callable[[T], None]) -> None:
        try:
            then(await self._disk.run(job))
        except Exception as error:
            self._failed(error)
        finally:
            self._task = None
        self._ended()

    async def wait(self) -> None:
        """Return when the files are free."""
        if self._task is not None:
            await asyncio.wait([self._task])
