"""One client's connection: order of replies, what it costs us when the client is slow, silent or strange."""

from __future__ import annotations

import asyncio
import gc
import struct
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha import hot
from nsqha.clock import ManualClock, read
from nsqha.errors import Unavailable
from nsqha.options import TlsRequired
from nsqha.server.clients.connection import LARGE_READ_BYTES, UNREAD_REPLIES_BYTES_MAX, Connection, Connections
from nsqha.server.clients.transport import CLOSE_SECONDS_MAX, WRITE_BUFFER_HIGH
from nsqha.server.clients.unfinished import ReadingBudget
from nsqha.server.partition.consumer_acks import ConsumerAcks
from nsqha.server.runtime.budget import FRESH_SECONDS, TURN_SECONDS, PublishBudget, SharedTurns
from nsqha.wire import session as session_module
from nsqha.wire.compression import new_codec
from nsqha.wire.limits import ProtocolLimits
from nsqha.wire.session import COMMANDS_AT_ONCE, LINE_BYTES_MAX
from tests.fakes.loop import VirtualLoop
from tests.fakes.partitions import FakePartition
from tests.unit.server.shell_rig import PartitionRig

OK = b"\0\0\0\6\0\0\0\0OK"


class FakeTransport:
    """A socket whose peer takes what was written when the test says so."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.writes = 0  # system calls
        self.unread = 0  # not taken by the peer
        self.peer_reads = True
        self.reading = True
        self.closing = False
        self.aborted = False
        self.protocol: Connection | None = None

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_protocol(self) -> Connection | None:
        return self.protocol

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 5) if name == "peername" else None

    def write(self, data: Any) -> None:
        assert not self.closing, "written after close"
        self.written += data
        self.writes += 1
        if not self.peer_reads:
            before, self.unread = self.unread, self.unread + len(data)
            if before <= self.high < self.unread:
                assert self.protocol is not None
                self.protocol.pause_writing()

    def take(self) -> None:
        """The peer reads everything."""
        self.unread = 0
        assert self.protocol is not None
        self.protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self.unread

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted = True
        assert self.protocol is not None
        self.protocol.connection_lost(None)


def open_partition(loop: VirtualLoop) -> FakePartition:
    """It has a budget of its own, without an end."""
    return FakePartition(loop, PublishBudget(loop, 1 << 40))


class AllTopics:
    """Every topic is there."""

    def __contains__(self, name: object) -> bool:
        return True


def always(publisher: Any) -> Any:
    """A `Publishing` that refuses nothing and has this for the method of its routes."""
    return SimpleNamespace(refusal=lambda: None, routes=SimpleNamespace(publisher=publisher))


class Bench:
    """A connection with a context of nothing but what it asks for."""

    def __init__(self, **context: Any) -> None:
        self.clock = ManualClock()
        self.loop = VirtualLoop(self.clock)
        self.partition = open_partition(self.loop)
        self.exiting = False
        self.connections = Connections(lambda: self.exiting, lambda consumer: None)

        async def subscribe(consumer: Any) -> None:
            raise Unavailable("not here")

        fields: dict[str, Any] = {
            "options": SimpleNamespace(tls_required=TlsRequired.NO, publish_wait_ns=5_000_000_000),
            "limits": ProtocolLimits(),
            "loop": self.loop,
            "clock": self.clock,
            "now": lambda: read(self.clock),
            "auth": None,
            "tokens": None,
            "budget": PublishBudget(self.loop, 1 << 20),  # type: ignore[arg-type]
            "reading": ReadingBudget(self.loop, 64 << 20, 5 << 20),
            "turns": SharedTurns(self.loop),
            "tls_context": None,
            "measures": SimpleNamespace(publish_errors=Counter()),
            "publishing": always(lambda topic, source, number: self.partition),
            "topics": AllTopics(),
            "subscriptions": SimpleNamespace(subscribe=subscribe, unsubscribe=lambda consumer: None),
        }
        self.connection = Connection(SimpleNamespace(**fields | context), self.connections)  # type: ignore[arg-type]
        self.transport = FakeTransport()
        self.transport.protocol = self.connection
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self.send(b"  V2")

    def send(self, data: bytes) -> None:
        assert self.transport.reading, "the socket is not read"
        self.connection.data_received(data)
        self.loop.turn()

    @property
    def frames(self) -> list[bytes]:
        """Data of the frames written."""
        found, data = [], bytes(self.transport.written)
        while data:
            size = int.from_bytes(data[:4], "big")
            found.append(data[8 : 4 + size])
            data = data[4 + size :]
        return found


def pub(topic: str, body: bytes = b"x") -> bytes:
    return b"PUB %b\n" % topic.encode() + struct.pack(">I", len(body)) + body


# ---- order


def test_replies_leave_in_the_order_of_the_commands():
    bench = Bench()
    bench.send(pub("a"))
    bench.send(pub("b"))
    first, second = bench.partition.waiting
    second.stored()
    assert bench.frames == []
    first.stored()
    assert bench.frames == [b"OK", b"OK"]


def test_what_one_batch_answers_leaves_in_one_write():
    rig = PartitionRig(sync="interval")
    bench = Bench(publishing=always(lambda topic, source, number: rig.partition))
    bench.send((b"MPUB t\n" + struct.pack(">III", 9, 1, 1) + b"x") * 5)
    assert bench.frames == []
    rig.turn()
    assert bench.frames == [b"OK"] * 5
    assert bench.transport.writes == 1


def test_nothing_follows_a_failed_publish():
    bench = Bench()
    for topic in "abc":
        bench.send(pub(topic))
    first, second, third = bench.partition.waiting
    third.stored()
    first.stored()
    second.failed("not stored: disk full")
    assert bench.frames == [b"OK", b"E_PUB_FAILED PUB failed not stored: disk full"]
    assert bench.transport.closing


def test_a_line_that_is_too_long_ends_the_connection_after_the_answers():
    bench = Bench()
    bench.send(pub("a") + pub("b") + b"x" * LINE_BYTES_MAX)
    assert not bench.transport.closing
    for publish in bench.partition.waiting:
        publish.stored()
    assert bench.frames == [b"OK", b"OK"]
    assert bench.transport.closing


def test_bytes_that_do_not_decompress_end_the_connection_after_the_answers():
    bench = Bench()
    bench.send(pub("a"))
    bench.connection.transport.codec = new_codec("deflate", 6)
    bench.send(b"\xff" * 100)
    assert not bench.transport.closing
    bench.connection.transport.codec = None  # the answer in clear
    bench.partition.waiting[0].stored()
    assert bench.frames == [b"OK"] and bench.transport.closing


@pytest.mark.parametrize("codec", ["deflate", "snappy"])
def test_all_that_was_sent_compressed_is_run_although_the_client_sends_no_more(codec: str):
    """A producer that has sent its last publish: what it sent is more than is decompressed at once."""
    bench = Bench()
    bench.connection.transport.codec = new_codec(codec, 6)
    client = new_codec(codec, 6)
    bench.send(client.compress(pub("t")))
    bench.connection.context.budget.take(1 << 21)  # publishers wait
    bench.send(client.compress(pub("t", b"x" * 1000) * 1999))
    assert len(bench.partition.waiting) == 2 and not bench.transport.reading
    assert bench.connection.eof_received(), "answers are owed"
    bench.connection.context.budget.give(1 << 21)
    bench.loop.turn()
    for publish in bench.partition.waiting:
        publish.stored()
    assert bench.frames == [b"OK"] * 2000 and bench.transport.closing


def test_a_line_that_is_too_long_ends_the_connection_at_once_if_nothing_is_owed():
    bench = Bench()
    bench.send(b"x" * LINE_BYTES_MAX)
    assert bench.transport.closing and bench.frames == []


def test_after_a_close_no_command_is_run():
    bench = Bench()
    bench.partition.publish = lambda frames, reply, delay_ms: reply.failed("not stored: gone")  # type: ignore[method-assign]
    later: list[str] = []
    bench.connection.context.publishing.routes.publisher = (  # type: ignore[method-assign]
        lambda topic, source, number: later.append(topic) or bench.partition  # type: ignore[func-returns-value]
    )
    bench.send(pub("a") + pub("b") + pub("c"))
    assert later == ["a"] and len(bench.frames) == 1


def test_a_stop_answers_what_was_run_and_runs_nothing_more():
    bench = Bench()
    bench.send(pub("a"))
    bench.exiting = True
    bench.connection.read_no_more()
    assert not bench.transport.reading
    bench.connection.data_received(pub("b"))  # the loop had read it already
    assert len(bench.partition.waiting) == 1
    bench.partition.waiting[0].stored()
    bench.connection.close()
    assert bench.frames == [b"OK"]


def test_who_has_to_authorize_does_not_publish_before():
    bench = Bench(auth=object())
    bench.send(pub("t"))
    assert not bench.partition.waiting
    assert bench.frames == [b"E_AUTH_FIRST AUTH required before PUB"] and bench.transport.closing


@pytest.mark.parametrize("again", [False, True], ids=["first PUBs", "PUBs to the same topic"])
def test_a_large_read_is_the_last_one_before_other_clients_are_read(again: bool):
    """The loop reads a socket up to 32 times: megabytes of small PUBs, and no other client meanwhile."""
    bench = Bench()
    if again:
        bench.send(pub("t"))
    bench.connection.data_received(pub("t") * (LARGE_READ_BYTES // len(pub("t")) + 1))
    assert bench.partition.waiting and not bench.transport.reading
    bench.loop.run_ready()
    assert bench.transport.reading
    bench.connection.data_received(pub("t") * 100)
    assert bench.transport.reading, "small reads cost little"


@pytest.mark.parametrize("codec", ["", "deflate", "snappy"])
def test_a_client_that_sends_endless_commands_leaves_others_their_turn(codec: str, monkeypatch: pytest.MonkeyPatch):
    """Eleven kilobytes of deflate are ten megabytes of NOP: the loop stood still for half a minute."""
    ran = 0

    def nop(group: Any, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        nonlocal ran
        ran += 1
        return pos

    monkeypatch.setitem(session_module._COMMANDS, b"NOP", (0, nop))
    bench = Bench()
    wire = b"NOP\n" * 60_000 + pub("t")
    if codec:
        bench.connection.transport.codec = new_codec(codec, 6)
        wire = new_codec(codec, 6).compress(wire * 5)
    bench.connection.data_received(wire)
    assert 0 < ran < 2_000 and not bench.transport.reading
    most = 0
    while not bench.transport.reading:
        before = ran
        bench.loop.run_ready()
        most = max(most, ran - before)
    times = 5 if codec else 1
    assert most < 2_000 and ran == 60_000 * times and len(bench.partition.waiting) == times


def test_clients_that_send_a_few_commands_each_share_a_turn(monkeypatch: pytest.MonkeyPatch):
    """None of them has as much as a part of a turn; all together would take a hundred times that."""
    now, ran = 0.0, 0

    def nop(group: Any, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        nonlocal now, ran
        now += 1e-5
        ran += 1
        return pos

    monkeypatch.setitem(session_module._COMMANDS, b"NOP", (0, nop))
    loop = VirtualLoop(ManualClock())
    turns = SharedTurns(loop, lambda: now)
    benches = [Bench(turns=turns, loop=loop) for _ in range(100)]
    few = COMMANDS_AT_ONCE - 1
    steps, done = [], 0
    for bench in benches:
        bench.connection.data_received(b"NOP\n" * few + pub("t"))
    while done < len(benches) * few:
        steps.append(ran - done)
        done = ran
        loop.run_ready()
    most = (FRESH_SECONDS + TURN_SECONDS) / 1e-5 + 2 * few
    assert max(steps) <= most, steps
    assert all(bench.transport.reading and len(bench.partition.waiting) == 1 for bench in benches)


def test_publishes_wait_for_no_stranger(monkeypatch: pytest.MonkeyPatch):
    loop = VirtualLoop(ManualClock())
    turns = SharedTurns(loop, lambda: 0.0)
    bench = Bench(turns=turns, loop=loop)
    turns.charge(FRESH_SECONDS)
    bench.send(pub("t"))
    bench.send(pub("t") * 3)
    assert len(bench.partition.waiting) == 2 and bench.transport.reading


def test_what_it_takes_to_decompress_is_taken_from_strangers_and_waits_for_none():
    now, loop = 0.0, VirtualLoop(ManualClock())
    turns = SharedTurns(loop, lambda: now)
    bench = Bench(turns=turns, loop=loop)

    def decompress(data: bytes) -> bytes:
        nonlocal now
        now += FRESH_SECONDS
        return data

    bench.connection.transport.codec = SimpleNamespace(decompress=decompress, pending=False)  # type: ignore[assignment]
    bench.send(pub("t"))
    assert not turns.room
    bench.send(pub("t"))
    assert len(bench.partition.waiting) == 2 and bench.transport.reading


def test_fins_of_what_is_not_in_flight_leave_others_their_turn():
    """One read of the socket holds twelve thousand, each of which is looked at and answered by itself."""
    bench = Bench()
    nobody = SimpleNamespace(subscriptions={}, remote=SimpleNamespace(fin_run=lambda data, pos, end: pos))
    bench.connection.session.consuming.acks = ConsumerAcks(
        nobody,  # type: ignore[arg-type]
        bench.connection.reply,
        lambda: read(bench.clock),
    )
    bench.connection.data_received(b"FIN 0123456789abcdef\n" * 1_000 + pub("t"))
    steps, before = [len(bench.frames)], len(bench.frames)
    while not bench.transport.reading:
        bench.loop.run_ready()
        steps.append(len(bench.frames) - before)
        before = len(bench.frames)
    assert sum(steps) == 1_000 and max(steps) <= COMMANDS_AT_ONCE, steps
    assert len(bench.partition.waiting) == 1, "what comes behind them is run"


# ---- a stalled disk


def test_who_connects_while_there_is_no_room_publishes_nothing():
    """A producer whose publish timed out comes back, and again: each time it would be one more in memory."""
    bench = Bench()
    budget = bench.connection.context.budget
    budget.take(1 << 21)
    bench.send(pub("t", b"one") + pub("t", b"two") + b"NOP\n")
    assert not bench.partition.waiting and not bench.transport.reading
    budget.give(1 << 21)
    bench.loop.turn()
    for publish in bench.partition.waiting:
        publish.stored()
    assert bench.transport.reading and bench.frames == [b"OK", b"OK"]


def test_who_finds_no_room_for_long_is_refused_and_leaves_nothing_behind():
    bench = Bench()
    budget = bench.connection.context.budget
    budget.take(1 << 21)
    bench.send(pub("t"))
    bench.loop.pass_time(5.1)
    assert bench.frames == [b"E_PUB_FAILED PUB failed not stored: too many publishes are waiting for the disk"]
    assert bench.transport.closing and not budget._waiting
    other = Bench(budget=budget)
    other.send(pub("t"))
    other.connection.connection_lost(None)
    other.loop.turn()
    assert not budget._waiting


# ---- a client that does not read


def test_a_client_that_does_not_read_its_replies_is_not_read():
    async def grant(consumer: Any) -> None:
        pass

    bench = Bench(subscriptions=SimpleNamespace(subscribe=grant))
    bench.send(b"SUB t c\n")
    bench.transport.peer_reads = False
    error = b"FIN 0123456789abcdef\n"
    while bench.transport.reading:
        bench.send((error + b"NOP\n") * 100)
        assert bench.transport.unread < UNREAD_REPLIES_BYTES_MAX + WRITE_BUFFER_HIGH
    before = len(bench.frames)
    bench.transport.take()
    bench.loop.turn()
    assert bench.transport.reading and len(bench.frames) > before  # what it had sent meanwhile is answered


def test_a_client_that_takes_nothing_for_a_whole_interval_is_dropped():
    bench = Bench()
    bench.transport.peer_reads = False
    bench.transport.write(b"x" * (WRITE_BUFFER_HIGH + 1))
    for _ in range(3):
        bench.loop.pass_time(15)
        if bench.transport.reading and not bench.transport.closing:
            bench.send(b"NOP\n")
        bench.loop.pass_time(15)
    assert bench.transport.closing


def test_a_slow_reader_stays():
    bench = Bench()
    bench.transport.peer_reads = False
    bench.transport.write(b"x" * (WRITE_BUFFER_HIGH * 4))
    for _ in range(6):
        bench.loop.pass_time(30)
        bench.transport.unread -= 1000
        bench.send(b"NOP\n")
    assert not bench.transport.closing


def test_a_closed_connection_that_can_not_be_flushed_is_torn_down():
    bench = Bench()
    bench.connection.close()
    assert len(bench.connections) == 1
    bench.loop.pass_time(CLOSE_SECONDS_MAX + 1)
    assert bench.transport.aborted and not bench.connections


# ---- heartbeats


@pytest.mark.parametrize("last_word_at", [0.0, 1.0, 29.0, 31.0])
def test_a_silent_client_is_dropped_after_two_intervals(last_word_at: float):
    bench = Bench()
    bench.loop.pass_time(last_word_at)
    bench.send(b"NOP\n")
    bench.loop.pass_time(59.8)
    assert not bench.transport.closing
    bench.loop.pass_time(0.3)
    assert bench.transport.closing


def test_a_client_that_never_says_the_magic_is_dropped():
    bench = Bench()
    silent = Bench.__new__(Bench)
    silent.__dict__.update(bench.__dict__)
    connection, transport = Connection(bench.connection.context, bench.connections), FakeTransport()
    transport.protocol = connection
    connection.connection_made(transport)  # type: ignore[arg-type]
    bench.loop.pass_time(61)
    assert transport.closing


@pytest.mark.parametrize("compressed", [False, True])
def test_a_command_has_two_intervals_to_come_however_often_a_byte_of_it_comes(compressed: bool):
    bench = Bench()
    encode = bytes
    if compressed:
        body = b'{"snappy":true,"feature_negotiation":true}'
        bench.send(b"IDENTIFY\n" + struct.pack(">I", len(body)) + body)
        codec = new_codec("snappy", 6)
        encode = lambda data: b"".join(codec.chunks(data))  # noqa: E731
    whole = pub("t", b"x" * 50)
    for _ in range(4):  # each one takes half of its time, and the rest of one comes with the first of the next
        bench.send(encode(whole[:30]))
        bench.loop.pass_time(30)
        bench.send(encode(whole[30:] + whole[:30]))
        bench.loop.pass_time(30)
        bench.send(encode(whole[30:]))
    assert len(bench.partition.waiting) == 8 and not bench.transport.closing
    bench.send(encode(whole[:30]))
    for byte in whole[30:35]:
        bench.loop.pass_time(11)
        bench.send(encode(bytes([byte])))
    assert not bench.transport.closing
    bench.loop.pass_time(5.1)
    assert bench.transport.closing


def test_heartbeats_come_every_interval():
    bench = Bench()
    for _ in range(4):
        bench.loop.pass_time(29)
        bench.send(b"NOP\n")
        bench.loop.pass_time(1)
    assert bench.frames == [b"_heartbeat_"] * 4


# ---- waiting for something slow


def test_a_command_that_breaks_ends_the_connection():
    async def broken(consumer: Any) -> None:
        raise RuntimeError("cannot be")

    bench = Bench(subscriptions=SimpleNamespace(subscribe=broken))
    bench.send(b"SUB t c\n")
    assert [frame[:9] for frame in bench.frames] == [b"E_INVALID"], "never without a word"
    assert bench.transport.closing


def test_a_sub_that_is_refused_says_so():
    bench = Bench()
    bench.send(b"SUB t c\n")
    assert bench.frames == [b"E_SUB_FAILED SUB failed not here"]
    assert bench.transport.closing


def test_a_client_that_is_gone_when_its_sub_is_granted_leaves_its_place():
    granted: list[Any] = []
    left: list[Any] = []
    gate: list[asyncio.Future[None]] = []

    async def slow(consumer: Any) -> None:
        gate.append(bench.loop.create_future())
        await gate[0]
        granted.append(consumer)

    bench = Bench(subscriptions=SimpleNamespace(subscribe=slow, unsubscribe=left.append))
    bench.send(b"SUB t c\n")
    bench.connection.close()
    gate[0].set_result(None)
    bench.loop.turn()
    assert left == granted != []
    assert bench.connection.consuming.consumer is None


# ---- the end


def _identify(fields: bytes) -> bytes:
    return b"IDENTIFY\n" + struct.pack(">I", len(fields)) + fields


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize(
    "said",
    [
        b"",
        pub("a") + pub("b") + pub("a"),
        pub("a", b"x" * 100_000)[:-1],
        _identify(b'{"hostname":"h"}') + pub("a"),
        pub("a") + _identify(b"{}"),  # waits for the answer
        _identify(b'{"feature_negotiation":true,"deflate":true}'),
        b"nonsense\n",
    ],
)
def test_the_collector_has_nothing_to_do_with_who_is_gone(said: bytes, answered: bool):
    """A storm of clients would keep it busy."""
    bench = Bench()
    bench.send(said)
    waiting = bench.partition.waiting
    while answered and waiting:
        waiting.pop(0).stored()
    connection, bench.connection, bench.transport.protocol = bench.connection, None, None  # type: ignore[assignment]
    gone = weakref.ref(connection)
    gc.collect()
    gc.disable()
    try:
        connection.eof_received()
        connection.connection_lost(None)
        bench.loop.turn()
        del connection
        while waiting:
            waiting.pop(0).failed(f"{hot.OUTCOME_UNKNOWN}the leader is gone")
        assert gone() is None
        assert gc.collect() == 0
    finally:
        gc.enable()


# ---- tls


def test_a_handshake_that_fails_leaves_no_connection_behind():
    refused: list[str] = []
    log = SimpleNamespace(refused=lambda address, text, *args: refused.append(text % args))
    bench = Bench(limits=ProtocolLimits(tls=True), tls_context=object(), tls_refused=log)

    async def start_tls(*args: Any, **kwargs: Any) -> None:
        raise ConnectionAbortedError("no client hello")

    bench.loop.start_tls = start_tls  # type: ignore[attr-defined]
    bench.transport.abort = lambda: None  # type: ignore[method-assign]  # a loop that tells only its TLS layer
    body = b'{"tls_v1":true,"feature_negotiation":true}'
    bench.send(b"IDENTIFY\n" + struct.pack(">I", len(body)) + body)
    assert not bench.connections
    assert bench.loop.armed == []
    assert refused == ["127.0.0.1:5: TLS handshake failed: the peer did not complete the handshake in time"]
