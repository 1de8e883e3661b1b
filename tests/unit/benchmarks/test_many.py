"""The storm of connections, against listeners that answer, and that do not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from benchmarks import many

CLIENTS = 40
OK = b"\0\0\0\6\0\0\0\0OK"


def stormed(answer: Callable[[int, socket.socket], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many clients a server leaves without OK that does this with each."""
    monkeypatch.setattr(many, "STORM", CLIENTS)
    with socket.create_server(("127.0.0.1", 0), backlog=CLIENTS) as server:

        def serve() -> None:
            for number in range(CLIENTS):
                client, _ = server.accept()
                with client:
                    said = b""
                    while not said.endswith(b"{}"):
                        said += client.recv(100)
                    answer(number, client)

        serving = threading.Thread(target=serve)
        serving.start()
        seconds, failed = many._storm(server.getsockname())
        serving.join()
    assert 0 < seconds < many.STORM_S
    return failed


def test_all_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stormed(lambda number, client: client.sendall(OK), monkeypatch) == 0


def test_who_is_closed_or_refused_was_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(number: int, client: socket.socket) -> None:
        if number % 4 == 0:
            client.sendall(OK)
        elif number % 4 == 1:
            client.sendall(b"\0\0\0\x0d\0\0\0\1E_INVALID")

    assert stormed(answer, monkeypatch) == CLIENTS * 3 // 4
