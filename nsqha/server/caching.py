"""Keeps the cache of channel state on disk about a second behind: gathers on the loop, writes on the disk thread.

A write is not a task: it belongs to nobody who could be cancelled, and the end of the node waits for it.
"""

from __future__ import annotations

import asyncio

from nsqha.cursor.lmdb_cache import LmdbCache, Taken
from nsqha.server.disk import DiskRounds


class CacheWriter:
    """Writes one node's cache, one write at a time."""

    def __init__(self, cache: LmdbCache, loop: asyncio.AbstractEventLoop, disk: DiskRounds) -> None:
        self.cache = cache
        self._loop = loop
        self._disk = disk
        self._running: asyncio.Future[None] | None = None
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
            self._running = self._disk.run(lambda: self.cache.write(taken))
            self._running.add_done_callback(lambda future: self._written(future, taken))

    def _written(self, future: asyncio.Future[None], taken: Taken) -> None:
        self._running = None
        future.result()
        self.cache.written(taken, self._loop.time())
        if self.cache.pressing:
            self.write()

    async def close(self, *, write: bool) -> None:
        """Let what runs end, write the last (unless the disk is not to be written any more), close the cache."""
        for last in (False, True):
            if last and write:
                self.write(force=True)
            if self._running is not None:
                await asyncio.wait((self._running,))
                await asyncio.sleep(0)  # its callback is on its way
        self._closed = True
        self.cache.close()
