"""Notices that the data directory is not at its path any more: removed, moved away, or its volume unmounted.

What is written into an unlinked file succeeds, and is gone with the process. So once a second, in a thread, inodes at
the paths are compared with those of the files that are open:

    the folder and its lock file             each time
    newest pairs of logs with open files     LOGS_AT_ONCE of them in turn
    what differed the last time              again: the second time in a row closes the data directory

Files that a removal, a roll or a cut has unlinked on purpose are not open any more, or not the newest pair, when their
answer arrives: such an answer counts for nothing.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Mapping

from nsqha.commitlog.files.open_logs import ClosableLog, OpenLogs
from nsqha.commitlog.storage import Inode
from nsqha.errors import Poisoned

LOOK_SECONDS = 1.0
LOGS_AT_ONCE = 64  # two system calls for each
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO)


class DataWatch:
    """The watch over one data directory."""

    def __init__(self, data_path: str, logs: OpenLogs, fail: Callable[[BaseException], None]) -> None:
        """Call while the process holds the lock of the directory. OSError."""
        self._logs = logs
        self._fail = fail
        self._always = {path: inode_at(path) for path in (data_path, f"{data_path}/lock")}
        self._suspects: dict[str, ClosableLog | None] = {}  # by path; None: one of `_always`

    async def run(self) -> None:
        """Look until something is gone."""
        while not await self.look():
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> bool:
        """Compare once; True if the data directory is closed now."""
        owners: dict[str, ClosableLog | None] = dict.fromkeys(self._always)
        for log in [*filter(None, self._suspects.values()), *self._logs.some(LOGS_AT_ONCE)]:
            owners |= dict.fromkeys(log.files.written(), log)
        wanted = {path: inode for path, log in owners.items() if (inode := self._inode(path, log)) is not None}
        differing = await asyncio.to_thread(differences, wanted)
        still = {path: why for path, why in differing.items() if self._inode(path, owners[path]) == wanted[path]}
        for path, why in still.items():
            if path in self._suspects:
                self._fail(Poisoned(f"{path}: {why}, while this process writes there; nothing more is stored"))
                return True
        self._suspects = {path: owners[path] for path in still}
        return False

    def _inode(self, path: str, log: ClosableLog | None) -> Inode | None:
        """Of the file that is open; None if it is not open any more."""
        return self._always[path] if log is None else log.files.written().get(path)


def inode_at(path: str) -> Inode:
    """OSError."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def differences(wanted: Mapping[str, Inode]) -> dict[str, str]:
    """What is at these paths instead, where it is something else. Blocks."""
    found = {}
    for path, inode in wanted.items():
        try:
            if inode_at(path) != inode:
                found[path] = "another file is at this path"
        except OSError as error:
            if error.errno in GONE:
                found[path] = error.strerror or "gone"
    return found
