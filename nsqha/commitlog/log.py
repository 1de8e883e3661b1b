"""The log of one partition: append batches, make them durable, roll and cut; reading is in `reading.lookup`.

A batch is two writes: its frames to the segment, then its entry to the commitlog. Both go to the page cache; nothing
is acknowledged on their account before a `SyncTicket` has run over both files (sync=always), so their order on disk
does not matter and recovery sorts it out (`nsqha.commitlog.recovery`).

    append -> page cache -> unsynced() -> [worker thread: ticket.run()] -> synced(ticket) -> local_durable

- All ends are exclusive: `end.log_id` is the next entry's, `local_durable` the end of what is on this disk.
- An append that fails is cut back from both files: the log is as it was before (`AppendFailed`). If that fails too,
  or the disk itself fails (EIO, not a lack of room), or any fsync does, the log is `Poisoned`: nothing is appended or
  acknowledged any more.
- A ticket that is forgotten costs nothing: the next one covers whatever is not known to be durable.
- `append` and reads belong to one thread. `ticket.run` may run in another one meanwhile, and so may `unlink_some` and
  what `repair` returns to be run; `next_pair`, and what `cutting` and `repair.rebuilding` return, as long as no thread
  appends. All else that changes the list of files belongs to the readers' thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from nsqha import hot
from nsqha.commitlog.corruption.repair import LogRepair
from nsqha.commitlog.entry import BROKEN_CHAIN, ENTRY_BYTES, UNREADABLE, Entry, Place, genesis
from nsqha.commitlog.files.open_logs import LogShare, OpenLogs
from nsqha.commitlog.files.pairs import COMMITLOG, SEGMENT, LogIdentity, Pair, drop_files, unlink
from nsqha.commitlog.journal import CutIntent
from nsqha.commitlog.reading.lookup import LogReader, PairInfo, verifies
from nsqha.commitlog.reading.reader import Batch, BatchCache
from nsqha.commitlog.storage import passes, sync_dirs
from nsqha.errors import AppendFailed, LogCorrupt, Poisoned
from nsqha.frames import LOST

if TYPE_CHECKING:
    from nsqha.commitlog.storage import Directory, File, Storage

__all__ = ["LogIdentity", "LogLimits", "PairInfo", "PartitionLog", "Place", "SyncTicket"]

SEGMENT_BYTES = 128 << 20
FOLDERS = 2  # that are made for a log: the partition's, and the topic's
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
    files: tuple[File | Directory, ...]
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
        self.doubtful_from: int | None = None  # recovery found damage from here on: to be fetched again
        self.poisoned: str | None = None
        self.idle_at: Place | None = None  # its end when its owner had nothing left to do; another one now: not idle
        self.on_wake: Callable[[], object] | None = None  # called once, when it is idle no more
        self.on_wanted_durable: Callable[[], object] | None = None  # its files would be closed, were they synced
        self.share = LogShare(OpenLogs(1 << 31), self)  # of descriptors; until `share_descriptors`, what it likes
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
        at_once: bool = True,
    ) -> PartitionLog:
        """An empty log in a new or empty directory; durable when this returns, with the names of the folders above it.
        Not `at_once`: with its first entries, as the first `unsynced` has the folders, too, and one commit of the file
        system's journal carries all of it.

        Everything is made before anything is synced. Until the journal says that an entry is durable, `recovery.settle`
        expects any part of it, and any name not to be durable."""
        above = storage.begin_dirs(directory, FOLDERS)
        first = genesis(identity.topic_uid, identity.partition)
        try:
            if at_once:
                pair = Pair.create(storage, directory, first)
            else:  # opened now, so that no descriptor is lacking when they are synced
                pair = Pair.begin(storage, [storage.open_dir(path) for path in (directory, *above)], directory, first)
        except OSError:
            sync_dirs(storage, above)  # the folders stay; who finds them looks no further up
            raise
        if at_once:
            sync_dirs(storage, above)
        return cls(storage, directory, identity, [pair], first, cache, limits=limits or LogLimits(), local_durable=1)

    # ---- writing

    def next_timestamp(self, wall_ns: int) -> int:
        """The timestamp of a batch that is flushed now: time in a log never goes back."""
        return max(self.files.last.timestamp_ns, wall_ns)

    def append(
        self, data: bytes | bytearray, *, count: int, flags: int, timestamp_ns: int, epoch: int, durable: int
    ) -> Entry:
        """Write one batch, stamped already, behind the last one. `data` must not change from now on."""
        last = self.files.last
        assert data, "a batch without bytes"
        assert timestamp_ns >= last.timestamp_ns and epoch >= last.epoch, "time or epoch went back"
        entry, raw = hot.next_entry(Entry, last, data, count, flags, timestamp_ns, epoch, durable)
        self._write(entry, raw, data)
        return entry

    def append_copy(self, entry: Entry, data: bytes | bytearray, raw: bytes = b"") -> None:
        """Write a batch that the leader wrote as `entry`; `raw`: its bytes, if they are at hand.

        LogCorrupt if it does not follow, or is not what it says. One whose frames were given up (LOST) comes without
        them, and leaves a gap in the segment."""
        if not (entry.follows(self.files.last) and entry.chained_to(self.files.last)):
            raise LogCorrupt(f"{entry} does not follow {self.files.last}")
        if not verifies(entry, data) and not (entry.flags & LOST and not data):
            raise LogCorrupt(f"the bytes that came with {entry} are not its own")
        self._write(entry, raw or entry.encode(), data)

    def append_next_copy(self, raw: bytes, data: bytes) -> Entry | None:
        """`append_copy` of one batch by the bytes of its entry. None: nothing is written; `append_copy` knows why."""
        entry = hot.copied_entry(Entry, self.files.last, raw, data, UNREADABLE | BROKEN_CHAIN)
        if entry is not None:
            self._write(entry, raw, data)
        return entry

    def encoded(self, entry: Entry) -> bytes:
        written, raw = self._written
        return raw if entry is written else entry.encode()

    def _write(self, entry: Entry, raw: bytes, data: bytes | bytearray) -> None:
        if self.poisoned is not None:
            raise Poisoned(self.poisoned)
        pair = self._active
        # Once per batch, and an attribute of a named tuple costs as much as all of them.
        log_id, _, first_offset, position, _, count, size, _, flags, _, _, _, _ = entry
        try:
            segment, commitlog = pair.segment, pair.commitlog
        except OSError as error:
            self._refuse(error)  # nothing is written that would have to be cut back
        try:
            segment.pwrite(data, position - pair.position)
            commitlog.pwrite(raw, (log_id - pair.anchor_log_id) * ENTRY_BYTES)
        except OSError as error:
            self._cut_back(error)
        self.files.last = entry
        self._written = entry, raw
        end_log_id, end_offset = log_id + 1, first_offset + count
        self.end = tuple.__new__(Place, (end_log_id, end_offset, position + size))
        if self.on_wake is not None:
            wake(self)
        if flags & (LOST | BROKEN_CHAIN):
            self.shelf.clear()  # its tail has no gaps; and what was there may be written back
        else:
            self.shelf.append(Batch(entry, data, first_offset, end_log_id, end_offset, flags))

    def _cut_back(self, error: OSError) -> NoReturn:
        pair = self._active
        try:
            pair.cut(self.end)
        except OSError as second:
            self.poisoned = f"{self.directory}: a failed write could not be cut back: {error}; then {second}"
            raise Poisoned(self.poisoned) from second
        self._refuse(error)

    def _refuse(self, error: OSError) -> NoReturn:
        if not passes(error):
            self.poisoned = f"{self.directory}: a write failed: {error}"
            raise Poisoned(self.poisoned) from error
        raise AppendFailed(f"{self.directory}: {error}") from error

    # ---- durability

    def unsynced(self) -> SyncTicket | None:
        """What to sync so that the log is durable to its present end; None if it is. Asking changes nothing."""
        if self.local_durable >= self.end.log_id:
            return None
        pair = self._active
        return SyncTicket(self.end.log_id, (pair.segment, pair.commitlog, *pair.unnamed), self._past)

    def synced(self, ticket: SyncTicket) -> int:
        """The ticket has run. The end of what is durable here; a ticket of before a cut, or of another log, is void."""
        if ticket.past is self._past and ticket.log_id > self.local_durable:
            self.local_durable = ticket.log_id
            self._active.unnamed = ()
            self.share.synced()
        return self.local_durable

    @property
    def vouched_durable(self) -> int:
        """What the journal may say is durable: below it, the next recovery does not verify data again."""
        doubtful = self.doubtful_from
        return self.local_durable if doubtful is None else min(self.local_durable, doubtful)

    @property
    def past(self) -> object:
        """Another object after each cut: a reader from before may have seen what is not in the log any more."""
        return self._past

    @property
    def needs_roll(self) -> bool:
        """Whether the next batch should go into new files."""
        (log_id, _, position), pair, limits = self.end, self._active, self.limits
        return (
            position - pair.position >= limits.segment_bytes
            or (log_id - pair.anchor_log_id) * ENTRY_BYTES >= limits.commitlog_bytes
        )

    def next_pair(self) -> Pair | None:
        """A new pair of files, for `use`. Blocks: the old files are synced first, then the new ones and their names;
        may run in another thread while nothing is appended: readers notice nothing of it.

        AppendFailed: there is no new pair and the old one is still good."""
        old, last = self._active, self.files.last
        if last is old.anchor:
            return None  # nothing in it: a new pair would have the same name
        for file in (old.segment, old.commitlog, *old.unnamed):
            file.sync()
        try:
            return Pair.create(self.files.storage, self.directory, last)
        except OSError as error:
            raise AppendFailed(f"{self.directory}: no new files: {error}") from error

    def use(self, new: Pair | None) -> None:
        """Append to `new` from now on. Everything before it is durable."""
        if new is None:
            return
        self.local_durable = max(self.local_durable, new.first.log_id)
        self._active.unnamed = ()
        self.files.add(new)
        self._active = new

    @property
    def repair(self) -> LogRepair:
        """Writes what does not verify again."""
        return LogRepair(self)

    # ---- descriptors

    def share_descriptors(self, open_logs: OpenLogs) -> None:
        """Close the files now, and whenever `open_logs` needs their descriptors; they are opened as they are used.

        The thread that appends and reads closes them: see `OpenLogs`."""
        self.share = share = LogShare(open_logs, self)
        self.files.on_open(share.opened, share.released)
        if not self.close_idle_files():
            open_logs.opened(self)

    def close_idle_files(self) -> bool:
        """Close the files until they are used again; False if something of them is not durable."""
        if self.poisoned is not None:
            return False
        if self.local_durable < self.end.log_id or self._active.unnamed:
            self.share.closes = True
            if self.on_wanted_durable is not None:
                self.on_wanted_durable()
            return False
        self.files.release()
        return True

    # ---- shortening

    def forget_pairs(self, up_to: Place) -> int:
        """The log begins behind the pairs that end at or below `up_to` now; how many. The pair being written always
        stays. Their files go with `unlink_some`."""
        dropped = self.files.forget(up_to)
        self._going += [pair.position for pair in dropped]
        return len(dropped)

    @property
    def forgotten_files(self) -> bool:
        """Whether there is something for `unlink_some`."""
        return bool(self._going)

    def unlink_some(self) -> bool:
        """Unlink what was forgotten, in another thread, while the log is appended to: these files are not read.

        Each call unlinks some, the oldest first, and says whether there are more. While one runs, neither the directory
        may go nor another log begin in it. OSError: what could not go is tried again by the next call."""
        if some := self._going[:UNLINK_AT_ONCE]:
            drop_files(self.files.storage, self.directory, some)
            del self._going[: len(some)]
        return bool(self._going)

    def cut_intent(self, log_id: int) -> CutIntent:
        """What to journal before `cutting(log_id)`."""
        entry = self.entry(log_id)
        return CutIntent(log_id, entry.first_offset, entry.position, entry.epoch, entry.chain)

    def cutting(self, log_id: int) -> Callable[[], None]:
        """The log ends before `log_id` now, for every reader. What is returned blocks, and may run in another
        thread, while nothing is appended; only then the files end there too, durably. The intent must be journalled;
        clear it before the next append.

        OSError: a file cannot be opened, and the log is as it was."""
        assert self.start.log_id <= log_id <= self.end.log_id, f"{log_id} is not in {self}"
        pair = self.files.pair_of(log_id)
        last = pair.anchor if log_id == pair.first.log_id else self.entry(log_id - 1)
        end = Place(last.log_id + 1, last.end_offset, last.end_position)
        # All opened here: readers and the thread must not open them at once, and afterwards it would be too late.
        sizes = {pair.segment: end.position - pair.position, pair.commitlog: pair.slot(end.log_id)}
        names = self.files.storage.open_dir(self.directory)
        self._past = object()
        self.shelf.cut(log_id)
        removed = self.files.end_with(pair, last)
        self._active = pair
        self.end = end
        wake(self)
        self.local_durable = min(self.local_durable, log_id)
        if self.doubtful_from is not None and log_id <= self.doubtful_from:
            self.doubtful_from = None

        def cut() -> None:
            try:
                if removed:
                    unlink(self.files.storage, self.directory, [gone.position for gone in removed], COMMITLOG, SEGMENT)
                    names.sync()
                for file, size in sizes.items():
                    if file.size() > size:
                        file.truncate(size)
                for file in sizes:
                    file.sync()
            finally:
                names.close()

        return cut


def wake(log: PartitionLog) -> None:
    """There may be something to do: the log is not idle, until its owner has looked."""
    log.idle_at, woken, log.on_wake = None, log.on_wake, None
    if woken is not None:
        woken()
