"""Reading files that no other reader needs now, without pushing what others need out of the page cache.

The rule, per read: what was in the page cache as a whole before, stays; of anything else, all that was read is dropped
again, and nothing is read ahead. So data that consumers are reading stays cached, and what only this reader looks at
leaves no trace. Bytes that were cached are not fetched from the disk again: damage below them shows once they have
left the cache.

mincore(2) says what is cached. (A preadv2 with RWF_NOWAIT does not: it begins to read what is missing, and from a fast
disk that may be there before it answers.)
"""

from __future__ import annotations

import ctypes
import mmap
import os

from nsqha.commitlog.storage import File, OsFile, OsStorage

PAGE_BYTES = mmap.PAGESIZE


class ReadOnceFile(OsFile):
    """A file whose reads leave the page cache as they found it."""

    __slots__ = ()

    def pread(self, n: int, position: int) -> bytes:
        n = min(n, self.size() - position)
        if n <= 0:
            return b""
        # From the start of a page: the kernel keeps pages that the range covers only partly.
        first = position - position % PAGE_BYTES
        size = position + n - first
        stays = b"\0" not in cached_pages(self._fd, first, size)
        try:
            return super().pread(n, position)
        finally:
            if not stays:
                os.posix_fadvise(self._fd, first, size, os.POSIX_FADV_DONTNEED)


class ReadOnceStorage(OsStorage):
    """The machine's file system, as it is opened for reading once."""

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        assert read_only and not create, f"{path}: this storage only reads"
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead: it would pass for cached by others
        return ReadOnceFile(path, fd)


def cached_pages(fd: int, first: int, size: int) -> bytes:
    """One byte per page of this part of a file: 1 if it is in the page cache; `first` is the start of a page."""
    states = ctypes.create_string_buffer(-(-size // PAGE_BYTES))
    try:
        # Private and "writable" only because ctypes takes the address of nothing else; not a byte of it is touched.
        with mmap.mmap(fd, size, access=mmap.ACCESS_COPY, offset=first) as view:
            byte = ctypes.c_char.from_buffer(view)
            address = ctypes.c_void_p(ctypes.addressof(byte))
            failed = bool(_libc.mincore(address, ctypes.c_size_t(size), states))
            del byte
    except (OSError, ValueError):
        failed = True  # the file became shorter, or cannot be mapped
    return bytes(len(states)) if failed else states.raw.translate(_LOWEST_BIT)


_LOWEST_BIT = bytes(state & 1 for state in range(256))  # the others are reserved
_libc = ctypes.CDLL(None)
