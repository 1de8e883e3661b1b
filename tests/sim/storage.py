"""A simulated disk that keeps only what it must.

It obeys the same contract as `OsStorage` (tests/contract/test_storage.py) and, where that contract promises nothing,
is as unkind as a real disk may be:

- Of a write that was not synced, any subset of its 512-byte sectors survives a crash; a sector that was written
  several times may come back in any of its versions. The file's size may be any that it had since the last sync, or
  lie between them.
- A name that was created, renamed or removed may come back as before until its directory is synced; a rename is
  atomic, and otherwise names survive independently of each other. A folder whose name is lost is lost with all in it.
- A failed sync loses what it should have written: the process still reads it until the cache is dropped, and no
  later sync brings it to the disk; where the file was cut, what is written afterwards is new.

    crash_after(n)   the n-th operation from now that changes anything raises `Crashed`, and every later one does
    crash(rng)       the disk as the next process may find it; may be called again and again
    kill()           the process is gone, the machine goes on
    fail(...)        one or more operations fail with an OSError
    stays(...)       all of them do until `heal`, also those of later processes
    descriptors      how many more files may be open
    flip, blank, spoil   what a bad disk does to bytes that were durable
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field

from nsqha.commitlog.storage import Data, Directory, File, Lock, lowest, parent
from nsqha.errors import ConfigError, Poisoned

SECTOR = 512


class Crashed(Exception):
    """The machine is off."""


@dataclass(eq=False)
class Inode:
    """Bytes of a file: as the process sees them, as the disk has them, and what may become of the difference."""

    now: bytearray = field(default_factory=bytearray)
    disk: bytearray = field(default_factory=bytearray)
    versions: dict[int, list[bytes]] = field(default_factory=dict)  # sector -> contents since the last sync
    sizes: list[int] = field(default_factory=lambda: [0])  # since the last sync, the one on disk first
    lost: set[int] = field(default_factory=set)  # sectors that a failed sync did not write

    def changed(self, first: int, end: int) -> None:
        """Note the new contents of every sector that [first, end) touches."""
        for sector in range(first // SECTOR, -(-end // SECTOR)):
            content = bytes(self.now[sector * SECTOR : (sector + 1) * SECTOR])
            self.versions.setdefault(sector, []).append(content)
        if len(self.now) != self.sizes[-1]:
            self.sizes.append(len(self.now))

    def resize(self, n: int) -> None:
        old = len(self.now)
        if n < old:
            del self.now[n:]
            self.lost = {sector for sector in self.lost if sector * SECTOR < n}  # what comes there now is new
        else:
            self.now += bytes(n - old)
        self.changed(min(n, old), max(n, old))

    def sync(self) -> None:
        _fit(self.disk, len(self.now))
        for sector in self.versions:
            if sector not in self.lost:
                self.disk[sector * SECTOR : (sector + 1) * SECTOR] = self.now[sector * SECTOR : (sector + 1) * SECTOR]
        _fit(self.disk, len(self.now))
        self.versions.clear()
        self.sizes = [len(self.now)]

    def forget(self) -> None:
        """What a failed sync does: everything dirty counts as clean."""
        self.lost |= set(self.versions)
        self.versions.clear()
        self.sizes = [len(self.disk), len(self.now)]

    def drop_cache(self) -> None:
        for sector in self.lost:
            content = self.disk[sector * SECTOR : (sector + 1) * SECTOR]
            room = len(self.now) - sector * SECTOR
            if room > 0:
                self.now[sector * SECTOR : (sector + 1) * SECTOR] = content.ljust(SECTOR, b"\0")[:room]
        self.lost.clear()

    def after_crash(self, rng: random.Random) -> Inode:
        content = bytearray(self.disk)
        _fit(content, self._size_after_crash(rng))
        # Some crashes keep nearly everything, some nearly nothing, some a prefix.
        keep = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        prefix = rng.choice((None, None, rng.randrange(len(self.now) // SECTOR + 2)))
        for sector, versions in sorted(self.versions.items()):
            if (rng.random() < keep) if prefix is None else (sector < prefix):
                version = versions[-1] if rng.random() < 0.7 else rng.choice(versions)
                at = sector * SECTOR
                if at < len(content):
                    content[at : at + SECTOR] = version.ljust(SECTOR, b"\0")[: len(content) - at]
        return Inode(content, bytearray(content), sizes=[len(content)])

    def _size_after_crash(self, rng: random.Random) -> int:
        if rng.random() < 0.8:
            return rng.choice((self.sizes[0], self.sizes[-1], rng.choice(self.sizes)))
        low, high = min(self.sizes), max(self.sizes)
        between = rng.randint(low, high) // SECTOR * SECTOR
        return max(low, between)


def _fit(data: bytearray, n: int) -> None:
    del data[n:]
    data += bytes(n - len(data))


@dataclass(frozen=True)
class Refusal:
    """The error that every operation of a kind ends with."""

    code: int
    path: str  # part of the path


@dataclass
class Fault:
    """An operation that is to fail."""

    operation: str
    path: str  # part of the path
    code: int
    after: int  # matching operations that still succeed
    times: int


class SimStorage:
    """A file system whose contents can be taken through a crash."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rng = rng or random.Random(0)
        self.operations = 0  # that changed something
        self._names: dict[str, Inode] = {}
        self._disk_names: dict[str, Inode] = {}
        self._name_changes: list[dict[str, Inode | None]] = []  # not synced yet, in order; each is atomic
        self._dirs: set[str] = set()
        self._new_dirs: set[str] = set()  # of these: whose names are not synced yet
        self._locks: set[str] = set()
        self._crash_at: int | None = None
        self._faults: list[Fault] = []
        self.lasting: dict[str, Refusal] = {}  # operation -> what it meets until `heal`
        self._unreadable: dict[str, set[int]] = {}
        self.descriptors = 1 << 20  # that may still be opened

    # ---- Storage

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        inode = self._names.get(path)
        if inode is None and (not create or parent(path) not in self._dirs):
            raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
        file = SimFile(self, path, inode or Inode())
        if inode is None:
            self.acting("create", path)
            self._change({path: file.inode})
        return file

    def exists(self, path: str) -> bool:
        return path in self._names or path in self._dirs

    def list_dir(self, path: str) -> list[str]:
        if path not in self._dirs:
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        return sorted(name.rpartition("/")[2] for name in {*self._names, *self._dirs} if parent(name) == path)

    def make_dirs(self, path: str) -> None:
        while path and path not in self._dirs:
            self._dirs.add(path)
            path = parent(path)
        self._new_dirs.discard(path)  # the lowest that was there

    def begin_dirs(self, path: str, levels: int) -> list[str]:
        folders = lowest(path, levels)
        self.make_dirs(parent(folders[-1]))
        for folder in reversed(folders):
            if folder not in self._dirs:
                self.acting("make_dir", folder)
                self._dirs.add(folder)
                self._new_dirs.add(folder)
        return [above for folder in folders if (above := parent(folder))]

    def rename(self, old: str, new: str) -> None:
        if old not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", old)
        self.acting("rename", old)
        self._change({old: None, new: self._names[old]})

    def remove(self, path: str) -> None:
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        self.acting("remove", path)
        self._change({path: None})

    def remove_tree(self, path: str) -> None:
        inside = path + "/"
        for name in [name for name in self._names if name.startswith(inside)]:
            self.acting("remove", name)
            self._change(_Removal(name, parent(path)))
        self._dirs = {name for name in self._dirs if name != path and not name.startswith(inside)}
        self._new_dirs &= self._dirs

    def open_dir(self, path: str) -> Directory:
        if path not in self._dirs:
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        return SimDirectory(self, path)

    def sync_dir(self, path: str) -> None:
        directory = SimDirectory(self, path)
        try:
            directory.sync()
        finally:
            directory.close()

    def sync_names(self, path: str) -> None:
        try:
            self.acting("sync_dir", path)
        except OSError as error:
            raise Poisoned(f"fsync of directory {path} failed: {error}") from error
        rest = []
        for change in self._name_changes:
            here = any(parent(name) == path for name in change)
            if here or (isinstance(change, _Removal) and change.above == path):
                _apply(self._disk_names, change)
            else:
                rest.append(change)
        self._name_changes = rest
        self._new_dirs = {name for name in self._new_dirs if parent(name) != path}

    def lock(self, path: str) -> Lock:
        if path in self._locks:
            raise ConfigError(f"{path} is locked: another process uses this folder; stop it first")
        self._locks.add(path)
        return SimLock(self._locks, path)

    def _change(self, change: dict[str, Inode | None]) -> None:
        _apply(self._names, change)
        self._name_changes.append(change)

    # ---- misfortune

    def acting(self, operation: str, path: str) -> None:
        """Something is about to change; it may be the moment of a crash or fail."""
        self.operations += 1
        if self._crash_at is not None and self.operations >= self._crash_at:
            raise Crashed(f"{operation} {path}, operation {self.operations}")
        refusal = self.lasting.get(operation)
        if refusal is not None and refusal.path in path:
            raise OSError(refusal.code, errno.errorcode[refusal.code], path)
        for fault in self._faults:
            if fault.operation == operation and fault.path in path and fault.times:
                if fault.after:
                    fault.after -= 1
                    continue
                fault.times -= 1
                raise OSError(fault.code, errno.errorcode[fault.code], path)

    def open_one_more(self, path: str) -> None:
        """A descriptor is wanted; whoever got it adds it to `descriptors` again."""
        if self.descriptors < 1:
            raise OSError(errno.EMFILE, "too many open files", path)
        self.descriptors -= 1

    def reading(self, path: str, position: int, n: int) -> None:
        """A read of these bytes; fails if one of their sectors was spoilt."""
        for sector in self._unreadable.get(path, ()):
            if sector * SECTOR < position + n and position < (sector + 1) * SECTOR:
                raise OSError(errno.EIO, "unreadable sector", path)

    def spoil(self, path: str, sector: int) -> None:
        """Let every read that touches this sector fail."""
        self._unreadable.setdefault(path, set()).add(sector)

    def unspoil(self, path: str) -> None:
        """Its sectors can be read again."""
        self._unreadable.pop(path, None)

    def crash_after(self, n: int) -> None:
        """Let the n-th change from now be the moment of the crash."""
        self._crash_at = self.operations + n

    def fail(self, operation: str, path: str = "", *, code: int = errno.EIO, after: int = 0, times: int = 1) -> None:
        """Let operations ("pwrite", "truncate", "sync", "create", ...) on a path that contains `path` fail."""
        self._faults.append(Fault(operation, path, code, after, times))

    def stays(self, *operations: str, path: str = "", code: int = errno.EIO) -> None:
        """Let these operations fail until `heal`, whatever becomes of the process: a full disk, or a bad one."""
        self.lasting.update({operation: Refusal(code, path) for operation in operations})

    def kill(self) -> None:
        """The process is gone and the machine goes on: what it wrote is in the page cache, for the next one."""
        self._crash_at = None
        self._locks.clear()

    def heal(self) -> None:
        """No more faults."""
        self._faults.clear()
        self.lasting.clear()

    def crash(self, rng: random.Random) -> SimStorage:
        """What the next process finds. This storage is not changed."""
        names = dict(self._disk_names)
        keep = rng.choice((0.0, 0.5, 1.0))
        for change in self._name_changes:
            if rng.random() < keep:
                _apply(names, change)
        lost = {name for name in sorted(self._new_dirs) if parent(name) and rng.random() >= keep}
        after = SimStorage(rng)
        after._dirs = {name for name in self._dirs if not _within(name, lost)}
        names = {name: inode for name, inode in names.items() if not _within(name, lost)}
        inodes: dict[int, Inode] = {}
        for name, inode in names.items():
            if id(inode) not in inodes:
                inodes[id(inode)] = inode.after_crash(rng)
            after._names[name] = after._disk_names[name] = inodes[id(inode)]
        return after

    def flip(self, path: str, bit: int) -> None:
        """Turn over one bit of a file, in cache and on disk."""
        inode = self._names[path]
        for data in (inode.now, inode.disk):
            if bit // 8 < len(data):
                data[bit // 8] ^= 1 << bit % 8

    def blank(self, path: str, sector: int) -> None:
        """Lose one sector of a file: it reads as zeros."""
        inode = self._names[path]
        for data in (inode.now, inode.disk):
            lost = data[sector * SECTOR : (sector + 1) * SECTOR]
            data[sector * SECTOR : (sector + 1) * SECTOR] = bytes(len(lost))

    def contents(self) -> dict[str, bytes]:
        """Every file as the process sees it."""
        return {name: bytes(inode.now) for name, inode in sorted(self._names.items())}


class _Removal(dict[str, "Inode | None"]):
    """A file went with its directory: for ever, once the directory above that is synced."""

    def __init__(self, name: str, above: str) -> None:
        super().__init__({name: None})
        self.above = above


def _apply(names: dict[str, Inode], change: dict[str, Inode | None]) -> None:
    for name, inode in change.items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


def _within(path: str, folders: set[str]) -> bool:
    while path and path not in folders:
        path = parent(path)
    return bool(path)


class _Handle:
    """What holds a descriptor, until it is closed or nobody has it any more."""

    def __init__(self, storage: SimStorage, path: str) -> None:
        self._open = False
        storage.open_one_more(path)
        self._open = True
        self._storage = storage
        self._path = path

    def close(self) -> None:
        if self._open:
            self._open = False
            self._storage.descriptors += 1

    def __del__(self) -> None:
        self.close()


class SimFile(_Handle):
    """A handle of a simulated file."""

    def __init__(self, storage: SimStorage, path: str, inode: Inode) -> None:
        super().__init__(storage, path)
        self.inode = inode
        self._failed = False

    def size(self) -> int:
        return len(self.inode.now)

    def pwrite(self, data: Data, position: int) -> None:
        data = bytes(data)
        failure: Exception | None = None
        try:
            self._storage.acting("pwrite", self._path)
        except (OSError, Crashed) as error:
            failure = error
            data = data[: self._storage.rng.randrange(len(data) + 1)]
        now = self.inode.now
        old_size = len(now)
        if data:
            now += bytes(max(0, position - old_size))
            now[position : position + len(data)] = data
            self.inode.changed(min(position, old_size), position + len(data))
        if failure is not None:
            raise failure

    def pread(self, n: int, position: int) -> bytes:
        self._storage.reading(self._path, position, n)
        return bytes(self.inode.now[position : position + n])

    def truncate(self, n: int) -> None:
        self._storage.acting("truncate", self._path)
        self.inode.resize(n)

    def sync(self) -> None:
        try:
            self._storage.acting("sync", self._path)
        except OSError:
            self._failed = True
            self.inode.forget()
        if self._failed:
            raise Poisoned(f"fdatasync of {self._path} failed")
        self.inode.sync()

    def drop_cache(self) -> None:
        self.inode.drop_cache()

    def allocate(self, n: int) -> None:
        if n > len(self.inode.now):
            self._storage.acting("allocate", self._path)
            self.inode.resize(n)


class SimDirectory(_Handle):
    """A handle of a simulated directory."""

    def sync(self) -> None:
        self._storage.sync_names(self._path)


class SimLock:
    def __init__(self, held: set[str], path: str) -> None:
        self._held = held
        self._path = path

    def close(self) -> None:
        self._held.discard(self._path)
