"""Keeps the cache of channel state on disk about a second behind: rows on the loop, the rest on the disk thread.

A write is not a task: no caller owns it whose cancellation could end it, and the node's stop waits for it.
"""

from __future__ import annotations

import asyncio

from nsqha.cursor.cache.lmdb_cache import CacheWrite, LmdbCache
from nsqha.server.runtime.disk import DiskRounds


class CacheWriter:
    """Writes one node's cache, one write at a time."""

    def __init__(self, cache: LmdbCache, loop: asyncio.AbstractEventLoop, disk: DiskRounds) -> None:
        self.cache = cache
        self._loop = loop
        self._disk = disk
        self._running: asyncio.Future[None] | None = None  # ends with the write
        self._closed = False
        cache.on_full = self._soon

    def _soon(self) -> None:
        self._loop.call_soon(self.write)

    def write(self, *, force: bool = False) -> None:
        """Write what changed, unless it is too early or a write is under way."""
        if self._running is not None or self._closed:
            return
        taken = self.cache.take(self._loop.time(), force=force)
        if taken is not None:
            self._running = self._loop.create_future()
            self._rows(taken)

    def _rows(self, taken: CacheWrite) -> None:
        """Some rows now, the others in the next ticks."""
        if not self.cache.write_rows(taken):
            self._loop.call_soon(self._rows, taken)
        elif taken.whole and taken.error is None:
            self._disk.run(lambda: self.cache.write(taken)).add_done_callback(lambda job: self._written(taken, job))
        else:
            self._written(taken)

    def _written(self, taken: CacheWrite, job: asyncio.Future[None] | None = None) -> None:
        running, self._running = self._running, None
        assert running is not None
        running.set_result(None)
        if job is not None:
            job.result()
        self.cache.written(taken, self._loop.time())
        if self.cache.pressing:
            self.write()

    async def close(self, *, write: bool) -> None:
        """Wait for a running write, write the last changes (only if `write`), close the cache."""
        await self._ended()
        if write:
            self.write(force=True)
        self._closed = True
        await self._ended()
        await self._disk.run(lambda: None)  # a job that searches for a state reads the cache, and may write to it
        self.cache.close()

    async def _ended(self) -> None:
        while self._running is not None:
            await self._running
