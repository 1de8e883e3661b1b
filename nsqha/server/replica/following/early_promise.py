"""A promise that is journalled before anybody asks for it.

When a leader is gone, its successor reads the record again before it promises its own epoch, and then asks the others
for their promises: three waits, one after the other, two of them for a disk. That an epoch exists is known to all of
them as soon as the record shows it, so each begins to journal its promise then. It gives nothing away: the leader of an
earlier epoch cannot get its record back. Who opens a stream finds the promise at once, a restart finds it once it is
durable. What an earlier leader pushes on an open stream to the node that is elected is taken until that one is fenced,
which is before it leads.

    record shows the epoch --early_promise--> staged, a round of the journal begun
    the promise is needed  --.round--> durable, or the error of the round: then it is staged and written again
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from nsqha.commitlog.log import PartitionLog
from nsqha.ids import PartitionKey
from nsqha.server.runtime.tasks import Shared

if TYPE_CHECKING:
    from nsqha.server.opening.opener import PartitionOpener
    from nsqha.server.runtime.journal import JournalWriter


class Promises(Protocol):
    """Whose promise it is: a follower."""

    key: PartitionKey
    log: PartitionLog
    log_uid: int
    sync: str


class EarlyPromise(NamedTuple):
    """A promise to an epoch that is being journalled, or was."""

    epoch: int
    log: PartitionLog
    log_uid: int
    round: Shared[None]  # raises as `JournalWriter.promise`

    def is_of(self, follower: Promises, epoch: int) -> bool:
        """Whether it is the promise of this epoch for the log that this follower has now."""
        return self.epoch == epoch and self.log is follower.log and self.log_uid == follower.log_uid


def early_promise(opener: PartitionOpener, writer: JournalWriter, follower: Promises, epoch: int) -> EarlyPromise:
    """Stage the promise of `epoch`, and have the next round of the journal make it durable."""
    opener.stage_promise(follower.key, epoch, follower.log, follower.log_uid, follower.sync)
    return EarlyPromise(epoch, follower.log, follower.log_uid, writer.promising())
