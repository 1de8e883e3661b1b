"""When the log of a follower goes to the disk, at the sync setting of its topic.

always    each batch asks for a disk round, and is acknowledged after it; a patient one (only progress of channels,
          which no caller waits for) is acknowledged at once and synced half a second later
interval  acknowledged at once; a patient round after a number of messages or seconds
none      acknowledged at once
"""

from __future__ import annotations

from nsqha.server.runtime.disk import DiskRounds, LazySync, WantsSync, progress_sync


class FollowerSync:
    """The disk rounds of one follower's log."""

    def __init__(self, disk: DiskRounds, log: WantsSync, *, messages: int, seconds: float) -> None:
        """`messages`, `seconds`: at most so many go unsynced with sync=interval."""
        self._disk = disk
        self._log = log
        self._lazy = LazySync(disk, log, messages=messages, seconds=seconds)
        self._progress = progress_sync(disk, log)
        self._waited_end = 0  # log id below which the leader waits for the disk, as far as it has said so

    def request(self, waited_end: int) -> None:
        """The leader waits for the disk below this log id."""
        self._waited_end = waited_end
        self._disk.request(self._log)

    def wrote(self, sync: str, count: int) -> None:
        """A batch with `count` messages was written and acknowledged."""
        if sync == "interval":
            self._lazy.wrote(count)
        elif sync == "always":
            self._progress.wrote(0)

    def synced(self, durable: int) -> None:
        """Everything below is on the disk: ask for another round if the leader waits for more."""
        if durable < self._waited_end:
            self._disk.request(self._log)

    def cancel(self) -> None:
        """Ask for no more rounds on account of the time."""
        self._lazy.cancel()
        self._progress.cancel()
