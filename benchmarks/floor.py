"""What a machine charges for publishing before a broker does anything: a peer for the publishing rows.

    python -m benchmarks -k pub,mpub --peer 'floor=>python -m benchmarks.floor'

uvloop reads, the bytes of each loop tick are appended to a file with one write, and OK goes back as often as whole
commands came. Nothing is parsed but the first command, whose size is that of all others. So nothing is left of it but
system calls and copies of the kernel, and no broker on this loop that writes before it answers can be cheaper.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
import tempfile
from typing import cast

import uvloop

MAGIC = b"  V2"
OK = struct.pack(">II", 6, 0) + b"OK"
EMPTY_JSON = struct.pack(">II", 6, 0) + b"{}"


class Appender:
    """One file, and who waits for the write of this tick."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._position = 0
        self._data: list[bytes] = []
        self._waiting: list[tuple[asyncio.Transport, bytes]] = []

    def append(self, data: bytes, transport: asyncio.Transport, answer: bytes) -> None:
        if not self._data:
            self._loop.call_soon(self._flush)
        self._data.append(data)
        self._waiting.append((transport, answer))

    def _flush(self) -> None:
        data, self._data = self._data, []
        waiting, self._waiting = self._waiting, []
        self._position += os.pwrite(self._descriptor, b"".join(data), self._position)
        for transport, answer in waiting:
            transport.write(answer)


class Connection(asyncio.Protocol):
    def __init__(self, appender: Appender) -> None:
        self._appender = appender
        self._begun = False
        self._command_bytes = 0
        self._have = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            data = data.removeprefix(MAGIC)
        if data.startswith(b"IDENTIFY"):
            self._transport.write(EMPTY_JSON)
        elif data:
            if not self._command_bytes:
                body = data.index(b"\n") + 5
                self._command_bytes = body + int.from_bytes(data[body - 4 : body], "big")
            whole, self._have = divmod(self._have + len(data), self._command_bytes)
            self._appender.append(data, self._transport, OK * whole)


async def _http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nOK")
    await writer.drain()
    writer.close()


async def serve(directory: str) -> None:
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryFile(dir=directory) as file:
        appender = Appender(loop, file.fileno())
        tcp = await loop.create_server(lambda: Connection(appender), "127.0.0.1", 0)
        web = await asyncio.start_server(_http, "127.0.0.1", 0)
        for name, server in (("TCP", tcp), ("HTTP", web)):
            host, port = server.sockets[0].getsockname()
            print(f"{name}: listening on {host}:{port}", file=sys.stderr, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(next((word.partition("=")[2] for word in sys.argv if word.startswith("--data-path=")), ".")))
