"""One HTTP request, byte for byte, and what came back."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any, NamedTuple


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def refusal(self) -> tuple[int, str]:
        """Status and code of an error."""
        return self.status, self.json["message"]


class Connection:
    """A keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int, tls: ssl.SSLContext | None = None) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port, ssl=tls))

    async def ask(
        self, method: str, target: str, body: bytes = b"", *, chunked: bool = False, **headers: str
    ) -> Answer:
        lines = [f"{method} {target} HTTP/1.1", "Host: x", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
        if chunked:
            lines.append("Transfer-Encoding: chunked")
            cut = max(len(body) // 3, 1)
            pieces = [body[n : n + cut] for n in range(0, len(body), cut)] + [b""]
            body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        elif body or method in ("POST", "PUT"):
            lines.append(f"Content-Length: {len(body)}")
        self.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        return await self.answer()

    async def answer(self) -> Answer:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        size = int(headers.get("content-length", 0))
        return Answer(int(head[0].split()[1]), headers, await asyncio.wait_for(self.reader.readexactly(size), 5))

    def close(self) -> None:
        self.writer.close()
