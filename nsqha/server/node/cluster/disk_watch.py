"""A node whose disk hangs lets others lead as long as that lasts.

It answers every question and keeps its lease, so no node takes it for dead. But its own disk is one that every batch
waits for: nothing that it leads is acknowledged. So its record says that it leaves. Then the controller lets others
lead (a leader that leaves is not waited for), and those go on without its acknowledgements. When the disk has gone on
for a while it takes that back, and is an ordinary follower.

Looks are counted, not seconds: a process that did not run has not seen its disk hang.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from nsqha.errors import NsqhaError
from nsqha.nsqlog import Logger

LOOKS = 10  # that find the same round still running, about a second apart
CALM_LOOKS = 10  # that do not, until the disk is trusted again

logger = Logger("disk")


class DiskWatch:
    """Watches the disk of one node of a cluster."""

    def __init__(
        self,
        running: Callable[[], int],
        announce: Callable[[bool], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`running`: the number of the round that is under way, 0: none; `announce(hangs)`: to the cluster."""
        self.announced = False  # that it hangs
        self._running = running
        self._announce = announce
        self._spawn = spawn
        self._last = 0
        self._same = 0  # looks in a row that found the round of the look before
        self._other = 0  # that did not
        self._hangs = False
        self._telling = False

    def look(self) -> None:
        """About once a second."""
        last, self._last = self._last, self._running()
        if self._last and self._last == last:
            self._same, self._other = self._same + 1, 0
        else:
            self._same, self._other = 0, self._other + 1
        if not self._hangs and self._same >= LOOKS:
            self._hangs = True
            logger.error("disk_hangs", "a disk round has not ended for %d s: other nodes are to lead", self._same)
        elif self._hangs and self._other >= CALM_LOOKS:
            self._hangs = False
            logger.warning("disk_goes_on", "disk rounds end again")
        if self._hangs != self.announced and not self._telling:
            self._telling = True
            self._spawn(self._tell(self._hangs))

    async def _tell(self, hangs: bool) -> None:
        try:
            await self._announce(hangs)
        except NsqhaError as error:
            logger.info("not_announced", "%s; trying again", error)
        else:
            self.announced = hangs
        finally:
            self._telling = False
