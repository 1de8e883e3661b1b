"""The port of calls closes connections that make none: strangers do not keep others out, and clients notice nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from grpc import aio

from nsqha import grpc_channels
from nsqha.cli.brokers.admin import Admin
from nsqha.cli.terminal import exits
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers import calls
from nsqha.server.peers.api import PeerIdentity
from nsqha.server.runtime.listen import listen
from tests.unit.server.peer_rig import PATIENCE, SERVICES

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
HEADERS, GOAWAY = 1, 7
ROOM = 4


def server(scenario: Callable[[str], Awaitable[None]]) -> None:
    """`scenario` with the address of a server that answers Status."""

    async def status(peer: PeerIdentity, request: Any) -> Any:
        return pb.StatusReply(node_uid=7)

    async def main() -> None:
        peers = calls.GrpcPeerServer(SERVICES)
        peers.on_call("Status", status)
        served = aio.server(options=calls.server_options())
        peers.add_to(served)
        port = served.add_insecure_port("127.0.0.1:0")
        await served.start()
        try:
            await scenario(f"127.0.0.1:{port}")
        finally:
            await served.stop(0)

    asyncio.run(main())


async def asked(peers: calls.GrpcPeers, address: str) -> int:
    return int((await peers.call(address, "Status", pb.StatusRequest(), timeout=PATIENCE)).node_uid)


def test_connections_that_say_nothing_after_their_settings_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "IDLE_MS", 1000)
    monkeypatch.setattr(calls.listen, "connections_max", lambda: ROOM)

    async def scenario(address: str) -> None:
        host, port = address.split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(2 * ROOM)]
        for _, writer in silent:
            writer.write(PREFACE + SETTINGS)
        async with asyncio.timeout(PATIENCE):
            for reader, _ in silent:  # half of them were closed at once, the others when they had been idle
                with suppress(ConnectionResetError):
                    await reader.read()
        peers = calls.GrpcPeers(SERVICES)
        assert await asked(peers, address) == 7
        await peers.close()
        for _, writer in silent:
            writer.close()

    server(scenario)


def test_a_client_that_finds_no_room_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls.listen, "connections_max", lambda: ROOM)
    monkeypatch.setattr(calls, "IDLE_MS", 600_000)

    def list_topics(address: str) -> str:
        with Admin(address, PATIENCE) as admin, pytest.raises(exits.Exit) as ended:
            admin.call("ListTopics")
        assert ended.value.status == exits.UNREACHABLE
        return str(ended.value)

    async def scenario(address: str) -> None:
        host, port = address.split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(ROOM)]
        for reader, writer in silent:
            writer.write(PREFACE + SETTINGS)
            assert await reader.read(1), "it has been accepted"
        assert await asyncio.to_thread(list_topics, address) == f"{address} {grpc_channels.NO_ROOM}"
        for _, writer in silent:
            writer.close()

    server(scenario)


def test_a_server_that_waits_for_tls_has_room() -> None:
    with listen("127.0.0.1:0", flag="grpc-address") as silent:
        assert grpc_channels.has_room(f"127.0.0.1:{silent.getsockname()[1]}")


def test_calls_at_a_pace_around_the_idle_time_do_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node closes first what the other side would: of a call that meets that end it may be unknown what became."""
    assert 2 * calls.UNUSED_SECONDS * 1000 <= calls.IDLE_MS
    monkeypatch.setattr(calls, "IDLE_MS", 100)
    monkeypatch.setattr(calls, "UNUSED_SECONDS", 0.05)

    async def scenario(address: str) -> None:
        async def calling(seed: int) -> None:
            pauses, peers = random.Random(seed), calls.GrpcPeers(SERVICES)
            for _ in range(15):
                assert await asked(peers, address) == 7
                await asyncio.sleep(pauses.choice((0.1, 0.2)) + pauses.uniform(-0.003, 0.003))
            await peers.close()

        await asyncio.gather(*map(calling, range(20)))

    server(scenario)


# ---- the call and the end of its connection meet


@asynccontextmanager
async def ended_at_second_call(address: str) -> AsyncIterator[tuple[str, list[int]]]:
    """The address of a proxy whose first connection ends as an idle one does, when a second call is on its way; and the
    calls that each of its connections has seen."""
    host, port = address.split(":")
    seen: list[int] = []

    async def to_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ours: asyncio.StreamWriter) -> None:
        number = len(seen)
        seen.append(0)
        writer.write(await reader.readexactly(len(PREFACE)))
        while True:
            head = await reader.readexactly(9)
            seen[number] += head[3] == HEADERS
            if number == 0 and seen[0] == 2:
                ours.write(b"\0\0\x08" + bytes([GOAWAY]) + bytes(5) + (1).to_bytes(4, "big") + (2).to_bytes(4, "big"))
                await ours.drain()
                return
            writer.write(head + await reader.readexactly(int.from_bytes(head[:3], "big")))

    async def to_client(reader: asyncio.StreamReader, ours: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            ours.write(data)

    async def connection(reader: asyncio.StreamReader, ours: asyncio.StreamWriter) -> None:
        from_server, writer = await asyncio.open_connection(host, int(port))
        back = asyncio.create_task(to_client(from_server, ours))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await to_server(reader, writer, ours)
        back.cancel()
        writer.close()
        ours.close()

    proxy = await asyncio.start_server(connection, "127.0.0.1", 0)
    async with proxy:
        yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}", seen


def test_a_call_of_a_node_that_meets_the_end_of_its_connection_is_sent_again() -> None:
    async def scenario(address: str) -> None:
        async with ended_at_second_call(address) as (proxy, seen):
            peers = calls.GrpcPeers(SERVICES)
            assert [await asked(peers, proxy) for _ in range(2)] == [7, 7]
            assert seen == [2, 1]
            await peers.close()

    server(scenario)


def test_and_so_is_one_of_a_thread() -> None:
    """The command line and readers in Spark."""

    def twice(address: str) -> list[int]:
        with grpc_channels.channel(address, [("grpc.enable_http_proxy", 0)], None) as channel:
            status = channel.unary_unary(
                "/nsqha.v1.Replication/Status",
                request_serializer=pb.StatusRequest.SerializeToString,
                response_deserializer=pb.StatusReply.FromString,
            )
            return [status(pb.StatusRequest(), timeout=PATIENCE).node_uid for _ in range(2)]

    async def scenario(address: str) -> None:
        async with ended_at_second_call(address) as (proxy, seen):
            assert await asyncio.to_thread(twice, proxy) == [7, 7]
            assert seen == [2, 1]

    server(scenario)
