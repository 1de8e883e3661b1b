"""Every exception of the project, and its cause.

    NsqhaError
      ConfigError          a flag, file or folder that this program was started with; says what to change
      NotFound             a topic, channel, message or file does not exist
      Conflict             it exists already, or was changed meanwhile
        WrongKind            the channel is a reader's, or is not one; or the topic is another one of the same name
      StaleMetadata        the metadata store is another one, or older, than this node has acted on; nothing was done
      LimitReached         a limit on their number is reached; nothing was done
      Unavailable          not now: shutting down, disk low, no leader; the request was NOT carried out
      OutcomeUnknown       the request may or may not have been carried out
      StorageError         the disk refused
        AppendFailed         nothing was stored; the log is as it was before
        Poisoned             a write or fsync failed in a way that cannot be undone; the data directory is closed
      LogCorrupt           stored bytes do not verify; the partition stops there
        NotInLog             the channel state names a message that the log does not have
        StateDiverged        the channel state was made from another log than this one

An expected failure (a peer is gone, a client misbehaves) is an event or a reply, not an exception.
A broken invariant is an `assert`.
"""

from __future__ import annotations


class NsqhaError(Exception):
    """Base of all errors that this project raises on purpose."""


class ConfigError(NsqhaError):
    """The program was started with something it cannot use."""


class NotFound(NsqhaError):
    """The requested object does not exist."""


class Conflict(NsqhaError):
    """It exists already, or was changed meanwhile."""


class WrongKind(Conflict):
    """The channel is for consumers where a reader's is wanted, or the other way round; or the request means an earlier
    topic of this name, which was deleted."""


class StaleMetadata(NsqhaError):
    """The metadata store is another one, or older, than this node has acted on: no decision may rest on it."""


class LimitReached(NsqhaError):
    """A limit on their number is reached; nothing was done."""


class Unavailable(NsqhaError):
    """It is not possible now; nothing was done."""


def too_many_changes(what: str) -> Unavailable:
    """The error of a compare-and-set that lost against other changes too often."""
    return Unavailable(f"{what} is being changed by too many at once")


class OutcomeUnknown(NsqhaError):
    """It may or may not have been done."""


class StorageError(NsqhaError):
    """The disk refused."""


class AppendFailed(StorageError):
    """Nothing was stored: both files were cut back to where they were."""


class Poisoned(StorageError):
    """An fsync failed, or a write failed and could not be cut back: this data directory is not trusted any more."""


class LogCorrupt(NsqhaError):
    """Stored bytes do not verify."""


class NotInLog(LogCorrupt):
    """The channel state names the message at `offset`, and the log does not have it. `carried`: it is the carried copy
    that is missing."""

    def __init__(self, offset: int, why: str, *, carried: bool = False) -> None:
        super().__init__(why)
        self.offset = offset
        self.carried = carried


class StateDiverged(LogCorrupt):
    """The channel state was made from batches that the log does not have. `log_id`: the last batch in the state."""

    def __init__(self, log_id: int, why: str) -> None:
        super().__init__(why)
        self.log_id = log_id
