"""The bound of what unfinished commands of all connections hold together.

A command is kept until its body is complete (`wire.unread`), and a body may be large, also before AUTH. Up to
SMALL_BYTES nothing is counted. A larger one reserves its size in a budget of the whole node, `--publish-queue-bytes`,
as large bodies of HTTP do in theirs, before more of it is read; where there is no room its socket is not read, and the
first that waits gets room first. What waits has been read up to one read of the socket, at most 256 KB or a piece of a
codec: together these may be as many bytes as the budget again, a connection beyond that ends with an error. A body that
has room must be complete within BODY_SECONDS, or others would wait for one that never comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from nsqha.server.runtime.budget import PublishBudget
from nsqha.wire import encoder
from nsqha.wire.session import Session

SMALL_BYTES = 64 << 10
BODY_SECONDS = 60.0
_TOO_LATE = b"it was not complete within %d s" % BODY_SECONDS
_CROWDED = b"too many large commands are being received by this node: try again later"


class ReadFlow(Protocol):
    """The flow of one client's commands, as far as it is read or not."""

    session: Session
    blocked: bool

    def block(self) -> None: ...

    def unblock(self, then: Callable[[], None] | None = None) -> None: ...

    def refuse(self, frame: bytes) -> None:
        """An error frame in its turn, then the end."""


class ReadingBudget:
    """The room that unfinished commands have in one node."""

    def __init__(self, loop: asyncio.AbstractEventLoop, bytes_max: int, command_bytes_max: int) -> None:
        """`command_bytes_max`: the size of the largest command."""
        self.loop = loop
        self.reserved = PublishBudget(loop, bytes_max)
        self.waiting_bytes = 0  # kept by connections that wait for room
        self.command_bytes_max = command_bytes_max

    def may_wait(self, size: int) -> bool:
        """Whether one more connection may keep so much while it waits."""
        return self.waiting_bytes + size <= self.reserved.bytes_max


class UnfinishedCommand:
    """The large command that one connection is sending, if there is one."""

    __slots__ = ("_budget", "_deadline", "_flow", "_have", "_size", "_waits")

    def __init__(self, budget: ReadingBudget, flow: ReadFlow) -> None:
        self._budget = budget
        self._flow = flow
        self._have = 0  # bytes that were kept when `heed` looked last
        self._size = 0  # bytes that are reserved, or that it waits for
        self._waits = False
        self._deadline: asyncio.TimerHandle | None = None

    def heed(self) -> None:
        """More than SMALL_BYTES are kept, or were: reserve room for the command, or give back what it had."""
        if self._waits:
            return  # what comes although the socket is not read any more is counted when there is room
        unread, flow = self._flow.session.unread, self._flow
        have, before = unread.have, self._have
        self._have = have
        if have <= SMALL_BYTES or have < before:  # the one that had room is complete
            self.release()
        if have <= SMALL_BYTES or unread.enough or flow.blocked:
            return  # a complete one is not read on; what is blocked is looked at again before it is
        # The parts of an MPUB may go beyond the size that it announced.
        size = unread.need if have <= unread.need else max(have, self._budget.command_bytes_max)
        if size > self._size:
            self.release()
            self._have = have
            self._enter(size)

    def _enter(self, size: int) -> None:
        budget, room = self._budget, self._budget.reserved
        if not room.crowded:
            self._size = size
            self._reserve()
        elif budget.may_wait(self._have):
            self._size = size
            self._waits = True
            budget.waiting_bytes += self._have
            self._flow.block()
            room.when_room(self._admit)
        else:
            self._refuse(_CROWDED)

    def _reserve(self) -> None:
        self._budget.reserved.take(self._size)
        self._deadline = self._budget.loop.call_later(BODY_SECONDS, self._late)

    def _admit(self) -> None:
        """There is room."""
        self._waits = False
        self._budget.waiting_bytes -= self._have
        self._reserve()
        self._flow.unblock()

    def _late(self) -> None:
        if self._flow.blocked:  # a client that is not read is not late
            self._deadline = self._budget.loop.call_later(BODY_SECONDS, self._late)
        else:
            self._refuse(_TOO_LATE)

    def _refuse(self, why: bytes) -> None:
        text = self._flow.session.unread.text_at_eof or b"E_INVALID"
        self.release()
        self._flow.refuse(encoder.error(b"%b: %b" % (text, why)))

    def release(self) -> None:
        """Give back the room, or the place among those that wait: the command is complete, or the connection ends."""
        if not self._size:
            return
        if self._waits:
            self._waits = False
            self._budget.waiting_bytes -= self._have
            self._budget.reserved.leave(self._admit)
        else:
            self._budget.reserved.give(self._size)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._size = self._have = 0
