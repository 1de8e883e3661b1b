"""When the log of a led partition goes to the disk, at the sync setting of its topic.

    always    each batch asks for a disk round: publishers wait for it; progress alone for a patient one
    interval  a patient round after a number of messages or seconds (`LazySync`)
    none      the operating system decides

What a round has synced is the acknowledgement of this node's own disk, and may move the commit point.
"""

from __future__ import annotations

from collections.abc import Callable

from nsqha.clock import Now, read
from nsqha.commitlog.log import SyncTicket
from nsqha.server.partition.context import LedLog, PartitionLifecycle, PartitionRuntime
from nsqha.server.runtime.disk import LazySync, progress_sync

BEHIND_SECONDS = 0.01  # a round that no caller waits for begins behind the first OK, not beside it


class LogSync:
    """Brings the log of one led partition to the disk: a `WantsSync`."""

    def __init__(
        self,
        runtime: PartitionRuntime,
        led: LedLog,
        life: PartitionLifecycle,
        setting: str,
        *,
        commit: Callable[[Now], None],
        flush: Callable[[], None],
        waited_end: Callable[[], int],
    ) -> None:
        """`commit`: the commit point moved. `flush`: a round has ended, so publishes that waited for it may go.
        `waited_end`: the log id below which batches are waited for."""
        self.setting = setting
        self._clock = runtime.clock
        self._disk = runtime.disk
        self._led = led
        self._life = life
        self._commit = commit
        self._flush = flush
        self._waited_end = waited_end
        self._lazy = LazySync(runtime.disk, self, messages=runtime.sync_every, seconds=runtime.sync_seconds)
        self._progress = progress_sync(runtime.disk, self)

    @property
    def unsynced_messages(self) -> int:
        """Written since a disk round was last asked for, with sync=interval."""
        return self._lazy.unsynced

    def change(self, setting: str) -> None:
        """What OK means from now on; batches that wait are judged by the new meaning."""
        self.setting = setting
        if setting == "always":
            self._disk.request(self)
        elif setting == "interval" and self._led.log.unsynced() is not None:
            self._lazy.wrote(0)
        if self._led.leader.set_sync_always(setting == "always"):
            self._commit(read(self._clock))
            self._flush()

    def request(self) -> None:
        """Ask for a disk round, whatever the setting."""
        self._disk.request(self)

    def request_behind(self) -> None:
        """Ask for a disk round: now if publishers wait for it, else when the first of them has its OK."""
        if self.setting == "always":
            self._disk.request(self)
        else:
            self._disk.later(BEHIND_SECONDS, self.request)

    def wrote(self, count: int) -> None:
        """A batch with `count` messages is in the page cache."""
        if self.setting == "always":
            self._disk.request(self)
        elif self.setting == "interval":
            self._lazy.wrote(count)

    def wrote_progress(self) -> None:
        """A batch that no caller waits for is in the page cache."""
        if self.setting == "always":
            self._progress.wrote(0)
        elif self.setting == "interval":
            self._lazy.wrote(0)

    def sync_ticket(self) -> SyncTicket | None:
        return None if self._life.closed else self._led.log.unsynced()

    def synced(self, ticket: SyncTicket) -> None:
        log = self._led.log
        self.acked(log.synced(ticket))
        waited_for = log.local_durable < self._waited_end()
        if self.setting == "always" and not self._life.closed and waited_for and log.unsynced() is not None:
            self._disk.request(self)
        self._flush()

    def acked(self, durable: int) -> None:
        """This node's own disk has everything below `durable`."""
        leader = self._led.leader
        if not self._life.ended and leader.acked(leader.node, end=self._led.log.end.log_id, durable=durable):
            self._commit(read(self._clock))

    async def finish(self) -> None:
        """Sync what is left, outside the rounds: the partition closes."""
        ticket = self._led.log.unsynced()
        if ticket is not None and not self._life.ended:
            await self._disk.run(ticket.run)
            self.acked(self._led.log.synced(ticket))

    def cancel(self) -> None:
        """Ask for no more rounds on account of the time."""
        self._lazy.cancel()
        self._progress.cancel()
