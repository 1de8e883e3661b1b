"""Under which sync setting each log of this node has acknowledged what is not known to be on its disk.

The setting of today says nothing of yesterday: a log that acknowledged with sync=interval, lost power, and is opened
with sync=always is still a log that may miss what it acknowledged. So the journal keeps `lazy` for each partition:

    opened or promised with interval or none   lazy, before anything is acknowledged
    the setting becomes interval or none       lazy, before the first acknowledgement without a disk round
    the setting is always                      not lazy any more once everything that was written before is on the disk

Owner of that flag. All of it is memory: the caller makes the journal durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqha.commitlog.journal import NodeJournal
    from nsqha.commitlog.log import PartitionLog
    from nsqha.ids import PartitionKey


def weakest(journal: NodeJournal, key: PartitionKey, sync: str) -> str:
    """The weakest setting under which what is in the log may have been acknowledged, with this one now."""
    known = journal.record(key)
    return "none" if sync == "always" and known is not None and known.lazy else sync


class SyncHistory:
    """The settings of the logs of one node."""

    def __init__(self, journal: NodeJournal) -> None:
        self._journal = journal
        self._lazy_below: dict[PartitionKey, int] = {}  # log ids that other settings than always have acknowledged

    def promised(self, key: PartitionKey, sync: str, log: PartitionLog) -> bool:
        """Whether the log is lazy from now on: it is opened, or promised to an epoch, with this setting."""
        known = self._journal.record(key)
        was = known is not None and known.lazy
        if sync == "always" and was:
            self._lazy_below[key] = log.end.log_id
        return was or sync != "always"

    def changes(self, key: PartitionKey, sync: str, log: PartitionLog) -> bool:
        """The setting of an open log changes. True: the journal has to be durable before the change counts."""
        known = self._journal.record(key)
        if known is None:
            return False
        if sync == "always":
            if known.lazy:
                self._lazy_below[key] = log.end.log_id
            return False
        self._lazy_below.pop(key, None)
        self._journal.stage(key, lazy=True)
        return not known.lazy

    def synced(self, key: PartitionKey, log: PartitionLog) -> None:
        """More of the log is on the disk."""
        if log.local_durable >= self._lazy_below.get(key, log.local_durable + 1):
            del self._lazy_below[key]
            self._journal.stage(key, lazy=False)

    def forget(self, key: PartitionKey) -> None:
        """The partition is not here any more."""
        self._lazy_below.pop(key, None)
