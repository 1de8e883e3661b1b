"""What only gRPC has: processes that die or freeze, sizes, bytes that are no messages, certificates."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio

from nsqha.errors import ConfigError, OutcomeUnknown, Unavailable
from nsqha.options import Options, load_nsqd
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers import api as peers
from nsqha.server.peers import calls as peer_grpc
from nsqha.server.peers.api import PeerIdentity, PeerStream
from nsqha.server.runtime import tls
from tests import freezing
from tests.unit.server.peer_rig import Acceptor, GrpcWorld, Recorder, World, push, reply

ROOT = Path(__file__).resolve().parents[4]
PUSH = "/nsqha.v1.Replication/Push"
STATUS = "/nsqha.v1.Replication/Status"


# ---- another process


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tests.unit.server.peer_process"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, f"127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def test_a_killed_process_is_noticed(process: tuple[subprocess.Popen[str], str]) -> None:
    async def scenario(world: World) -> None:
        victim, address = process
        handler = Recorder()
        world.peers.stream(address, "Push", handler).send(push(1))
        await handler.until(lambda: handler.messages)
        # Nothing but the closed connection can tell it within this time: pings come after 5 s.
        async with asyncio.timeout(4):
            victim.kill()
            await handler.end()
        again = Recorder()
        async with asyncio.timeout(4):
            world.peers.stream(address, "Push", again)
            await again.end()
        with pytest.raises((Unavailable, OutcomeUnknown)):
            await world.peers.call(address, "Status", pb.StatusRequest(), timeout=4)
        assert len(handler.closed) == len(again.closed) == 1

    GrpcWorld().run(scenario)


def test_a_frozen_process_holds_messages_back(process: tuple[subprocess.Popen[str], str]) -> None:
    count = 60

    async def scenario(world: World) -> None:
        victim, address = process
        handler = Recorder()
        stream = world.peers.stream(address, "Push", handler)
        stream.send(push(0))
        await handler.until(lambda: handler.messages)
        freezing.stop(victim.pid)
        for n in range(1, count):
            stream.send(push(n, size=1 << 20))
        last = 0
        while stream.pending != last:  # until the network takes no more
            last = stream.pending
            await asyncio.sleep(0.3)
        assert last > count // 2, "the sender's memory is the network's, not the owner's to bound"
        victim.send_signal(signal.SIGCONT)
        await handler.until(lambda: len(handler.messages) == count)
        assert handler.numbers == list(range(count))
        assert stream.pending == 0
        # Closing does not wait for a peer that reads nothing.
        freezing.stop(victim.pid)
        for n in range(count):
            stream.send(push(n, size=1 << 20))
        stream.close()
        async with asyncio.timeout(2):
            await handler.end()

    GrpcWorld().run(scenario)


def test_an_accepted_stream_can_be_closed_while_its_peer_reads_nothing() -> None:
    """The caller's task that reads is stopped: what the called side writes piles up before flow control."""

    async def scenario(world: World) -> None:
        assert isinstance(world, GrpcWorld)
        acceptor = Acceptor()
        world.server.on_stream("Push", acceptor)
        channel = aio.insecure_channel(world.peer_address)
        call = channel.stream_stream(PUSH)()
        await call.write(push(1).SerializeToString())
        accepted = await acceptor.next()
        assert accepted.stream is not None
        big = pb.PushReply(refused=[pb.Refused(why="x" * (1 << 20))])
        for _ in range(60):
            accepted.stream.send(big)
        await asyncio.sleep(0.1)
        assert accepted.stream.pending > 0
        accepted.stream.close("enough")
        async with asyncio.timeout(2):
            assert await accepted.end() == "enough"
        call.cancel()
        await channel.close()

    GrpcWorld().run(scenario)


# ---- sizes and bytes


def test_a_batch_that_the_flags_of_this_node_would_not_take_passes_in_one_message() -> None:
    """Flags differ while they are changed from node to node, and a message may be larger than --max-body-size: one
    batch that did not fit would end the stream of every partition of the pair, again and again."""
    size = 120 << 20

    async def scenario(world: World) -> None:
        acceptor = Acceptor(lambda stream: Recorder(lambda m: stream.send(reply(sum(len(a.data) for a in m.appends)))))
        world.server.on_stream("Push", acceptor)
        handler = Recorder()
        stream = world.peers.stream(world.peer_address, "Push", handler)
        stream.send(push(1))  # a greeting
        stream.send(push(2, size))
        await handler.until(lambda: len(handler.messages) == 2)
        assert handler.numbers == [0, size]

        async def fetch(peer: PeerIdentity, request: Any) -> Any:
            return pb.FetchReply(data=bytes(size))

        world.server.on_call("Fetch", fetch)
        answer = await world.peers.call(world.address, "Fetch", pb.FetchRequest(), timeout=20)
        assert len(answer.data) == size

    GrpcWorld().run(scenario)


def test_a_message_over_the_limit_ends_the_stream_here(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1 << 20
    monkeypatch.setattr(peers, "MESSAGE_BYTES_MAX", limit)

    async def scenario(world: World) -> None:
        acceptor = Acceptor()
        world.server.on_stream("Push", acceptor)
        handler = Recorder()
        stream = world.peers.stream(world.peer_address, "Push", handler)
        stream.send(push(1, size=limit))
        assert "over the limit" in await handler.end()
        with pytest.raises(ValueError, match="over the limit"):
            request = pb.StatusRequest(keys=[pb.PartitionKey()] * limit)
            await world.peers.call(world.address, "Status", request, timeout=5)

        async def fetch(peer: PeerIdentity, request: Any) -> Any:
            return pb.FetchReply(data=bytes(limit))

        world.server.on_call("Fetch", fetch)
        with pytest.raises(OutcomeUnknown, match="over the limit"):
            await world.peers.call(world.address, "Fetch", pb.FetchRequest(), timeout=20)

    GrpcWorld().run(scenario)


def test_bytes_that_are_no_message_end_only_their_stream() -> None:
    async def scenario(world: World) -> None:
        async def status(peer: PeerIdentity, request: Any) -> Any:
            return pb.StatusReply(node_uid=1)

        acceptor = Acceptor()
        world.server.on_stream("Push", acceptor)
        world.server.on_call("Status", status)
        assert isinstance(world, GrpcWorld)
        async with aio.insecure_channel(world.peer_address) as channel:
            call = channel.stream_stream(PUSH)()
            await call.write(b"\xff\xff\xff")
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "PushMessage" in await call.details()
        async with aio.insecure_channel(world.address) as channel:
            with pytest.raises(aio.AioRpcError) as caught:
                await channel.unary_unary(STATUS)(b"\xff\xff\xff")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        accepted = await acceptor.next()
        await accepted.end()
        assert accepted.messages == []
        assert (await world.peers.call(world.address, "Status", pb.StatusRequest(), timeout=5)).node_uid == 1

    GrpcWorld().run(scenario)


def test_connections_to_addresses_that_nobody_asks_for_any_more_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes come back at other ones, as in containers: each would be kept for as long as this process lives."""
    monkeypatch.setattr(peer_grpc, "UNUSED_SECONDS", 0.0)

    async def scenario(world: World) -> None:
        answered = asyncio.Event()

        async def status(peer: PeerIdentity, request: Any) -> Any:
            await answered.wait()
            return pb.StatusReply(node_uid=1)

        world.server.on_call("Status", status)
        peers: Any = world.peers
        waiting = asyncio.create_task(peers.call(world.address, "Status", pb.StatusRequest(), timeout=20))
        for port in range(1, 5):
            with pytest.raises(Unavailable):
                await peers.call(f"127.0.0.1:{port}", "Status", pb.StatusRequest(), timeout=5)
        assert set(peers._channels) == {world.address, "127.0.0.1:4"}, "what is used stays"
        answered.set()
        assert (await waiting).node_uid == 1
        with pytest.raises(Unavailable):
            await peers.call("127.0.0.1:5", "Status", pb.StatusRequest(), timeout=5)
        assert set(peers._channels) == {"127.0.0.1:5"}
        assert (await peers.call(world.address, "Status", pb.StatusRequest(), timeout=5)).node_uid == 1

    GrpcWorld().run(scenario)


def test_an_older_node_without_the_method_is_unavailable() -> None:
    async def scenario(world: World) -> None:
        server = aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with pytest.raises(Unavailable, match="does not serve"):
            await world.peers.call(f"127.0.0.1:{port}", "Status", pb.StatusRequest(), timeout=5)
        await server.stop(0)

    GrpcWorld().run(scenario)


def test_a_status_of_grpc_itself_is_no_answer() -> None:
    """UNAVAILABLE without our trailer: something between the nodes said so, after the request was sent."""

    async def scenario(world: World) -> None:
        async def answer(data: bytes, context: Any) -> bytes:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "a proxy")
            return b""

        server = aio.server()
        methods = {"Status": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("nsqha.v1.Replication", methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with pytest.raises(OutcomeUnknown, match="a proxy"):
            await world.peers.call(f"127.0.0.1:{port}", "Status", pb.StatusRequest(), timeout=5)
        await server.stop(0)

    GrpcWorld().run(scenario)


def test_a_cancelled_call_is_cancelled() -> None:
    async def scenario(world: World) -> None:
        asked = asyncio.Event()

        async def status(peer: PeerIdentity, request: Any) -> Any:
            asked.set()
            await asyncio.sleep(3600)

        world.server.on_call("Status", status)
        call = asyncio.ensure_future(world.peers.call(world.address, "Status", pb.StatusRequest(), timeout=20))
        await asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    GrpcWorld().run(scenario)


# ---- certificates

Made = Callable[..., tls.ClusterTls]


def pair(folder: Path, name: str, *names: str, ca: str = "ca") -> Options:
    """Options with the certificate `name`, signed by `ca`, which are made if they are not there."""

    def openssl(made: str, *options: str) -> None:
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += ["-keyout", f"{made}.key", "-out", f"{made}.pem", "-days", "2", "-subj", f"/CN={made}"]
        subprocess.run([*command, *options], cwd=folder, check=True, capture_output=True)

    if not (folder / f"{ca}.pem").exists():
        openssl(ca)
    alternatives = ["-addext", f"subjectAltName={','.join(names)}"] if names else []
    openssl(name, "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-addext", "basicConstraints=CA:FALSE", *alternatives)
    return Options(
        cluster_tls_cert=f"{folder}/{name}.pem",
        cluster_tls_key=f"{folder}/{name}.key",
        cluster_tls_ca=f"{folder}/{ca}.pem",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def node(folder: Path) -> tls.ClusterTls:
    made = tls.cluster_tls(pair(folder, "node1", "IP:127.0.0.1", "URI:nsqha:node/00000000000000ab"))
    assert made is not None
    return made


def files(found: tls.ClusterTls | None) -> Any:
    """As `CertificateFiles` that never change."""
    return None if found is None else SimpleNamespace(tls=found, generation=1)


def outcome(server: tls.ClusterTls, caller: tls.ClusterTls | None) -> tuple[PeerIdentity | None, str, str]:
    """Whom the server saw, how a stream ended (empty: it works), how a call ended."""
    seen: list[PeerIdentity] = []
    ended: list[str] = []

    async def scenario(world: World) -> None:
        def accept(stream: PeerStream) -> Recorder:
            seen.append(stream.peer)
            return Recorder(lambda _: stream.send(reply(1)))

        async def status(peer: PeerIdentity, request: Any) -> Any:
            seen.append(peer)
            return pb.StatusReply()

        world.server.on_stream("Push", accept)
        world.server.on_call("Status", status)
        handler = Recorder()
        world.peers.stream(world.peer_address, "Push", handler).send(push(1))
        await handler.until(lambda: handler.messages or handler.closed)
        ended.append(handler.closed[0] if handler.closed else "")
        try:
            await world.peers.call(world.address, "Status", pb.StatusRequest(), timeout=5)
            ended.append("")
        except Unavailable as error:
            ended.append(str(error))

    GrpcWorld(files=files(server), caller_tls=caller).run(scenario)
    assert len({peer.node_uid for peer in seen}) <= 1
    return seen[0] if seen else None, ended[0], ended[1]


def made(folder: Path, name: str, *names: str, ca: str = "ca") -> tls.ClusterTls:
    found = tls.cluster_tls(pair(folder, name, *names, ca=ca))
    assert found is not None
    return found


def test_a_node_is_who_its_certificate_says(folder: Path, node: tls.ClusterTls) -> None:
    caller = made(folder, "node2", "DNS:n2", "URI:nsqha:node/0123456789abcdef")
    seen, stream, call = outcome(node, caller)
    assert (stream, call) == ("", "")
    assert seen is not None
    assert seen.verified
    assert seen.node_uid == 0x0123456789ABCDEF
    assert seen.names == ("n2",)
    assert not seen.may_be(0xAB, "n2"), "node 2 can not speak for node 1"
    assert "key" not in repr(caller)


def test_a_certificate_without_a_uid_names_its_node(folder: Path, node: tls.ClusterTls) -> None:
    seen, stream, _ = outcome(node, made(folder, "node3", "DNS:n3.example", "URI:nsqha:node/tooshort"))
    assert stream == ""
    assert seen is not None
    assert (seen.node_uid, seen.name, seen.may_be(5, "n3.example")) == (0, "n3.example", True)


NOBODY = [(), ("IP:127.0.0.1",), ("email:a@b.c",), ("URI:nsqha:node/",), ("URI:nsqha:administrators",)]


@pytest.mark.parametrize("names", [*NOBODY, ("URI:nsqha:administrator",)])
def test_a_certificate_that_names_no_node_can_do_nothing(
    folder: Path, node: tls.ClusterTls, names: tuple[str, ...]
) -> None:
    seen, stream, call = outcome(node, made(folder, "admin", *names))
    assert seen is None
    assert stream
    assert "names none" in call


def test_strangers_can_do_nothing(folder: Path, node: tls.ClusterTls) -> None:
    claims = ("IP:127.0.0.1", "URI:nsqha:node/00000000000000ab")
    other = made(folder, "evil", *claims, ca="other")
    trusting = tls.ClusterTls(other.certificate, other.key, node.ca)  # it does believe the server
    for caller in (None, other, trusting):
        seen, stream, call = outcome(node, caller)
        assert seen is None
        assert stream
        assert call
    # No certificate at all.
    channel = grpc.ssl_channel_credentials(node.ca)

    async def scenario(world: World) -> None:
        acceptor = Acceptor()
        world.server.on_stream("Push", acceptor)
        async with aio.secure_channel(world.peer_address, channel) as opened:
            call = opened.stream_stream(PUSH)()
            with pytest.raises(aio.AioRpcError):
                await call.write(push(1).SerializeToString())
                await call.read()
        assert not acceptor.accepted

    GrpcWorld(files=files(node)).run(scenario)


def test_a_server_must_own_the_address_that_is_dialled(folder: Path, node: tls.ClusterTls) -> None:
    elsewhere = made(folder, "elsewhere", "DNS:elsewhere", "URI:nsqha:node/00000000000000cd")
    seen, stream, call = outcome(elsewhere, node)
    assert seen is None
    assert stream
    assert call


def test_cluster_flags_that_do_not_work_say_why(folder: Path, node: tls.ClusterTls) -> None:
    good = pair(folder, "good", "URI:nsqha:node/00000000000000ab")
    for change, word in (
        ({"cluster_tls_cert": "/nowhere"}, "--cluster-tls-cert=/nowhere"),
        ({"cluster_tls_key": f"{folder}/ca.key"}, "--cluster-tls-key"),
        ({"cluster_tls_ca": "/nowhere"}, "--cluster-tls-ca=/nowhere"),
        ({"cluster_tls_ca": __file__}, "--cluster-tls-ca"),
        ({"cluster_tls_ca": f"{folder}/good.pem"}, "does not work with --cluster-tls-ca"),
    ):
        broken = Options(
            **{
                name: change.get(name, getattr(good, name))
                for name in ("cluster_tls_cert", "cluster_tls_key", "cluster_tls_ca")
            }
        )
        with pytest.raises(ConfigError) as caught:
            tls.cluster_tls(broken)
        assert word in str(caught.value)
    assert tls.cluster_tls(Options()) is None
    with pytest.raises(ConfigError, match="go together"):
        load_nsqd(["--cluster-tls-cert=x"], {})
