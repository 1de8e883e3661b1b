"""Work on the files of a log that is followed: jobs that have the files to themselves, and removals beside appends.

    take(job) -> [job, which may be catching up for hours] -> released
    unlink    -> [the thread for removals: step, step, ..]

One job at a time. While there is one nothing is appended; batches go on while files are removed, but another role of
the replica, or another log in the place of this one, waits for both (`finish`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from nsqha.errors import AppendFailed
from nsqha.nsqlog import Logger
from nsqha.server.partition.file_jobs import Descriptors, Removals
from nsqha.server.runtime.tasks import begin

if TYPE_CHECKING:
    from nsqha.commitlog.entry import Place
    from nsqha.commitlog.log import PartitionLog
    from nsqha.cursor.committed.state import PartitionState
    from nsqha.server.runtime.disk import DiskRounds

logger = Logger("follower")


class FollowerJobs:
    """The jobs on one log's files."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        disk: DiskRounds,
        *,
        failed: Callable[[Exception], None],
        released: Callable[[], None],
        sync: Callable[[], None],
    ) -> None:
        """`failed`: a job did what it must not. `released`: the files are free again. `sync`: ask for a disk round."""
        self.running: asyncio.Task[None] | None = None  # has the files to itself
        self._loop = loop
        self._disk = disk
        self._failed = failed
        self._released = released
        self._sync = sync
        self._removals = Removals(loop, disk, failed)
        self._interruptible = False  # the running job may be cancelled
        self._descriptors = Descriptors(loop, released)

    def ready(self, log: PartitionLog) -> bool:
        """Whether a batch may be appended now; if not, `released` follows."""
        return self.running is None and not self._descriptors.lacking(log)

    def take(self, job: Callable[[], Awaitable[None]], *, interruptible: bool = False) -> None:
        """Run a job that has the files to itself. It is made when it begins: one that is given up before is none."""
        assert self.running is None, "the files are taken"
        self._interruptible = interruptible
        self.running = begin(self._loop, self._run(job))

    async def _run(self, job: Callable[[], Awaitable[None]]) -> None:
        try:
            await job()
        except AppendFailed as error:
            self._disk.signs.refused(error)
            logger.warning("files_delayed", "%s; trying again", error)
        except Exception as error:
            self._failed(error)
        finally:
            self.running = None
        self._released()

    def unlink(self, log: PartitionLog, state: PartitionState | None) -> None:
        """Remove the files that nothing needs any more, by what is committed and durable here; and those that could not
        be removed before. None may be under way."""
        self._removals.begin(log)
        if state is None or self._removals.task is not None:
            return
        end = unneeded_end(log, state)
        if end is None:
            return
        if log.local_durable <= max(state.checkpoint.end_log_id, state.log_start_log_id):
            self._sync()  # with sync=none nothing else does, and a full disk would stay full
        elif log.forget_pairs(end):
            logger.info("unlinked", "%s: files below offset %d go", log.directory, end.offset)
            self._removals.begin(log)

    @property
    def removing(self) -> bool:
        """Whether files are being removed."""
        return self._removals.task is not None

    async def finish(self) -> None:
        """End what there is: catching up is given up, everything else is waited for, removals too."""
        while task := self.running or self._removals.task:
            if self._interruptible and task is self.running:
                task.cancel()
            await asyncio.wait([task])
            if self.running is task:  # cancelled before it began, so that nothing of it ever ran
                self.running = None


def unneeded_end(log: PartitionLog, state: PartitionState) -> Place | None:
    """The end of the files that the channels, deferred references and a committed checkpoint are past; None: there are
    none."""
    end: Place | None = None
    for pair in log.pairs[:-1]:
        if (
            pair.end.offset > state.log_start[0]
            or pair.end.position > state.log_start[1]
            or state.checkpoint.as_of < pair.end.log_id
            or pair.end.log_id > state.applied.log_id
        ):
            break
        end = pair.end
    return end
