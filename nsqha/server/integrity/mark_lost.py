"""An operator gives up what is damaged: `nsqha log skip`, or a leader that is elected in spite of its damage.

    damaged --all others that are alive are asked--> mended
                                                '--> LOST: replicas are made, and may lead, without these batches

Invariant: nothing is given up before every other replica in reach was asked for it; it stays damage (`corrupt_ranges`),
so what turns up later is written back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsqha.errors import Poisoned, StorageError
from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger
from nsqha.ranges import RangeSet
from nsqha.server.integrity.corrupt_ranges import CorruptRanges, DamagedRange, damaged_range
from nsqha.server.integrity.peer_repair import is_lost

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.server.integrity.suspect_logs import SuspectLogs
    from nsqha.server.runtime.disk import DiskRounds


ASK_SECONDS = 20.0  # that others are asked for what is about to be given up; they are asked again afterwards

logger = Logger("integrity")


class MarkLost:
    """Gives up what is damaged in one node's replicas, where an operator asks for it."""

    def __init__(
        self,
        disk: DiskRounds,
        corrupt: CorruptRanges,
        suspects: SuspectLogs,
        *,
        log_of: Callable[[PartitionKey], PartitionLog | None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_failure`: the disk failed."""
        self._disk = disk
        self._on_failure = on_failure
        self._corrupt = corrupt
        self._suspects = suspects
        self._log_of = log_of

    async def give_up(self, key: PartitionKey, *, seconds: float = ASK_SECONDS) -> list[DamagedRange]:
        """What no other replica gives now is LOST, and the log may be copied and led without.

        `seconds`: they are asked so long; what comes later is written all the same. What was given up by this. Safe to
        repeat. Poisoned: the disk failed. StorageError: it is full, or the like."""
        if (log := self._log_of(key)) is None:
            return []
        before = {n for first, end in self._corrupt.known(key) for n in range(first, end) if is_lost(log, n)}
        try:
            async with asyncio.timeout(seconds):
                await self._corrupt.ask_all(key, log)
        except TimeoutError:
            logger.warning("asked_in_vain", "%s: the other replicas take too long", log.directory)
        given_up = await self._mark(key, log, before)
        for lost in given_up:
            text = "%s: log ids [%d, %d), offsets [%d, %d) are given up: replicas are made without them"
            logger.error("given_up", text, log.directory, *lost)
        if (bad := self._suspects.unsound_from(key)) is not None:
            logger.error("sound_again", "%s: what recovery doubted from log id %d on counts", log.directory, bad)
            self._suspects.renewed(key)
            log.doubtful_from = None
        return given_up

    async def _mark(self, key: PartitionKey, log: PartitionLog, before: set[int]) -> list[DamagedRange]:
        """Write LOST over what is still damaged; what was not marked `before`."""
        given_up = []
        for first, end in self._corrupt.known(key):
            if self._log_of(key) is not log or not log.start.log_id <= first < end <= log.end.log_id:
                continue  # it began again or was cut meanwhile: nothing is known of that
            try:
                marked = await self._disk.run(log.repair.giving_up(first, end))
            except Poisoned as error:
                self._on_failure(error)
                raise
            except OSError as error:  # of a full disk, perhaps; what is marked so far is damage as it was
                raise StorageError(f"{log.directory}: what is damaged can not be given up now: {error}") from error
            whole = RangeSet([(first, end)])
            for part in marked:
                whole.discard(*log.repair.whole_damage(*part))
                given_up += [part] if not before.issuperset(range(*part)) else []
            for part in list(whole):
                self._corrupt.mended(key, *part)  # their own frames proved the entries, or memory had them
        return [damaged_range(log, first, end) for first, end in given_up]
