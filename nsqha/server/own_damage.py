"""Entries that do not verify any more, of a partition that has no other replica: they are written anew.

    a reader, retention or the scrub --found--> noted --within a second or so, when the files are free--> rebuilt

As recovery does it for the end of a log: from the frames, which hold all but where batches end. What is proven by them,
or holds together, is read again, and channels that stopped in front of it go on. What does not is marked as faulty.
Frames that do not verify stay as they are: nobody has others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nsqha.commitlog.log import PartitionLog
from nsqha.commitlog.verdict import Damage
from nsqha.ranges import RangeSet

if TYPE_CHECKING:
    from nsqha.server.partition import Partition

ENTRIES_AT_ONCE = 4096  # that are looked at, to find what does not verify


class OwnDamage:
    """Of one partition."""

    def __init__(
        self, partition: Partition, told: Callable[[Damage], None], mended: Callable[[PartitionLog, int, int], None]
    ) -> None:
        """`told`: of each range, when it is rebuilt; `mended`: log ids that verify again."""
        self._partition = partition
        self._told = told
        self._mended = mended
        self._noted = RangeSet()

    def found(self, first: int, end: int) -> None:
        """Batches [first, end) do not verify."""
        self._noted.add(first, end)

    def step(self) -> None:
        """About once a second: rebuild one range of entries, if one is noted."""
        if not self._noted:
            return
        first, end = next(iter(self._noted))
        until = min(end, first + ENTRIES_AT_ONCE)
        rebuild = self._partition.log.rebuilding(first, until)
        if rebuild is None:
            self._noted.discard(first, until)
        else:
            self._partition.work_on_files(rebuild, self._rebuilt)

    def _rebuilt(self, rebuilt: Damage) -> None:
        first, end = rebuilt.first.log_id, rebuilt.end.log_id
        self._noted.discard(first, end)
        self._told(rebuilt)
        if rebuilt.readable:
            self._mended(self._partition.log, first, end)
        for delivery in self._partition.deliveries.values():
            delivery.mended()
