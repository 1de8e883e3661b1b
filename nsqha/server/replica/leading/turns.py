"""Whose turn it is to begin to lead, when many partitions lost their leader at once.

    elected, record read --turn--> promise, first batch written --committed, or TURN_SECONDS later--> the next one

Each step of a failover waits for a disk, for etcd or for a follower. If all partitions took each step together, the
first would take publishes when the last does. So EPOCHS_AT_ONCE of them are on their way, in the order in which they
were elected: enough that all they wait for is waited for together, and the processor has something to do meanwhile.

A partition whose followers do not answer holds up the others for TURN_SECONDS at most.
"""

from __future__ import annotations

import asyncio

EPOCHS_AT_ONCE = 128
TURN_SECONDS = 0.1  # that a first batch may take to be committed, before another partition's turn comes


class EpochTurns:
    """The turns of one node."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, at_once: int = EPOCHS_AT_ONCE) -> None:
        self._loop = loop
        self._room = asyncio.Semaphore(at_once)

    async def begin(self) -> None:
        """Wait for a turn; whoever has one ends it."""
        await self._room.acquire()

    def end(self, begun: asyncio.Future[None] | None) -> None:
        """The turn ends when `begun` is done or late; None: now, as nothing is led."""
        if begun is None or begun.done():
            self._room.release()
        else:
            _Ending(self._loop, self._room, begun)


class _Ending:
    """The end of one turn: by whichever comes first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, room: asyncio.Semaphore, begun: asyncio.Future[None]) -> None:
        self._room: asyncio.Semaphore | None = room
        self._timer = loop.call_later(TURN_SECONDS, self._over)
        begun.add_done_callback(self._over)

    def _over(self, _: object = None) -> None:
        room, self._room = self._room, None
        if room is not None:
            self._timer.cancel()
            room.release()
