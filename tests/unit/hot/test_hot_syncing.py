"""Disk rounds beside the interpreter: who syncs what, and what a failure and a close leave."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

THREADS = 3


@pytest.fixture
def threads(syncing: ModuleType) -> Iterator[Any]:
    threads = syncing.SyncThreads(THREADS)
    try:
        yield threads
    finally:
        threads.close()


def opened(syncing: ModuleType, folder: Path, count: int) -> list[Any]:
    return [syncing.SyncedFile(os.open(folder / f"{n}", os.O_CREAT | os.O_RDWR)) for n in range(count)]


def unsyncable(syncing: ModuleType) -> Any:
    """A file that the kernel refuses to sync."""
    ours, theirs = socket.socketpair()
    theirs.close()
    return syncing.SyncedFile(ours.detach())


def test_names_of_a_directory_are_not_left_for_later(
    threads: Any, syncing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fdatasync` may. The compiled threads call the C library: of these only that it works is seen here."""
    calls: list[str] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd, name=name: calls.append(name))
    names = syncing.SyncedFile(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY), True)
    threads.start([names, *opened(syncing, tmp_path, 1)])
    assert outcomes(threads) == [0, 0]
    assert sorted(calls) == ([] if syncing.__name__.endswith("_syncing") else ["fdatasync", "fsync"])


def outcomes(threads: Any) -> list[int]:
    assert select.select([threads.fileno()], [], [], 60)[0], "the round does not end"
    taken = threads.take()
    assert isinstance(taken, list)
    return taken


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("count", [1, 2, THREADS, 4 * THREADS])
def test_a_round_says_of_each_file_how_it_went(syncing: ModuleType, threads: Any, tmp_path: Path, count: int) -> None:
    files = opened(syncing, tmp_path, count)
    for _ in range(3):
        threads.start(files)
        assert outcomes(threads) == [0] * count
        assert threads.take() is None
        assert not select.select([threads.fileno()], [], [], 0)[0]


def test_a_sync_that_failed_fails_for_ever(syncing: ModuleType, threads: Any, tmp_path: Path) -> None:
    good, bad = opened(syncing, tmp_path, 1)[0], unsyncable(syncing)
    threads.start([good, bad, good])
    assert outcomes(threads) == [0, errno.EINVAL, 0]
    asked: list[int] = []
    assert bad.sync(asked.append) == errno.EINVAL and not asked
    threads.start([bad, good])
    assert outcomes(threads) == [errno.EINVAL, 0]


def test_what_fails_elsewhere_fails_in_a_round(syncing: ModuleType, threads: Any, tmp_path: Path) -> None:
    (file,) = opened(syncing, tmp_path, 1)

    def fdatasync(fd: int) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    assert file.sync(fdatasync) == errno.EIO
    threads.start([file])
    assert outcomes(threads) == [errno.EIO]


def test_a_round_waits_for_the_sync_that_is_under_way(syncing: ModuleType, threads: Any, tmp_path: Path) -> None:
    """The kernel reports a lost write to the first who asks, so the second has to hear what that one was told."""
    (file,) = opened(syncing, tmp_path, 1)
    asked, told = threading.Event(), threading.Event()

    def fdatasync(fd: int) -> None:
        asked.set()
        assert told.wait(10)
        raise OSError(errno.EIO, "the first is told")

    first = threading.Thread(target=file.sync, args=(fdatasync,))
    first.start()
    assert asked.wait(10)
    threads.start([file])
    assert threads.take() is None
    told.set()
    first.join(10)
    assert outcomes(threads) == [errno.EIO]


def test_a_descriptor_is_closed_when_no_sync_uses_it(syncing: ModuleType, tmp_path: Path) -> None:
    (file,) = opened(syncing, tmp_path, 1)
    seen: list[tuple[int, bool]] = []

    def fdatasync(fd: int) -> None:
        file.close()
        seen.append((fd, is_open(fd)))

    assert file.sync(fdatasync) == 0
    ((fd, was_open),) = seen
    assert was_open and not is_open(fd)
    file.close()
    assert file.sync(os.fdatasync) == errno.EBADF


def test_a_file_that_nobody_holds_is_closed(syncing: ModuleType, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "0", os.O_CREAT | os.O_RDWR)
    file = syncing.SyncedFile(fd)
    del file
    assert not is_open(fd)


def test_one_round_at_a_time_and_none_after_the_end(syncing: ModuleType, tmp_path: Path) -> None:
    threads = syncing.SyncThreads(1)
    files = opened(syncing, tmp_path, 1)
    with pytest.raises(ValueError, match="no files"):
        threads.start([])
    threads.start(files)
    with pytest.raises(ValueError, match="under way"):
        threads.start(files)
    threads.close()
    threads.close()
    with pytest.raises(ValueError, match="closed"):
        threads.start(files)
    with pytest.raises(ValueError, match="0 threads"):
        syncing.SyncThreads(0)
