"""Addresses as nsqd writes them."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from nsqha.clock import SystemClock
from nsqha.errors import ConfigError
from nsqha.nsqlog import Logger
from nsqha.options import TlsRequired
from nsqha.server.clients.connection import Connection
from nsqha.server.http.server import HttpApi, HttpServer
from nsqha.server.runtime import listen as listening
from nsqha.server.runtime.budget import SharedTurns
from nsqha.server.runtime.listen import (
    ACCEPTED_A_TURN,
    ACCEPTED_SECONDS,
    SPARE_FILES,
    Acceptor,
    address_text,
    bound_address,
    bound_port,
    check_free,
    listen,
    reason,
    split_host_port,
)
from nsqha.server.runtime.rare_warnings import RareWarnings
from nsqha.wire import errors
from nsqha.wire.limits import ProtocolLimits


def connects(family: int, address: object) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(2)
        return client.connect_ex(address) == 0  # type: ignore[arg-type]


def test_a_port_is_chosen_and_told() -> None:
    with listen("127.0.0.1:0", flag="tcp-address") as sock:
        assert bound_address(sock) == f"127.0.0.1:{bound_port(sock)}"
        assert connects(socket.AF_INET, ("127.0.0.1", bound_port(sock)))
        assert not sock.getblocking()


@pytest.mark.parametrize("host", ["0.0.0.0", ""])
def test_a_wildcard_takes_both_families(host: str) -> None:
    with listen(f"{host}:0", flag="tcp-address") as sock:
        assert connects(socket.AF_INET, ("127.0.0.1", bound_port(sock)))
        if sock.family == socket.AF_INET6:
            assert bound_address(sock).startswith("[::]:")
            assert connects(socket.AF_INET6, ("::1", bound_port(sock)))


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1:http", "127.0.0.1:", "::1:4150", "192.0.2.1:4150"])
def test_an_address_that_can_not_be_is_refused_with_its_flag(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--tcp-address=.*: cannot listen: "):
        listen(address, flag="tcp-address")


def test_a_port_in_use_is_refused() -> None:
    with listen("127.0.0.1:0", flag="a") as sock, pytest.raises(ConfigError, match="in use"):
        listen(bound_address(sock), flag="b")


def test_what_can_be_done_is_told(tmp_path: Path) -> None:
    with listen("127.0.0.1:0", flag="a") as sock, pytest.raises(ConfigError) as used:
        listen(bound_address(sock), flag="b")
    assert str(used.value).endswith(
        "cannot listen: Address already in use; stop the process that listens there (`ss -ltnp` shows it), "
        "or choose another address"
    )
    with pytest.raises(ConfigError, match="Cannot assign requested address; no interface of this host"):
        listen("192.0.2.1:4150", flag="b")
    with pytest.raises(ConfigError, match="No such file or directory; the folder"):
        listen(str(tmp_path / "missing" / "socket"), flag="b")


def test_an_address_for_somebody_else_is_tried_and_let_go() -> None:
    with listen("127.0.0.1:0", flag="a") as sock:
        address = bound_address(sock)
        with pytest.raises(ConfigError, match=f"--grpc-address={address}: cannot listen: Address already in use"):
            check_free(address, flag="grpc-address")
    check_free(address, flag="grpc-address")
    listen(address, flag="a").close()
    check_free("unix:/somewhere", flag="grpc-address")
    for address in ("nope", ""):
        with pytest.raises(ConfigError, match=f'^--grpc-address={address}: "{address}" is not host:port$'):
            check_free(address, flag="grpc-address")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)"), "Connection refused"),
        (
            OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 1), [Errno 113] x"),
            "Connection refused",
        ),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (OSError("something else"), "something else"),
        (ValueError("not host:port"), "not host:port"),
    ],
)
def test_reasons_are_the_systems_words(error: Exception, words: str) -> None:
    assert reason(error) == words


def test_a_unix_socket_replaces_a_dead_one_but_not_a_living_one(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with listen(path, flag="tcp-address") as sock:
        assert (bound_address(sock), bound_port(sock)) == (path, -1)
        with pytest.raises(ConfigError, match="in use"):
            listen(path, flag="tcp-address")
    with listen(path, flag="tcp-address"):
        assert connects(socket.AF_UNIX, path)


def test_a_file_is_never_removed_for_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(ConfigError):
        listen(str(path), flag="tcp-address")
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (("1.2.3.4", 5), "1.2.3.4:5"),
        (("::ffff:1.2.3.4", 5, 0, 0), "1.2.3.4:5"),
        (("::1", 5, 0, 0), "[::1]:5"),
        ("", "@"),
        ("/run/s", "/run/s"),
        (None, "@"),
    ],
)
def test_peers_are_shown_as_nsqd_shows_them(name: object, text: str) -> None:
    assert address_text(name) == text


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert split_host_port("[fe80::1]:4150") == ("fe80::1", 4150)
    assert split_host_port(":4150") == ("", 4150)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("http", [False, True])
def test_clients_do_not_get_the_last_descriptors(
    http: bool, loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the log could not be opened: what is stored could be neither read nor gone on with."""
    opened: list[Connection] = []
    context: Any = SimpleNamespace(
        **dict.fromkeys(("auth", "budget", "reading", "tokens")),
        clock=SystemClock(),
        limits=ProtocolLimits(),
        options=SimpleNamespace(tls_required=TlsRequired.NO),
    )
    opening, closing = opened.append, opened.remove
    refused = RareWarnings(Logger("client"), "too_many_files")
    connections: Any = SimpleNamespace(
        exiting=bool, next_number=lambda: 1, opened=opening, closed=closing, refused=refused
    )

    async def answer() -> bytes:
        """What a client hears that connects now."""
        sock = listen("127.0.0.1:0", flag="tcp-address")
        port = bound_port(sock)
        context.loop = asyncio.get_running_loop()
        context.turns = SharedTurns(context.loop)
        server: Any
        if http:
            server = HttpServer(HttpApi(), Logger("http"))
            await server.listen(sock)
        else:
            server = await context.loop.create_server(lambda: Connection(context, connections), sock=sock)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"GET /x HTTP/1.1\r\n\r\n" if http else b"  V2x\n")
            return await reader.read(4096)
        except ConnectionError:
            return b""
        finally:
            writer.close()
            closed = server.close()
            if http:
                await closed
            while opened:
                await asyncio.sleep(0.001)

    with asyncio.Runner(loop_factory=loop) as runner:
        usual = runner.run(answer())
        assert usual
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (SPARE_FILES * 4, SPARE_FILES * 4))
        assert runner.run(answer())[:8] == usual[:8], "far from the limit"
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (10, 10))
        assert runner.run(answer()) == (b"" if http else errors.TOO_MANY_FILES)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_clients_that_wait_are_accepted_in_a_few_turns(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """uvloop's server takes one in each, and the turns of a node that takes over from another one are long."""
    clients = 5 * ACCEPTED_A_TURN

    class Greets(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

        def data_received(self, data: bytes) -> None:
            heard.append(data)

    made: list[Any] = []
    heard: list[bytes] = []

    async def story() -> None:
        sock = listen("127.0.0.1:0", flag="tcp-address")
        address = ("127.0.0.1", bound_port(sock))
        acceptor = Acceptor(sock, Greets)
        await acceptor.start()
        waiting = [socket.create_connection(address) for _ in range(clients)]
        for client in waiting:
            client.send(b"  V2")
        for _ in range(40):
            await asyncio.sleep(0)
        assert (len(made), heard) == (clients, [b"  V2"] * clients)
        assert made[-1].get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        acceptor.close()
        for transport in made:
            transport.close()
        await asyncio.sleep(0.01)
        assert not connects(socket.AF_INET, address)
        for client in waiting:
            client.settimeout(5)
            assert client.recv(1) == b"", "the descriptor is closed with its transport"
            client.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(story())


class FullTurns:
    """The connections of a node take all of its turns, until the test says otherwise."""

    def __init__(self) -> None:
        self.room = False
        self.waiting: list[Callable[[], None]] = []
        self.charged = 0.0

    def wait(self, go_on: Callable[[], None]) -> None:
        self.waiting.append(go_on)

    def charge(self, seconds: float) -> None:
        self.charged += seconds


def test_who_is_connected_comes_before_who_waits_to_be_accepted() -> None:
    """A stranger that connects again and again takes no more of a turn than any other connection."""
    made: list[Any] = []

    class Made(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    async def story() -> None:
        turns = FullTurns()
        sock = listen("127.0.0.1:0", flag="tcp-address")
        acceptor = Acceptor(sock, Made, turns=turns)  # type: ignore[arg-type]
        await acceptor.start()
        waiting = [socket.create_connection(("127.0.0.1", bound_port(sock))) for _ in range(60)]
        for _ in range(10):
            await asyncio.sleep(0)
        alone = len(made)
        assert 0 < alone <= 10 and len(turns.waiting) == 1 and not turns.charged, "the loop accepts one a turn"
        turns.room = True
        turns.waiting.pop()()
        assert turns.charged == pytest.approx(ACCEPTED_A_TURN * ACCEPTED_SECONDS)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(made) == 60
        acceptor.close()
        for end in (*made, *waiting):
            end.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())


def accepted(story: Callable[[list[Any]], Awaitable[None]]) -> None:
    """A story about sixty clients that wait when accepting begins; it is given the connections that were made."""
    made: list[Any] = []

    class Made(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    async def whole() -> None:
        sock = listen("127.0.0.1:0", flag="tcp-address")
        acceptor = Acceptor(sock, Made)
        await acceptor.start()
        waiting = [socket.create_connection(("127.0.0.1", bound_port(sock))) for _ in range(60)]
        await story(made)
        acceptor.close()
        for end in (*made, *waiting):
            end.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_clients_that_connect_without_end_are_accepted_one_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else strangers would get as much of the node as they can take."""
    monkeypatch.setattr(listening, "ACCEPTED_AT_ONCE", 20)
    monkeypatch.setattr(listening, "ACCEPTED_A_SECOND", 0)

    async def story(made: list[Any]) -> None:
        await turns(20)
        assert 20 < len(made) <= 40
        while len(made) < 60:
            await asyncio.sleep(0)

    accepted(story)


def test_while_descriptors_are_short_two_a_turn_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have to be refused, and until they are they take what is kept for HTTP: sixteen a turn took all of it."""

    async def story(made: list[Any]) -> None:
        monkeypatch.setattr(listening, "is_spare", lambda descriptor: True)
        await turns(10)
        assert 10 <= len(made) <= 20
        monkeypatch.undo()
        await turns(20)
        assert len(made) == 60, "descriptors are free again"

    accepted(story)


def test_a_connection_that_can_not_be_begun_is_said_and_holds_up_no_other() -> None:
    made: list[int] = []
    errors: list[Any] = []

    def begun() -> asyncio.Protocol:
        made.append(len(made))
        if len(made) == 3:
            raise RuntimeError("a bug")
        return asyncio.Protocol()

    async def story() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: errors.append(context["exception"]))
        sock = listen("127.0.0.1:0", flag="tcp-address")
        acceptor = Acceptor(sock, begun)
        await acceptor.start()
        waiting = [socket.create_connection(("127.0.0.1", bound_port(sock))) for _ in range(8)]
        for _ in range(20):
            await asyncio.sleep(0)
        acceptor.close()
        for client in waiting:
            client.close()
        await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())
    assert len(made) == 8 and [str(error) for error in errors] == ["a bug"]
