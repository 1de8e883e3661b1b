"""Disk rounds with real threads and files: who is told what, and whose trouble is whose."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsqha import hot
from nsqha.clock import ManualClock, SystemClock
from nsqha.commitlog.log import PartitionLog, SyncTicket
from nsqha.commitlog.reading.lookup import LogIdentity
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.storage import OsDirectory, OsFile, OsStorage
from nsqha.errors import Poisoned
from nsqha.server.runtime.disk import (
    EARLY_SHARE,
    PATIENT_SECONDS,
    PROGRESS_SECONDS,
    DiskRounds,
    LazySync,
    bound_progress,
)
from tests.fakes.loop import VirtualLoop


class FakeFile:
    def __init__(self, error: Exception | None = None) -> None:
        self.syncs = 0
        self._error = error

    def sync(self) -> None:
        self.syncs += 1
        if self._error is not None:
            raise self._error


class Wanting:
    """A partition that always has something to sync."""

    def __init__(self, file: FakeFile, told: Callable[[], None] = lambda: None) -> None:
        self.file = file
        self.rounds = 0
        self._told = told

    def sync_ticket(self) -> SyncTicket | None:
        return SyncTicket(1, (self.file,))  # type: ignore[arg-type]

    def synced(self, ticket: SyncTicket) -> None:
        self.rounds += 1
        self._told()


def with_rounds(story: Callable[[DiskRounds, list[BaseException]], Awaitable[Any]]) -> None:
    async def run() -> None:
        failures: list[BaseException] = []
        disk = DiskRounds(asyncio.get_running_loop(), SystemClock(), failures.append)
        try:
            async with asyncio.timeout(10):
                await story(disk, failures)
        finally:
            disk.close()

    asyncio.run(run())


async def rounds(partition: Wanting, count: int) -> None:
    while partition.rounds < count:
        await asyncio.sleep(0)


def test_a_request_while_a_round_runs_is_served_by_the_next():
    async def story(disk: DiskRounds, failures: list[BaseException]) -> None:
        again: list[bool] = []

        def once_more() -> None:
            if not again:
                again.append(True)
                disk.request(partition)

        partition = Wanting(FakeFile(), once_more)
        disk.request(partition)
        await rounds(partition, 2)
        assert partition.file.syncs == 2

    with_rounds(story)


def test_a_partition_that_breaks_does_not_keep_the_others_from_hearing():
    async def story(disk: DiskRounds, failures: list[BaseException]) -> None:
        def broken() -> None:
            raise AssertionError("cannot be")

        first, second = Wanting(FakeFile(), broken), Wanting(FakeFile())
        disk.request(first)
        disk.request(second)
        await rounds(second, 1)
        disk.request(second)
        await rounds(second, 2)
        assert failures == []

    with_rounds(story)


def test_after_a_failed_sync_nobody_is_told_of_success():
    async def story(disk: DiskRounds, failures: list[BaseException]) -> None:
        good, bad = Wanting(FakeFile()), Wanting(FakeFile(Poisoned("fdatasync failed")))
        disk.request(good)
        disk.request(bad)
        while not failures:
            await asyncio.sleep(0)
        disk.request(good)
        await asyncio.sleep(0.01)
        assert (good.rounds, bad.rounds, len(failures)) == (0, 0, 1)

    with_rounds(story)


class AtOnce(Executor):
    """A pool whose jobs have ended when they are submitted."""

    def submit(self, job: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        job(*args, **named)


def held_rounds() -> tuple[DiskRounds, VirtualLoop]:
    """Rounds on a loop whose time moves when it is told."""
    clock = ManualClock()
    loop = VirtualLoop(clock)
    disk = DiskRounds(loop, clock, pytest.fail, sync_pool=AtOnce())  # type: ignore[arg-type]
    return disk, loop


def test_rounds_that_nobody_waits_for_have_a_distance():
    disk, loop = held_rounds()
    partition = Wanting(FakeFile())
    disk.request(partition, patient=True)
    loop.turn()
    assert partition.rounds == 1
    disk.request(partition, patient=True)
    disk.request(partition, patient=True)
    loop.turn()
    assert partition.rounds == 1
    loop.pass_time(PATIENT_SECONDS)
    assert partition.rounds == 2
    loop.pass_time(1)
    assert partition.rounds == 2


def test_who_is_patient_goes_with_the_first_who_is_not():
    disk, loop = held_rounds()
    patient, urgent = Wanting(FakeFile()), Wanting(FakeFile())
    disk.request(patient, patient=True)
    loop.turn()
    disk.request(patient, patient=True)
    disk.request(urgent)
    loop.turn()
    assert (patient.rounds, urgent.rounds) == (2, 1)
    disk.request(urgent)
    loop.turn()
    assert (patient.rounds, urgent.rounds) == (2, 2)


def test_a_patient_request_made_while_a_round_runs_waits_for_its_time():
    disk, loop = held_rounds()
    again = iter([True])

    def once_more() -> None:
        if next(again, False):
            disk.request(partition, patient=True)

    partition = Wanting(FakeFile(), once_more)
    disk.request(partition)
    loop.turn()
    assert partition.rounds == 1
    loop.pass_time(PATIENT_SECONDS)
    assert partition.rounds == 2


def test_a_log_that_is_closed_under_a_round_does_not_poison_the_node(tmp_path: Path):
    """A topic is deleted while its last publishes are on their way to the disk."""
    log = PartitionLog.create(OsStorage(), str(tmp_path / "0"), LogIdentity(1, 0), cache=BatchCache())
    data = bytearray(hot.frame(b"x"))
    hot.stamp(data, 0, 1, 1)
    log.append(data, count=1, flags=0, timestamp_ns=1, epoch=1, durable=1)
    ticket = log.unsynced()
    assert ticket is not None
    log.close()
    ticket.run()


class WantingFiles(Wanting):
    """A partition whose files are the operating system's."""

    def __init__(self, *files: OsFile) -> None:
        super().__init__(FakeFile())
        self.files = files

    def sync_ticket(self) -> SyncTicket | None:
        return SyncTicket(1, self.files)


def os_files(folder: Path) -> list[OsFile]:
    files = [OsStorage().open(str(folder / name), create=True) for name in ("segment", "commitlog")]
    return cast(list[OsFile], files)


def pool_is_not_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OsFile, "sync", lambda self: pytest.fail("a thread of Python synced a file"))


def test_files_of_a_round_that_is_waited_for_are_synced_beside_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool_is_not_used(monkeypatch)

    async def story(disk: DiskRounds, failures: list[BaseException]) -> None:
        first, second = WantingFiles(*os_files(tmp_path)), WantingFiles(*os_files(tmp_path))
        for n in (1, 2, 3):
            disk.request(first)
            disk.request(second)
            await rounds(second, n)
        assert (first.rounds, failures, disk.running) == (3, [], 0)

    with_rounds(story)


def test_who_keeps_the_loop_busy_lets_rounds_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool_is_not_used(monkeypatch)

    async def story(disk: DiskRounds, failures: list[BaseException]) -> None:
        disk.look()
        partition = WantingFiles(*os_files(tmp_path))
        disk.request(partition)
        await asyncio.sleep(0)  # the round begins
        end = time.monotonic() + 5
        while not partition.rounds and time.monotonic() < end:
            disk.look()
        assert (partition.rounds, failures, disk.running) == (1, [], 0)

    with_rounds(story)


def test_names_of_folders_are_synced_beside_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a new log, with its first batch: others may wait for the same round."""
    pool_is_not_used(monkeypatch)
    monkeypatch.setattr(OsDirectory, "sync", lambda self: pytest.fail("a thread of Python synced a directory"))

    async def story(disk: DiskRounds, failures: list[BaseException]) -> None:
        files = cast("list[OsFile]", [*os_files(tmp_path), OsStorage().open_dir(str(tmp_path))])
        disk.request(partition := WantingFiles(*files))
        await rounds(partition, 1)
        assert failures == []

    with_rounds(story)


def test_a_failure_beside_the_interpreter_is_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment, commitlog = os_files(tmp_path)

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse)
        with pytest.raises(Poisoned):
            commitlog.sync()
    pool_is_not_used(monkeypatch)

    async def story(disk: DiskRounds, failures: list[BaseException]) -> None:
        partition = WantingFiles(segment, commitlog)
        disk.request(partition)
        while not failures:
            await asyncio.sleep(0)
        disk.request(partition)
        await asyncio.sleep(0.01)
        assert partition.rounds == 0
        (failure,) = failures
        assert isinstance(failure, Poisoned) and str(tmp_path / "commitlog") in str(failure)

    with_rounds(story)


def test_without_such_threads_a_round_takes_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(count: int) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(hot, "SyncThreads", lacking)

    async def story(disk: DiskRounds, failures: list[BaseException]) -> None:
        partition = WantingFiles(*os_files(tmp_path))
        for n in (1, 2):
            disk.request(partition)
            await rounds(partition, n)
        assert failures == []

    with_rounds(story)


def test_a_read_waits_for_no_job():
    async def story(disk: DiskRounds, failures: list[BaseException]) -> None:
        go = threading.Event()
        job = disk.run(lambda: go.wait(10))
        try:
            assert await disk.read(lambda: 7) == 7 and not job.done()
        finally:
            go.set()
        assert await job

    with_rounds(story)


def test_a_log_asks_for_a_round_in_time_and_thousands_do_so_together():
    disk, loop = held_rounds()
    logs = [Wanting(FakeFile()) for _ in range(1000)]
    lazy = [LazySync(disk, log, messages=100, seconds=2.0) for log in logs]
    for number, sync in enumerate(lazy):
        sync.wrote(1)
        if number % 10 == 0:
            loop.pass_time(0.001)
    assert len(loop.armed) == 1
    lazy[7].cancel()
    loop.pass_time(2.0 * (1 - EARLY_SHARE) - 0.1)
    assert not any(log.rounds for log in logs), "none asks much too early"
    loop.pass_time(0.1 + 2.0 * EARLY_SHARE)
    assert [log.rounds for log in logs] == [0 if number == 7 else 1 for number in range(1000)]
    lazy[3].wrote(1)
    loop.pass_time(2.0 + PATIENT_SECONDS)
    assert (logs[3].rounds, logs[7].rounds) == (2, 0)
    disk.close()


def test_what_is_written_when_a_round_is_asked_for_asks_for_the_next():
    disk, loop = held_rounds()
    log = Wanting(FakeFile(), lambda: sync.wrote(1) if log.rounds < 3 else None)
    sync = LazySync(disk, log, messages=100, seconds=2.0)
    sync.wrote(1)
    loop.pass_time(10)
    assert log.rounds == 3 and not loop.armed
    disk.close()


@pytest.mark.parametrize(("replica_seconds", "seconds"), [(2.0, 0.5), (60.0, 0.5), (0.4, 0.1)])
def test_progress_is_synced_before_a_replica_is_late(replica_seconds: float, seconds: float) -> None:
    disk = SimpleNamespace(progress_seconds=PROGRESS_SECONDS)
    bound_progress(cast(Any, disk), replica_seconds)
    assert disk.progress_seconds == seconds
