"""What does not verify of a log is written again: from another replica, from memory, or from what is around it.

All that blocks is returned, to be run in another thread, while readers go on and find the damage still.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nsqha.commitlog.corruption.rebuild import (
    Rebuild,
    RebuildOutcome,
    lost_entries,
    rebuild_in,
    write_back,
    write_entries,
)
from nsqha.commitlog.corruption.verdict import CorruptRange
from nsqha.commitlog.entry import BROKEN_CHAIN, FAULTY, BatchCorrupt, Entry, Place
from nsqha.commitlog.files.pairs import Pair
from nsqha.commitlog.reading.lookup import LogReader, verifies
from nsqha.commitlog.reading.reader import Batch
from nsqha.errors import AppendFailed, LogCorrupt
from nsqha.ranges import RangeSet

if TYPE_CHECKING:
    from nsqha.commitlog.storage import File


class LogRepair:
    """Repairs one log. Nothing that verifies is changed, and what is written is durable when that returns."""

    def __init__(self, log: LogReader) -> None:
        self._log = log

    # ---- what is damaged

    def whole_damage(self, first_log_id: int, end_log_id: int) -> tuple[int, int]:
        """A damaged range, with what belongs to it: log ids that only a FAULTY entry in front of them stands for, or
        stood for until it was mended."""
        log = self._log
        first, end = max(first_log_id, log.start.log_id), min(end_log_id, log.end.log_id)
        if first >= end:
            return first, first
        try:
            found = first
            while first > log.start.log_id and log.entry(first).stands_in:
                first -= 1
            if first < found and not log.entry(first).flags & BROKEN_CHAIN:
                first += 1  # mended already
        except LogCorrupt:
            pass  # that one is damage of its own
        try:
            # Whatever is in front of them: it may be mended already.
            while end < log.end.log_id and log.entry(end).stands_in:
                end += 1
        except LogCorrupt:
            pass
        return first, end

    def knows(self, log_id: int) -> bool:
        """Whether the entry of this log id verifies, so that it can prove what came before; or the log ends there."""
        log = self._log
        if log_id >= log.end.log_id:
            return log_id == log.end.log_id
        try:
            entry = log.entry(log_id)
        except LogCorrupt:
            return False
        return not entry.flags & FAULTY and not entry.stands_in

    # ---- from another replica

    def mending(
        self, batches: Sequence[tuple[Entry, bytes]], *, proven: bool = False, lost: bool = False
    ) -> Callable[[], None]:
        """Consecutive batches, as another replica has them, are to go over what does not verify here.

        LogCorrupt if they are not the ones that were here: they have to be chained to the entry before and to the one
        behind, which verify, or be the end as this log was opened or written. What is returned writes them, durably. It
        blocks for two fsyncs of each pair of files, and may run in another thread: a reader of the range meanwhile
        finds it damaged still. `proven`: `prove` says so of one that they are followed by. `lost`: they are the
        leader's, who may have given some up: these are marked here, if ours do not verify."""
        log = self._log
        first, last = batches[0][0], batches[-1][0]
        assert log.start.log_id <= first.log_id and last.log_id < log.end.log_id, f"{first} is not in {log}"
        before = log.entry_before(first.log_id)
        for entry, data in batches:
            if not verifies(entry, data) and not (lost and entry.lost):
                raise LogCorrupt(f"the bytes that came with {entry} are not its own")
            self.check_next(before, entry)
            before = entry
        if not proven:
            self.prove(last)
        frames: list[tuple[File, bytes, int]] = []
        entries: list[tuple[File, bytes, int]] = []
        for entry, data in batches:
            pair = log.files.pair_of(entry.log_id)
            if entry.lost and verifies(entry.named, pair.read_data(entry.position, entry.size)):
                entry = entry.named  # whatever our entry is: it may only stand in for this one
            frames.append((pair.segment, data, entry.position - pair.position))
            entries.append((pair.commitlog, entry.encode(), pair.slot(entry.log_id)))

        def write() -> None:
            # Frames first, for good: an entry says that they are there, and a start may take its word for it.
            for writes in (frames, entries):
                for file, data, position in writes:
                    file.pwrite(data, position)
                for file in dict.fromkeys(file for file, _, _ in writes):
                    file.sync()

        return write

    def restoring_anchor(self, first_log_id: int) -> Callable[[], None]:
        """The anchor of the pair that begins with this log id is to be written again, as memory has it.

        What is returned writes it, durably; it blocks, and may run in another thread. OSError: the file cannot be
        opened."""
        log = self._log
        pair = log.files.pair_of(first_log_id)
        assert pair.first.log_id == first_log_id, f"no pair of {log} begins with {first_log_id}"
        commitlog, anchor = pair.commitlog, pair.anchor.encode()

        def write() -> None:
            commitlog.pwrite(anchor, 0)
            commitlog.sync()

        return write

    def check_next(self, before: Entry, entry: Entry) -> None:
        """That `entry` came after `before`, as both say. LogCorrupt."""
        if not (entry.follows(before) and entry.chained_to(before)):
            raise LogCorrupt(f"{entry} is not what follows {before} in {self._log}")

    def prove(self, last: Entry) -> None:
        """That `last`, which another replica has, was in this log, and so all that it is chained to. LogCorrupt."""
        log = self._log
        behind = log.entry(last.log_id + 1) if last.log_id + 1 < log.end.log_id else None
        if behind is not None and not (behind.follows(last) and behind.chained_to(last)):
            raise LogCorrupt(f"{last} is not what comes before {behind} in {log}")
        if behind is None and last.chain != log.files.last.chain:
            raise LogCorrupt(f"{last} is not the last one of {log}, {log.files.last}")
        if last.flags & BROKEN_CHAIN and log.entry(last.log_id).named != last.named:
            raise LogCorrupt(f"{last} stands in for what was in {log}, and proves nothing")

    def rebuilding(self, first: int, end: int, *, starting: bool = False) -> Rebuild | None:
        """For a log that no other node has: what makes the first damage in [first, end) good, durably. None: there is
        nothing that can be done.

        First come batches that memory has and the disk has not as they were: they are written back. Then entries that
        do not verify: they are written again, from what is around them.

        Its `run` blocks, and may be called in another thread: readers find the damage still. It looks again, and
        writes nothing, which None says, if what it finds is another damage, or none. AppendFailed: the disk refuses;
        trying again is safe. As long as some of it cannot be read, nothing is marked as FAULTY, unless the node is
        `starting`: it could not go on. OSError: a file cannot be opened."""
        log = self._log
        if held := self._held(first, end):
            one, last_held = held[0].entry, held[-1].entry
            at = Place(one.log_id, one.first_offset, one.position)
            until = Place(last_held.log_id + 1, last_held.end_offset, last_held.end_position)
        else:
            try:
                for _ in log.entries(first, end):
                    pass
                return None
            except BatchCorrupt as hole:
                at, until = hole.first, hole.end
        known = log.files.pair_of(at.log_id)
        pair, last = Pair(log.files.storage, log.directory, known.anchor), log.files.last_of(known)
        missing = False
        try:
            _ = pair.commitlog, pair.segment  # opened here: a lack of descriptors is not the disk's failure
        except FileNotFoundError:
            missing = True
        except OSError:
            pair.close()
            raise

        def rebuild() -> CorruptRange | None:
            try:
                if missing:
                    self._create_missing(pair)
                if held:
                    write_back(pair, held)
                    return CorruptRange(at, until, RebuildOutcome.PROVEN.value)
                rebuilt = rebuild_in(pair, at.log_id, until.log_id, last, sure=not starting)
                if rebuilt is None:
                    return None
                write_entries(pair, rebuilt[0])
                return CorruptRange(at, until, rebuilt[1].value)
            except OSError as error:
                text = f"{log.directory}: log ids [{at.log_id}, {until.log_id}) cannot be written again: {error}"
                raise AppendFailed(text) from error
            finally:
                pair.close()

        return Rebuild(at.log_id, until.log_id, rebuild)

    def _held(self, first: int, end: int) -> list[Batch]:
        """The first batches of [first, end), of one pair, that memory has and the disk has not as they were."""
        log = self._log
        held: list[Batch] = []
        for log_id in range(max(first, log.start.log_id), min(end, log.end.log_id)):
            batch = log.shelf.by_log_id(log_id)
            if batch is not None:
                entry, pair = batch.entry, log.files.pair_of(log_id)
                there = pair.read_entry(log_id) == entry and pair.read_data(entry.position, entry.size) == batch.data
                if not there and (not held or pair is log.files.pair_of(held[0].entry.log_id)):
                    held.append(batch)
                    continue
            if held:
                break
        return held

    def _create_missing(self, pair: Pair) -> None:
        """Put empty files in the place of those that are gone, for good. In any thread."""
        log = self._log
        names = log.files.storage.open_dir(log.directory)
        try:
            pair.create_missing()
            names.sync()
        finally:
            names.close()

    # ---- giving up

    def giving_up(self, first: int, end: int) -> Callable[[], list[tuple[int, int]]]:
        """Mark what does not verify of [first, end) as LOST: others may copy this log without it. Durable.

        What is returned blocks, and is run in another thread; it says which log ids are marked now. Entries that do not
        verify are written again first (`rebuild`), from what is around them; what that proves is lost no more. What is
        marked may be mended later. Killed in between, the rest is damaged as it was, or worse by the one entry that was
        being written: to be given up again."""
        log = self._log
        assert log.start.log_id <= first < end <= log.end.log_id, f"[{first}, {end}) is not in {log}"
        parts = []
        log_id = first
        while log_id < end:
            pair = log.files.pair_of(log_id)
            last = log.files.last_of(pair)  # there is a good copy of it, whatever the disk has
            # The tail in memory is what was written, whatever the disk makes of it.
            held = {n: batch for n in range(log_id, end) if (batch := log.shelf.by_log_id(n)) is not None}
            commitlog, segment = pair.commitlog, pair.segment  # opened here: readers must not open them at once
            own = Pair(log.files.storage, log.directory, pair.anchor)
            parts.append((own, commitlog, segment, log_id, last, held))
            log_id = last.log_id + 1

        def mark() -> list[tuple[int, int]]:
            marked = RangeSet()
            for pair, commitlog, segment, log_id, last, held in parts:
                for n in range(log_id, min(end, last.log_id + 1)):
                    if (batch := held.get(n)) is not None:
                        segment.pwrite(batch.data, batch.entry.position - pair.position)
                        commitlog.pwrite(batch.entry.encode(), pair.slot(n))
                for entry in lost_entries(pair, log_id, min(end, last.log_id + 1), last):
                    commitlog.pwrite(entry.encode(), pair.slot(entry.log_id))
                    if entry.lost:
                        marked.add(entry.log_id, entry.log_id + 1)
                for n in range(log_id, min(end, last.log_id + 1)):
                    if (now := pair.read_entry(n)) is not None and now.lost:
                        marked.add(n, n + 1)
                segment.sync()
                commitlog.sync()
                pair.close()
            return list(marked)

        return mark
