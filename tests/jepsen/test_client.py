"""An error in a callback of a load must not pass for a history in which nothing happened."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import pytest
import uvloop

from tests.jepsen.load.client import Broken, Gone, connect
from tests.jepsen.load.cluster import ClusterLoad, Endpoint
from tests.jepsen.load.publishers import Publisher


def test_what_goes_wrong_in_a_callback_is_told_and_how_connections_end_is_not() -> None:
    async def story() -> list[str]:
        broken, loop = Broken(), asyncio.get_running_loop()
        loop.set_exception_handler(broken)

        def fail(error: Exception) -> None:
            raise error

        for error in (ValueError("a body that can not be read"), Gone(""), ConnectionResetError()):
            loop.call_soon(fail, error)
        await asyncio.sleep(0)
        return broken.errors

    (told,) = uvloop.run(story())
    assert "a body that can not be read" in told


@pytest.fixture
def odd_broker() -> int:
    """The port of one that answers IDENTIFY and whatever comes next with something that is no OK."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            for answer in (b"{}", b"KO"):
                connection.recv(1 << 16)
                connection.sendall(struct.pack(">II", 4 + len(answer), 0) + answer)
            connection.recv(1 << 16)

    threading.Thread(target=serve, daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def test_a_publish_that_is_answered_with_something_else_is_no_ok(odd_broker: int) -> None:
    async def story() -> ClusterLoad:
        load = ClusterLoad(1, [Endpoint(odd_broker, 0)], [])
        client = await connect(odd_broker)
        publisher = Publisher(load, "orders", load.rng("publisher"))
        publisher.use(1, client)
        await asyncio.wait(publisher.burst(1))
        client.close()
        return load

    load = uvloop.run(story())
    assert not load.oks
    assert "KO" in load._broken.errors[0]
