"""A TCP relay that loses, delays and cuts, to stand between a client and a server under test.

client -> Relay.port -> target
             hold_requests   what the client sends stays here until `release`
             drop_replies    what the server sends is thrown away
             slow_down(n)    at most n bytes a second of each client's pass, until `release`
             cut             all connections end, new ones are refused until `release`
             release(cut_after=n)   nothing of that any more, but `cut` once n bytes of replies have passed
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

SLOW_BYTES = 16 << 10  # read at a time from a client that is slowed down; what waits stays with the client


class Relay:
    def __init__(self, target_port: int) -> None:
        self._target = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open = threading.Event()
        self._open.set()
        self.drop_replies = False
        self._refusing = False
        self._bytes_left: int | None = None
        self._per_second: float | None = None
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    @classmethod
    @contextlib.contextmanager
    def to(cls, target_port: int) -> Iterator[Relay]:
        relay = cls(target_port)
        try:
            yield relay
        finally:
            relay.close()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def hold_requests(self) -> None:
        self._open.clear()

    def slow_down(self, bytes_per_second: float) -> None:
        self._per_second = bytes_per_second

    def cut(self) -> None:
        self._refusing = True
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def release(self, *, cut_after: int | None = None) -> None:
        """`cut_after`: this applies from the first byte on, which may pass before a call that comes later."""
        self._bytes_left, self._per_second = cut_after, None
        self._refusing = self.drop_replies = False
        self._open.set()

    def close(self) -> None:
        self.release()
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(client)
            try:
                server = None if self._refusing else socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                server = None
            if server is None:
                client.close()
                continue
            self._connections.append(server)
            self._spawn(self._requests, client, server)
            self._spawn(self._replies, server, client)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with _both_end(client, server):
            while data := client.recv(1 << 16 if self._per_second is None else SLOW_BYTES):
                self._open.wait()
                if (per_second := self._per_second) is not None:
                    time.sleep(len(data) / per_second)
                server.sendall(data)

    def _replies(self, server: socket.socket, client: socket.socket) -> None:
        with _both_end(client, server):
            while data := server.recv(1 << 12):
                if self._bytes_left is not None:
                    self._bytes_left -= len(data)
                    if self._bytes_left < 0:
                        self.cut()
                        return
                if not self.drop_replies:
                    client.sendall(data)

    def _spawn(self, run: object, *args: socket.socket) -> None:
        assert callable(run)
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()


@contextlib.contextmanager
def _both_end(*connections: socket.socket) -> Iterator[None]:
    try:
        with contextlib.suppress(OSError):
            yield
    finally:
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
