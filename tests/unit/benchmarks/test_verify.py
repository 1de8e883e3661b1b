"""The verification pass must notice every way of being wrong."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import client
from benchmarks.verify import (
    CONSUMERS,
    PUBLISHERS,
    Received,
    build_stream,
    compare,
    cuts,
    disorder,
    make_body,
    parse_body,
    split_frames,
    take,
)

PER_PUBLISHER = 3


def perfect() -> list[Received]:
    """What consumers see of a right server: two share a channel, one has the other to itself."""
    received = [Received(channel) for channel, count in CONSUMERS.items() for _ in range(count)]
    number = 0
    for publisher in range(PUBLISHERS):
        for sequence in range(PER_PUBLISHER):
            number += 1
            for channel, count in CONSUMERS.items():
                consumer = [each for each in received if each.channel == channel][number % count]
                consumer.messages.append((publisher, sequence))
                consumer.ids.append(b"%016x" % number)
    return received


def test_a_right_server_has_no_faults() -> None:
    assert compare(perfect(), PER_PUBLISHER) == []
    assert [disorder(each) for each in perfect()] == [0, 0, 0]


def lose(received: list[Received]) -> None:
    received[0].messages.pop()
    received[0].ids.pop()


def repeat(received: list[Received]) -> None:
    received[0].messages.append(received[1].messages[0])
    received[0].ids.append(b"%016x" % 99)


def invent(received: list[Received]) -> None:
    received[0].messages.append((0, 77))
    received[0].ids.append(b"%016x" % 99)


def reuse_id(received: list[Received]) -> None:
    received[2].ids[0] = received[2].ids[1]


def renumber_one_channel(received: list[Received]) -> None:
    received[2].ids[0] = b"%016x" % 99


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lose, "1 messages lost"),
        (repeat, "delivered twice"),
        (invent, "nobody published"),
        (reuse_id, "ids used twice"),
        (renumber_one_channel, "different ids"),
    ],
)
def test_every_fault_is_named(wrong: object, said: str) -> None:
    received = perfect()
    wrong(received)  # type: ignore[operator]
    assert any(said in fault for fault in compare(received, PER_PUBLISHER))


def test_order_is_per_partition_and_publisher() -> None:
    received = Received("c", messages=[(1, 5), (2, 1), (1, 4)], ids=[b"%016x" % n for n in (1, 2, 3)])
    assert disorder(received) == 1
    received.ids[2] = b"%016x" % (1 << 50)
    assert disorder(received) == 0, "another partition has an order of its own"


def test_bodies_carry_their_checksum() -> None:
    body = make_body(random.Random(1), 3, 9)
    assert parse_body(body) == (3, 9)
    long = next(each for each in iter(lambda: make_body(random.Random(2), 3, 9), None) if len(each) > 10)
    assert parse_body(long[:-1] + bytes([long[-1] ^ 1])) is None
    assert parse_body(b"short") is None


def frame(number: bytes, body: bytes, attempts: int = 1) -> tuple[int, bytes]:
    return client.MESSAGE, bytes(8) + attempts.to_bytes(2) + number + body


def test_what_a_consumer_notices_at_once() -> None:
    body = make_body(random.Random(1), 0, 1)
    good = Received("c")
    assert take(good, frame(b"0" * 16, body)) == b"FIN " + b"0" * 16 + b"\n"
    assert (good.messages, good.faults) == ([(0, 1)], [])
    assert take(good, (client.RESPONSE, b"_heartbeat_")) == b"NOP\n"
    for bad in (
        frame(b"0" * 16, body, attempts=2),
        frame(b"G" * 16, body),
        frame(b"0" * 16, b"x" * 20),
        (client.ERROR, b"E_INVALID"),
        (client.MESSAGE, b"short"),
    ):
        each = Received("c")
        take(each, bad)
        assert each.faults, bad


@given(st.lists(st.binary(max_size=50), max_size=10), st.integers(0, 1000))
def test_frames_survive_any_cut(payloads: list[bytes], seed: int) -> None:
    data = b"".join((4 + len(p)).to_bytes(4) + (2).to_bytes(4) + p for p in payloads)
    pieces = list(cuts(random.Random(seed), data))
    assert b"".join(pieces) == data
    left, found = b"", []
    for piece in pieces:
        frames, left = split_frames(left + piece)
        found += frames
    assert (found, left) == ([(2, p) for p in payloads], b"")


def test_a_stream_holds_what_it_says() -> None:
    stream, answers = build_stream(random.Random(1), 2, 500)
    assert stream.count(b"PUB ") >= answers  # also inside MPUB
    assert answers < 500
