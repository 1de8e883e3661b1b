"""Whose turn it is to begin to lead: of many partitions that are elected at once, those that came first begin first.

When a node that led thousands dies, as many are elected here within milliseconds. Side by side, each would take a step
before any takes the next one: the first would serve hardly sooner than the last, and what a disk round had held up
would be one turn of the loop of a second. So AT_ONCE are on their way at a time, in the order in which their records
came: as many as the controller elects together, as those that take a step together share its disk round and messages.

Invariant: a turn ends after TURN_SECONDS, also if its partition still waits for its lock, its files or the metadata:
none of these holds up more than AT_ONCE others, and those no longer than that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

AT_ONCE = 250
TURN_SECONDS = 0.25


class LeadTurns:
    """The turns of one node."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._free = AT_ONCE
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def under_way(self) -> int:
        """How many have their turn, or wait for it."""
        return AT_ONCE - self._free + len(self._waiting)

    def turn(self) -> LeadTurn:
        """An asynchronous context: it is entered when the turn has come."""
        return LeadTurn(self._loop, self)

    async def taken(self) -> None:
        """Return when a turn is free, which is the caller's then."""
        if self._free:
            self._free -= 1
            return
        mine = self._loop.create_future()
        self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.ended()  # it was given, and nobody is there who takes it
            raise

    def ended(self) -> None:
        """One is free: it passes to who waited longest."""
        while self._waiting:
            if not (first := self._waiting.popleft()).done():
                first.set_result(None)
                return
        self._free += 1


class LeadTurn:
    """The turn of one partition."""

    __slots__ = ("_late", "_loop", "_turns")

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: LeadTurns) -> None:
        self._loop = loop
        self._turns = turns
        self._late: asyncio.TimerHandle | None = None  # None: it has not begun, or is over

    async def __aenter__(self) -> None:
        await self._turns.taken()
        self._late = self._loop.call_later(TURN_SECONDS, self._end)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
            self._turns.ended()
