"""What the log tests share: batches that look real, and a journal of one partition on a disk that never fails."""

from __future__ import annotations

import random
from dataclasses import replace

from nsqha import hot
from nsqha.commitlog.entry import Entry, Place
from nsqha.commitlog.journal import CutIntent, PartitionRecord
from nsqha.commitlog.log import LogIdentity, LogLimits, PartitionLog
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.recovery import Recovery, SettledFiles, recover
from nsqha.commitlog.storage import Storage
from nsqha.frames import HAS_EVENTS, PROGRESS, control_frame

DIRECTORY = "data/topics/topic-0/3"  # as of a node: the names of two folders come with a log
IDENTITY = LogIdentity(topic_uid=0xABCDEF, partition=3)
ID_BASE = 3 << 50
SECOND = 1_000_000_000
SMALL = LogLimits(segment_bytes=8 << 10, commitlog_bytes=1 << 20)


def messages(first_offset: int, bodies: list[bytes], timestamp_ns: int) -> bytearray:
    """A batch of stamped message frames."""
    data = bytearray(b"".join(hot.frame(body) for body in bodies))
    if bodies:
        hot.stamp(data, 0, ID_BASE + first_offset, timestamp_ns)
    return data


def event(payload: bytes = b"state", frame_type: int = PROGRESS) -> bytes:
    return control_frame(frame_type, payload)


class Cuts:
    """A partition's record in a journal that is always durable."""

    def __init__(self, record: PartitionRecord | None = None) -> None:
        self.record = record
        self.begun: list[CutIntent] = []

    def begin(self, intent: CutIntent) -> None:
        self.begun.append(intent)
        self.record = replace(self.record or PartitionRecord(), cut=intent)

    def done(self) -> None:
        assert self.record is not None and self.record.cut is not None
        durable = min(self.record.local_durable, self.record.cut.log_id)
        self.record = replace(self.record, cut=None, local_durable=durable)


def new_log(
    storage: Storage, *, limits: LogLimits = SMALL, cache_bytes: int = 64 << 10, at_once: bool = True
) -> PartitionLog:
    cache = BatchCache(cache_bytes)
    return PartitionLog.create(storage, DIRECTORY, IDENTITY, cache=cache, limits=limits, at_once=at_once)


def add(
    log: PartitionLog, *bodies: bytes, events: bytes = b"", seconds: int = 1, epoch: int = 1, durable: int | None = None
) -> Entry:
    """Append one batch with these message bodies, `seconds` after the last one."""
    timestamp_ns = log.next_timestamp((log.last.timestamp_ns if log.last else 0) + seconds * SECOND)
    data = bytearray(events) + messages(log.end.offset, list(bodies), timestamp_ns)
    return log.append(
        data,
        count=len(bodies),
        flags=HAS_EVENTS if events else 0,
        timestamp_ns=timestamp_ns,
        epoch=epoch,
        durable=log.local_durable if durable is None else durable,
    )


def sync(log: PartitionLog) -> int:
    """A whole disk round."""
    ticket = log.unsynced()
    if ticket is not None:
        ticket.run()
        log.synced(ticket)
    return log.local_durable


def roll(log: PartitionLog) -> None:
    """Begin a new pair of files."""
    log.use(log.next_pair())


def drop_pairs(log: PartitionLog, up_to: Place) -> int:
    """Forget the pairs below, and unlink them; how many."""
    n = log.forget_pairs(up_to)
    while log.unlink_some():
        pass
    return n


def reopen(
    storage: Storage,
    *,
    local_durable: int = 0,
    cuts: Cuts | None = None,
    sync_always: bool = True,
    replicas: int = 1,
    page_cache_lost: bool = False,
    known: bool = True,
    limits: LogLimits = SMALL,
    alone: bool = False,
    settled: SettledFiles | None = None,
) -> Recovery:
    """Recover the log as a restarted process would."""
    if cuts is None:
        cuts = Cuts(PartitionRecord(log_uid=7, local_durable=local_durable) if known else None)
    return recover(
        storage,
        DIRECTORY,
        IDENTITY,
        cuts.record,
        cuts,
        sync_always=sync_always,
        replicas=replicas,
        page_cache_lost=page_cache_lost,
        cache=BatchCache(64 << 10),
        limits=limits,
        alone=alone,
        settled=settled,
    )


def contents(log: PartitionLog) -> list[tuple[Entry, bytes]]:
    """Every entry with its frames."""
    return [(entry, bytes(log.read(entry))) for entry in log.entries(log.start.log_id, log.end.log_id)]


def random_bodies(rng: random.Random) -> list[bytes]:
    sizes = [rng.choice((1, 10, 100, 600, 2000)) for _ in range(rng.choice((1, 1, 2, 5)))]
    return [rng.randbytes(size) for size in sizes]
