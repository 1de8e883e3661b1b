"""Work on a partition's files: beginning new ones while nothing is appended, unlinking old ones beside appends.

    run  -> [a worker thread: job] -> then(result) | failed(error) -> ended
    drop -> [the thread for removals: step, step, ..] | failed(error)
    ready -> yes | no: ended

One job at a time; publishes wait meanwhile. Deliveries go on, so a job must not change what readers of the log look at:
what it found or made is taken in by `then`, on the loop. Files that are unlinked have left the log before: only a job
that removes the directory, or begins the log again in it, has to wait for that. What cannot be unlinked costs room and
nothing else: it is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from nsqha.commitlog.entry import Place
from nsqha.commitlog.files.open_logs import OpenLogs
from nsqha.commitlog.log import PartitionLog
from nsqha.nsqlog import Logger
from nsqha.server.partition.context import PartitionLifecycle, PartitionRuntime
from nsqha.server.runtime.disk import DiskRounds
from nsqha.server.runtime.tasks import begin

REMOVAL_RETRY_SECONDS = 60.0

logger = Logger("files")

T = TypeVar("T")


class Removals:
    """The unlinking of files that one partition's log has forgotten."""

    def __init__(self, loop: asyncio.AbstractEventLoop, disk: DiskRounds, failed: Callable[[Exception], None]) -> None:
        self.task: asyncio.Task[None] | None = None  # while files are being unlinked
        self._loop = loop
        self._disk = disk
        self._failed = failed
        self._not_before = 0.0

    def begin(self, log: PartitionLog) -> None:
        """Unlink what it has forgotten, unless that has just failed; none may be under way."""
        assert self.task is None, "two removals at once"
        if log.forgotten_files and self._loop.time() >= self._not_before:
            self.task = begin(self._loop, self._remove(log))

    async def _remove(self, log: PartitionLog) -> None:
        try:
            await self._disk.removed(log.unlink_some)
        except OSError as error:
            self._not_before = self._loop.time() + REMOVAL_RETRY_SECONDS
            logger.warning("files_remain", "%s: files are removed later: %s", log.directory, error)
        except Exception as error:
            self._failed(error)
        finally:
            self.task = None


class Descriptors:
    """Whether a log may open its files to be appended to; it waits while too many others are not durable."""

    __slots__ = ("_go_on", "_loop", "waits")

    def __init__(self, loop: asyncio.AbstractEventLoop, go_on: Callable[[], None]) -> None:
        """`go_on`: there may be some again."""
        self.waits = False
        self._loop = loop
        self._go_on = go_on

    def lacking(self, log: PartitionLog) -> bool:
        """Whether it has to wait; `go_on` follows."""
        if not self.waits and log.share.shut:
            self.waits = log.share.lacking(lambda: self._loop.call_soon(self._look_again))
        return self.waits

    def _look_again(self) -> None:
        self.waits = False
        self._go_on()


async def descriptors(open_logs: OpenLogs) -> None:
    """Return when a new log may open files."""
    loop = asyncio.get_running_loop()
    while open_logs.full:
        some = loop.create_future()
        open_logs.wait(lambda some=some: some.done() or some.set_result(None))  # type: ignore[misc]
        await some


class FileJobs:
    """Jobs on the files of one partition that is led here, one at a time."""

    def __init__(
        self,
        runtime: PartitionRuntime,
        log: PartitionLog,
        life: PartitionLifecycle,
        *,
        failed: Callable[[Exception], None],
        ended: Callable[[], None],
        sync: Callable[[], None],
    ) -> None:
        """`sync`: ask for a disk round, whatever the sync setting."""
        self.sync = sync
        self._loop = runtime.loop
        self._disk = runtime.disk
        self._log = log
        self._life = life
        self._failed = failed
        self._ended = ended
        self._task: asyncio.Task[None] | None = None
        self._removals = Removals(runtime.loop, runtime.disk, failed)
        self._descriptors = Descriptors(runtime.loop, ended)

    @property
    def busy(self) -> bool:
        """Whether a job has the files for itself, or they can not be opened yet."""
        return self._task is not None or self._descriptors.waits

    def ready(self) -> bool:
        """Whether what is to be written may be appended now; if not, `ended` follows."""
        return self._task is None and not self._descriptors.lacking(self._log)

    def run(self, job: Callable[[], T], then: Callable[[T], None]) -> bool:
        """Run a job that has the files for itself; False: another job has them, or the partition closes."""
        if self._task is not None or self._life.closed:
            return False
        self._task = begin(self._loop, self._run(job, then))
        return True

    def roll(self) -> None:
        """Begin a new pair of files."""
        self.run(self._log.next_pair, self._log.use)

    async def _run(self, job: Callable[[], T], then: Callable[[T], None]) -> None:
        try:
            then(await self._disk.run(job))
        except Exception as error:
            self._failed(error)
        finally:
            self._task = None
        self._ended()

    def drop(self, up_to: Place | None) -> None:
        """Unlink the files that end at or below `up_to`, and what could not go before, beside whatever is appended."""
        if not (self._task is not None or self._removals.task is not None or self._life.closed):
            if up_to is not None:
                self._log.forget_pairs(up_to)
            self._removals.begin(self._log)

    async def wait(self) -> None:
        """Return when the files are free, and nothing is unlinked any more."""
        while task := self._task or self._removals.task:
            await asyncio.wait([task])
