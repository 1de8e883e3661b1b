"""What the node journal holds, and one round of it as text.

    {"format": 1, "node": {all of NodeState}, "partitions": {"<topic uid, hex>-<partition>": {changed fields} | null}}

The node's state is complete in every record, so any valid record says which node this is. The first record of a file
has every field of every partition, a later one those that changed. null: the partition is no longer here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import msgspec

from nsqha.commitlog.recordfile import Contents
from nsqha.errors import ConfigError
from nsqha.ids import PartitionKey

FORMAT = 1


@dataclass(frozen=True, slots=True)
class CutIntent:
    """The log is to end here; replayed only if the first entry cut is absent, unreadable or this one."""

    log_id: int  # the new end: this entry and all behind it go
    offset: int
    position: int
    epoch: int  # of the first entry cut
    chain: int  # of the first entry cut


@dataclass(frozen=True, slots=True)
class PartitionRecord:
    """What the journal knows of one partition."""

    promise: int = 0  # no append of a lower leader epoch is accepted
    log_uid: int = 0  # 0: none is known, recovery has to draw one
    local_durable: int = 0  # what `PartitionLog.synced` last reported
    cut: CutIntent | None = None
    promise_trusted: bool = True
    log_uid_trusted: bool = True
    page_cache_lost: bool = False  # and the log was not recovered since: what was not synced may be gone
    lazy: bool = False  # what is above local_durable may have been acknowledged: not only sync=always since then


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """The node that this data directory belongs to, and its cluster."""

    node_uid: int
    cluster_id: int = 0  # 0: not in a cluster yet
    etcd_cluster_id: int = 0  # 0: never used etcd
    revision_seen: int = 0  # highest metadata revision that this node has acted on
    generation: int = 0  # of the last `accept-metadata` that this node follows
    uses: int = 0  # how often the directory was taken into use, and once more for each ten minutes of a use
    in_doubt: bool = False  # the metadata went back to an older state, and no operator has accepted that yet


@dataclass(frozen=True, slots=True)
class NodeState:
    """What every record repeats."""

    identity: NodeIdentity
    page_cache: str  # names the page cache that the writer wrote into (`opening.page_cache`)
    clean: bool  # the last thing a clean stop writes
    poison: str


@dataclass(frozen=True, slots=True)
class JournalContents:
    """What a journal file says, for start and for tools that only look."""

    node: NodeState
    partitions: Mapping[PartitionKey, PartitionRecord]
    torn: bool
    damaged: bool


def encode(
    node: NodeState,
    changed: Mapping[PartitionKey, PartitionRecord | None],
    before: Mapping[PartitionKey, PartitionRecord],
) -> bytes:
    partitions = {
        f"{key[0]:016x}-{key[1]}": None if record is None else _difference(before.get(key), record)
        for key, record in changed.items()
    }
    return msgspec.json.encode({"format": FORMAT, "node": asdict(node), "partitions": partitions})


_FIELDS = tuple(field.name for field in fields(PartitionRecord))


def _difference(old: PartitionRecord | None, new: PartitionRecord) -> dict[str, Any]:
    changed = {name: getattr(new, name) for name in _FIELDS if old is None or getattr(old, name) != getattr(new, name)}
    if changed.get("cut") is not None:
        changed["cut"] = asdict(changed["cut"])
    return changed


class _Round(msgspec.Struct):
    """A record as it is read; fields that a later version of this format adds are skipped."""

    node: NodeState
    partitions: dict[str, dict[str, Any] | None]


class _JournalFormat(msgspec.Struct):
    format: int


def decode(contents: Contents, path: str) -> JournalContents:
    """What a file says, the valid records applied in order. ConfigError if there is none, or a newer format."""
    partitions: dict[PartitionKey, PartitionRecord] = {}
    last: _Round | None = None
    for payload in contents.payloads:
        number = msgspec.json.decode(payload, type=_JournalFormat).format
        if number > FORMAT:
            raise ConfigError(f"{path} has format {number}, this version reads up to {FORMAT}; start a newer version")
        last = msgspec.json.decode(payload, type=_Round)
        for name, values in last.partitions.items():
            uid, _, partition = name.partition("-")
            key = int(uid, 16), int(partition)
            if values is None:
                partitions.pop(key, None)
            else:
                known = {k: v for k, v in values.items() if k in _FIELDS}
                if known.get("cut") is not None:
                    known["cut"] = msgspec.convert(known["cut"], CutIntent)
                partitions[key] = replace(partitions.get(key, PartitionRecord()), **known)
    if last is None:
        raise ConfigError(
            f"{path} is unreadable, so this node no longer knows who it is; restore it from a backup, "
            "or move it away to start as a new node that keeps its logs"
        )
    return JournalContents(last.node, partitions, contents.torn, contents.damaged)
