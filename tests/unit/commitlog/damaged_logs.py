"""Logs that are damaged after they were written, and replicas of a log of which one is."""

from __future__ import annotations

import random

from nsqha.commitlog import copying
from nsqha.commitlog.entry import ENTRY_BYTES, Entry
from nsqha.commitlog.files.pairs import LogIdentity
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.storage import MemStorage
from nsqha.errors import LogCorrupt
from tests.sim.storage import SimStorage
from tests.unit.commitlog.logs import DIRECTORY, add, contents, event, new_log, roll, sync

SEGMENT = f"{DIRECTORY}/00000000000000000000.segment"
COMMITLOG = f"{DIRECTORY}/00000000000000000000.commitlog"
ONE_PAIR = LogLimits()


class Built:
    """A log of ten batches of two messages, an event before each third; its entries and bytes as they were."""

    def __init__(self, *, durable: int = 1, batches: int = 10, limits: LogLimits = ONE_PAIR) -> None:
        self.storage = SimStorage()
        self.limits = limits
        self.log = new_log(self.storage, limits=limits)
        for n in range(batches):
            events = event(b"x" * n) if n % 3 == 0 else b""
            add(self.log, b"a" * (50 + n), b"b" * 60, events=events, durable=durable)
            if self.log.needs_roll:
                roll(self.log)
        sync(self.log)
        self.contents = contents(self.log)

    def entry(self, log_id: int) -> Entry:
        return self.contents[log_id - 1][0]

    def file(self, log_id: int, suffix: str) -> str:
        return self.log.files.pair_of(log_id).path(suffix)

    def flip_entry(self, log_id: int, *bytes_of_it: int) -> None:
        at = self.log.files.pair_of(log_id).slot(log_id)
        for byte in bytes_of_it or (3,):
            self.storage.flip(self.file(log_id, ".commitlog"), (at + byte) * 8)

    def zero_entries(self, first: int, end: int) -> None:
        file = self.storage.open(self.file(first, ".commitlog"))
        file.pwrite(bytes((end - first) * ENTRY_BYTES), self.log.files.pair_of(first).slot(first))
        file.sync()

    def flip_data(self, log_id: int) -> None:
        entry = self.entry(log_id)
        byte = entry.end_position - 10 - self.log.files.pair_of(log_id).position
        self.storage.flip(self.file(log_id, ".segment"), byte * 8)

    def shorten(self, path: str, n: int) -> None:
        file = self.storage.open(path)
        file.truncate(n)
        file.sync()

    def sizes(self) -> tuple[int, int]:
        return self.storage.open(SEGMENT).size(), self.storage.open(COMMITLOG).size()


def unreadable(log: PartitionLog) -> list[int]:
    """Log ids whose batch can not be read."""
    bad = []
    for log_id in range(log.start.log_id, log.end.log_id):
        try:
            log.read(log.entry(log_id))
        except LogCorrupt:
            bad.append(log_id)
    return bad


LIMITS = LogLimits(segment_bytes=1500)


def replica(seed: int = 1, batches: int = 30) -> PartitionLog:
    log = PartitionLog.create(MemStorage(), "log", LogIdentity(9, 2), cache=BatchCache(0), limits=LIMITS)
    rng = random.Random(seed)
    for _ in range(batches):
        add(log, rng.randbytes(100))
        sync(log)
        if log.needs_roll:
            roll(log)
    return log


def damage(log: PartitionLog, log_id: int, *, entry: bool = False) -> None:
    known = log.entry(log_id)
    pair = log.files.pair_of(log_id)
    if entry:
        pair.commitlog.pwrite(b"\xff", pair.slot(log_id) + 7)
    else:
        pair.segment.pwrite(b"\xff\x00\xff", known.position - pair.position + 20)


def taken(log: PartitionLog, first: int, end: int) -> list[tuple[Entry, bytes]]:
    run = copying.read_run(log, first, end, 1 << 20)
    return [(entry, data) for entry, data, _ in copying.batches(run.entries, run.data)]
