"""The client against a scripted server: what it sends, and that it believes nothing it should not."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from nsqha.cli.brokers.v2client import RefusedByServer, Subscriber, V2Connection, V2Publisher
from nsqha.cli.terminal import exits

OK = struct.pack(">II", 6, 0) + b"OK"
HEARTBEAT = struct.pack(">II", 15, 0) + b"_heartbeat_"
Script = Callable[[socket.socket], None]


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">II", 4 + len(data), kind) + data


def message(n: int, body: bytes) -> bytes:
    return frame(2, struct.pack(">qH", 7, 1) + b"%016x" % n + body)


class Server:
    """Answers the IDENTIFY, then follows a script; keeps what it received."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.received = b""
        self._thread: threading.Thread | None = None

    def follow(self, script: Script) -> None:
        self._thread = threading.Thread(target=self._run, args=(script,), daemon=True)
        self._thread.start()

    def _run(self, script: Script) -> None:
        with self._listener.accept()[0] as peer:
            peer.settimeout(5)
            self.until(peer, b"}")
            self.received = b""
            peer.sendall(OK)
            script(peer)

    def until(self, peer: socket.socket, end: bytes) -> None:
        while not self.received.endswith(end):
            received = peer.recv(65536)
            if not received:
                return
            self.received += received

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join(5)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_a_run_is_sent_at_once_and_each_ok_counted(server: Server) -> None:
    def script(peer: socket.socket) -> None:
        server.until(peer, b"three")
        peer.sendall(OK * 3)

    server.follow(script)
    publisher = V2Publisher(server.address, 5)
    publisher.publish("t", [b"one", b"two", b"three"])
    assert publisher.published == 3
    server.join()
    assert server.received == b"PUB t\n\0\0\0\x03onePUB t\n\0\0\0\x03twoPUB t\n\0\0\0\x05three"


def test_a_delay_makes_it_a_dpub(server: Server) -> None:
    def script(peer: socket.socket) -> None:
        server.until(peer, b"x")
        peer.sendall(OK)

    server.follow(script)
    V2Publisher(server.address, 5).publish("t", [b"x"], delay_ms=1500)
    server.join()
    assert server.received == b"DPUB t 1500\n\0\0\0\x01x"


def test_an_error_tells_how_many_were_stored(server: Server) -> None:
    def script(peer: socket.socket) -> None:
        server.until(peer, b"c")
        peer.sendall(OK + frame(1, b"E_BAD_MESSAGE no"))

    server.follow(script)
    publisher = V2Publisher(server.address, 5)
    with pytest.raises(RefusedByServer, match="E_BAD_MESSAGE no"):
        publisher.publish("t", [b"a", b"b", b"c"])
    assert publisher.published == 1


def test_a_lost_connection_is_unreachable(server: Server) -> None:
    server.follow(lambda peer: server.until(peer, b"a"))
    publisher = V2Publisher(server.address, 5)
    with pytest.raises(exits.Exit) as raised:
        publisher.publish("t", [b"a"])
    assert raised.value.status == exits.UNREACHABLE
    assert str(raised.value).endswith("closed the connection: 1 message may or may not have been stored")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (b"E_INVALID DPUB timeout 172800000 out of range 0-3600000", "--max-req-timeout"),
        (b"E_BAD_MESSAGE PUB message too big 2 > 1", "--max-msg-size"),
    ],
)
def test_what_is_too_much_names_the_bound(server: Server, error: bytes, hint: str) -> None:
    def script(peer: socket.socket) -> None:
        server.until(peer, b"a")
        peer.sendall(frame(1, error))

    server.follow(script)
    with pytest.raises(RefusedByServer, match=f"{error[:20].decode()}.* .nsqd's {hint} bounds"):
        V2Publisher(server.address, 5).publish("t", [b"a"])


def test_silence_leaves_the_outcome_open(server: Server) -> None:
    def script(peer: socket.socket) -> None:
        server.until(peer, b"a")
        server.until(peer, b"never")

    server.follow(script)
    publisher = V2Publisher(server.address, 0.2)
    with pytest.raises(exits.Exit, match="may or may not"):
        publisher.publish("t", [b"a"])
    publisher.close()


def test_messages_may_come_in_any_pieces_with_heartbeats_between(server: Server) -> None:
    def script(peer: socket.socket) -> None:
        server.until(peer, b"SUB t c\n")
        peer.sendall(OK)
        server.until(peer, b"RDY 2\n")
        stream = message(1, b"one") + HEARTBEAT + message(2, b"two")
        for n in range(len(stream)):
            peer.sendall(stream[n : n + 1])
        server.until(peer, b"FIN %016x\n" % 2)

    server.follow(script)
    consumer = Subscriber(server.address, 5, "t", "c", window=2)
    found = []
    while len(found) < 2:
        found += consumer.messages()
    assert [(m.id, m.attempts, m.body) for m in found] == [(b"%016x" % 1, 1, b"one"), (b"%016x" % 2, 1, b"two")]
    consumer.answer(found, None, 0)
    server.join()
    assert b"NOP\n" in server.received
    # The window closes before the FINs could open it.
    assert server.received.endswith(b"RDY 0\nFIN %016x\nFIN %016x\n" % (1, 2))


def test_requeue_carries_the_delay(server: Server) -> None:
    def script(peer: socket.socket) -> None:
        server.until(peer, b"SUB t c\n")
        peer.sendall(OK)
        server.until(peer, b"RDY 1\n")
        peer.sendall(message(5, b"x"))
        server.until(peer, b"250\n")

    server.follow(script)
    consumer = Subscriber(server.address, 5, "t", "c", window=1)
    consumer.answer(consumer.messages(), 250, None)
    server.join()
    assert server.received.endswith(b"REQ %016x 250\n" % 5)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        struct.pack(">II", 3, 0),
        b"\xff" * 16,
        struct.pack(">I", 14) + b"E_BAD_PROTOCOL",  # a lookup daemon
    ],
)
def test_what_does_not_speak_the_protocol_is_named(server: Server, answer: bytes) -> None:
    server.follow(lambda peer: peer.sendall(answer))
    with pytest.raises(exits.Exit, match="does not speak the NSQ protocol"):
        V2Connection(server.address, 2).frames()


def test_an_address_must_have_a_port() -> None:
    for bad in ("localhost", "localhost:", "localhost:x", "localhost:0", "localhost:99999", ":4150"):
        with pytest.raises(exits.Exit, match="is not HOST:PORT") as raised:
            V2Publisher(bad, 1)
        assert raised.value.status == exits.USAGE


def test_a_server_that_says_nothing_may_be_another_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        closer = threading.Thread(target=lambda: listener.accept()[0].close())
        closer.start()
        with pytest.raises(exits.Exit, match="is that the TCP port of nsqd"):
            V2Publisher(address, 5)
        closer.join(5)


def test_an_address_from_the_environment_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSQHA_TCP_ADDRESS", "localhost")
    with pytest.raises(exits.Exit, match="NSQHA_TCP_ADDRESS in the environment: 'localhost' is not HOST:PORT"):
        V2Publisher("localhost", 1)
