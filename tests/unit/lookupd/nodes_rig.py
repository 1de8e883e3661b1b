"""Nodes for a controller that is real, in this process: Live streams and Status calls without a network."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from lookupd.controller import ControllerShell, MetadataGate
from lookupd.standby import Gone
from nsqha.clock import SystemClock
from nsqha.election.controller.planner import PlanLimits
from nsqha.election.controller.rounds import ControllerLimits
from nsqha.election.memory import MemoryStore
from nsqha.election.model import NodeInfo, PartitionMeta, TopicSettings
from nsqha.election.session import ClusterSession
from nsqha.election.store import MetadataStore
from nsqha.errors import Unavailable
from nsqha.pb.v1.replication_pb2 import (
    ROLE_FOLLOWER,
    ROLE_LEADER,
    LiveMessage,
    PartitionKey,
    StatusReply,
    StatusRequest,
)
from nsqha.pb.v1.routing_pb2 import KnownChannelsReply
from nsqha.server.peers.api import PeerIdentity, PeerStream, StreamHandler

LIMITS = ControllerLimits(plan=PlanLimits(settle_s=0.2))


class FakeNode:
    """Opens the logs that the records name; leads and follows by what they say."""

    def __init__(self, store: MetadataStore, uid: int) -> None:
        self.store = store
        self.uid = uid
        self.up = True
        self.idle = False  # it leads nothing, whatever the records say
        self.frozen = False  # its streams stay, and it answers nothing
        self.streams: list[NodeStream] = []
        self.statuses = 0
        self.takes_questions = True  # on its Live streams; a node of an older build does not
        self.asked_by_call = 0
        self.known_channels: list[str] = []  # of any topic, what its other lookup daemons say
        self.session: ClusterSession = store.sessions.open(ttl_s=3, lost=lambda: None)
        info = NodeInfo(
            uid,
            f"n{uid}",
            tcp_address=f"0.0.0.0:{4000 + uid}",
            http_address=f"0.0.0.0:{5000 + uid}",
            grpc_address=f"n{uid}",
            peer_address=f"n{uid}",
            hostname=f"host{uid}",
            broadcast_address=f"b{uid}",
            version="1.3.0",
        )
        self.info = self.session.register(info)

    def status(self, request: StatusRequest) -> StatusReply:
        self.statuses += 1
        reply = StatusReply(node_uid=self.uid, registration=self.info.registration)
        for topic in self.store.watch.view().topics.values():
            for number, meta in topic.record.partitions.items():
                key = PartitionKey(topic_uid=topic.record.uid, partition=number)
                if self.uid in meta.replicas and key in request.keys:
                    mine = meta.leader == self.uid and meta.registration == self.info.registration
                    role = ROLE_LEADER if mine and not self.idle else ROLE_FOLLOWER
                    uid = 100 + self.uid
                    shown = reply.replicas.add(key=key, role=role, log_uid=uid, end=1, last_epoch=1)
                    if mine and not self.idle:
                        shown.led_by, shown.leads_epoch = self.uid, meta.epoch
        return reply

    def kill(self) -> None:
        self.up = False
        for stream in list(self.streams):
            stream.end("reset")


class NodeStream:
    def __init__(self, node: FakeNode | None, handler: StreamHandler) -> None:
        self.peer = PeerIdentity()
        self.pending = 0
        self.heard = 0.0
        self.node = node
        self.handler = handler
        self.ended = False
        self.sent: list[Any] = []
        loop = asyncio.get_running_loop()
        if node is None or not node.up:
            loop.call_soon(self.end, "refused")
        else:
            node.streams.append(self)
            hello = LiveMessage(node_uid=node.uid, registration=node.info.registration)
            hello.takes_questions = node.takes_questions
            loop.call_soon(self.receive, hello)

    def ping(self) -> None:
        if self.node is not None and not self.node.frozen:
            self.heard = asyncio.get_running_loop().time()

    def receive(self, message: LiveMessage) -> None:
        if not self.ended:
            self.heard = asyncio.get_running_loop().time()
            self.handler.on_message(message)

    def send(self, message: Any) -> None:
        self.sent.append(message)
        node = self.node
        if message.question and node is not None and not node.frozen:
            answer = LiveMessage(question=message.question, node_uid=node.uid, registration=node.info.registration)
            answer.status.CopyFrom(node.status(message.status_request))
            asyncio.get_running_loop().call_soon(self.receive, answer)

    def close(self, why: str = "") -> None:
        asyncio.get_running_loop().call_soon(self.end, why)

    def end(self, why: str) -> None:
        if not self.ended:
            self.ended = True
            if self.node is not None and self in self.node.streams:
                self.node.streams.remove(self)
            self.handler.on_closed(why)


class NodePeers:
    def __init__(self, nodes: dict[int, FakeNode]) -> None:
        self.nodes = nodes

    def _at(self, address: str) -> FakeNode | None:
        return next((node for node in self.nodes.values() if node.info.grpc_address == address), None)

    def stream(self, address: str, method: str, handler: StreamHandler) -> PeerStream:
        assert method == "Live"
        return NodeStream(self._at(address), handler)

    async def call(self, address: str, method: str, request: Any, *, timeout: float) -> Any:
        await asyncio.sleep(0)
        node = self._at(address)
        if node is None or not node.up:
            raise Unavailable("connection refused")
        if node.frozen:
            await asyncio.sleep(timeout)
            raise Unavailable("no answer")
        if method == "KnownChannels":
            return KnownChannelsReply(channels=node.known_channels)
        assert method == "Status" and request.keys
        node.asked_by_call += 1
        return node.status(request)

    async def close(self) -> None:
        return None


class World:
    def __init__(self, nodes: int, *, stores: Sequence[MetadataStore] = ()) -> None:
        """All use one store in memory, or each node one of `stores`; the last one is for the rest."""
        self.store: Any = stores[-1] if stores else MemoryStore(random.Random(1))
        self.nodes = {uid: FakeNode(stores[uid - 1] if stores else self.store, uid) for uid in range(1, nodes + 1)}
        self.peers = NodePeers(self.nodes)

    def shell(self, name: str = "l1", gone: Gone | None = None, gate: MetadataGate | None = None) -> ControllerShell:
        return ControllerShell(self.store, self.peers, SystemClock(), name=name, limits=LIMITS, gone=gone, gate=gate)

    def meta(self, topic: str = "t", number: int = 0) -> PartitionMeta:
        """As the view has it: a call to etcd would hold up the loop that is being tested."""
        found = self.store.watch.view().topics.get(topic)
        meta = None if found is None else found.record.partitions.get(number)
        return meta or PartitionMeta()

    def create(self, topic: str = "t", partitions: int = 1, replicas: int | None = None) -> None:
        self.store.records.create_topic(topic, TopicSettings(partitions=partitions, replicas=replicas))

    def join_all(self, topic: str = "t", *, followers: bool = True) -> None:
        """What leaders do once their followers have caught up; without `followers` when these are lost."""
        found = self.store.records.topic(topic)
        assert found is not None
        for number, meta in found.record.partitions.items():
            isr = {uid: 100 + uid for uid in meta.replicas if followers or uid == meta.leader}
            self.store.records.replace_partition(topic, found.record.uid, number, replace(meta, isr=isr))

    async def until(self, true: Any) -> None:
        """Within a time that a starved process needs for hundreds of elections."""
        async with asyncio.timeout(60):
            while not true():
                await asyncio.sleep(0.01)

    async def led(self, topic: str = "t") -> None:
        await self.until(lambda: self.meta(topic).leader != 0)


@asynccontextmanager
async def controlled(nodes: int = 3) -> AsyncIterator[tuple[World, ControllerShell]]:
    world = World(nodes)
    shell = world.shell()
    await shell.start()
    try:
        yield world, shell
    finally:
        await shell.stop()
