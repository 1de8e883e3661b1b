"""A segment service that does what a script says, one step per request, and remembers what it was asked.

    with ScriptedBroker(ok(log), refuse(503), short(log)) as broker:

After the last step it does the last one again. A step gets the request's parameters and returns all bytes of the
answer; the connection ends behind it if the step says so.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from tests.unit.spark.stored import Stored

Asked = dict[str, str]


class Reply(NamedTuple):
    data: bytes
    ends: bool = False


Step = Callable[[Asked], Reply]


class ScriptedBroker:
    def __init__(self, *steps: Step) -> None:
        self.asked: list[Asked] = []
        self.connections = 0
        self._steps = list(steps)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> ScriptedBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end([self._listener], self._threads[:1])
        self._end(self._socks, self._threads[1:])  # nobody is taken in any more

    @staticmethod
    def _end(socks: Sequence[socket.socket], threads: Sequence[threading.Thread]) -> None:
        for sock in socks:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            sock.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._socks.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as file:
            try:
                while line := file.readline():
                    while file.readline().strip():
                        pass
                    asked = dict(parse_qsl(urlsplit(line.split()[1].decode()).query))
                    step = self._steps[min(len(self.asked), len(self._steps) - 1)]
                    self.asked.append(asked)
                    reply = step(asked)
                    sock.sendall(reply.data)
                    if reply.ends:
                        sock.shutdown(socket.SHUT_RDWR)
                        return
            except OSError:
                return


def http(status: int, body: bytes, *, ends: bool = False, **headers: object) -> Reply:
    """Header names with _ for -."""
    lines = {"Content_Length": len(body)} | headers
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items() if value is not None)
    return Reply(f"HTTP/1.1 {status} Because\r\n{head}\r\n".encode() + body, ends)


def whole(log: Stored, asked: Asked, upto: int | None = None) -> tuple[int, int, bytes, bytes]:
    first, end = int(asked["first"]), min(int(asked["end"]), upto or 1 << 60)
    return first, end, *log.content(first, end)


def ok(log: Stored, upto: int | None = None) -> Step:
    """What was asked for, up to a log id."""

    def step(asked: Asked) -> Reply:
        first, end, entries, frames = whole(log, asked, upto)
        return http(200, entries + frames, Nsqha_First=first, Nsqha_End=end)

    return step


def short(log: Stored, missing: int) -> Step:
    """The connection ends so many bytes before the answer does."""

    def step(asked: Asked) -> Reply:
        first, end, entries, frames = whole(log, asked)
        body = entries + frames
        reply = http(200, body, Nsqha_First=first, Nsqha_End=end)
        return Reply(reply.data[:-missing], ends=True)

    return step


def lying(log: Stored, **headers: object) -> Step:
    """The answer, with other headers; None: without it."""

    def step(asked: Asked) -> Reply:
        first, end, entries, frames = whole(log, asked)
        return http(200, entries + frames, **({"Nsqha_First": first, "Nsqha_End": end} | headers))

    return step


def refuse(status: int, why: str = "", **headers: object) -> Step:
    return lambda asked: http(status, f"{why}\n".encode(), **headers)


def hang_up(asked: Asked) -> Reply:
    return Reply(b"", ends=True)


def silence(asked: Asked) -> Reply:
    return Reply(b"")
