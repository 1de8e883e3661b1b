"""Who leads, as other nodes say: for a node whose view of the records is old because it has lost etcd, and only that.

    a node that does not lead refuses ------------> its hint ----,
    no node takes it, this node has no lease -----> ask a few ---+--> hint --> `Leaders.leader`, when tried again

A hint says where to send, and nothing else: no node leads, follows, elects or joins by it, and a node that is sent
something decides for itself whether it leads. It is what the other node's records say, never another hint, so that no
hearsay goes round.

It counts as long as its epoch is above that of the record as this node knows it, and of two the one with the higher
epoch: a node that follows hints gets ahead with each. It goes when its node cannot be reached, or knows of no such
epoch (etcd may have been put back); then the record counts again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from nsqha.errors import NsqhaError, Unavailable
from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2, routing_pb2
from nsqha.server.routing.leaders import LeaderAt, Leaders

if TYPE_CHECKING:
    from nsqha.server.peers.api import PeerIdentity, Peers, PeerServer


ASK_NODES = 3  # at a time; the next ones are asked next
ASK_PARTITIONS = 1000  # in one question
ASK_SECONDS = 0.5  # for an answer
ASK_AGAIN_SECONDS = 0.2

logger = Logger("hints")


class Hints:
    """The leaders that other nodes have named to one node."""

    def __init__(
        self,
        leaders: Leaders,
        peers: Peers,
        *,
        epoch_of: Callable[[str, PartitionKey], int | None],
        addresses: Callable[[], Mapping[int, str]],
        cut_off: Callable[[], bool],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`epoch_of(topic, key)`: in the record as this node knows it; None: there is no such partition. `addresses`:
        of all nodes, by uid. `cut_off`: whether this node can not know what the records are."""
        self._leaders = leaders
        self._peers = peers
        self._epoch_of = epoch_of
        self._addresses = addresses
        self._cut_off = cut_off
        self._spawn = spawn
        self._hints: dict[PartitionKey, tuple[str, LeaderAt]] = {}  # with the topic's name
        self._wanted: dict[PartitionKey, str] = {}
        self._asking = False
        self._turn = 0

    def register(self, server: PeerServer) -> None:
        server.on_call("Leaders", self._answer)

    # ---- what is known

    def leader(self, key: PartitionKey, epoch: int) -> LeaderAt | None:
        """The hint, if it is of a later epoch than `epoch`, which is the record's."""
        _, at = self._hints.get(key, ("", None))
        return at if at is not None and at.epoch > epoch else None

    def names(self, node: int) -> bool:
        """Whether something is sent to a node by a hint."""
        return any(at.node == node for _, at in self._hints.values())

    def prune(self) -> None:
        """The records are newer now."""
        for key, (topic, at) in list(self._hints.items()):
            epoch = self._epoch_of(topic, key)
            if epoch is None or epoch >= at.epoch:
                del self._hints[key]

    # ---- what is heard

    def not_led(self, topic: str, key: PartitionKey, by: int, hint: LeaderAt | None) -> bool:
        """As `Leaders.not_led`."""
        _, known = self._hints.get(key, ("", None))
        if known is not None and known.node == by and (hint is None or hint.epoch < known.epoch):
            del self._hints[key]
        if hint is not None and hint.topic_uid == key[0]:
            self._take(topic, key, hint)
        if not self._cut_off():
            return False
        self._wanted[key] = topic
        if not self._asking:
            self._asking = True
            self._spawn(self._ask())
        return True

    def _take(self, topic: str, key: PartitionKey, at: LeaderAt) -> None:
        """No part is called: those that found no leader look again in a moment, and slower each time. So nodes that are
        wrong about each other send no client to and fro."""
        epoch = self._epoch_of(topic, key)
        if epoch is None or not at.node or not at.address or not at.peer_address or at.node == self._leaders.node:
            return
        _, known = self._hints.get(key, ("", None))
        if at.epoch <= max(epoch, known.epoch if known is not None else 0):
            return
        logger.info(
            "leader_hinted", "%s/%d: node %016x leads epoch %d, as others say", topic, key[1], at.node, at.epoch
        )
        self._hints[key] = topic, at

    # ---- asking

    async def _ask(self) -> None:
        try:
            while self._wanted and self._cut_off():
                asked = dict(islice(self._wanted.items(), ASK_PARTITIONS))
                request = routing_pb2.LeadersRequest(cluster_id=self._leaders.cluster_id)
                for key, topic in asked.items():
                    del self._wanted[key]
                    request.partitions.add(key=wire_key(key), topic=topic)
                for reply in await asyncio.gather(*[self._asked(at, request) for at in self._next()]):
                    for hint in reply.leaders:
                        heard = (hint.key.topic_uid, hint.key.partition)
                        if heard in asked:
                            self._take(asked[heard], heard, from_wire(hint))
                await asyncio.sleep(ASK_AGAIN_SECONDS)
        finally:
            self._asking = False

    def _next(self) -> list[str]:
        """Addresses of the nodes to ask now: each one's turn comes."""
        addresses = sorted(self._addresses().items())
        others = [address for uid, address in addresses if uid != self._leaders.node and address]
        first, self._turn = self._turn, self._turn + ASK_NODES
        return [others[(first + n) % len(others)] for n in range(min(ASK_NODES, len(others)))]

    async def _asked(self, address: str, request: routing_pb2.LeadersRequest) -> routing_pb2.LeadersReply:
        try:
            reply: routing_pb2.LeadersReply = await self._peers.call(address, "Leaders", request, timeout=ASK_SECONDS)
        except (NsqhaError, ValueError) as error:
            logger.debug("no_hint", "%s: %s", address, error)
            return routing_pb2.LeadersReply()
        return reply

    async def _answer(self, peer: PeerIdentity, request: routing_pb2.LeadersRequest) -> routing_pb2.LeadersReply:
        if request.cluster_id != self._leaders.cluster_id:
            raise Unavailable(f"this node does not belong to cluster {request.cluster_id:016x}")
        reply = routing_pb2.LeadersReply()
        for asked in request.partitions[:ASK_PARTITIONS]:
            if (hint := hint_of(self._leaders, asked.topic, (asked.key.topic_uid, asked.key.partition))) is not None:
                reply.leaders.append(hint)
        return reply


def hint_of(leaders: Leaders, topic: str, key: PartitionKey) -> routing_pb2.LeaderHint | None:
    """What this node tells another one of who leads; None: it does not know."""
    at = leaders.recorded(topic, key[1]) if key[1] < leaders.partitions(topic) else None
    if at is None or at.topic_uid != key[0]:
        return None
    return routing_pb2.LeaderHint(
        key=wire_key(key), node_uid=at.node, address=at.address, peer_address=at.peer_address, epoch=at.epoch
    )


def from_wire(hint: routing_pb2.LeaderHint) -> LeaderAt:
    return LeaderAt(hint.node_uid, hint.address, hint.peer_address, hint.epoch, hint.key.topic_uid)


def wire_key(key: PartitionKey) -> replication_pb2.PartitionKey:
    return replication_pb2.PartitionKey(topic_uid=key[0], partition=key[1])
