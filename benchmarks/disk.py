"""The disk under the data directory: how long a sync takes, and how to make its page cache forget.

*T*, the time of one disk round, is what bounds a broker that answers only after fdatasync: with N commands waiting
on one disk, half of them ride each round while the other half gathers. It is measured in the same run, on the same
filesystem and with the same shape of work: a data file and its index grow by one batch, then both are synced at the
same time by two threads.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import statistics
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BATCH_BYTES = 400 * 134  # half of 4 x 200 waiting messages of 100 bytes, framed
INDEX_BYTES = 128
PROBE_S = 2.0

_GET_FLAGS, _SET_FLAGS, _TOP_OF_FOLDERS = 0x80086601, 0x40086602, 0x00020000
"""ioctl_iflags(2): FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_TOPDIR_FL."""


@dataclass(frozen=True)
class SyncTime:
    """Medians over the rounds of a probe."""

    round_s: float  # both files, in parallel
    single_s: float  # the data file alone


def set_apart(directory: Path) -> None:
    """Have folders in `directory` begin where the disk has room, as far as the file system knows how.

    ext4 makes files beside their folder, and passes each inode there that was freed in the last minutes: where other
    runs have just deleted thousands, making a file takes five times as long.
    """
    with suppress(OSError):
        folder = os.open(directory, os.O_RDONLY)
        try:
            (flags,) = struct.unpack("l", fcntl.ioctl(folder, _GET_FLAGS, bytes(8)))
            fcntl.ioctl(folder, _SET_FLAGS, struct.pack("l", flags | _TOP_OF_FOLDERS))
        finally:
            os.close(folder)


def probe(directory: Path, *, rounds: int = 300) -> SyncTime:
    """Measure the disk round in `directory`. Takes a third of a second on a fast disk, four seconds at most."""
    data, index = directory / "probe.data", directory / "probe.index"
    with ThreadPoolExecutor(2) as threads:
        both = _rounds({data: BATCH_BYTES, index: INDEX_BYTES}, rounds, threads)
        single = _rounds({data: BATCH_BYTES}, rounds, threads)
    return SyncTime(both, single)


def _rounds(growth: dict[Path, int], rounds: int, threads: ThreadPoolExecutor) -> float:
    """Median time to sync all files after each has grown."""
    files = [os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600) for path in growth]
    spent: list[float] = []
    try:
        give_up = time.perf_counter() + PROBE_S
        while len(spent) < rounds and time.perf_counter() < give_up:
            for file, size in zip(files, growth.values(), strict=True):
                os.pwrite(file, b"x" * size, len(spent) * size)
            begun = time.perf_counter()
            list(threads.map(os.fdatasync, files))
            spent.append(time.perf_counter() - begun)
    finally:
        for file, path in zip(files, growth, strict=True):
            os.close(file)
            path.unlink()
    return statistics.median(spent)


def warm_memory(directory: Path, n: int) -> None:
    """Use `n` bytes of page cache and free them, so that what comes next gets memory that is really there.

    A virtual machine whose hypervisor takes free memory back pays a fault on the host for each page that is used again.
    On one machine that made writing a new page six times as expensive, and a figure depended on how much memory the
    cell before had just left behind.
    """
    path = directory / "warm"
    block = bytes(1 << 20)
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(-(-n // len(block))):
                file.write(block)
    finally:
        path.unlink(missing_ok=True)


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]


def make_cold(directory: Path) -> float:
    """Write back and forget every page of the files below; the share of pages that stayed."""
    for path in files_below(directory):
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    stayed = resident_share(directory)
    if stayed > 0.05 and os.geteuid() == 0:
        # Pages that are mapped or on a per-CPU list survive the advice. This empties the caches of the whole machine.
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
        stayed = resident_share(directory)
    return stayed


def resident_share(directory: Path) -> float:
    """How much of the files below is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    resident = total = 0
    for path in files_below(directory):
        size = path.stat().st_size
        if size == 0:
            continue
        with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
            pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
            present = (ctypes.c_ubyte * pages)()
            start = ctypes.c_char.from_buffer(mapped)
            try:
                if libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), present) != 0:
                    raise OSError(ctypes.get_errno(), "mincore")
            finally:
                del start
            resident += sum(byte & 1 for byte in bytes(present))
            total += pages
    return resident / total if total else 0.0


def bytes_below(directory: Path) -> int:
    """What the files below occupy, holes not counted."""
    return sum(path.stat().st_blocks * 512 for path in files_below(directory))
