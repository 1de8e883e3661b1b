"""`nsqha sub` against a scripted server that closes connections."""

from __future__ import annotations

import socket

import pytest

from nsqha.cli import build_parser, sub
from nsqha.cli.brokers import producers
from nsqha.cli.brokers.v2client import Subscriber
from nsqha.cli.terminal import exits
from tests.unit.cli.test_cli_v2client import OK, Server, frame, message

CLOSED = frame(0, b"CLOSE_WAIT")


def run(server: Server, *flags: str) -> int:
    words = ["sub", "t", "c", "--nsqd-tcp-address", server.address, *flags]
    args = build_parser("sub").parse_args(words)
    status: int = args.run(args)
    return status


def test_a_connection_that_ends_is_opened_again(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server()

    def one_message(peer: socket.socket) -> None:
        for end, answer in ((b"SUB t c\n", OK), (b"\n", message(1, b"hello"))):
            server.until(peer, end)
            server.received = b""
            peer.sendall(answer)
        server.until(peer, b"\n")  # FIN

    def first(peer: socket.socket) -> None:
        server.follow(second)  # the next connection
        one_message(peer)

    def second(peer: socket.socket) -> None:
        one_message(peer)
        server.until(peer, b"CLS\n")
        peer.sendall(frame(0, b"CLOSE_WAIT"))

    server.follow(first)
    assert run(server, "-n", "2") == exits.OK
    said = capsys.readouterr()
    assert said.out == "hello\nhello\n" and "connecting again" in said.err


def test_a_broker_that_does_not_come_back_is_an_error_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sub, "AGAIN_SECONDS", 0.05)
    server = Server()

    def closes(peer: socket.socket) -> None:
        server.until(peer, b"SUB t c\n")
        server._listener.close()
        peer.sendall(OK)

    server.follow(closes)
    with pytest.raises(exits.Exit, match="closed the connection") as ended:
        run(server, "-n", "2")
    assert ended.value.status == exits.UNREACHABLE


def test_a_refusal_is_not_tried_again() -> None:
    server = Server()

    def refuses(peer: socket.socket) -> None:
        server.until(peer, b"SUB t c\n")
        server.received = b""
        peer.sendall(OK)
        server.until(peer, b"\n")
        peer.sendall(frame(1, b"E_BAD_TOPIC"))

    server.follow(refuses)
    with pytest.raises(exits.Exit, match="E_BAD_TOPIC"):
        run(server, "-n", "2")


def test_messages_come_from_all_producers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    servers = [Server(), Server()]

    def script(server: Server, body: bytes) -> None:
        def one_message(peer: socket.socket) -> None:
            for end, answer in ((b"SUB t c\n", OK), (b"RDY 1\n", message(1, body)), (b"CLS\n", CLOSED)):
                server.until(peer, end)
                peer.sendall(answer)

        server.follow(one_message)

    script(servers[0], b"one")
    script(servers[1], b"two")
    monkeypatch.setattr(producers, "tcp_addresses", lambda args, topic: [server.address for server in servers])
    assert run(servers[0], "-n", "2") == exits.OK
    assert sorted(capsys.readouterr().out.split()) == ["one", "two"]
    for server in servers:
        server.join()
        assert server.received.count(b"FIN ") == 1


def test_a_producer_that_the_lookup_daemon_names_later_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "LOOKUP_SECONDS", 0.0)
    opened: list[str] = []

    class Quiet(Subscriber):
        def __init__(self, address: str) -> None:
            self.pair = socket.socketpair()
            opened.append(address)

        buffered = False

        def fileno(self) -> int:
            return self.pair[0].fileno()

        def close(self) -> None:
            for end in self.pair:
                end.close()

    known = [["a:1"], ["a:1", "b:1"], ["b:1"]]
    group = producers.ProducerGroup(lambda: known.pop(0), lambda address, sharing: Quiet(address))
    group.wait_at_most(0)
    assert group.messages() == group.messages() == []
    assert opened == ["a:1", "b:1"]
    group.close()
