"""Logs on a disk for tests of who reads their bytes, written by the broker's own code.

log = Stored(tmp_path)                   # <tmp_path>/data/topics/orders-0000000000abcdef/3
log.write(10)                            # batches of two messages; `log.roll()` begins the next pair of files
log.lose(5)                              # its frames are given up
split = log.split()                      # all of it
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsqha import hot
from nsqha.commitlog.entry import Entry
from nsqha.commitlog.log import LogIdentity, LogLimits, PartitionLog
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.storage import OsStorage
from nsqha.frames import LOST
from pyspark_nsqha.model import FetchedRun, PartitionLife, ReplicaAddress, Split

UID = 0xABCDEF
PARTITION = 3
ID_BASE = (PARTITION << 50) | (5 << 30)
IDENTITY = PartitionLife("orders", UID, PARTITION, ID_BASE)


@dataclass
class Stored:
    folder: Path
    body_bytes: int = 300
    log: PartitionLog = field(init=False)

    def __post_init__(self) -> None:
        self.data = self.folder / "data"
        self.path = self.data / "topics" / f"orders-{UID:016x}" / str(PARTITION)
        self.log = PartitionLog.create(
            OsStorage(), str(self.path), LogIdentity(UID, PARTITION), cache=BatchCache(0), limits=LogLimits()
        )

    def write(self, batches: int, messages: int = 2) -> None:
        for _ in range(batches):
            first = self.log.end.offset
            data = bytearray()
            for offset in range(first, first + messages):
                data += hot.frame((f"{offset} " * self.body_bytes)[: self.body_bytes].encode())
            timestamp_ns = 1_000_000_000 * self.log.end.log_id
            hot.stamp(data, 0, ID_BASE + first, timestamp_ns)
            self.log.append(data, count=messages, flags=0, timestamp_ns=timestamp_ns, epoch=1, durable=1)

    def roll(self) -> None:
        """The next batch goes into another pair of files."""
        pair = self.log.next_pair()
        assert pair is not None
        self.log.use(pair)

    def lose(self, log_id: int) -> None:
        """The frames are damaged, and given up."""
        pair, entry = self.log.files.pair_of(log_id), self.log.entry(log_id)
        pair.segment.pwrite(b"\xee" * entry.size, entry.position - pair.position)
        self.set_flags(log_id, entry.flags | LOST)

    def set_flags(self, log_id: int, flags: int) -> None:
        entry = self.log.entry(log_id)._replace(flags=flags)
        pair = self.log.files.pair_of(log_id)
        pair.commitlog.pwrite(entry.encode(), pair.slot(log_id))

    def split(self, *addresses: str, first: int | None = None, end: int | None = None, **more: Any) -> Split:
        """Log ids [first, end) of what is there, or all of it."""
        start = self.log.entry(first or self.log.start.log_id)
        last = self.log.entry((end or self.log.end.log_id) - 1)
        at = self.log.last
        assert at is not None
        return Split(
            IDENTITY,
            first=start.first_offset,
            end=last.end_offset,
            first_log_id=start.log_id,
            end_log_id=last.log_id + 1,
            first_offset=start.first_offset,
            end_offset=last.end_offset,
            at_log_id=at.log_id,
            chain=at.chain,
            replicas=tuple(ReplicaAddress(address) for address in addresses),
            **more,
        )

    def entries(self, first: int, end: int) -> list[Entry]:
        return list(self.log.entries(first, end))

    def content(self, first: int | None = None, end: int | None = None) -> tuple[bytes, bytes]:
        """Entries, and the frames of those that have some."""
        entries = self.entries(first or self.log.start.log_id, end or self.log.end.log_id)
        frames = (self.log.files.pair_of(e.log_id).read_data(e.position, e.size) for e in entries if not e.lost)
        return b"".join(e.encode() for e in entries), b"".join(frames)


def joined(runs: Any) -> tuple[bytes, bytes]:
    """What came, all runs together. Each is looked at before the next is asked for."""
    entries, frames = bytearray(), bytearray()
    for run in runs:
        assert isinstance(run, FetchedRun)
        entries += run.entries
        frames += run.frames
    return bytes(entries), bytes(frames)
