"""nsqd's HTTP API over a real loopback server and a broker in memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from nsqha.server.http.api import BrokerHttp
from tests.unit.server.fake_broker import FakeBroker
from tests.unit.server.raw_http import Answer, Connection

TEXT = "text/plain; charset=utf-8"
JSON = "application/json; charset=utf-8"
NSQ = "nsq; version=1.0"


def talk(broker: FakeBroker, conversation: Callable[[Connection], Awaitable[None]]) -> None:
    """Run a conversation with a server of `broker`."""

    async def run() -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setblocking(False)
        port = sock.getsockname()[1]
        server = BrokerHttp(broker, sock, None)
        await server.start()
        connection = await Connection.open(port)
        try:
            await conversation(connection)
        finally:
            connection.close()
            await server.close()

    asyncio.run(run())


def ask(broker: FakeBroker, method: str, target: str, body: bytes = b"", *, chunked: bool = False) -> Answer:
    """One request."""
    answers = []

    async def conversation(connection: Connection) -> None:
        answers.append(await connection.ask(method, target, body, chunked=chunked))

    talk(broker, conversation)
    return answers[0]


def refusals(broker: FakeBroker, *requests: tuple[str, str, bytes]) -> list[tuple[int, str]]:
    found = []

    async def conversation(connection: Connection) -> None:
        for method, target, body in requests:
            found.append((await connection.ask(method, target, body)).refusal)

    talk(broker, conversation)
    return found
