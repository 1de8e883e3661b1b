"""When the process of a controller counts as gone: it was reached, its connection ended, and it refuses another one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from lookupd import standby
from lookupd.standby import Standby, gone
from nsqha.election.model import Controller


class Listener:
    """A process that listens, as far as others see it."""

    def __init__(self) -> None:
        self.address = ""
        self.accepted: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        port = int(self.address.rpartition(":")[2] or 0)
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted.append(writer)

    async def reached(self, times: int = 1) -> None:
        async with asyncio.timeout(20):
            while len(self.accepted) < times:
                await asyncio.sleep(0.005)

    def end_connections(self) -> None:
        for writer in self.accepted:
            writer.transport.abort()

    async def die(self) -> None:
        if self._server is not None:
            self._server.close()
        self.end_connections()


@contextlib.asynccontextmanager
async def watched(listener: Listener) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(gone(listener.address))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await listener.die()


def run(story: Callable[[Listener], Awaitable[None]]) -> None:
    async def main() -> None:
        listener = Listener()
        await listener.listen()
        async with asyncio.timeout(30):
            await story(listener)

    asyncio.run(main())


def test_a_process_that_ends_is_gone() -> None:
    async def story(listener: Listener) -> None:
        async with watched(listener) as task:
            await listener.reached()
            assert not task.done()
            await listener.die()
            await task

    run(story)


def test_a_process_that_ends_while_it_is_asked_again_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(listener: Listener) -> None:
        async with watched(listener) as task:
            await listener.reached()
            connect, fails = asyncio.open_connection, [ConnectionResetError(), TimeoutError()]

            async def failing(*address: Any) -> Any:
                if fails:
                    raise fails.pop()
                return await connect(*address)

            monkeypatch.setattr(asyncio, "open_connection", failing)
            await listener.die()
            await task
            assert not fails

    run(story)


def test_a_connection_that_ends_alone_means_nothing() -> None:
    async def story(listener: Listener) -> None:
        async with watched(listener) as task:
            await listener.reached()
            listener.end_connections()
            await listener.reached(2)
            assert not task.done()

    run(story)


def test_an_address_that_was_never_reached_is_nobodys_death(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(listener: Listener) -> None:
        await listener.die()
        monkeypatch.setattr(standby, "RETRY_SECONDS_MAX", 0.02)
        async with watched(listener) as task:
            await asyncio.sleep(0.2)
            assert not task.done()
            await listener.listen()
            await listener.reached()

    run(story)


@pytest.mark.parametrize("address", ["", "nonsense", "host:port"])
def test_a_name_that_is_no_address_is_left_to_the_lease(address: str) -> None:
    async def story(_: Listener) -> None:
        listener = Listener()
        listener.address = address
        async with watched(listener) as task:
            await asyncio.sleep(0.1)
            assert not task.done()

    run(story)


def test_each_controller_is_watched_once_and_told_of_once() -> None:
    async def story(_: Listener) -> None:
        ends: dict[str, asyncio.Event] = {}
        told: list[str] = []

        async def until_gone(name: str) -> None:
            ends[name] = asyncio.Event()
            await ends[name].wait()

        keeper = Standby(until_gone, lambda controller: told.append(controller.name))
        for _ in range(2):
            keeper.watch(Controller("a", epoch=1))
            await asyncio.sleep(0)
        keeper.watch(Controller("b", epoch=2))
        await asyncio.sleep(0)
        ends["a"].set()
        ends["b"].set()
        await asyncio.sleep(0.01)
        keeper.watch(Controller("b", epoch=2))
        await asyncio.sleep(0.01)
        assert told == ["b"]
        keeper.watch(None)

    run(story)
