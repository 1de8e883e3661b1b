"""The clocks of the nodes of a cluster are compared; a node whose clock is wrong lets others lead.

Every few seconds this node asks each other one for its wall clock, by a Status that names nothing else. What follows is
decided in `replication.clocks`. A node beyond `--max-clock-skew` declines to lead, like one whose disk refuses
writes. It goes on to follow: what it stores has the leader's stamps, so its clock costs no replica.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from nsqha.errors import NsqhaError
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.replication.clocks import DistrustNews, SkewDecision

if TYPE_CHECKING:
    from nsqha.election.model import NodeInfo
    from nsqha.replication.clocks import BoundedClock
    from nsqha.server.peers.api import Peers

ASK_LOOKS = 5  # between two rounds of questions
ASK_SECONDS = 2.0

logger = Logger("clock")


class ClockWatch:
    """Compares the clock of one node with those of its peers."""

    def __init__(
        self,
        clock: BoundedClock,
        peers: Peers,
        *,
        node: int,
        cluster_id: int,
        nodes: Callable[[], Mapping[int, NodeInfo]],
        announce: Callable[[bool], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`announce(wrong)`: to the cluster."""
        self._clock = clock
        self._peers = peers
        self._node = node
        self._cluster_id = cluster_id
        self._nodes = nodes
        self._announce = announce
        self._spawn = spawn
        self._decision = SkewDecision()
        self._announced = False
        self._telling = False
        self._distrust = DistrustNews()
        self._asking: set[int] = set()
        self._looks = 0

    def look(self) -> None:
        """About once a second."""
        clock = self._clock
        if not clock.bound_ns:
            return
        others = {uid: info for uid, info in self._nodes().items() if uid != self._node}
        clock.peers.keep(others)
        clock.look(1 + len(others))
        if self._looks % ASK_LOOKS == 0:
            for uid, info in others.items():
                if uid not in self._asking and info.grpc_address:
                    self._asking.add(uid)
                    self._spawn(self._ask(uid, info.grpc_address))
        self._looks += 1
        self._decide(1 + len(others))
        if self._decision.declines != self._announced and not self._telling:
            self._telling = True
            self._spawn(self._tell(self._decision.declines))

    def _decide(self, members: int) -> None:
        clock = self._clock
        if self._decision.look(clock.off_ns, clock.bound_ns):
            if self._decision.declines:
                text = "this clock is %.1f s ahead of most nodes': other nodes lead until it is right; set it (NTP)"
                logger.error("clock_skew", text, (clock.off_ns or 0) / 1e9)
            else:
                logger.warning("clock_agrees", "clock skew is within its limit again: this node may lead")
        compared = clock.compared_with(members)
        if self._distrust.look(trusted=clock.trusted, compared=compared):
            if clock.trusted:
                logger.warning("clock_trusted", "clocks agree: time-based retention resumes")
            elif compared:
                text = "clocks disagree, or were set: time-based retention is paused; set them right (NTP)"
                logger.warning("clocks_disagree", text)
            else:
                text = "the clocks of too few nodes are known: time-based retention is paused until most nodes answer"
                logger.warning("clocks_disagree", text)

    async def _ask(self, node: int, address: str) -> None:
        clock = self._clock
        request = pb.StatusRequest(cluster_id=self._cluster_id, clock_only=True)
        asked = clock.monotonic()
        try:
            reply: pb.StatusReply = await self._peers.call(address, "Status", request, timeout=ASK_SECONDS)
        except NsqhaError:
            return  # that it does not answer is the news of others
        finally:
            self._asking.discard(node)
        if reply.node_uid == node and reply.wall_ns:
            clock.peers.heard(node, reply.wall_ns, asked=asked, answered=clock.monotonic())

    async def _tell(self, wrong: bool) -> None:
        try:
            await self._announce(wrong)
        except NsqhaError as error:
            logger.info("not_announced", "%s; trying again", error)
        else:
            self._announced = wrong
        finally:
            self._telling = False
