"""How long partitions take no publishes when a node is killed: each topic has a connection of its own.

    PUB "before" -> OK           on all connections, one after the other
    1 s later the kill
    PUB "after"  -> OK           on all at once; with this the outage of a topic ends
                 -> another answer, or the connection is lost: close, `RETRY_S`, connect, magic and PUB "after"

The cores of the machine are what a failover of many partitions waits for, and a client that takes them is measured as
well. So this is one epoll loop without asyncio.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

from . import client

SETTLE_S = 1.0
RETRY_S = 0.02
OUTAGE_S = 60.0
_HEARTBEAT = b"_heartbeat_"
_READ_BYTES = 4096


def outages(tcp: client.Address, topics: Sequence[str], kill: Callable[[], object]) -> list[float]:
    """Publish at `tcp`, kill a node; for each topic the seconds until a publish that was sent after that is answered
    with OK. TimeoutError if that takes longer than `OUTAGE_S`."""
    with _Publishers(tcp) as publishers:
        for topic in topics:
            publishers.open(topic)
        time.sleep(SETTLE_S)
        kill()
        return publishers.ended(time.perf_counter())


class _Publisher:
    """The connection of one topic."""

    __slots__ = ("_unread", "said", "sock")

    def __init__(self, sock: socket.socket, said: bytes) -> None:
        self.said = said  # the publish
        self.sock = sock
        self._unread = b""  # the beginning of a frame

    def answer(self) -> bytes | None:
        """The answer to the publish; None: not all of it has come. OSError: the connection is lost."""
        received = self.sock.recv(_READ_BYTES)
        if not received:
            raise ConnectionResetError
        unread = self._unread + received
        while len(unread) >= 8:
            end = 4 + struct.unpack_from(">I", unread)[0]
            if len(unread) < end:
                break
            payload, unread = unread[8:end], unread[end:]
            if payload != _HEARTBEAT:
                return payload
            self.sock.sendall(b"NOP\n")
        self._unread = unread
        return None


class _Publishers:
    """The connections of all topics whose outage has not ended."""

    def __init__(self, tcp: client.Address) -> None:
        self._tcp = tcp
        self._open: dict[int, _Publisher] = {}  # by descriptor
        self._retries: deque[tuple[float, bytes]] = deque()  # when to connect again, and what to publish then
        self._events = select.epoll()

    def __enter__(self) -> _Publishers:
        return self

    def __exit__(self, *_: object) -> None:
        for publisher in self._open.values():
            publisher.sock.close()
        self._events.close()

    def open(self, topic: str) -> None:
        """Connect for a topic, which has to take a publish."""
        sock = client.connect(self._tcp)
        self._open[sock.fileno()] = _Publisher(sock, client.pub(topic, b"after"))
        sock.sendall(client.pub(topic, b"before"))
        client.expect_ok(sock)
        sock.setblocking(False)

    def ended(self, killed: float) -> list[float]:
        """Publish to all topics until each is stored; the seconds that this took since `killed`."""
        ended: list[float] = []
        topics = len(self._open)
        for number, publisher in list(self._open.items()):
            self._events.register(number, select.EPOLLIN)
            try:
                publisher.sock.sendall(publisher.said)
            except OSError:
                self._again(number)
        while len(ended) < topics:
            for number, event in self._events.poll(self._seconds()):
                if self._stored(number, event):
                    ended.append(time.perf_counter() - killed)
            self._retry()
            if time.perf_counter() - killed > OUTAGE_S:
                raise TimeoutError(f"{topics - len(ended)} of {topics} topics take no publish")
        return ended

    def _stored(self, number: int, event: int) -> bool:
        """Something has happened to this connection; whether its publish is stored, and it is closed."""
        publisher = self._open[number]
        try:
            if event & select.EPOLLOUT:  # it is connected
                publisher.sock.sendall(b"  V2" + publisher.said)
                self._events.modify(number, select.EPOLLIN)
                return False
            answer = publisher.answer()
        except OSError:
            self._again(number)
            return False
        if answer == b"OK":
            self._close(number)
            return True
        if answer is not None:
            self._again(number)
        return False

    def _close(self, number: int) -> bytes:
        publisher = self._open.pop(number)
        publisher.sock.close()  # epoll forgets it with that
        return publisher.said

    def _again(self, number: int) -> None:
        """Connect again in a while: the server has closed the connection, or does so after what it answered."""
        self._retries.append((time.perf_counter() + RETRY_S, self._close(number)))

    def _seconds(self) -> float:
        """Until the next connection is due; not long, as `OUTAGE_S` is looked at then."""
        return max(self._retries[0][0] - time.perf_counter(), 0.0) if self._retries else 1.0

    def _retry(self) -> None:
        """Connect those that are due."""
        now = time.perf_counter()
        while self._retries and self._retries[0][0] <= now:
            said = self._retries.popleft()[1]
            sock = socket.socket()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.connect_ex(self._tcp)
            self._open[sock.fileno()] = _Publisher(sock, said)
            self._events.register(sock, select.EPOLLOUT)
