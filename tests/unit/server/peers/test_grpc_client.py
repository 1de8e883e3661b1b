"""gRPC's own client at the peer port: it is understood, and understands what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc import aio

from nsqha.errors import Conflict, Unavailable
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers.api import PeerStream, StreamHandler
from tests.unit.server.peer_rig import GrpcWorld, Recorder, World, push, reply

PUSH = "/nsqha.v1.Replication/Push"


def with_grpc(
    acceptor: Callable[[PeerStream], StreamHandler],
    talk: Callable[[aio.Channel], Awaitable[None]],
    *options: tuple[str, int],
) -> None:
    async def scenario(world: World) -> None:
        assert isinstance(world, GrpcWorld)
        world.server.on_stream("Push", acceptor)
        async with aio.insecure_channel(world.peer_address, options=options) as channel:
            async with asyncio.timeout(20):
                await talk(channel)

    GrpcWorld().run(scenario)


def echo(stream: PeerStream) -> Recorder:
    return Recorder(lambda message: stream.send(reply(message.hello.registration)))


def test_grpcs_client_is_understood() -> None:
    async def talk(channel: aio.Channel) -> None:
        call = channel.stream_stream(PUSH)(metadata=(("x-anything", "x" * 5000),))
        for number in range(50):
            await call.write(push(number, size=number * 3000).SerializeToString())
        for number in range(50):
            assert pb.PushReply.FromString(await call.read()).hello.registration == number
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == "the other side ended the stream"

    with_grpc(echo, talk)


def test_the_end_is_told_in_trailers() -> None:
    why = '50 % of "it": é, 日本; a\\b~'

    async def talk(channel: aio.Channel) -> None:
        call = channel.stream_stream(PUSH)()
        await call.write(push(1).SerializeToString())
        assert pb.PushReply.FromString(await call.read()).hello.registration == 7
        assert (await call.code(), await call.details()) == (grpc.StatusCode.UNAVAILABLE, why)
        assert dict(await call.trailing_metadata())["nsqha-error"] == "Unavailable"

    def accept(stream: PeerStream) -> Recorder:
        def react(_: Any) -> None:
            stream.send(reply(7))
            stream.close(why)

        return Recorder(react)

    with_grpc(accept, talk)


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (Unavailable("not now"), grpc.StatusCode.UNAVAILABLE, "Unavailable"),
        (Conflict("no"), grpc.StatusCode.ALREADY_EXISTS, "Conflict"),
        (ValueError("not like that"), grpc.StatusCode.INVALID_ARGUMENT, "ValueError"),
        (KeyError("a bug"), grpc.StatusCode.UNKNOWN, "OutcomeUnknown"),
    ],
)
def test_a_refusal_is_all_that_is_said(error: Exception, code: grpc.StatusCode, kind: str) -> None:
    def accept(stream: PeerStream) -> Recorder:
        stream.send(reply(1))
        raise error

    async def talk(channel: aio.Channel) -> None:
        for _ in range(3):  # each on a connection of its own
            call = channel.stream_stream(PUSH)()
            assert await call.code() is code
            assert str(error.args[0]) in await call.details()
            assert dict(await call.trailing_metadata())["nsqha-error"] == kind

    with_grpc(accept, talk)


@pytest.mark.parametrize("path", ["/nsqha.v1.Replication/Status", "/nsqha.v1.Replication/Nothing", "/"])
def test_what_is_no_stream_is_not_implemented(path: str) -> None:
    async def talk(channel: aio.Channel) -> None:
        call = channel.stream_stream(path)()
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        assert path in await call.details()

    with_grpc(echo, talk)


def test_a_second_stream_has_a_connection_of_its_own() -> None:
    async def talk(channel: aio.Channel) -> None:
        first = channel.stream_stream(PUSH)()
        await first.write(push(1).SerializeToString())
        assert pb.PushReply.FromString(await first.read()).hello.registration == 1
        second = channel.stream_stream(PUSH)()  # gRPC's client holds it back until the first has ended
        first.cancel()
        await second.write(push(2).SerializeToString())
        assert pb.PushReply.FromString(await second.read()).hello.registration == 2
        second.cancel()

    with_grpc(echo, talk)


def test_two_streams_of_one_channel_are_both_served() -> None:
    """One waits until the other has ended, and then has a connection of its own."""

    async def exchange(channel: aio.Channel, number: int, end: asyncio.Event) -> int:
        call = channel.stream_stream(PUSH)()
        await call.write(push(number).SerializeToString())
        answer = pb.PushReply.FromString(await call.read())
        await end.wait()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        return answer.hello.registration  # type: ignore[no-any-return]

    accepted = 0

    def accept(stream: PeerStream) -> Recorder:
        nonlocal accepted
        accepted += 1
        return echo(stream)

    async def talk(channel: aio.Channel) -> None:
        end = asyncio.Event()
        both = [asyncio.create_task(exchange(channel, number, end)) for number in (1, 2)]
        while not accepted:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert accepted == 1
        end.set()
        assert await asyncio.gather(*both) == [1, 2]
        assert accepted == 2

    with_grpc(accept, talk)


def test_messages_that_are_compressed_are_unimplemented() -> None:
    async def talk(channel: aio.Channel) -> None:
        call = channel.stream_stream(PUSH)(compression=grpc.Compression.Gzip)
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "compressed with gzip" in await call.details()

    with_grpc(echo, talk)


@pytest.mark.parametrize("size", [0, 100, 65536])
def test_what_a_client_remembers_of_headers_is_as_much_as_it_says(size: int) -> None:
    async def talk(channel: aio.Channel) -> None:
        call = channel.stream_stream(PUSH)()
        await call.write(push(1).SerializeToString())
        assert pb.PushReply.FromString(await call.read()).hello.registration == 1
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.UNAVAILABLE

    with_grpc(echo, talk, ("grpc.http2.hpack_table_size.decoder", size))
