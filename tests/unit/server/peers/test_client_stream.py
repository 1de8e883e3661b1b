"""What only the calling end of a stream does: HTTP/2 frame by frame, beside a server that can be made to misbehave."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers import http2_stream, keepalive
from nsqha.server.peers.api import methods_of
from nsqha.server.peers.client_stream import ClientStream
from nsqha.server.peers.http2 import (
    ACK,
    CLIENT_STREAM,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Headers,
    frame,
)
from nsqha.server.peers.http2_stream import Http2Stream
from tests.unit.server.peer_rig import SERVICES, Recorder, push, reply

STREAM = CLIENT_STREAM
METHOD = methods_of(SERVICES)["Push"]
UNKNOWN_FRAME = 0xBE


class Server:
    """One connection, and the frames that came over it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def frame(self) -> tuple[int, int, int, bytes]:
        head = await self.reader.readexactly(9)
        payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        return head[3], head[4], int.from_bytes(head[5:], "big"), payload

    async def next(self, wanted: int) -> tuple[int, bytes]:
        """Flags and payload of the next frame of this type; others are passed over."""
        while True:
            kind, flags, _, payload = await self.frame()
            if kind == wanted:
                return flags, payload

    async def message(self) -> Any:
        """The next message, from as many frames as it takes."""
        data = b""
        while len(data) < 5 or len(data) < 5 + int.from_bytes(data[1:5], "big"):
            data += (await self.next(DATA))[1]
        assert data[0] == 0
        return pb.PushMessage.FromString(data[5:])

    def write(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))


Scenario = Callable[[Server, Http2Stream, Recorder], Awaitable[None]]


def run(scenario: Scenario) -> None:
    async def main() -> None:
        accepted: asyncio.Queue[Server] = asyncio.Queue()
        server = await asyncio.start_server(lambda r, w: accepted.put_nowait(Server(r, w)), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        handler = Recorder()
        stream = ClientStream(f"127.0.0.1:{port}", METHOD, handler).stream
        async with asyncio.timeout(20):
            other = await accepted.get()
            assert await other.reader.readexactly(len(PREFACE)) == PREFACE
            await scenario(other, stream, handler)
            stream.close()
            await stream.messages.over
        assert len(handler.closed) == 1
        other.writer.close()
        server.close()
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def body(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return b"\0" + struct.pack(">L", len(data)) + data


def setting(name: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HL", name, value))


def update(stream: int, more: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">L", more))


def test_it_says_what_a_grpc_client_says() -> None:
    async def scenario(server: Server, stream: Http2Stream, handler: Recorder) -> None:
        assert (await server.frame())[:3] == (SETTINGS, 0, 0)
        assert (await server.frame())[:3] == (WINDOW_UPDATE, 0, 0)
        kind, flags, number, block = await server.frame()
        assert (kind, flags, number) == (HEADERS, END_HEADERS, STREAM)
        assert Headers().read(block) == {
            ":method": "POST",
            ":scheme": "http",
            ":path": "/nsqha.v1.Replication/Push",
            ":authority": stream.peer.address,
            "te": "trailers",
            "content-type": "application/grpc",
            "nsqha-peer": "level=1-1 build=0.1.0",
            "user-agent": "nsqha",
        }
        stream.send(push(7))
        assert (await server.message()).hello.registration == 7
        stream.close()
        assert await server.next(RST_STREAM) == (0, struct.pack(">L", 8))
        assert await server.reader.read() == b"", "and the connection is closed"

    run(scenario)


@pytest.mark.parametrize("step", [1, 2, 9, 10, 31, 1000])
def test_frames_and_messages_come_in_any_pieces(step: int) -> None:
    async def scenario(server: Server, stream: Http2Stream, handler: Recorder) -> None:
        small = body(reply(1)) + body(pb.PushReply()) + body(reply(2))
        big = body(pb.PushReply(hello=pb.PushHello(registration=3), refused=[pb.Refused(why="x" * 500)]))
        padded = bytes((4,)) + big[:100] + bytes(4)
        raw = b"".join(
            (
                frame(SETTINGS, 0, 0),
                frame(HEADERS, END_HEADERS | PRIORITY, STREAM, bytes(5) + b"\x88"),
                frame(UNKNOWN_FRAME, 0xFF, STREAM, b"whatever"),
                frame(DATA, 0, STREAM, small),
                frame(DATA, PADDED, STREAM, padded),
                frame(DATA, 0, STREAM),
                frame(DATA, 0, STREAM, big[100:] + big[:3]),
                frame(DATA, 0, STREAM, big[3:] + body(reply(4))),
            )
        )
        for at in range(0, len(raw), step):
            server.write(raw[at : at + step])
            await asyncio.sleep(0)
            await server.writer.drain()
        await handler.until(lambda: len(handler.messages) == 6)
        assert handler.numbers == [1, 0, 2, 3, 3, 4]
        assert handler.messages[4].refused[0].why == "x" * 500

    run(scenario)


def test_flow_control_holds_messages_back_and_nobody_is_asked_meanwhile() -> None:
    async def scenario(server: Server, stream: Http2Stream, handler: Recorder) -> None:
        asked = 0

        def give() -> Any:
            nonlocal asked
            asked += 1
            return push(3)

        stream.send(push(1, size=100_000))
        stream.send(push(2))
        stream.pull(give)
        seen = 0
        while seen < 65535:
            seen += len((await server.next(DATA))[1])
        assert (seen, stream.pending, asked) == (65535, 2, 0)
        # The connection may send more, the stream not yet; then just so much that a head is cut in two.
        left = len(body(push(1, size=100_000))) - 65535
        server.write(update(0, 1 << 20))
        server.write(setting(MAX_FRAME_SIZE, 1 << 20), setting(INITIAL_WINDOW_SIZE, 65535 + left + 2))
        assert len((await server.next(DATA))[1]) == left
        assert (await server.next(DATA))[1] == body(push(2))[:2]
        assert (stream.pending, asked) == (1, 0)
        # What was granted is taken back, so the window is far below zero; it is paid back to just there.
        server.write(setting(INITIAL_WINDOW_SIZE, 10), update(STREAM, 65535 + left + 2 - 10))
        server.write(frame(PING, 0, 0, b"as far: "))
        while (found := await server.frame())[0] != PING:
            assert found[0] != DATA
        server.write(update(STREAM, 1))
        assert (await server.next(DATA))[1] == body(push(2))[2:3]
        server.write(update(STREAM, 1 << 20))
        assert (await server.next(DATA))[1] == body(push(2))[3:]
        assert (await server.message()).hello.registration == 3
        assert (stream.pending, asked) == (0, 1)

    run(scenario)


def test_what_was_read_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_stream, "OUR_WINDOW_BYTES", 1 << 16)

    async def scenario(server: Server, stream: Http2Stream, handler: Recorder) -> None:
        await server.next(HEADERS)
        data = body(pb.PushReply(refused=[pb.Refused(why="x" * 16_000)]))
        padding = 200
        server.write(
            frame(DATA, 0, STREAM, data), frame(DATA, PADDED, STREAM, bytes((padding,)) + data + bytes(padding))
        )
        back = struct.pack(">L", 2 * len(data) + padding + 1)
        assert await server.frame() == (WINDOW_UPDATE, 0, 0, back)
        assert await server.frame() == (WINDOW_UPDATE, 0, STREAM, back)

    run(scenario)


def test_pings_are_answered_and_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "KEEPALIVE_SECONDS", 0.05)
    monkeypatch.setattr(keepalive, "PING_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(http2_stream, "PING_TIMEOUT_SECONDS", 0.2)

    async def scenario(server: Server, stream: Http2Stream, handler: Recorder) -> None:
        server.write(frame(PING, 0, 0, b"somebody"))
        assert await server.next(PING) == (ACK, b"somebody")
        for _ in range(3):
            flags, what = await server.next(PING)
            assert flags == 0
            server.write(frame(PING, ACK, 0, what))
        assert not handler.closed
        # A host that went silent.
        assert "ping" in await handler.end()

    run(scenario)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (frame(HEADERS, END_HEADERS | END_STREAM, STREAM, b"\x88\x00\x0bgrpc-status\x0214"), "grpc-status 14"),
        (frame(HEADERS, END_HEADERS | END_STREAM, STREAM, b"\x88\x00\x0bgrpc-status\x010"), "ended the stream"),
        (frame(HEADERS, END_HEADERS, STREAM, b"\x48\x03503"), "HTTP status 503"),
        (frame(HEADERS, END_HEADERS, STREAM, b"\x48\x82\x64\x02"), "HTTP status 302"),  # in Huffman's code
        (frame(HEADERS, END_HEADERS, STREAM, b"\x8d"), "HTTP status 404"),
        (frame(HEADERS, END_HEADERS, STREAM, b"\x00\x01a\x01b"), "not HTTP status 200"),
        (frame(HEADERS, END_HEADERS | END_STREAM, STREAM, b"\x8e\x00\x0cgrpc-message\x03why"), "HTTP status 500: why"),
        (frame(HEADERS, END_HEADERS | END_STREAM, STREAM, b"\x00\x0cgrpc-message\x0bno%20leader"), "no leader"),
        (
            frame(HEADERS, END_STREAM | PADDED, STREAM, b"\x02\x3f\xe1\x1f\x40\x0cgrpc-me\0\0")
            + frame(CONTINUATION, END_HEADERS, STREAM, b"ssage\x03why"),
            "why",
        ),
        (frame(HEADERS, END_HEADERS | END_STREAM, STREAM, b"\x00\x0cgrpc-message\x83\x01\x02\x03"), "not HTTP/2"),
        (frame(RST_STREAM, 0, STREAM, struct.pack(">L", 2)), "ended the stream: RST_STREAM code 2"),
        (frame(RST_STREAM, 0, STREAM), "not HTTP/2"),
        (frame(GOAWAY, 0, 0, struct.pack(">LL", 0, 0)), "GOAWAY code 0"),
        (frame(GOAWAY, 0, 0, struct.pack(">LL", 2**31 - 1, 11) + b"too_many_pings"), "too_many_pings"),
        (frame(SETTINGS, 0, 0, struct.pack(">HL", MAX_FRAME_SIZE, 16383)), "not HTTP/2"),
        (frame(SETTINGS, 0, 0, struct.pack(">HL", MAX_FRAME_SIZE, 1 << 24)), "not HTTP/2"),
        (frame(SETTINGS, 0, 0, struct.pack(">HL", INITIAL_WINDOW_SIZE, 1 << 31)), "not HTTP/2"),
        (frame(DATA, 0, STREAM, b"\0\xff\xff\xff\xff"), "a message of 4294967295 bytes"),
        (frame(DATA, 0, STREAM, b"\0\xff") + frame(DATA, 0, STREAM, b"\xff\xff\xff"), "a message of 4294967295 bytes"),
        (frame(HEADERS, 0, STREAM, b"\x88") + 5 * frame(CONTINUATION, 0, STREAM, bytes(16384)), "headers of more than"),
        (frame(HEADERS, END_HEADERS, STREAM, b"\x00\x7f" + b"\xff" * 9 + b"\x01"), "not HTTP/2: headers"),
        (frame(HEADERS, END_HEADERS, STREAM, b"\x88\x00\x0bgrpc"), "not HTTP/2: headers"),
        (frame(DATA, END_STREAM, STREAM), "ended the stream"),
        (frame(DATA, 0, STREAM, b"\1\0\0\0\0"), "compressed"),
        (frame(DATA, 0, STREAM, b"\0\0\0\0\1\xff"), "PushReply"),
        (frame(DATA, PADDED, STREAM), "not HTTP/2"),
        (frame(WINDOW_UPDATE, 0, 0, b"x"), "not HTTP/2"),
        (frame(HEADERS, END_HEADERS | END_STREAM, STREAM, b"\x00\x7f\xff"), "not HTTP/2"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not HTTP/2"),
        (b"\x15\x03\x01\x00\x02\x02\x46" + bytes(9), "not HTTP/2"),
    ],
)
def test_whatever_ends_it_is_told(frames: bytes, why: str) -> None:
    async def scenario(server: Server, stream: Http2Stream, handler: Recorder) -> None:
        server.write(frames, frame(DATA, 0, STREAM, body(reply(9))))
        assert why in await handler.end()
        assert not handler.messages, "nothing comes after the end"
        stream.send(push(1))
        stream.pull(lambda: push(2))
        assert stream.pending == 0

    run(scenario)


def test_a_lost_connection_ends_it() -> None:
    async def scenario(server: Server, stream: Http2Stream, handler: Recorder) -> None:
        server.writer.transport.abort()
        await handler.end()

    run(scenario)


def test_what_is_not_of_this_stream_is_passed_over() -> None:
    async def scenario(server: Server, stream: Http2Stream, handler: Recorder) -> None:
        server.write(
            frame(DATA, END_STREAM, STREAM + 2, body(reply(3))),
            frame(RST_STREAM, 0, STREAM + 2, bytes(4)),
            frame(HEADERS, END_HEADERS | END_STREAM, STREAM + 2, b"\x8d"),
            update(STREAM + 2, 1 << 20),
            frame(GOAWAY, 0, 0, struct.pack(">LL", 2**31 - 1, 0)),  # it will end, but serves what there is
            frame(GOAWAY, 0, 0, struct.pack(">LL", STREAM, 0)),
            frame(HEADERS, END_HEADERS, STREAM, b"\x88"),
            frame(DATA, 0, STREAM, body(reply(1))),
        )
        await handler.until(lambda: handler.messages)
        assert handler.numbers == [1]
        assert not handler.closed
        stream.send(push(1, size=100_000))
        seen = 0
        while seen < 65535:
            seen += len((await server.next(DATA))[1])
        server.write(update(0, 1 << 20), frame(PING, 0, 0, b"as far: "))
        while (found := await server.frame())[0] != PING:
            assert found[0] != DATA

    run(scenario)


def test_handlers_may_send_and_close_from_within() -> None:
    async def scenario(server: Server, stream: Http2Stream, handler: Recorder) -> None:
        def react(message: Any) -> None:
            number = message.hello.registration
            stream.send(push(number))
            if number == 2:
                stream.close("enough")

        handler._react = react
        server.write(frame(DATA, 0, STREAM, b"".join(body(reply(number)) for number in range(1, 5))))
        assert [(await server.message()).hello.registration for _ in range(2)] == [1, 2]
        assert await handler.end() == "enough"
        assert handler.numbers == [1, 2], "what was read together with it is dropped"

    run(scenario)


@pytest.mark.parametrize("split", [False, True])
def test_nothing_is_read_after_a_close(split: bool) -> None:
    async def scenario(server: Server, stream: Http2Stream, handler: Recorder) -> None:
        handler._react = lambda _: stream.close("enough")
        data = b"".join(body(reply(number)) for number in range(3))
        frames = [frame(DATA, 0, STREAM, data[:3]), frame(DATA, 0, STREAM, data[3:])] if split else []
        server.write(*frames or [frame(DATA, 0, STREAM, body(reply(number))) for number in range(3)])
        assert await handler.end() == "enough"
        assert handler.numbers == [0]

    run(scenario)


@pytest.mark.parametrize("fails", [False, True])
def test_who_is_asked_for_a_message_may_close(fails: bool) -> None:
    async def scenario(server: Server, stream: Http2Stream, handler: Recorder) -> None:
        def give() -> Any:
            if fails:
                raise ValueError("no message")
            stream.close("enough")
            return push(1)

        await server.next(HEADERS)
        stream.pull(give)
        assert await handler.end() == ("no message" if fails else "enough")
        assert (await server.frame())[0] == RST_STREAM

    run(scenario)
