"""The disk of tests: its rounds and jobs without threads, and a file system in memory that may be full or fail.

    disk = FakeDisk(loop, failures.append)              a round or a job takes a millisecond of the loop's time
    disk.hold(); disk.release()                         jobs that come meanwhile wait

    disk = FakeDisk(loop, failures.append, held=True)   everything waits until the test says so:
    disk.begin(); disk.write(); disk.end()              a disk round, step by step
    disk.sync()                                         a whole one
    disk.work()                                         the jobs that wait

`tests/contract/test_disks.py` checks it against `DiskRounds`, `tests/contract/test_storage.py` the file system.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

from nsqha.commitlog.log import SyncTicket
from nsqha.commitlog.storage import Data, File, MemFile, MemStorage
from nsqha.errors import Poisoned
from nsqha.quantile import SECONDS_BOUNDS, Histogram
from nsqha.server.runtime.disk import PROGRESS_SECONDS, DelayedCall, Delays, DiskSigns

Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class FakeDisk:
    """`DiskRounds` on a loop with virtual time, or driven by the test."""

    def __init__(
        self, loop: Any, on_failure: Callable[[BaseException], None], *, seconds: float = 0.001, held: bool = False
    ) -> None:
        self.progress_seconds = PROGRESS_SECONDS
        self.rounds_held = held
        self.jobs_held = held
        self.wanting: dict[Any, None] = {}
        self.under_way: list[tuple[Any, SyncTicket]] = []
        self.jobs: list[Job] = []
        self.reads: list[Job] = []
        self.journal_writes: list[Job] = []
        self.removals: list[Job] = []
        self.round_seconds = Histogram(SECONDS_BOUNDS)
        self.signs = DiskSigns()
        self._delays = Delays(loop)
        self._loop = loop
        self._on_failure = on_failure
        self._seconds = seconds
        self._rounds = 0
        self._running = False  # a round is about to begin or under way
        self._written = False
        self._failed = False
        self._busy: list[list[Job]] = []  # the lanes in which a job is being done

    # ---- rounds

    @property
    def running(self) -> int:
        """The number of the round that is under way; 0 if there is none."""
        return self._rounds if self.under_way else 0

    def request(self, partition: Any, *, patient: bool = False) -> None:
        self.wanting[partition] = None
        self._see_to_it()

    def look(self) -> bool:
        return False  # its rounds end in turns of the loop

    def later(self, seconds: float, callback: Callable[[], None]) -> DelayedCall:
        return self._delays.call(seconds, callback)

    def _see_to_it(self) -> None:
        if self.wanting and not (self._running or self.rounds_held or self._failed):
            self._running = True
            self._loop.call_soon(self._round)

    def _round(self) -> None:
        self.begin()
        if self.under_way:
            self._loop.call_later(self._seconds, self._end_round)
        else:
            self._running = False
            self._see_to_it()

    def _end_round(self) -> None:
        self._running = False
        try:
            self.end()
        finally:
            self._see_to_it()

    def begin(self) -> None:
        """A round begins: tickets are taken, nothing is on the disk yet."""
        wanting, self.wanting = self.wanting, {}
        self.under_way = [(p, t) for p in wanting if (t := p.sync_ticket()) is not None]
        self._rounds += bool(self.under_way)
        self._written = False

    def write(self) -> None:
        """The files of the round are synced; no partition has been notified."""
        self._written = True
        try:
            for _, ticket in self.under_way:
                ticket.run()
        except Exception as error:
            if not self._failed:
                self._failed = True
                self._on_failure(error)

    def end(self) -> None:
        """The round that was begun has synced; its partitions are notified."""
        if not self._written:
            self.write()
        ended, self.under_way = self.under_way, []
        if self._failed:
            return
        errors: list[Exception] = []
        for partition, ticket in ended:
            try:
                partition.synced(ticket)
            except Exception as error:  # does not concern the others, and is the test's
                errors.append(error)
        if errors:
            raise errors[0]

    def sync(self) -> None:
        """One round, on a loop that the test drives."""
        self._loop.turn()
        self.begin()
        self.end()
        self._loop.turn()

    # ---- jobs

    def run(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        return self._submit(self.jobs, job)

    def apart(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """Done at once: nobody else uses those files."""
        future = self._loop.create_future()
        self.finish_first([(job, future)])
        return future  # type: ignore[no-any-return]

    def read(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        return self._submit(self.reads, job)

    def journal(self, write: Callable[[], Any]) -> asyncio.Future[Any]:
        return self._submit(self.journal_writes, write)

    async def removed(self, step: Callable[[], bool]) -> None:
        while await self._submit(self.removals, step):
            pass

    def _submit(self, lane: list[Job], job: Callable[[], Any]) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        lane.append((job, future))
        self._next(lane)
        return future  # type: ignore[no-any-return]

    def _next(self, lane: list[Job]) -> None:
        if lane and not (self.jobs_held or any(lane is busy for busy in self._busy)):
            self._busy.append(lane)
            self._loop.call_later(self._seconds, self._due, lane)

    def _due(self, lane: list[Job]) -> None:
        self._busy = [busy for busy in self._busy if busy is not lane]
        if lane and not self.jobs_held:
            self.finish_first(lane)
        self._next(lane)

    def hold(self) -> None:
        """Jobs wait from now on."""
        self.jobs_held = True

    def release(self) -> None:
        """Jobs that waited are done, one after the other."""
        self.jobs_held = False
        for lane in (self.jobs, self.reads, self.journal_writes, self.removals):
            self._next(lane)

    def finish_first(self, lane: list[Job], failure: Exception | None = None) -> None:
        """Do the first job that waits in this lane; or let it fail without doing anything."""
        job, future = lane.pop(0)
        if future.cancelled():
            return  # as an executor, which drops what it has not begun
        try:
            if failure is not None:
                raise failure
            result = job()
        except Exception as error:
            future.set_exception(error)
            changes = lane is not self.reads and lane is not self.journal_writes
            if isinstance(error, Poisoned) and changes and not self._failed:
                self._failed = True
                self._loop.call_soon(self._on_failure, error)
        else:
            future.set_result(result)

    def work(self, *, removals: bool = True) -> None:
        """Do all jobs that wait, and then the removals, on a loop that the test drives."""
        self._loop.turn()
        lanes = [self.jobs, self.journal_writes, self.reads, *([self.removals] if removals else [])]
        while lane := next(filter(None, lanes), None):
            self.finish_first(lane)
            self._loop.turn()

    def close(self) -> None:
        pass


class FaultyFile(MemFile):
    """A file of a `FaultyStorage`."""

    def __init__(self, data: bytearray, storage: FaultyStorage) -> None:
        super().__init__(data)
        self._storage = storage
        self._poisoned = False

    def pwrite(self, data: Data, position: int) -> None:
        self._storage.check("pwrite")
        self._storage.grow(position + len(data) - self.size())
        super().pwrite(data, position)

    def allocate(self, n: int) -> None:
        self._storage.check("allocate")
        self._storage.grow(n - self.size())
        super().allocate(n)

    def sync(self) -> None:
        self._poisoned |= self._storage.failing == "sync"
        if self._poisoned:
            raise Poisoned("sync")
        super().sync()


class FaultyStorage(MemStorage):
    """A file system in memory with room for `bytes_max` bytes; the operation that `failing` names fails.

    An operation that fails changes nothing. `SimStorage` is for faults that leave something half done."""

    def __init__(self, *directories: str) -> None:
        super().__init__()
        self.bytes_max = 1 << 40
        self.failing = ""  # "pwrite", "allocate" or "sync"
        for directory in directories:
            self.make_dirs(directory)

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        super().open(path, create=create, read_only=read_only)
        return FaultyFile(self._files[path], self)

    @property
    def used(self) -> int:
        return sum(map(len, self._files.values()))

    def check(self, operation: str) -> None:
        if self.failing == operation:
            raise OSError(errno.ENOSPC, "No space left on device")

    def grow(self, more: int) -> None:
        if self.used + max(0, more) > self.bytes_max:
            raise OSError(errno.ENOSPC, "No space left on device")
