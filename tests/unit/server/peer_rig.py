"""Two nodes that talk to each other, over gRPC on loopback and over the simulated network; and who listens to them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop
from grpc import aio

from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers.api import Message, PeerStream
from nsqha.server.peers.calls import GrpcPeers, GrpcPeerServer, server_options
from nsqha.server.peers.http2 import HEADERS, PREFACE, Headers
from nsqha.server.peers.listener import PeerListener
from nsqha.server.peers.renewing import listen as grpc_listen
from nsqha.server.runtime.listen import bound_address, listen
from tests.fakes.loop import VirtualLoop
from tests.sim.net import Network

SERVICES = (pb.DESCRIPTOR.services_by_name["Replication"],)
PATIENCE = 20.0  # seconds until a test that waits for what never comes gives up


def push(number: int, size: int = 0) -> Message:
    return pb.PushMessage(
        hello=pb.PushHello(registration=number), appends=[pb.Append(data=bytes(size))] if size else []
    )


def reply(number: int) -> Message:
    return pb.PushReply(hello=pb.PushHello(registration=number))


def request_in(said: bytes) -> dict[str, str]:
    """The headers that a caller said first."""
    assert said.startswith(PREFACE)
    said = said[len(PREFACE) :]
    while True:
        end = 9 + int.from_bytes(said[:3], "big")
        if said[3] == HEADERS:
            return Headers().read(said[9:end])
        said = said[end:]


class Recorder:
    """A stream handler that remembers. `react` is called with every message."""

    def __init__(self, react: Callable[[Message], None] | None = None) -> None:
        self.messages: list[Message] = []
        self.closed: list[str] = []
        self.stream: PeerStream | None = None
        self._react = react
        self._changed = asyncio.Event()

    @property
    def numbers(self) -> list[int]:
        return [message.hello.registration for message in self.messages]

    def on_message(self, message: Message) -> None:
        self.messages.append(message)
        self._changed.set()
        if self._react is not None:
            self._react(message)

    def on_closed(self, why: str) -> None:
        self.closed.append(why)
        self._changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def end(self) -> str:
        await self.until(lambda: self.closed)
        return self.closed[0]


class Acceptor:
    """Accepts streams with a Recorder each."""

    def __init__(self, make: Callable[[PeerStream], Recorder] = lambda _: Recorder()) -> None:
        self.accepted: list[Recorder] = []
        self._make = make
        self._changed = asyncio.Event()

    def __call__(self, stream: PeerStream) -> Recorder:
        handler = self._make(stream)
        handler.stream = stream
        self.accepted.append(handler)
        self._changed.set()
        return handler

    async def next(self, number: int = 0) -> Recorder:
        """The stream that was accepted as the `number`-th."""
        async with asyncio.timeout(PATIENCE):
            while len(self.accepted) <= number:
                self._changed.clear()
                await self._changed.wait()
        return self.accepted[number]


class World:
    """`server` is the node that takes calls at `address` and streams at `peer_address`, `peers` another node's view of
    it, `nowhere` an address without a node."""

    peers: Any
    server: Any
    address: str
    peer_address: str
    nowhere: str

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def runner(self) -> asyncio.Runner:
        raise NotImplementedError

    def run(self, scenario: Callable[[World], Awaitable[None]]) -> None:
        """On a loop of its own, from start to stop."""

        async def main() -> None:
            await self.start()
            try:
                await scenario(self)
            finally:
                await self.stop()
            await asyncio.sleep(0.01)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks left behind: {left}"

        with self.runner() as runner:
            runner.run(main())


class GrpcWorld(World):
    nowhere = "127.0.0.1:1"

    def __init__(self, *, files: Any = None, caller_tls: Any = None) -> None:
        self._files = files
        self._caller_tls = caller_tls

    def runner(self) -> asyncio.Runner:
        return asyncio.Runner(loop_factory=uvloop.new_event_loop)

    async def start(self) -> None:
        self.server = GrpcPeerServer(SERVICES, tls=self._files.tls if self._files else None)
        self.grpc = aio.server(options=server_options())
        self.server.add_to(self.grpc)
        self.address = await grpc_listen(self.grpc, "127.0.0.1:0", self._files)
        sock = listen("127.0.0.1:0", flag="peer-address")
        self.listener = PeerListener(self.server, sock, self._files)
        self.listener.start()
        self.peer_address = bound_address(sock)
        self.peers = GrpcPeers(SERVICES, tls=self._caller_tls)

    async def stop(self) -> None:
        await self.peers.close()
        await self.listener.close()
        self.server.close()
        await self.grpc.stop(0.5)


class SimWorld(World):
    nowhere = "nowhere"
    address = peer_address = "b"

    def __init__(self, seed: int, **options: Any) -> None:
        self.seed = seed
        self._options = options

    def runner(self) -> asyncio.Runner:
        return asyncio.Runner(loop_factory=VirtualLoop)

    async def start(self) -> None:
        self.net = Network(asyncio.get_running_loop(), random.Random(self.seed), SERVICES, **self._options)
        self.server = self.net.server("b")
        self.peers = self.net.peers("a")

    async def stop(self) -> None:
        await self.peers.close()
        self.server.close()
