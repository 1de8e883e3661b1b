"""The port of administration, where nodes call each other: who may, and what is served at the peer port instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from nsqha.admin.service import AdminServer
from nsqha.election.session import View
from nsqha.errors import Unavailable
from nsqha.pb.v1 import admin_pb2, admin_pb2_grpc
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers import calls as peer_grpc
from nsqha.server.peers.api import PeerIdentity
from nsqha.server.peers.listener import PeerListener
from nsqha.server.runtime import listen, tls
from tests.certificates import Certificates
from tests.unit.server.peer_rig import SERVICES, Acceptor, Recorder, push

PUSH = "/nsqha.v1.Replication/Push"
BROKER: Any = SimpleNamespace(cluster=None, log_source=None, endpoints=SimpleNamespace())


NO_NODE = [(), ("IP:127.0.0.1",), ("email:a@b.c",), ("URI:nsqha:node/",), ("URI:nsqha:administrators",)]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def made(certificates: Certificates, name: str, *names: str) -> tls.ClusterTls:
    certificates.issue(name, *names)
    return tls.load_cluster_tls(certificates.cert(name), certificates.key(name), certificates.cert("ca"))


@pytest.fixture(scope="module")
def node(certificates: Certificates) -> tls.ClusterTls:
    return made(certificates, "node1", "IP:127.0.0.1", "URI:nsqha:node/00000000000000ab")


def files(found: tls.ClusterTls | None) -> Any:
    """As `CertificateFiles` that never change."""
    return None if found is None else SimpleNamespace(tls=found, generation=1)


def admin_port(node: tls.ClusterTls | None, scenario: Callable[[str], Any], wanted: str = "127.0.0.1:0") -> None:
    """`scenario` with the address of an administration server that also serves Status."""

    async def main() -> None:
        async def status(peer: PeerIdentity, request: Any) -> Any:
            return pb.StatusReply(node_uid=7)

        peers = peer_grpc.GrpcPeerServer(SERVICES, tls=node)
        peers.on_call("Status", status)
        peers.on_stream("Push", Acceptor())
        server = AdminServer(BROKER, wanted, peers, tls=files(node))
        await server.start()
        try:
            await scenario(server.address)
        finally:
            await server.close()

    asyncio.run(main())


async def health(address: str, service: str, credentials: grpc.ChannelCredentials | None) -> Any:
    channel = aio.secure_channel(address, credentials) if credentials else aio.insecure_channel(address)
    async with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status


def test_calls_of_nodes_are_served_on_the_port_of_the_administration() -> None:
    async def scenario(address: str) -> None:
        peers = peer_grpc.GrpcPeers(SERVICES)
        assert (await peers.call(address, "Status", pb.StatusRequest(), timeout=5)).node_uid == 7
        await peers.close()
        for service in ("nsqha.v1.Admin", "nsqha.v1.Replication"):
            assert await health(address, service, None) == health_pb2.HealthCheckResponse.SERVING

    admin_port(None, scenario)


def test_who_opens_a_stream_at_the_port_of_calls_is_told_where_to() -> None:
    async def scenario(address: str) -> None:
        async with aio.insecure_channel(address) as channel:
            call = channel.stream_stream(PUSH)()
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "/nsqha.v1.Replication/Push is served at the port of --peer-address" in await call.details()
        peers = peer_grpc.GrpcPeers(SERVICES)
        handler = Recorder()
        peers.stream(address, "Push", handler).send(push(1))
        assert "--peer-address" in await handler.end()
        await peers.close()

    admin_port(None, scenario)


def test_reflection_shows_streams_at_the_port_of_calls_too() -> None:
    async def scenario(address: str) -> None:
        async with aio.insecure_channel(address) as channel:
            ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol="nsqha.v1.Replication")
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
            names = {
                method.name
                async for answer in call
                for data in answer.file_descriptor_response.file_descriptor_proto
                for service in descriptor_pb2.FileDescriptorProto.FromString(data).service
                for method in service.method
            }
            assert {"Push", "Status"} <= names

    admin_port(None, scenario)


def test_connections_that_speak_no_http2_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_grpc, "HANDSHAKE_SECONDS", 1)
    monkeypatch.setattr(peer_grpc.listen, "connections_max", lambda: 2)

    async def scenario(address: str) -> None:
        host, port = address.split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
        async with asyncio.timeout(20):
            said = [await reader.read() for reader, _ in silent]
        assert sum(not each for each in said) == 2, "two were not let in, two have heard settings and time was up"
        for _, writer in silent:
            writer.close()
        assert await health(address, "nsqha.v1.Admin", None) == health_pb2.HealthCheckResponse.SERVING

    admin_port(None, scenario)


def test_without_a_host_it_listens_at_all_interfaces() -> None:
    async def scenario(address: str) -> None:
        for host in ("127.0.0.1", "[::1]"):
            assert await health(f"{host}{address}", "nsqha.v1.Admin", None) == health_pb2.HealthCheckResponse.SERVING

    admin_port(None, scenario, wanted=":0")


def test_with_cluster_tls_the_whole_port_wants_a_certificate(certificates: Certificates, node: tls.ClusterTls) -> None:
    administrator = made(certificates, "administrator", "URI:nsqha:administrator")

    async def scenario(address: str) -> None:
        credentials = peer_grpc.channel_credentials(administrator)
        assert await health(address, "nsqha.v1.Admin", credentials) == health_pb2.HealthCheckResponse.SERVING
        for stranger in (None, grpc.ssl_channel_credentials(node.ca)):
            with pytest.raises(aio.AioRpcError):
                await health(address, "nsqha.v1.Admin", stranger)
        peers = peer_grpc.GrpcPeers(SERVICES, tls=administrator)
        with pytest.raises(Unavailable, match="names none"):
            await peers.call(address, "Status", pb.StatusRequest(), timeout=5)
        await peers.close()

    admin_port(node, scenario)


def test_only_a_certificate_that_says_so_is_an_administrators(certificates: Certificates, node: tls.ClusterTls) -> None:
    """One of a broker that has only its address yet, or of anything else that this CA signed, is not."""
    view = View()
    cluster = SimpleNamespace(leaders=SimpleNamespace(members=SimpleNamespace(view=lambda: view)))
    broker = SimpleNamespace(cluster=cluster, topics={}, log_source=None, endpoints=SimpleNamespace())

    async def asked(address: str, whose: tls.ClusterTls) -> grpc.StatusCode:
        async with aio.secure_channel(address, peer_grpc.channel_credentials(whose)) as channel:
            call = admin_pb2_grpc.AdminStub(channel).DescribeTopic(admin_pb2.DescribeTopicRequest(topic="t"), timeout=5)
            return await call.code()  # type: ignore[no-any-return]

    async def main() -> None:
        server = AdminServer(cast(Any, broker), "127.0.0.1:0", tls=files(node))
        await server.start()
        try:
            for n, names in enumerate(NO_NODE):
                code = await asked(server.address, made(certificates, f"nobody{n}", *names))
                assert code is grpc.StatusCode.PERMISSION_DENIED, names
            administrator = made(certificates, "boss", "URI:nsqha:administrator")
            assert await asked(server.address, administrator) is not grpc.StatusCode.PERMISSION_DENIED
        finally:
            await server.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "method", ["nsqha.v1.Admin/ListTopics", "nsqha.v1.Admin/PeekMessages", "grpc.health.v1.Health/Check"]
)
def test_a_request_that_can_not_be_read_is_told_and_nothing_is_logged(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(address: str) -> None:
        async with aio.insecure_channel(address) as channel:
            call = channel.unary_unary(f"/{method}")(b"\xff\xff", timeout=5)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await call.details() == f"2 bytes that are no request of /{method}"

    admin_port(None, scenario)
    assert not [record for record in caplog.records if record.name.startswith("grpc")]


def test_a_server_that_closes_tells_its_streams() -> None:
    async def main() -> None:
        acceptor = Acceptor()
        served = peer_grpc.GrpcPeerServer(SERVICES)
        served.on_stream("Push", acceptor)
        server = AdminServer(BROKER, "127.0.0.1:0", served)
        await server.start()
        sock = listen.listen("127.0.0.1:0", flag="peer-address")
        listener = PeerListener(served, sock, None)
        listener.start()
        peers = peer_grpc.GrpcPeers(SERVICES)
        handler = Recorder()
        peers.stream(listen.bound_address(sock), "Push", handler).send(push(1))
        accepted = await acceptor.next()
        await accepted.until(lambda: accepted.messages)
        await listener.close()
        await server.close()
        assert "stopping" in await handler.end()
        await accepted.end()
        await peers.close()

    asyncio.run(main())
