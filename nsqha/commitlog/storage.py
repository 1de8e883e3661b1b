"""Disk, handed in: the few operations that logs, journal and metadata need, and the only user of `os`.

    Storage   a name space of directories and files; paths are plain strings with "/"
    File      positional reads and writes of one file; `sync` is fdatasync
    OsStorage   the machine's file system
    MemStorage  bytes in memory: #ephemeral topics and tests

What callers may rely on, and `tests/sim` takes away when it is not asked for:
- Bytes written are durable after `File.sync` of that file. Writes are not ordered among each other, and any 512-byte
  sector of an unsynced write may survive a crash without the rest.
- A created, renamed or removed name is durable after `sync_dir` of its directory. `make_dirs` is durable on return;
  of `begin_dirs` the directories that it returns have to be synced.
- A failed `sync` raises `Poisoned`, and so does every later one of that file: which pages were lost is unknowable, and
  the kernel reports the error only once. Every other failure is an `OSError`.
- A File is closed when it is closed or when nothing refers to it any more, so a sync that runs in a worker thread may
  be the last user of a file that has been rolled or dropped meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Protocol

from nsqha import hot
from nsqha.errors import ConfigError, Poisoned

Data = bytes | bytearray | memoryview
SECTOR = 512  # bytes that a disk reads or loses at a time
# What an operation may lack and have later. After any other error it is not known what the disk still has.
LACKING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN}


def passes(error: OSError) -> bool:
    """Whether only room, descriptors or memory were lacking: the disk is good, and the operation may be tried again."""
    return error.errno in LACKING


Inode = tuple[int, int]  # device, number


class File(Protocol):
    """One open file."""

    def size(self) -> int:
        """Bytes in the file now."""

    def pwrite(self, data: Data, position: int) -> None:
        """Write all of `data` at `position`; a gap before it reads as zeros. After an OSError any part may be there."""

    def pread(self, n: int, position: int) -> bytes:
        """Up to `n` bytes from `position`; fewer only at the end of the file."""

    def truncate(self, n: int) -> None:
        """Make the file `n` bytes long."""

    def sync(self) -> None:
        """fdatasync. Poisoned if it fails, now and for ever after."""

    def drop_cache(self) -> None:
        """Forget clean cached pages, so that the next read shows what the disk has."""

    def allocate(self, n: int) -> None:
        """Reserve space for `n` bytes; the file becomes at least that long, zeros at the end."""

    def close(self) -> None:
        """Let go of the file; harmless when repeated."""


class Directory(Protocol):
    """The names in one directory. Opened before they are changed, so that no descriptor is lacking afterwards."""

    def sync(self) -> None:
        """Make them durable. Poisoned if that fails."""

    def close(self) -> None:
        """Let go of the directory; harmless when repeated."""


class Lock(Protocol):
    """A file that one process holds."""

    def close(self) -> None:
        """Release."""


class Storage(Protocol):
    """A file system."""

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        """FileNotFoundError unless it is there or `create` is set."""

    def exists(self, path: str) -> bool:
        """Whether a file or directory has this name."""

    def list_dir(self, path: str) -> list[str]:
        """Names in a directory, sorted. FileNotFoundError."""

    def make_dirs(self, path: str) -> None:
        """Make a directory and its parents, durably; fine if it is there. FileExistsError: that is a file."""

    def begin_dirs(self, path: str, levels: int) -> list[str]:
        """`make_dirs`, but the last `levels` names need not be durable yet: they are after `sync_dir` of the
        directories that are returned, the lowest first. These are always all of them: a process that made a directory
        may have been killed before it synced the name."""

    def rename(self, old: str, new: str) -> None:
        """Atomically give `old` the name `new`, replacing a file of that name."""

    def remove(self, path: str) -> None:
        """Unlink one file. FileNotFoundError."""

    def remove_tree(self, path: str) -> None:
        """Unlink a directory and everything in it; fine if it is not there."""

    def open_dir(self, path: str) -> Directory:
        """FileNotFoundError."""

    def sync_dir(self, path: str) -> None:
        """`open_dir`, `Directory.sync`: for names that may stay as they are if the directory cannot be opened."""

    def lock(self, path: str) -> Lock:
        """Hold `path` against every other process. ConfigError if it is held."""


def inode_of(file: File) -> Inode | None:
    """The inode of an open file; None: it is not on a disk, or not open any more."""
    return file.inode() if isinstance(file, OsFile) else None


class OsFile:
    """A file of the operating system. Its errors name it, which those of calls by descriptor do not."""

    __slots__ = ("_fd", "_synced", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._synced = hot.SyncedFile(fd)

    def inode(self) -> Inode | None:
        try:
            found = os.fstat(self._fd)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def size(self) -> int:
        try:
            return os.fstat(self._fd).st_size
        except OSError as error:
            error.filename = self.path
            raise

    def pwrite(self, data: Data, position: int) -> None:
        try:
            n = os.pwrite(self._fd, data, position)
            if n != len(data):
                self._write_rest(memoryview(data), n, position)
        except OSError as error:
            error.filename = self.path
            raise

    def _write_rest(self, data: memoryview, done: int, position: int) -> None:
        while done < len(data):
            n = os.pwrite(self._fd, data[done:], position + done)
            if n == 0:
                raise OSError(errno.EIO, "write wrote nothing")
            done += n

    def pread(self, n: int, position: int) -> bytes:
        try:
            data = os.pread(self._fd, n, position)
            if len(data) == n or not data:
                return data
            parts = [data]
            have = len(data)
            # A short read is the end of the file, or a signal; ask until it says so.
            while have < n and (data := os.pread(self._fd, n - have, position + have)):
                parts.append(data)
                have += len(data)
            return b"".join(parts)
        except OSError as error:
            error.filename = self.path
            raise

    def truncate(self, n: int) -> None:
        try:
            os.ftruncate(self._fd, n)
        except OSError as error:
            error.filename = self.path
            raise

    def sync(self) -> None:
        if failed := self._synced.sync(os.fdatasync):
            raise self.sync_failed(failed)

    def synced(self) -> hot.SyncedFile | None:
        """The same file for `hot.SyncThreads`, with the same memory of failures; None: only `sync` may be called."""
        return self._synced

    def sync_failed(self, error: int) -> Poisoned:
        """What `sync` raises after this errno."""
        return Poisoned(f"fdatasync of {self.path} failed: {OSError(error, os.strerror(error))}")

    def drop_cache(self) -> None:
        try:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            error.filename = self.path
            raise

    def allocate(self, n: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, n)
        except OSError as error:
            error.filename = self.path
            raise

    def close(self) -> None:
        self._fd = -1
        self._synced.close()

    def __repr__(self) -> str:
        return f"OsFile({self.path!r})"


class OsDirectory:
    """A directory of the operating system; a sync in another thread may be its last user, as with a File."""

    __slots__ = ("_path", "_synced")

    def __init__(self, path: str) -> None:
        self._path = path
        self._synced = hot.SyncedFile(os.open(path, os.O_RDONLY | os.O_DIRECTORY), True)

    def sync(self) -> None:
        if failed := self._synced.sync(os.fsync):
            raise self.sync_failed(failed)

    def synced(self) -> hot.SyncedFile:
        """The same directory for `hot.SyncThreads`."""
        return self._synced

    def sync_failed(self, error: int) -> Poisoned:
        """What `sync` raises after this errno."""
        return Poisoned(f"fsync of directory {self._path} failed: {OSError(error, os.strerror(error))}")

    def close(self) -> None:
        self._synced.close()


class OsLock:
    """An exclusive flock; the kernel releases it when the process ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _make_dir(path: str) -> None:
    """Fine if it is there. FileExistsError: that is a file."""
    try:
        os.mkdir(path, 0o750)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


class OsStorage:
    """The machine's file system."""

    _named = ""  # a directory whose own name was synced, by this object

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        flags = (os.O_RDONLY if read_only else os.O_RDWR) | (os.O_CREAT if create else 0)
        return OsFile(path, os.open(path, flags, 0o640))

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def list_dir(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def make_dirs(self, path: str) -> None:
        missing, there = list[str](), path
        while not os.path.isdir(there):
            missing.append(there)
            there = os.path.dirname(there) or "."
        if there != self._named:
            self._sync_name(there, os.path.dirname(there) or ".")
        if missing:
            self._named = there  # each new topic is made in the same folder
        for folder in reversed(missing):
            _make_dir(folder)
            # Before anything is made in it: who finds it looks no further up.
            self.sync_dir(os.path.dirname(folder) or ".")

    def begin_dirs(self, path: str, levels: int) -> list[str]:
        folders = lowest(path, levels)
        top = os.path.dirname(folders[-1]) or "."
        if top != self._named or not os.path.isdir(path):  # a start has thousands that are there
            if top != self._named or not os.path.isdir(top):
                self.make_dirs(top)
                self._named = top
            for folder in reversed(folders):
                _make_dir(folder)
        return [os.path.dirname(folder) or "." for folder in folders]

    def _sync_name(self, path: str, above: str) -> None:
        """Sync the name of a directory that is there: the process that made it may have been killed before that."""
        if os.path.samefile(path, above) or os.stat(path).st_dev != os.stat(above).st_dev:
            return  # the top of a file system has no name in it
        try:
            self.sync_dir(above)
        except PermissionError:
            pass  # then it was another process

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_tree(self, path: str) -> None:
        import shutil  # with all its compressors: a start does without

        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            pass

    def open_dir(self, path: str) -> Directory:
        return OsDirectory(path)

    def sync_dir(self, path: str) -> None:
        directory = OsDirectory(path)
        try:
            directory.sync()
        finally:
            directory.close()

    def lock(self, path: str) -> Lock:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"{path} is locked: another process uses this folder; stop it first") from None
        return OsLock(fd)


class MemFile:
    """A file in memory; handles of one name share the bytes."""

    __slots__ = ("_data",)

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def size(self) -> int:
        return len(self._data)

    def pwrite(self, data: Data, position: int) -> None:
        gap = position - len(self._data)
        if gap > 0:
            self._data += bytes(gap)
        self._data[position : position + len(data)] = data

    def pread(self, n: int, position: int) -> bytes:
        with memoryview(self._data) as view:
            return bytes(view[position : position + n])

    def truncate(self, n: int) -> None:
        del self._data[n:]
        self._data += bytes(n - len(self._data))

    def sync(self) -> None:
        pass

    def drop_cache(self) -> None:
        pass

    def allocate(self, n: int) -> None:
        self._data += bytes(max(0, n - len(self._data)))

    def close(self) -> None:
        pass


class MemDirectory:
    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self._path = path

    def sync(self) -> None:
        self._storage.sync_dir(self._path)

    def close(self) -> None:
        pass


class MemLock:
    def __init__(self, held: set[str], path: str) -> None:
        self._held = held
        self._path = path

    def close(self) -> None:
        self._held.discard(self._path)


class MemStorage:
    """A file system in memory, lost with the process."""

    def __init__(self) -> None:
        self._files: dict[str, bytearray] = {}
        self._dirs: set[str] = set()
        self._locks: set[str] = set()

    @property
    def used(self) -> int:
        """The bytes in all files, in any thread."""
        return sum(map(len, list(self._files.values())))

    def clear(self) -> None:
        """Give back the memory of all files, open ones too."""
        files, self._files = self._files, {}
        for data in files.values():
            data.clear()

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        data = self._files.get(path)
        if data is None:
            if not create or parent(path) not in self._dirs:
                raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
            data = self._files[path] = bytearray()
        return MemFile(data)

    def exists(self, path: str) -> bool:
        return path in self._files or path in self._dirs

    def list_dir(self, path: str) -> list[str]:
        if path not in self._dirs:
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        return sorted(name.rpartition("/")[2] for name in {*self._files, *self._dirs} if parent(name) == path)

    def make_dirs(self, path: str) -> None:
        while path and path not in self._dirs:
            self._dirs.add(path)
            path = parent(path)

    def begin_dirs(self, path: str, levels: int) -> list[str]:
        self.make_dirs(path)
        return [above for folder in lowest(path, levels) if (above := parent(folder))]

    def rename(self, old: str, new: str) -> None:
        if old not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", old)
        self._files[new] = self._files.pop(old)

    def remove(self, path: str) -> None:
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        del self._files[path]

    def remove_tree(self, path: str) -> None:
        inside = path + "/"
        self._files = {name: data for name, data in self._files.items() if not name.startswith(inside)}
        self._dirs = {name for name in self._dirs if name != path and not name.startswith(inside)}

    def open_dir(self, path: str) -> Directory:
        if path not in self._dirs:
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        return MemDirectory(self, path)

    def sync_dir(self, path: str) -> None:
        pass

    def lock(self, path: str) -> Lock:
        if path in self._locks:
            raise ConfigError(f"{path} is locked: another process uses this folder; stop it first")
        self._locks.add(path)
        return MemLock(self._locks, path)


def read_around(file: File, n: int, position: int) -> bytes:
    """`File.pread`, with zeros in place of the sectors that the disk cannot read."""
    try:
        return file.pread(n, position)
    except OSError as error:
        if error.errno != errno.EIO:
            raise  # too many open files and the like say nothing about the bytes
    parts = []
    end = min(position + n, file.size())
    while position < end:
        size = min(SECTOR - position % SECTOR, end - position)
        try:
            parts.append(file.pread(size, position))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            parts.append(bytes(size))
        position += size
    return b"".join(parts)


def parent(path: str) -> str:
    """The directory of a path; "" at the top."""
    return path.rpartition("/")[0]


def lowest(path: str, levels: int) -> list[str]:
    """A path and those above it, `levels` of them, fewer at the top."""
    found = [path]
    while len(found) < levels and (above := parent(found[-1])):
        found.append(above)
    return found


def sync_dirs(storage: Storage, paths: list[str]) -> None:
    """Make the names in these directories durable."""
    for path in paths:
        storage.sync_dir(path)
