"""Every leader of a topic follows its record before a change of the channel list is answered.

    change: compare-and-set -> logs led here -> Reconcile to the other leaders -> OK
    at each of them: read the record -> append the `channels` event -> commit -> answer

What is not in the record (empty; pause of an #ephemeral channel) goes the same way, as an `Administer`. No later leader
reads of it, so it is answered when it was done in every partition, on this node too if that leads it by then. A lookup
daemon that makes a topic asks all nodes for the channels that it is to begin with (`KnownChannels`).

Who leads is read linearizably, after the change: the view of the watch may be of before an election whose winner has
read the record before the change, and acknowledges messages that the new channel would never see. By the record as it
is then, a partition without a leader is not waited for: its next leader reads the record before it acknowledges
anything. Nor is one whose leader has no lease: its address is not known, and it may acknowledge without the channel
until its successor begins, as long as it reaches its followers but not the metadata.

A leader says which partitions it does lead, so one that was replaced meanwhile is found and its successor asked. Who
can not be reached in time fails the change; it stays in the record, so that trying again ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.errors import NotFound, NsqhaError, Unavailable
from nsqha.pb.v1 import routing_pb2
from nsqha.server.routing.leaders import Administration, Leaders

if TYPE_CHECKING:
    from nsqha.server.partition.topic import Topic
    from nsqha.server.peers.api import PeerIdentity, Peers, PeerServer

RETRY_SECONDS = 0.05

Follow = Callable[[str, int, int], Awaitable[list[int]]]
KnownChannels = Callable[[str], Awaitable[list[str]]]
CarryOut = Callable[[str, int, Administration, str, Collection[int]], Awaitable[list[int]]]
Ask = Callable[[str, list[int], float], Awaitable[Any]]
WhereLed = Callable[[str, int], Awaitable[dict[int, str]]]


async def nothing() -> str:
    """Nothing is lacking."""
    return ""


class Reconciler:
    """Asks the other leaders, and answers them."""

    def __init__(
        self,
        leaders: Leaders,
        peers: Peers,
        *,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        follow: Follow,
        carry_out: CarryOut,
        led_elsewhere: WhereLed,
        known_channels: KnownChannels,
    ) -> None:
        """`seconds`: for all of them to answer; `follow(topic, uid, version)` brings what is led here in line with a
        record of at least that version of the channel list, `carry_out(topic, uid, what, channel, numbers)` does what
        is not in the record in these of them; both say for which partitions. `led_elsewhere(topic, uid)` reads who
        leads on other nodes as of now: partition -> address, without those that no node leads or whose leader has no
        lease. `known_channels(topic)`: what this node's lookup daemons know of a brand-new topic."""
        self._leaders = leaders
        self._peers = peers
        self._loop = loop
        self._seconds = seconds
        self._follow = follow
        self._carry_out = carry_out
        self._led_elsewhere = led_elsewhere
        self._known_channels = known_channels

    def register(self, server: PeerServer) -> None:
        server.on_call("Reconcile", self._answer_reconcile)
        server.on_call("Administer", self._answer_administer)
        server.on_call("KnownChannels", self._answer_known_channels)

    async def others_follow(self, topic: Topic) -> None:
        """Returns when every leader on another node has the record's channel list in its log. Unavailable."""
        request = routing_pb2.ReconcileRequest(
            cluster_id=self._leaders.cluster_id,
            topic=topic.name,
            topic_uid=topic.record.uid,
            version=topic.record.channels.version,
        )
        await self._ask_all(topic, lambda at, _, left: self._peers.call(at, "Reconcile", request, timeout=left), set())

    async def do_everywhere(
        self, topic: Topic, what: Administration, channel: str = "", *, partition: int | None = None
    ) -> None:
        """Returns when it is done in every partition, or in the one that is named, here and elsewhere, through changes
        of leaders: once in each, as messages are acknowledged while others are waited for. NotFound, Unavailable."""
        uid = topic.record.uid
        done: set[int] = set() if partition is None else {*range(ids.PARTITIONS_MAX)} - {partition}

        async def lacking() -> str:
            missing = set(range(self._leaders.partitions(topic.name))) - done
            if any(topic.leads(number) is not None for number in missing):
                try:
                    done.update(await self._carry_out(topic.name, uid, what, channel, missing))
                except Unavailable as error:
                    return str(error)
            missing -= done
            return f"partitions {sorted(missing)} have no leader that could be asked" if missing else ""

        def ask(at: str, numbers: list[int], left: float) -> Awaitable[Any]:
            request = routing_pb2.AdministerRequest(
                cluster_id=self._leaders.cluster_id,
                topic=topic.name,
                topic_uid=uid,
                what=what,  # type: ignore[arg-type]  # the same numbers
                channel=channel,
                partitions=numbers,
            )
            return self._peers.call(at, "Administer", request, timeout=left)

        await lacking()  # what is led here does not wait for others
        await self._ask_all(topic, ask, done, lacking)

    async def _ask_all(
        self, topic: Topic, ask: Ask, done: set[int], lacking: Callable[[], Awaitable[str]] = nothing
    ) -> None:
        """Ask the other leaders until all partitions that they lead are `done`, and nothing is `lacking` besides: what
        that says is why it is not over."""
        deadline = self._loop.time() + self._seconds
        waiting: dict[str, list[int]] = {}  # partitions of other leaders that have not answered yet, by address
        why = "they lead something else now"
        while True:
            try:
                waiting = await self._waiting(topic, done)
            except Unavailable as error:
                why = f"who leads is not known: {error}"
            else:
                if not waiting and not (why := await lacking()):
                    return
            left = deadline - self._loop.time()
            if left <= 0:
                numbers = sorted(number for numbers in waiting.values() for number in numbers)
                which = f"partitions {numbers} of {topic.name}" if waiting else topic.name
                raise Unavailable(f"the leaders of {which} did not follow in time: {why}")
            asking = [ask(at, numbers, left) for at, numbers in waiting.items()]
            for outcome in await asyncio.gather(*asking, return_exceptions=True):
                if isinstance(outcome, NsqhaError):
                    why = str(outcome)
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    done.update(outcome.partitions)
            # A node that leads one of them later has read the record, or the event in the log.
            if waiting and all(done.issuperset(numbers) for numbers in waiting.values()) and not await lacking():
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _waiting(self, topic: Topic, done: set[int]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, address in (await self._led_elsewhere(topic.name, topic.record.uid)).items():
            if number not in done:
                found.setdefault(address, []).append(number)
        return found

    async def _answer_reconcile(
        self, peer: PeerIdentity, request: routing_pb2.ReconcileRequest
    ) -> routing_pb2.ReconcileReply:
        self._check(request.cluster_id)
        numbers = await self._follow(request.topic, request.topic_uid, request.version)
        return routing_pb2.ReconcileReply(partitions=numbers)

    async def _answer_administer(
        self, peer: PeerIdentity, request: routing_pb2.AdministerRequest
    ) -> routing_pb2.AdministerReply:
        self._check(request.cluster_id)
        what = Administration(request.what)
        numbers = await self._carry_out(request.topic, request.topic_uid, what, request.channel, request.partitions)
        return routing_pb2.AdministerReply(partitions=numbers)

    async def _answer_known_channels(
        self, peer: PeerIdentity, request: routing_pb2.KnownChannelsRequest
    ) -> routing_pb2.KnownChannelsReply:
        self._check(request.cluster_id)
        return routing_pb2.KnownChannelsReply(channels=await self._known_channels(request.topic))

    def _check(self, cluster_id: int) -> None:
        if cluster_id != self._leaders.cluster_id:
            raise NotFound(f"this node does not belong to cluster {cluster_id:016x}")
