"""Every leader of a topic follows its record before a change of the channel list is answered.

    change: compare-and-set -> logs led here -> Reconcile to the other leaders -> OK
    at each of them: read the record -> append the `channels` event -> commit -> answer

A leader is asked by the partitions that it is thought to lead and says which of them it does lead, so one that was
replaced meanwhile is found and its successor asked. A partition without a leader (or whose leader has no lease) is not
waited for: its next leader reads the record before it acknowledges anything. Who can not be reached in time fails the
change; it stays in the record, so that trying again ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from nsqha.errors import NotFound, NsqhaError, Unavailable
from nsqha.pb.v1 import routing_pb2
from nsqha.server.leaders import Leaders

if TYPE_CHECKING:
    from nsqha.server.peers import PeerIdentity, Peers, PeerServer
    from nsqha.server.topic import Topic

RETRY_SECONDS = 0.05

Follow = Callable[[str, int, int], Awaitable[list[int]]]


class Reconciler:
    """Asks the other leaders, and answers them."""

    def __init__(
        self, leaders: Leaders, peers: Peers, *, loop: asyncio.AbstractEventLoop, seconds: float, follow: Follow
    ) -> None:
        """`seconds`: for all of them to answer; `follow(topic, uid, version)` brings what is led here in line with a
        record of at least that version of the channel list, and says which partitions those are."""
        self._leaders = leaders
        self._peers = peers
        self._loop = loop
        self._seconds = seconds
        self._follow = follow

    def register(self, server: PeerServer) -> None:
        server.on_call("Reconcile", self._answer)

    async def others_follow(self, topic: Topic) -> None:
        """Returns when every leader on another node has the record's channel list in its log. Unavailable."""
        version = topic.record.channels.version
        deadline = self._loop.time() + self._seconds
        done: set[int] = set()
        why = ""
        while waiting := self._waiting(topic, done):
            left = deadline - self._loop.time()
            if left <= 0:
                numbers = sorted(number for numbers in waiting.values() for number in numbers)
                raise Unavailable(f"the leaders of partitions {numbers} of {topic.name} do not follow: {why}")
            asked = [self._ask(address, topic, version, numbers, left) for address, numbers in waiting.items()]
            for outcome in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(outcome, NsqhaError):
                    why = str(outcome)
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    done |= outcome
            if self._waiting(topic, done):
                await asyncio.sleep(RETRY_SECONDS)

    def _waiting(self, topic: Topic, done: set[int]) -> dict[str, list[int]]:
        """Partitions of other leaders that have not answered yet, by address."""
        found: dict[str, list[int]] = {}
        for number in range(self._leaders.partitions(topic.name)):
            leader = self._leaders.leader(topic.name, number)
            if leader is None or number in done or topic.record.uid != leader.topic_uid:
                continue
            if leader.node != self._leaders.node:
                found.setdefault(leader.address, []).append(number)
        return found

    async def _ask(self, address: str, topic: Topic, version: int, numbers: list[int], seconds: float) -> set[int]:
        request = routing_pb2.ReconcileRequest(
            cluster_id=self._leaders.cluster_id,
            topic=topic.name,
            topic_uid=topic.record.uid,
            version=version,
            partitions=numbers,
        )
        reply = await self._peers.call(address, "Reconcile", request, timeout=seconds)
        return set(reply.partitions)

    async def _answer(self, peer: PeerIdentity, request: routing_pb2.ReconcileRequest) -> routing_pb2.ReconcileReply:
        if request.cluster_id != self._leaders.cluster_id:
            raise NotFound(f"this node belongs to cluster {self._leaders.cluster_id:016x}")
        numbers = await self._follow(request.topic, request.topic_uid, request.version)
        return routing_pb2.ReconcileReply(partitions=numbers)
