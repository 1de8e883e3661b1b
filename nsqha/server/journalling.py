"""What is staged in the node's journal reaches the disk: at once where something depends on it, else some time.

Promises are made durable before anything is done on their account (`promise`). The rest, such as how far each log is on
this disk, may lag (`write`): a full disk is tried again, as nothing staged is lost by it; any other failure closes the
node. Writes run on the disk thread, one record each.
"""

from __future__ import annotations

from collections.abc import Callable

from nsqha.commitlog.journal import NodeJournal
from nsqha.errors import AppendFailed, StorageError
from nsqha.nsqlog import Log
from nsqha.server.disk import DiskRounds

log = Log("journalling")


class JournalWriter:
    """Writes one node's journal."""

    def __init__(self, journal: NodeJournal, disk: DiskRounds, fail: Callable[[BaseException], None]) -> None:
        self.writing = False  # by `write`
        self._journal = journal
        self._disk = disk
        self._fail = fail

    async def promise(self) -> None:
        """Make what is staged durable before anything is done on its account."""
        taken = self._journal.take()
        await self._disk.run(lambda: self._journal.write(taken))

    async def write(self) -> None:
        """Make what is staged durable some time."""
        self.writing = True
        try:
            await self.promise()
        except AppendFailed as error:
            log.warning("journal_delayed", "the journal could not be written, trying again: %s", error)
        except StorageError as error:
            self._fail(error)
        finally:
            self.writing = False
