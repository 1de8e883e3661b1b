"""Disk rounds: fdatasync for all partitions that want it, off the loop.

A round takes one `SyncTicket` of each partition that asked since the last round began, syncs their files on a few
threads in parallel (the file system merges the journal commits), and notifies each partition. While a round runs, new
requests gather for the next one; that is the group commit of `sync=always`.

Publishers wait for the rounds of `sync=always`, so the files of these are synced in parallel, by threads that run no
Python (`hot.SyncThreads`): whoever has one message in flight waits for each hand-over of the interpreter's lock. No
publisher waits for the rounds of `sync=interval`: such a round costs the same CPU for a thousand messages and for ten
thousand, so they begin at most every `PATIENT_SECONDS`, on one thread, and join any other round. Logs that
wait for such a round share a timer (`Delay`).

A failed fsync is never retried: afterwards it is not known which pages were lost. It poisons the node (`on_failure`),
that of a job, too: who asked for the job may try it again, and would find files that only the page cache has whole.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from nsqha import hot
from nsqha.clock import Clock
from nsqha.commitlog.log import SyncTicket
from nsqha.commitlog.storage import OsDirectory, OsFile
from nsqha.errors import Poisoned
from nsqha.nsqlog import Logger
from nsqha.quantile import SECONDS_BOUNDS, Histogram

SYNC_THREADS = 4
READ_THREADS = 2
PROGRESS_SECONDS = 0.5  # after which progress of channels is synced at the latest, with sync=always
PROGRESS_SHARE = 4  # ... and after this part of the time in which a replica has to acknowledge
EARLY_SHARE = 1 / 16  # of the time that a log waits for its patient round: it may begin so much earlier
PATIENT_SECONDS = 0.05  # from the beginning of one round to that of the next, if no publisher waits for it

logger = Logger("disk")

T = TypeVar("T")


class WantsSync(Protocol):
    """A log whose writes reach the disk in rounds."""

    def sync_ticket(self) -> SyncTicket | None:
        """What has to reach the disk now; None if nothing."""

    def synced(self, ticket: SyncTicket) -> None:
        """The ticket is on disk."""


class DiskRound:
    """A round under way."""

    __slots__ = ("shares", "tickets")

    def __init__(self, tickets: list[tuple[WantsSync, SyncTicket]]) -> None:
        self.tickets = tickets
        self.shares = 1  # parts of its files that are not synced yet


class QuickSyncs:
    """Syncs files of the operating system for rounds that are waited for, one round at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Callable[[BaseException | None], None]) -> None:
        """`ended`: the round is over; the error of a file that failed."""
        self._loop = loop
        self._ended = ended
        self._threads: hot.SyncThreads | None = None
        self._files: list[OsFile | OsDirectory] = []
        self._closed = False

    def start(self, files: list[Any]) -> bool:
        """Begin a round. False if not all of them are such files, or there are no threads to be had."""
        of_round: list[hot.SyncedFile] = []
        for file in files:
            synced = file.synced() if isinstance(file, (OsFile, OsDirectory)) else None
            if synced is None:
                return False
            of_round.append(synced)
        threads = self._threads or self._begun()
        if threads is None:
            return False
        self._files = files
        threads.start(of_round)
        return True

    def _begun(self) -> hot.SyncThreads | None:
        if self._closed:
            return None
        try:
            self._threads = threads = hot.SyncThreads(SYNC_THREADS)
        except (OSError, RuntimeError) as error:  # descriptors or threads are lacking
            logger.warning("sync_threads_lacking", "other threads, which are slower, make the disk rounds: %s", error)
            self._closed = True
            return None
        self._loop.add_reader(threads.fileno(), self.look)
        return threads

    def look(self) -> bool:
        """If the round has ended, say so; whether it has."""
        outcomes = None if self._threads is None else self._threads.take()
        if outcomes is None:
            return False
        files, self._files = self._files, []
        failed = next(((file, error) for file, error in zip(files, outcomes, strict=True) if error), None)
        self._ended(failed[0].sync_failed(failed[1]) if failed else None)
        return True

    def close(self) -> None:
        """Wait for the round that is under way; no caller hears of it."""
        self._closed = True
        threads, self._threads = self._threads, None
        if threads is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(threads.fileno())
            threads.close()


class DiskThreads:
    """The threads of one node's disk work; no kind of work waits for another."""

    def __init__(self, syncs: Executor | None, quick: QuickSyncs) -> None:
        self.quick = quick
        self.syncs = syncs or ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix="fdatasync")
        self.jobs = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self.reads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="disk reads")
        self.journal = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self.removals = ThreadPoolExecutor(1, thread_name_prefix="disk removals")

    def close(self) -> None:
        """Wait for what was submitted."""
        self.quick.close()
        for pool in (self.syncs, self.jobs, self.journal, self.reads, self.removals):
            pool.shutdown(wait=True)


class DiskSigns:
    """What the disk of a node shows of its health: writes that failed and changed nothing, as it is full or descriptors
    are lacking, the rounds that were begun, and the write of the journal that is under way."""

    def __init__(self) -> None:
        self.rounds = 0  # that were begun
        self.refusals = 0
        self.refused_why = ""  # of the last one
        self._begun = 0  # writes of the journal
        self._ended = 0

    def refused(self, error: Exception) -> None:
        self.refusals += 1
        self.refused_why = str(error)

    @property
    def journalling(self) -> int:
        """The number of the write of the journal that is under way; 0 if there is none."""
        return self._ended + 1 if self._ended < self._begun else 0

    def journals(self, write: asyncio.Future[Any]) -> None:
        """A write of the journal begins, or waits for the one before."""
        self._begun += 1
        write.add_done_callback(self._journalled)

    def _journalled(self, _: asyncio.Future[Any]) -> None:
        self._ended += 1


class DelayedCall:
    """One call of a `Delay`."""

    __slots__ = ("callback", "due")

    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due  # loop time
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Delay:
    """Calls that are due equally long after they were asked for, in that order, with one timer for all: thousands of
    logs may be written within milliseconds. Those due within the next EARLY_SHARE of the delay come with the first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._calls: deque[DelayedCall] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def call(self, callback: Callable[[], None]) -> DelayedCall:
        call = DelayedCall(self._loop.time() + self._seconds, callback)
        self._calls.append(call)
        if self._timer is None:
            self._timer = self._loop.call_at(call.due, self._due)
        return call

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._calls.clear()

    def _due(self) -> None:
        self._timer = None
        calls, until = self._calls, self._loop.time() + self._seconds * EARLY_SHARE
        while calls and (calls[0].due <= until or calls[0].callback is None):
            if (callback := calls.popleft().callback) is not None:
                callback()
        if calls and self._timer is None:
            self._timer = self._loop.call_at(calls[0].due, self._due)


class Delays:
    """The delays of one loop; few different ones."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._delays: dict[float, Delay] = {}  # by seconds

    def call(self, seconds: float, callback: Callable[[], None]) -> DelayedCall:
        """Call after about so many seconds, a little earlier perhaps."""
        delay = self._delays.get(seconds)
        if delay is None:
            delay = self._delays[seconds] = Delay(self._loop, seconds)
        return delay.call(callback)

    def close(self) -> None:
        """Call nothing any more."""
        for delay in self._delays.values():
            delay.close()


class DiskRounds:
    """Runs blocking disk work of one node: sync rounds, single jobs in order of submission, and reads beside them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        on_failure: Callable[[BaseException], None],
        *,
        sync_pool: Executor | None = None,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self.progress_seconds = PROGRESS_SECONDS  # until batches that no caller waits for are synced: `bound_progress`
        self._on_failure = on_failure
        self._threads = DiskThreads(sync_pool, QuickSyncs(loop, self._share_ended))
        self._round: DiskRound | None = None  # whose files are being synced
        self._wanting: dict[WantsSync, None] = {}
        self._urgent = False  # a publisher waits for one of them
        self._running = False
        self._failed = False
        self._started = -PATIENT_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._delays = Delays(loop)
        self.round_seconds = Histogram(SECONDS_BOUNDS)
        self.signs = DiskSigns()

    @property
    def running(self) -> int:
        """The number of the round whose files are being synced; 0 if there is none."""
        return self.signs.rounds if self._round is not None else 0

    def request(self, partition: WantsSync, *, patient: bool = False) -> None:
        """Sync what `partition` has written in the next round, which may be late if all its requests are patient."""
        self._wanting[partition] = None
        if not patient:
            self._urgent = True
        self._see_to_it()

    def look(self) -> bool:
        """End the round that publishers wait for, if its files are synced; whether they are. Who keeps the loop busy
        looks now and then, as the loop itself does so once in a turn."""
        return self._threads.quick.look()

    def later(self, seconds: float, callback: Callable[[], None]) -> DelayedCall:
        """Call after about so many seconds, a little earlier perhaps: to request a round that may be late."""
        return self._delays.call(seconds, callback)

    def _see_to_it(self) -> None:
        if self._running or self._failed or not self._wanting:
            return
        if not self._urgent:
            late = self._started + PATIENT_SECONDS - self._clock.monotonic()
            if late > 0:
                if self._timer is None:
                    self._timer = self._loop.call_later(late, self._due)
                return
        self._running = True
        # After the tick, so that all partitions written in this tick share the round.
        self._loop.call_soon(self._start_round)

    def _due(self) -> None:
        self._timer = None
        self._see_to_it()

    def _start_round(self) -> None:
        wanting, self._wanting = self._wanting, {}
        urgent, self._urgent = self._urgent, False
        tickets = [(p, t) for p in wanting if (t := p.sync_ticket()) is not None]
        if not tickets:
            self._running = False
            self._see_to_it()
            return
        files = [file for _, ticket in tickets for file in ticket.files]
        self._round = DiskRound(tickets)
        self._started = self._clock.monotonic()
        self.signs.rounds += 1
        if not urgent or not self._threads.quick.start(files):
            self._round.shares = min(SYNC_THREADS, len(files)) if urgent else 1
            self._sync_by_pool(files, self._round.shares)

    def _sync_by_pool(self, files: list[Any], threads: int) -> None:

        def sync(share: list[Any]) -> None:
            error: BaseException | None = None
            try:
                for file in share:
                    file.sync()
            except BaseException as e:
                error = e
            try:
                self._loop.call_soon_threadsafe(self._share_ended, error)
            except RuntimeError:
                pass  # the loop is closed: the process is ending and no publisher waits for the round

        for n in range(threads):
            self._threads.syncs.submit(sync, files[n::threads])

    def _share_ended(self, error: BaseException | None) -> None:
        if error is not None and not self._failed:
            self._failed = True
            self._on_failure(error)
        ended = self._round
        assert ended is not None, "a share of no round"
        ended.shares -= 1
        if ended.shares == 0:
            self._end_round(ended.tickets)

    def _end_round(self, tickets: list[tuple[WantsSync, SyncTicket]]) -> None:
        self._round = None
        self.round_seconds.observe(self._clock.monotonic() - self._started)
        self._running = False
        if self._failed:
            return
        for partition, ticket in tickets:
            try:
                partition.synced(ticket)
            except Exception as error:
                # A failure of one partition does not concern the others in the round.
                logger.error("round_failed", "a partition failed to process the end of its disk round", error=error)
        if self._urgent and not self._running:
            self._running = True
            self._start_round()
        else:
            self._see_to_it()

    def run(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run one blocking job after all jobs submitted before it."""
        return self._loop.run_in_executor(self._threads.jobs, partial(self._watched, job))

    def apart(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run a blocking job on files that nobody else uses, beside other such jobs: they wait for the disk."""
        return self._loop.run_in_executor(self._threads.syncs, partial(self._watched, job))

    def _watched(self, job: Callable[[], T]) -> T:
        """On a thread; its caller may be gone."""
        try:
            return job()
        except Poisoned as error:
            with suppress(RuntimeError):  # the loop is closed: the process ends
                self._loop.call_soon_threadsafe(self._job_poisoned, error)
            raise

    def _job_poisoned(self, error: Poisoned) -> None:
        if not self._failed:
            self._failed = True
            self._on_failure(error)

    def journal(self, write: Callable[[], T]) -> asyncio.Future[T]:
        """Run a write of the node's journal after the earlier writes, but behind no other job: it holds promises, and
        a partition has no leader while they wait for the cache's sync, a roll or the search for a state."""
        written = self._loop.run_in_executor(self._threads.journal, write)
        self.signs.journals(written)
        return written

    def read(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run a blocking job that changes nothing; no sync, roll or write of the journal waits for it."""
        return self._loop.run_in_executor(self._threads.reads, job)

    async def removed(self, step: Callable[[], bool]) -> None:
        """Unlink files that are not used any more: `step` unlinks some, and returns whether there are more.

        Hundreds of segments take minutes. No other job waits for them; the node's stop waits for one step at most."""
        while await self._loop.run_in_executor(self._threads.removals, partial(self._watched, step)):
            pass

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._delays.close()
        self._threads.close()


class LazySync:
    """Requests the patient rounds of one `sync=interval` log: after `messages` or `seconds`, whichever comes first."""

    __slots__ = ("_disk", "_messages", "_round", "_seconds", "_wants", "unsynced")

    def __init__(self, disk: DiskRounds, wants: WantsSync, *, messages: int, seconds: float) -> None:
        self.unsynced = 0  # messages written since a round was last asked for
        self._disk = disk
        self._wants = wants
        self._messages = messages
        self._seconds = seconds
        self._round: DelayedCall | None = None  # asks for the next round

    def wrote(self, messages: int) -> None:
        """Count messages that are in the page cache now."""
        self.unsynced += messages
        if self.unsynced >= self._messages:
            self.unsynced = 0
            self._disk.request(self._wants, patient=True)
        elif self._round is None:
            self._round = self._disk.later(self._seconds, self._due)

    def cancel(self) -> None:
        """No more rounds are requested because time has passed."""
        if self._round is not None:
            self._round.cancel()
            self._round = None

    def _due(self) -> None:
        self._round = None
        self.unsynced = 0
        self._disk.request(self._wants, patient=True)


def progress_sync(disk: DiskRounds, wants: WantsSync) -> LazySync:
    """Requests the patient rounds of a `sync=always` log for batches that no caller waits for."""
    return LazySync(disk, wants, messages=1, seconds=disk.progress_seconds)


def bound_progress(disk: DiskRounds, replica_seconds: float) -> None:
    """Sync early enough that no replica counts as late, which has to acknowledge after so many seconds."""
    disk.progress_seconds = min(PROGRESS_SECONDS, replica_seconds / PROGRESS_SHARE)
