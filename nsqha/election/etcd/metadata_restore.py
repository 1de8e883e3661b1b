"""What nodes that do not believe their etcd, and the operator who lets them, write there all the same.

The keys `waiting/<uid>`, `hold` and `accepted` are no metadata: nothing is decided by them but whom to ask and when to
wait. So they are read and written through a connection that believes whoever answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nsqha.clock import Clock
from nsqha.election.codec import encode
from nsqha.election.etcd import keys as etcd_keys
from nsqha.election.etcd.client import EtcdClient, EtcdOptions
from nsqha.election.etcd.keys import delete, get, put, txn, unchanged
from nsqha.election.etcd.lease import EtcdLease
from nsqha.election.etcd.view import Trouble
from nsqha.election.metadata_restore import AcceptedMetadata, Hold, WaitingNode
from nsqha.election.model import ClusterRecord, Versioned
from nsqha.errors import Conflict

TTL_S = 10.0  # a waiting node that is gone is forgotten after this


@dataclass(frozen=True)
class EtcdSnapshot:
    """All of it at one revision, and whose etcd it is."""

    etcd_cluster_id: int
    revision: int
    cluster_id: int  # 0: no cluster of this name
    waiting: dict[int, WaitingNode]
    hold: Versioned[Hold] | None
    accepted: Versioned[AcceptedMetadata]  # version 0: never

    @property
    def why_not(self) -> str:
        """Why nobody may decide by this metadata; empty: nothing is known against it."""
        if self.hold is not None:
            return "nsqha cluster accept-metadata is under way, or was broken off: run it again"
        if self.waiting:
            names = ", ".join(node.name or f"{uid:016x}" for uid, node in sorted(self.waiting.items()))
            return f"nodes wait for nsqha cluster accept-metadata: {names}"
        return ""


class EtcdAcceptance:
    """Blocking calls, from one thread at a time. Unavailable, OutcomeUnknown, ConfigError as `EtcdClient`."""

    def __init__(self, options: EtcdOptions, cluster_name: str, clock: Clock, trouble: Trouble) -> None:
        self._client = _Believing(options)
        self._keys = etcd_keys.Keys(cluster_name)
        self._clock = clock
        self._trouble = trouble
        self._lease: EtcdLease | None = None
        self._told: WaitingNode | None = None

    def look(self) -> EtcdSnapshot:
        return look(self._client, self._keys)

    def announce(self, node: WaitingNode) -> None:
        """Be found under `waiting/`; call it again about once a second, or it ends."""
        if self._lease is None or self._lease.gone:
            self._lease = EtcdLease(self._client, self._clock, ttl_s=TTL_S, lost=lambda: None, trouble=self._trouble)
            self._lease.start()
            self._told = None
        self._lease.ticked()
        if node != self._told:
            record = put(self._keys.waiting_node(node.node_uid), encode(node), lease=self._lease.id)
            self._change([], [record])
            self._told = node

    def hold(self, hold: Hold) -> None:
        """From now on nodes stop to lead; safe to repeat."""
        self._change([], [put(self._keys.hold, encode(hold))])

    def accept(self, before: Versioned[AcceptedMetadata], accepted: AcceptedMetadata) -> None:
        """Let these nodes go on, and end the hold. Conflict: somebody else accepted meanwhile."""
        changes = [put(self._keys.accepted, encode(accepted)), delete(self._keys.hold)]
        if not self._change([unchanged(self._keys.accepted, before.version)], changes).succeeded:
            raise Conflict("the metadata were accepted by somebody else meanwhile; look again")

    def close(self) -> None:
        """Be found no more."""
        if self._lease is not None:
            self._lease.stop(revoke=True)
        self._client.close()

    def _change(self, compares: list[Any], then: list[Any]) -> Any:
        return self._client.change(lambda stubs: stubs.kv.Txn, txn(compares, then))


def look(client: EtcdClient, keys: etcd_keys.Keys) -> EtcdSnapshot:
    """One read of what nodes and operators wrote about this metadata."""
    wanted = [get(keys.waiting, prefix=True), get(keys.hold), get(keys.accepted), get(keys.cluster)]
    (waiting, hold, accepted, cluster), header = client.ranges(*(op.request_range for op in wanted))
    nodes = [etcd_keys.record_of(WaitingNode, kv) for kv in waiting]
    return EtcdSnapshot(
        header.cluster_id,
        header.revision,
        etcd_keys.record_of(ClusterRecord, cluster[0]).cluster_id if cluster else 0,
        {node.node_uid: node for node in nodes},
        etcd_keys.versioned_of(Hold, hold[0]) if hold else None,
        etcd_keys.versioned_of(AcceptedMetadata, accepted[0]) if accepted else Versioned(AcceptedMetadata(), 0),
    )


class _Believing(EtcdClient):
    """Takes every etcd for the right one."""

    def saw(self, header: Any, *, at_least: int) -> None:
        pass
