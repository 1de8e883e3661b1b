"""How many bytes of publishes a node holds that are not committed: the bound between its sockets and its disk.

A publish counts from the moment it is queued until its batch is committed or refused, over all partitions: a disk that
stalls holds written batches as well as waiting ones. Beyond the bound no publisher's socket is read. Publishers are
woken one by one, in the order in which they came, as long as there is room; so what all of them have already read
cannot exceed the bound at once.

HTTP has a second budget of the same size for the large bodies that it reads (`http.server`), and V2 a third one
(`clients.unfinished`): slow senders take nothing from other publishers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nsqha.errors import Unavailable

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
