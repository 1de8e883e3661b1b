"""A node whose disk is in trouble lets others lead as long as that lasts.

It answers every question and keeps its lease, so no node takes it for dead, and it would lead for ever.

    hangs, or is slow   a disk round or a write of the journal does not end, or takes longer than a replica may be late
                        (`isr_timeout`), again and again: every batch waits for it. The node's record says that it
                        leaves: others lead, and go on without its acknowledgements
    refuses             it is full or nearly, or lacks descriptors: nothing is published here. The record says why the
                        node declines to lead; as a follower it takes what it can

When the disk has been well for a while the node takes that back, and is an ordinary follower. Each time that the
trouble comes back the while is longer, so that a disk that is now well and now not moves few leaderships.

Looks are counted, not seconds: a process that did not run has not seen its disk hang. Nothing is announced where no
other node would be left that could lead.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from nsqha.errors import NsqhaError
from nsqha.nsqlog import Logger

LOOKS = 10  # that find the same round still running, about a second apart
SLOW_ROUNDS = 2  # that take too long, without a calm between them
REFUSING_LOOKS = 2  # in a row
CALM_LOOKS = 10  # without trouble, until the disk is trusted again
CALM_FACTOR = 3  # ... each time that it came back
CALM_LOOKS_MAX = 600
FORGET_LOOKS = 1800  # trouble that ended so long ago did not come back: it is new

logger = Logger("disk")


class Trouble:
    """One kind of trouble: it is there when it has been seen, and over after a calm that grows each time."""

    __slots__ = ("_calm", "_times", "there")

    def __init__(self) -> None:
        self.there = False
        self._calm = 0  # looks since it was last seen
        self._times = 0  # that it came, without being forgotten

    @property
    def calm_looks(self) -> int:
        """How many calm looks end it."""
        looks = CALM_LOOKS
        for _ in range(1, self._times):
            looks = min(looks * CALM_FACTOR, CALM_LOOKS_MAX)
        return looks

    def begins(self) -> None:
        """It is there."""
        self.there = True
        self._times += 1

    def look(self, calm: bool) -> bool:
        """Count a look. True if it ended the trouble."""
        if not calm and self._calm >= FORGET_LOOKS:
            self._times = 0
        self._calm = self._calm + 1 if calm else 0
        if not self.there or self._calm < self.calm_looks:
            return False
        self.there = False
        return True


class DiskWatch:
    """Watches the disk of one node of a cluster."""

    def __init__(
        self,
        running: Callable[[], tuple[int, int]],
        refuses: Callable[[], str],
        announce: Callable[[bool, str], Awaitable[bool]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        *,
        slow_seconds: float,
    ) -> None:
        """`running`: the numbers of the round and of the write of the journal that are under way, 0: none. `refuses`:
        why it takes no publishes, if it does not. `announce(hangs, declines)`: to the cluster; False if no other node
        could lead. `slow_seconds`: a round may take so long."""
        self.announced: tuple[bool, str] = (False, "")  # that it hangs, why it refuses
        self._running = running
        self._refuses = refuses
        self._announce = announce
        self._spawn = spawn
        self._slow_looks = max(math.ceil(slow_seconds), 1)
        self._last = (0, 0)
        self._same = 0  # looks in a row that found the round of the look before
        self._calm = 0  # looks in a row that did not
        self._slow_rounds = 0
        self._hanging = Trouble()
        self._refusing = Trouble()
        self._refused = 0  # looks in a row
        self._why = ""
        self._announcing = False

    def look(self) -> None:
        """About once a second."""
        self._look_at_rounds()
        self._look_at_refusals()
        wanted = (self._hanging.there, self._why if self._refusing.there else "")
        if wanted != self.announced and not self._announcing:
            self._announcing = True
            self._spawn(self._say(*wanted))

    def _look_at_rounds(self) -> None:
        last, self._last = self._last, self._running()
        if any(now and now == before for now, before in zip(self._last, last, strict=True)):
            self._same, self._calm = self._same + 1, 0
            self._slow_rounds += self._same == self._slow_looks
        else:
            self._same, self._calm = 0, self._calm + 1
            if self._calm >= CALM_LOOKS:
                self._slow_rounds = 0
        trouble = self._hanging
        if not trouble.there and (self._same >= LOOKS or self._slow_rounds >= SLOW_ROUNDS):
            trouble.begins()
            if self._same >= LOOKS:
                logger.error("disk_hangs", "a disk round has not ended for %d s: other nodes are to lead", self._same)
            else:
                text = "disk rounds take longer than %d s again and again: other nodes are to lead"
                logger.error("disk_slow", text, self._slow_looks)
        if trouble.look(not self._same):
            self._slow_rounds = 0
            logger.warning("disk_goes_on", "disk rounds end again")

    def _look_at_refusals(self) -> None:
        why, trouble = self._refuses(), self._refusing
        self._refused = self._refused + 1 if why else 0
        if not trouble.there and self._refused >= REFUSING_LOOKS:
            trouble.begins()
            self._why = why
            logger.error("disk_refuses", "%s: other nodes are to lead", why)
        if trouble.look(not why):
            logger.warning("disk_accepts", "the disk takes writes again")

    async def _say(self, hangs: bool, declines: str) -> None:
        try:
            if await self._announce(hangs, declines):
                self.announced = hangs, declines
        except NsqhaError as error:
            logger.info("not_announced", "%s; trying again", error)
        finally:
            self._announcing = False
