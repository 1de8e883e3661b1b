"""Connections to both ports of a node: for the node that joins, and for another one that joins and asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsqha.errors import NsqhaError, Unavailable
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers.api import UNIMPLEMENTED, CallRefused
from nsqha.server.runtime.tasks import Shared

if TYPE_CHECKING:
    from nsqha.election.model import NodeInfo
    from nsqha.election.session import View
    from nsqha.server.peers.api import Message, PeerIdentity, Peers, PeerServer

DIAL_SECONDS = 2.0  # for one port
REACH_SECONDS = 3 * DIAL_SECONDS  # for a broker to connect to both ports of this node, and to say so


class Dialler:
    """Connects to nodes once, and says how that went."""

    def __init__(self, peers: Peers, *, node: int, cluster_id: int) -> None:
        """`node`: the one that connects."""
        self.node = node
        self.cluster_id = cluster_id
        self._peers = peers
        self._loop = asyncio.get_running_loop()

    async def connect(self, other: NodeInfo, registration: int) -> str:
        """Connect with a broker in both directions; returns which one failed, and why, empty: none. `registration`: the
        life in which this node is to be reached."""
        if other.node_uid == self.node:
            why = await self.dial(other)
            return f"is not reached at {why}" if why else ""
        request = pb.ReachRequest(cluster_id=self.cluster_id, node_uid=self.node, registration=registration)
        try:
            await self._open(other)
        except NsqhaError as error:
            return f"is not reached from here at {other.peer_address}: {error}"
        try:
            reply = await self._peers.call(other.grpc_address, "Reach", request, timeout=REACH_SECONDS)
        except CallRefused as error:
            if error.status == UNIMPLEMENTED:
                return ""  # of an older build
            return f"is not reached from here at {other.grpc_address}: {error}"
        except NsqhaError as error:
            return f"is not reached from here at {other.grpc_address}: {error}"
        return f"does not reach this node at {reply.why_not}" if reply.why_not else ""

    async def dial(self, info: NodeInfo) -> str:
        """Connect to both ports of a node; returns the address where that failed, and why."""
        try:
            await self._open(info)
        except NsqhaError as error:
            return f"{info.peer_address}: {error}"
        request = pb.StatusRequest(cluster_id=self.cluster_id, clock_only=True)
        try:
            reply: pb.StatusReply = await self._peers.call(info.grpc_address, "Status", request, timeout=DIAL_SECONDS)
        except NsqhaError as error:
            return f"{info.grpc_address}: {error}"
        return "" if reply.node_uid == info.node_uid else f"{info.grpc_address}: another node answers there"

    async def _open(self, info: NodeInfo) -> None:
        """Open a stream to the peer port of a node, and hear its greeting. Unavailable."""
        if not info.peer_address:
            return
        greeted = _Greeted(self._loop)
        stream = self._peers.stream(info.peer_address, "Live", greeted)
        try:
            stream.send(pb.LiveMessage(cluster_id=self.cluster_id, node_uid=self.node))
            async with asyncio.timeout(DIAL_SECONDS):
                node = await greeted.node
        except TimeoutError:
            raise Unavailable(f"no answer within {DIAL_SECONDS:g} s") from None
        finally:
            stream.close("it was only to be reached")
        if node != info.node_uid:
            raise Unavailable("another node answers there")


class ReachAnswers:
    """Connects to nodes that join, when they ask for it."""

    def __init__(self, dialler: Dialler, view: Callable[[], View]) -> None:
        self._dialler = dialler
        self._view = view
        self._loop = asyncio.get_running_loop()
        self._dialling: dict[tuple[int, int], Shared[str]] = {}  # nodes that asked for it

    def register(self, server: PeerServer) -> None:
        """Be asked."""
        server.on_call("Reach", self.reach)

    async def reach(self, peer: PeerIdentity, request: pb.ReachRequest) -> pb.ReachReply:
        """Connect to the node that asks, where it registered. Unavailable: it is not registered here."""
        info = self._view().nodes.get(request.node_uid)
        if request.cluster_id != self._dialler.cluster_id:
            raise Unavailable(f"this node is of cluster {self._dialler.cluster_id:016x}")
        if info is None or info.registration != request.registration:
            raise Unavailable(f"node {request.node_uid:016x} is not registered here yet")
        if not peer.may_be(info.node_uid, info.broadcast_address):
            raise Unavailable(f"{peer} is not node {info.node_uid:016x}")
        key = info.node_uid, info.registration
        shared = self._dialling.get(key)
        if shared is None:  # however often it asks, one attempt is made at a time
            shared = self._dialling[key] = Shared(self._loop, self._dialler.dial(info))
            shared.task.add_done_callback(lambda _: self._dialling.pop(key))
        return pb.ReachReply(why_not=await shared.outcome())


class _Greeted:
    """The handler of a stream that waits for the other side's greeting."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.node: asyncio.Future[int] = loop.create_future()  # who greets
        self.node.add_done_callback(lambda node: node.cancelled() or node.exception())

    def on_message(self, message: Message) -> None:
        if not self.node.done():
            self.node.set_result(message.node_uid)

    def on_closed(self, why: str) -> None:
        if not self.node.done():
            self.node.set_exception(Unavailable(why or "it ended the stream"))
