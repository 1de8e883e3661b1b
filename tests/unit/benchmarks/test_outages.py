"""The outages that clients of a killed node's topics see, told by a server that fails as a broker does."""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from benchmarks import client, outages

OK, HEARTBEAT = b"\0\0\0\6\0\0\0\0OK", b"\0\0\0\x0f\0\0\0\0_heartbeat_"
FAILED = b"\0\0\0\x10\0\0\0\1E_PUB_FAILED"
Answers = Callable[[socket.socket, str, int], object]
"""What a server does with the n-th publish to a topic after the kill."""


class FakeServer:
    """Takes connections that publish; each has a thread."""

    def __init__(self, listening: socket.socket, answers: Answers) -> None:
        self.killed = False
        self.tries: Counter[str] = Counter()  # publishes after the kill
        self.early: list[str] = []  # "after" that came before it
        self._listening = listening
        self._answers = answers

    def serve(self) -> None:
        threads = []
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                break
            threads.append(threading.Thread(target=self._serve, args=(sock,)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve(self, sock: socket.socket) -> None:
        # A client that gives up closes whatever has come.
        with sock, sock.makefile("rb") as received, suppress(OSError):
            if received.read(4) != b"  V2":
                return
            while line := received.readline():
                topic = line.split()[1].decode()
                body = received.read(struct.unpack(">I", received.read(4))[0])
                if body == b"before":
                    sock.sendall(OK)
                    continue
                if not self.killed:
                    self.early.append(topic)
                self.tries[topic] += 1
                if self._answers(sock, topic, self.tries[topic]) == "close":
                    break

    def kill(self) -> None:
        self.killed = True


@contextmanager
def serving(answers: Answers) -> Iterator[tuple[FakeServer, client.Address]]:
    with ExitStack() as closed:
        listening = closed.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))
        server = FakeServer(listening, answers)
        thread = threading.Thread(target=server.serve)
        thread.start()
        closed.callback(thread.join)
        closed.callback(lambda: listening.shutdown(socket.SHUT_RDWR))  # wakes `accept`
        yield server, listening.getsockname()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "SETTLE_S", 0.0)


def measured(answers: Answers, topics: list[str]) -> FakeServer:
    with serving(answers) as (server, address):
        seconds = outages.outages(address, topics, server.kill)
    assert len(seconds) == len(topics)
    assert all(0 < each < outages.OUTAGE_S for each in seconds)
    assert not server.early
    return server


def test_each_topic_is_published_to_after_the_kill() -> None:
    server = measured(lambda sock, topic, count: sock.sendall(OK), ["a", "b", "c"])
    assert server.tries == {"a": 1, "b": 1, "c": 1}


def test_who_is_answered_with_an_error_connects_and_publishes_again() -> None:
    def answers(sock: socket.socket, topic: str, count: int) -> None:
        sock.sendall(FAILED if topic == "a" and count < 4 else OK)

    assert measured(answers, ["a", "b"]).tries == {"a": 4, "b": 1}


def test_who_loses_the_connection_connects_and_publishes_again() -> None:
    def answers(sock: socket.socket, topic: str, count: int) -> str | None:
        if topic == "a" and count < 3:
            return "close"
        sock.sendall(OK)
        return None

    assert measured(answers, ["a", "b"]).tries == {"a": 3, "b": 1}


def test_heartbeats_are_answered_and_frames_come_in_pieces() -> None:
    heard = []

    def answers(sock: socket.socket, topic: str, count: int) -> None:
        sock.sendall(HEARTBEAT + OK[:3])
        heard.append(sock.recv(100))  # with it the client has read that
        sock.sendall(OK[3:])

    assert measured(answers, ["a"]).tries == {"a": 1}
    assert heard == [b"NOP\n"]


def test_a_topic_that_takes_nothing_before_the_kill_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(100)
                sock.sendall(FAILED)
                sock.recv(100)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(client.Refused, match="E_PUB_FAILED"):
            outages.outages(server.getsockname(), ["a"], lambda: None)
        thread.join()


def test_an_outage_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "OUTAGE_S", 0.05)
    answers: Answers = lambda sock, topic, count: sock.sendall(OK if topic == "b" else FAILED)  # noqa: E731
    with serving(answers) as (server, address), pytest.raises(TimeoutError, match="1 of 2 topics"):
        outages.outages(address, ["a", "b"], server.kill)
