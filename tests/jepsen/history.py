"""What happened in a run, as the clients saw it: one event a line, in the order one process observed them.

    ["Publish", 1.204, 17, 3, 5, 2, "orders", "MPUB", 4400, [2839474, 99382], 0.0]

All clients of a run share one loop and one clock, so the order of the lines is the order of the events. A message is
named by (process, counter): the process that published it and that process's running number. An outcome is `ok` (the
broker said so), `fail` (the broker said "not stored") or `unknown` (anything else, the connection's end included).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

Result = Literal["ok", "fail", "unknown"]


class Event(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """`t` is seconds since the run began; `gen` counts the lives of the broker."""


class Run(Event, frozen=True, array_like=True, tag=True):
    """What the run promises to check: a FIN older than `window` seconds of uptime is never forgotten."""

    seed: int
    sync: str
    window: float


class Started(Event, frozen=True, array_like=True, tag=True):
    t: float
    gen: int


class Ready(Event, frozen=True, array_like=True, tag=True):
    t: float
    gen: int


class Killed(Event, frozen=True, array_like=True, tag=True):
    t: float
    gen: int
    moment: str


class Publish(Event, frozen=True, array_like=True, tag=True):
    """About to be sent on `conn` (0: HTTP): messages (process, first), (process, first + 1), .."""

    t: float
    op: int
    gen: int
    conn: int
    process: int
    topic: str
    command: str
    first: int
    crcs: list[int]
    delay: float


class Outcome(Event, frozen=True, array_like=True, tag=True):
    t: float
    op: int
    result: Result


class ChannelMade(Event, frozen=True, array_like=True, tag=True):
    """A SUB (on `conn`) or an HTTP create (`conn` 0), sent at `t0`, answered at `t`."""

    t0: float
    t: float
    gen: int
    conn: int
    topic: str
    channel: str
    result: Result


class Paused(Event, frozen=True, array_like=True, tag=True):
    t0: float
    t: float
    topic: str
    channel: str
    paused: bool
    result: Result


class Deleted(Event, frozen=True, array_like=True, tag=True):
    """A topic's deletion."""

    t0: float
    t: float
    topic: str
    result: Result


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """As it came out; a body nobody could have written has process -1."""

    process: int
    counter: int
    crc: int
    id: str
    attempts: int
    timestamp: int


class Received(Event, frozen=True, array_like=True, tag=True):
    t: float
    conn: int
    messages: list[Message]


class Answered(Event, frozen=True, array_like=True, tag=True):
    """FIN, REQ (with its delay) or TOUCH was sent for these ids."""

    t: float
    conn: int
    command: str
    ids: list[str]
    delay: float


class Refused(Event, frozen=True, array_like=True, tag=True):
    """The broker answered FIN, REQ or TOUCH with an error."""

    t: float
    conn: int
    command: str
    id: str


class Drained(Event, frozen=True, array_like=True, tag=True):
    """The broker reports the durable channels of the topic as empty: everything owed must have come out."""

    t: float
    topic: str


AnyEvent = (
    Run
    | Started
    | Ready
    | Killed
    | Publish
    | Outcome
    | ChannelMade
    | Paused
    | Deleted
    | Received
    | Answered
    | Refused
    | Drained
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def write(events: Iterable[AnyEvent], path: Path) -> None:
    with path.open("wb") as file:
        for event in events:
            file.write(_encoder.encode(event) + b"\n")


def read(path: Path) -> Iterator[AnyEvent]:
    with path.open("rb") as file:
        for line in file:
            yield _decoder.decode(line)


# ---- bodies: `process-counter crc padding`, so that a body says itself whether it is whole


def body(process: int, counter: int, padding: bytes) -> bytes:
    name = b"%d-%d " % (process, counter)
    return b"%s%08x %s" % (name, zlib.crc32(padding, zlib.crc32(name)), padding)


def parse(data: bytes) -> tuple[int, int]:
    """(process, counter) of a body; (-1, -1) if it does not hold together."""
    name, _, rest = data.partition(b" ")
    crc, _, padding = rest.partition(b" ")
    process, _, counter = name.partition(b"-")
    if not (process.isdigit() and counter.isdigit()) or crc != b"%08x" % zlib.crc32(padding, zlib.crc32(name + b" ")):
        return -1, -1
    return int(process), int(counter)
