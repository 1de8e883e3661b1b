"""A caller that writes and reads single frames of HTTP/2, and a node that it talks to."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers.api import PeerStream
from nsqha.server.peers.calls import GrpcPeerServer
from nsqha.server.peers.http2 import (
    CLIENT_STREAM,
    DATA,
    HEADERS,
    PREFACE,
    SETTINGS,
    Headers,
    frame,
)
from tests.unit.server.peer_rig import SERVICES, Acceptor, Recorder, reply

STREAM = CLIENT_STREAM
OPENING = PREFACE + frame(SETTINGS, 0, 0)
PUSH = "/nsqha.v1.Replication/Push"
GRPC = (("te", "trailers"), ("content-type", "application/grpc"))


def echo(stream: PeerStream) -> Recorder:
    return Recorder(lambda message: stream.send(reply(message.hello.registration)))


class Caller:
    """A connection to an accepting end, and what comes over it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.headers = Headers()

    def write(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    def request(self, *fields: tuple[str, str], method: str = "POST", path: str = PUSH, flags: int = 0) -> bytes:
        return self.headers.frame(flags, STREAM, (":method", method), (":path", path), *(fields or GRPC))

    async def frame(self) -> tuple[int, int, int, bytes]:
        head = await self.reader.readexactly(9)
        payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        return head[3], head[4], int.from_bytes(head[5:], "big"), payload

    async def next(self, wanted: int) -> tuple[int, int, bytes]:
        """Flags, stream and payload of the next frame of this type; others are passed over."""
        while True:
            kind, flags, stream, payload = await self.frame()
            if kind == wanted:
                return flags, stream, payload

    async def fields(self) -> dict[str, str]:
        return self.headers.read((await self.next(HEADERS))[2])

    async def messages(self, count: int) -> list[int]:
        data, found = b"", []
        while len(found) < count:
            data += (await self.next(DATA))[2]
            while len(data) >= 5 and len(data) >= 5 + (size := int.from_bytes(data[1:5], "big")):
                found.append(pb.PushReply.FromString(data[5 : 5 + size]).hello.registration)
                data = data[5 + size :]
        return found


Scenario = Callable[[Caller, Acceptor], Awaitable[None]]


def run(scenario: Scenario, make: Callable[[PeerStream], Recorder] = echo) -> None:
    async def main() -> None:
        complaints: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        acceptor = Acceptor(make)
        peers = GrpcPeerServer(SERVICES)
        peers.on_stream("Push", acceptor)
        server = await loop.create_server(lambda: peers.connection("somebody"), "127.0.0.1", 0)
        async with asyncio.timeout(60):
            caller = Caller(*await asyncio.open_connection(*server.sockets[0].getsockname()))
            await scenario(caller, acceptor)
            caller.writer.close()
            while peers._streams:
                await asyncio.sleep(0.01)
        assert all(len(each.closed) == 1 for each in acceptor.accepted)
        server.close()
        await asyncio.sleep(0.01)
        assert not complaints
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def body(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return b"\0" + struct.pack(">L", len(data)) + data
