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

Many who ask for less than a part each, and so never rest, would still make a turn as long as all of them take. So they
share FRESH_SECONDS of a turn: who comes when these are used *waits* for the next turns, apart from those that rest. All
ports of a node share both, and a turn takes no longer where there is a flood at each of them.

What a part is says who makes a connection rest: it has to be small beside TURN_SECONDS.

The loop learns once in a turn that a disk round has ended, and a turn beside strangers takes many times as long as a
round: publishes would wait for two or three turns. So after each part `between` is called, where a round that has
ended is answered and the next one begins. It takes up to half of the time that those who rest or wait share.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from nsqha.errors import Unavailable

TURN_SECONDS = 0.001
FRESH_SECONDS = 0.002
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


def _nothing() -> bool:
    """What is to be done between parts of connections that no publisher waits for."""
    return False


class SharedTurns:
    """The connections of a node that rest or wait, and what of this turn is left for those that do not."""

    __slots__ = ("_began", "_between", "_clock", "_due", "_loop", "_resting", "_serving", "_used", "_waiting")

    def __init__(
        self,
        loop: TurningLoop,
        clock: Callable[[], float] = time.perf_counter,
        *,
        between: Callable[[], bool] = _nothing,
    ) -> None:
        """`clock` goes on within a turn: the loop's own does not. `between` does what cannot wait for a whole turn, and
        says whether there was any."""
        self._loop = loop
        self._clock = clock
        self._between = between
        self._resting: deque[Callable[[], None]] = deque()
        self._waiting: deque[Callable[[], None]] = deque()
        self._due = False  # the loop calls `_turn`, or it runs
        self._serving = False  # it runs: what is done now is of those that rest or wait
        self._used = 0.0  # seconds of this turn, by those that do not
        self._began = 0.0

    def later(self, go_on: Callable[[], None]) -> None:
        """Call this in a later turn of the loop, when all that rest already have had theirs."""
        self._resting.append(go_on)
        self._see_to_turn()

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call this when there is room, in the order of these calls."""
        self._waiting.append(go_on)
        self._see_to_turn()

    @property
    def room(self) -> bool:
        """Whether a connection that does not rest may have its part now; else it should `wait`."""
        return self._serving or self._used < FRESH_SECONDS

    def enter(self) -> bool:
        """As `room`, and what is done until `leave` counts. Who may not wait does it in any case."""
        self._began = self._clock()
        return self._serving or self._used < FRESH_SECONDS

    def leave(self) -> None:
        if not self._serving:
            self.charge(self._clock() - self._began)

    def charge(self, seconds: float) -> None:
        """Something was begun that takes so long in this turn or the next one."""
        self._used += seconds
        self._see_to_turn()

    async def enter_for(self, seconds: float) -> None:
        """Return when something may be done that takes about so long."""
        if self.room:
            self.charge(seconds)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go_on() -> None:
            if not turn.done():
                self.charge(seconds)
                turn.set_result(None)

        self.wait(go_on)
        await turn

    def _see_to_turn(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """A turn of the loop."""
        used = 0.0
        self._serving = True
        try:
            if self._waiting:
                used = self._serve(self._waiting, FRESH_SECONDS)
            if self._resting:
                self._serve(self._resting, TURN_SECONDS)
        finally:
            self._serving = False
            self._used = used
            self._due = bool(self._waiting or self._resting)
            if self._due:
                self._loop.call_soon(self._turn)

    def _serve(self, queue: deque[Callable[[], None]], seconds: float) -> float:
        """Each at most once, and no more of them after so long; returns how long they took."""
        now, left = self._clock(), len(queue)
        parts = between = used = 0.0
        self._used = 0.0  # by charges
        while left and used < seconds:
            left -= 1
            began = now
            queue.popleft()()
            ended = now = self._clock()
            if self._between():
                now = self._clock()
            parts += ended - began
            between += now - ended
            used = parts + min(between, seconds / 2) + self._used
        return used
