"""What is said first between nodes: with and without a secret, and between builds of different levels."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpc import aio

from nsqha.admin.service import AdminServer
from nsqha.cluster_secret import MISSING, NOT_ASKED, NOT_PROVED, ClusterSecret
from nsqha.errors import Unavailable
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers import greeting
from nsqha.server.peers.api import PeerIdentity
from nsqha.server.peers.calls import GrpcPeers, GrpcPeerServer
from nsqha.server.peers.greeting import ClientGreeting, ServerGreeting, nonce_in_settings, unlike
from nsqha.server.peers.http2 import SETTING, settings
from nsqha.server.peers.listener import PeerListener
from nsqha.server.runtime import listen
from tests.unit.server.peer_rig import SERVICES, Acceptor, Recorder, push

NEW, OLD = ClusterSecret(b"n" * 32), ClusterSecret(b"o" * 32)
BOTH = ClusterSecret(b"n" * 32, b"o" * 32)
PATH = "/nsqha.v1.Replication/Push"

Scenario = Callable[[str, str, Acceptor], Awaitable[None]]


def node(secret: ClusterSecret | None, scenario: Scenario) -> None:
    """`scenario` with the addresses of calls and of streams of a node that has this secret."""

    async def main() -> None:
        async def status(peer: PeerIdentity, request: Any) -> Any:
            return pb.StatusReply(node_uid=7)

        accepted = Acceptor()
        peers = GrpcPeerServer(SERVICES, secret=secret)
        peers.on_call("Status", status)
        peers.on_stream("Push", accepted)
        broker = cast(Any, SimpleNamespace(cluster=None, log_source=None, endpoints=SimpleNamespace()))
        server = AdminServer(broker, "127.0.0.1:0", peers, secret=secret)
        await server.start()
        sock = listen.listen("127.0.0.1:0", flag="peer-address")
        streams = PeerListener(peers, sock, None)
        streams.start()
        try:
            await scenario(server.address, listen.bound_address(sock), accepted)
        finally:
            await server.close()
            await streams.close()

    asyncio.run(main())


async def refused_stream(address: str, secret: ClusterSecret | None) -> str:
    peers = GrpcPeers(SERVICES, secret=secret)
    handler = Recorder()
    peers.stream(address, "Push", handler).send(push(1))
    try:
        return await handler.end()
    finally:
        await peers.close()


async def asked(address: str, secret: ClusterSecret | None) -> int:
    peers = GrpcPeers(SERVICES, secret=secret)
    try:
        return int((await peers.call(address, "Status", pb.StatusRequest(), timeout=5)).node_uid)
    finally:
        await peers.close()


@pytest.mark.parametrize(("server", "client"), [(NEW, NEW), (NEW, BOTH), (BOTH, OLD), (None, None)])
def test_who_shares_a_secret_is_served(server: ClusterSecret | None, client: ClusterSecret | None) -> None:
    async def scenario(calls: str, streams: str, accepted: Acceptor) -> None:
        peers = GrpcPeers(SERVICES, secret=client)
        for _ in range(3):
            assert (await peers.call(calls, "Status", pb.StatusRequest(), timeout=5)).node_uid == 7
        handler = Recorder()
        peers.stream(streams, "Push", handler).send(push(1))
        other = await accepted.next()
        await other.until(lambda: other.messages == [push(1)])
        await peers.close()

    node(server, scenario)


@pytest.mark.parametrize(
    ("server", "client", "why"), [(NEW, None, MISSING), (NEW, OLD, "not this cluster's"), (None, NEW, NOT_ASKED)]
)
def test_a_stream_between_strangers_is_refused_with_one_line(
    server: ClusterSecret | None, client: ClusterSecret | None, why: str
) -> None:
    async def scenario(_calls: str, streams: str, accepted: Acceptor) -> None:
        assert why in await refused_stream(streams, client)
        assert not accepted.accepted

    node(server, scenario)


@pytest.mark.parametrize(
    ("server", "client", "why"), [(NEW, None, MISSING), (NEW, OLD, NOT_PROVED), (None, NEW, NOT_ASKED)]
)
def test_a_call_between_strangers_is_refused_with_one_line(
    server: ClusterSecret | None, client: ClusterSecret | None, why: str
) -> None:
    async def scenario(calls: str, _streams: str, _accepted: Acceptor) -> None:
        with pytest.raises(Unavailable) as refused:
            await asked(calls, client)
        assert why in str(refused.value)

    node(server, scenario)


def test_administration_and_segments_want_the_secret_and_health_does_not() -> None:
    async def scenario(calls: str, _streams: str, _accepted: Acceptor) -> None:
        async with aio.insecure_channel(calls) as channel:
            for path in ("/nsqha.v1.Admin/ListTopics", "/nsqha.v1.Segments/Snapshot"):
                call = channel.unary_unary(path)(b"")
                assert await call.details() == MISSING
            assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")

    node(NEW, scenario)


def test_a_server_that_has_forgotten_the_session_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from nsqha import cluster_secret

    monkeypatch.setattr(cluster_secret.CallSessions.__init__, "__kwdefaults__", {"sessions_max": 1})

    async def scenario(calls: str, _streams: str, _accepted: Acceptor) -> None:
        peers = GrpcPeers(SERVICES, secret=NEW)
        assert (await peers.call(calls, "Status", pb.StatusRequest(), timeout=5)).node_uid == 7
        assert await asked(calls, NEW) == 7  # its session takes the place of the first one
        assert (await peers.call(calls, "Status", pb.StatusRequest(), timeout=5)).node_uid == 7
        await peers.close()

    node(NEW, scenario)


# ---- the words, without a network


def greet(server: ClusterSecret | None, client: ClusterSecret | None) -> tuple[str, str]:
    """Why the server refuses, and then why the client does."""
    there = ServerGreeting(server)
    here = ClientGreeting(client, PATH)
    nonce = nonce_in_settings(settings(*there.settings)[9:])
    said = dict(here.opening(nonce))
    if why := there.refused(said, PATH):
        return why, ""
    return "", here.refused(dict(there.answer(said, PATH)))


def test_the_greeting_as_a_transcript() -> None:
    assert greet(None, None) == ("", "")
    assert greet(NEW, NEW) == ("", "")
    assert greet(BOTH, OLD) == ("", "")
    assert greet(NEW, None) == (MISSING, "")
    assert greet(None, NEW) == ("", NOT_PROVED), "what answers without a proof is no node of ours"


def test_what_was_said_on_another_connection_proves_nothing() -> None:
    one, other, client = ServerGreeting(NEW), ServerGreeting(NEW), ClientGreeting(NEW, PATH)
    said = dict(client.opening(nonce_in_settings(settings(*one.settings)[9:])))
    assert one.refused(said, PATH) == ""
    assert one.refused(said, "/nsqha.v1.Replication/Live") != ""
    assert other.refused(said, PATH) != ""
    assert client.refused(dict(other.answer(said, PATH))) == NOT_PROVED
    assert client.refused(said) == NOT_PROVED, "its own words sent back"


def test_a_nonce_travels_as_settings_of_our_own() -> None:
    there = ServerGreeting(NEW)
    payload = settings(*there.settings)[9:]
    assert [name for name, _ in SETTING.iter_unpack(payload)] == list(range(0xF1A0, 0xF1A8))
    assert len(nonce_in_settings(payload)) == 32
    assert nonce_in_settings(payload[:-6]) == b"", "a part of it is none"
    assert nonce_in_settings(b"") == b""


@pytest.mark.parametrize(
    ("introduction", "why"),
    [
        (greeting.INTRODUCTION, ""),
        ("level=1-7 build=0.9.0", ""),
        ("level=1-7 build=0.9.0 and more that a later build says", ""),
        ("", ""),
        ("level=2-7 build=0.9.0", "nsqha 0.9.0 with levels 2 to 7 does not work .*: upgrade this one"),
        ("level=0-0 build=0.0.9", "nsqha 0.0.9 with levels 0 to 0 does not work .*: upgrade that one"),
        ("level=x", "of an unknown version"),
        ("level=" + "9" * 300, "of an unknown version"),
    ],
)
def test_builds_work_together_if_their_levels_meet(introduction: str, why: str) -> None:
    assert re.search(why, unlike(introduction)) if why else unlike(introduction) == ""


def test_a_build_of_another_level_is_refused_before_any_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(_calls: str, streams: str, accepted: Acceptor) -> None:
        monkeypatch.setattr(greeting, "INTRODUCTION", "level=5-6 build=2.0.0")
        assert "nsqha 2.0.0 with levels 5 to 6 does not work together" in await refused_stream(streams, None)
        assert not accepted.accepted

    node(None, scenario)
