"""The port that streams between nodes share with gRPC's server: who is sent where, and nothing is lost."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from grpc import aio

from nsqha.errors import ConfigError
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers import listener as front_door
from nsqha.server.peers.api import PeerIdentity
from nsqha.server.peers.http2 import ENABLE_PUSH, PREFACE, frame, settings
from nsqha.server.peers.listener import MARK, PeerListener, is_stream
from nsqha.server.peers.peer_calling import OPENING
from nsqha.server.runtime import tls
from nsqha.server.runtime.tls import HTTP2_ALPN, STREAM_ALPN
from tests.certificates import Certificates
from tests.unit.server.peer_rig import Acceptor, GrpcWorld, Recorder, World, push, reply

LOOPS = (uvloop.new_event_loop, asyncio.new_event_loop)
STATUS = "/nsqha.v1.Replication/Status"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> tls.ClusterTls:
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    made.issue("node", "IP:127.0.0.1", "DNS:node", "URI:nsqha:node/00000000000000ab")
    return tls.load_cluster_tls(made.cert("node"), made.key("node"), made.cert("ca"))


# ---- which way


def hello(*protocols: str) -> bytes:
    """What a TLS client says first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(protocols)
    said = ssl.MemoryBIO()
    end = context.wrap_bio(ssl.MemoryBIO(), said, server_hostname="node.example")
    with pytest.raises(ssl.SSLWantReadError):
        end.do_handshake()
    return said.read()


@pytest.mark.parametrize("more", [b"", OPENING[len(MARK) :], b"\xff" * 20_000])
def test_a_stream_is_known_as_soon_as_its_mark_is_there(more: bytes) -> None:
    said = MARK + more
    assert [is_stream(said[:at], tls=False) for at in range(len(MARK))] == [None] * len(MARK)
    assert is_stream(said, tls=False) is True
    assert is_stream(said, tls=True) is False, "in clear where TLS is wanted: gRPC's server refuses it"


@pytest.mark.parametrize(
    "said",
    [
        PREFACE + settings((ENABLE_PUSH, 0), (0xF4E5, 1)),
        b"GET / HTTP/1.1\r\n\r\n" + bytes(100),
        b"PRI * HTTP/1.1\r\n\r\n" + bytes(100),
        MARK[:-1] + b"\x02",
        b"\x16\x03\x01\x00\x05hello" + bytes(100),
        bytes(100),
    ],
)
def test_whoever_says_anything_else_is_grpcs(said: bytes) -> None:
    differs = next(at for at in range(1, len(MARK) + 1) if said[:at] != MARK[:at])
    assert [is_stream(said[:at], tls=False) for at in range(len(MARK) + 1)] == [
        None if at < differs else False for at in range(len(MARK) + 1)
    ]


@pytest.mark.parametrize(
    ("protocols", "expected"),
    [((STREAM_ALPN, HTTP2_ALPN), True), ((STREAM_ALPN,), True), ((HTTP2_ALPN,), False), ((), False)],
)
def test_over_tls_the_first_record_says_it(protocols: tuple[str, ...], expected: bool) -> None:
    said = hello(*protocols)
    assert [is_stream(said[:at], tls=True) for at in range(len(said))] == [None] * len(said)
    assert is_stream(said, tls=True) is is_stream(said + bytes(100), tls=True) is expected
    assert is_stream(said, tls=False) is False


def test_no_more_is_waited_for_than_a_record_may_have() -> None:
    said = b"\x16\x03\x01\xff\xff" + bytes(front_door.RECORD_BYTES_MAX)
    assert is_stream(said[: front_door.RECORD_BYTES_MAX - 1], tls=True) is None
    assert is_stream(said[: front_door.RECORD_BYTES_MAX], tls=True) is False


# ---- both at one port


def talk_to_both(world: World, *, seen: list[PeerIdentity]) -> Callable[[], Awaitable[None]]:
    acceptor = Acceptor(lambda stream: Recorder(lambda m: stream.send(reply(m.hello.registration))))
    world.server.on_stream("Push", acceptor)

    async def status(peer: PeerIdentity, request: Any) -> Any:
        seen.append(peer)
        return pb.StatusReply(node_uid=7)

    world.server.on_call("Status", status)

    async def talk() -> None:
        handler = Recorder()
        stream = world.peers.stream(world.address, "Push", handler)
        stream.send(push(5, size=300_000))
        assert (await world.peers.call(world.address, "Status", pb.StatusRequest(), timeout=5)).node_uid == 7
        await handler.until(lambda: handler.messages)
        assert handler.numbers == [5]
        assert acceptor.accepted[-1].stream is not None
        seen.append(acceptor.accepted[-1].stream.peer)
        stream.close()
        await handler.end()

    return talk


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_streams_and_calls_share_the_port_and_know_who_came(loop: Any, secure: bool, node: tls.ClusterTls) -> None:
    seen: list[PeerIdentity] = []

    async def scenario(world: World) -> None:
        await talk_to_both(world, seen=seen)()

    files: Any = SimpleNamespace(tls=node, generation=1) if secure else None
    world = GrpcWorld(files=files, caller_tls=node if secure else None)
    world.runner = lambda: asyncio.Runner(loop_factory=loop)  # type: ignore[method-assign]
    world.run(scenario)
    for peer in seen:
        host, _, port = peer.address.partition(":")
        assert (host, port.isdigit()) == ("127.0.0.1", True)
        assert (peer.node_uid, peer.verified) == ((0xAB, True) if secure else (0, False))
    assert len({peer.address for peer in seen}) == 2, "each came over its own connection"


def test_without_unix_sockets_that_have_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_door, "HAS_NAMES", False)
    seen: list[PeerIdentity] = []

    async def scenario(world: World) -> None:
        await talk_to_both(world, seen=seen)()

    GrpcWorld().run(scenario)
    assert [peer.address.partition(":")[0] for peer in seen] == ["127.0.0.1"] * 2


def test_an_address_can_not_be_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection that gRPC's server sees is named by the front door, by what the system says."""
    seen: list[PeerIdentity] = []

    async def scenario(world: World) -> None:
        talk_to_both(world, seen=seen)
        async with aio.insecure_channel(
            world.address, options=[("grpc.default_authority", "nsqha 9.9.9.9:9")]
        ) as channel:
            await channel.unary_unary(STATUS)(b"", metadata=(("x-forwarded-for", "9.9.9.9"),))

    GrpcWorld().run(scenario)
    assert seen[0].address.startswith("127.0.0.1:")


# ---- a port beside an echo


class Inside:
    """In the place of gRPC's server: what comes is kept, and answered by `answer`."""

    def __init__(self) -> None:
        self.came: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._server: Any = None

    async def start(self, name: str) -> str:
        self._server = await asyncio.start_unix_server(lambda r, w: self.came.append((r, w)), "\0" + name)
        return f"unix-abstract:{name}"

    async def next(self, number: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while len(self.came) <= number:
            await asyncio.sleep(0.002)
        return self.came[number]

    def stop(self) -> None:
        for _, writer in self.came:
            if not writer.is_closing():
                writer.transport.abort()
        self._server.close()


class Streams:
    """In the place of a node: who came for a stream."""

    def __init__(self) -> None:
        self.came: list[str] = []

    def connection(self, address: str) -> Any:
        self.came.append(address)
        return Kept(self)


class Kept(asyncio.Protocol):
    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(b"stream:" + data)

    def close(self, why: str) -> None:
        self._streams.came.append(why)


Scenario = Callable[[PeerListener, Inside, Streams], Awaitable[None]]


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def warmed_up() -> None:
    """A loop keeps some descriptors from its first connection on."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    await reader.read()
    writer.close()
    server.close()
    await asyncio.sleep(0.01)


@pytest.fixture(params=LOOPS, ids=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Scenario], None]]:
    def start(scenario: Scenario, files: Any = None) -> None:
        async def main() -> None:
            complaints: list[Any] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
            await warmed_up()
            before = descriptors()
            inside, streams = Inside(), Streams()
            door = PeerListener(streams, files)
            door.open("127.0.0.1:0")
            door.begin(await inside.start(f"nsqha-test-{os.getpid()}-{id(door)}"))
            async with asyncio.timeout(20):
                await scenario(door, inside, streams)
            await door.close()
            inside.stop()
            for _ in range(100):
                await asyncio.sleep(0.01)
                if descriptors() <= before and len(asyncio.all_tasks()) == 1:
                    break
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert descriptors() <= before
            assert not complaints

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main())

    yield start


async def dial(door: PeerListener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = door.address.split(":")
    return await asyncio.open_connection(host, int(port))


def test_a_first_word_may_come_in_pieces(run: Callable[[Scenario], None]) -> None:
    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        for word in (OPENING, PREFACE + frame(4, 0, 0)):
            reader, writer = await dial(door)
            for at in range(0, len(word), 7):
                writer.write(word[at : at + 7])
                await asyncio.sleep(0.003)
            if word is OPENING:
                assert await reader.readexactly(7 + len(MARK)) == b"stream:" + OPENING[: len(MARK)]
            else:
                assert await (await inside.next())[0].readexactly(len(word)) == word
            writer.close()
        assert len(streams.came) == 1

    run(scenario)


def test_everything_passes_both_ways_and_so_does_the_end(run: Callable[[Scenario], None]) -> None:
    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        reader, writer = await dial(door)
        there, back = b"t" + os.urandom(3_000_000), os.urandom(5_000_000)
        writer.write(there)
        inner_reader, inner_writer = await inside.next()
        assert not inner_reader.at_eof()
        inner_writer.write(back)
        assert await inner_reader.readexactly(len(there)) == there
        inner_writer.close()
        assert await reader.read() == back, "what was said before the end arrives"
        while door._passing:
            await asyncio.sleep(0.002)
        writer.close()
        assert not streams.came

    run(scenario)


def test_what_says_something_first_inside_is_not_lost(run: Callable[[Scenario], None]) -> None:
    """As gRPC's server does, with its settings."""

    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        for number in range(20):
            reader, writer = await dial(door)
            writer.write(b"a")
            (await inside.next(number))[1].write(b"settings")
            assert await reader.readexactly(8) == b"settings"
            writer.close()

    run(scenario)


@pytest.mark.parametrize("side", ["outside", "inside"])
def test_a_side_that_is_lost_takes_the_other_with_it(run: Callable[[Scenario], None], side: str) -> None:
    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        reader, writer = await dial(door)
        writer.write(b"x")
        inner_reader, inner_writer = await inside.next()
        await inner_reader.readexactly(1)
        (writer if side == "outside" else inner_writer).transport.abort()
        assert await (inner_reader if side == "outside" else reader).read() == b""
        while door._passing:
            await asyncio.sleep(0.002)
        writer.close()

    run(scenario)


def test_who_does_not_read_is_not_written_for(run: Callable[[Scenario], None]) -> None:
    """What waits is bounded, whatever there is to send."""

    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        _, writer = await dial(door)
        writer.write(b"x")
        _, inner_writer = await inside.next()
        writer.transport.pause_reading()
        inner_writer.transport.set_write_buffer_limits(high=1 << 20)
        for _ in range(200):  # bounded: 200 MB would not fit anywhere
            inner_writer.write(bytes(1 << 20))
            try:
                async with asyncio.timeout(0.2):
                    await inner_writer.drain()
            except TimeoutError:
                break
        else:
            raise AssertionError("200 MB were taken")
        waiting = [side._transport.get_write_buffer_size() for side in door._passing if side._transport is not None]
        assert max(waiting) < 2 << 20
        writer.transport.abort()

    run(scenario)


def test_with_nobody_inside_a_connection_is_closed(run: Callable[[Scenario], None]) -> None:
    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        inside._server.close()
        await asyncio.sleep(0.01)
        reader, writer = await dial(door)
        writer.write(b"x")
        with pytest.raises(ConnectionError):
            if await reader.read() == b"":
                raise ConnectionResetError
        writer.close()

    run(scenario)


@pytest.mark.parametrize("said", [b"", MARK[:10]])
def test_who_does_not_say_what_it_wants_is_given_up(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(front_door, "LOOK_SECONDS", 0.1)

    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        reader, writer = await dial(door)
        writer.write(said)
        try:
            assert await reader.read() == b""
        except ConnectionResetError:
            assert said, "unread bytes make it a reset"
        writer.close()
        assert not inside.came and not streams.came and not door._looking

    run(scenario)


def test_who_says_nothing_longest_goes_first(run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_door, "LOOKING_MAX", 3)

    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        silent = [await dial(door) for _ in range(5)]
        assert [await reader.read() for reader, _ in silent[:2]] == [b"", b""]
        assert len(door._looking) == 3
        reader, writer = await dial(door)
        writer.write(OPENING)
        assert await reader.readexactly(7) == b"stream:", "nobody is kept out by that"
        for _, each in [*silent, (reader, writer)]:
            each.close()

    run(scenario)


def test_who_has_spoken_is_not_taken_for_silent(run: Callable[[Scenario], None]) -> None:
    """Everybody comes again at once after the loop stood for a while."""

    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        host, port = door.address.split(":")
        callers = []
        for number in range(300):
            caller = socket.create_connection((host, int(port)))
            caller.sendall(OPENING if number % 4 else b"x")  # none of which is looked at before the last one came
            callers.append(caller)
        while len(streams.came) < 225 or len(inside.came) < 75:
            await asyncio.sleep(0.01)
        for caller in callers:
            caller.close()

    run(scenario)


def test_the_last_descriptors_are_not_for_what_is_passed_on(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are for logs, and for other nodes."""
    monkeypatch.setattr(front_door.listen, "is_spare", lambda descriptor: True)

    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        reader, writer = await dial(door)
        writer.write(b"x")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        reader, writer = await dial(door)
        writer.write(OPENING)
        await reader.readexactly(7)
        writer.close()
        assert not inside.came

    run(scenario)


def test_without_descriptors_it_rests_and_goes_on(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_door, "TIRED_SECONDS", 0.05)

    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        failed = 0

        class Failing:
            def __getattr__(self, name: str) -> Any:
                return getattr(listener, name)

            def accept(self) -> Any:
                nonlocal failed
                failed += 1
                if failed < 3:
                    raise OSError(errno.EMFILE, "Too many open files")
                return listener.accept()

        listener = door._socket
        assert listener is not None
        door._loop.remove_reader(listener)
        monkeypatch.setattr(door, "_socket", Failing())
        door.begin(door._inside)
        reader, writer = await dial(door)
        writer.write(OPENING)
        await reader.readexactly(7)
        writer.close()
        assert failed >= 3

    run(scenario)


def test_who_comes_before_it_is_open_waits(run: Callable[[Scenario], None]) -> None:
    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        later = PeerListener(streams, None)
        later.open("127.0.0.1:0")
        reader, writer = await dial(later)
        writer.write(OPENING)
        later.begin(door._inside)
        await reader.readexactly(7)
        writer.close()
        await asyncio.sleep(0.01)
        await later.close()

    run(scenario)


def test_closing_ends_whoever_is_half_in(run: Callable[[Scenario], None]) -> None:
    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        silent, through = await dial(door), await dial(door)
        through[1].write(b"x")
        await inside.next()
        await door.close()
        for reader, writer in (silent, through):
            try:
                assert await reader.read() == b""
            except ConnectionResetError:
                pass
            writer.close()
        with pytest.raises(ConnectionRefusedError):
            await dial(door)

    run(scenario)


def test_a_handshake_that_fails_or_stalls_leaves_nothing(
    run: Callable[..., None],
    node: tls.ClusterTls,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(front_door, "HANDSHAKE_SECONDS", 0.2)

    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        for _ in range(2):
            reader, writer = await dial(door)
            writer.write(hello(STREAM_ALPN))
            while await reader.read(65536):  # its answer, to which nothing is said
                pass
            writer.close()
        stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        stranger.set_alpn_protocols([STREAM_ALPN])
        host, port = door.address.split(":")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=stranger)
            writer.write(OPENING)
            if not await reader.read():
                raise ConnectionResetError
        while streams.came.count("no connection") < 3:
            await asyncio.sleep(0.01)
        assert caplog.text.count("came to nothing") == 1, "it is told of, and not each time"

    run(scenario, SimpleNamespace(tls=node, generation=1))


def test_handshakes_under_way_are_bounded(
    run: Callable[..., None], node: tls.ClusterTls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_door, "HANDSHAKES_MAX", 3)

    async def scenario(door: PeerListener, inside: Inside, streams: Streams) -> None:
        writers, callers = [], []
        for _ in range(10):
            _, writer = await dial(door)
            writer.write(hello(STREAM_ALPN))
            writers.append(writer)
        while streams.came.count("no connection") < 7:
            await asyncio.sleep(0.01)
        assert len(door._welcoming) == 3
        host, port = door.address.split(":")
        for _ in range(12):  # at once
            caller = socket.create_connection((host, int(port)))
            caller.sendall(hello(STREAM_ALPN))
            callers.append(caller)
        await asyncio.sleep(0.05)
        while door._looking or len(door._welcoming) > 3:
            await asyncio.sleep(0.01)
        assert len(door._handshakes) == 3
        for caller in callers:
            caller.close()
        for writer in writers:
            writer.close()

    run(scenario, SimpleNamespace(tls=node, generation=1))


def test_an_address_that_is_taken_is_named() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = "127.0.0.1:{1}".format(*taken.getsockname())
            with pytest.raises(ConfigError, match=f"--grpc-address={address}: cannot listen: Address already in use"):
                await front_door.serve(Streams(), aio.server(), address, None)

    asyncio.run(main())
