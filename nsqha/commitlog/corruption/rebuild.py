"""Writing lost commitlog entries again, from their neighbours and the frames: where there is no other replica, or where
an operator gives up what no other one has.

A run of `n` entries between two good ones is missing. The frames between them are all there; what is lost is where
one batch ended, and a few numbers. Batches show in the frames: all messages of a batch have one timestamp, channel
events come first in it, attribute frames go with the messages behind them. If that gives `n` batches, and the chain
of the entry behind the run fits what was computed, everything is exactly as it was (but for `durable`, which becomes
that of the entry before): *proven*. Else, if the frames tile and their ids count up without a gap, the messages are
kept and the entries flagged REBUILT. Else the run becomes one FAULTY entry that spans it, followed by empty ones so
that log ids stay dense.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from nsqha.commitlog.control import iter_frames
from nsqha.commitlog.entry import (
    CRC_ZLIB,
    ENTRY_BYTES,
    FAULTY,
    REBUILT,
    UNREADABLE,
    VERSION,
    Entry,
    crc_of,
    next_chain,
)
from nsqha.commitlog.files.pairs import entries_in
from nsqha.commitlog.reading.lookup import verifies
from nsqha.errors import LogCorrupt
from nsqha.frames import (
    ATTRIBUTES,
    CARRY,
    CHECKPOINT,
    EPOCH_START,
    HAS_ATTRIBUTES,
    HAS_CARRY,
    HAS_CHECKPOINT,
    HAS_EVENTS,
    LOST,
    MESSAGE,
)

if TYPE_CHECKING:
    from nsqha.commitlog.corruption.verdict import CorruptRange
    from nsqha.commitlog.files.pairs import Pair
    from nsqha.commitlog.reading.reader import Batch

_MESSAGE = struct.Struct(">q2x16s")  # behind size and type: timestamp, attempts, id
_MESSAGE_MIN = 8 + _MESSAGE.size


class RebuildOutcome(Enum):
    """How much of a run of lost entries came back."""

    PROVEN = "proven"
    REBUILT = "rebuilt"
    FAULTY = "faulty"


@dataclass(frozen=True, slots=True)
class Rebuild:
    """What makes the damage of log ids [first, end) good; None when it is run: it is not as it was."""

    first: int
    end: int
    run: Callable[[], CorruptRange | None]


@dataclass
class FrameGroup:
    """What looks like one batch: frames [position, end) of the data."""

    position: int
    end: int
    count: int = 0
    timestamp_ns: int | None = None  # None: it has no messages
    flags: int = 0
    starts_epoch: bool = False


def rebuild(before: Entry, after: Entry | None, n: int, data: bytes) -> tuple[list[Entry], RebuildOutcome]:
    """The `n` entries between `before` and `after`, whose frames are `data`.

    Without `after` the run is the end of the log, and `data` is all that follows `before` in the segment; what it holds
    behind n batches was never durable and is left out.
    """
    groups, whole = _groups(data)
    if after is None:
        groups = groups[:n]
        tiles = whole or len(groups) == n
    else:
        count, size = after.first_offset - before.end_offset, after.position - before.end_position
        whole = whole and len(data) == size
        tiles = whole and len(groups) <= n and sum(group.count for group in groups) == count
    if tiles and groups:
        flags = 0 if after is None and len(groups) == n else REBUILT
        if after is not None and len(groups) == n:
            for epoch in dict.fromkeys((before.epoch, after.epoch)):
                exact = list(_entries(before._replace(epoch=epoch), after, groups, n, data, 0))
                if after.chain == next_chain(exact[-1].chain, after):
                    return exact, RebuildOutcome.PROVEN
        return list(_entries(before, after, groups, n, data, flags)), RebuildOutcome.REBUILT
    count, size = (
        (0, len(data))
        if after is None
        else (after.first_offset - before.end_offset, after.position - before.end_position)
    )
    if after is not None and not count and not size:
        # What stood for these log ids was written, and they were not: a crash came in between.
        return list(_entries(before, after, [FrameGroup(0, 0)], n, data, REBUILT)), RebuildOutcome.REBUILT
    group = FrameGroup(0, size, count, before.timestamp_ns, FAULTY)
    return list(_entries(before, after, [group], n, data, REBUILT)), RebuildOutcome.FAULTY


def rebuild_in(
    pair: Pair, first: int, end: int, last: Entry, *, sure: bool
) -> tuple[list[Entry], RebuildOutcome] | None:
    """What goes into the slots [first, end) of a pair, of which none verifies and both neighbours do; None if that is
    not so when the disk is asked again. `last`: the pair's last entry, from another place. `sure`: nothing is FAULTY on
    account of bytes that cannot be read, as they may be there later: OSError."""
    pair.commitlog.drop_cache()
    slots = pair.read_slots(first, end - first)
    before = pair.anchor if first == pair.first.log_id else pair.read_entry(first - 1)
    after = last if end > last.log_id else pair.read_entry(end)
    if before is None or after is None or any(entries_in(slots, first)):
        return None
    entries: list[Entry] = []
    outcome = RebuildOutcome.PROVEN
    if first < after.log_id:
        size = after.position - before.end_position
        data = pair.read_data(before.end_position, size)
        entries, outcome = rebuild(before, after, after.log_id - first, data)
        if outcome is RebuildOutcome.FAULTY and sure:
            # Once more, without zeros in the place of what cannot be read.
            same = pair.commitlog.pread((end - first) * ENTRY_BYTES, pair.slot(first)) == slots
            if not same or pair.segment.pread(size, before.end_position - pair.position) != data:
                return None
    return entries + ([last] if after is last else []), outcome


def write_entries(pair: Pair, entries: list[Entry]) -> None:
    """Put consecutive entries into their slots, durably, and the anchor if it went with them."""
    commitlog = pair.commitlog  # the handle that writes is the one that is synced
    if pair.read_entry(pair.anchor.log_id) is None:
        commitlog.pwrite(pair.anchor.encode(), 0)
    commitlog.pwrite(b"".join([entry.encode() for entry in entries]), pair.slot(entries[0].log_id))
    commitlog.sync()


def write_back(pair: Pair, batches: list[Batch]) -> None:
    """Put consecutive batches where they were, durably; frames first, as an entry says that they are there."""
    data = b"".join([batch.data for batch in batches])
    segment = pair.segment
    segment.pwrite(data, batches[0].entry.position - pair.position)
    segment.sync()
    write_entries(pair, [batch.entry for batch in batches])


def lost_entries(pair: Pair, first: int, end: int, last: Entry) -> Iterator[Entry]:
    """What goes into the slots [first, end) of a pair when everything in them that does not verify is given up.

    An entry whose frames do not verify, marked LOST; and runs of entries that do not verify, whole, as `rebuild` makes
    them. `last`: the pair's last entry, from another place. Written while this goes on, nothing is read after that."""

    def known(log_id: int) -> Entry | None:
        entry = pair.read_entry(log_id)
        head = entry
        for before_id in range(log_id - 1, pair.anchor.log_id, -1):
            if head is None or not head.stands_in:
                break
            head = pair.read_entry(before_id)
        if head is not None and head.flags & UNREADABLE == FAULTY:
            entry = None  # marked by a recovery that did not look at the frames
        if entry is not None and entry.stands_in and head is not None and head.end_position != entry.position:
            entry = None  # what stood for it is mended
        return last if entry is None and log_id == last.log_id else entry

    log_id = first
    while log_id > pair.first.log_id and known(log_id - 1) is None:
        log_id -= 1
    before: Entry | None = pair.anchor if log_id == pair.first.log_id else known(log_id - 1)
    while log_id < end:
        assert before is not None
        entry = known(log_id)
        if entry is None:
            after = next(found for n in range(log_id + 1, last.log_id + 1) if (found := known(n)) is not None)
            data = pair.read_data(before.end_position, after.position - before.end_position)
            entries, outcome = rebuild(before, after, after.log_id - log_id, data)
            if outcome is RebuildOutcome.FAULTY:
                entries[0] = entries[0]._replace(flags=entries[0].flags | LOST)
            yield from entries
            before, log_id = entries[-1], after.log_id
            continue
        if not verifies(entry.named, pair.read_data(entry.position, entry.size)):
            if not entry.flags & LOST:
                yield entry._replace(flags=entry.flags | LOST)
        elif pair.read_entry(log_id) != entry.named:
            yield entry.named
        before, log_id = entry, log_id + 1


def _entries(
    before: Entry, after: Entry | None, groups: list[FrameGroup], n: int, data: bytes, flags: int
) -> Iterator[Entry]:
    """One entry per group, and empty ones up to `n`."""
    end = groups[-1].end
    groups = groups + [FrameGroup(end, end) for _ in range(n - len(groups))]
    epoch = before.epoch
    for group in groups:
        if group.starts_epoch and after is not None:
            epoch = after.epoch
        timestamp_ns = group.timestamp_ns if group.timestamp_ns is not None else before.timestamp_ns
        entry = Entry(
            log_id=before.log_id + 1,
            epoch=epoch,
            first_offset=before.end_offset,
            position=before.end_position,
            timestamp_ns=max(timestamp_ns, before.timestamp_ns),
            count=group.count,
            size=group.end - group.position,
            crc=crc_of(data[group.position : group.end]),
            flags=group.flags | flags,
            version=VERSION,
            crc_kind=CRC_ZLIB,
            chain=0,
            durable=before.durable,
        )
        before = entry._replace(chain=next_chain(before.chain, entry))
        yield before


def _groups(data: bytes) -> tuple[list[FrameGroup], bool]:
    """What look like batches, and whether they fill `data`. Ends before the first frame that makes no sense."""
    groups: list[FrameGroup] = []
    group = FrameGroup(0, 0)
    unit = None  # where the attribute frames begin that go with the next message
    last_id = None
    try:
        for frame in iter_frames(data):
            if frame.type == MESSAGE:
                if frame.end - frame.position < _MESSAGE_MIN:
                    break
                timestamp_ns, raw_id = _MESSAGE.unpack_from(data, frame.payload_position)
                number = int(raw_id, 16)
                if last_id is not None and number != last_id + 1:
                    break
                last_id = number
                if group.timestamp_ns not in (None, timestamp_ns):
                    group = _next_group(groups, group, frame.position if unit is None else unit)
                    group.flags = 0 if unit is None else HAS_ATTRIBUTES
                group.timestamp_ns = timestamp_ns
                group.count += 1
                unit = None
            elif frame.type == ATTRIBUTES:
                unit = frame.position if unit is None else unit
                group.flags |= HAS_ATTRIBUTES
            else:
                if group.count or unit is not None:
                    group = _next_group(groups, group, frame.position)
                    unit = None
                group.flags |= _FLAGS.get(frame.type, HAS_EVENTS)
                group.starts_epoch |= frame.type == EPOCH_START
            group.end = frame.end
    except (LogCorrupt, ValueError):
        pass
    if group.end > group.position:
        groups.append(group)
    return groups, bool(groups) and groups[-1].end == len(data)


def _next_group(groups: list[FrameGroup], group: FrameGroup, position: int) -> FrameGroup:
    group.end = position
    groups.append(group)
    return FrameGroup(position, position)


_FLAGS = {CHECKPOINT: HAS_CHECKPOINT, CARRY: HAS_CARRY}
