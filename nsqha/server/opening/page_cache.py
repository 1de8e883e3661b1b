"""Which page cache a process writes into, so that a later one knows whether what was written and not synced is there.

The page cache of a file survives the process that wrote it. It is gone when the kernel restarts, and when the file
system is mounted again: after a shutdown of the file system by an error, a `umount`, or a restart of shared storage. So
a page cache is named by the kernel's boot and by one mount of one file system (its superblock in memory):

    boot id            /proc/sys/kernel/random/boot_id
    file system        `st_dev` of the data folder
    superblock         inode of /sys/fs/<type>/<device>: the kernel makes that folder when the superblock comes to be,
                       and does not use a number twice during a boot (ext4, xfs, f2fs)
    else the mount     its unique id (statx, STATX_MNT_ID_UNIQUE, Linux 6.8), which a restarted container does not keep
    else               the plain mount id, which the kernel uses again

The first that the kernel has is taken. Where a name changes and the page cache did not, a log that has acknowledged
without fsync gets a new log_uid for nothing: it is compared with its leader's.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from nsqha.commitlog.journal import LOCK

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SYS = Path("/sys")

_AT_FDCWD = -100
_MNT_ID = 0x1000
_MNT_ID_UNIQUE = 0x4000
_STATX_BYTES = 256
_MASK_AT, _MNT_ID_AT = 0, 144  # in struct statx, linux/stat.h


def boot_id() -> str:
    """Of the running kernel; empty if it does not say."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""


def page_cache_of(folder: str) -> str:
    """The name of the page cache that files in this folder are written into; empty: unknown. OSError."""
    boot = boot_id()
    device = os.stat(folder).st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    within = superblock(numbers) or mount(folder)
    return f"{boot} {numbers} {within}" if boot and within else ""


def folder_name(folder: str) -> str:
    """The name of a data folder by its lock file, among those of this host since its boot; empty: unknown.

    No other folder has it while a process has the lock file open: its inode is not used again. A copy has another."""
    boot = boot_id()
    try:
        lock = os.stat(f"{folder}/{LOCK}")
    except OSError:
        return ""
    return f"{boot} {os.major(lock.st_dev)}:{os.minor(lock.st_dev)} {lock.st_ino}" if boot else ""


def superblock(numbers: str, sys: Path = SYS) -> str:
    """The superblock of the file system on a block device ("major:minor"); empty: the kernel does not name it."""
    name = os.path.basename(os.path.realpath(sys / "dev/block" / numbers))
    for kind in sorted((sys / "fs").glob("*")):
        if (kind / name).is_dir():
            return f"{kind.name}-{(kind / name).stat().st_ino}"
    return ""


def mount(folder: str) -> str:
    """The mount that a folder is in; empty: the C library or the kernel can not say."""
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:
        return ""
    for wanted, name in ((_MNT_ID_UNIQUE, "mount"), (_MNT_ID, "mount-id")):
        found = ctypes.create_string_buffer(_STATX_BYTES)
        if statx(_AT_FDCWD, os.fsencode(folder), 0, wanted, found) == 0:
            mask = int.from_bytes(found.raw[_MASK_AT : _MASK_AT + 4], "little")
            if mask & wanted:
                return f"{name}-{int.from_bytes(found.raw[_MNT_ID_AT : _MNT_ID_AT + 8], 'little')}"
    return ""
