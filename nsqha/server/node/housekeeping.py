"""Once a second on every node: disk space, overdue publishes, the journal, log starts, the cache of cursors.

Of many partitions those that are idle are looked at in turn (`IdleTurns`), all of them when the wall clock was set.
While many begin to lead, their clients wait for the processor, and what concerns partitions is put off for a while;
the clock and the disk are looked at in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nsqha.clock import Now, read
from nsqha.nsqlog import Logger
from nsqha.server.partition.delivery import CLOCK_SET_SECONDS

if TYPE_CHECKING:
    from nsqha.server.node.availability import Availability
    from nsqha.server.node.cluster_side import ClusterSide
    from nsqha.server.node.parts import NodeParts
    from nsqha.server.partition.partition import Partition
    from nsqha.server.runtime.cache import CacheWriter
    from nsqha.server.runtime.journal import JournalWriter
    from nsqha.server.topics.topics import Topics

HOUSEKEEPING_SECONDS = 1.0
MANY_BEGINNING = 32  # partitions that begin to lead: with so many, the others' housekeeping waits
PUT_OFF_SECONDS = 0.25
PUT_OFFS_MAX = 8  # in a row

logger = Logger("broker")


class Housekeeping:
    """The housekeeping of one node."""

    def __init__(
        self,
        parts: NodeParts,
        topics: Topics,
        side: ClusterSide,
        availability: Availability,
        *,
        journal_writer: JournalWriter,
        cache_writer: CacheWriter,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        forget_targets: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._topics = topics
        self._side = side
        self._availability = availability
        self._journal_writer = journal_writer
        self._cache_writer = cache_writer
        self._spawn = spawn
        self._forget_targets = forget_targets
        self._timer: asyncio.TimerHandle | None = None
        self._put_offs = 0  # in a row
        self._wall_ahead = 0.0  # of the monotonic clock

    def start(self) -> None:
        """Look at clock and disk before clients come. The partitions, of which there may be thousands that have all
        just begun, make nobody wait: they are looked at a second later."""
        self._side.look_at_clock()
        self._availability.look_at_disk()
        now = read(self._parts.clock)
        self._wall_ahead = now.wall_ns / 1e9 - now.mono
        self._timer = self._parts.loop.call_later(HOUSEKEEPING_SECONDS, self._due)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        loop = self._parts.loop
        if self._timer is not None:
            self._parts.opener.measures.loop_lag_seconds.observe(max(0.0, loop.time() - self._timer.when()))
        self._timer = loop.call_later(HOUSEKEEPING_SECONDS, self._due)
        if self.look():
            self._put_offs = 0
        else:
            self._put_offs += 1
            self._timer.cancel()
            self._timer = loop.call_later(PUT_OFF_SECONDS, self._due)

    def look(self) -> bool:
        """Do what is due; False: what concerns partitions is put off."""
        self._side.look_at_clock()
        now = read(self._parts.clock)
        if self._availability.look_at_disk():
            self._forget_targets()
        self._side.look_around()
        if self._side.beginning >= MANY_BEGINNING and self._put_offs < PUT_OFFS_MAX:
            return False
        self._look_at_partitions(now)
        return True

    def _look_at_partitions(self, now: Now) -> None:
        for partition in self._chosen(now):
            if partition.closed:
                continue  # it may be led here no more; what was written last is staged by who takes the log
            try:
                partition.keep_house(now)
            except Exception as error:
                # A log that can not be read keeps its files; the others go on.
                logger.error("housekeeping_failed", "%s: %s", partition.log.directory, error)
            if partition.batches.publishes.memory is None:
                identity = partition.log.identity
                self._parts.opener.stage_durable((identity.topic_uid, identity.partition), partition.log)
            self._parts.opener.runtime.turns.looked(partition)
        self._side.keep_house()
        if self._parts.journal.dirty and not self._journal_writer.writing:
            self._spawn(self._write_journal())
        self._cache_writer.write()

    def _chosen(self, now: Now) -> Sequence[Partition]:
        """The partitions led here that are looked at now."""
        ahead = now.wall_ns / 1e9 - now.mono
        if abs(ahead - self._wall_ahead) > CLOCK_SET_SECONDS:
            self._wall_ahead = ahead
            return list(self._led())  # what is due by the wall clock may be so although no timer says it
        return self._parts.opener.runtime.turns.choose()

    def _led(self) -> Iterator[Partition]:
        return (partition for topic in self._topics.values() for partition in topic.led)

    async def _write_journal(self) -> None:
        await self._journal_writer.write()
