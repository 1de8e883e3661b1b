"""Checks whether the present log is the one that a checkpoint was made with.

    checkpoint: offset 1200, witness: entry 57 with chain c     log: [.. 56 | 57 | 58 .. 90]     snapshot: ends with 90
                                                                           ^
                           a replica that has entry 90 of the snapshot is asked for entry 57: is its chain c?

A chain identifies the whole log up to its entry, so one entry proves all that was read. The leader of an epoch only
appends to what it wrote before: an entry that was seen in a log of this epoch, or was its committed end, stays. So an
entry is read after a start and after a change of leader, and not once per micro-batch.

An entry that retention has removed cannot be compared; then only offsets show whether something is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from pyspark_nsqha.model import ENTRY_BYTES, Gone, PinnedPartition, Split
from pyspark_nsqha.options import ConnectOptions
from pyspark_nsqha.reading import fetch
from pyspark_nsqha.streams.offsets import Key, PartitionOffset

logger = logging.getLogger(__name__)

SEEN_MAX: Final = 16  # witnesses of one partition that are remembered: two are in use
_CHAIN: Final = slice(60, 68)  # of an entry: docs/disk-format.md

EntryAt = Callable[[PinnedPartition, int], bytes | None]
"""Reads entry `log_id` of a pin's log; None: retention has removed it. ReadFailed: no replica answered."""


class _WitnessedEntries(NamedTuple):
    """Entries that are known to be in the log of one leader epoch."""

    epoch: int
    chains: dict[int, int]  # log id -> chain


class Witnesses:
    """Compares the logs that a query reads with its checkpoint."""

    def __init__(self, entry_at: EntryAt) -> None:
        self._entry_at = entry_at
        self._seen: dict[Key, _WitnessedEntries] = {}

    def differs(self, key: Key, record: PartitionOffset, pin: PinnedPartition | None) -> str:
        """Why this is not the log of the record; empty: it is, as far as can be known. ReadFailed."""
        where = f"{key[0]}/{key[1]}"
        if pin is None:
            return f"{where} does not exist any more: the topic was deleted, and what was not read of it is lost"
        if not same_topic(record, pin):
            return (
                f"{where}: the topic was deleted and created again: the checkpoint is of uid {record.uid:016x}, the "
                f"topic now has {pin.identity.topic_uid:016x}"
            )
        if is_behind(record, pin):
            return (
                f"{where}: the log ends at offset {pin.end.offset}, log id {pin.end.log_id - 1}, before offset "
                f"{record.offset}, log id {record.log_id} of the checkpoint: committed messages were lost, by an "
                f"unclean election or a restored backup"
            )
        chain = self._chain(key, pin, record.log_id)
        if chain is None:
            logger.info("%s: retention removed log id %d: the checkpoint cannot be compared", where, record.log_id)
        elif chain != record.chain:
            return (
                f"{where}: entry {record.log_id} of the log has chain {chain:016x}, that of the checkpoint (epoch "
                f"{record.epoch}) has {record.chain:016x}: committed messages were lost or replaced, by an unclean "
                f"election or a restored backup"
            )
        return ""

    def _chain(self, key: Key, pin: PinnedPartition, log_id: int) -> int | None:
        """The chain of an entry of the log of `pin`; None: retention has removed it."""
        seen = self._seen.get(key)
        if seen is None or seen.epoch != pin.epoch:
            seen = self._seen[key] = _WitnessedEntries(pin.epoch, {})
        seen.chains[pin.end.log_id - 1] = pin.chain
        if log_id not in seen.chains:
            entry = self._entry_at(pin, log_id)
            if entry is None:
                return None
            seen.chains[log_id] = int.from_bytes(entry[_CHAIN], "big")
        chain = seen.chains[log_id]
        while len(seen.chains) > SEEN_MAX:
            del seen.chains[min(seen.chains)]
        return chain


def same_topic(record: PartitionOffset, pin: PinnedPartition) -> bool:
    """Whether both are of the same topic uid."""
    return record.uid == pin.identity.topic_uid


def is_behind(record: PartitionOffset, pin: PinnedPartition) -> bool:
    """Whether the committed log ends before the record."""
    return pin.end.log_id <= record.log_id or pin.end.offset < record.offset


def entry_at(connection: ConnectOptions, pin: PinnedPartition, log_id: int) -> bytes | None:
    """Read the entry from any replica that has the log of `pin`; see `EntryAt`."""
    if log_id < max(1, pin.start.log_id):
        return None
    split = Split(
        identity=pin.identity,
        first=pin.start.offset,
        end=pin.start.offset,  # only the entry is needed, no message
        first_log_id=log_id,
        end_log_id=log_id + 1,
        first_offset=pin.start.offset,
        end_offset=pin.start.offset,
        at_log_id=pin.end.log_id - 1,
        chain=pin.chain,
        replicas=pin.replicas,
    )
    runs = fetch.runs(
        split,
        tls=connection.tls,
        timeout_seconds=connection.timeout_ms / 1000,
        retries=min(connection.retries, ENTRY_RETRIES_MAX),
        host=connection.host,
    )
    try:
        return bytes(next(iter(runs)).entries[:ENTRY_BYTES])
    except Gone:
        return None
    finally:
        runs.close()


ENTRY_RETRIES_MAX: Final = 5  # rounds over all replicas: about 10 s
