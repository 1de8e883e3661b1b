"""The log of one partition: append batches, make them durable, roll and cut; reading is in `lookup`.

A batch is two writes: its frames to the segment, then its entry to the commitlog. Both go to the page cache; nothing
is acknowledged on their account before a `SyncTicket` has run over both files (sync=always), so their order on disk
does not matter and recovery sorts it out (`nsqha.commitlog.recovery`).

    append -> page cache -> unsynced() -> [worker thread: ticket.run()] -> synced(ticket) -> local_durable

- All ends are exclusive: `end.log_id` is the next entry's, `local_durable` the end of what is on this disk.
- An append that fails is cut back from both files: the log is as it was before (`AppendFailed`). If that fails too,
  or any fsync does, the log is `Poisoned`: nothing is appended or acknowledged any more.
- A ticket that is forgotten costs nothing: the next one covers whatever is not known to be durable.
- `append` and reads belong to one thread. `ticket.run` may run in another one meanwhile, and so may `unlink_some`
  and what `mending`, `restoring_anchor` and `giving_up` return; `next_pair` and what `cutting` and `rebuilding` return
  as long as nobody appends. All else that changes the list of files belongs to the readers' thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsqha.commitlog.entry import BROKEN_CHAIN, ENTRY_BYTES, BatchCorrupt, Entry, Place, genesis, next_entry
from nsqha.commitlog.journal import CutIntent
from nsqha.commitlog.lookup import LogReader, PairInfo, verifies
from nsqha.commitlog.pairs import COMMITLOG, SEGMENT, LogIdentity, Pair, drop_files, unlink
from nsqha.commitlog.reader import Batch, BatchCache
from nsqha.commitlog.rebuild import Rebuild, RebuildOutcome, lost_entries, rebuild_in, write_back, write_entries
from nsqha.commitlog.verdict import CorruptRange
from nsqha.errors import AppendFailed, LogCorrupt, Poisoned
from nsqha.frames import LOST
from nsqha.ranges import RangeSet

if TYPE_CHECKING:
    from nsqha.commitlog.storage import File, Storage

__all__ = ["LogIdentity", "LogLimits", "PairInfo", "PartitionLog", "Place", "SyncTicket"]

SEGMENT_BYTES = 128 << 20
COMMITLOG_BYTES = 16 << 20  # 200,000 entries: bounds what recovery reads when batches are tiny
UNLINK_AT_ONCE = 4  # pairs: a segment takes a tenth of a second on a busy disk, and others wait behind it


@dataclass(frozen=True, slots=True)
class LogLimits:
    """When a new pair of files begins."""

    segment_bytes: int = SEGMENT_BYTES
    commitlog_bytes: int = COMMITLOG_BYTES


@dataclass(frozen=True, slots=True)
class SyncTicket:
    """What has to reach the disk so that everything below `log_id` is durable.

    It speaks of the log as it was when it was drawn: a cut makes it void, as other batches may take the log ids.
    """

    log_id: int
    files: tuple[File, ...]
    past: object = None  # of the log that drew it

    def run(self) -> None:
        """fdatasync; in any thread. Poisoned if it fails."""
        for file in self.files:
            file.sync()


class PartitionLog(LogReader):
    """One partition's log, open for appending."""

    def __init__(
        self,
        storage: Storage,
        directory: str,
        identity: LogIdentity,
        pairs: list[Pair],
        last: Entry,
        cache: BatchCache,
        *,
        limits: LogLimits,
        local_durable: int,
    ) -> None:
        """Use `create`, or `recovery.recover` for a directory that exists. `last` is the last entry, or the genesis."""
        super().__init__(storage, directory, identity, pairs, last, cache)
        self.limits = limits
        self.local_durable = local_durable
        self.doubtful_from: int | None = None  # recovery found damage from here on: to be fetched anew
        self.poisoned: str | None = None
        self._active = pairs[-1]
        self._past = object()  # another one after each cut
        self._going: list[int] = []  # positions of pairs that are not in the log any more, and still on the disk
        self._written = last, last.encode()  # the entry that was written last, and its bytes

    @classmethod
    def create(
        cls,
        storage: Storage,
        directory: str,
        identity: LogIdentity,
        *,
        cache: BatchCache,
        limits: LogLimits | None = None,
    ) -> PartitionLog:
        """An empty log in a new or empty directory; durable when this returns."""
        storage.make_dirs(directory)
        first = genesis(identity.topic_uid, identity.partition)
        pair = Pair.create(storage, directory, first)
        return cls(storage, directory, identity, [pair], first, cache, limits=limits or LogLimits(), local_durable=1)

    # ---- writing

    def next_timestamp(self, wall_ns: int) -> int:
        """The timestamp of a batch that is flushed now: time in a log never goes back."""
        return max(self._last.timestamp_ns, wall_ns)

    def append(
        self, data: bytes | bytearray, *, count: int, flags: int, timestamp_ns: int, epoch: int, durable: int
    ) -> Entry:
        """Write one batch, stamped already, behind the last one. Nobody may change `data` from now on."""
        last = self._last
        assert data, "a batch without bytes"
        assert timestamp_ns >= last.timestamp_ns and epoch >= last.epoch, "time or epoch went back"
        entry, raw = next_entry(
            last, data, count=count, flags=flags, timestamp_ns=timestamp_ns, epoch=epoch, durable=durable
        )
        self._write(entry, raw, data)
        return entry

    def append_copy(self, entry: Entry, data: bytes | bytearray, raw: bytes = b"") -> None:
        """Write a batch that the leader wrote as `entry`; `raw`: its bytes, if they are at hand.

        LogCorrupt if it does not follow, or is not what it says. One whose frames were given up (LOST) comes without
        them, and leaves a gap in the segment."""
        if not (entry.follows(self._last) and entry.chained_to(self._last)):
            raise LogCorrupt(f"{entry} does not follow {self._last}")
        if not verifies(entry, data) and not (entry.flags & LOST and not data):
            raise LogCorrupt(f"the bytes that came with {entry} are not its own")
        self._write(entry, raw or entry.encode(), data)

    def encoded(self, entry: Entry) -> bytes:
        written, raw = self._written
        return raw if entry is written else entry.encode()

    def _write(self, entry: Entry, raw: bytes, data: bytes | bytearray) -> None:
        if self.poisoned is not None:
            raise Poisoned(self.poisoned)
        pair = self._active
        anchor = pair.anchor
        try:
            pair.segment.pwrite(data, entry.position - anchor.position - anchor.size)
            pair.commitlog.pwrite(raw, (entry.log_id - anchor.log_id) * ENTRY_BYTES)
        except OSError as error:
            self._cut_back(error)
        self._last = entry
        self._written = entry, raw
        end = (entry.log_id + 1, entry.first_offset + entry.count, entry.position + entry.size)
        self.end = tuple.__new__(Place, end)
        if entry.flags & (LOST | BROKEN_CHAIN):
            self._shelf.clear()  # its tail has no gaps; and what was there may be written back
        else:
            self._shelf.append(Batch(entry, data, end[0], end[1], entry.flags))

    def _cut_back(self, error: OSError) -> None:
        pair = self._active
        try:
            pair.cut(self.end)
        except OSError as second:
            self.poisoned = f"{self.directory}: a failed write could not be cut back: {error}; then {second}"
            raise Poisoned(self.poisoned) from second
        raise AppendFailed(f"{self.directory}: {error}") from error

    # ---- durability

    def unsynced(self) -> SyncTicket | None:
        """What to sync so that the log is durable to its present end; None if it is. Asking changes nothing."""
        if self.local_durable >= self.end.log_id:
            return None
        return SyncTicket(self.end.log_id, (self._active.segment, self._active.commitlog), self._past)

    def synced(self, ticket: SyncTicket) -> int:
        """The ticket has run. The end of what is durable here; a ticket of before a cut, or of another log, is void."""
        if ticket.past is self._past and ticket.log_id > self.local_durable:
            self.local_durable = ticket.log_id
        return self.local_durable

    @property
    def vouched_durable(self) -> int:
        """What the journal may say is durable: below it, the next recovery does not verify data again."""
        doubtful = self.doubtful_from
        return self.local_durable if doubtful is None else min(self.local_durable, doubtful)

    @property
    def past(self) -> object:
        """Another object after each cut: who looked at the log before may have seen what is not in it any more."""
        return self._past

    @property
    def needs_roll(self) -> bool:
        """Whether the next batch should go into new files."""
        anchor, end, limits = self._active.anchor, self.end, self.limits
        return (
            end.position - anchor.position - anchor.size >= limits.segment_bytes
            or (end.log_id - anchor.log_id) * ENTRY_BYTES >= limits.commitlog_bytes
        )

    def next_pair(self) -> Pair | None:
        """A new pair of files, for `use`. Blocks: the old files are synced first, then the new ones and their names;
        may run in another thread while nobody appends: readers notice nothing of it.

        AppendFailed: there is no new pair and the old one is still good."""
        old, last = self._active, self._last
        if last is old.anchor:
            return None  # nothing in it: a new pair would have the same name
        old.segment.sync()
        old.commitlog.sync()
        try:
            return Pair.create(self._storage, self.directory, last)
        except OSError as error:
            raise AppendFailed(f"{self.directory}: no new files: {error}") from error

    def use(self, new: Pair | None) -> None:
        """Append to `new` from now on. Everything before it is durable."""
        if new is None:
            return
        old = self._active
        self.local_durable = max(self.local_durable, new.first.log_id)
        self._pairs.append(new)
        self._active = new
        self._opened(old)

    # ---- mending

    def mending(
        self, batches: Sequence[tuple[Entry, bytes]], *, proven: bool = False, lost: bool = False
    ) -> Callable[[], None]:
        """Consecutive batches, as another replica has them, are to go over what does not verify here.

        LogCorrupt if they are not the ones that were here: they have to be chained to the entry before and to the one
        behind, which verify, or be the end as this log was opened or written. What is returned writes them, durably. It
        blocks for two fsyncs of each pair of files, and may run in another thread: whoever reads the range meanwhile
        finds it damaged still. `proven`: `prove` says so of one that they are followed by. `lost`: they are the
        leader's, who may have given some up: these are marked here, if ours do not verify."""
        first, last = batches[0][0], batches[-1][0]
        assert self.start.log_id <= first.log_id and last.log_id < self.end.log_id, f"{first} is not in {self}"
        before = self.entry_before(first.log_id)
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
            pair = self.pair_of(entry.log_id)
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
        """The anchor of the pair that begins with this log id is to be written anew, as memory has it.

        What is returned writes it, durably; it blocks, and may run in another thread. OSError: the file can not be
        opened."""
        pair = self.pair_of(first_log_id)
        assert pair.first.log_id == first_log_id, f"no pair of {self} begins with {first_log_id}"
        commitlog, anchor = pair.commitlog, pair.anchor.encode()

        def write() -> None:
            commitlog.pwrite(anchor, 0)
            commitlog.sync()

        return write

    def check_next(self, before: Entry, entry: Entry) -> None:
        """That `entry` came after `before`, as both say. LogCorrupt."""
        if not (entry.follows(before) and entry.chained_to(before)):
            raise LogCorrupt(f"{entry} is not what follows {before} in {self}")

    def prove(self, last: Entry) -> None:
        """That `last`, which another replica has, was in this log, and so all that it is chained to. LogCorrupt."""
        behind = self.entry(last.log_id + 1) if last.log_id + 1 < self.end.log_id else None
        if behind is not None and not (behind.follows(last) and behind.chained_to(last)):
            raise LogCorrupt(f"{last} is not what comes before {behind} in {self}")
        if behind is None and last.chain != self._last.chain:
            raise LogCorrupt(f"{last} is not the last one of {self}, {self._last}")
        if last.flags & BROKEN_CHAIN and self.entry(last.log_id).named != last.named:
            raise LogCorrupt(f"{last} stands in for what was in {self}, and proves nothing")

    def rebuilding(self, first: int, end: int, *, starting: bool = False) -> Rebuild | None:
        """For a log that nobody else has: what makes the first damage in [first, end) good, durably. None: there is
        nothing that can be done.

        First come batches that memory has and the disk has not as they were: they are written back. Then entries that
        do not verify: they are written anew, from what is around them.

        Its `run` blocks, and may be called in another thread: readers find the damage still. It looks again, and
        writes nothing, which None says, if what it finds is another damage, or none. AppendFailed: the disk refuses;
        trying again is safe. As long as some of it can not be read, nothing is marked as FAULTY, unless the node is
        `starting`: it could not go on. OSError: a file can not be opened."""
        if held := self._held(first, end):
            one, last_held = held[0].entry, held[-1].entry
            at = Place(one.log_id, one.first_offset, one.position)
            until = Place(last_held.log_id + 1, last_held.end_offset, last_held.end_position)
        else:
            try:
                for _ in self.entries(first, end):
                    pass
                return None
            except BatchCorrupt as hole:
                at, until = hole.first, hole.end
        known = self.pair_of(at.log_id)
        pair, last = Pair(self._storage, self.directory, known.anchor), self._last_of(known)
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
                text = f"{self.directory}: log ids [{at.log_id}, {until.log_id}) can not be written anew: {error}"
                raise AppendFailed(text) from error
            finally:
                pair.close()

        return Rebuild(at.log_id, until.log_id, rebuild)

    def _held(self, first: int, end: int) -> list[Batch]:
        """The first batches of [first, end), of one pair, that memory has and the disk has not as they were."""
        held: list[Batch] = []
        for log_id in range(max(first, self.start.log_id), min(end, self.end.log_id)):
            batch = self._shelf.by_log_id(log_id)
            if batch is not None:
                entry, pair = batch.entry, self.pair_of(log_id)
                there = pair.read_entry(log_id) == entry and pair.read_data(entry.position, entry.size) == batch.data
                if not there and (not held or pair is self.pair_of(held[0].entry.log_id)):
                    held.append(batch)
                    continue
            if held:
                break
        return held

    def _create_missing(self, pair: Pair) -> None:
        """Put empty files in the place of those that are gone, for good. In any thread."""
        names = self._storage.open_dir(self.directory)
        try:
            pair.create_missing()
            names.sync()
        finally:
            names.close()

    # ---- giving up

    def giving_up(self, first: int, end: int) -> Callable[[], list[tuple[int, int]]]:
        """Mark what does not verify of [first, end) as LOST: others may copy this log without it. Durable.

        What is returned blocks, and is run in another thread; it says which log ids are marked now. Entries that do not
        verify are written anew first (`rebuild`), from what is around them; what that proves is lost no more. What is
        marked may be mended later. Killed in between, the rest is damaged as it was, or worse by the one entry that was
        being written: to be given up again."""
        assert self.start.log_id <= first < end <= self.end.log_id, f"[{first}, {end}) is not in {self}"
        parts = []
        log_id = first
        while log_id < end:
            pair = self.pair_of(log_id)
            i = self._pairs.index(pair)
            # Of each pair's last entry there is a good copy: the next anchor, or in memory.
            last = self._pairs[i + 1].anchor if i + 1 < len(self._pairs) else self._last
            # The tail in memory is what was written, whatever the disk makes of it.
            held = {n: batch for n in range(log_id, end) if (batch := self._shelf.by_log_id(n)) is not None}
            commitlog, segment = pair.commitlog, pair.segment  # opened here: readers must not open them at once
            parts.append((Pair(self._storage, self.directory, pair.anchor), commitlog, segment, log_id, last, held))
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

    # ---- shortening

    def forget_pairs(self, up_to: Place) -> int:
        """The log begins behind the pairs that end at or below `up_to` now; how many. The pair being written always
        stays. Their files go with `unlink_some`."""
        n = 0
        for after in self._pairs[1:]:
            end = after.first
            if end.offset > up_to.offset or end.position > up_to.position:
                break
            n += 1
        dropped = self._pairs[:n]
        del self._pairs[:n]
        for pair in dropped:
            pair.release()
        self._going += [pair.position for pair in dropped]
        return n

    @property
    def forgotten_files(self) -> bool:
        """Whether there is something for `unlink_some`."""
        return bool(self._going)

    def unlink_some(self) -> bool:
        """Unlink what was forgotten, in another thread, while the log is appended to: nobody looks at these files.

        Each call unlinks some, the oldest first, and says whether there are more. While one runs, neither the directory
        may go nor the log begin anew in it. OSError: what could not go is tried again by the next call."""
        if some := self._going[:UNLINK_AT_ONCE]:
            drop_files(self._storage, self.directory, some)
            del self._going[: len(some)]
        return bool(self._going)

    def cut_intent(self, log_id: int) -> CutIntent:
        """What to journal before `cutting(log_id)`."""
        entry = self.entry(log_id)
        return CutIntent(log_id, entry.first_offset, entry.position, entry.epoch, entry.chain)

    def cutting(self, log_id: int) -> Callable[[], None]:
        """The log ends before `log_id` now, for everybody who asks. What is returned blocks, and may run in another
        thread, while nobody appends; only then the files end there too, durably. The intent must be in the journal;
        clear it before the next append.

        OSError: a file can not be opened, and the log is as it was."""
        assert self.start.log_id <= log_id <= self.end.log_id, f"{log_id} is not in {self}"
        pair = self.pair_of(log_id)
        last = pair.anchor if log_id == pair.first.log_id else self.entry(log_id - 1)
        end = Place(last.log_id + 1, last.end_offset, last.end_position)
        # All opened here: readers and the thread must not open them at once, and afterwards it would be too late.
        sizes = {pair.segment: end.position - pair.position, pair.commitlog: pair.slot(end.log_id)}
        names = self._storage.open_dir(self.directory)
        self._past = object()
        self._shelf.cut(log_id)
        n = self._pairs.index(pair) + 1
        removed = self._pairs[n:]
        del self._pairs[n:]
        for gone in removed:
            gone.release()
        self._active = pair
        self._last = last
        self.end = end
        self.local_durable = min(self.local_durable, log_id)
        if self.doubtful_from is not None and log_id <= self.doubtful_from:
            self.doubtful_from = None
        if pair in self._open_old:
            self._open_old.remove(pair)

        def cut() -> None:
            try:
                if removed:
                    unlink(self._storage, self.directory, [gone.position for gone in removed], COMMITLOG, SEGMENT)
                    names.sync()
                for file, size in sizes.items():
                    if file.size() > size:
                        file.truncate(size)
                for file in sizes:
                    file.sync()
            finally:
                names.close()

        return cut
