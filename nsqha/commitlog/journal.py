"""The node journal: what one data directory has promised, and what it may believe of itself after a crash.

It holds, per partition, the highest leader epoch this node promised to, the log_uid of its log, up to where the log
is known to be on this disk (`local_durable`), whether what is above that may have been acknowledged (`lazy`) and a cut
that was begun; and for the node who it is, which cluster it belongs to, whether the last stop was clean, into which
page cache it wrote, and whether a failed fsync closed the directory (poison). One lock file keeps a second process out.

It is a `recordfile` of JSON texts (`journal_record`), preallocated, replaced at the first write of every start and
whenever it passes 1 MiB. A start that is refused before it has written anything leaves the file as it was. On a disk
without a free block the new one is made of what was preallocated for the old one. One record is one round for all
partitions, with one crc, one write and one fdatasync.

What is found at start:
- a torn last record is ordinary, but it may have held promises: `promise_trusted` is False for every partition until a
  promise is staged again (first promise the epoch that the metadata names). The rest of the valid records stands.
- damage (a bad record that is not a torn last one) may hide anything: also `log_uid_trusted` is False for every
  partition until a log_uid is staged. With more than one replica recovery draws a new one then.
- after an unclean stop with another page cache than now (the host restarted, or the file system was mounted again), and
  after poison, what was not synced may be gone: `page_cache_lost` is True for every partition until it is staged as
  recovered. A partition that this life does not open keeps the flag for the life that does.
All three outlive further crashes.

Where several threads use it (a recovery at run time stages and writes its cuts beside the loop), locks are handed in.
`record()` shows what is staged; it counts only after the `write` of a later `take` has returned. A write makes durable
all that was taken before it began, by any thread: a round that another thread has taken and not written yet may hold
what the caller relies on.

    loop      stage(...) stage(...)  take() ──►                stage(...)  take() ──► ...
    worker                            write() ── durable ──►
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nsqha.commitlog.journal_node import JournalNode
from nsqha.commitlog.journal_record import (
    CutIntent,
    JournalContents,
    NodeIdentity,
    NodeState,
    PartitionRecord,
    decode,
    encode,
)
from nsqha.commitlog.recordfile import RecordFile
from nsqha.errors import AppendFailed, ConfigError
from nsqha.ids import PartitionKey, new_uid

if TYPE_CHECKING:
    from nsqha.commitlog.storage import Lock, Storage

__all__ = [
    "CutIntent",
    "NodeIdentity",
    "JournalContents",
    "NodeJournal",
    "NodeState",
    "PartitionRecord",
    "inspect",
]

REWRITE_BYTES = 1 << 20  # replaced when it has grown past this, or past four times the state if that is more
SLACK_BYTES = 64 << 10  # preallocated behind that, to go on in the old file if a full disk refuses the new one

JOURNAL = "journal"
LOCK = "lock"


@dataclass(frozen=True, slots=True)
class JournalRound:
    """One round on its way to the disk."""

    partitions: Mapping[PartitionKey, PartitionRecord | None]
    node: NodeState


def inspect(storage: Storage, directory: str) -> JournalContents:
    """Read a journal without taking it over. ConfigError if nothing of it can be read."""
    contents = RecordFile.inspect(storage, f"{directory}/{JOURNAL}")
    return decode(contents, f"{directory}/{JOURNAL}")


class JournalFile:
    """What is on disk of the journal: rounds are written into it, by one thread at a time."""

    def __init__(
        self, begin: Callable[[bytes], RecordFile], node: NodeState, records: Mapping[PartitionKey, PartitionRecord]
    ) -> None:
        """The first write replaces the file by what `begin` makes of this state and the changes."""
        self.written = dict(records)
        self._written_node = self._owed_node = node
        # Kept until a write succeeds, so that a round that was refused is part of the next one.
        self._owed: dict[PartitionKey, PartitionRecord | None] = {}
        self._begin = begin
        self._file: RecordFile | None = None
        self._rewrite_at = 0

    def write(self, rounds: Iterable[JournalRound]) -> None:
        """Make these durable, and those that were refused before; nothing is written if they change nothing."""
        for taken in rounds:
            self._owed.update(taken.partitions)
            self._owed_node = taken.node
        node = self._owed_node
        if self.begun and not self._owed and node == self._written_node:
            return
        self._store(encode(node, self._owed, self.written), node)
        for key, record in self._owed.items():
            if record is None:
                self.written.pop(key, None)
            else:
                self.written[key] = record
        self._owed = {}
        self._written_node = node

    @property
    def begun(self) -> bool:
        """The file is this process's: it was written by it."""
        return self._file is not None

    @property
    def end(self) -> int:
        """Bytes of the file that are written."""
        return 0 if self._file is None else self._file.end

    def _store(self, payload: bytes, node: NodeState) -> None:
        if self._file is None or self._file.end + len(payload) > self._rewrite_at:
            state = {key: r for key, r in {**self.written, **self._owed}.items() if r is not None}
            whole = encode(node, state, {})
            rewrite_at = _rewrite_at(len(whole))
            if self._file is None:
                self._file, self._rewrite_at = self._begin(whole), rewrite_at
                return
            try:
                self._file.replace(whole, allocate=rewrite_at + SLACK_BYTES)
            except AppendFailed:
                pass  # a full disk: go on in the old file as long as that has room
            else:
                self._rewrite_at = rewrite_at
                return
        self._file.append(payload)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class NodeJournal:
    """The journal of the data directory that this process owns."""

    def __init__(
        self,
        lock: Lock,
        begin: Callable[[bytes], RecordFile],
        node: NodeState,
        records: dict[PartitionKey, PartitionRecord],
        found: JournalContents | None,
        new_lock: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Use `open` or `look`."""
        self.found = found  # what was read at start; None: the journal is new
        self._page_cache_lost = found is not None and _page_cache_lost(found, node.page_cache)
        self._lock = lock
        # Staged and taken; held for a moment only.
        self._staging = new_lock()
        self._records = records
        self.node = JournalNode(node)
        self._changed: dict[PartitionKey, PartitionRecord | None] = {}
        self._taken_node = node
        self._rounds: list[JournalRound] = []  # taken, and in no write yet; in order
        # Written; held for as long as the disk takes.
        self._writing = new_lock()
        self._file = JournalFile(begin, node, records)
        self._behind = False

    @classmethod
    def open(
        cls,
        storage: Storage,
        directory: str,
        rng: random.Random,
        *,
        page_cache: str = "",
        new_lock: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> NodeJournal:
        """Lock the data directory and read its journal, or begin one, and write that this process uses it.

        `page_cache` names the one that this process writes into (empty: unknown); `new_lock`: a mutex, where more than
        one thread uses it."""
        journal = cls.look(storage, directory, rng, page_cache=page_cache, new_lock=new_lock)
        try:
            journal.commit()
        except BaseException:
            journal.close()
            raise
        return journal

    @classmethod
    def look(
        cls,
        storage: Storage,
        directory: str,
        rng: random.Random,
        *,
        page_cache: str = "",
        new_lock: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> NodeJournal:
        """As `open`, for a start that may still be refused: nothing is written before the first `commit`, and no log
        may be opened before it."""
        storage.make_dirs(directory)
        lock = _locked(storage, directory)
        try:
            path = f"{directory}/{JOURNAL}"
            found = _load(storage, directory) if storage.exists(path) else None
            node, records = _starting_state(found, rng, page_cache)
        except BaseException:
            lock.close()
            raise

        def begin(payload: bytes) -> RecordFile:
            # Always replaced: a torn tail is gone, the start and its doubts are on disk, and an old format is updated.
            try:
                return RecordFile.create(storage, path, payload, allocate=_rewrite_at(len(payload)) + SLACK_BYTES)
            except AppendFailed:
                # A node has to start on a full disk: what the last life had reserved is for this one's first writes.
                if found is None or not RecordFile.give_back(storage, path):
                    raise
                return RecordFile.create(storage, path, payload)

        return cls(lock, begin, node, records, found, new_lock)

    def close(self) -> None:
        """Let go of the directory. What is staged and not written is lost: see `stop`."""
        self._file.close()
        self._lock.close()

    # What is known

    @property
    def identity(self) -> NodeIdentity:
        return self.node.identity

    @property
    def created(self) -> bool:
        """The directory had no journal before."""
        return self.found is None

    def page_cache_lost(self, key: PartitionKey) -> bool:
        """Whether what was not synced of a partition may be gone, and it was not recovered since."""
        record = self.record(key)
        return self._page_cache_lost if record is None else record.page_cache_lost

    def record(self, key: PartitionKey) -> PartitionRecord | None:
        """What is known of a partition, staged changes included; None if it was never heard of."""
        return self._records.get(key)

    def records(self) -> Mapping[PartitionKey, PartitionRecord]:
        """All partitions."""
        return dict(self._records)

    # Stage: change memory

    def stage(
        self,
        key: PartitionKey,
        *,
        promise: int | None = None,
        log_uid: int | None = None,
        local_durable: int | None = None,
        lazy: bool | None = None,
        recovered: bool = False,
    ) -> None:
        """Change fields of a partition's record; a partition that is new begins with an empty one. `recovered`: the log
        was opened in this life, and a new log_uid is staged no later than this where one was due."""
        with self._staging:
            old = self._records.get(key) or PartitionRecord(page_cache_lost=self._page_cache_lost)
            if promise is None:
                promise, promised = old.promise, old.promise_trusted
            else:
                assert promise >= old.promise, f"{key}: promise {promise} is below {old.promise}"
                promised = True
            if log_uid is None:
                log_uid, named = old.log_uid, old.log_uid_trusted
            else:
                assert log_uid, f"{key}: log_uid 0"
                named = True
            if local_durable is None:
                local_durable = old.local_durable
            # A log that is replaced has a new log_uid; any other way down is a cut.
            assert local_durable >= old.local_durable or log_uid != old.log_uid, (
                f"{key}: local_durable {local_durable} is below {old.local_durable}"
            )
            # Not by `replace`, which costs twice as much: a failover stages a thousand promises.
            record = PartitionRecord(
                promise=promise,
                log_uid=log_uid,
                local_durable=local_durable,
                cut=old.cut,
                promise_trusted=promised,
                log_uid_trusted=named,
                page_cache_lost=old.page_cache_lost and not recovered,
                lazy=old.lazy if lazy is None else lazy,
            )
            self._put(key, record)

    def stage_cut(self, key: PartitionKey, intent: CutIntent) -> None:
        """The log is about to be cut; has to be written before the files are touched."""
        with self._staging:
            self._put(key, replace(self._records[key], cut=intent))

    def stage_cut_done(self, key: PartitionKey) -> None:
        """The files are cut and synced; has to be written before the next append."""
        with self._staging:
            record = self._records[key]
            assert record.cut is not None, f"{key}: no cut was begun"
            self._put(key, replace(record, cut=None, local_durable=min(record.local_durable, record.cut.log_id)))

    def forget(self, key: PartitionKey) -> None:
        """The partition's files are gone."""
        with self._staging:
            if self._records.pop(key, None) is not None:
                self._changed[key] = None

    def change_all(self, changed: Callable[[PartitionRecord], PartitionRecord]) -> None:
        """Change the record of every partition: something was learnt about the whole directory."""
        with self._staging:
            for key, record in list(self._records.items()):
                self._put(key, changed(record))

    # Write: the worker makes it durable

    @property
    def dirty(self) -> bool:
        """Whether something is not durable yet: staged, taken, or refused by a full disk."""
        waits = bool(self._changed) or self.node.state is not self._taken_node
        return waits or bool(self._rounds) or self._behind or not self._file.begun

    def take(self) -> JournalRound:
        """Everything staged so far, to be written by a worker."""
        with self._staging:
            changed, self._changed = self._changed, {}
            self._taken_node = self.node.state
            taken = JournalRound(changed, self.node.state)
            self._rounds.append(taken)
        return taken

    def write(self) -> None:
        """Make everything durable that was taken.

        `AppendFailed`: nothing was stored, and the next write includes it. `Poisoned`: a sync failed; final.
        """
        with self._writing:
            with self._staging:
                self._behind = True
                rounds, self._rounds = self._rounds, []
            self._file.write(rounds)
            self._behind = False

    def commit(self) -> None:
        """Take and write at once, where no loop must be kept running."""
        self.take()
        self.write()

    def stop(self) -> None:
        """Mark the stop clean, durably, and close. Only after every log is synced and its end journalled."""
        self.node.state = replace(self.node.state, clean=True)
        self.commit()
        self.close()

    def _put(self, key: PartitionKey, record: PartitionRecord) -> None:
        if self._records.get(key) != record:
            self._records[key] = self._changed[key] = record

    def __repr__(self) -> str:
        return f"NodeJournal(node {self.identity.node_uid:016x}, {len(self._records)} partitions)"


def _rewrite_at(state_bytes: int) -> int:
    return max(REWRITE_BYTES, 4 * state_bytes)


def _locked(storage: Storage, directory: str) -> Lock:
    try:
        return storage.lock(f"{directory}/{LOCK}")
    except ConfigError as error:
        raise ConfigError(
            f"data directory {directory} is in use by another process; stop that one, or choose another folder"
        ) from error


def _load(storage: Storage, directory: str) -> JournalContents:
    file, contents = RecordFile.load(storage, f"{directory}/{JOURNAL}")
    file.close()
    return decode(contents, f"{directory}/{JOURNAL}")


def _starting_state(
    found: JournalContents | None, rng: random.Random, page_cache: str
) -> tuple[NodeState, dict[PartitionKey, PartitionRecord]]:
    if found is None:
        return NodeState(NodeIdentity(new_uid(rng)), page_cache, False, ""), {}
    lost = _page_cache_lost(found, page_cache)
    node = replace(found.node, page_cache=page_cache, clean=False)
    promises_lost = found.torn or found.damaged
    records = {
        key: replace(
            record,
            promise_trusted=record.promise_trusted and not promises_lost,
            log_uid_trusted=record.log_uid_trusted and not found.damaged,
            page_cache_lost=record.page_cache_lost or lost,
        )
        for key, record in found.partitions.items()
    }
    return node, records


def _page_cache_lost(found: JournalContents, page_cache: str) -> bool:
    """Whether what the last life wrote and did not sync may be gone."""
    # An unknown page cache counts as another one: that costs a new log_uid, the opposite could cost messages.
    # A failed fsync has left pages that pass for clean and never came to the disk: the next read may show that.
    before = found.node
    return bool(before.poison) or (not before.clean and (not page_cache or before.page_cache != page_cache))
