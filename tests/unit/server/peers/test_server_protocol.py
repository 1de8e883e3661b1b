"""HTTP/2 at the peer port as RFC 9113 has it: what is taken, refused or ignored, and which code an error has."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers.api import PeerStream
from nsqha.server.peers.http2 import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    frame,
)
from tests.unit.server.peer_rig import Acceptor, Recorder, push, reply
from tests.unit.server.server_stream_rig import GRPC, OPENING, STREAM, Caller, body, run


@pytest.mark.parametrize(
    ("fields", "method"), [((("content-type", "text/html"),), "POST"), ((("te", "trailers"),), "POST"), (GRPC, "GET")]
)
def test_what_is_not_grpc_is_refused(fields: Any, method: str) -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request(*fields, method=method))
        told = await caller.fields()
        assert (told["grpc-status"], told["grpc-message"]) == ("3", "this is for gRPC only")
        assert told[":status"] == ("405" if method == "GET" else "415")
        assert not acceptor.accepted

    run(scenario)


def test_a_larger_window_is_used_after_it_is_acknowledged() -> None:
    """gRPC's client ends a stream with more bytes than its acknowledged settings let through."""

    def greet(stream: PeerStream) -> Recorder:
        stream.send(pb.PushReply(refused=[pb.Refused(why="x" * 100_000)]))
        return Recorder()

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, frame(WINDOW_UPDATE, 0, 0, struct.pack(">L", 1 << 20)), caller.request())
        seen = 0
        while seen < 65535:
            seen += len((await caller.next(DATA))[2])
        caller.write(frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 1 << 20)))
        assert (await caller.frame())[:2] == (SETTINGS, ACK)
        assert (await caller.frame())[0] == DATA

    run(scenario, greet)


def test_other_streams_are_refused() -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        block = caller.request()[9:]
        other = frame(HEADERS, END_HEADERS | END_STREAM, STREAM + 2, b"\x83")
        caller.write(OPENING, frame(HEADERS, END_HEADERS, STREAM, block), other)
        caller.write(frame(DATA, 0, STREAM, body(push(5))))
        assert (await caller.next(RST_STREAM))[1:] == (STREAM + 2, struct.pack(">L", REFUSED_STREAM))
        assert await caller.messages(1) == [5]

    run(scenario)


def test_bytes_of_a_refused_stream_are_given_back_to_the_connection() -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request(), frame(HEADERS, END_HEADERS, STREAM + 2, b"\x83"))
        await caller.next(WINDOW_UPDATE)
        caller.write(frame(DATA, 0, STREAM + 2, bytes(1000)), frame(RST_STREAM, 0, STREAM + 2, bytes(4)))
        assert (await caller.next(WINDOW_UPDATE))[1:] == (0, struct.pack(">L", 1000))
        caller.write(frame(WINDOW_UPDATE, 0, STREAM + 2, struct.pack(">L", 1)), frame(DATA, 0, STREAM, body(push(5))))
        assert await caller.messages(1) == [5]

    run(scenario)


@pytest.mark.parametrize("first", [3, 7, (1 << 31) - 1])
def test_a_client_may_call_its_first_stream_what_it_likes(first: int) -> None:
    """grpc-java begins with 3."""

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        block = caller.request()[9:]
        caller.write(OPENING, frame(HEADERS, END_HEADERS, first, block), frame(DATA, 0, first, body(push(5))))
        _, stream, data = await caller.next(DATA)
        assert (stream, data) == (first, body(reply(5)))
        caller.write(frame(DATA, END_STREAM, first))
        assert (await caller.next(HEADERS))[:2] == (END_HEADERS | END_STREAM, first)
        assert (await caller.next(GOAWAY))[2][:8] == struct.pack(">LL", first, 0)

    run(scenario)


def test_padding_priority_and_what_is_unknown_are_passed_over() -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        padded, message = 0x8 | 0x20, body(push(5))
        block = bytes([3]) + bytes(5) + caller.request()[9:] + bytes(3)
        caller.write(OPENING, frame(2, 0, STREAM, bytes(5)), frame(HEADERS, END_HEADERS | padded, STREAM, block))
        caller.write(frame(DATA, 0x8, STREAM, bytes([4]) + message + bytes(4)), frame(0xEE, 0xFF, STREAM, b"what?"))
        caller.write(frame(2, 0, STREAM + 8, bytes(5)), frame(SETTINGS, 0, 0, struct.pack(">HL", 0xEEEE, 1)))
        assert await caller.messages(1) == [5]

    run(scenario)


NUMBER_0, NUMBER_MAX = struct.pack(">L", 0), struct.pack(">L", (1 << 31) - 1)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (frame(PING, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
        (frame(PING, 0, STREAM, bytes(8)), PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
        (frame(SETTINGS, ACK, 0, bytes(6)), FRAME_SIZE_ERROR),
        (frame(SETTINGS, 0, STREAM), PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 1 << 31)), FLOW_CONTROL_ERROR),
        (frame(SETTINGS, 0, 0, struct.pack(">HL", 5, 16383)), PROTOCOL_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, NUMBER_0), PROTOCOL_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, NUMBER_MAX), FLOW_CONTROL_ERROR),
        (frame(WINDOW_UPDATE, 0, STREAM, NUMBER_MAX), FLOW_CONTROL_ERROR),
        (frame(WINDOW_UPDATE, 0, STREAM + 2, NUMBER_MAX), PROTOCOL_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, bytes(3)), FRAME_SIZE_ERROR),
        (frame(RST_STREAM, 0, STREAM + 2, bytes(4)), PROTOCOL_ERROR),
        (frame(RST_STREAM, 0, STREAM, bytes(3)), FRAME_SIZE_ERROR),
        (frame(DATA, 0, 0), PROTOCOL_ERROR),
        (frame(DATA, 0, STREAM + 2), PROTOCOL_ERROR),
        (frame(DATA, 0x8, STREAM, bytes([9]) + bytes(8)), PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, STREAM + 1, b"\x83"), PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 0, b"\x83"), PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 7, b"\x83") + frame(HEADERS, END_HEADERS, 5, b"\x83"), STREAM_CLOSED),
        (frame(HEADERS, END_HEADERS, 7, b"\xbe"), COMPRESSION_ERROR),
        (frame(HEADERS, 0, 7, b"\x83") + frame(DATA, 0, STREAM), PROTOCOL_ERROR),
        (frame(HEADERS, 0, 7, b"\x83") + frame(CONTINUATION, 0, STREAM), PROTOCOL_ERROR),
        (frame(CONTINUATION, END_HEADERS, STREAM), PROTOCOL_ERROR),
        (frame(5, 0, STREAM, bytes(8)), PROTOCOL_ERROR),
        (frame(2, 0, STREAM, bytes(4)), FRAME_SIZE_ERROR),
        (frame(0xEE, 0, 0, bytes(16385)), FRAME_SIZE_ERROR),
    ],
)
def test_what_breaks_the_protocol_ends_the_connection_by_its_code(frames: bytes, code: int) -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request())
        accepted = await acceptor.next()
        caller.write(frames)
        assert "not HTTP/2" in await accepted.end()
        assert (await caller.next(GOAWAY))[2][:8] == struct.pack(">LL", STREAM, code)

    run(scenario)


def test_settings_have_to_come_first() -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(PREFACE, caller.request())
        assert b"settings have to come first" in (await caller.next(GOAWAY))[2]
        assert not acceptor.accepted

    run(scenario)
