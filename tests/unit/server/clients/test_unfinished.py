"""What unfinished commands of all connections hold together is bounded, before and after AUTH, compressed or not."""

from __future__ import annotations

import gc
import struct
import weakref
from typing import Any

import pytest

from nsqha.server.clients.connection import Connection
from nsqha.server.clients.unfinished import BODY_SECONDS, SMALL_BYTES, ReadingBudget
from nsqha.wire.compression import PIECE_BYTES_MAX, new_codec
from tests.unit.server.clients.test_connection import Bench, FakeTransport, pub

BYTES_MAX = 1 << 20
READ = 256_000  # bytes that the loop reads at once
LARGE = 900_000
MPUB_BODY_MAX = 5 << 20


class Room:
    """Connections of one node, with room for little."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        first = Bench()
        self.loop, self.partition = first.loop, first.partition
        self.context, self.connections = first.connection.context, first.connections
        self.budget = self.context.reading = ReadingBudget(self.loop, bytes_max, MPUB_BODY_MAX)  # type: ignore[misc]

    def client(self, codec: str = "", heartbeats: bool = True) -> Client:
        return Client(self, codec, heartbeats)


class Client:
    def __init__(self, room: Room, codec: str, heartbeats: bool) -> None:
        self.room = room
        self.transport = FakeTransport()
        self.connection = Connection(room.context, room.connections)
        self.transport.protocol = self.connection
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self._unread = self.connection.session.unread
        self.sent = b""
        self.send(b"  V2")
        self.encode: Any = bytes
        words = [] if heartbeats else [b'"heartbeat_interval":-1']
        if codec:
            words += [b'"%b":true' % codec.encode(), b'"feature_negotiation":true']
        if words:
            body = b"{%b}" % b",".join(words)
            self.send(b"IDENTIFY\n" + struct.pack(">I", len(body)) + body)
        if codec:
            self.encode = new_codec(codec, 6).compress

    def send(self, data: bytes) -> None:
        assert self.transport.reading, "the socket is not read"
        self.connection.data_received(data)
        self.room.loop.turn()

    def begin(self, command: bytes) -> bytes:
        """Send as much as the node reads at once, as one read; what it did not read."""
        data = self.encode(command)
        while data and self.transport.reading and not self.transport.closing:
            self.send(data[:READ])
            data = data[READ:]
        return data

    @property
    def held(self) -> int:
        return self._unread.have

    @property
    def answer(self) -> bytes:
        return bytes(self.transport.written)


def unfinished(size: int = LARGE) -> bytes:
    return pub("t", b"x" * size)[:-1]


def mpub_unfinished(messages: int, announced: int | None = None) -> bytes:
    parts = (struct.pack(">I", 100_000) + b"x" * 100_000) * messages
    body = struct.pack(">I", messages) + parts
    return (b"MPUB t\n" + struct.pack(">I", len(body) if announced is None else announced) + body)[:-1]


@pytest.mark.parametrize("codec", ["", "snappy", "deflate"])
@pytest.mark.parametrize("command", [unfinished(), mpub_unfinished(9), mpub_unfinished(30, announced=5)])
def test_what_all_connections_hold_together_is_bounded(codec: str, command: bytes):
    room = Room()
    clients = [room.client(codec) for _ in range(40)]
    for client in clients:
        client.begin(command)
        room.loop.turn()
    held = sum(client.held for client in clients)
    # The room and one command that was let in last; what waits; no large one beside these.
    assert held <= 2 * BYTES_MAX + len(command)
    assert room.budget.waiting_bytes <= BYTES_MAX
    refused = [client for client in clients if client.transport.closing]
    assert codec or all(b"too many large commands" in client.answer for client in refused)
    assert refused and all(client.held == 0 for client in refused)
    for client in clients:
        client.connection.connection_lost(None)
    assert room.budget.reserved.used == room.budget.waiting_bytes == 0


def test_a_large_command_waits_for_room_in_turn_and_is_read_on():
    room = Room()
    first, second, third, fourth = (room.client() for _ in range(4))
    whole = pub("t", b"x" * LARGE)
    assert not first.begin(whole[:-1]) and not second.begin(whole[:-1])
    rest = [each.begin(whole) for each in (third, fourth)]
    assert all(rest) and not third.transport.reading and third.held <= READ
    first.send(whole[-1:])
    assert third.transport.reading and not fourth.transport.reading
    assert not third.begin(rest[0])
    second.send(whole[-1:])
    room.loop.turn()
    assert not fourth.begin(rest[1])
    room.loop.turn()
    assert len(room.partition.waiting) == 4
    assert room.budget.reserved.used == room.budget.waiting_bytes == 0


def test_small_commands_do_not_wait_for_large_ones():
    room = Room()
    for _ in range(3):
        room.client().begin(unfinished())
    client = room.client()
    client.send(pub("t", b"x" * (SMALL_BYTES - 100))[:-1])
    client.send(b"x" + pub("t") * 5)
    assert room.partition.waiting and client.transport.reading


def test_a_large_body_has_to_be_complete_in_time():
    room = Room()
    client = room.client(heartbeats=False)
    client.begin(unfinished())
    room.loop.pass_time(BODY_SECONDS - 1)
    assert not client.transport.closing
    room.loop.pass_time(2)
    assert b"PUB failed to read message body: it was not complete within 60 s" in client.answer
    assert client.transport.closing and room.budget.reserved.used == client.held == 0


def test_each_command_has_its_own_time():
    room = Room()
    client = room.client(heartbeats=False)
    for _ in range(4):
        client.begin(unfinished())
        room.loop.pass_time(BODY_SECONDS / 2)
        client.send(b"x")
    assert len(room.partition.waiting) == 4 and not client.transport.closing
    assert room.budget.reserved.used == 0


def test_who_leaves_while_it_waits_gives_up_its_place():
    room = Room()
    holders = [room.client() for _ in range(2)]
    for holder in holders:
        holder.begin(unfinished())
    client = room.client()
    client.begin(unfinished())
    assert room.budget.waiting_bytes == READ
    client.connection.connection_lost(None)
    assert room.budget.waiting_bytes == 0
    holders[0].connection.connection_lost(None)
    room.loop.turn()
    assert room.budget.reserved.used == pytest.approx(LARGE, abs=100)


def test_an_mpub_that_goes_beyond_its_announced_size_counts_as_the_largest():
    room = Room()
    client = room.client()
    client.begin(mpub_unfinished(9, announced=5))
    assert room.budget.reserved.used == MPUB_BODY_MAX


@pytest.mark.parametrize("codec", ["", "snappy", "deflate"])
def test_a_connection_that_is_lost_holds_nothing_more(codec: str):
    client = Room().client(codec)
    client.begin(unfinished(2 * SMALL_BYTES))
    assert client.held > SMALL_BYTES
    codec_there = client.connection.transport.codec
    gone = weakref.ref(codec_there) if codec_there is not None else lambda: None
    del codec_there
    gc.disable()
    try:
        client.connection.connection_lost(None)
        assert client.held == 0 and gone() is None
    finally:
        gc.enable()


def test_a_bomb_is_taken_piece_by_piece():
    room = Room()
    for _ in range(2):
        room.client().begin(unfinished())
    client = room.client("deflate")
    client.send(client.encode(unfinished(MPUB_BODY_MAX // 5)))
    assert client.held <= PIECE_BYTES_MAX and not client.transport.reading
