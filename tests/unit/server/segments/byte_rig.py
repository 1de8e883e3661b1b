"""A byte server over a log on a disk, with a loop in a thread of its own, and raw connections to it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

from nsqha.server.peers.api import PeerIdentity
from nsqha.server.runtime import listen
from nsqha.server.segments import ranges
from nsqha.server.segments.byte_server import ByteServer, ReaderLimits
from nsqha.server.segments.ranges import Ask, LocatedRange
from tests.unit.spark.stored import PARTITION, UID, Stored

SECONDS = 10.0  # for whatever has to happen


class ByteServerRig:
    def __init__(
        self,
        log: Stored,
        *,
        limits: ReaderLimits | None = None,
        certificates: Any = None,
        check: Callable[[Ask, PeerIdentity], None] = lambda ask, peer: None,
        admit: Callable[[PeerIdentity], None] = lambda peer: None,
    ) -> None:
        self.stored = log
        self.asked: list[Ask] = []
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._check = check
        sock = listen.listen("127.0.0.1:0", flag="segments-address")
        self.server = ByteServer(sock, self._look_up, self.loop, admit=admit, limits=limits, certificates=certificates)
        self.server.start()

    def _look_up(self, ask: Ask, peer: PeerIdentity) -> LocatedRange:
        self.asked.append(ask)
        self._check(ask, peer)
        return ranges.found_in(self.stored.log, ask)

    @property
    def address(self) -> str:
        return self.server.address

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self.loop).result(SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS)
        self.loop.close()

    def target(self, first: int, end: int, **more: Any) -> str:
        last = self.stored.log.last
        assert last is not None
        wanted = {"first": first, "end": end, "at": last.log_id, "chain": f"{last.chain:016x}"} | more
        return f"/segments/{UID:016x}/{PARTITION}?{urlencode(wanted)}"

    def connect(self, context: ssl.SSLContext | None = None, receive_bytes: int = 0) -> Reader:
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(SECONDS)
        host, port = listen.split_host_port(self.address)
        sock.connect((host, port))
        return Reader(context.wrap_socket(sock, server_hostname=host) if context else sock)

    def get(self, target: str) -> Response:
        """On a connection of its own."""
        with self.connect() as reader:
            return reader.get(target)

    def ask(self, first: int, end: int, **more: Any) -> Response:
        return self.get(self.target(first, end, **more))


class Response(SimpleNamespace):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


class Reader:
    """One connection, byte by byte."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.file = sock.makefile("rb")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def get(self, target: str) -> Response:
        self.send(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return self.response()

    def response(self) -> Response:
        status = int(self.file.readline().split()[1])
        headers: dict[str, str] = {}
        while (line := self.file.readline().strip()) != b"":
            name, _, value = line.decode().partition(": ")
            headers[name] = value
        n = int(headers["Content-Length"])
        body = self.file.read(n)
        assert len(body) == n, f"{len(body)} of {n} bytes came"
        return Response(status=status, headers=headers, body=body)

    def ended(self) -> bool:
        """Whether the server has closed it; waits for that or for bytes."""
        try:
            return self.file.read(1) == b""
        except ConnectionError:
            return True


@contextmanager
def running(log: Stored, **options: Any) -> Iterator[ByteServerRig]:
    rig = ByteServerRig(log, **options)
    try:
        yield rig
    finally:
        rig.close()
