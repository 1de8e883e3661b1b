"""Work on a partition's files: beginning new ones while nothing is appended, unlinking old ones beside appends.

    run    -> [a worker thread: job] -> then(result) | failed(error) -> ended
    remove -> [the thread for removals: step, step, ..] | failed(error)

One job at a time; publishes wait meanwhile. Deliveries go on, so a job must not change what readers of the log look at:
what it found or made is taken in by `then`, on the loop. Files that are unlinked have left the log before: only who
removes the directory, or begins the log anew in it, has to wait for that.
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
        self._removal: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a job has the files for itself."""
        return self._task is not None

    @property
    def removing(self) -> bool:
        """Whether files are being unlinked."""
        return self._removal is not None

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

    def remove(self, step: Callable[[], bool]) -> None:
        """Unlink files that nobody looks at any more, as `DiskRounds.removed` does; none may be under way."""
        assert self._removal is None, "two removals at once"
        self._removal = self._loop.create_task(self._remove(step))

    async def _remove(self, step: Callable[[], bool]) -> None:
        try:
            await self._disk.removed(step)
        except Exception as error:
            self._failed(error)
        finally:
            self._removal = None

    async def wait(self) -> None:
        """Return when the files are free, and nothing is unlinked any more."""
        while task := self._task or self._removal:
            await asyncio.wait([task])
