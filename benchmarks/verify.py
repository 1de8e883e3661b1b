"""The verification pass: is what the fast server delivers what was published?

Independent of the load generator on purpose. Several publishers mix PUB and MPUB with bodies of random sizes and cut
their byte streams at random places; consumers on two channels with a small odd window send their FINs cut at random
too. Every body names its publisher and its place, and carries its own checksum:

    [publisher u16][sequence u32][crc32 of the rest u32][random bytes]

Checked: every message once per channel and nothing else; bodies; ids well formed, unique, and the same on both
channels; first attempts; per partition and consumer the order of every publisher (NSQ promises none, so another
daemon's disorder is only counted); nothing left when all is finished.
"""

from __future__ import annotations

import random
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from . import client
from .client import Address
from .figures import Figures
from .place import CHANNEL, TOPIC, Place, WrongResult

PUBLISHERS = 4
CONSUMERS = {f"{CHANNEL}-a": 2, f"{CHANNEL}-b": 1}
RDY = 37
TIMEOUT_S = 60.0  # of the whole pass; a silence of the scale's `patience_s` ends it earlier
HEAD = struct.Struct(">HII")
PARTITION_SHIFT = 50  # of our ids; another daemon's partition is all of its ids' high bits, hence one


@dataclass
class Received:
    """What one consumer connection saw, in its order."""

    channel: str
    messages: list[tuple[int, int]] = field(default_factory=list)  # (publisher, sequence)
    ids: list[bytes] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Until:
    """When the consumers of one channel are done: all is there, or nothing has come for too long."""

    peers: list[Received]
    total: int
    patience_s: float
    done: threading.Event


@dataclass(frozen=True)
class Verify:
    """Publish, consume, compare."""

    seed: int = 20251121

    def __call__(self, place: Place) -> Figures:
        rng = random.Random(self.seed)
        per_publisher = place.scale.verified // PUBLISHERS
        streams = [build_stream(rng, number, per_publisher) for number in range(PUBLISHERS)]
        received = [Received(channel) for channel, count in CONSUMERS.items() for _ in range(count)]
        total = per_publisher * PUBLISHERS
        address = place.server.tcp
        # Every consumer subscribes before the first message: a channel made later would start behind it.
        sockets = [client.subscribe(client.open_connection(address), TOPIC, each.channel) for each in received]
        done = {channel: threading.Event() for channel in CONSUMERS}
        works: list[Callable[[], None]] = []
        for sock, each in zip(sockets, received, strict=True):
            peers = [other for other in received if other.channel == each.channel]
            until = Until(peers, total, place.scale.patience_s, done[each.channel])
            works.append(_bound(_consume, sock, each, until, random.Random(rng.random())))
        for stream, answers in streams:
            works.append(_bound(_publish, address, stream, answers, random.Random(rng.random())))
        begun = time.perf_counter()
        try:
            faults = _run_all(works)
        finally:
            for sock in sockets:
                sock.close()
        out_of_order = sum(disorder(each) for each in received)
        faults += compare(received, per_publisher)
        if place.server.subject.ours and out_of_order:
            faults.append(f"{out_of_order} messages overtook an earlier one of their publisher")
        faults += [f"{channel} still holds messages" for channel in CONSUMERS if _holds_any(address, channel)]
        if faults:
            raise WrongResult("; ".join(faults[:5]))
        return {
            "verified": float(total * len(CONSUMERS)),
            "out_of_order": float(out_of_order),
            "verify_s": time.perf_counter() - begun,
        }


def build_stream(rng: random.Random, publisher: int, count: int) -> tuple[bytes, int]:
    """The commands of one publisher as one byte string, and how many answers they ask for."""
    commands: list[bytes] = []
    sequence = 0
    while sequence < count:
        batch = min(count - sequence, 1 if rng.random() < 0.8 else rng.randint(1, 60))
        bodies = [make_body(rng, publisher, sequence + n) for n in range(batch)]
        commands.append(client.pub(TOPIC, bodies[0]) if batch == 1 else client.mpub(TOPIC, bodies))
        sequence += batch
    return b"".join(commands), len(commands)


def make_body(rng: random.Random, publisher: int, sequence: int) -> bytes:
    """Mostly small, now and then larger than any read buffer."""
    size = rng.choice((0, 1, rng.randint(2, 300), rng.randint(2, 300), rng.randint(300, 3000)))
    if rng.random() < 0.002:
        size = rng.randint(50_000, 300_000)
    rest = rng.randbytes(size)
    return HEAD.pack(publisher, sequence, zlib.crc32(rest)) + rest


def parse_body(body: bytes) -> tuple[int, int] | None:
    """(publisher, sequence), or None if it is not what was published."""
    if len(body) < HEAD.size:
        return None
    publisher, sequence, crc = HEAD.unpack_from(body)
    return (publisher, sequence) if zlib.crc32(body[HEAD.size :]) == crc else None


def compare(received: list[Received], per_publisher: int) -> list[str]:
    """What is wrong with what the consumers saw."""
    faults = [fault for each in received for fault in each.faults]
    expected = {(publisher, n) for publisher in range(PUBLISHERS) for n in range(per_publisher)}
    id_of: dict[str, dict[tuple[int, int], bytes]] = {}
    for channel in CONSUMERS:
        ours = [each for each in received if each.channel == channel]
        messages = [message for each in ours for message in each.messages]
        ids = [message_id for each in ours for message_id in each.ids]
        id_of[channel] = dict(zip(messages, ids, strict=True))
        if missing := len(expected - set(messages)):
            faults.append(f"{channel}: {missing} messages lost")
        if unknown := len(set(messages) - expected):
            faults.append(f"{channel}: {unknown} messages that nobody published")
        if repeated := len(messages) - len(set(messages)):
            faults.append(f"{channel}: {repeated} messages delivered twice")
        if len(set(ids)) != len(ids):
            faults.append(f"{channel}: {len(ids) - len(set(ids))} ids used twice")
    first, *others = id_of.values()
    if any(other != first for other in others):
        faults.append("a message has different ids on two channels")
    return faults


def disorder(received: Received) -> int:
    """How many messages arrived after a later one of the same publisher and partition."""
    highest: dict[tuple[int, int], int] = {}
    count = 0
    for (publisher, sequence), message_id in zip(received.messages, received.ids, strict=True):
        key = (int(message_id, 16) >> PARTITION_SHIFT, publisher)
        count += sequence < highest.get(key, -1)
        highest[key] = max(sequence, highest.get(key, -1))
    return count


def cuts(rng: random.Random, data: bytes) -> Iterator[bytes]:
    """The same bytes in pieces: single bytes, odd pieces, large ones."""
    at = 0
    while at < len(data):
        size = rng.choice((1, rng.randint(2, 40), rng.randint(100, 5000), rng.randint(10_000, 200_000)))
        yield data[at : at + size]
        at += size


def _publish(address: Address, stream: bytes, answers: int, rng: random.Random) -> None:
    with client.open_connection(address) as sock:
        sock.settimeout(TIMEOUT_S)
        # Answers are read beside the writing, or a server that waits for us to read would wait for ever.
        failures: list[str] = []
        reader = threading.Thread(target=_read_answers, args=(sock, answers, failures), daemon=True)
        reader.start()
        for piece in cuts(rng, stream):
            sock.sendall(piece)
        reader.join(TIMEOUT_S)
        if reader.is_alive() or failures:
            raise WrongResult(failures[0] if failures else "a publisher did not get all its answers")


def _read_answers(sock: socket.socket, answers: int, failures: list[str]) -> None:
    try:
        for _ in range(answers):
            client.expect_ok(sock)
    except (OSError, client.Refused) as error:
        failures.append(f"publishing: {error}")


def _consume(sock: socket.socket, received: Received, until: Until, rng: random.Random) -> None:
    """Read frames and answer FIN until the channel's consumers have everything between them."""
    sock.sendall(b"RDY %d\n" % RDY)
    sock.settimeout(0.1)
    inbox, fins = b"", b""
    heard = time.monotonic()
    give_up = heard + TIMEOUT_S
    while not until.done.is_set() and time.monotonic() < min(give_up, heard + until.patience_s):
        try:
            piece = sock.recv(rng.choice((7, 100, 4096, 1 << 18)))
            if not piece:
                received.faults.append("the server closed a consumer")
                break
            heard = time.monotonic()
        except TimeoutError:
            piece = b""
        frames, inbox = split_frames(inbox + piece)
        for frame in frames:
            fins += take(received, frame)
        # Now and then half a line stays behind for the next send.
        keep = min(len(fins), rng.randint(0, 20)) if rng.random() < 0.3 and piece else 0
        now, fins = fins[: len(fins) - keep], fins[len(fins) - keep :]
        for part in cuts(rng, now):
            sock.sendall(part)
        if sum(len(each.messages) for each in until.peers) >= until.total:
            until.done.set()
    sock.sendall(fins)
    # FIN has no answer; NOP and a wait make sure it was read before the socket closes.
    sock.sendall(b"NOP\n")
    time.sleep(0.2)


def split_frames(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """Whole frames as (type, payload) and the bytes left over."""
    frames: list[tuple[int, bytes]] = []
    at = 0
    while len(data) - at >= 8:
        size, kind = struct.unpack_from(">II", data, at)
        if len(data) - at < 4 + size:
            break
        frames.append((kind, data[at + 8 : at + 4 + size]))
        at += 4 + size
    return frames, data[at:]


def take(received: Received, frame: tuple[int, bytes]) -> bytes:
    """Record one frame; the FIN that answers it."""
    kind, payload = frame
    if kind == client.RESPONSE and payload == b"_heartbeat_":
        return b"NOP\n"
    if kind != client.MESSAGE or len(payload) < 26:
        received.faults.append(f"a frame of type {kind}: {payload[:60]!r}")
        return b""
    attempts, message_id = int.from_bytes(payload[8:10]), payload[10:26]
    message = parse_body(payload[26:])
    if not re.fullmatch(rb"[0-9a-f]{16}", message_id):
        received.faults.append(f"id {message_id!r}")
        return b""
    if attempts != 1:
        received.faults.append(f"message {message_id.decode()} came with attempts {attempts}")
    if message is None:
        received.faults.append(f"message {message_id.decode()} has a body that nobody published")
    else:
        received.messages.append(message)
        received.ids.append(message_id)
    return b"FIN " + message_id + b"\n"


def _holds_any(address: Address, channel: str) -> bool:
    """A new consumer gets something although all was finished."""
    with client.subscribe(client.open_connection(address), TOPIC, channel) as sock:
        sock.sendall(b"RDY 100\n")
        sock.settimeout(0.3)
        try:
            return bool(sock.recv(1))
        except TimeoutError:
            return False


def _bound(work: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: work(*arguments)


def _run_all(works: list[Callable[[], None]]) -> list[str]:
    """Run every work in a thread of its own; what went wrong in them."""
    faults: list[str] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, client.Refused, WrongResult) as error:
            faults.append(str(error))

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    return faults
