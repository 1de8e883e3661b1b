"""Changes of the audit topic, in the audit of every node: who changes it on one could remove the record of that.

    the node that was asked --Routing/Audited--> each other node that is registered: its log, not the topic

The topic has the record too, from the node that was asked. A node that cannot be reached, or whose version does not
know the call, has none; that is logged here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from nsqha.errors import NotFound, NsqhaError
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import routing_pb2
from nsqha.server.runtime.rare_warnings import RareWarnings

if TYPE_CHECKING:
    from nsqha.election.model import NodeInfo
    from nsqha.server.authorization.audit import Audit
    from nsqha.server.peers.api import PeerIdentity, Peers, PeerServer

SECONDS = 5.0
RECORD_BYTES_MAX = 64 * 1024
AT_ONCE_MAX = 100
"""Records that are under way; further ones are not sent, and that is logged."""

logger = Logger("audit")


class AuditCopies:
    """Sends such records to the other nodes, and takes theirs."""

    def __init__(
        self,
        audit: Audit,
        peers: Peers,
        nodes: Callable[[], Mapping[int, NodeInfo]],
        *,
        cluster_id: int,
        node: int,
        spawn: Callable[[Any], object],
    ) -> None:
        """`nodes`: those that are registered, by uid; `node`: the uid of this one."""
        self._audit = audit
        self._peers = peers
        self._nodes = nodes
        self._cluster_id = cluster_id
        self._node = node
        self._spawn = spawn
        self._under_way = 0
        self._failed = RareWarnings(logger, "audit_copy_failed")

    def register(self, server: PeerServer) -> None:
        server.on_call("Audited", self._answer)

    def send(self, record: bytes) -> None:
        """Send it to every other node; it never waits and raises nothing."""
        if self._under_way >= AT_ONCE_MAX:
            self._failed.warning("a change of the audit topic is in no other node's log: too many are under way")
            return
        self._under_way += 1
        self._spawn(self._send(record))

    async def _send(self, record: bytes) -> None:
        try:
            nodes = self._nodes()
            name = nodes[self._node].name if self._node in nodes else f"{self._node:016x}"
            request = routing_pb2.AuditedRequest(cluster_id=self._cluster_id, node=name, record=record)
            others = [node for uid, node in nodes.items() if uid != self._node]
            await asyncio.gather(*(self._send_to(node, request) for node in others))
        finally:
            self._under_way -= 1

    async def _send_to(self, node: NodeInfo, request: routing_pb2.AuditedRequest) -> None:
        try:
            await self._peers.call(node.grpc_address, "Audited", request, timeout=SECONDS)
        except (NsqhaError, ValueError) as error:
            self._failed.warning("a change of the audit topic is not in the log of node %s: %s", node.name, error)

    async def _answer(self, peer: PeerIdentity, request: routing_pb2.AuditedRequest) -> routing_pb2.AuditedReply:
        if request.cluster_id != self._cluster_id:
            raise NotFound(f"this node does not belong to cluster {request.cluster_id:016x}")
        sender = next(((uid, info) for uid, info in self._nodes().items() if info.name == request.node), None)
        if sender is None or not peer.may_be(sender[0], sender[1].broadcast_address):
            raise NotFound(f"{peer} is not node {request.node}")
        if len(request.record) > RECORD_BYTES_MAX:
            raise ValueError("the record is too long")
        self._audit.take(msgspec.json.decode(request.record, type=dict[str, Any]), request.node)
        return routing_pb2.AuditedReply()
