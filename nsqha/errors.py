"""Every exception of the project, and whose fault each one is.

    NsqhaError
      ConfigError          a flag, file or folder that this program was started with; says what to change
      NotFound             a topic, channel, message or file that is not there
      Conflict             it exists already, or was changed meanwhile
        WrongKind            a channel that is there is a reader's, or is not; a topic is another one of the same name
      StaleMetadata        the metadata store is another one, or older, than this node has acted on; nothing was done
      LimitReached         there are as many as there may be; nothing was done
      Unavailable          not now: shutting down, disk low, no leader; the request was NOT carried out
      OutcomeUnknown       the request may or may not have been carried out
      StorageError         the disk refused
        AppendFailed         nothing was stored; the log is as it was before
        Poisoned             a write or fsync failed in a way that can not be undone; the data directory is closed
      LogCorrupt           our disk lies: stored bytes do not verify; the partition stops there

Trouble that is expected (a peer is gone, a client misbehaves) is an event or a reply, not an exception.
A broken invariant is an `assert`.
"""

from __future__ import annotations


class NsqhaError(Exception):
    """Base of all errors that this project raises on purpose."""


class ConfigError(NsqhaError):
    """The program was started with something it can not use."""


class NotFound(NsqhaError):
    """What was asked for does not exist."""


class Conflict(NsqhaError):
    """It exists already, or somebody changed it meanwhile."""


class WrongKind(Conflict):
    """The channel is one for consumers where a reader's is asked for, or the other way round; or the topic was deleted
    and made anew, and the one before is meant."""


class StaleMetadata(NsqhaError):
    """The metadata store is not the one, or is older than, what this node has acted on: nobody decides by it."""


class LimitReached(NsqhaError):
    """There are as many as there may be; nothing was done."""


class Unavailable(NsqhaError):
    """Not now; nothing was done."""


class OutcomeUnknown(NsqhaError):
    """It may or may not have been done."""


class StorageError(NsqhaError):
    """The disk refused."""


class AppendFailed(StorageError):
    """Nothing was stored: both files were cut back to where they were."""


class Poisoned(StorageError):
    """A failed fsync, or a failed write that could not be cut back: nothing more is trusted here."""


class LogCorrupt(NsqhaError):
    """Stored bytes do not verify."""
