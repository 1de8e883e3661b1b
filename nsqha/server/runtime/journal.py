"""Writes what is staged in the node's journal to the disk: at once where something depends on it, else later.

    stage(..), promise() --.
    stage(..), promise() --+--> one round, after the one under way --> journal thread: one record, one fdatasync

A promise is durable before anything relies on it (`promise`); the promises of many partitions, as when the node that
led them died, share a round. The rest, such as how far each log is on this disk, may lag (`write`): after a full disk
the write is retried, as nothing staged is lost by it; any other failure closes the node.

Rounds have a thread of their own. A recovery on the disk thread writes its truncations itself; the journal's locks
separate the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nsqha.commitlog.journal import NodeJournal
from nsqha.errors import AppendFailed, StorageError, Unavailable
from nsqha.nsqlog import Logger
from nsqha.server.runtime.disk import DiskRounds
from nsqha.server.runtime.tasks import Shared

logger = Logger("journalling")


class JournalWriter:
    """Writes one node's journal."""

    def __init__(self, journal: NodeJournal, disk: DiskRounds, fail: Callable[[BaseException], None]) -> None:
        self.writing = False  # while `write` runs
        self._journal = journal
        self._disk = disk
        self._fail = fail
        self._turn = asyncio.Lock()
        self._gathering: Shared[None] | None = None  # the next round; it has taken nothing yet
        self._ended = False

    async def promise(self) -> None:
        """Return when what is staged is durable, so that the caller may rely on it."""
        await self.promising().outcome()

    def promising(self) -> Shared[None]:
        """The round that makes durable what is staged, for a caller who does something else meanwhile."""
        if self._gathering is None:
            self._gathering = Shared(asyncio.get_running_loop(), self._round())
        return self._gathering

    async def _round(self) -> None:
        async with self._turn:
            self._gathering = None
            if self._ended:
                raise Unavailable("this node is stopping")
            self._journal.take()
            await self._disk.journal(self._journal.write)

    async def write(self) -> bool:
        """Make durable what is staged and may lag; return whether it is. A full disk is logged, and the caller tries
        again."""
        self.writing = True
        try:
            await self.promise()
            return True
        except AppendFailed as error:
            logger.warning("journal_delayed", "the journal could not be written, trying again: %s", error)
        except StorageError as error:
            self._fail(error)
        except Unavailable:
            pass  # the last write of `end` includes it
        finally:
            self.writing = False
        return False

    async def end(self, last: Callable[[], None]) -> None:
        """The node stops: run `last` as the last write; every later one is refused."""
        async with self._turn:
            self._ended = True
            await self._disk.journal(last)
