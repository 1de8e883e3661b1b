"""The other nodes as a test plays them: it answers calls, and sees what is sent on streams. No network.

    peers = FakePeers(loop)
    peers.serves = lambda method, request: reply      or raises, as the other side would
    peers.away.add("n2")                              no node answers there
    peers.gate.clear(); peers.gate.set()              calls meanwhile wait for their answer
    stream = peers.streams[-1]; stream.sent           and `stream.handler.on_message(...)`

Two ends that talk to each other are what `tests/sim/net.py` is for. `tests/contract/test_peers.py` checks all of them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from nsqha.errors import OutcomeUnknown, Unavailable
from nsqha.server.peers.api import Message, PeerIdentity, StreamHandler

SECONDS = 0.001  # that a call takes


class FakeStream:
    """The end of a stream that this node has opened."""

    def __init__(self, loop: Any, address: str, handler: StreamHandler) -> None:
        self.handler = handler
        self.sent: list[Any] = []
        self.stuck = False  # the network takes nothing
        self.asks: Callable[[], Message | None] | None = None
        self.closed = False
        self.peer = PeerIdentity(address)
        self.heard = 0.0
        self.pings = 0
        self._queue: list[Any] = []  # sent while it was stuck
        self._loop = loop

    @property
    def pending(self) -> int:
        return len(self._queue)

    def ping(self) -> None:
        """The test answers, by `heard`, or not."""
        self.pings += 1

    def send(self, message: Any) -> None:
        if not self.closed:
            copy = type(message)()
            copy.CopyFrom(message)
            (self._queue if self.stuck else self.sent).append(copy)

    def pull(self, give: Callable[[], Message | None]) -> None:
        if not self.closed:
            self.asks = give

    def room(self) -> None:
        """Ask for what there is, unless nothing would go."""
        if not self.stuck:
            self.sent += self._queue
            self._queue.clear()
        while self.asks is not None and not self.stuck:
            give, self.asks = self.asks, None
            if (message := give()) is not None:
                self.send(message)

    def close(self, why: str = "") -> None:
        if not self.closed:
            self.closed, self.asks = True, None
            self._queue.clear()
            self._loop.call_soon(self.handler.on_closed, why)


class FakePeers:
    """`Peers` whose other side is the test."""

    def __init__(self, loop: Any) -> None:
        self.serves: Callable[[str, Any], Any] | None = None
        self.away: set[str] = set()
        self.calls: list[str] = []
        self.streams: list[FakeStream] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._loop = loop

    async def call(self, address: str, method: str, request: Any, *, timeout: float) -> Any:
        self.calls.append(method)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.sleep(SECONDS)
                await self.gate.wait()
                if self.serves is None or address in self.away:
                    raise Unavailable("no node answers there")
                answer = self.serves(method, request)
                return await answer if inspect.isawaitable(answer) else answer
        except TimeoutError:
            raise OutcomeUnknown(f"no answer within {timeout} s") from None

    def stream(self, address: str, method: str, handler: StreamHandler) -> FakeStream:
        self.streams.append(FakeStream(self._loop, address, handler))
        return self.streams[-1]

    async def close(self) -> None:
        for stream in self.streams:
            stream.close()
