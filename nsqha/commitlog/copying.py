"""A log as others copy it: runs of batches as they lie in the files, where an epoch ends, and beginning in the middle.

    run = entries, data       entries: 80 bytes each, consecutive; data: their frames, back to back

A run is checked before it goes out (the reader's CRCs) and before it is appended (`PartitionLog.append_copy`: place,
chain, CRC). It says nothing about being committed; the replica that asks knows up to where it may be used. Of frames
that were given up (LOST) only the entry goes, and only to a replica that is better off with it: one that gets the whole
log, not one that mends a range.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from nsqha.commitlog.entry import ENTRY_BYTES, Entry, decode
from nsqha.commitlog.files.pairs import LogIdentity, Pair
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.reading.lookup import LogReader
from nsqha.errors import LogCorrupt
from nsqha.frames import LOST

if TYPE_CHECKING:
    from nsqha.commitlog.reading.reader import BatchCache
    from nsqha.commitlog.storage import Storage


class BatchRun(NamedTuple):
    """Consecutive batches, encoded. `end` is the log id behind the last one."""

    entries: bytes
    data: bytes
    end: int


class EpochEnd(NamedTuple):
    """Where an epoch ends: exclusive end, and the chain of its last entry. Epoch 0: nothing is left of it."""

    epoch: int
    end: int
    chain: int


def read_run(log: LogReader, first: int, end: int, max_bytes: int, *, lost: bool = False) -> BatchRun:
    """The batches of [first, end) up to `max_bytes` of data, but at least one. LogCorrupt if that one is damaged.

    `lost`: also those whose frames were given up, without them."""
    entries: list[bytes] = []
    parts: list[bytes | bytearray] = []
    size = 0
    log_id = first
    while log_id < end:
        try:
            entry = log.entry(log_id)
            given_up = lost and bool(entry.flags & LOST)
            if entries and not given_up and size + entry.size > max_bytes:
                break
            data = b"" if given_up else log.read(entry)
        except LogCorrupt:
            if not entries:
                raise
            break
        parts.append(data)
        entries.append(log.encoded(entry))
        size += len(data) or ENTRY_BYTES
        log_id += 1
    return BatchRun(b"".join(entries), b"".join(parts), log_id)


def batches(entries: bytes, data: bytes) -> Iterator[tuple[Entry, bytes, bytes]]:
    """The batches of a run that came from elsewhere: entry, frames, and the entry's bytes.

    LogCorrupt if the two halves do not fit each other.
    """
    if len(entries) % ENTRY_BYTES:
        raise LogCorrupt(f"{len(entries)} bytes are not a whole number of commitlog entries")
    at = 0
    for n in range(0, len(entries), ENTRY_BYTES):
        raw = entries[n : n + ENTRY_BYTES]
        entry = decode(raw)
        if entry is None:
            raise LogCorrupt("a commitlog entry that was sent does not verify")
        size = 0 if entry.flags & LOST else entry.size
        if size > len(data) - at:
            raise LogCorrupt(f"{entry} came without its bytes")
        # One batch, one message: by far the usual case, and then nothing is copied.
        yield entry, data if size == len(data) else data[at : at + size], raw
        at += size
    if at != len(data):
        raise LogCorrupt(f"{len(data) - at} bytes came without an entry")


def epoch_end(log: LogReader, epoch: int) -> EpochEnd:
    """The highest epoch of the log that is not above `epoch`, and where it ends."""
    end = log.end_of_epoch(epoch)
    if end is None:
        return EpochEnd(0, log.start.log_id, 0)
    last = log.entry_before(end)
    return EpochEnd(last.epoch, end, last.chain)


def begin_at(
    storage: Storage,
    directory: str,
    identity: LogIdentity,
    anchor: Entry,
    *,
    cache: BatchCache,
    limits: LogLimits | None = None,
) -> PartitionLog:
    """An empty log that goes on behind `anchor`, in a new or empty directory; durable when this returns."""
    storage.make_dirs(directory)
    pair = Pair.create(storage, directory, anchor)
    return PartitionLog(
        storage,
        directory,
        identity,
        [pair],
        anchor,
        cache,
        limits=limits or LogLimits(),
        local_durable=anchor.log_id + 1,
    )
