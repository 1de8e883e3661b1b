"""Keys that nodes and an operator write to an etcd whose metadata the nodes do not trust.

The keys `waiting/<uid>`, `hold` and `accepted` are not metadata: they only decide which nodes to ask and when to wait.
So they are read and written through a connection that trusts every etcd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nsqha.clock import Clock
from nsqha.election.codec import encode
from nsqha.election.etcd import keys as etcd_keys
from nsqha.election.etcd.calls import read_ranges
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
    """All these keys at one revision, and the cluster that the etcd belongs to."""

    etcd_cluster_id: int
    revision: int
    cluster_id: int  # 0: no cluster of this name
    waiting: dict[int, WaitingNode]
    hold: Versioned[Hold] | None
    accepted: Versioned[AcceptedMetadata]  # version 0: never

    @property
    def why_not(self) -> str:
        """Why these metadata are not trusted; empty: no reason is known."""
        if self.hold is not None:
            return "nsqha cluster accept-metadata is under way, or was interrupted: run it again"
        if self.waiting:
            names = ", ".join(node.name or f"{uid:016x}" for uid, node in sorted(self.waiting.items()))
            return f"nodes wait for nsqha cluster accept-metadata: {names}; until then no topic can be created"
        return ""


class EtcdAcceptance:
    """Blocking calls, from one thread at a time. Unavailable, OutcomeUnknown, ConfigError as of `EtcdClient`."""

    def __init__(self, options: EtcdOptions, cluster_name: str, clock: Clock, trouble: Trouble) -> None:
        self._client = _Believing(options)
        self._keys = etcd_keys.Keys(cluster_name)
        self._clock = clock
        self._trouble = trouble
        self._lease: EtcdLease | None = None
        self._announced: WaitingNode | None = None

    def look(self) -> EtcdSnapshot:
        return look(self._client, self._keys)

    def announce(self, node: WaitingNode) -> None:
        """Write this node under `waiting/`; call it again about once a second, or the key expires."""
        if self._lease is None or self._lease.gone:
            self._lease = EtcdLease(self._client, self._clock, ttl_s=TTL_S, lost=lambda: None, trouble=self._trouble)
            self._lease.start()
            self._announced = None
        self._lease.ticked()
        if node != self._announced:
            record = put(self._keys.waiting_node(node.node_uid), encode(node), lease=self._lease.id)
            self._change([], [record])
            self._announced = node

    def hold(self, hold: Hold) -> None:
        """Write the hold: nodes stop leading; safe to repeat."""
        self._change([], [put(self._keys.hold, encode(hold))])

    def accept(self, before: Versioned[AcceptedMetadata], accepted: AcceptedMetadata) -> None:
        """Let these nodes continue, and end the hold. Conflict: another operator accepted meanwhile."""
        changes = [put(self._keys.accepted, encode(accepted)), delete(self._keys.hold)]
        if not self._change([unchanged(self._keys.accepted, before.version)], changes).succeeded:
            raise Conflict("another operator accepted the metadata meanwhile; look again")

    def close(self) -> None:
        """Remove the key under `waiting/`."""
        if self._lease is not None:
            self._lease.stop(revoke=True)
        self._client.close()

    def _change(self, compares: list[Any], then: list[Any]) -> Any:
        return self._client.change(lambda stubs: stubs.kv.Txn, txn(compares, then))


def look(client: EtcdClient, keys: etcd_keys.Keys) -> EtcdSnapshot:
    """Read once what nodes and operators wrote about these metadata."""
    wanted = [get(keys.waiting, prefix=True), get(keys.hold), get(keys.accepted), get(keys.cluster)]
    (waiting, hold, accepted, cluster), header = read_ranges(client, *wanted)
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
    """A client that trusts every etcd."""

    def saw(self, header: Any, *, at_least: int) -> None:
        pass
