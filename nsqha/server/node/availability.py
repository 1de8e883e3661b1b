"""Whether a node stores publishes, and why not: it stops, its data directory failed, or its disk is nearly full."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nsqha.nsqlog import Logger
from nsqha.server.http.broker_api import Check
from nsqha.server.runtime.measures import disk_space

if TYPE_CHECKING:
    from nsqha.options import Options

logger = Logger("broker")


class Availability:
    """The state of one node that decides whether anything can be stored on it."""

    def __init__(
        self, options: Options, overfull: Callable[[], bool], kept_for_replay: Callable[[], str] = lambda: ""
    ) -> None:
        """`overfull`: deferred messages that can not be written down gather in memory. `kept_for_replay`: which topics
        fill the disk with finished messages, and what to do; empty: none does."""
        self.exiting = False
        self.failure: str | None = None  # why the data directory is closed
        self.disk_refusing = False
        self.space = disk_space(options.data_path)
        self.disk_low_bytes = options.disk_low_bytes
        self._data_path = options.data_path
        self._overfull = overfull
        self._kept_for_replay = kept_for_replay

    def ends(self) -> str | None:
        """Why this node takes nothing any more; None if it goes on."""
        if self.exiting:
            return "exiting"
        return None if self.failure is None else f"the disk failed: {self.failure}"

    @property
    def ending(self) -> bool:
        return self.exiting or self.failure is not None

    def refuses_publish(self) -> str | None:
        """Why nothing can be stored on this node now; None if it can."""
        ends = self.ends()
        if ends is not None:
            return ends
        return self.lacks_space()

    def lacks_space(self) -> str | None:
        """Why its disk has too little space; None if it has enough."""
        if self.disk_refusing:
            return f"disk low: {self.space.free_bytes} bytes free, {self.disk_low_bytes} required"
        return None

    def look_at_disk(self) -> bool:
        """Measure the free space; True if publishes are refused from now on, or taken again."""
        try:
            self.space = disk_space(self._data_path)
        except OSError:  # it is not there: `data_watch` closes it
            return False
        refusing = self.space.free_bytes < self.disk_low_bytes or self._overfull()
        if refusing == self.disk_refusing:
            return False
        self.disk_refusing = refusing
        if refusing:
            text = "%d bytes free, below %d: publishes are refused%s"
            logger.warning("disk_low", text, self.space.free_bytes, self.disk_low_bytes, self._advice())
        else:
            logger.info("disk_recovered", "%d bytes free: publishes are accepted again", self.space.free_bytes)
        return True

    def _advice(self) -> str:
        kept = self._kept_for_replay()
        return f"; {kept}" if kept else ""

    def _disk_space(self) -> str:
        refuses = self.refuses_publish() or ""
        return f"{refuses}{self._advice()}" if self.disk_refusing and not self.ending else refuses

    def health(self) -> str:
        return "OK" if self.failure is None else f"NOK - {self.failure}"

    def checks(self, stopped: str) -> list[Check]:
        """What /readyz asks of every node; `stopped`: partitions that a broken invariant stopped."""
        return [
            Check("data_directory", self.failure is None, self.failure or "", live=True),
            Check("not_exiting", not self.exiting, "shutting down" if self.exiting else ""),
            Check("partitions", not stopped, stopped),
            Check("disk_space", not self.disk_refusing, self._disk_space()),
        ]
