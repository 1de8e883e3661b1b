"""Whether the data directory is the one that this node last used, and not an older copy that was put back.

A copy (a snapshot of a virtual machine, a backup) has the node's uid, its promises and the log_uids of its logs, but
not all that was acknowledged under these names since. So each use of a directory is counted, in its journal and in a
record that stays when the node is gone:

    start                  journal: uses + 1, durable -> record
    every RAISE_SECONDS    likewise, so that a copy made during this use is recognised, too
    the disk fails         record: poisoned, as the journal may not take it any more

    journal behind the record        the directory is older: no log_uid and no promise in it is trusted, so its logs get
                                     new log_uids, are not elected, and are compared with their leaders'
    record poisoned in that use      the page cache is not trusted

The journal is written first: one that is ahead by one is a node that died in between. A copy that is younger than the
last count is not recognised.

A use is counted only by the process that has the node's claim (`election.etcd.session`): a copy that is started beside
its original is refused before, and the original remains the latest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from nsqha.election.model import FolderUse
from nsqha.errors import NsqhaError
from nsqha.nsqlog import Logger

if TYPE_CHECKING:
    from nsqha.commitlog.journal import NodeJournal

RAISE_SECONDS = 600.0

logger = Logger("cluster")


class FolderUses(Protocol):
    """Records of data directories in the metadata store; calls block."""

    def read(self, node: int) -> FolderUse | None:
        """The record of a node's directory. Unavailable."""

    def write(self, use: FolderUse) -> None:
        """Store it. Conflict: there is one with more uses, so another process has this directory, or a copy of it."""


class FolderLife:
    """One use of a data directory."""

    registered: Callable[[], None] = staticmethod(lambda: None)  # the claim to start as this node ends; blocks

    def __init__(self, journal: NodeJournal, uses: FolderUses) -> None:
        self._journal = journal
        self._uses = uses
        self._node = journal.identity.node_uid

    def begin(self) -> None:
        """Judge what the journal says, and count this use. Blocks; before any log is opened. Unavailable, Conflict."""
        known, stored = self._journal.identity.uses, self._uses.read(self._node)
        if stored is not None and stored.uses > known:
            text = (
                "the data directory is an older copy (use %d, last was %d): its logs are compared with other replicas"
            )
            logger.error("old_directory", text, known, stored.uses)
            self._journal.change_all(lambda record: replace(record, promise_trusted=False, log_uid_trusted=False))
        elif stored is not None and stored.poisoned:
            logger.warning("was_poisoned", "closed after a disk failure (%s); it is verified now", stored.poisoned)
            self._journal.change_all(lambda record: replace(record, page_cache_lost=True))
        uses = max(known, 0 if stored is None else stored.uses) + 1
        self._journal.node.stage_uses(uses)
        self._store(uses)

    def _store(self, uses: int) -> None:
        self._journal.commit()
        self._uses.write(FolderUse(self._node, uses))

    async def run(self, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        """Count the directory again from time to time, until cancelled."""
        while True:
            await asyncio.sleep(RAISE_SECONDS)
            uses = self._journal.identity.uses + 1
            self._journal.node.stage_uses(uses)  # on the loop, as all that is staged of the node while it runs
            try:
                await in_thread(lambda n=uses: self._store(n))  # type: ignore[misc]
            except NsqhaError as error:  # the next round counts on; a failed disk is met by who writes logs
                logger.info("directory_not_counted", "%s", error)

    def failed(self, why: str) -> None:
        """The disk failed: a later start has to know. Blocks. Unavailable, OutcomeUnknown, Conflict."""
        self._uses.write(FolderUse(self._node, self._journal.identity.uses, poisoned=why))
