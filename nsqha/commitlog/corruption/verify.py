"""Reading a whole log to see whether it is what it says: `nsqha log verify`, and the slow scrub of a running node.

Checked for every batch: the entry's own CRC, that it goes on where the one before ends, the chain, the CRC of its
frames, that the frames tile it and hold as many messages as the entry says; for every pair: that its anchor is the
last entry of the pair before; that the log ends with the entry it is known to end with; of one that was opened to be
looked at, that all its files can be used. Nothing is changed.

`checks` is a generator that does a bounded piece of work per step, so that a scrub can pause in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nsqha import hot
from nsqha.commitlog.corruption.scan import frames_of
from nsqha.commitlog.entry import UNREADABLE, BatchCorrupt, Entry, Place
from nsqha.commitlog.files.pairs import BLOCK_SLOTS, COMMITLOG, SEGMENT, Pair
from nsqha.commitlog.reading.lookup import LogReader, bad_data, hole


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """One step: this batch is good, or this range is not."""

    end: Place
    messages: int = 0
    size: int = 0
    problem: BatchCorrupt | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """What a whole pass found."""

    start: Place
    end: Place
    batches: int
    messages: int
    size: int
    problems: tuple[BatchCorrupt, ...]


def verify(log: LogReader, progress: Callable[[int, int], None] | None = None) -> Verification:
    """Check everything that is in the log now; `progress(done, total)` is called with bytes."""
    start, end = log.start, log.end
    total = end.position - start.position
    batches = messages = size = 0
    problems = unusable(log)
    for checked in checks(log, start.log_id, end.log_id):
        messages += checked.messages
        size += checked.size
        if checked.problem is None:
            batches += 1
        else:
            problems.append(checked.problem)
        if progress is not None:
            progress(checked.end.position - start.position, total)
    problems.sort(key=lambda problem: problem.first.position)
    return Verification(start, end, batches, messages, size, tuple(problems))


def torn_end(log: LogReader) -> BatchCorrupt | None:
    """Bytes behind the last entry, which no entry speaks of: a write that a crash broke off, or that is under way.

    None also if the log goes on there by now."""
    pair, end = log.files.pairs[-1], log.end
    segment_end, slots_end = pair.position + pair.size(SEGMENT), pair.size(COMMITLOG)
    if (segment_end <= end.position and slots_end <= pair.slot(end.log_id)) or pair.read_entry(end.log_id):
        return None
    return BatchCorrupt(end, end._replace(position=max(segment_end, end.position)), "no entry follows: a torn end")


def unusable(log: LogReader) -> list[BatchCorrupt]:
    """Files in front of the log's beginning, or behind its end, of which nothing can be used; what is missing between
    two pairs shows where it is missing. And the anchor of a last pair that has no batch yet, unless a crash came while
    the pair was made: nothing is lost, and a start makes it again."""
    start, end = log.start, log.end
    problems = []
    for position in log.unreadable:
        if position < start.position:
            why = f"the commitlog at position {position} cannot be used, so where that pair begins is not known"
            problems.append(BatchCorrupt(Place(0, 0, position), start, why))
        elif position >= end.position:
            why = f"the commitlog at position {position} cannot be used, so where that pair ends is not known"
            problems.append(BatchCorrupt(end, end._replace(position=position), why))
    pair = log.files.pair_of(end.log_id)
    if pair.first == end and not log.unfinished and not _same(pair.read_entry(pair.anchor.log_id), pair.anchor):
        problems.append(_anchor_problem(pair))
    return problems


def checks(log: LogReader, first_log_id: int, end_log_id: int) -> Iterator[VerifyStep]:
    """Every batch of [first, end), one per step; a range of lost entries is one step."""
    log_id = first_log_id
    previous: Entry | None = None
    while log_id < end_log_id:
        pair = log.files.pair_of(log_id)
        if log_id == pair.first.log_id:
            on_disk = pair.read_entry(pair.anchor.log_id)
            if not _same(on_disk, pair.anchor) or (previous is not None and not _same(previous, on_disk)):
                yield VerifyStep(pair.first, problem=_anchor_problem(pair))
            previous = pair.anchor
        end = min(end_log_id, log.end_of(pair).log_id, log_id + BLOCK_SLOTS)
        block = pair.read_entries(log_id, end - log_id)
        for entry, data in frames_of(pair, block):
            checked = _check(log, log_id, entry, data, previous)
            previous = entry
            log_id = checked.end.log_id
            yield checked
            if entry is None:
                break  # the damage may reach beyond this block
        if not block:
            gone = hole(log, log_id)
            log_id, previous = gone.end_log_id, None
            yield VerifyStep(gone.end, problem=gone)
    if previous is not None and previous.log_id + 1 == log.end.log_id and not _same(previous, log.last):
        # Its own CRC and the chain before it are good: only what came after it, or memory, shows it.
        first = Place(previous.log_id, previous.first_offset, previous.position)
        yield VerifyStep(log.end, problem=BatchCorrupt(first, log.end, "the last entry was replaced"))


def _check(log: LogReader, log_id: int, entry: Entry | None, data: memoryview, previous: Entry | None) -> VerifyStep:
    if entry is None:
        gone = hole(log, log_id)
        return VerifyStep(gone.end, problem=gone)
    end = Place(log_id + 1, entry.end_offset, entry.end_position)
    here = Place(log_id, entry.first_offset, entry.position)
    if previous is not None and not entry.follows(previous):
        problem = BatchCorrupt(here, end, "the entry does not go on where the one before it ends")
    elif previous is not None and not entry.chained_to(previous):
        problem = BatchCorrupt(here, end, "the chain is broken: an entry was replaced")
    elif entry.flags & UNREADABLE or len(data) != entry.size or hot.crc32(data) != entry.crc:
        problem = bad_data(entry)
    elif _messages(data) != entry.count:
        problem = BatchCorrupt(here, end, f"the frames do not tile the batch or are not {entry.count} messages")
    else:
        return VerifyStep(end, entry.count, entry.size)
    return VerifyStep(end, problem=problem)


def _same(one: Entry | None, other: Entry | None) -> bool:
    """Whether two copies are of one entry; what was given up since is marked in the one in its slot only."""
    return one is other or (one is not None and other is not None and one.named == other.named)


def _messages(data: memoryview) -> int | None:
    """Message frames in a batch; None if its frames do not tile it."""
    position, count = 0, 0
    try:
        while position < len(data):
            position, control = hot.skip_control(data, position, len(data)), position
            position, n = hot.walk(data, position, len(data), len(data))
            count += n
            if position == control:
                return None
    except ValueError:
        return None
    return count


def _anchor_problem(pair: Pair) -> BatchCorrupt:
    anchor = pair.anchor
    first = Place(anchor.log_id, anchor.first_offset, anchor.position)
    return BatchCorrupt(first, pair.first, "the commitlog does not begin with a copy of the last entry before it")
