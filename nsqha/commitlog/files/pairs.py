"""The files of a partition: pairs of a segment and its commitlog, named by the position of their first byte.

    00000000000000000000.segment     frames, back to back
    00000000000000000000.commitlog   slot 0: the anchor; slot n: the n-th entry of this pair
    00000000000134217893.segment
    00000000000134217893.commitlog

The **anchor** is a copy of the last entry of the pair before (in the first pair ever: the genesis). It says where the
pair starts (log id, offset, position, chain, timestamp) without any other file, so a pair can be read, checked and
appended to although all older ones are gone, and a pair that has no batch yet still knows its place.

A pair's files are opened when they are first used. Old ones are closed again by `close`; a handle that a worker
thread still syncs stays alive until that thread lets go of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsqha.commitlog.entry import ENTRY_BYTES, Entry, Place, decode, decode_all
from nsqha.commitlog.storage import inode_of, read_around
from nsqha.errors import Poisoned

if TYPE_CHECKING:
    from nsqha.commitlog.storage import Directory, File, Inode, Storage

SEGMENT = ".segment"
COMMITLOG = ".commitlog"
# A commitlog of this name says that its pair is being unlinked (see `drop_files`).
DROPPING = ".dropping"
UNREADABLE = ".unreadable"  # behind a name: a file that recovery could not use
BLOCK_SLOTS = 512  # entries read at a time: 40 KB


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """The topic and partition of a log; its chain begins with them."""

    topic_uid: int
    partition: int


class Pair:
    """One segment and its commitlog."""

    __slots__ = (
        "_files",
        "_storage",
        "anchor",
        "anchor_log_id",
        "directory",
        "first",
        "on_open",
        "position",
        "read_only",
        "unnamed",
    )

    def __init__(self, storage: Storage, directory: str, anchor: Entry, *, read_only: bool = False) -> None:
        self.anchor = anchor
        self.anchor_log_id = anchor.log_id
        self.position = anchor.end_position  # of the first byte: the name
        self.first = Place(anchor.log_id + 1, anchor.end_offset, self.position)  # where the pair starts
        self.directory = directory
        self.read_only = read_only
        self._storage = storage
        self._files: dict[str, File] = {}  # those that are open, by suffix
        self.unnamed: tuple[Directory, ...] = ()  # to be synced with both files before anything of the pair is durable
        self.on_open: Callable[[], object] | None = None  # one of its files was opened, in any thread

    @classmethod
    def create(cls, storage: Storage, directory: str, anchor: Entry) -> Pair:
        """A new empty pair behind `anchor`; durable, its names included, when this returns.

        OSError: there is none. Its names must not stay behind either: the log would seem to go on in it.
        """
        names = storage.open_dir(directory)
        try:
            pair = cls(storage, directory, anchor)
            pair._create(names)
            pair.commitlog.sync()  # it has data: what the file system does for that leaves little for the others
            pair.segment.sync()
            names.sync()
        finally:
            names.close()
        return pair

    @classmethod
    def begin(cls, storage: Storage, names: Sequence[Directory], directory: str, anchor: Entry) -> Pair:
        """`create`, but nothing of it is durable yet. `names`: the directory first, and others that are `unnamed`."""
        pair = cls(storage, directory, anchor)
        pair._create(names[0])
        pair.unnamed = tuple(names)
        return pair

    def _create(self, names: Directory) -> None:
        try:
            segment = self._files[SEGMENT] = self._storage.open(self.path(SEGMENT), create=True)
            commitlog = self._files[COMMITLOG] = self._storage.open(self.path(COMMITLOG), create=True)
            # What a crash may have left under these names was never acknowledged.
            for file in (segment, commitlog):
                if file.size():
                    file.truncate(0)
            commitlog.pwrite(self.anchor.encode(), 0)
        except OSError as error:
            self._undo_create(names, error)
            raise

    def _undo_create(self, names: Directory, error: OSError) -> None:
        self.close()
        try:
            for suffix in (COMMITLOG, SEGMENT):
                if self._storage.exists(self.path(suffix)):
                    self._storage.remove(self.path(suffix))
        except OSError as second:
            raise Poisoned(f"{self.directory}: new files could not be removed: {error}; then {second}") from second
        names.sync()

    def path(self, suffix: str) -> str:
        return f"{self.directory}/{file_name(self.position, suffix)}"

    @property
    def segment(self) -> File:
        file = self._files.get(SEGMENT)  # another thread may release it
        return self._open(SEGMENT) if file is None else file

    @property
    def commitlog(self) -> File:
        file = self._files.get(COMMITLOG)
        return self._open(COMMITLOG) if file is None else file

    def _open(self, suffix: str) -> File:
        opened = self._storage.open(self.path(suffix), read_only=self.read_only)
        # Threads that open it at once get the same handle: it is the one that remembers a failed sync.
        file = self._files.setdefault(suffix, opened)
        if file is not opened:
            opened.close()
        elif self.on_open is not None:
            self.on_open()
        return file

    @property
    def is_open(self) -> bool:
        return bool(self._files)

    def inodes(self) -> dict[str, Inode]:
        """Of the files that are open and on a disk, by path. For the thread that opens and releases them."""
        found = {self.path(suffix): inode_of(file) for suffix, file in self._files.items()}
        return {path: inode for path, inode in found.items() if inode is not None}

    def release(self) -> None:
        """Let go of the handles; they close when a sync in another thread has also let go."""
        self._files = {}
        self.unnamed = ()

    def close(self) -> None:
        """Close the files now."""
        for file in self._files.values():
            file.close()
        self.release()

    def slot(self, log_id: int) -> int:
        """Byte address of an entry in the commitlog."""
        return (log_id - self.anchor_log_id) * ENTRY_BYTES

    def size(self, suffix: str) -> int:
        """Bytes in one of its files; a missing one has none."""
        try:
            return (self.segment if suffix == SEGMENT else self.commitlog).size()
        except FileNotFoundError:
            return 0

    def read_slots(self, log_id: int, n: int) -> bytes:
        """The bytes of up to `n` slots from `log_id`."""
        return self._read(COMMITLOG, n * ENTRY_BYTES, self.slot(log_id))

    def read_entries(self, log_id: int, n: int) -> list[Entry | None]:
        """Up to `n` slots from `log_id`; None for one that does not verify or names another log id."""
        return entries_in(self.read_slots(log_id, n), log_id)

    def read_entry(self, log_id: int) -> Entry | None:
        """The entry in one slot; None if it does not verify."""
        entry = decode(self._read(COMMITLOG, ENTRY_BYTES, self.slot(log_id)))
        return entry if entry is not None and entry.log_id == log_id else None

    def read_data(self, position: int, size: int) -> bytes:
        """Bytes of the segment, not verified; fewer if the file ends before."""
        return self._read(SEGMENT, size, position - self.position)

    def _read(self, suffix: str, n: int, position: int) -> bytes:
        """What can be read. A missing file reads as empty: its bytes do not verify, and their reader reports that."""
        try:
            return read_around(self.segment if suffix == SEGMENT else self.commitlog, n, position)
        except FileNotFoundError:
            return b""

    def create_missing(self) -> None:
        """Put an empty file in the place of one that is gone, so that the rest can be read. Its name is not synced."""
        for suffix in (SEGMENT, COMMITLOG):
            if not self._storage.exists(self.path(suffix)):
                self._storage.open(self.path(suffix), create=True).close()

    def cut(self, end: Place) -> int:
        """Let neither file go beyond `end`; how many bytes that removed. Not synced."""
        removed = 0
        for file, size in (self.segment, end.position - self.position), (self.commitlog, self.slot(end.log_id)):
            excess = file.size() - size
            if excess > 0:
                file.truncate(size)
                removed += excess
        return removed

    def __repr__(self) -> str:
        return f"Pair({self.first})"


def entries_in(raw: bytes, log_id: int) -> list[Entry | None]:
    """What slots from `log_id` on hold; None for one that does not verify or names another log id."""
    entries = decode_all(raw)
    for i, entry in enumerate(entries):
        if entry is not None and entry.log_id != log_id + i:
            entries[i] = None
    return entries


def drop_files(storage: Storage, directory: str, positions: list[int]) -> None:
    """Unlink the oldest pairs so that a crash in between is recognised.

    Names may survive a crash independently of each other. So a marker takes the place of each commitlog first, for
    good, then the segments go for good, then the markers. A marker says that everything up to its pair is to go.
    """
    for position in positions:
        marker = f"{directory}/{file_name(position, DROPPING)}"
        commitlog = f"{directory}/{file_name(position, COMMITLOG)}"
        if storage.exists(commitlog):
            storage.rename(commitlog, marker)
        elif not storage.exists(marker):
            storage.open(marker, create=True).close()
    storage.sync_dir(directory)
    unlink(storage, directory, positions, SEGMENT)
    storage.sync_dir(directory)
    unlink(storage, directory, positions, DROPPING)


def unlink_some(storage: Storage, directory: str, n: int) -> bool:
    """Unlink up to `n` files of a log that goes as a whole; whether any was there.

    What a crash leaves of it must not pass for a log that retention has shortened: a marker comes first, for good, and
    goes last.
    """
    names = storage.list_dir(directory)
    left = [(name, found[0]) for name in names if (found := parse_name(name)) is not None and found[1] != DROPPING]
    if not left:
        for name in names:
            storage.remove(f"{directory}/{name}")
        storage.sync_dir(directory)
        return bool(names)
    newest = max(position for _, position in left)
    if not any((found := parse_name(name)) and found[1] == DROPPING and found[0] >= newest for name in names):
        storage.open(f"{directory}/{file_name(newest, DROPPING)}", create=True).close()
        storage.sync_dir(directory)
    for name, _ in left[:n]:
        storage.remove(f"{directory}/{name}")
    return True


def unlink(storage: Storage, directory: str, positions: list[int], *suffixes: str) -> None:
    """Remove those of these files that are there; the directory is not synced."""
    for position in positions:
        for suffix in suffixes:
            path = f"{directory}/{file_name(position, suffix)}"
            if storage.exists(path):
                storage.remove(path)


def set_aside(storage: Storage, directory: str, positions: list[int]) -> None:
    """Take these pairs out of the log for good, but keep their bytes: what is appended now may reach their names."""
    for position in positions:
        for suffix in (COMMITLOG, SEGMENT):
            path = f"{directory}/{file_name(position, suffix)}"
            if storage.exists(path):
                storage.rename(path, path + UNREADABLE)
    if positions:
        storage.sync_dir(directory)


def file_name(position: int, suffix: str) -> str:
    return f"{position:020d}{suffix}"


def parse_name(name: str) -> tuple[int, str] | None:
    """(position, suffix) of a file of a partition; None for any other name."""
    stem, dot, suffix = name.partition(".")
    suffix = dot + suffix
    if len(stem) != 20 or not (stem.isascii() and stem.isdigit()) or suffix not in (SEGMENT, COMMITLOG, DROPPING):
        return None
    return int(stem), suffix
