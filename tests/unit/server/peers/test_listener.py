"""The peer port: connections are accepted within bounds, with the right certificate only, and leave nothing behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from nsqha.errors import ConfigError
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers import calls as peer_calls
from nsqha.server.peers import client_stream
from nsqha.server.peers import listener as peer_listener
from nsqha.server.peers.api import PeerIdentity
from nsqha.server.peers.calls import GrpcPeerServer
from nsqha.server.peers.http2 import PREFACE, frame, settings
from nsqha.server.peers.listener import PeerListener
from nsqha.server.runtime import listen, tls
from nsqha.server.runtime.tls import HTTP2_ALPN
from tests.certificates import Certificates
from tests.unit.server.peer_rig import SERVICES, Acceptor, GrpcWorld, Recorder, World, push, reply

LOOPS = (uvloop.new_event_loop, asyncio.new_event_loop)
OPENING = PREFACE + settings()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> tls.ClusterTls:
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    made.issue("node", "IP:127.0.0.1", "DNS:node", "URI:nsqha:node/00000000000000ab")
    return tls.load_cluster_tls(made.cert("node"), made.key("node"), made.cert("ca"))


def hello(*protocols: str) -> bytes:
    """What a TLS client says first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(protocols)
    said = ssl.MemoryBIO()
    end = context.wrap_bio(ssl.MemoryBIO(), said, server_hostname="node.example")
    with pytest.raises(ssl.SSLWantReadError):
        end.do_handshake()
    return said.read()


# ---- both ports of a node


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_streams_and_calls_know_who_came(loop: Any, secure: bool, node: tls.ClusterTls) -> None:
    seen: list[PeerIdentity] = []

    async def scenario(world: World) -> None:
        acceptor = Acceptor(lambda stream: Recorder(lambda m: stream.send(reply(m.hello.registration))))
        world.server.on_stream("Push", acceptor)

        async def status(peer: PeerIdentity, request: Any) -> Any:
            seen.append(peer)
            return pb.StatusReply(node_uid=7)

        world.server.on_call("Status", status)
        handler = Recorder()
        stream = world.peers.stream(world.peer_address, "Push", handler)
        stream.send(push(4))  # a greeting
        stream.send(push(5, size=300_000))
        assert (await world.peers.call(world.address, "Status", pb.StatusRequest(), timeout=5)).node_uid == 7
        await handler.until(lambda: len(handler.messages) == 2)
        assert handler.numbers == [4, 5]
        assert acceptor.accepted[-1].stream is not None
        seen.append(acceptor.accepted[-1].stream.peer)
        stream.close()
        await handler.end()

    files: Any = SimpleNamespace(tls=node, generation=1) if secure else None
    world = GrpcWorld(files=files, caller_tls=node if secure else None)
    world.runner = lambda: asyncio.Runner(loop_factory=loop)  # type: ignore[method-assign]
    world.run(scenario)
    for peer in seen:
        host, _, port = peer.address.partition(":")
        assert (host, port.isdigit()) == ("127.0.0.1", True)
        assert (peer.node_uid, peer.verified) == ((0xAB, True) if secure else (0, False))
    assert len({peer.address for peer in seen}) == 2, "each came over its own connection"


# ---- the port alone


Scenario = Callable[[PeerListener, str, GrpcPeerServer], Awaitable[None]]


def kept(address: tuple[str, int]) -> list[str]:
    """The descriptors of this process that are sockets at `address`: the port and what it accepted. Of others it is not
    asked: gRPC's threads, which earlier tests left, open and close some whenever they like."""
    gc.collect()
    port = f":{address[1]:04X}"
    inodes = {row.split()[9] for row in Path("/proc/net/tcp").read_text().splitlines() if row.split()[1].endswith(port)}
    return [entry.name for entry in os.scandir("/proc/self/fd") if link(entry)[8:-1] in inodes]


def link(entry: os.DirEntry[str]) -> str:
    """What a descriptor is, as `socket:[inode]`."""
    try:
        return os.readlink(entry.path)
    except FileNotFoundError:  # closed since
        return ""


@pytest.fixture(params=LOOPS, ids=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    def start(scenario: Scenario, files: Any = None) -> None:
        async def main() -> None:
            complaints: list[Any] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
            streams = GrpcPeerServer(SERVICES, tls=files.tls if files else None)
            sock = listen.listen("127.0.0.1:0", flag="peer-address")
            address = sock.getsockname()
            port = PeerListener(streams, sock, files)
            port.start()
            assert kept(address)
            async with asyncio.timeout(20):
                await scenario(port, listen.bound_address(sock), streams)
            await port.close()
            streams.close()
            for _ in range(100):
                await asyncio.sleep(0.01)
                if not kept(address) and len(asyncio.all_tasks()) == 1:
                    break
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert not kept(address)
            assert not complaints

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main())

    yield start


def place(address: str) -> tuple[str, int]:
    return listen.split_host_port(address)


async def said_to(reader: asyncio.StreamReader) -> bytes:
    """Everything until the connection is closed, or reset because of what was not read."""
    said = b""
    try:
        while more := await reader.read(65536):
            said += more
    except ConnectionError:
        pass
    return said


def test_it_says_its_settings_first_however_the_preface_comes(run: Callable[..., None]) -> None:
    async def scenario(port: PeerListener, address: str, streams: GrpcPeerServer) -> None:
        reader, writer = await asyncio.open_connection(*place(address))
        head = await reader.readexactly(9)
        assert head[3] == 4, "SETTINGS"
        for at in range(0, len(OPENING), 7):
            writer.write(OPENING[at : at + 7])
            await asyncio.sleep(0.003)
        while frame(4, 1, 0) not in await reader.read(65536):  # ours are acknowledged
            pass
        writer.close()

    run(scenario)


def test_without_spare_descriptors_no_connection_is_kept(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listen, "is_spare", lambda descriptor: True)

    async def scenario(port: PeerListener, address: str, streams: GrpcPeerServer) -> None:
        for _ in range(3):
            reader, writer = await asyncio.open_connection(*place(address))
            assert await said_to(reader) == b""
            writer.close()

    run(scenario)
    assert caplog.text.count("no file descriptors to spare") == 1, "one line for all of them"


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/1.1\r\n\r\n" + bytes(100), bytes(100)])
def test_what_is_not_http2_is_told_so_and_closed(run: Callable[..., None], said: bytes) -> None:
    async def scenario(port: PeerListener, address: str, streams: GrpcPeerServer) -> None:
        reader, writer = await asyncio.open_connection(*place(address))
        writer.write(said)
        assert b"not HTTP/2" in await said_to(reader)
        writer.close()

    run(scenario)


def test_a_connection_that_names_no_method_makes_room(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_calls, "UNNAMED_MAX", 3)

    async def scenario(port: PeerListener, address: str, streams: GrpcPeerServer) -> None:
        silent = [await asyncio.open_connection(*place(address)) for _ in range(5)]
        for reader, _ in silent[:2]:
            assert b"too many connections that name no method" in await said_to(reader)
        assert len(streams._unnamed) == 3
        for _, writer in silent:
            writer.close()

    run(scenario)


def test_callers_that_come_at_once_are_all_served(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody comes again at once after the loop stood for a while. All are in this process: on a busy machine it may
    need longer for them than one caller waits."""
    monkeypatch.setattr(client_stream, "CONNECT_SECONDS", 60.0)

    async def scenario(port: PeerListener, address: str, streams: GrpcPeerServer) -> None:
        acceptor = Acceptor()
        streams.on_stream("Push", acceptor)
        peers = peer_calls.GrpcPeers(SERVICES)
        handlers = [Recorder() for _ in range(300)]
        for handler in handlers:
            peers.stream(address, "Push", handler).send(push(1))
        while len(acceptor.accepted) < len(handlers):
            await asyncio.sleep(0.01)
        assert not [handler for handler in handlers if handler.closed]
        await peers.close()

    run(scenario)


def test_without_descriptors_it_pauses_and_goes_on(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_listener, "ACCEPT_PAUSE_SECONDS", 0.05)

    async def scenario(port: PeerListener, address: str, streams: GrpcPeerServer) -> None:
        failed = 0

        class Failing:
            def __getattr__(self, name: str) -> Any:
                return getattr(sock, name)

            def accept(self) -> Any:
                nonlocal failed
                failed += 1
                if failed < 3:
                    raise OSError(errno.EMFILE, "Too many open files")
                return sock.accept()

        sock = port._socket
        port._loop.remove_reader(sock)
        monkeypatch.setattr(port, "_socket", Failing())
        port.start()
        reader, writer = await asyncio.open_connection(*place(address))
        await reader.readexactly(9)
        writer.close()
        assert failed >= 3

    run(scenario)


def test_who_comes_before_it_starts_waits(run: Callable[..., None]) -> None:
    async def scenario(port: PeerListener, address: str, streams: GrpcPeerServer) -> None:
        sock = listen.listen("127.0.0.1:0", flag="peer-address")
        later = PeerListener(streams, sock, None)
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        later.start()
        await reader.readexactly(9)
        writer.close()
        await asyncio.sleep(0.01)
        await later.close()

    run(scenario)


def test_closing_ends_handshakes_and_takes_no_more(run: Callable[..., None], node: tls.ClusterTls) -> None:
    async def scenario(port: PeerListener, address: str, streams: GrpcPeerServer) -> None:
        reader, writer = await asyncio.open_connection(*place(address))
        while not port._connecting:
            await asyncio.sleep(0.002)
        await port.close()
        assert await said_to(reader) == b""
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*place(address))

    run(scenario, SimpleNamespace(tls=node, generation=1))


def test_a_handshake_that_fails_or_stalls_leaves_nothing(
    run: Callable[..., None],
    node: tls.ClusterTls,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(peer_listener, "HANDSHAKE_SECONDS", 0.2)

    async def scenario(port: PeerListener, address: str, streams: GrpcPeerServer) -> None:
        for _ in range(2):
            reader, writer = await asyncio.open_connection(*place(address))
            writer.write(hello(HTTP2_ALPN))
            await said_to(reader)  # its answer, to which nothing is said
            writer.close()
        stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        stranger.set_alpn_protocols([HTTP2_ALPN])
        with pytest.raises((ssl.SSLError, ConnectionError)):
            reader, writer = await asyncio.open_connection(*place(address), ssl=stranger)
            writer.write(OPENING)
            if not await reader.read():
                raise ConnectionResetError
        while port._connecting or streams._unnamed:
            await asyncio.sleep(0.01)
        assert not streams._streams
        assert caplog.text.count("failed") == 1, "it is logged, and not each time"

    run(scenario, SimpleNamespace(tls=node, generation=1))


def test_handshakes_under_way_are_bounded(
    run: Callable[..., None], node: tls.ClusterTls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_calls, "UNNAMED_MAX", 3)

    async def scenario(port: PeerListener, address: str, streams: GrpcPeerServer) -> None:
        callers = []
        for _ in range(22):
            caller = socket.create_connection(place(address))
            caller.sendall(hello(HTTP2_ALPN))
            callers.append(caller)
        await asyncio.sleep(0.05)
        while len(port._connecting) > 3:
            await asyncio.sleep(0.01)
        assert len(port._connecting) == len(streams._unnamed) == 3
        for caller in callers:
            caller.close()

    run(scenario, SimpleNamespace(tls=node, generation=1))


def test_a_caller_that_does_not_agree_to_http2_is_refused(run: Callable[..., None], node: tls.ClusterTls) -> None:
    async def scenario(port: PeerListener, address: str, streams: GrpcPeerServer) -> None:
        acceptor = Acceptor()
        streams.on_stream("Push", acceptor)
        context = tls.cluster_client_context(node)
        context.set_alpn_protocols(["http/1.1"])
        reader, writer = await asyncio.open_connection(*place(address), ssl=context)
        writer.write(OPENING)
        assert b"ALPN" in await said_to(reader)
        writer.close()
        assert not acceptor.accepted

    run(scenario, SimpleNamespace(tls=node, generation=1))


# ---- where it is


@pytest.mark.parametrize(
    ("address", "following"),
    [
        ("127.0.0.1:4152", "127.0.0.1:4153"),
        ("0.0.0.0:4152", "0.0.0.0:4153"),
        (":4152", ":4153"),
        ("[::1]:7", "[::1]:8"),
        ("node.example:0", "node.example:0"),
    ],
)
def test_it_is_next_to_the_port_of_calls(address: str, following: str) -> None:
    assert listen.next_port(address, flag="peer-address") == following


@pytest.mark.parametrize("address", ["unix:/run/nsqha", "127.0.0.1:65535", "somewhere"])
def test_where_there_is_no_next_port_one_is_asked_for(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^--peer-address is needed, as host:port: .*" + address):
        listen.next_port(address, flag="peer-address")
