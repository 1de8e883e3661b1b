"""Ranges of a log that do not verify any more, of a partition without another replica, are written again.

    a reader, retention or the scrub --found--> noted --within a second or so, when the files are free--> rebuilt,
                                                  |                                          or it verifies again
                                                  '<--later-- put off <--the disk refuses, or it can not be read now

What memory has still is written back. Entries are written again as recovery does it for the end of a log: from the
frames, which hold all but where batches end. What is proven by them, or holds together, is read again, and channels
that stopped in front of it go on. What does not is marked as faulty. Frames that do not verify, and are not in memory,
stay as they are: there are no others. They are read again, less and less often: the disk may have been away for a
moment.

As soon as there is another replica all this is its business (`server.integrity.corrupt_ranges`): what is made up here
would be written over what others could give.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from nsqha.clock import Now
from nsqha.commitlog.corruption.rebuild import Rebuild
from nsqha.commitlog.corruption.verdict import CorruptRange
from nsqha.commitlog.corruption.verify import checks
from nsqha.commitlog.log import PartitionLog, wake
from nsqha.commitlog.reading.lookup import LogReader
from nsqha.errors import AppendFailed, LogCorrupt
from nsqha.nsqlog import Logger
from nsqha.ranges import RangeSet
from nsqha.server.runtime.backoff import Backoff

if TYPE_CHECKING:
    from nsqha.server.partition.delivery import Deliveries
    from nsqha.server.partition.file_jobs import FileJobs

ENTRIES_AT_ONCE = 4096  # that are looked at, to find what does not verify
LOOK_BYTES = 1 << 20  # that are read at a time, unless one batch is larger: publishes wait meanwhile
RETRY_SECONDS = 30.0  # after the disk refused, twice as long each time
RETRY_SECONDS_MAX = 3600.0

logger = Logger("integrity")


class RepairedLog(Protocol):
    """The partition whose log is repaired, with the channels that stopped in front of the damage."""

    log: PartitionLog
    deliveries: Deliveries
    files: FileJobs

    def now(self) -> Now:
        """Read both clocks."""


class LocalRepair:
    """The damaged ranges of one partition's log, repaired one after the other."""

    def __init__(
        self,
        partition: RepairedLog,
        rebuilt: Callable[[CorruptRange], None],
        mended: Callable[[PartitionLog, int, int], None],
        *,
        alone: Callable[[], bool] = lambda: True,
    ) -> None:
        """`rebuilt`: called with each range that is rebuilt; `mended`: log ids that verify again. `alone`: whether
        there is no other replica now."""
        self.alone = alone
        self._partition = partition
        self._on_rebuilt = rebuilt
        self._mended = mended
        self._noted = RangeSet()
        self._put_off = RangeSet()
        self._seen = RangeSet()  # all that was ever noted
        self._backoff = Backoff(RETRY_SECONDS, RETRY_SECONDS_MAX)
        self._again_at = 0.0

    @property
    def damage(self) -> bool:
        """Whether any was noted."""
        return bool(self._seen)

    def found(self, first: int, end: int) -> None:
        """Batches [first, end) do not verify."""
        if not self.alone():
            return
        self._seen.add(first, end)
        wake(self._partition.log)
        self._noted.add(first, end)
        for later in self._put_off:
            self._noted.discard(*later)

    def known(self, first: int, end: int) -> None:
        """Batches [first, end) do not verify; they may have been reported before, and are looked at once."""
        if self._seen.end_of_range(first) < end:
            self.found(first, end)

    def step(self) -> None:
        """About once a second: rebuild one range, if one is noted."""
        if not self._seen:
            return
        if not self.alone():
            self._noted, self._put_off, self._seen = RangeSet(), RangeSet(), RangeSet()
            return
        if self._put_off and self._now() >= self._again_at:
            for later in self._put_off:
                self._noted.add(*later)
            self._put_off = RangeSet()
        self._noted.cut_below(self._partition.log.start.log_id)
        self._noted.discard(self._partition.log.end.log_id, 1 << 63)
        while self._noted:
            first, end = next(iter(self._noted))
            until = min(end, first + ENTRIES_AT_ONCE)
            try:
                rebuild = self._partition.log.repair.rebuilding(first, until)
            except OSError as error:
                self._later(first, until, error)
                continue
            if rebuild is None:
                look = partial(_verified_part, self._partition.log.part_at(first), first, until)
                self._partition.files.run(look, partial(self._looked_at, first, until))
            else:
                self._partition.files.run(partial(_tried, rebuild), partial(self._rebuilt, rebuild))
            return

    def _rebuilt(self, rebuild: Rebuild, done: CorruptRange | AppendFailed | None) -> None:
        if isinstance(done, AppendFailed):
            self._later(rebuild.first, rebuild.end, done)
            return
        if done is not None:  # else it is looked for again
            self._backoff.reset()
            self._noted.discard(done.first.log_id, done.end.log_id)
            self._on_rebuilt(done)
            if done.readable:
                self._tell_mended(done.first.log_id, done.end.log_id)
        for delivery in self._partition.deliveries.values():
            delivery.mended()

    def _looked_at(self, first: int, until: int, found: tuple[int, bool] | OSError) -> None:
        if isinstance(found, OSError):
            self._later(first, until, found)
            return
        end, verifies = found
        if verifies:
            self._noted.discard(first, end)
            self._tell_mended(first, end)
        else:
            self._put_off_until_later(first, end)
        self._look_again()

    def _look_again(self) -> None:
        """Channels go on that stopped at what can be read now: the disk was away for a moment."""
        for delivery in self._partition.deliveries.values():
            if delivery.damage is None or delivery.damage[0] == delivery.damage[1]:
                continue
            try:
                self._partition.log.batch_at(delivery.damage[0])
            except (OSError, LogCorrupt):
                continue
            delivery.mended()

    def _tell_mended(self, first: int, end: int) -> None:
        try:
            self._mended(self._partition.log, first, end)
        except (OSError, LogCorrupt) as error:
            # It is mended all the same; who counts damage will see that at the next look.
            logger.info("mended_unseen", "%s: log ids [%d, %d): %s", self._partition.log.directory, first, end, error)

    def _later(self, first: int, until: int, error: Exception) -> None:
        """It can not be done now: others are not held up by it."""
        self._put_off_until_later(first, until)
        text = "%s: log ids [%d, %d) are damaged, and can not be mended now; later again: %s"
        logger.warning("rebuild_delayed", text, self._partition.log.directory, first, until, error)

    def _put_off_until_later(self, first: int, until: int) -> None:
        if not self._put_off:
            self._again_at = self._now() + self._backoff.next_pause()
        self._noted.discard(first, until)
        self._put_off.add(first, until)

    def _now(self) -> float:
        return self._partition.now().mono


def _tried(rebuild: Rebuild) -> CorruptRange | AppendFailed | None:
    """In the disk thread: a disk that refuses is no failure of the node."""
    try:
        return rebuild.run()
    except AppendFailed as error:
        return error


def _verified_part(part: LogReader, first: int, until: int) -> tuple[int, bool] | OSError:
    """In the disk thread: the end of what was looked at of [first, until), and whether all of that verifies."""
    end, size, verifies = first, 0, True
    try:
        # From the batch before on, for its chain.
        for checked in checks(part, max(first - 1, part.start.log_id), min(until, part.end.log_id)):
            if checked.end.log_id <= first:
                continue
            end, size = checked.end.log_id, size + checked.size
            if (problem := checked.problem) is not None:
                verifies, size = False, size + problem.end.position - problem.first.position
            if size >= LOOK_BYTES:
                break
    except OSError as error:  # too many open files and the like say nothing about the bytes
        return error
    finally:
        part.close()
    return end, verifies
