"""The order of one client's commands: one runs completely before the next, and replies leave in the same order.

Where a command needs something slow (a topic's first publish, SUB to a new channel, TLS, an auth server), or may only
run when all earlier ones have been answered, the flow is `blocked`: the session keeps the unread bytes until `unblock`,
and the socket is not read meanwhile, so a client can not make us hold more than one read's worth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from nsqha.nsqlog import Logger
from nsqha.server.clients.unfinished import ReadingBudget, UnfinishedCommand
from nsqha.server.runtime.tasks import begin
from nsqha.wire import errors

if TYPE_CHECKING:
    from nsqha import hot
    from nsqha.server.clients.transport import ClientTransport
    from nsqha.server.runtime.budget import SharedTurns
    from nsqha.wire.session import Session

logger = Logger("connection")

Then = Callable[[], None]


class FlowClient(Protocol):
    """The connection, as far as the order of its commands needs it."""

    closed: bool

    def go_on(self) -> None:
        """Run what was received meanwhile, and read on."""

    def close(self) -> None:
        """Drop the connection once what was written has left."""


class CommandFlow:
    """Whether the next command of one client may run: implements `wire.handler.FlowHandler`."""

    __slots__ = (
        "_client",
        "_loop",
        "_task",
        "_transport",
        "_turns",
        "_when_answered",
        "blocked",
        "eof",
        "replies",
        "session",
        "unfinished",
    )

    session: Session  # set by the connection: the session needs this flow

    def __init__(
        self,
        client: FlowClient,
        transport: ClientTransport,
        replies: hot.Replies,
        loop: asyncio.AbstractEventLoop,
        reading: ReadingBudget,
        turns: SharedTurns,
    ) -> None:
        self.unfinished = UnfinishedCommand(reading, self)
        self.blocked = False
        self.eof = False  # the client sends nothing more
        self.replies = replies
        self._client = client
        self._transport = transport
        self._loop = loop
        self._turns = turns
        self._task: asyncio.Task[None] | None = None
        self._when_answered: Then | None = None

    @property
    def closed(self) -> bool:
        """Whether the connection is closed."""
        return self._client.closed

    def block(self) -> None:
        if not self.blocked:
            self.blocked = True
            self._transport.pause_reading()

    def unblock(self, then: Then | None = None) -> None:
        self.blocked = False
        if self._client.closed:
            return
        if then is not None:
            then()
        if not self.blocked and not self._client.closed:
            self._client.go_on()

    def wait_for(self, work: Coroutine[Any, Any, Then | None]) -> None:
        """Block the session until `work` ends; it returns what to do then."""
        self.block()

        async def run() -> None:
            then: Then | None
            try:
                then = await work
            except Exception as error:
                # What a client may cause is refused by `work`; this is ours, and nothing would ever unblock the client.
                address = self._transport.remote_address
                logger.error("command_failed", "client(%s): a command failed", address, error=error)
                then = self._failed
            self._task = None
            self.unblock(then)

        self._task = begin(self._loop, run())
        # A client may be gone before `run` began; then nothing has awaited the work.
        self._task.add_done_callback(lambda _: work.close())

    def _failed(self) -> None:
        self.refuse(errors.COMMAND_FAILED)

    def after_replies(self, then: Then) -> None:
        """Do `then` when every earlier command has been answered; the session waits."""
        if not self.replies:
            then()
        else:
            self.block()
            self._when_answered = then
            self.replies.on_empty = self._all_answered

    def end_of_input(self) -> bool:
        """The client sends nothing more; whether it is still owed something."""
        self.eof = True
        self.replies.on_empty = self._all_answered
        codec = self._transport.codec
        if codec is None or not codec.pending:  # else when that has been run
            self.session.eof()
        return bool(self.replies) or self.blocked

    def _all_answered(self) -> None:
        if self._when_answered is not None:
            then, self._when_answered = self._when_answered, None
            self.unblock(then)
        elif self.eof and not self.blocked:  # else there may be more that it has sent
            self._client.close()

    def cancel(self) -> bool:
        """The client is gone: what its command waits for concerns it no more. Whether it waited for some work."""
        self.unfinished.release()
        if self._task is None:
            return False
        self._task.cancel()
        return True

    def come_apart(self) -> None:
        """The flow ends: it and what it knows know each other no more."""
        self.replies.on_empty = self._when_answered = None
        del self.session, self.unfinished

    # ---- the session's handler

    def enter(self) -> bool:
        if self._turns.enter():
            return True
        if not self._client.closed:
            self.block()
            self._turns.wait(self.unblock)
        return False

    def enter_anyway(self) -> None:
        """As `enter`, for what is not to wait: others have less of this turn."""
        self._turns.enter()

    def leave(self) -> None:
        self._turns.leave()

    def rest(self) -> None:
        """Go on when it is this client's turn again: a read may hold as many commands as take a while, and a few
        compressed bytes far more."""
        if not self.blocked and not self._client.closed:
            self.block()
            self._turns.later(self.unblock)

    def fatal(self, data: bytes) -> None:
        """An error frame in its turn, then the end."""
        self.replies.fatal(data)

    def hang_up(self) -> None:
        """The end in its turn, without a frame: what nsqd does on a line, or compressed bytes, that it can not read."""
        if self.replies:
            self.replies.fatal(b"")
        else:
            self._client.close()

    def refuse(self, frame: bytes) -> None:
        """An error frame in its turn, then the end; no later command is run."""
        self.fatal(frame)
        self.session.kill()
