"""Runs to scan, and what a plain struct reader makes of them.

`Writer` makes runs as a broker's files have them, from the broker's own entry and frame code; what a broker would never
write is made by changing `Batch`es before they are sealed. `read_rows` is the specification: the slowest reader that
could possibly be right.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from nsqha import frames, hot
from nsqha.commitlog.entry import Entry, genesis, next_entry
from pyspark_nsqha.model import FetchedRun, PartitionLife

TOPIC_UID = 0xABCDEF
PARTITION = 3
ID_BASE = (PARTITION << 50) | (5 << 30)
IDENTITY = PartitionLife("orders", TOPIC_UID, PARTITION, ID_BASE)
SECOND = 1_000_000_000


class Row(NamedTuple):
    """What a reader knows of a message."""

    offset: int
    timestamp_ns: int
    attempts: int
    id: str
    value: bytes
    epoch: int
    deliver_at_ns: int


@dataclass
class Writer:
    """Writes batches behind each other. `last` may be set to begin anywhere."""

    last: Entry = field(default_factory=lambda: genesis(TOPIC_UID, PARTITION))
    entries: list[bytes] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    first: Entry | None = None

    @property
    def offset(self) -> int:
        return self.last.end_offset

    def batch(
        self,
        parts: Iterable[bytes],
        *,
        flags: int = 0,
        seconds: int = 1,
        epoch: int = 1,
        count: int | None = None,
        with_frames: bool = True,
    ) -> Entry:
        """Frames, stamped as a broker stamps them, and their entry. `count`: another one than it should have."""
        data = bytearray(b"".join(parts))
        timestamp_ns = self.last.timestamp_ns + seconds * SECOND + 1
        stamped = hot.stamp(data, 0, ID_BASE + self.offset, timestamp_ns)
        return self.raw(
            bytes(data), count=stamped if count is None else count, flags=flags, timestamp_ns=timestamp_ns, epoch=epoch,
            with_frames=with_frames,
        )  # fmt: skip

    def raw(
        self, data: bytes, *, count: int, flags: int = 0, timestamp_ns: int, epoch: int = 1, with_frames: bool = True
    ) -> Entry:
        """Any bytes at all, and an entry that fits them; LOST is set afterwards, as an operator does."""
        kept = flags & ~frames.LOST
        epoch = max(epoch, self.last.epoch)
        entry, raw = next_entry(
            self.last, data, count=count, flags=kept, timestamp_ns=timestamp_ns, epoch=epoch, durable=0
        )
        if flags & frames.LOST:
            entry = entry._replace(flags=flags)
            raw = entry.encode()
        self.first = self.first or entry
        self.last = entry
        self.entries.append(raw)
        if with_frames:
            self.frames.append(data)
        return entry

    def run(self) -> FetchedRun:
        """All that was written."""
        first = self.first.log_id if self.first else 1
        return FetchedRun(first, b"".join(self.entries), b"".join(self.frames))


def messages(*bodies: bytes) -> list[bytes]:
    """Message frames, not stamped yet."""
    return [hot.frame(body) for body in bodies]


_ENTRY = struct.Struct(">QQQQQIIIIHHQQI")
_HEADER = struct.Struct(">IIqH16s")
_ATTRIBUTES = struct.Struct(">IqH")
_UNREADABLE = 1 << 31 | frames.LOST


def read_rows(run: FetchedRun, first: int = 0, end: int = 1 << 62) -> list[Row]:
    """The messages of [first, end), frame by frame; nothing is checked."""
    rows: list[Row] = []
    at = 0
    data = bytes(run.frames)
    for fields in _ENTRY.iter_unpack(bytes(run.entries)):
        _, epoch, offset, _, _, _, size, _, flags, *_ = fields
        if flags & _UNREADABLE:
            continue
        stop = at + size
        deliver_at: dict[int, int] = {}
        while at < stop:
            length, kind = frames.HEAD.unpack_from(data, at)
            if kind == frames.ATTRIBUTES:
                covers, time, _ = _ATTRIBUTES.unpack_from(data, at + 8)
                if time:
                    deliver_at |= dict.fromkeys(range(offset, offset + min(covers, size)), time)
            if kind == frames.MESSAGE:
                _, _, timestamp_ns, attempts, digits = _HEADER.unpack_from(data, at)
                body = data[at + 34 : at + 4 + length]
                row = Row(offset, timestamp_ns, attempts, digits.decode(), body, epoch, deliver_at.get(offset, 0))
                if first <= offset < end:
                    rows.append(row)
                offset += 1
            at += 4 + length
    return rows
