"""Two bounds that all connections share: bytes of publishes that are not committed, and a part of each turn.

A publish counts from the moment it is queued until its batch is committed or refused, over all partitions: a disk that
stalls holds written batches as well as waiting ones. Beyond the bound no publisher's socket is read. Publishers are
woken one by one, in the order in which they came, as long as there is room; so what all of them have already read
cannot exceed the bound at once.

HTTP has a second budget of the same size for the large bodies that it reads (`http.server`), and V2 a third one
(`clients.unfinished`): slow senders take nothing from other publishers.

A connection that has had its part of a turn *rests*: it is not read, and what it has sent already waits. All that rest
share TURN_SECONDS of each turn of the loop. They go on in the order in which they began to rest, each once in a turn,
and whoever has its part again and wants more is behind all others. So what is asked by those who never wait for an
answer costs everybody else TURN_SECONDS and one part in a turn, however many they are; and none of them waits for
ever, as at least one goes on in every turn.

What a part is says who makes a connection rest: it has to be small beside TURN_SECONDS.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from nsqha.errors import Unavailable

TURN_SECONDS = 0.001
WAITING_MAX = 256
"""The most callers that may wait to enter: each of them has already sent something, which takes memory."""
NO_ROOM = "too many publishes are waiting for the disk"
_CROWDED = "too many large requests are being read: try again"


class PublishBudget:
    """Counts the bytes of publishes under way in the whole node."""

    def __init__(self, loop: asyncio.AbstractEventLoop, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self._loop = loop
        self._waiting: dict[Callable[[], None], None] = {}
        self._waking = False

    @property
    def full(self) -> bool:
        """Whether publishers should stop being read until `when_room`."""
        return self.used > self.bytes_max

    @property
    def crowded(self) -> bool:
        """Whether the next caller has to wait: there is no room, or others came before."""
        return self.full or bool(self._waiting)

    def take(self, size: int) -> None:
        self.used += size

    def give(self, size: int) -> None:
        """These bytes are committed, or refused."""
        self.used -= size
        if self._waiting and not self._waking and not self.full:
            self._waking = True
            self._loop.call_soon(self._wake)

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call once, when there is room again."""
        self._waiting[callback] = None
        self.give(0)

    def leave(self, callback: Callable[[], None]) -> None:
        """It waits for room no more."""
        self._waiting.pop(callback, None)

    def _wake(self) -> None:
        self._waking = False
        while self._waiting and not self.full:
            callback = next(iter(self._waiting))
            del self._waiting[callback]
            callback()

    async def enter(self, size: int, seconds: float) -> None:
        """Take `size` bytes when there is room, in the order of the calls; Unavailable if there is none in time."""
        if not self.crowded:
            self.take(size)
            return
        if len(self._waiting) >= WAITING_MAX:
            raise Unavailable(_CROWDED)
        entered: asyncio.Future[None] = self._loop.create_future()

        def enter() -> None:
            self.take(size)
            entered.set_result(None)

        self.when_room(enter)
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(entered)
        except BaseException as error:
            if entered.done():
                self.give(size)
            self._waiting.pop(enter, None)
            if isinstance(error, TimeoutError):
                raise Unavailable(_CROWDED) from None
            raise

    async def wait(self, seconds: float) -> None:
        """Return when there is room; it may be gone after the caller's next await. Unavailable if none in time."""
        if not self.full:
            return
        try:
            async with asyncio.timeout(seconds):
                while self.full:  # again: all waiting callers are woken at once, and some took the room
                    await self._woken()
        except TimeoutError:
            raise Unavailable(NO_ROOM) from None

    async def _woken(self) -> None:
        room: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            if not room.done():
                room.set_result(None)

        self.when_room(wake)
        try:
            await room
        finally:
            self._waiting.pop(wake, None)


class TurningLoop(Protocol):
    """The loop, as far as turns need it."""

    def call_soon(self, callback: Callable[[], None]) -> object: ...


class SharedTurns:
    """The connections of one port that rest."""

    __slots__ = ("_clock", "_due", "_loop", "_resting")

    def __init__(self, loop: TurningLoop, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` goes on within a turn: the loop's own does not."""
        self._loop = loop
        self._clock = clock
        self._resting: deque[Callable[[], None]] = deque()
        self._due = False  # the loop calls `_turn`, or it runs

    def later(self, go_on: Callable[[], None]) -> None:
        """Call this in a later turn of the loop, when all that rest already have had theirs."""
        self._resting.append(go_on)
        if not self._due:
            self._due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """A turn of the loop."""
        resting = self._resting
        end, left = self._clock() + TURN_SECONDS, len(resting)
        try:
            while left:
                left -= 1
                resting.popleft()()
                if self._clock() >= end:
                    break
        finally:
            self._due = bool(resting)
            if resting:
                self._loop.call_soon(self._turn)
