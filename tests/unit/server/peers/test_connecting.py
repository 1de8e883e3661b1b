"""How a stream comes by its connection and notices that nobody is there: sockets that stall, on the loop in use."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvloop

from nsqha.server.peers import client_stream, dialling, http2_stream, keepalive
from nsqha.server.peers.api import methods_of
from nsqha.server.peers.calls import GrpcPeers
from nsqha.server.peers.client_stream import ClientStream
from nsqha.server.peers.http2 import PING, PREFACE, SETTINGS, frame
from nsqha.server.peers.http2_stream import Http2Stream
from tests.unit.server.peer_rig import SERVICES, Recorder, push, request_in

METHOD = methods_of(SERVICES)["Push"]
NONE_WITHIN = "no connection within"


class Other:
    """A listener that says nothing of its own accord, and the connections to it."""

    def __init__(self) -> None:
        self.accepted: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.says = b""
        self.port = 0
        self._server: Any = None

    async def start(self, host: str = "127.0.0.1", **options: Any) -> str:
        self._server = await asyncio.start_server(self._accept, host, 0, **options)
        self.port = self._server.sockets[0].getsockname()[1]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted.append((reader, writer))
        writer.write(self.says)

    async def everything(self) -> list[bytes]:
        """What came over each connection until its end."""
        async with asyncio.timeout(5):
            return [await reader.read() for reader, _ in self.accepted]

    async def stop(self) -> None:
        for _, writer in self.accepted:
            writer.transport.abort()
        self._server.close()


def run(main: Callable[[Other], Awaitable[None]], loop: Callable[[], Any] = uvloop.new_event_loop) -> None:
    """Nothing is left behind and nothing is complained about."""

    async def whole() -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        other = Other()
        async with asyncio.timeout(20):
            await main(other)
        if other.port:
            await other.stop()
        gc.collect()
        await asyncio.sleep(0.02)
        assert not complaints
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(whole())


def made(address: str, handler: Recorder | None = None) -> Http2Stream:
    return ClientStream(address, METHOD, handler or Recorder()).stream


# ---- nobody there


def test_who_takes_the_connection_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_stream, "CONNECT_SECONDS", 0.2)

    async def main(other: Other) -> None:
        handler, began = Recorder(), time.monotonic()
        made(await other.start(), handler).send(push(1))
        assert NONE_WITHIN in await handler.end()
        assert time.monotonic() - began > 0.15
        (came,) = await other.everything()
        assert came.startswith(PREFACE), "and the connection is closed"
        other.accepted.clear()
        other.says = frame(SETTINGS, 0, 0)
        stays = Recorder()
        stream = made(f"127.0.0.1:{other.port}", stays)
        await asyncio.sleep(0.4)
        assert not stays.closed
        stream.close()
        await stream.messages.over

    run(main)


async def lateness(late: list[float]) -> None:
    """How long the loop stood because the machine is busy, added up."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.02)
        late[0] += time.monotonic() - before - 0.02


def test_silence_is_noticed_as_long_after_the_last_word_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "KEEPALIVE_SECONDS", 1.0)
    monkeypatch.setattr(keepalive, "PING_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(http2_stream, "PING_TIMEOUT_SECONDS", 0.3)

    async def main(other: Other) -> None:
        handler = Recorder()
        other.says = frame(SETTINGS, 0, 0)
        made(await other.start(), handler)
        await asyncio.sleep(0.3)
        other.accepted[0][1].write(frame(SETTINGS, 0, 0))
        last, late = time.monotonic(), [0.0]
        watch = asyncio.create_task(lateness(late))
        assert "ping" in await handler.end()
        watch.cancel()
        took = time.monotonic() - last
        assert took > 1.2 and took - late[0] < 1.8
        assert frame(PING, 0, 0, bytes(8)) in (await other.everything())[0]

    run(main)


@pytest.mark.parametrize("moment", ["before", "after", "ping"])
def test_what_came_while_the_loop_stood_is_read_before_it_is_missed(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr(client_stream, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(keepalive, "KEEPALIVE_SECONDS", 0.2)
    monkeypatch.setattr(keepalive, "PING_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(http2_stream, "PING_TIMEOUT_SECONDS", 0.2)

    async def main(_: Other) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            handler = Recorder()
            stream = made(f"127.0.0.1:{listener.getsockname()[1]}", handler)
            if moment == "before":
                time.sleep(0.3)
            await asyncio.sleep(0.05)
            connection, _address = listener.accept()
            with connection:
                connection.send(frame(SETTINGS, 0, 0))
                if moment == "after":
                    time.sleep(0.3)
                await asyncio.sleep(0.02)
                if moment == "ping":
                    await asyncio.sleep(0.25)
                    connection.send(frame(PING, 1, 0, bytes(8)))
                    time.sleep(0.3)
                    await asyncio.sleep(0.02)
                assert not handler.closed
                stream.close()
                await stream.messages.over

    run(main)


# ---- addresses


class Names(uvloop.Loop):
    """A loop that knows where `there` is, once it may say so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.known = asyncio.Event()
        self.addresses: tuple[str, ...] = ("127.0.0.1",)

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        self.asked += 1
        assert host == "there", "an address is not looked up"
        await self.known.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.addresses]


def names() -> Names:
    found = asyncio.get_running_loop()
    assert isinstance(found, Names)
    return found


def test_a_slow_lookup_is_made_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_stream, "CONNECT_SECONDS", 0.1)

    async def main(other: Other) -> None:
        other.says = frame(SETTINGS, 0, 0)
        await other.start()
        address = f"there:{other.port}"
        handlers = [Recorder() for _ in range(5)]
        for handler in handlers:
            made(address, handler)
        for handler in handlers:
            assert NONE_WITHIN in await handler.end()
        monkeypatch.setattr(client_stream, "CONNECT_SECONDS", 5.0)
        stream = made(address)
        await asyncio.sleep(0.05)
        assert names().asked == 1
        names().known.set()
        while not other.accepted:
            await asyncio.sleep(0.01)
        again = made(address)
        while len(other.accepted) < 2:
            await asyncio.sleep(0.01)
        assert names().asked == 2, "it may have moved"
        for each in (stream, again):
            each.close()
            await each.messages.over

    run(main, Names)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_is_not_looked_up(host: str) -> None:
    async def main(other: Other) -> None:
        try:
            address = await other.start(host)
        except OSError:
            pytest.skip(f"no {host} here")
        stream = made(address)
        while not other.accepted:
            await asyncio.sleep(0.01)
        stream.close()
        await stream.messages.over
        assert not names().asked
        assert request_in((await other.everything())[0])[":authority"] == address

    run(main, Names)


@contextmanager
def deaf(host: str, port: int) -> Iterator[None]:
    """It takes no connection and refuses none: the queue of those that nobody accepts is full."""
    with socket.socket() as listener:
        listener.bind((host, port))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex((host, port))
        time.sleep(0.05)
        yield
        for each in waiting:
            each.close()


def test_an_address_that_is_deaf_leaves_time_for_the_next() -> None:
    async def main(other: Other) -> None:
        other.says = frame(SETTINGS, 0, 0)
        await other.start()
        names().known.set()
        names().addresses = ("127.0.0.2", "127.0.0.3", "127.0.0.1")
        with deaf("127.0.0.2", other.port):
            handler = Recorder()
            stream = made(f"there:{other.port}", handler)
            while not other.accepted:
                assert not handler.closed
                await asyncio.sleep(0.01)
            stream.close()
            await stream.messages.over
            assert NONE_WITHIN in await alone(f"127.0.0.2:{other.port}")
        names().addresses = ("127.0.0.2", "127.0.0.3")
        assert "refused" in await alone(f"there:{other.port}")

    run(main, Names)


async def alone(address: str) -> str:
    handler = Recorder()
    stream = made(address, handler)
    stream.send(push(1))
    why = await handler.end()
    assert stream.pending == 0
    return why


@pytest.mark.parametrize(
    ("address", "why"),
    [("127.0.0.1:1", "refused"), ("nowhere", "invalid"), (f"{'x' * 70}.y:1", "")],
)
def test_an_address_without_a_node_says_why(address: str, why: str) -> None:
    async def main(_: Other) -> None:
        assert why in (await alone(address)).lower()

    run(main)


# ---- not again at once


def test_an_address_that_fails_is_not_dialled_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "AGAIN_SECONDS_MAX", 0.4)

    async def tries(peers: GrpcPeers, address: str, seconds: float, accepted: Any = (), count: int = 0) -> float:
        """For so long, and until so many were accepted: a process may stand still meanwhile. By how much longer."""
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(accepted) < count:
            handler = Recorder()
            peers.stream(address, "Push", handler).send(push(1))
            assert await handler.end()
            await asyncio.sleep(0.01)
        return time.monotonic() - until

    async def main(other: Other) -> None:
        address = await other.start()
        hang_up = other._accept

        def accept(reader: Any, writer: Any) -> None:
            hang_up(reader, writer)
            writer.close()

        monkeypatch.setattr(other, "_accept", accept)
        await other.stop()
        address = await other.start()
        peers = GrpcPeers(SERVICES)
        late = await tries(peers, address, 1.0, other.accepted, 2)
        assert len(other.accepted) <= 5 + late / 0.2, "after 0.1, 0.2, 0.4 s"
        # Once it answers, the next failure is the first again.
        await asyncio.sleep(0.5)
        other.says = frame(SETTINGS, 0, 0)
        await tries(peers, address, 0.1)
        other.says, before = b"", len(other.accepted)
        late = await tries(peers, address, 0.35, other.accepted, before + 2)
        assert len(other.accepted) - before <= 4 + late / 0.05, "after 0.1 s"
        assert not peers._streams
        await peers.close()

    run(main)


def test_how_long_an_address_is_left_alone() -> None:
    failures = dialling.Failures()
    now = 1000.0
    for seconds in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        failures.failed("a", now, "refused")
        failures.failed("a", now + 0.01, "another that was under way")
        assert failures.why("a", now + 0.95 * seconds).startswith("refused")
        now += 1.01 * seconds
        assert not failures.why("a", now)
    assert not failures.why("b", now - 0.5)
    now += 15
    failures.failed("b", now, "refused")
    assert list(failures._last) == ["b"], "addresses come and go"
    failures.reached("b")
    assert not failures.why("b", now)


# ---- in the very moment


@pytest.mark.parametrize("how", ["cancelled", "too late", "closed"])
def test_a_connection_that_comes_when_nobody_wants_it_any_more(how: str) -> None:
    class Late(ClientStream):
        def connected(self, transport: Any) -> None:
            super().connected(transport)
            if how == "cancelled":
                self._connecting.cancel()
            elif how == "closed":
                self.stream.close()
            else:
                time.sleep(0.3)

    async def main(other: Other) -> None:
        handler = Recorder()
        stream = Late(await other.start(), METHOD, handler).stream
        await stream.messages.over
        del stream
        assert len(handler.closed) == 1
        await other.everything()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(client_stream, "CONNECT_SECONDS", 0.2)
        run(main)


def test_closing_does_not_wait_for_who_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "PING_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(http2_stream, "PING_TIMEOUT_SECONDS", 0.1)

    async def main(other: Other) -> None:
        window = struct.pack(">HL", 4, 1 << 30)
        other.says = frame(SETTINGS, 0, 0, window) + frame(8, 0, 0, struct.pack(">L", 1 << 30))
        handler = Recorder()
        stream = made(await other.start(), handler)
        while not other.accepted:
            await asyncio.sleep(0.01)
        other.accepted[0][1].transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
        for number in range(20):
            stream.send(push(number, size=1 << 20))
        await asyncio.sleep(0.05)
        assert stream.pending
        transport = stream.transport
        assert transport is not None
        stream.close("enough")
        assert await handler.end() == "enough"
        assert transport.is_closing()
        other.accepted[0][1].transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises(ConnectionResetError):
            while await other.accepted[0][0].read(1 << 20):
                pass
            raise ConnectionResetError("or ended")

    run(main)
