"""Opening a log whose writer may have died at any point: what to keep, what to cut, and what to say about it.

What is kept, cut and reported is the table in `nsqha.commitlog.corruption.verdict`; here it is carried out.

The order of work: refuse what a later version wrote; unlink leftovers; sync the last two pairs and drop them from the
page cache, so that what is read is what the disk has (`settle`); finish a cut that the journal knows of; scan; judge;
restore; cut; sync what was changed. An interrupted recovery is repeated from the start and finds the same. Every cut
that removes an entry is journalled before and cleared after (`Cuts`); bytes that follow the last entry and contain none
go without.

`settle` waits for the disk and touches the folder only, so a start settles several logs at once before it recovers
them one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from nsqha.commitlog.corruption.rebuild import RebuildOutcome, rebuild
from nsqha.commitlog.corruption.scan import Scan, scan_data, scan_entries
from nsqha.commitlog.corruption.verdict import Circumstances, CorruptRange, CutTail, RecoveryReport, Verdict, judge
from nsqha.commitlog.entry import ENTRY_BYTES, Entry, Place, decode_flipped
from nsqha.commitlog.files.directory import LogFiles, check_versions, find
from nsqha.commitlog.files.pairs import COMMITLOG, SEGMENT, Pair, drop_files, set_aside, unlink
from nsqha.commitlog.journal import CutIntent, NodeJournal, PartitionRecord
from nsqha.commitlog.log import FOLDERS, LogIdentity, LogLimits, PartitionLog
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.storage import read_around, sync_dirs
from nsqha.errors import LogCorrupt
from nsqha.ranges import RangeSet

if TYPE_CHECKING:
    from nsqha.commitlog.storage import Storage


__all__ = ["Cuts", "JournalCuts", "Recovery", "RecoveryReport", "SettledFiles", "recover", "settle"]

REBUILD_MAX = 1 << 20  # lost entries in a row that are still written again


class Cuts(Protocol):
    """Where the intent to cut a log is kept; both calls are durable when they return."""

    def begin(self, intent: CutIntent) -> None:
        """Before the files are touched."""

    def done(self) -> None:
        """After they are synced: clear the intent, lower the recorded local_durable to it."""


class JournalCuts:
    """`Cuts` of one partition in the node journal."""

    def __init__(self, journal: NodeJournal, key: tuple[int, int]) -> None:
        self._journal = journal
        self._key = key

    def begin(self, intent: CutIntent) -> None:
        if self._journal.record(self._key) is None:
            self._journal.stage(self._key, promise=0)
        self._journal.stage_cut(self._key, intent)
        self._journal.commit()

    def done(self) -> None:
        self._journal.stage_cut_done(self._key)
        self._journal.commit()


@dataclass(frozen=True, slots=True)
class Recovery:
    """An open log and how it was found."""

    log: PartitionLog
    report: RecoveryReport


@dataclass(frozen=True, slots=True)
class SettledFiles:
    """What a partition's folder has, on the disk with its names, and to be read from there."""

    found: LogFiles
    pairs: list[Pair]  # the last two, or the only one


def settle(storage: Storage, directory: str, identity: LogIdentity, *, named: bool = False) -> SettledFiles:
    """The first part of `recover`, for files that nobody else uses meanwhile. `named`: the names of the folders are
    durable (`was_named`)."""
    above = storage.begin_dirs(directory, FOLDERS)
    found = find(storage, directory, identity)
    check_versions(storage, directory, found.pairs[-2:])
    if found.dropping:
        drop_files(storage, directory, found.dropping)
    unlink(storage, directory, found.leftovers, COMMITLOG, SEGMENT)
    settled = SettledFiles(found, found.pairs[-2:])
    if settled.pairs:
        _settle(storage, settled.pairs, found)
    # The process that made this log may have been killed before the names of its folders were on the disk. That of the
    # partition is synced in any case, as somebody may have put a copy there.
    sync_dirs(storage, above[:1] if named else above)
    return settled


def was_named(record: PartitionRecord | None) -> bool:
    """Whether the names of a log's folders are durable, by its record in the journal: who knew that an entry was on the
    disk had made all names durable, with that entry at the latest."""
    return record is not None and record.local_durable > 1


def _settle(storage: Storage, pairs: list[Pair], found: LogFiles) -> None:
    """What is in the page cache goes to the disk, and is read from there; anchors are put right."""
    for pair in {*pairs, *found.restored}:
        pair.create_missing()
    for pair in found.restored:
        pair.commitlog.pwrite(pair.anchor.encode(), 0)
        pair.commitlog.sync()
    for pair in pairs:
        for file in (pair.segment, pair.commitlog):
            file.sync()
            file.drop_cache()
    # A process that was killed may have left names that are not on the disk.
    storage.sync_dir(pairs[0].directory)


def recover(
    storage: Storage,
    directory: str,
    identity: LogIdentity,
    record: PartitionRecord | None,
    cuts: Cuts,
    *,
    sync_always: bool,
    replicas: int,
    page_cache_lost: bool,
    cache: BatchCache,
    limits: LogLimits | None = None,
    alone: bool = False,
    settled: SettledFiles | None = None,
) -> Recovery:
    """Open the log of a partition. Everything in it is durable when this returns. `alone`: no other replica counts at
    the moment, so what an earlier recovery marked as lost is not waited for. `settled`: what `settle` has just returned
    for this folder."""
    known = record is not None and record.log_uid != 0 and (record.log_uid_trusted or replicas == 1)
    local_durable = record.local_durable if record is not None else 0
    circumstances = Circumstances(sync_always, replicas, page_cache_lost, known, local_durable)
    limits = limits or LogLimits()
    settled = settled or settle(storage, directory, identity, named=was_named(record))
    found = settled.found
    if not found.pairs:
        if found.unreadable and replicas == 1:
            raise LogCorrupt(
                f"{directory}: no commitlog of this partition can be read; restore the files, or move the folder away "
                "to begin again without what is in it"
            )
        # Others have it: what is here is kept aside, and it begins as a new replica does.
        set_aside(storage, directory, found.unreadable)
        return _begin(storage, directory, identity, circumstances, cache, limits, lost=bool(found.unreadable))
    work = _Work(storage, settled.pairs, found, cuts, circumstances, alone=alone or replicas == 1)
    if record is not None and record.cut is not None:
        work.finish_cut(record.cut)
        _settle(storage, work.pairs, found)
    last = work.examine()
    set_aside(storage, directory, found.unreadable)
    log = PartitionLog(
        storage, directory, identity, found.pairs, last, cache, limits=limits, local_durable=last.log_id + 1
    )  # fmt: skip
    if work.serve_end is not None and work.serve_end < log.end.log_id:
        # Until it is fetched again: a process that dies before that must not leave a log that looks whole.
        log.doubtful_from = work.serve_end
    return Recovery(log, work.report())


def _begin(
    storage: Storage,
    directory: str,
    identity: LogIdentity,
    circumstances: Circumstances,
    cache: BatchCache,
    limits: LogLimits,
    *,
    lost: bool,
) -> Recovery:
    """No files: a new partition, or everything is gone; `lost`: something was here."""
    log = PartitionLog.create(storage, directory, identity, cache=cache, limits=limits)
    gone = lost or circumstances.local_durable > log.end.log_id
    # A lone log takes messages before anything of it is on the disk (`PartitionLog.create`).
    unsynced = circumstances.known and not circumstances.sync_always and circumstances.page_cache_lost
    verdict = Verdict(
        cut_at=None,
        bad=log.end.log_id if gone else None,
        alarm=gone,
        new_log_uid=gone or not circumstances.known,
        possible_loss=unsynced and circumstances.replicas == 1,
    )
    return Recovery(log, RecoveryReport(created=True, watermark=circumstances.local_durable, verdict=verdict))


class _Work:
    """One recovery of existing files. `pairs` are the last two, or the only one; a cut may shorten `found.pairs`."""

    def __init__(
        self,
        storage: Storage,
        pairs: list[Pair],
        found: LogFiles,
        cuts: Cuts,
        circumstances: Circumstances,
        *,
        alone: bool,
    ) -> None:
        self.storage = storage
        self.pairs = pairs
        self.found = found
        self.cuts = cuts
        self.circumstances = circumstances
        self.alone = alone
        self.verdict = Verdict(None, None, False, False, False)
        self.watermark = 0
        self.cuts_made: list[CutTail] = []
        self.damage: list[CorruptRange] = []
        self.trimmed_bytes = 0
        self.serve_end: int | None = None
        self._unsynced = False  # something was written since the files were settled

    def report(self) -> RecoveryReport:
        return RecoveryReport(
            created=False,
            watermark=self.watermark,
            verdict=self.verdict,
            cuts=tuple(self.cuts_made),
            trimmed_bytes=self.trimmed_bytes,
            damage=tuple(self.damage),
            serve_end=self.serve_end,
            restored_anchors=self._lost_anchors(),
            unreadable=tuple(self.found.unreadable),
        )

    def _lost_anchors(self) -> int:
        """Anchors that had been durable. That of a lone log is so with its first entry (`PartitionLog.create`)."""
        not_yet = self.circumstances.local_durable == 1 and self.circumstances.replicas == 1
        lost = [pair for pair in self.found.restored if pair is not self.found.unfinished]
        return sum(pair.position > 0 or not not_yet for pair in lost)

    # ---- before looking

    def finish_cut(self, intent: CutIntent) -> None:
        """A cut was begun and perhaps not finished. Another entry in its place means that it was."""
        pair = self._pair_at(intent.log_id)
        if pair is not None:
            entry = pair.read_entry(intent.log_id)
            if entry is None or (entry.epoch, entry.chain) == (intent.epoch, intent.chain):
                self._cut(Place(intent.log_id, intent.offset, intent.position), "intent")
        self.cuts.done()
        durable = min(self.circumstances.local_durable, intent.log_id)
        self.circumstances = replace(self.circumstances, local_durable=durable)

    def _pair_at(self, log_id: int) -> Pair | None:
        pairs = [pair for pair in self.found.pairs if pair.first.log_id <= log_id]
        return pairs[-1] if pairs else None

    def _cut(self, at: Place, why: str) -> None:
        """Remove every entry from `at` on, durably; the intent is in the journal."""
        pair = self._pair_at(at.log_id)
        assert pair is not None
        n = self.found.pairs.index(pair)
        entries = sum(_count_entries(p, at.log_id) for p in self.found.pairs[n:])
        removed = [p.position for p in self.found.pairs[n + 1 :]]
        removed += [position for position in self.found.unreadable if position > at.position]
        del self.found.pairs[n + 1 :]
        self.found.restored = [p for p in self.found.restored if p in self.found.pairs]
        if removed:
            self.found.unreadable = [position for position in self.found.unreadable if position <= at.position]
            unlink(self.storage, pair.directory, removed, COMMITLOG, SEGMENT)
            self.storage.sync_dir(pair.directory)
        pair.cut(at)
        pair.segment.sync()
        pair.commitlog.sync()
        self.pairs = self.found.pairs[-2:]
        self.cuts_made.append(CutTail(at, entries, why))

    # ---- looking, judging, acting

    def examine(self) -> Entry:
        """Scan, judge, restore and cut; the last entry of the log as it is now."""
        local_durable = self.circumstances.local_durable
        scan = scan_entries(self.pairs, alone=self.alone)
        self.watermark = max(scan.watermark, local_durable)
        if self.circumstances.replicas > 1 and not self.circumstances.page_cache_lost:
            self.watermark = max(self.watermark, scan.written)
        for copy in scan.copies:
            self._write([copy])
            self.damage.append(CorruptRange(_place(copy), _end_place(copy), RebuildOutcome.PROVEN.value))
        short = next(iter(scan.bad_data), (scan.end, 0))[0]
        scan_data(scan, self.pairs, min(local_durable, short))
        bad = RangeSet([*scan.bad_entries, *scan.bad_data])
        bad.add(scan.end, self.watermark)
        self.verdict = judge(self.watermark, bad, self.circumstances)
        end = self.verdict.cut_at
        if end is None:
            end = max(scan.end, self.watermark)
        if self.verdict.bad is not None:
            end = self._restore(scan, end)
            if self.circumstances.replicas > 1:
                self.serve_end = self.verdict.bad
        return self._end_log(end)

    def _restore(self, scan: Scan, end: int) -> int:
        """Deal with what does not verify below the watermark, in the order of the log; where the log ends then."""
        lost = RangeSet([(first, min(after, end)) for first, after in scan.bad_entries])
        lost.add(scan.end, end)
        for first, after in scan.bad_data:
            if first < end:
                self._note(first, min(after, end), "data")
        for first, after in list(lost):
            if after == end and self.circumstances.replicas > 1:
                return first  # nothing valid follows: catch-up appends from here
            if self.circumstances.replicas == 1:
                first = self._unflip(first, after)
            if first < after:
                self._rebuild(first, after, end)
        return end

    def _unflip(self, first: int, end: int) -> int:
        """Restore entries that have one wrong bit; the first one that has more."""
        for log_id in range(first, end):
            pair, before = self._pair_at(log_id), self._entry(log_id - 1)
            assert pair is not None and before is not None
            entry = decode_flipped(read_around(pair.commitlog, ENTRY_BYTES, pair.slot(log_id)))
            if entry is None or not (entry.follows(before) and entry.chained_to(before)):
                return log_id
            self._write([entry])
            self.damage.append(CorruptRange(_place(entry), _end_place(entry), RebuildOutcome.PROVEN.value))
        return end

    def _rebuild(self, first: int, after_id: int, end: int) -> None:
        """Write the entries [first, after_id) again, from what is around them."""
        if after_id - first > REBUILD_MAX:
            raise LogCorrupt(
                f"{self.pairs[0].directory}: {after_id - first} entries from log id {first} on are missing although "
                "they were durable; restore the files, or move this folder away to begin again without them"
            )
        before = self._entry(first - 1)
        after = self._entry(after_id) if after_id < end else None
        assert before is not None
        pair = self._pair_at(first)
        assert pair is not None
        size = (after.position if after is not None else pair.position + pair.segment.size()) - before.end_position
        data = pair.read_data(before.end_position, max(size, 0))
        if self.circumstances.replicas > 1:
            data = b""  # only the extent matters: the bytes are fetched again
        entries, outcome = rebuild(before, after, after_id - first, data)
        self._write(entries)
        self.damage.append(CorruptRange(_place(entries[0]), _end_place(entries[-1]), outcome.value))

    def _note(self, first: int, after: int, what: str) -> None:
        a, b = self._entry(first), self._entry(after - 1)
        if a is not None and b is not None:
            self.damage.append(CorruptRange(_place(a), _end_place(b), what))

    def _entry(self, log_id: int) -> Entry | None:
        for pair in reversed(self.found.pairs):
            if pair.anchor.log_id == log_id:
                return pair.anchor  # as good as the entry it is a copy of
            if pair.anchor.log_id < log_id:
                return pair.read_entry(log_id)
        return None

    def _write(self, entries: list[Entry]) -> None:
        """Put consecutive entries of one pair into their slots."""
        pair = self._pair_at(entries[0].log_id)
        assert pair is not None
        self._unsynced = True
        pair.commitlog.pwrite(b"".join([entry.encode() for entry in entries]), pair.slot(entries[0].log_id))

    def _end_log(self, end: int) -> Entry:
        """Let the log end before `end`; what was changed is synced."""
        last = self._entry(end - 1)
        assert last is not None, f"no entry {end - 1} to end the log with"
        at = _end_place(last)
        pair = self._pair_at(end)
        assert pair is not None
        if self.verdict.cut_at is not None:
            first_cut = self._entry(end)
            epoch, chain = (first_cut.epoch, first_cut.chain) if first_cut is not None else (0, 0)
            self.cuts.begin(CutIntent(at.log_id, at.offset, at.position, epoch, chain))
            self._cut(at, "torn")
            self.cuts.done()
        else:
            self.trimmed_bytes = pair.cut(at)
        if self._unsynced or self.trimmed_bytes or self.cuts_made:  # a cut may let an older pair be the last
            for pair in self.pairs:
                pair.segment.sync()
                pair.commitlog.sync()
        return last


def _place(entry: Entry) -> Place:
    return Place(entry.log_id, entry.first_offset, entry.position)


def _end_place(entry: Entry) -> Place:
    return Place(entry.log_id + 1, entry.end_offset, entry.end_position)


def _count_entries(pair: Pair, first: int) -> int:
    """Valid entries of a pair from `first` on."""
    first = max(first, pair.first.log_id)
    slots = pair.commitlog.size() // ENTRY_BYTES - (first - pair.anchor.log_id)
    return sum(entry is not None for entry in pair.read_entries(first, slots)) if slots > 0 else 0
