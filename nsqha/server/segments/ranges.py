"""What a reader of ranges asks for, which files have it, and which of their bytes are the answer.

    path ?query --Ask.parse--> Ask --found, on the loop--> LocatedRange --planned, in a thread--> Answer | Refusal

    LocatedRange  paths and borders of the file pair that holds `first`, and where the entry `at` is; immutable, so that
                  a thread may use it while the log changes
    Answer        entries [first, end) of that pair as they are in its commitlog, and the pieces of its segment that are
                  their frames: all but those of batches that are LOST or FAULTY

An answer ends with its pair, with `max` bytes, or at ENTRIES_BYTES_MAX, always between two batches. Its cost in Python
does not grow with the number of batches: only entries whose flags say that frames are missing are decoded.

The entries at both ends of an answer are verified (CRC, log id), and their positions are in the pair; what is between
them is sent unverified. So an answer only has bytes of this pair's files, and its size is known before it is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from nsqha.commitlog.entry import ENTRY_BYTES, UNREADABLE, Entry, decode
from nsqha.commitlog.files.pairs import COMMITLOG, SEGMENT

if TYPE_CHECKING:
    from nsqha.commitlog.reading.lookup import LogReader
    from nsqha.server.segments.log_source import LogSource

FRAMES_BYTES_MAX = 64 << 20  # of one answer, unless one batch is larger
ENTRIES_BYTES_MAX = 4 << 20  # of one answer: 52,428 batches
FIRST_SLOTS = 1024  # entries in the first read: most answers have fewer, and one more read of a file costs little

_U64 = (1 << 64) - 1
_PATH = re.compile(r"/segments/([0-9a-f]{16})/(0|[1-9][0-9]{0,5})")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,19}")
_HEX = re.compile(r"[0-9a-f]{16}")
_FLAGS_AT = 52  # of the first byte of `flags` in an entry
_NO_FRAMES = UNREADABLE >> 24
_WITHOUT_FRAMES = re.compile(b"[%s]" % b"".join(b"\\x%02x" % n for n in range(256) if n & _NO_FRAMES))

PreadAt = Callable[[int, int], bytes]  # (bytes, position): fewer only at the end of the file


class Refusal(Exception):
    """A request is refused with an HTTP status and one line of text."""

    def __init__(self, status: int, why: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(why)
        self.status = status
        self.why = why
        self.headers = headers or {}


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request wants: batches [first, end) of the log whose entry `at` has `chain`."""

    topic_uid: int
    partition: int
    first: int
    end: int
    at: int
    chain: int
    hold: int = 0  # 0: none
    bytes_max: int = FRAMES_BYTES_MAX

    @classmethod
    def parse(cls, target: str) -> Ask:
        """Parse a request target. Refusal (404, 400) if it is malformed."""
        try:
            parts = urlsplit(target)
        except ValueError:
            raise Refusal(400, "the request target is not a URL") from None
        path = _PATH.fullmatch(parts.path)
        if path is None:
            raise Refusal(404, "the path is /segments/<topic uid, 16 hex digits>/<partition>?first=..&end=..")
        try:
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True, max_num_fields=8)
        except ValueError:
            raise Refusal(400, "the query has to be a list of at most 8 name=value") from None
        given = dict(pairs)
        unknown = sorted(given.keys() - {"first", "end", "at", "chain", "hold", "max"})
        if unknown or len(given) != len(pairs):
            wrong = f"unknown: {unknown[0][:40]!r}" if unknown else "a parameter is given twice"
            raise Refusal(400, f"parameters are first, end, at, chain, hold, max; {wrong}")
        first, end, at = (_number(given, name) for name in ("first", "end", "at"))
        chain, hold = given.get("chain", ""), given.get("hold", "")
        if not _HEX.fullmatch(chain):
            raise Refusal(400, "chain has to be 16 hex digits: the chain of the entry `at`")
        if hold and not _HEX.fullmatch(hold):
            raise Refusal(400, "hold has to be 16 hex digits, as in the snapshot")
        if not 1 <= first < end or end > at + 1:
            raise Refusal(400, f"first={first} end={end} at={at}: it has to be 1 <= first < end <= at + 1")
        bytes_max = min(_number(given, "max"), FRAMES_BYTES_MAX) if "max" in given else FRAMES_BYTES_MAX
        return cls(int(path[1], 16), int(path[2]), first, end, at, int(chain, 16), int(hold or "0", 16), bytes_max)


def _number(given: Mapping[str, str], name: str) -> int:
    text = given.get(name, "")
    if not _NUMBER.fullmatch(text) or int(text) > _U64:
        raise Refusal(400, f"{name} has to be a number from 0 to 2^64 - 1")
    return int(text)


class PairFiles(NamedTuple):
    """What a thread needs to open and read one pair of files."""

    segment: str  # paths
    commitlog: str
    position: int  # of the segment's first byte
    anchor_log_id: int  # of the entry in slot 0
    end_log_id: int  # of what the pair had at the look-up

    def slot(self, log_id: int) -> int:
        """The byte address of an entry in the commitlog."""
        return (log_id - self.anchor_log_id) * ENTRY_BYTES


class LocatedRange(NamedTuple):
    """Where the answer was when the loop looked it up."""

    pair: PairFiles  # that holds `first`
    at: PairFiles  # that holds `at`
    at_chain: int | None  # if it is in memory


# ---- on the loop


def found(source: LogSource, ask: Ask) -> LocatedRange:
    """Locate what is asked for in this node's log, as leader or as follower. Refusal (404, 409, 410)."""
    return found_in(source.log_of(ask.topic_uid, ask.partition), ask)


def found_in(log: LogReader, ask: Ask) -> LocatedRange:
    """Locate what is asked for in `log`. Refusal (409, 410)."""
    start, end = log.start.log_id, log.end.log_id
    if ask.first < start:
        why = f"retention has removed it: the log starts at log id {start}, offset {log.start.offset}"
        raise Refusal(410, why, {"Nsqha-Log-Start": str(start), "Nsqha-Start-Offset": str(log.start.offset)})
    if ask.at >= end:
        raise Refusal(409, f"this replica is behind: it ends before log id {end}, and {ask.at} is asked for")
    at = log.part_at(ask.at)
    at_chain = at.last.chain if at.last is not None and at.last.log_id == ask.at else None
    return LocatedRange(_files(log.part_at(ask.first), ask.first), _files(at, ask.at), at_chain)


def _files(part: LogReader, log_id: int) -> PairFiles:
    pair = part.files.pair_of(log_id)
    return PairFiles(pair.path(SEGMENT), pair.path(COMMITLOG), pair.position, pair.anchor.log_id, part.end.log_id)


# ---- in a thread


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent: `entries`, then the pieces (address in the segment, bytes), back to back."""

    first: int
    end: int
    entries: bytes
    pieces: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return len(self.entries) + sum(size for _, size in self.pieces)


def chain_at(found: LocatedRange, ask: Ask, pread: PreadAt) -> int:
    """The chain of this replica's own entry `at`; `pread` reads the commitlog that has it. Refusal 409."""
    return _entry(pread(ENTRY_BYTES, found.at.slot(ask.at)), ask.at).chain


def check_chain(chain: int, ask: Ask) -> None:
    """Check that this is the log of the reader's snapshot. Refusal 409."""
    if chain != ask.chain:
        raise Refusal(409, f"entry {ask.at} of this replica has another chain: it is not the log of the snapshot")


def planned(found: LocatedRange, ask: Ask, pread: PreadAt) -> Answer:
    """Which bytes of the pair are sent; `pread` reads its commitlog. Refusal 409 if that does not verify."""
    pair = found.pair
    end = min(ask.end, pair.end_log_id, ask.first + ENTRIES_BYTES_MAX // ENTRY_BYTES)
    raw = b""
    wanted = FIRST_SLOTS
    while True:
        have = ask.first + len(raw) // ENTRY_BYTES
        more = pread(min(end - have, wanted) * ENTRY_BYTES, pair.slot(have))
        raw += more[: len(more) - len(more) % ENTRY_BYTES]
        have, before = ask.first + len(raw) // ENTRY_BYTES, have
        first = _entry(raw[:ENTRY_BYTES], ask.first)
        end_position = first.position + ask.bytes_max  # unless the first batch goes beyond
        if have in (end, before) or _end_position(raw, len(raw) - ENTRY_BYTES) > end_position:
            break
        wanted *= 4
    n = _batches_within(raw, end_position)
    raw = raw[: n * ENTRY_BYTES]
    last = _entry(raw[-ENTRY_BYTES:], ask.first + n - 1)
    if not pair.position <= first.position <= last.end_position:
        raise Refusal(409, f"positions of log ids [{ask.first}, {last.log_id + 1}) are not in their file")
    return Answer(ask.first, last.log_id + 1, raw, tuple(_pieces(raw, pair.position, first, last)))


def _entry(raw: bytes, log_id: int) -> Entry:
    """Decode and verify an entry whose values are used. Refusal 409."""
    entry = decode(raw)
    if entry is None or entry.log_id != log_id:
        raise Refusal(409, f"entry {log_id} of this replica does not verify; take another replica")
    return entry


def _end_position(raw: bytes, at: int) -> int:
    """The end position in the entry at this byte, unverified."""
    return int.from_bytes(raw[at + 24 : at + 32]) + int.from_bytes(raw[at + 44 : at + 48])


def _batches_within(raw: bytes, end_position: int) -> int:
    """The number of batches that end at or below this position, at least one. Positions rise: a binary search."""
    low, high = 1, len(raw) // ENTRY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if _end_position(raw, (middle - 1) * ENTRY_BYTES) <= end_position:
            low = middle
        else:
            high = middle - 1
    return low


def _pieces(raw: bytes, base: int, first: Entry, last: Entry) -> list[tuple[int, int]]:
    """The parts of the segment between `first` and `last` that batches with frames cover."""
    pieces: list[tuple[int, int]] = []
    at, end = first.position, last.end_position
    for found in _WITHOUT_FRAMES.finditer(raw[_FLAGS_AT::ENTRY_BYTES]):
        slot = found.start() * ENTRY_BYTES
        entry = _entry(raw[slot : slot + ENTRY_BYTES], first.log_id + found.start())
        if not at <= entry.position <= entry.end_position <= end:
            raise Refusal(409, f"the position of log id {entry.log_id} is not in its file")
        if entry.position > at:
            pieces.append((at - base, entry.position - at))
        at = entry.end_position
    if end > at:
        pieces.append((at - base, end - at))
    return pieces
