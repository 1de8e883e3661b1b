"""The plain values of a job about the log, small enough to be pickled into every task.

    PinnedPartition  one partition of a snapshot: identity, committed range, borders, replicas
    Split            what one task reads: messages [first, end) and the batches that contain them
    FetchedRun       consecutive batches as received from a replica or a file: nothing in it is verified yet

Offsets count messages, log ids count batches, positions count bytes; ends are exclusive.
"""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from typing import NamedTuple

ENTRY_BYTES = 80


class CutPoint(NamedTuple):
    """A border between two batches."""

    offset: int
    log_id: int  # of the batch after it
    position: int
    timestamp_ns: int  # no message before it is newer, none after it is older; 0: not known


class ReplicaAddress(NamedTuple):
    """The address of a replica that serves the bytes of a partition."""

    address: str  # host:port
    host: str = ""  # label of the machine; a task prefers its own
    leader: bool = False


class PartitionLife(NamedTuple):
    """One partition of one topic uid: a topic that was deleted and created again has another one."""

    topic: str
    topic_uid: int
    partition: int
    id_base: int  # a message's id is this plus its offset


@dataclass(frozen=True)
class PinnedPartition:
    """One partition of a snapshot."""

    identity: PartitionLife
    start: CutPoint
    end: CutPoint
    epoch: int  # of the last committed entry, `end.log_id - 1`
    chain: int
    cuts: tuple[CutPoint, ...] = ()  # ascending, both ends included
    replicas: tuple[ReplicaAddress, ...] = ()
    path: str = ""  # instead of replicas: the partition's folder of a node that is not running


@dataclass(frozen=True)
class Split:
    """The range that one task reads. It yields `end - first` messages, or fails."""

    identity: PartitionLife
    first: int  # offset of the first message
    end: int  # one past the last one
    first_log_id: int  # borders of batches around them
    end_log_id: int
    first_offset: int  # of the batch `first_log_id`
    end_offset: int  # one past the last message of the batch `end_log_id - 1`
    at_log_id: int  # the entry of the snapshot that has `chain`: a replica that has it has everything before
    chain: int
    replicas: tuple[ReplicaAddress, ...] = ()
    path: str = ""
    hold_id: str = ""


class FetchedRun(NamedTuple):
    """Batches [first_log_id, first_log_id + len(entries) / 80), not verified."""

    first_log_id: int
    entries: bytes | bytearray | memoryview
    frames: bytes | bytearray | memoryview  # without those of entries that are LOST or FAULTY


class ReadFailed(Exception):
    """A range could not be read as planned; the message is one line that says what is missing and what to do.

    `planned` and `available` are (first, end) offsets.
    """

    def __init__(
        self, message: str, *, planned: tuple[int, int] | None = None, available: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.planned = planned
        self.available = available

    def __reduce__(self) -> tuple[object, ...]:
        return _failed, (type(self), str(self), self.planned, self.available)


class NotThere(ReadFailed):
    """A topic or a partition that was named does not exist."""


class NoBroker(ReadFailed):
    """No broker answers."""


class NotVerified(ReadFailed):
    """The received bytes are not those of the log: another replica may have them."""


class Unreadable(ReadFailed):
    """No replica has these messages any more: an operator marked them as lost, or recovery did."""


class Gone(ReadFailed):
    """Retention has removed the messages, or the topic was deleted or created again."""


def _failed(
    kind: type[ReadFailed], message: str, planned: tuple[int, int] | None, available: tuple[int, int] | None
) -> ReadFailed:
    return kind(message, planned=planned, available=available)


def bug_report(error: BaseException) -> str:
    """Report a bug in a task in one line; its traceback is on the worker's stderr."""
    traceback.print_exception(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text} ({os.path.basename(where.filename)}:{where.lineno}); please report it"
