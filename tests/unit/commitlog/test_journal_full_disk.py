"""Starts on a disk that has no room for another journal."""

from __future__ import annotations

import random

import pytest

from nsqha.commitlog.journal import REWRITE_BYTES, NodeJournal, PartitionRecord, inspect
from nsqha.commitlog.recordfile import SECTOR
from nsqha.errors import AppendFailed
from tests.fakes.disk import FaultyStorage

A = (7, 0)
B = (7, 1)


def opened(disk: FaultyStorage) -> NodeJournal:
    return NodeJournal.open(disk, "data", random.Random(1), page_cache="boot-1")


def image(disk: FaultyStorage) -> bytes:
    file = disk.open("data/journal")
    return file.pread(file.size(), 0)


def test_a_node_starts_on_a_disk_without_a_free_block() -> None:
    disk = FaultyStorage()
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
    disk = FaultyStorage()
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
