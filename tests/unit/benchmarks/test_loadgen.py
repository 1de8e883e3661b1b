"""The load generator against a server that the test plays by hand over a socket pair."""

from __future__ import annotations

import random
import ssl
import struct
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from socket import socket

import pytest

from benchmarks import client
from benchmarks.figures import latencies
from benchmarks.loadgen import Engine, LoadError
from benchmarks.workloads import CERTIFICATE, tls_flags

Pair = Callable[[], tuple[socket, socket]]

OK = struct.pack(">II", 6, 0) + b"OK"
HEARTBEAT = struct.pack(">II", 15, 0) + b"_heartbeat_"
TICK = 0.002


def message(number: int, body: bytes = b"body", attempts: int = 1) -> bytes:
    return struct.pack(">IIqH", 30 + len(body), 2, 7, attempts) + b"%016x" % number + body


def fin(number: int) -> bytes:
    return b"FIN %016x\n" % number


def read(sock: socket) -> bytes:
    """All that is waiting."""
    data = b""
    while True:
        try:
            piece = sock.recv(1 << 20)
        except BlockingIOError:
            return data
        if not piece:
            return data
        data += piece


def publisher(engine: Engine, pair: Pair, *, window: int = 3, units: int = 5, batch: int = 1) -> tuple[socket, bytes]:
    ours, theirs = pair()
    unit = client.pub("t", b"body")
    engine.add_publisher(ours, unit * units, len(unit), window=window, unit_messages=batch)
    return theirs, unit


# ---------------------------------------------------------------------------------------------- publishing


def test_nothing_is_published_before_it_is_asked_for(engine: Engine, pair: Pair) -> None:
    server, _ = publisher(engine, pair)
    engine.run(TICK)
    assert read(server) == b""


def test_the_window_bounds_what_is_unanswered(engine: Engine, pair: Pair) -> None:
    server, unit = publisher(engine, pair, window=3)
    engine.publish()
    engine.run(TICK)
    assert read(server) == unit * 3
    assert engine.outstanding == 3
    server.send(OK * 2)
    engine.run(TICK)
    assert read(server) == unit * 2
    assert engine.acked == 2


def test_answers_cut_anywhere_count_once(engine: Engine, pair: Pair) -> None:
    server, unit = publisher(engine, pair, window=4)
    engine.publish()
    for byte in OK * 3:
        engine.run(TICK)
        server.send(bytes([byte]))
    engine.run(TICK, acked=3)
    assert engine.acked == 3
    assert read(server) == unit * 7


def test_a_limit_is_shared_and_reached(engine: Engine, pair: Pair) -> None:
    first, unit = publisher(engine, pair, window=10)
    second, _ = publisher(engine, pair, window=10)
    engine.publish(5)
    engine.run(TICK)
    assert sorted((read(first), read(second))) == [unit * 2, unit * 3]
    first.send(OK * 2)
    second.send(OK * 3)
    spent = engine.run(5.0, acked=4)
    assert spent < 1.0, "a run ends when its total is reached"


def test_a_batch_counts_as_its_messages(engine: Engine, pair: Pair) -> None:
    server, _ = publisher(engine, pair, batch=200)
    engine.publish(1)
    engine.run(TICK)
    assert engine.outstanding == 200
    server.send(OK)
    engine.run(1.0, acked=200)
    assert (engine.acked, engine.outstanding) == (200, 0)


def test_stop_finishes_the_unit_that_was_begun(engine: Engine, pair: Pair) -> None:
    ours, server = pair()
    unit = client.pub("t", bytes(3_000_000))
    engine.add_publisher(ours, unit, len(unit), window=5)
    engine.publish()
    engine.run(TICK)
    engine.stop()
    received = b""
    while len(received) < len(unit) and (piece := read(server)):
        received += piece
        engine.run(TICK)
    assert received + read(server) == unit
    assert engine.outstanding == 1


def test_a_heartbeat_is_answered_between_commands(engine: Engine, pair: Pair) -> None:
    server, unit = publisher(engine, pair, window=1)
    server.send(HEARTBEAT)
    engine.run(TICK)
    engine.publish()
    engine.run(TICK)
    assert read(server) == b"NOP\n" + unit


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (OK * 9, "no V2 frame"),
        (struct.pack(">II", 18, 1) + b"E_BAD_TOPIC no", "E_BAD_TOPIC no"),
        (b"HTTP/1.1 400 Bad Request\r\n", "no V2 frame"),
        (struct.pack(">II", 3, 0), "no V2 frame"),
        (struct.pack(">II", 6, 9) + b"OK", "no V2 frame"),
        (message(1), "no V2 frame"),
    ],
    ids=["more answers than commands", "error", "HTTP", "short size", "unknown type", "a message"],
)
def test_a_wrong_answer_ends_the_run(engine: Engine, pair: Pair, answer: bytes, said: str) -> None:
    server, _ = publisher(engine, pair)
    engine.publish()
    server.send(answer)
    with pytest.raises(LoadError, match=said):
        engine.run(1.0)


def test_a_closed_connection_ends_the_run(engine: Engine, pair: Pair) -> None:
    server, _ = publisher(engine, pair)
    server.close()
    with pytest.raises(LoadError, match="closed"):
        engine.run(1.0)


# ---------------------------------------------------------------------------------------------- consuming


def test_every_message_is_finished_whatever_the_cuts(engine: Engine, pair: Pair) -> None:
    ours, server = pair()
    engine.add_consumer(ours, read_bytes=4096)
    engine.expect(b"body")
    rng = random.Random(1)
    data = b"".join(message(n) for n in range(200))
    answers = b""
    while data:
        size = rng.choice((1, 7, 40, 3000))
        server.send(data[:size])
        data = data[size:]
        engine.run(TICK / 10)
        answers += read(server)
    engine.run(1.0, finished=200)
    assert answers + read(server) == b"".join(fin(n) for n in range(200))
    assert (engine.received, engine.corrupt, engine.redelivered) == (200, 0, 0)
    assert engine.ids_dense()


def test_a_frame_larger_than_the_buffer(engine: Engine, pair: Pair) -> None:
    ours, server = pair()
    engine.add_consumer(ours, read_bytes=4096)
    body = random.Random(2).randbytes(100_000)
    engine.expect(body)
    data = message(1) + message(2, body) + message(3, body)
    while data:
        try:
            data = data[server.send(data) :]
        except BlockingIOError:
            pass
        engine.run(TICK / 10)
    engine.run(1.0, finished=3)
    assert (engine.received, engine.corrupt) == (3, 1), "only the small one differs"


def test_fins_in_pieces_are_the_same_bytes(engine: Engine, pair: Pair) -> None:
    ours, server = pair()
    engine.add_consumer(ours, fins_per_send=1)
    server.send(message(5) + message(6))
    engine.run(1.0, finished=2)
    assert read(server) == fin(5) + fin(6)


def test_every_nth_message_is_requeued_once(engine: Engine, pair: Pair) -> None:
    ours, server = pair()
    engine.add_consumer(ours, req_every=2, req_delay_ms=250)
    server.send(message(1) + message(2))
    engine.run(1.0, received=2)
    assert read(server) == fin(1) + b"REQ %016x 250\n" % 2
    server.send(message(3) + message(2, attempts=2))
    engine.run(1.0, received=4)
    assert read(server) == fin(3) + fin(2)
    assert (engine.requeued, engine.finished, engine.redelivered) == (1, 3, 1)


def test_a_holding_consumer_answers_nothing(engine: Engine, pair: Pair) -> None:
    ours, server = pair()
    engine.add_consumer(ours, holds=True)
    server.send(message(1))
    engine.run(1.0, received=1)
    assert read(server) == b""


def test_ready_and_heartbeats_of_a_consumer(engine: Engine, pair: Pair) -> None:
    ours, server = pair()
    engine.add_consumer(ours)
    engine.ready(25)
    server.send(HEARTBEAT)
    engine.run(TICK)
    assert read(server) == b"RDY 25\nNOP\n"


def test_an_altered_body_and_a_refused_fin_are_counted(engine: Engine, pair: Pair) -> None:
    ours, server = pair()
    engine.add_consumer(ours)
    engine.expect(b"body")
    server.send(message(1, b"bodx") + message(2, b"body!") + struct.pack(">II", 20, 1) + b"E_FIN_FAILED FIN")
    engine.run(1.0, received=2)
    assert (engine.corrupt, engine.refused) == (2, 1)


@pytest.mark.parametrize(
    ("ids", "copies", "dense"),
    [
        ([0xFFFFFFFF0 + n for n in range(40)], 1, True),
        ([3, 1, 0, 2], 1, True),
        ([1, 2, 1, 2, 3, 3], 2, True),
        ([1, 2, 4], 1, False),
        ([0, 1, 1, 3], 1, False),  # one lost, another twice: the same count
        ([0, 2, 2, 2, 4, 5, 5, 7, 7, 9], 1, False),
        ([1, 1, 1, 2, 3, 3], 2, False),
        ([0, 3, 3, 3, 3, 0, 6, 6, 6, 3], 1, False),
        ([], 1, False),
    ],
)
def test_dense_ids(engine: Engine, pair: Pair, ids: list[int], copies: int, dense: bool) -> None:
    ours, server = pair()
    engine.add_consumer(ours)
    server.send(b"".join(message(n) for n in ids))
    engine.run(TICK, received=len(ids))
    assert engine.ids_dense(copies) is dense


# ---------------------------------------------------------------------------------------------- fixed rate


def test_latency_counts_from_the_intended_time(engine: Engine, pair: Pair) -> None:
    """A server that answers nothing for 60 ms at 1,000/s has delayed sixty messages, not one.

    A generator that waits for its answer, or that stamps the time at which it came to send, would report one slow
    message among fast ones; here the latencies fall evenly from 60 ms on.
    """
    ours, server = pair()
    unit = client.pub("t", bytes(16))
    engine.add_paced(ours, unit, stamp_at=len(unit) - 16, per_second=1000)
    engine.pace(record_for=10.0)
    engine.run(0.06)
    sent = engine.paced
    server.send(OK * sent)
    engine.stop()
    engine.run(1.0, acked=sent)
    values = list(engine.ack_ns())
    assert len(values) == sent >= 50
    assert all(earlier > later for earlier, later in pairwise(values))
    figures = latencies("ack", values)
    assert 20_000 < figures["ack_p50_us"] < 45_000
    assert figures["ack_p99_us"] > 50_000


def test_a_paced_command_carries_its_intended_time(engine: Engine, pair: Pair) -> None:
    ours, server = pair()
    unit = client.pub("t", bytes(8) + b"rest")
    engine.add_paced(ours, unit, stamp_at=len(unit) - 12, per_second=2000)
    engine.pace(record_for=10.0)
    engine.run(0.01)
    data = read(server)
    assert len(data) == engine.paced * len(unit)
    stamps = [struct.unpack(">q", data[at - 12 : at - 4])[0] for at in range(len(unit), len(data) + 1, len(unit))]
    assert {later - earlier for earlier, later in pairwise(stamps)} == {500_000}
    assert len(engine.late_ns()) == engine.paced


def test_delivery_is_measured_from_the_stamp(engine: Engine, pair: Pair) -> None:
    publishing, publish_end = pair()
    consuming, consume_end = pair()
    unit = client.pub("t", bytes(8) + b"rest")
    engine.add_paced(publishing, unit, stamp_at=len(unit) - 12, per_second=1000)
    engine.add_consumer(consuming)
    engine.expect(bytes(8) + b"rest", stamped=True)
    engine.pace(record_for=10.0)
    engine.run(0.02)
    engine.stop()
    commands = read(publish_end)
    bodies = [commands[at - 12 : at] for at in range(len(unit), len(commands) + 1, len(unit))]
    consume_end.send(b"".join(message(n, body) for n, body in enumerate(bodies)))
    engine.run(1.0, received=len(bodies))
    values = list(engine.delivery_ns())
    assert len(values) == engine.paced
    assert values == sorted(values, reverse=True)
    assert engine.corrupt == 0


def test_only_the_recorded_stretch_is_kept(engine: Engine, pair: Pair) -> None:
    ours, server = pair()
    unit = client.pub("t", bytes(8))
    engine.add_paced(ours, unit, stamp_at=len(unit) - 8, per_second=1000)
    engine.pace(record_after=0.01, record_for=0.01)
    engine.run(0.03)
    server.send(OK * engine.paced)
    engine.run(1.0, acked=engine.paced)
    assert 9 <= len(engine.ack_ns()) <= 10 < engine.paced


# ---------------------------------------------------------------------------------------------- misuse


def test_arguments_are_checked(engine: Engine, pair: Pair) -> None:
    ours, _ = pair()
    refusals: list[Callable[[], None]] = [
        lambda: engine.add_publisher(ours, b"12345", 2, window=1),
        lambda: engine.add_publisher(ours, b"", 1, window=1),
        lambda: engine.add_publisher(ours, b"12", 2, window=0),
        lambda: engine.add_paced(ours, bytes(8), stamp_at=1, per_second=1),
        lambda: engine.add_paced(ours, bytes(8), stamp_at=0, per_second=0),
        lambda: engine.add_consumer(ours, fins_per_send=-1),
        lambda: engine.expect(b"short", stamped=True),
    ]
    for refused in refusals:
        with pytest.raises(ValueError):
            refused()


def test_a_closed_engine_refuses(engine: Engine, pair: Pair) -> None:
    engine.close()
    engine.close()
    with pytest.raises(ValueError):
        engine.run(1.0)
    with pytest.raises(ValueError):
        engine.add_consumer(pair()[0])


# ---------------------------------------------------------------------------------------------- TLS


def test_tls_carries_the_same_bytes(engine: Engine, pair: Pair, tmp_path: Path) -> None:
    """Published through TLS: more than a record and more than the socket holds; delivered back: many frames."""
    try:
        tls_flags(tmp_path)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    ours, theirs = pair()
    theirs.setblocking(True)
    unit = client.pub("t", random.Random(3).randbytes(100_000))
    answer = OK * 10
    heard = bytearray()

    def serve() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate, key = (str(tmp_path / name) for name in CERTIFICATE)
        context.load_cert_chain(certificate, key)
        with context.wrap_socket(theirs, server_side=True) as inside:
            while len(heard) < 10 * len(unit):
                heard.extend(inside.recv(1 << 16))
            for at in range(0, len(answer), 7):
                inside.send(answer[at : at + 7])
            inside.recv(1)

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    engine.add_publisher(context.wrap_socket(ours), unit * 2, len(unit), window=10)
    engine.publish(10)
    engine.run(10.0, acked=10)
    engine.close()
    server.join(5.0)
    assert bytes(heard) == unit * 10
    assert engine.acked == 10
