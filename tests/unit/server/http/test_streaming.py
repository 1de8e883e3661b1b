"""JSON answers in parts: the same text as at once, and no more of it in memory than the caller takes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from nsqha.nsqlog import Logger
from nsqha.server.http import server as http_envelope
from nsqha.server.http.server import HttpApi, HttpRequest, HttpServer, JsonStream
from nsqha.server.http.streaming import (
    AT_ONCE,
    NOT_YET,
    RUN,
    in_order,
    json_list,
    json_object,
    json_parts,
    json_values,
)
from nsqha.server.runtime.listen import listen


def text(parts: Iterator[bytes]) -> object:
    return json.loads(b"".join(parts))


@given(st.lists(st.sampled_from([NOT_YET, "a", 1, {"b": []}, True]), max_size=10))
def test_values_are_a_list_whatever_lies_between_them(values: list[object]) -> None:
    assert text(json_values(values)) == [value for value in values if value is not NOT_YET]


@pytest.mark.parametrize("count", [0, 1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE])
def test_many_values_come_in_parts(count: int) -> None:
    parts = list(json_values(range(count)))
    assert text(iter(parts)) == list(range(count)) and len(parts) <= 2 + count // AT_ONCE
    assert max(map(len, parts)) <= 5 * AT_ONCE + 1


@pytest.mark.parametrize("fields", [{}, {"a": [1]}, {"a": [], 'b"': {"c": None}}])
def test_objects_and_lists_are_those_of_their_parts(fields: dict[str, object]) -> None:
    assert text(json_object({name: json_parts(value) for name, value in fields.items()})) == fields
    assert text(json_list(map(json_parts, fields.values()))) == list(fields.values())


@pytest.mark.parametrize("count", [0, 1, RUN, 3 * RUN + 1])
def test_names_come_in_order_and_once(count: int) -> None:
    names = [f"n{number * 7919 % 100_003}" for number in range(count)]
    found = list(in_order([*names, *names[:10]]))
    assert [name for name in found if name is not NOT_YET] == sorted(set(names))
    assert found.count(NOT_YET) == -(-(count + min(count, 10)) // RUN), "others have their turns meanwhile"


class NumbersServer:
    """A server of `/numbers?n=`, and how many of its parts were made."""

    def __init__(self) -> None:
        self.made = 0
        self.api = HttpApi()
        self.api.add("GET", "/numbers", self.numbers)

    async def numbers(self, request: HttpRequest) -> object:
        return JsonStream(self._parts(int(request.query.require("n"))))

    def _parts(self, count: int) -> Iterator[bytes]:
        for part in json_values(range(count)):
            self.made += 1
            yield part

    async def __aenter__(self) -> NumbersServer:
        self.server = HttpServer(self.api, Logger("test"))
        address = await self.server.listen(listen("127.0.0.1:0", flag="http-address"))
        self.port = int(address.rpartition(":")[2])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    async def asked(
        self, count: int, version: str = "1.1", host: int = 1
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """By 127.0.0.`host`."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, limit=1024, local_addr=(f"127.0.0.{host}", 0)
        )
        writer.write(f"GET /numbers?n={count} HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return reader, writer


def unchunked(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return body


@pytest.mark.parametrize(("count", "version"), [(0, "1.1"), (100, "1.1"), (100_000, "1.1"), (100_000, "1.0")])
def test_a_small_answer_has_its_length_and_a_large_one_is_whole(count: int, version: str) -> None:
    async def main() -> None:
        async with NumbersServer() as rig:
            reader, writer = await rig.asked(count, version)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert b" 200 OK" in head and b"X-Nsq-Content-Type" in head
            assert (b"Content-Length" in head) is (count <= 100)
            chunked = count > 100 and version == "1.1"
            assert (b"Transfer-Encoding: chunked" in head) is chunked
            assert json.loads(unchunked(body) if chunked else body) == list(range(count))

    uvloop.run(asyncio.wait_for(main(), 60))


def test_nothing_is_made_ahead_of_a_caller_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_envelope, "STREAM_S", 0.5)

    async def main() -> None:
        async with NumbersServer() as rig:
            slow = [await rig.asked(100_000_000, host=2 + n) for n in range(http_envelope.STREAMS_AT_ONCE)]
            for reader, _ in slow:
                await reader.readexactly(100)
            reader, writer = await rig.asked(100)
            assert b"200 OK" in await reader.read(), "a small answer waits for none of them"
            writer.close()
            reader, writer = await rig.asked(20_000)
            body = b""
            while part := await reader.read(4096):
                body += part
            assert body.endswith(b"0\r\n\r\n"), "a large one waits until they are dropped"
            writer.close()
            assert rig.made < 100_000_000 // AT_ONCE / 10
            for reader, writer in slow:
                with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                    while True:
                        await reader.readexactly(1 << 20)
                writer.close()
            assert rig.server._streams._value == http_envelope.STREAMS_AT_ONCE

    uvloop.run(asyncio.wait_for(main(), 60))


def test_a_host_that_does_not_read_holds_up_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_envelope, "PART_S", 0.5)

    async def main() -> None:
        async with NumbersServer() as rig:
            slow = [await rig.asked(100_000_000, host=2) for _ in range(2 * http_envelope.STREAMS_AT_ONCE)]
            await slow[0][0].readexactly(100)
            reader, writer = await rig.asked(20_000, host=3)
            while await reader.read(4096):
                pass
            assert not slow[0][1].is_closing() and rig.server._streams._value < http_envelope.STREAMS_AT_ONCE
            writer.close()
            for _, writer in slow:
                writer.transport.abort()

    uvloop.run(asyncio.wait_for(main(), 30))


def test_few_wait_with_a_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_envelope, "STREAMS_WAITING_MAX", 1)

    async def main() -> None:
        async with NumbersServer() as rig:
            slow = [await rig.asked(100_000_000) for _ in range(2)]
            await slow[0][0].readexactly(100)
            while not rig.server._wait_for_stream:
                await asyncio.sleep(0.001)
            reader, writer = await rig.asked(100_000_000)
            assert b" 503 " in await reader.readline()
            for each in (writer, *(writer for _, writer in slow)):
                each.transport.abort()

    uvloop.run(asyncio.wait_for(main(), 30))


def test_an_answer_that_fails_behind_its_head_has_no_end() -> None:
    async def main() -> None:
        async with NumbersServer() as rig:
            monkeypatched = rig._parts

            def broken(count: int) -> Iterator[bytes]:
                for n, part in enumerate(monkeypatched(count)):
                    assert n < 50, "a bug"
                    yield part

            rig._parts = broken  # type: ignore[method-assign]
            reader, writer = await rig.asked(100_000_000)
            answer = await reader.read()
            assert answer.count(b"HTTP/1.1") == 1 and not answer.endswith(b"0\r\n\r\n")
            writer.close()

    uvloop.run(asyncio.wait_for(main(), 30))


def test_a_caller_that_leaves_gives_its_place_back() -> None:
    async def main() -> None:
        async with NumbersServer() as rig:
            for _ in range(http_envelope.STREAMS_AT_ONCE + 1):
                reader, writer = await rig.asked(100_000_000)
                await reader.readexactly(100)
                writer.transport.abort()

    uvloop.run(asyncio.wait_for(main(), 30))
