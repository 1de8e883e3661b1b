"""`nsqha.server.peers.api` over the simulated network (`net`): what one process calls, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from nsqha.errors import OutcomeUnknown, Unavailable
from nsqha.server.peers.api import Accept, Answer, Message, Method, PeerIdentity, StreamHandler, error_of, kind_and_text
from tests.sim.wire import End, Over, Wire

if TYPE_CHECKING:
    from tests.sim.net import Network


class SimPeers:
    """The calling side of one process."""

    def __init__(self, net: Network, address: str, identity: PeerIdentity) -> None:
        self.net = net
        self.address = address
        self.identity = identity
        self.dead = False
        self._ends: dict[int, End] = {}
        self._closed = False

    def stream(self, address: str, method: str, handler: StreamHandler) -> End:
        chosen = self.net.methods[method]
        if not chosen.streaming:
            raise TypeError(f"{chosen.path} is a call")
        return self._open(address, chosen, handler).client_end

    async def call(self, address: str, method: str, request: Message, *, timeout: float) -> Message:
        chosen = self.net.methods[method]
        if chosen.streaming:
            raise TypeError(f"{chosen.path} is a stream")
        chosen.encoded(request, chosen.request)
        loop = self.net.loop_of(self.address)
        waiter = _Waiter(loop)
        wire = self._open(address, chosen, waiter)
        end = wire.client_end
        end.send(request)
        timer = loop.call_later(timeout, end.close, "deadline exceeded")
        try:
            await waiter.done
        finally:
            timer.cancel()
            end.close()
        what = f"{method} to {address}"
        if waiter.reply is not None:
            return waiter.reply
        if not wire.connected:
            raise Unavailable(f"{what}: no connection; nothing was sent")
        if end.told is not None and end.told.kind:
            raise error_of(end.told.kind, f"{what}: {end.told.why}")
        raise OutcomeUnknown(f"{what}: {waiter.why}")

    async def close(self) -> None:
        self._closed = True
        for end in list(self._ends.values()):
            end.close()
        await asyncio.sleep(0)

    def _open(self, address: str, method: Method, handler: StreamHandler) -> Wire:
        if self._closed or self.dead:
            raise Unavailable("this node is stopping")
        wire = Wire(self, address, method)
        wire.client_end.handler = handler
        self._ends = {key: end for key, end in self._ends.items() if not end.ended}
        self._ends[wire.number] = wire.client_end
        return wire


class SimPeerServer:
    """The called side of one process."""

    def __init__(self, net: Network, address: str) -> None:
        self.net = net
        self.address = address
        self.dead = False
        self._accepts: dict[str, Accept] = {}
        self._answers: dict[str, Answer] = {}
        self._ends: dict[int, End] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}

    def on_stream(self, method: str, accept: Accept) -> None:
        assert self.net.methods[method].streaming, f"{method} is a call"
        self._accepts[method] = accept

    def on_call(self, method: str, answer: Answer) -> None:
        assert not self.net.methods[method].streaming, f"{method} is a stream"
        self._answers[method] = answer

    def accept(self, wire: Wire) -> None:
        """A connection came about."""
        name, end = wire.method.name, wire.server_end
        self._ends = {key: end for key, end in self._ends.items() if not end.ended}
        self._ends[wire.number] = end
        try:
            if wire.method.streaming and name in self._accepts:
                end.handler = self._accepts[name](end)
            elif name in self._answers:
                end.handler = _Answering(self, wire, self._answers[name])
            else:
                raise Unavailable(f"{name} is not served yet")
        except Exception as error:
            end.end(Over(*kind_and_text(error)))

    def answer(self, number: int, answering: Coroutine[Any, Any, None]) -> None:
        """Runs until it ends, its caller goes, or this process dies."""
        task = self.net.loop_of(self.address).create_task(answering)
        self._answering[number] = task
        task.add_done_callback(lambda _: self._answering.pop(number, None))

    def cancel_answer(self, number: int) -> None:
        if task := self._answering.get(number):
            task.cancel()

    def cancel_answers(self) -> None:
        """The process is gone, or stops."""
        for task in list(self._answering.values()):
            task.cancel()

    def close(self) -> None:
        """Stop listening, end all streams and calls."""
        self.net.stopped_listening(self)
        for end in list(self._ends.values()):
            end.close("this node is stopping")
        self.cancel_answers()


class _Waiter:
    """The caller's end of a call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()
        self.reply: Message = None
        self.why = ""

    def on_message(self, message: Message) -> None:
        self.reply = message
        self._wake()

    def on_closed(self, why: str) -> None:
        self.why = why
        self._wake()

    def _wake(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class _Answering:
    """The called end of a call."""

    def __init__(self, server: SimPeerServer, wire: Wire, answer: Answer) -> None:
        self._server = server
        self._wire = wire
        self._answer = answer

    def on_message(self, message: Message) -> None:
        self._server.answer(self._wire.number, self._run(message))

    async def _run(self, request: Message) -> None:
        end = self._wire.server_end
        try:
            reply = await self._answer(end.peer, request)
        except Exception as error:
            end.end(Over(*kind_and_text(error)))
        else:
            end.send(reply)

    def on_closed(self, why: str) -> None:
        self._server.cancel_answer(self._wire.number)
