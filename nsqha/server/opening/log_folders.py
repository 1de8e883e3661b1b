"""Where the logs of a node lie, and how their files go. All of it blocks, and runs in worker threads.

A partition's folder is `topics/<name>-<topic uid>/<partition>`: the name is for people, the uid makes
delete-and-recreate and names such as `..` harmless. An #ephemeral topic has the same log in memory.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from nsqha import ids
from nsqha.commitlog.files.open_logs import OpenLogs
from nsqha.commitlog.files.pairs import unlink_some
from nsqha.commitlog.storage import MemStorage, parent
from nsqha.server.partition.memory import EphemeralMemory
from nsqha.server.runtime import listen

if TYPE_CHECKING:
    from nsqha.commitlog.storage import Storage
    from nsqha.election.model import TopicRecord

UNLINKED_AT_ONCE = 4  # files of a deleted topic: a large one takes a tenth of a second


class LogFolders:
    """The folders of one node's topics and partitions."""

    def __init__(self, data_path: str, storage: Storage, ephemeral: EphemeralMemory | None = None) -> None:
        self.storage = storage
        self.ephemeral = ephemeral or EphemeralMemory()
        owner = threading.get_ident()
        self.open_logs = OpenLogs(listen.open_logs_max(), lambda: threading.get_ident() == owner)
        self._data_path = data_path

    def topic(self, name: str, uid: int) -> str:
        """The folder of a topic."""
        return f"{self._data_path}/topics/{name}-{uid:016x}"

    def partition(self, record: TopicRecord, number: int) -> str:
        """The folder of a partition."""
        return f"{self.topic(record.name, record.uid)}/{number}"

    def storage_of(self, record: TopicRecord) -> Storage:
        """Where the logs of a topic are: on this disk, or in memory."""
        return MemStorage() if ids.is_ephemeral(record.name) else self.storage

    def topic_uids(self) -> set[int]:
        """The uids of topics that have a folder here."""
        above, found = f"{self._data_path}/topics", set()
        for name in self.storage.list_dir(above) if self.storage.exists(above) else ():
            with suppress(ValueError):  # nothing of ours
                found.add(int(name.rpartition("-")[2], 16))
        return found

    def remove(self, name: str, uid: int) -> bool:
        """Unlink some of what is left of a deleted topic; whether there is more. If not, it is gone durably: its
        tombstone goes next. Safe to repeat."""
        return self._remove(self.topic(name, uid), within=True)

    def exists(self, record: TopicRecord, number: int) -> bool:
        """Whether anything of a partition is here."""
        return self.storage.exists(self.partition(record, number))

    def remove_partition(self, record: TopicRecord, number: int) -> bool:
        """Remove the files of one partition; the journal forgets it too."""
        return self._remove(self.partition(record, number), within=False)

    def _remove(self, folder: str, *, within: bool) -> bool:
        storage = self.storage
        here = storage.exists(folder)
        for directory in [f"{folder}/{name}" for name in storage.list_dir(folder)] if here and within else [folder]:
            if self._unlink_some(directory):
                return True
        storage.remove_tree(folder)
        if storage.exists(above := parent(folder)):
            storage.sync_dir(above)
        return False

    def _unlink_some(self, directory: str) -> bool:
        try:
            return unlink_some(self.storage, directory, UNLINKED_AT_ONCE)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return False  # nothing of ours; it goes with the folder
