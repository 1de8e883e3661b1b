"""What happened in a run, as its clients, its faults and its samples saw it: a JSON object a line.

    {"f":"publish","type":"invoke","t":1.204,"op":17,"gen":1,"conn":5,"process":2,"topic":"orders","command":"MPUB",..}
    {"f":"publish","type":"ok","t":1.209,"op":17}
    {"f":"fault","type":"invoke","t":2.5,"op":1,"fault":"N1","what":"n2 isolated","victims":["n2"]}

`f` is what is done, `type` is `invoke` (asked for), `ok` (done), `fail` (certainly not done: "not stored") or `info`
(anything else: the outcome is not known, a connection's end included). What has no outcome has one line of its own:
`recv` is ok, `sample` is info.

All clients of a run share one clock, the kernel's monotonic one, and `t` is seconds since the run began. Lines of
clients are in the order of their events, as these share one loop; faults and samples come from other threads and may
stand a few lines late. A message is named by (process, counter): the process that published it and that process's
running number.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
from msgspec import field

Result = Literal["ok", "fail", "info"]


class Event(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """`t` is seconds since the run began; `gen` counts the lives of the broker."""


class Run(Event, frozen=True):
    """What the run promises to check: a FIN older than `window` seconds of uptime is never forgotten. A `window` of 0
    says that it is a cluster's: another leader may take over at any time, and count attempts anew."""

    seed: int
    sync: str
    window: float
    name: str = ""  # of the schedule


class Started(Event, frozen=True):
    t: float
    gen: int


class Ready(Event, frozen=True):
    t: float
    gen: int


class Killed(Event, frozen=True):
    t: float
    gen: int
    moment: str


class Publish(Event, frozen=True):
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
    node: str = ""  # that the connection leads to
    partition: int = -1  # that it names
    probe: bool = False  # one at a time, each tried again as a message of its own: it measures how long nothing is OK'd


class Outcome(Event, frozen=True):
    t: float
    op: int
    result: Result = field(name="type")


class ChannelMade(Event, frozen=True):
    """A SUB (on `conn`) or an HTTP create (`conn` 0), sent at `t0`, answered at `t`."""

    t0: float
    t: float
    gen: int
    conn: int
    topic: str
    channel: str
    result: Result = field(name="type")
    node: str = ""  # where the SUB was sent
    ordered: bool = False  # by its topic's settings
    timeout: float = 0.0  # seconds that a message may be in flight


class Paused(Event, frozen=True):
    t0: float
    t: float
    topic: str
    channel: str
    paused: bool
    result: Result = field(name="type")


class Deleted(Event, frozen=True):
    """A topic's deletion."""

    t0: float
    t: float
    topic: str
    result: Result = field(name="type")


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """As it came out; a body nobody could have written has process -1."""

    process: int
    counter: int
    crc: int
    id: str
    attempts: int
    timestamp: int


class Received(Event, frozen=True):
    t: float
    conn: int
    messages: list[Message]


class Answered(Event, frozen=True):
    """FIN, REQ (with its delay) or TOUCH was sent for these ids."""

    t: float
    conn: int
    command: str
    ids: list[str]
    delay: float


class Refused(Event, frozen=True):
    """The broker answered FIN, REQ or TOUCH with an error."""

    t: float
    conn: int
    command: str
    id: str


class Drained(Event, frozen=True):
    """The broker reports the durable channels of the topic as empty: everything owed must have come out."""

    t: float
    topic: str


class Letter(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A dead letter, as its leader lists it."""

    id: str
    reason: str  # as metrics name it
    lived: float  # seconds from its publish to its death


class Died(Event, frozen=True):
    """The dead letters of a channel, when nothing else was left in it."""

    t: float
    topic: str
    channel: str
    letters: list[Letter]


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a seek did in one partition, as it was answered."""

    partition: int
    from_offset: int
    to_offset: int
    timestamp: int = 0  # of the message at `to_offset`, in ns; 0: there is none yet
    clamped: bool = False
    error: str = ""


class SeekSent(Event, frozen=True):
    """A channel is to be moved: `to` is start, end, offset, time (`value` in ns, less `skew_ns`) or undo."""

    t: float
    op: int
    topic: str
    channel: str
    to: str
    value: int = 0
    skew_ns: int = 0
    partition: int = -1


class SeekEnded(Event, frozen=True):
    t: float
    op: int
    result: Result = field(name="type")
    places: list[Place] = []
    error: str = ""


class AdminSent(Event, frozen=True):
    """Something else that an operator asks for; `verb` is empty, policy, grow, move, .."""

    t: float
    op: int
    verb: str
    topic: str = ""
    channel: str = ""
    what: str = ""


class AdminEnded(Event, frozen=True):
    t: float
    op: int
    result: Result = field(name="type")
    error: str = ""


class FaultBegun(Event, frozen=True):
    """A fault was injected: `fault` is its kind's id (N1, P1, D4, ..), `what` says it with victims and parameters."""

    t: float
    op: int
    fault: str
    what: str
    victims: list[str] = []


class FaultEnded(Event, frozen=True):
    """It was healed. `ok`: with the proof that it bit ("413 packets dropped"); `fail`: it did not, the run is void."""

    t: float
    op: int
    result: Result = field(name="type")
    proof: str = ""


class Healed(Event, frozen=True):
    """Nothing is broken any more, for good: full ISR is asked for within `settle` seconds from here."""

    t: float
    settle: float


class Led(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A partition of which the metadata say that the node leads it."""

    topic: str
    partition: int
    epoch: int
    isr: list[str]
    replicas: int  # that there are to be
    floor: int = 0  # the ISR has never fewer members; 0: nothing was acknowledged yet


class Sample(Event, frozen=True):
    """A node, once a second. A node that does not run has neither memory nor descriptors."""

    t: float
    node: str
    rss: int = 0  # bytes
    fds: int = 0
    led: list[Led] = []
    figures: dict[str, float] = {}  # whatever else is worth a line in the report
    pid: int = 0  # another one: it was started again
    deleted: list[str] = []  # topics that the metadata do not name any more


class Stored(Event, frozen=True):
    """Committed messages as a node's files have them, in the order of the log; attempts are 0."""

    t: float
    node: str
    topic: str
    partition: int
    messages: list[Message]


class Settling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Messages [first, end) of a partition that one batch says to be done."""

    first: int
    end: int
    timestamp: int  # of the batch, in ns
    log_end: int  # the offset behind the batch
    attempts: int = 0  # at which they died; 0: they were no dead letters


class Settled(Event, frozen=True):
    """When a channel was done with which messages, as a node's files have it, whoever or whatever finished them.

    `abandoned`: what retention took from it, and when."""

    t: float
    node: str
    topic: str
    partition: int
    channel: str
    rows: list[Settling]
    abandoned: list[Settling] = []


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
    | Died
    | SeekSent
    | SeekEnded
    | AdminSent
    | AdminEnded
    | FaultBegun
    | FaultEnded
    | Healed
    | Sample
    | Stored
    | Settled
)

# ---- lines

_KINDS: dict[type[Event], tuple[str, str]] = {
    Run: ("run", "info"),
    Started: ("start", "invoke"),
    Ready: ("start", "ok"),
    Killed: ("kill", "ok"),
    Publish: ("publish", "invoke"),
    Outcome: ("publish", ""),  # `type` is its result
    ChannelMade: ("channel", ""),
    Paused: ("pause", ""),
    Deleted: ("delete", ""),
    Received: ("recv", "ok"),
    Answered: ("answer", "invoke"),
    Refused: ("answer", "fail"),
    Drained: ("drain", "ok"),
    Died: ("died", "ok"),
    SeekSent: ("seek", "invoke"),
    SeekEnded: ("seek", ""),
    AdminSent: ("admin", "invoke"),
    AdminEnded: ("admin", ""),
    FaultBegun: ("fault", "invoke"),
    FaultEnded: ("fault", ""),
    Healed: ("heal", "ok"),
    Sample: ("sample", "info"),
    Stored: ("stored", "ok"),
    Settled: ("settled", "ok"),
}


class _Head(msgspec.Struct, gc=False):
    f: str
    type: str


def _prefix(f: str, kind: str) -> bytes:
    return b'{"f":"%s","type":"%s",' % (f.encode(), kind.encode()) if kind else b'{"f":"%s",' % f.encode()


_prefixes = {event: _prefix(*kind) for event, kind in _KINDS.items()}
_encoder = msgspec.json.Encoder()
_head = msgspec.json.Decoder(_Head)
_decoders: dict[tuple[str, str], msgspec.json.Decoder[Any]] = {
    (f, each): msgspec.json.Decoder(event)
    for event, (f, kind) in _KINDS.items()
    for each in ([kind] if kind else ["ok", "fail", "info"])
}


def line(event: AnyEvent) -> bytes:
    return _prefixes[type(event)] + _encoder.encode(event)[1:] + b"\n"


def parse_line(text: bytes) -> AnyEvent:
    head = _head.decode(text)
    event: AnyEvent = _decoders[head.f, head.type].decode(text)
    return event


def write(events: Iterable[AnyEvent], path: Path) -> None:
    with path.open("wb") as file:
        for event in events:
            file.write(line(event))


def read(path: Path, size: int | None = None) -> Iterator[AnyEvent]:
    """The events of a file, or of its first `size` bytes: others may be written to it."""
    with path.open("rb") as file:
        at = 0
        for text in file:
            at += len(text)
            if size is not None and at > size:
                return
            yield parse_line(text)


class History:
    """Events of a run, in memory or, if there is a path, in a file that grows as they come; may be iterated again and
    again. Any thread may record."""

    WAITING_MAX = 2000  # events that are not in the file yet

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._file: IO[bytes] | None = None if path is None else path.open("wb")
        self._events: deque[AnyEvent] = deque()
        self._lock = threading.Lock()
        self.record = self._events.append if path is None else self._record

    def _record(self, event: AnyEvent) -> None:
        self._events.append(event)
        if len(self._events) > self.WAITING_MAX:
            self.flush()

    def flush(self) -> int:
        """What was recorded is in the file, whose size is returned."""
        assert self._file is not None
        with self._lock:  # or lines of two threads might be cut by a reader
            lines = []
            with contextlib.suppress(IndexError):
                while True:
                    lines.append(line(self._events.popleft()))
            self._file.write(b"".join(lines))
            self._file.flush()
            return self._file.tell()

    def save(self, path: Path) -> None:
        """Have the events in this file as well, if they are not there."""
        if path != self.path:
            write(self, path)

    def __iter__(self) -> Iterator[AnyEvent]:
        if self.path is None:
            return iter(list(self._events))
        return read(self.path, self.flush())


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
