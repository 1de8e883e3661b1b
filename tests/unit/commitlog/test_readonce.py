"""Reading once leaves the page cache as it was. Needs a file system that has one."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from nsqha.commitlog.readonce import PAGE_BYTES, ReadOnceStorage

PAGES = 64
CONTENT = bytes(range(256)) * (PAGES * PAGE_BYTES // 256)


def cached(path: Path) -> list[int]:
    """Pages that are in the page cache, asked without reading any."""
    states = (ctypes.c_ubyte * PAGES)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        first = ctypes.c_char.from_buffer(view)
        address, size = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(view))
        failed = ctypes.CDLL(None, use_errno=True).mincore(address, size, states)
        del first
    assert not failed, ctypes.get_errno()
    return [page for page in range(PAGES) if states[page] & 1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of which nothing is in the page cache."""
    found = tmp_path / "file"
    found.write_bytes(CONTENT)
    fd = os.open(found, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if cached(found):
        pytest.skip("this file system keeps everything cached")
    return found


@pytest.mark.parametrize("n", [1, 100, PAGE_BYTES, 5 * PAGE_BYTES + 7])
@pytest.mark.parametrize("position", [0, 1, PAGE_BYTES, 10 * PAGE_BYTES - 3])
def test_what_was_not_cached_is_dropped_again(path: Path, position: int, n: int) -> None:
    file = ReadOnceStorage().open(str(path), read_only=True)
    assert file.pread(n, position) == CONTENT[position : position + n]
    # The kernel keeps the last page, of which the next piece begins with the rest.
    assert cached(path) in ([], [(position + n) // PAGE_BYTES])


def test_what_was_cached_stays(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 20 * PAGE_BYTES, 0)
    file = ReadOnceStorage().open(str(path), read_only=True)
    assert file.pread(3 * PAGE_BYTES, 100) == CONTENT[100 : 100 + 3 * PAGE_BYTES]
    assert file.pread(10 * PAGE_BYTES, 40 * PAGE_BYTES) == CONTENT[40 * PAGE_BYTES : 50 * PAGE_BYTES]
    assert cached(path) == list(range(20))
    os.close(fd)


def test_the_end_of_the_file(path: Path) -> None:
    file = ReadOnceStorage().open(str(path), read_only=True)
    assert file.pread(100, len(CONTENT) - 10) == CONTENT[-10:]
    assert file.pread(100, len(CONTENT)) == b""


def test_it_only_reads(path: Path) -> None:
    with pytest.raises(AssertionError, match="only reads"):
        ReadOnceStorage().open(str(path), create=True)
