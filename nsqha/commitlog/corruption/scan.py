"""What the files of a log really hold: the reading half of recovery. Nothing is changed or judged here.

Two passes over the last two pairs (older ones were synced when they were rolled):

1. every slot of both commitlogs, behind holes too: which entries do not verify by their own CRC or do not follow the
   entry before, which are missing, how far the log goes, and the highest watermark that any valid entry carries;
2. from the last place that is known to be on this disk (`local_durable`), or from where a segment is too short: do the
   frames verify, and does the chain.

Both work through blocks, so a log of any size costs little memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nsqha.commitlog.entry import CRC_AT, ENTRY_BYTES, FAULTY, UNREADABLE, Entry, columns, decode, follow_each_other
from nsqha.commitlog.files.pairs import BLOCK_SLOTS, Pair
from nsqha.commitlog.storage import read_around
from nsqha.hot import crc32
from nsqha.ranges import RangeSet

_FLAGS = Entry._fields.index("flags")
READ_BYTES = 1 << 20  # data verified at a time, unless one batch is larger


@dataclass
class Scan:
    """Ranges are of log ids."""

    first: int  # the lowest log id looked at
    end: int  # behind the highest valid entry
    written: int = 0  # behind the highest slot that was filled to its last byte
    watermark: int = 0  # the highest `durable` of any valid entry; above what was marked as FAULTY
    alone: bool = True
    bad_entries: RangeSet = field(
        default_factory=RangeSet
    )  # may reach behind `end`: slots with bytes that are no entry
    bad_data: RangeSet = field(default_factory=RangeSet)  # the entry is valid, its frames are not
    copies: list[Entry] = field(
        default_factory=list
    )  # entries that the next pair's anchor has and their own slot lacks


def scan_entries(pairs: list[Pair], *, alone: bool) -> Scan:
    """First pass. `alone`: no other replica could have what an earlier recovery marked as FAULTY."""
    first = pairs[0].first.log_id
    scan = Scan(first, first, watermark=max(pair.anchor.durable for pair in pairs), alone=alone)
    for pair, after in zip(pairs, [*pairs[1:], None], strict=True):
        _scan_pair(scan, pair, after)
    return scan


def _scan_pair(scan: Scan, pair: Pair, after: Pair | None) -> None:
    anchor = pair.anchor
    limit = anchor.log_id + -(-pair.commitlog.size() // ENTRY_BYTES) if after is None else after.anchor.log_id + 1
    segment_end = pair.position + pair.segment.size()
    previous: Entry | None = anchor
    log_id = scan.end = anchor.log_id + 1
    while log_id < limit:
        n = min(BLOCK_SLOTS, limit - log_id)
        sound = _sound(scan, pair.read_slots(log_id, n), previous, segment_end) if previous is not None else None
        if sound is not None:
            previous = sound
            log_id = scan.end = sound.log_id + 1
            continue
        block = pair.read_entries(log_id, n)
        if not block:
            break
        for entry in block:
            if entry is None:
                previous = None
            else:
                if previous is not None and not entry.follows(previous):
                    scan.bad_entries.add(log_id, log_id + 1)
                if entry.end_position > segment_end and not entry.flags & UNREADABLE:
                    scan.bad_data.add(log_id, log_id + 1)
                if entry.durable > scan.watermark:
                    scan.watermark = entry.durable
                if entry.flags & UNREADABLE == FAULTY and not scan.alone:
                    # Lost here, and durable once, even if the journal does not know it any more.
                    scan.bad_data.add(log_id, log_id + 1)
                    scan.watermark = max(scan.watermark, log_id + 1)
                scan.bad_entries.add(scan.end, log_id)
                previous = entry
                scan.end = log_id + 1
            log_id += 1
    if after is not None:
        _scan_border(scan, pair, after.anchor)
    else:
        end, scan.written = _end_of_bytes(pair, scan.end)
        scan.bad_entries.add(scan.end, end)


def _sound(scan: Scan, raw: bytes, previous: Entry, segment_end: int) -> Entry | None:
    """The last entry of a block in which nothing is wrong; None if something is, or may be."""
    fields = columns(raw)
    if fields is None or not follow_each_other(fields, previous):
        return None
    last = decode(raw[-ENTRY_BYTES:])
    if last is None or last.end_position > segment_end:
        return None
    if not scan.alone and any(flags & FAULTY for flags in fields[_FLAGS]):
        return None
    scan.watermark = max(scan.watermark, max(fields[-1]))
    return last


def _scan_border(scan: Scan, pair: Pair, copy: Entry) -> None:
    """The last entry of a pair that was rolled: the next anchor is its copy."""
    if copy.log_id > pair.anchor.log_id and pair.read_entry(copy.log_id) is None:
        if not copy.flags & FAULTY:
            scan.copies.append(copy)
            scan.bad_entries.add(scan.end, copy.log_id)
            scan.bad_entries.discard(copy.log_id, copy.log_id + 1)
        else:
            scan.bad_entries.add(scan.end, copy.log_id + 1)
    scan.end = copy.log_id + 1


def _end_of_bytes(pair: Pair, log_id: int) -> tuple[int, int]:
    """Behind the last slot at or above `log_id` that has a byte other than zero; and behind the last that ends in one:
    what an entry ends with is its crc."""
    position, end, written = pair.slot(log_id), log_id, log_id
    size = pair.commitlog.size()
    while position < size:
        raw = read_around(pair.commitlog, BLOCK_SLOTS * ENTRY_BYTES, position)
        used = len(raw.rstrip(b"\0"))
        if used:
            end = log_id + (position - pair.slot(log_id)) // ENTRY_BYTES + -(-used // ENTRY_BYTES)
            written = end if used % ENTRY_BYTES == 0 or used % ENTRY_BYTES > CRC_AT else end - 1
        position += BLOCK_SLOTS * ENTRY_BYTES
    return end, written


def scan_data(scan: Scan, pairs: list[Pair], first: int) -> None:
    """Second pass: frames and chain of every valid entry from `first` on."""
    for pair, end in zip(pairs, [*(p.first.log_id for p in pairs[1:]), scan.end], strict=True):
        for log_id, good_chain, good_data in check_pair(pair, max(first, pair.first.log_id), end):
            if not good_chain:
                scan.bad_entries.add(log_id, log_id + 1)
            elif not good_data:
                scan.bad_data.add(log_id, log_id + 1)


def check_pair(pair: Pair, first: int, end: int) -> Iterator[tuple[int, bool, bool]]:
    """(log id, chain fits, frames verify or are known to be lost) of every valid entry in [first, end)."""
    if first >= end:
        return
    previous = pair.anchor if first == pair.first.log_id else pair.read_entry(first - 1)
    for log_id in range(first, end, BLOCK_SLOTS):
        for entry, frames in frames_of(pair, pair.read_entries(log_id, min(BLOCK_SLOTS, end - log_id))):
            if entry is not None:
                good_chain = previous is None or bool(entry.flags & FAULTY) or entry.chained_to(previous)
                good_data = len(frames) == entry.size and crc32(frames) == entry.crc
                good_data |= bool(entry.flags & UNREADABLE)
                yield entry.log_id, good_chain, good_data
            previous = entry


def frames_of(pair: Pair, block: list[Entry | None]) -> Iterator[tuple[Entry | None, memoryview]]:
    """Every entry of a block with its bytes, not verified; large parts of the segment are read at once."""
    view = memoryview(b"")
    begin = 0
    for i, entry in enumerate(block):
        if entry is None:
            yield None, view[:0]
            continue
        at = entry.position - begin
        if at < 0 or at + entry.size > len(view):
            begin, at = entry.position, 0
            view = memoryview(pair.read_data(begin, _readable(block, i)))
        yield entry, view[at : at + entry.size]


def _readable(block: list[Entry | None], i: int) -> int:
    """Bytes to read for entry `i` and as many valid ones behind it as READ_BYTES hold."""
    size = 0
    for entry in block[i:]:
        if entry is None or (size and size + entry.size > READ_BYTES):
            break
        size += entry.size
    return size
