"""Where the records of a cluster are in etcd, and requests about them.

    /nsqha/<cluster name>/                        lease   version of the record
      cluster               ClusterRecord                 mod_revision
      folders/<uid>         FolderUse
      controller            Controller             x      create_revision = the controller's epoch
      intents/<name>        any JSON object               mod_revision
      nodes/<uid>           NodeInfo               x      create_revision = the registration
      partitions/<uid>/<n>  PartitionMeta         (x)     mod_revision
      starting/<uid>        NodeInfo               x      a process that starts with this node's data directory
      tombstones/<uid>      Tombstone
      topics/<name>         TopicRecord, no partitions (x)  mod_revision
      waiting/<uid>         WaitingNode            x      (these three: nsqha.election.metadata_restore)
      hold                  Hold
      accepted              Accepted                      mod_revision

uids are 16 hex digits, partition numbers decimal. Values are JSON (nsqha.election.codec); numbers that etcd itself
counts are not stored in them. (x): ephemeral topics are on the lease of the process that created them. Other keys are
not touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from nsqha.election.codec import FORMAT, decode, encode
from nsqha.election.etcd.bridge import rpc
from nsqha.election.model import Controller, NodeInfo, PartitionMeta, StoredRecord, TopicRecord, Versioned
from nsqha.errors import ConfigError, LogCorrupt

OPS_MAX = 128  # of one transaction, etcd's --max-txn-ops; a transaction inside another has what the outer one leaves
OPS_PER_PART = 64

R = TypeVar("R", bound=StoredRecord)

ROOT = b"/nsqha/"  # of all clusters

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,64}")
_PARTITION = re.compile(r"partitions/([0-9a-f]{16})/([0-9]{1,4})")
_UID = re.compile(r"(?:nodes|tombstones|waiting|intents/names)/([0-9a-f]{16})")


def valid_cluster_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


class Keys:
    """The keys of one cluster."""

    def __init__(self, cluster_name: str) -> None:
        """Raise ConfigError for a name that could reach another cluster's keys."""
        if not valid_cluster_name(cluster_name):
            raise ConfigError(f"{cluster_name!r} is not a cluster name: 1 to 64 letters, digits, . _ -")
        self.prefix = f"{ROOT.decode()}{cluster_name}/"
        self.cluster = self._key("cluster")
        self.controller = self._key("controller")
        self.topics = self._key("topics/")
        self.partitions = self._key("partitions/")
        self.tombstones = self._key("tombstones/")
        self.nodes = self._key("nodes/")
        self.intents = self._key("intents/")
        self.waiting = self._key("waiting/")
        self.hold = self._key("hold")
        self.accepted = self._key("accepted")
        self.all = self._key("")

    def topic(self, name: str) -> bytes:
        return self._key(f"topics/{name}")

    def partitions_of(self, uid: int) -> bytes:
        return self._key(f"partitions/{uid:016x}/")

    def partition(self, uid: int, number: int) -> bytes:
        return self._key(f"partitions/{uid:016x}/{number}")

    def tombstone(self, uid: int) -> bytes:
        return self._key(f"tombstones/{uid:016x}")

    def node(self, uid: int) -> bytes:
        return self._key(f"nodes/{uid:016x}")

    def folder(self, node: int) -> bytes:
        return self._key(f"folders/{node:016x}")

    def starting(self, node: int) -> bytes:
        return self._key(f"starting/{node:016x}")

    def waiting_node(self, uid: int) -> bytes:
        return self._key(f"waiting/{uid:016x}")

    def intent(self, name: str) -> bytes:
        return self._key(f"intents/{name}")

    def short(self, key: bytes) -> str:
        """The key without the prefix; "" if it is not one of this cluster's."""
        text = key.decode(errors="replace")
        return text[len(self.prefix) :] if text.startswith(self.prefix) else ""

    def _key(self, name: str) -> bytes:
        return (self.prefix + name).encode()


def partition_of(short: str) -> tuple[int, int] | None:
    """(topic uid, number) of a partition's key."""
    match = _PARTITION.fullmatch(short)
    return None if match is None else (int(match[1], 16), int(match[2]))


def uid_of(short: str) -> int:
    """The uid in the key of a node, tombstone or waiting node, or of the intent with a node's name; else 0."""
    match = _UID.fullmatch(short)
    return 0 if match is None else int(match[1], 16)


# Records. LogCorrupt and ConfigError name the key.


def record_of(kind: type[R], kv: Any, **set_by_store: object) -> R:
    try:
        return decode(kind, kv.value, **set_by_store)
    except (LogCorrupt, ConfigError) as error:
        raise type(error)(f"etcd key {kv.key.decode(errors='replace')}: {error}") from error


def versioned_of(kind: type[R], kv: Any) -> Versioned[R]:
    return Versioned(record_of(kind, kv), kv.mod_revision)


def partition_value(meta: PartitionMeta) -> bytes:
    return encode(meta, version=0)


def partition_meta(kv: Any) -> PartitionMeta:
    return record_of(PartitionMeta, kv, version=kv.mod_revision)


def topic_value(record: TopicRecord) -> bytes:
    return encode(replace(record, partitions={}))


def node_value(node: NodeInfo) -> bytes:
    return encode(node, registration=0)


def node_info(kv: Any) -> NodeInfo:
    return replace(record_of(NodeInfo, kv), registration=kv.create_revision)


def intent_value(intent: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode({"format": FORMAT, "intent": intent})


def intent_of(kv: Any) -> Versioned[Mapping[str, Any]]:
    try:
        plain = msgspec.json.decode(kv.value, type=dict[str, Any])
        number, intent = msgspec.convert(plain.get("format"), int), msgspec.convert(plain.get("intent"), dict[str, Any])
    except msgspec.MsgspecError as error:
        raise LogCorrupt(f"etcd key {kv.key.decode(errors='replace')} is not an intent: {error}") from error
    if number > FORMAT:
        raise ConfigError(f"etcd key {kv.key.decode(errors='replace')} has format {number}; use a newer version")
    return Versioned(intent, kv.mod_revision)


def controller_value(controller: Controller) -> bytes:
    return encode(controller, epoch=0)


def controller_of(kv: Any) -> Controller:
    return replace(record_of(Controller, kv), epoch=kv.create_revision)


# Requests


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all that begin with `prefix`, which ends in "/" or another byte below 0xff."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


def get(key: bytes, *, prefix: bool = False) -> Any:
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key, range_end=prefix_end(key) if prefix else b""))


def put(key: bytes, value: bytes, *, lease: int = 0, keep_lease: bool = False) -> Any:
    """A put request. `keep_lease`: the key exists and stays on the lease that it has, if any."""
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease, ignore_lease=keep_lease))


def delete(key: bytes, *, prefix: bool = False) -> Any:
    end = prefix_end(key) if prefix else b""
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key, range_end=end))


def unchanged(key: bytes, mod_revision: int) -> Any:
    """A compare: the key is still as it was read; 0: still absent."""
    return rpc.Compare(key=key, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=mod_revision)


def created(key: bytes, create_revision: int) -> Any:
    """A compare: it is still the same life of this key; 0: absent."""
    return rpc.Compare(key=key, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=create_revision)


def none_newer(prefix: bytes, revision: int) -> Any:
    """A compare: no key with this prefix was put after `revision` (deletions do not count)."""
    return rpc.Compare(
        key=prefix,
        range_end=prefix_end(prefix),
        target=rpc.Compare.MOD,
        result=rpc.Compare.LESS,
        mod_revision=revision + 1,
    )


def txn(compares: Iterable[Any], then: Iterable[Any], otherwise: Iterable[Any] = ()) -> Any:
    """One transaction. More than OPS_MAX operations are packed into transactions inside this one, without compares."""
    ops = list(then)
    if len(ops) > OPS_PER_PART:
        parts = [ops[i : i + OPS_PER_PART] for i in range(0, len(ops), OPS_PER_PART)]
        assert len(parts) + OPS_PER_PART <= OPS_MAX, "too many operations for one transaction"
        ops = [rpc.RequestOp(request_txn=rpc.TxnRequest(success=part)) for part in parts]
    request = rpc.TxnRequest(compare=list(compares), success=ops, failure=list(otherwise))
    assert len(request.compare) + OPS_PER_PART <= OPS_MAX, "too many compares for one transaction"
    return request
