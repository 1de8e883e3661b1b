"""Disk rounds: fdatasync for all partitions that want it, off the loop.

A round takes one `SyncTicket` of each partition that asked since the last round began, syncs their files on a few
threads side by side (the file system merges the journal commits), and tells each partition. While a round runs, new
requests gather for the next one; that is the group commit of `sync=always`.

A failed fsync is never retried: which pages were lost is unknowable afterwards. It poisons the node (`on_failure`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from nsqha.clock import Clock
from nsqha.commitlog.log import SyncTicket
from nsqha.nsqlog import Log
from nsqha.quantile import SECONDS_BOUNDS, Histogram

SYNC_THREADS = 4

log = Log("disk")

T = TypeVar("T")


class WantsSync(Protocol):
    def sync_ticket(self) -> SyncTicket | None:
        """What has to reach the disk now; None if nothing."""

    def synced(self, ticket: SyncTicket) -> None:
        """The ticket is on disk."""


class DiskRounds:
    """Runs blocking disk work of one node: sync rounds, and single jobs in order of submission."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Clock, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._on_failure = on_failure
        self._pool = ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix="fdatasync")
        self._jobs = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._wanting: dict[WantsSync, None] = {}
        self._running = False
        self._failed = False
        self.round_seconds = Histogram(SECONDS_BOUNDS)

    def request(self, partition: WantsSync) -> None:
        """Sync what `partition` has written, in the next round."""
        self._wanting[partition] = None
        if not self._running and not self._failed:
            self._running = True
            # After the tick, so that all partitions written in this tick share the round.
            self._loop.call_soon(self._start_round)

    def _start_round(self) -> None:
        wanting, self._wanting = self._wanting, {}
        tickets = [(p, t) for p in wanting if (t := p.sync_ticket()) is not None]
        if not tickets:
            self._running = bool(self._wanting)
            if self._running:
                self._loop.call_soon(self._start_round)
            return
        files = [file for _, ticket in tickets for file in ticket.files]
        shares = [files[n::SYNC_THREADS] for n in range(min(SYNC_THREADS, len(files)))]
        waiting = len(shares)
        started = self._clock.monotonic()

        def done(error: BaseException | None) -> None:
            nonlocal waiting
            if error is not None and not self._failed:
                self._failed = True
                self._on_failure(error)
            waiting -= 1
            if waiting == 0:
                self._end_round(tickets, self._clock.monotonic() - started)

        def sync(share: list[Any]) -> None:
            error: BaseException | None = None
            try:
                for file in share:
                    file.sync()
            except BaseException as e:
                error = e
            try:
                self._loop.call_soon_threadsafe(done, error)
            except RuntimeError:
                pass  # the loop is closed: the process is ending and nobody waits for the round

        for share in shares:
            self._pool.submit(sync, share)

    def _end_round(self, tickets: list[tuple[WantsSync, SyncTicket]], seconds: float) -> None:
        self.round_seconds.observe(seconds)
        self._running = False
        if self._failed:
            return
        for partition, ticket in tickets:
            try:
                partition.synced(ticket)
            except Exception as error:
                # One partition's trouble is not that of the others in the round.
                log.error("round_failed", "a partition could not take in its disk round", error=error)
        if self._wanting and not self._running:
            self._running = True
            self._start_round()

    def run(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run one blocking job after all jobs submitted before it."""
        return self._loop.run_in_executor(self._jobs, job)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self._jobs.shutdown(wait=True)
