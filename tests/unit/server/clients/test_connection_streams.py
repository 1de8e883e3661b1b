"""Whatever comes in between, each command of a producer is run once, in order, and answered, to its last byte."""

from __future__ import annotations

import random
import struct

import pytest

from nsqha.wire.compression import new_codec
from tests.unit.server.clients.test_connection import Bench, open_partition, pub

FULL = 1 << 21  # more than the budget of a `Bench`


def mpub(topic: str, bodies: list[bytes]) -> bytes:
    body = struct.pack(">I", len(bodies)) + b"".join(struct.pack(">I", len(each)) + each for each in bodies)
    return b"MPUB %b\n" % topic.encode() + struct.pack(">I", len(body)) + body


class Producer:
    """What a client sends: the bytes, the messages in them, and how many commands are to be answered OK."""

    def __init__(self, rng: random.Random) -> None:
        self.bodies: list[bytes] = []
        self.replies = 0
        self.sent = b""
        self.ends: list[int] = []  # of commands, or of runs of them
        for _ in range(rng.randrange(1, 40)):
            topic, size = rng.choice("ab"), rng.choice((1, 30, 300, 30_000))
            bodies = [rng.randbytes(1) * rng.choice((1, size)) for _ in range(rng.choice((1, 3, 40)))]
            match rng.randrange(6):
                case 0:
                    self.sent += b"NOP\n"
                    continue
                case 1 | 2:
                    self.sent += mpub(topic, bodies)
                    self.replies += 1
                case _:
                    self.sent += b"".join(pub(topic, body) for body in bodies)
                    self.replies += len(bodies)
            self.bodies += bodies
            self.ends.append(len(self.sent))
        last = rng.choice((pub("a", b"cut"), mpub("a", [b"cut", b"off"])))
        self.cut = last[: rng.choice((0, 0, rng.randrange(len(last))))]

    def wire(self, rng: random.Random, codec: str) -> bytes:
        data, parts = self.sent + self.cut, []
        client = new_codec(codec, 6) if codec else None
        while data:
            n = rng.choice((1, 100, 5_000, 100_000, 1 << 20))
            parts.append(client.compress(data[:n]) if client is not None else data[:n])
            data = data[n:]
        return b"".join(parts)


@pytest.mark.parametrize("codec", ["", "deflate", "snappy"])
@pytest.mark.parametrize("seed", range(40))
def test_a_producer_that_ends_its_stream_has_all_its_commands_run_and_answered(seed: int, codec: str) -> None:
    rng = random.Random(seed)
    producer, bench = Producer(rng), Bench()
    partition = bench.partition = open_partition(bench.loop)
    connection, transport, budget = bench.connection, bench.transport, bench.connection.context.budget
    if codec:
        connection.transport.codec = new_codec(codec, 6)
    wire = producer.wire(rng, codec)
    held, ended, by_command = 0, False, rng.random() < 0.5
    for _ in range(100_000):
        if transport.closing:
            break
        chance = rng.random()
        if wire and transport.reading and chance < 0.5:
            n = rng.choice((1, 50, 1_000, 60_000))
            if by_command and not codec:
                sent = len(producer.sent) + len(producer.cut) - len(wire)
                n = next((end - sent for end in producer.ends if end > sent), n)
            connection.data_received(wire[:n])
            wire = wire[n:]
        elif not wire and not ended and chance < 0.3:
            ended = True  # a TLS layer tells it although reading is paused
            if not connection.eof_received():
                transport.close()
        if rng.random() < 0.2:
            budget.give(held)
            held = 0 if held else FULL
            budget.take(held)
        if rng.random() < 0.1 and not transport.closing:
            transport.peer_reads = not transport.peer_reads
            if transport.peer_reads:
                transport.take()
        if partition.waiting and rng.random() < 0.4:
            partition.waiting.pop(rng.randrange(len(partition.waiting))).stored()
        bench.loop.turn()
    assert transport.closing and partition.bodies == producer.bodies
    answers = [frame for frame in bench.frames if frame != b"_heartbeat_"]
    assert answers[: producer.replies] == [b"OK"] * producer.replies
    assert len(answers) <= producer.replies + bool(producer.cut), "the one that was cut off fails, if it was begun"
