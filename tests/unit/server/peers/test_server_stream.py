"""A stream at the end that accepts it: callers that are slow, silent, or say too much."""

from __future__ import annotations

import asyncio
import gc
import struct
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers import calls as peer_grpc
from nsqha.server.peers import frame_budget, http2_stream, keepalive, server_stream
from nsqha.server.peers import stream as stream_module
from nsqha.server.peers.api import PeerStream
from nsqha.server.peers.calls import GrpcPeerServer
from nsqha.server.peers.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Http2Error,
    frame,
)
from nsqha.server.runtime.budget import SharedTurns
from tests.unit.server.peer_rig import SERVICES, Acceptor, Recorder, push, reply
from tests.unit.server.server_stream_rig import OPENING, STREAM, Caller, body, echo, run


@pytest.mark.parametrize("step", [1, 3, 24, 25, 1000])
def test_it_is_understood_in_any_pieces(step: int) -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        block = caller.request()[9:]
        said = b"".join(
            (
                PREFACE,
                frame(SETTINGS, 0, 0),
                frame(HEADERS, 0, STREAM, block[:7]),
                frame(CONTINUATION, END_HEADERS, STREAM, block[7:]),
                frame(DATA, 0, STREAM, body(push(1)) + body(push(2))[:4]),
                frame(PING, 0, 0, b"somebody"),
                frame(DATA, 0, STREAM, body(push(2))[4:]),
            )
        )
        for at in range(0, len(said), step):
            caller.write(said[at : at + step])
            await asyncio.sleep(0)
            await caller.writer.drain()
        assert await caller.messages(2) == [1, 2]
        caller.write(frame(PING, 0, 0, b"and next"))
        assert (await caller.next(PING))[::2] == (ACK, b"and next")

    run(scenario)


@pytest.mark.parametrize("said", [b"", b"nonsense", PREFACE, OPENING + frame(DATA, 0, STREAM, b""), OPENING])
def test_the_collector_has_nothing_to_do_with_who_is_gone(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers that come and go would keep it busy."""
    made: list[weakref.ref[http2_stream.Http2Stream]] = []
    connection = GrpcPeerServer.connection

    def noted(self: GrpcPeerServer, address: str) -> http2_stream.Http2Stream:
        stream = connection(self, address)
        made.append(weakref.ref(stream))
        return stream

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(said)
        await caller.next(WINDOW_UPDATE)
        caller.writer.close()
        for _ in range(500):
            await asyncio.sleep(0.01)
            if made[0]() is None:
                break
        assert made[0]() is None

    monkeypatch.setattr(GrpcPeerServer, "connection", noted)
    gc.collect()
    gc.disable()
    try:
        run(scenario)
    finally:
        gc.enable()


def test_what_it_says_first() -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        assert (await caller.frame())[:3] == (SETTINGS, 0, 0)
        assert (await caller.frame())[:3] == (WINDOW_UPDATE, 0, 0)
        assert not acceptor.accepted
        caller.write(PREFACE, frame(SETTINGS, 0, 0), caller.request())
        assert (await caller.frame())[:2] == (SETTINGS, ACK)
        peer = {"nsqha-peer": "level=1-1 build=0.1.0"}
        assert await caller.fields() == {":status": "200", "content-type": "application/grpc", **peer}

    run(scenario)


def test_whoever_serves_it_may_speak_before_anything_came() -> None:
    def greet(stream: PeerStream) -> Recorder:
        stream.send(reply(1))
        stream.pull(lambda: reply(2))
        return Recorder()

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request())
        assert ":status" in await caller.fields(), "headers come before messages"
        assert await caller.messages(2) == [1, 2]

    run(scenario, greet)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not HTTP/2"),
        (PREFACE[:-1] + b"x", "not HTTP/2"),
        (OPENING + frame(DATA, 0, STREAM, body(push(1))), "data before headers"),
        (PREFACE + frame(0xEE, 0, 0, bytes(16385)), "too large"),
        (OPENING + frame(HEADERS, END_HEADERS, STREAM, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), "headers"),
        (OPENING + frame(HEADERS, END_HEADERS, STREAM, b"\xbe"), "headers"),
        (OPENING + frame(HEADERS, 0, STREAM) + 2 * frame(CONTINUATION, 0, STREAM, bytes(9000)), "more than 16384"),
        (PREFACE + frame(SETTINGS, 0, 0, b"x"), "not HTTP/2"),
        (OPENING + frame(PING, 0, 0, bytes(16384)), "a ping of 16384 bytes"),
        (OPENING + 2000 * frame(PING, 0, 0, bytes(8)), "does not read"),
        (PREFACE + 2000 * frame(SETTINGS, 0, 0), "does not read"),
    ],
)
def test_who_does_not_get_as_far_as_a_stream_is_hung_up(said: bytes, why: str) -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(said)
        assert why in (await caller.next(GOAWAY))[2].decode("utf-8", "replace")
        await caller.reader.read()
        assert not acceptor.accepted

    run(scenario)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (frame(DATA, END_STREAM, STREAM), "ended the stream"),
        (frame(RST_STREAM, 0, STREAM, struct.pack(">L", 8)), "RST_STREAM code 8"),
        (frame(HEADERS, END_HEADERS, STREAM, b"\x83"), "headers again"),
        (frame(DATA, 0, STREAM, b"\0\xff\xff\xff\xff"), "a message of 4294967295 bytes"),
        (frame(DATA, 0, STREAM, b"\1\0\0\0\0"), "compressed"),
        (frame(DATA, 0, STREAM, b"\0\0\0\0\1\xff"), "PushMessage"),
        (frame(GOAWAY, 0, 0, struct.pack(">LL", 0, 2)), "GOAWAY code 2"),
        (frame(PING, 0, 0, bytes(7)), "a ping of 7 bytes"),
    ],
)
def test_whatever_ends_it_is_told_to_both(frames: bytes, why: str) -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request(), frames, frame(DATA, 0, STREAM, body(push(9))))
        accepted = await acceptor.next()
        assert why in await accepted.end()
        assert not accepted.messages, "nothing comes after the end"
        await caller.fields()
        flags, _, block = await caller.next(HEADERS)
        assert flags & END_STREAM
        assert why in caller.headers.read(block)["grpc-message"]

    run(scenario)


NOTHING = [
    frame(PING, 0, 0, bytes(8)),
    frame(SETTINGS, 0, 0),
    frame(DATA, 0, STREAM),
    frame(DATA, PADDED, STREAM, bytes([3, 0, 0, 0])),
    frame(0xEE, 0, 0, b"unknown"),
    40 * frame(WINDOW_UPDATE, 0, 0, struct.pack(">L", 1)),
]


@pytest.fixture
def no_refill(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may come at once is all: on a busy machine frames that are sent at once may take seconds to be read."""
    monkeypatch.setattr(frame_budget, "COST_PER_SECOND", 0)


def test_frames_that_carry_nothing_may_come_at_a_rate() -> None:
    now = 100.0
    budget = frame_budget.FrameBudget(SimpleNamespace(time=lambda: now))  # type: ignore[arg-type]
    budget.charge(frame_budget.COST_MAX)
    for _ in range(3):
        now += 0.5
        budget.charge(frame_budget.COST_PER_SECOND // 2)
    with pytest.raises(Http2Error, match="carry nothing"):
        budget.charge(1)


@pytest.mark.usefixtures("no_refill")
@pytest.mark.parametrize("nothing", NOTHING, ids=["ping", "settings", "empty", "padding", "unknown", "credit"])
def test_frames_that_carry_nothing_end_the_connection(nothing: bytes) -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request())
        accepted = await acceptor.next()
        caller.write(1000 * nothing, frame(DATA, 0, STREAM, body(push(9))))
        assert await caller.messages(1) == [9], "so many may come"
        caller.write(1000 * nothing)
        assert "carry nothing" in await accepted.end()

    run(scenario)


@pytest.mark.usefixtures("no_refill")
@pytest.mark.parametrize("fields", [1, 300])
def test_refused_streams_end_the_connection(fields: int) -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request())
        accepted = await acceptor.next()
        block = bytes([0x83]) * fields  # :method: POST, of the static table
        for stream in range(STREAM + 2, STREAM + 2 + 2 * 1300, 2):
            caller.write(frame(HEADERS, END_HEADERS, stream, block))
        assert "carry nothing" in await accepted.end()

    run(scenario)


def test_trailers_arrive_though_more_is_on_its_way() -> None:
    """A connection that is closed with something unread is reset, and what was sent may be lost with it."""

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request(), frame(DATA, 0, STREAM, body(push(1))))
        for _ in range(200):
            caller.write(frame(DATA, 0, STREAM, body(push(2, size=16_000))))
        await (await acceptor.next()).end()
        await asyncio.sleep(0.05)
        await caller.fields()
        assert (await caller.fields())["grpc-message"] == "enough"

    def make(stream: PeerStream) -> Recorder:
        return Recorder(lambda _: stream.close("enough"))

    run(scenario, make)


def test_a_caller_that_wants_no_more_streams_keeps_this_one() -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request(), frame(GOAWAY, 0, 0, bytes(8)))
        caller.write(frame(DATA, 0, STREAM | 1 << 31, body(push(4))))  # the highest bit has no meaning
        assert await caller.messages(1) == [4]

    run(scenario)


def test_what_is_said_before_a_method_is_named_is_bounded() -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, 12 * frame(0xEE, 0, 0, bytes(8000)))  # frames that nobody knows
        assert b"no stream within" in (await caller.next(GOAWAY))[2]

    run(scenario)


def test_what_is_said_about_what_came_leaves_right_behind_it() -> None:
    order: list[str] = []

    def give() -> Any:
        order.append("asked")
        return reply(7)

    def make(stream: PeerStream) -> Recorder:
        def react(message: Any) -> None:
            asyncio.get_running_loop().call_soon(order.append, "turn")
            stream.pull(give)

        return Recorder(react)

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request())
        await caller.fields()
        caller.write(frame(DATA, 0, STREAM, body(push(1))), frame(DATA, 0, STREAM, body(push(2))))
        assert await caller.messages(1) == [7]
        assert order[0] == "asked" and order.count("asked") == 1, "once for all that came, and a turn earlier"

    run(scenario, make)


def test_who_reads_nothing_from_the_start_on_is_asked_for_nothing() -> None:
    """The socket was full before there was a stream."""
    asked = 0

    def give() -> Any:
        nonlocal asked
        asked += 1
        accepted.pull(give)
        return reply(1)

    def make(stream: PeerStream) -> Recorder:
        nonlocal accepted
        accepted = stream
        stream.pause_writing()  # type: ignore[attr-defined]
        stream.pull(give)
        return Recorder()

    accepted: Any = None

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request())
        await caller.fields()
        await asyncio.sleep(0.05)
        assert asked == 0
        accepted.resume_writing()
        await caller.messages(3)

    run(scenario, make)


def test_a_connection_that_comes_about_after_the_end_is_closed() -> None:
    """All streams were ended while it shook hands."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        peers = GrpcPeerServer(SERVICES)
        ends = []

        def late() -> Any:
            ends.append(peers.connection("somebody"))
            peers.close()
            return ends[0]

        server = await loop.create_server(late, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        async with asyncio.timeout(5):
            assert await reader.read() == b""
            await ends[0].messages.over
        writer.close()
        server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_the_end_is_told_though_its_reason_is_no_text() -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request())
        stream = (await acceptor.next()).stream
        assert stream is not None
        stream.close("cannot open /data/\udcff.log")
        await caller.fields()
        assert (await caller.fields())["grpc-message"] == "cannot open /data/?.log"

    run(scenario)


def test_who_says_nothing_is_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_stream, "OPENING_SECONDS", 0.1)

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(PREFACE, frame(SETTINGS, 0, 0))
        assert b"no stream within" in (await caller.next(GOAWAY))[2]
        await caller.reader.read()

    run(scenario)


def test_who_is_served_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_stream, "OPENING_SECONDS", 0.05)

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request(), frame(DATA, 0, STREAM, body(push(2))))
        accepted = await acceptor.next()
        await asyncio.sleep(0.15)
        assert not accepted.closed
        caller.write(frame(DATA, 0, STREAM, body(push(3))))
        assert await caller.messages(2) == [2, 3]

    run(scenario)


def test_a_stream_without_a_greeting_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(server_stream, "OPENING_SECONDS", 0.05)

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request(), frame(DATA, 0, STREAM, body(push(2))[:-1]))
        accepted = await acceptor.next()
        assert "no greeting within" in await accepted.end()
        assert not accepted.messages

    run(scenario)
    assert caplog.text.count("ended before it began") == 1


def test_a_greeting_is_small_and_what_follows_is_not() -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request(), frame(DATA, 0, STREAM, b"\0" + struct.pack(">L", (64 << 10) + 1)))
        assert "before a greeting" in await (await acceptor.next()).end()

    run(scenario)

    async def large(caller: Caller, acceptor: Acceptor) -> None:
        rest = body(push(2, 100_000))
        caller.write(OPENING, caller.request(), frame(DATA, 0, STREAM, body(push(1))))
        for at in range(0, len(rest), 10_000):
            caller.write(frame(DATA, 0, STREAM, rest[at : at + 10_000]))
        assert await caller.messages(2) == [1, 2]

    run(large)


@pytest.mark.parametrize("whole", [True, False])
def test_others_have_their_turn_while_one_sends_small_messages(whole: bool) -> None:
    """All in one frame, or a frame for each."""
    count = 1000
    turns: list[int] = []

    def make(stream: PeerStream) -> Recorder:
        handler = Recorder(lambda message: took())
        loop = asyncio.get_running_loop()
        handled = 0

        def took() -> None:
            nonlocal handled
            handled += 1
            if handled == 1:
                loop.call_soon(turn)

        def turn() -> None:
            turns.append(handled)
            if handled < count:
                loop.call_soon(turn)

        return handler

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        parts = [body(push(0)) for _ in range(count)]
        *first, last = [b"".join(parts)] if whole else parts
        caller.write(OPENING, caller.request(), *(frame(DATA, 0, STREAM, part) for part in first))
        caller.write(frame(DATA, END_STREAM, STREAM, last))
        accepted = await acceptor.next()
        await accepted.end()
        assert len(accepted.messages) == count, "the end of the stream comes behind them"

    run(scenario, make)
    steps = [after - before for before, after in zip([0, *turns], turns, strict=False)]
    assert max(steps) <= 2 * stream_module.TURN_MESSAGES, steps


def test_others_have_their_turn_while_one_sends_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[int] = []
    rest = frame_budget.ReadTurns.rest
    monkeypatch.setattr(
        frame_budget.ReadTurns, "rest", lambda turns, transport: (rests.append(turns.frames), rest(turns, transport))
    )

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request(), *[frame(PING, 0, 0, bytes(8)) for _ in range(500)])
        for _ in range(500):
            await caller.next(PING)

    run(scenario)
    assert len(rests) >= 500 // frame_budget.TURN_FRAMES


def test_who_has_greeted_does_not_wait_for_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = 0

    class Counting(SharedTurns):
        def later(self, go_on: Callable[[], None]) -> None:
            nonlocal strangers
            strangers += 1
            super().later(go_on)

    monkeypatch.setattr(peer_grpc, "SharedTurns", Counting)
    pings = [frame(PING, 0, 0, bytes(8)) for _ in range(300)]

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request(), *pings)
        for _ in pings:
            await caller.next(PING)
        before = strangers
        assert before >= len(pings) // frame_budget.TURN_FRAMES
        caller.write(frame(DATA, 0, STREAM, body(push(1))))
        assert await caller.messages(1) == [1]
        caller.write(*pings)
        for _ in pings:
            await caller.next(PING)
        assert strangers == before

    run(scenario, echo)


def test_silent_streams_of_one_host_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_grpc, "SILENT_OF_ADDRESS_MAX", 2)

    async def main() -> None:
        peers = GrpcPeerServer(SERVICES)
        acceptor = Acceptor(echo)
        peers.on_stream("Push", acceptor)
        hosts = iter(["a:1", "b:1", "a:2", "a:3", "a:4"])
        server = await asyncio.get_running_loop().create_server(lambda: peers.connection(next(hosts)), "127.0.0.1", 0)
        callers = []
        async with asyncio.timeout(10):
            for number in range(5):
                caller = Caller(*await asyncio.open_connection(*server.sockets[0].getsockname()))
                caller.write(OPENING, caller.request())
                await caller.fields()
                if number == 2:
                    caller.write(frame(DATA, 0, STREAM, body(push(7))))
                    assert await caller.messages(1) == [7]
                callers.append(caller)
            assert "from this host" in await acceptor.accepted[0].end()
            assert not any(each.closed for each in acceptor.accepted[1:]), "of another host, greeted, or newer"
            peers.close()
            for caller in callers:
                await caller.reader.read()
                caller.writer.close()
        server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_connections_that_name_no_method_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_grpc, "UNNAMED_MAX", 2)

    async def main() -> None:
        peers = GrpcPeerServer(SERVICES)
        peers.on_stream("Push", Acceptor())
        server = await asyncio.get_running_loop().create_server(lambda: peers.connection("x"), "127.0.0.1", 0)
        async with asyncio.timeout(10):
            callers = [Caller(*await asyncio.open_connection(*server.sockets[0].getsockname())) for _ in range(2)]
            for caller in callers:
                caller.write(OPENING)
            callers[1].write(callers[1].request())
            await callers[1].fields()
            for _ in range(2):
                callers.append(Caller(*await asyncio.open_connection(*server.sockets[0].getsockname())))
            assert b"too many" in (await callers[0].next(GOAWAY))[2]
            while len(peers._unnamed) != 2:
                await asyncio.sleep(0.01)
            assert len(peers._streams) == 3, "who has named one stays"
            peers.close()
            late = peers.connection("late")
            await late.messages.over
            for caller in callers:
                await caller.reader.read()
                caller.writer.close()
        server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("what", ["close", "headers"])
def test_settings_that_change_for_ever_cost_nothing_later(what: str) -> None:
    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request())
        accepted = await acceptor.next()
        sizes = [frame(SETTINGS, 0, 0, struct.pack(">HL", 1, size)) for size in (0, 4096)]
        caller.write(*sizes * 500)
        assert accepted.stream is not None
        if what == "close":
            caller.write(frame(PING, 0, 0, b"as far: "))
            await caller.next(PING)
            accepted.stream.close("enough")
        else:
            caller.write(frame(HEADERS, END_HEADERS, STREAM, b"\xff" * 16000))
        kind, _, _, payload = await caller.frame()
        while kind != GOAWAY:
            assert len(payload) < 1000
            kind, _, _, payload = await caller.frame()
        assert len(accepted.closed[0]) < 600

    run(scenario)


def test_a_host_that_went_silent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "KEEPALIVE_SECONDS", 0.05)
    monkeypatch.setattr(keepalive, "PING_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(http2_stream, "PING_TIMEOUT_SECONDS", 0.2)

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request())
        for _ in range(3):
            flags, _, what = await caller.next(PING)
            caller.write(frame(PING, ACK, 0, what))
            assert flags == 0
        accepted = await acceptor.next()
        assert not accepted.closed
        assert "ping" in await accepted.end()

    run(scenario)


def test_who_reads_nothing_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "PING_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(http2_stream, "PING_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(server_stream, "PING_TIMEOUT_SECONDS", 0.2)

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        caller.write(PREFACE, frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 1 << 30)))
        caller.write(frame(WINDOW_UPDATE, 0, 0, struct.pack(">L", 1 << 30)), caller.request())
        stream = (await acceptor.next()).stream
        assert stream is not None
        big = pb.PushReply(refused=[pb.Refused(why="x" * (1 << 20))])
        while not stream.pending:
            stream.send(big)
            await asyncio.sleep(0)
        stream.close("enough")
        assert await acceptor.accepted[0].end() == "enough"
        while stream.transport is not None:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)

    run(scenario)


def test_a_stream_that_is_refused_while_it_is_served_is_told_once() -> None:
    def close(stream: PeerStream) -> Recorder:
        stream.close("not today")
        return Recorder()

    async def scenario(caller: Caller, acceptor: Acceptor) -> None:
        caller.write(OPENING, caller.request())
        told = await caller.fields()
        assert (told[":status"], told["grpc-status"], told["grpc-message"]) == ("200", "14", "not today")
        assert await (await acceptor.next()).end() == "not today"

    run(scenario, close)
