"""Starts on a disk that has no room for another journal."""

from __future__ import annotations

import errno
import random

import pytest

from nsqha.commitlog.journal import REWRITE_BYTES, NodeJournal, PartitionRecord, inspect
from nsqha.commitlog.recordfile import SECTOR
from nsqha.commitlog.storage import Data, File, MemFile, MemStorage
from nsqha.errors import AppendFailed

A = (7, 0)
B = (7, 1)


def opened(disk: SmallDisk) -> NodeJournal:
    return NodeJournal.open(disk, "data", random.Random(1), boot_id="boot-1")


def image(disk: SmallDisk) -> bytes:
    file = disk.open("data/journal")
    return file.pread(file.size(), 0)


class SmallFile(MemFile):
    """Of a disk that has so much room and no more."""

    def __init__(self, data: bytearray, disk: SmallDisk) -> None:
        super().__init__(data)
        self._disk = disk

    def pwrite(self, data: Data, position: int) -> None:
        self._disk.grow(position + len(data) - self.size())
        super().pwrite(data, position)

    def allocate(self, n: int) -> None:
        self._disk.grow(n - self.size())
        super().allocate(n)


class SmallDisk(MemStorage):
    bytes_max = 1 << 40

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        super().open(path, create=create, read_only=read_only)
        return SmallFile(self._files[path], self)

    @property
    def used(self) -> int:
        return sum(map(len, self._files.values()))

    def grow(self, more: int) -> None:
        if self.used + max(0, more) > self.bytes_max:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_node_starts_on_a_disk_without_a_free_block() -> None:
    disk = SmallDisk()
    journal = opened(disk)
    journal.stage(A, promise=3, log_uid=5)
    journal.commit()
    journal.close()
    disk.bytes_max = full = disk.used
    journal = opened(disk)
    assert journal.record(A) == PartitionRecord(promise=3, log_uid=5)
    assert full - disk.used > REWRITE_BYTES - 64 * SECTOR, "the rest is for what else a start writes"
    journal.stage(B, promise=4)
    journal.commit()
    journal.close()
    assert inspect(disk, "data").partitions == journal.records()


def test_a_torn_journal_on_a_full_disk_stays_as_it_is() -> None:
    """Cut off, the doubt about its promises would be gone."""
    disk = SmallDisk()
    journal = opened(disk)
    journal.stage(A, promise=3)
    journal.commit()
    journal.close()
    torn = image(disk)
    end = len(torn.rstrip(b"\0")) // SECTOR * SECTOR
    file = disk.open("data/journal")
    file.pwrite(bytes(len(torn) - end), end)
    file.pwrite(b"x", end + 100)
    torn = image(disk)
    disk.bytes_max = disk.used
    with pytest.raises(AppendFailed, match="No space left"):
        opened(disk)
    assert image(disk) == torn
