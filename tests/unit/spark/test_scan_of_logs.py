"""The scan of what the broker's own log wrote: files, anchors, epochs, and what an operator gave up."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from nsqha import frames
from nsqha.commitlog.entry import BROKEN_CHAIN, FAULTY, REBUILT, UNREADABLE, Entry, decode
from nsqha.commitlog.log import PartitionLog
from nsqha.commitlog.storage import MemStorage
from nsqha.cursor import events
from pyspark_nsqha.model import FetchedRun, NotVerified, PartitionLife, Unreadable
from pyspark_nsqha.reading.columns import DEFAULT
from pyspark_nsqha.reading.entries import verify
from pyspark_nsqha.reading.scan import MissingRange, record_batches
from tests.unit.commitlog.damaged_logs import SEGMENT, Built
from tests.unit.commitlog.logs import ID_BASE, IDENTITY, SECOND, event, messages, new_log, roll

OURS = PartitionLife("orders", IDENTITY.topic_uid, IDENTITY.partition, ID_BASE)


def big_log(seed: int) -> PartitionLog:
    """Some hundred batches in several pairs of files: publishes, events, deferred publishes, three epochs."""
    rng = random.Random(seed)
    log = new_log(MemStorage())
    for n in range(200):
        timestamp_ns = log.next_timestamp(n * SECOND)
        bodies = [rng.randbytes(rng.choice((0, 1, 30, 300))) for _ in range(rng.choice((1, 1, 2, 9, 90)))]
        data, flags = bytearray(), 0
        if rng.random() < 0.3:
            data += event(b"state of channels") + events.Carry(0, bytes(messages(0, [b"carried"], 1))).encode()
            flags |= frames.HAS_EVENTS | frames.HAS_CARRY
        if rng.random() < 0.2:
            data += events.Attributes(len(bodies), 77_000).encode()
            flags |= frames.HAS_ATTRIBUTES
        if flags and rng.random() < 0.3:
            bodies = []
        data += messages(log.end.offset, bodies, timestamp_ns)
        log.append(data, count=len(bodies), flags=flags, timestamp_ns=timestamp_ns, epoch=1 + n // 80, durable=0)
        if log.needs_roll:
            roll(log)
    return log


def runs(log: PartitionLog, batches: int) -> Iterator[tuple[FetchedRun, bytes]]:
    """The files cut into runs, with the entry before each: as a replica serves them, at most one file at a time."""
    first = log.start.log_id
    while first < log.end.log_id:
        pair = log.files.pair_of(first)
        slots = pair.commitlog.pread(80 * batches, pair.slot(first))
        entries = [entry for entry in map(decode, (slots[n : n + 80] for n in range(0, len(slots), 80))) if entry]
        end = min(first + batches, log.end.log_id)
        kept = [entry for entry in entries if entry.log_id < end]
        data = b"".join(
            pair.segment.pread(entry.size, entry.position - pair.position)
            for entry in kept
            if not entry.flags & UNREADABLE
        )
        yield FetchedRun(first, slots[: 80 * len(kept)], data), pair.commitlog.pread(80, pair.slot(first) - 80)
        first += len(kept)


def scan(log: PartitionLog, first: int, end: int, batches: int = 16, **how: object) -> list[tuple[int, bytes]]:
    last = log.entry(log.end.log_id - 1)
    rows: list[tuple[int, bytes]] = []
    for run, before in runs(log, batches):
        entries = verify(run, OURS, before, at=(last.log_id, last.chain))
        for batch in record_batches(run, entries, OURS, columns=DEFAULT, first=first, end=end, **how):
            batch.validate(full=True)
            rows += zip(batch["offset"].to_pylist(), batch["value"].to_pylist(), strict=True)
    return rows


def as_brokers_read(log: PartitionLog) -> list[tuple[int, bytes]]:
    """By the broker's own reader: the frames of each batch, and those that are messages."""
    rows = []
    for entry in log.entries(log.start.log_id, log.end.log_id):
        if not entry.lost:
            rows += _messages(entry, bytes(log.read(entry)))
    return rows


def _messages(entry: Entry, data: bytes) -> Iterator[tuple[int, bytes]]:
    at, offset = 0, entry.first_offset
    while at < len(data):
        size, kind = frames.HEAD.unpack_from(data, at)
        if kind == frames.MESSAGE:
            yield offset, data[at + 34 : at + 4 + size]
            offset += 1
        at += 4 + size


@pytest.mark.parametrize("batches", [1, 7, 1000])
def test_a_log_is_scanned_as_the_broker_reads_it(batches):
    log = big_log(batches)
    assert len({log.files.pair_of(n).position for n in range(1, log.end.log_id)}) > 3, "several pairs"
    whole = as_brokers_read(log)
    assert [offset for offset, _ in whole] == list(range(log.end.offset))
    assert scan(log, 0, log.end.offset, batches) == whole
    assert scan(log, 100, 1000, batches) == whole[100:1000]


def test_messages_that_an_operator_gave_up_are_missing_and_nothing_else():
    log = big_log(5)
    victim = next(entry for entry in log.entries(50, 200) if entry.count > 5)
    pair = log.files.pair_of(victim.log_id)
    pair.segment.pwrite(b"\xff" * victim.size, victim.position - pair.position)
    log.shelf.clear()
    with pytest.raises(NotVerified):
        scan(log, 0, log.end.offset)
    assert log.repair.giving_up(victim.log_id, victim.log_id + 1)() == [(victim.log_id, victim.log_id + 1)]
    with pytest.raises(Unreadable) as failed:
        scan(log, 0, log.end.offset)
    assert failed.value.planned == (victim.first_offset, victim.end_offset)
    told: list[MissingRange] = []
    assert scan(log, 0, log.end.offset, skip_unreadable=True, missing=told.append) == as_brokers_read(log)
    assert told == [MissingRange(victim.first_offset, victim.end_offset, "lost")]


def test_what_recovery_wrote_anew_is_read_and_what_it_marked_is_missing():
    """Entries 3 and 4 are gone, and so is the frame that would show their border; then 7, which its frames prove."""
    built = Built()
    whole = as_brokers_read(built.log)
    built.log.shelf.clear()
    built.zero_entries(3, 5)
    built.storage.open(SEGMENT).pwrite(b"\xff" * 8, built.entry(3).position)
    built.flip_entry(7)
    while (job := built.log.repair.rebuilding(1, 99)) is not None:
        job.run()
    flags = [entry.flags & BROKEN_CHAIN for entry in built.log.entries(1, 11)]
    assert flags == [0, 0, FAULTY | REBUILT, REBUILT, *[0] * 6]
    with pytest.raises(Unreadable, match=r"offsets \[4, 8\) are lost: recovery could not read them"):
        scan(built.log, 0, 20)
    for batches in (1, 3, 99):
        told: list[MissingRange] = []
        assert scan(built.log, 0, 20, batches, skip_unreadable=True, missing=told.append) == whole[:4] + whole[8:]
        assert told == [MissingRange(4, 8, "faulty")]


def test_entries_made_of_frames_are_read_though_the_chain_breaks_behind_them():
    built = Built()
    whole = as_brokers_read(built.log)
    built.log.shelf.clear()
    built.zero_entries(4, 6)
    while (job := built.log.repair.rebuilding(1, 99)) is not None:
        job.run()
    for batches in (1, 3, 99):
        assert scan(built.log, 0, 20, batches) == whole
