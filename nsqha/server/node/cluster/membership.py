"""This node as a member of a cluster: how it joins and leaves, what it hears from the metadata store, and its peers.

What the watch brings is a hint: it says which record to look at (`RecordNews`). Roles are taken only on a linearizable
read. While the store can not be reached nothing is decided here and everything that runs goes on: publishing needs only
the ISR. A node that lost its lease joins again (`NodeRegistration`), and looks at every role again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from nsqha.election.model import JUST_REGISTERED, TRIED_SECONDS
from nsqha.errors import NsqhaError, Unavailable
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.replication.silence import LOOK_SECONDS
from nsqha.server.node.cluster.leaders import ClusterLeaders
from nsqha.server.node.cluster.live import LiveStream
from nsqha.server.node.cluster.reach.dialler import Dialler, ReachAnswers
from nsqha.server.node.cluster.reach.reach import Reach
from nsqha.server.node.cluster.records import EVERYTHING, RecordNews
from nsqha.server.node.cluster.registration import NodeRegistration
from nsqha.server.node.cluster.suspects import Suspects
from nsqha.server.opening.opener import RECOVERED_AT_ONCE
from nsqha.server.replica.leading.sender import FollowerStreams
from nsqha.server.runtime.tasks import TaskGroup, log_failure, some_at_once

if TYPE_CHECKING:
    from nsqha.clock import Clock
    from nsqha.election.model import NodeInfo
    from nsqha.election.session import View
    from nsqha.election.store import MetadataStore
    from nsqha.server.node.cluster.folder_life import FolderLife
    from nsqha.server.node.cluster.routing import Routing
    from nsqha.server.peers.api import Peers, PeerServer
    from nsqha.server.replica.roles import Replicas
    from nsqha.server.topics.topics import Topics

logger = Logger("cluster")

TICK_SECONDS = LOOK_SECONDS
SHUTS_DOWN = "it shuts down"  # for good


class Membership:
    """The membership of one node."""

    topics: Topics  # these three are set while the node is put together: they need the membership
    replicas: Replicas
    routing: Routing

    def __init__(
        self,
        store: MetadataStore,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        folder: FolderLife,
        node: int,
        cluster_id: int,
        peers: Peers,
        routing_peers: Peers,
        ttl_s: float,
    ) -> None:
        self.store = store
        self.node = node
        self.cluster_id = cluster_id
        self.peers = peers
        self.routing_peers = routing_peers  # connections of their own: clients' traffic delays no replication
        self.on_fatal: Callable[[str], None] = lambda why: None  # this process must end
        self.links = FollowerStreams(loop, peers, pb.PushHello(cluster_id=cluster_id, node_uid=node))
        self.spawn = TaskGroup(loop, log_failure).spawn  # what is begun here is never cancelled
        self.registration = NodeRegistration(self, store, folder, loop=loop, clock=clock, ttl_s=ttl_s)
        self.suspects = Suspects(store.watch, node=node, cluster_id=cluster_id)
        dialler = Dialler(peers, node=node, cluster_id=cluster_id)
        self.reach = Reach(self.registration, self.view, dialler, self.spawn)
        self.leaders = ClusterLeaders(
            store.watch,
            node=node,
            cluster_id=cluster_id,
            peers=routing_peers,
            cut_off=lambda: not (self.registration.has_lease or self._closing),
            spawn=self.spawn,
        )
        self.news = RecordNews(self, store.watch, loop)
        self._unwatch: Callable[[], None] = lambda: None
        self._leaving: set[str] = set()  # why others are to lead
        self._declining: dict[str, str] = {}  # part -> why this node leads only where no other can
        self._closing = False
        self._tick_at: asyncio.TimerHandle | None = None

    def view(self) -> View:
        """All records, as the watch last brought them."""
        return self.store.watch.view()

    def nodes(self) -> Mapping[int, NodeInfo]:
        """The nodes that are alive, as far as is known."""
        return self.store.watch.view().nodes

    # ---- joining

    def serve(self, server: PeerServer) -> None:
        """What other nodes may ask of this one."""
        server.on_stream("Push", self.replicas.service.receive)
        answers = self.replicas.answers
        came = self.reach.controller_came
        server.on_stream("Live", lambda stream: LiveStream(self.suspects, stream, answers, controller_came=came))
        ReachAnswers(self.reach.dialler, self.view).register(server)
        self.leaders.hints.register(server)
        self.replicas.answers.register(server)
        self.routing.serve(server)

    async def recover(self) -> None:
        """Open every log that this node has; none is led yet, and no other node knows of this one."""
        view = self.view()
        for tombstone in view.tombstones.values():
            await self.news.drop(tombstone)
        for topic in view.topics.values():
            self.topics.adopt(topic)
        await some_at_once(map(self.replicas.recover, view.topics.values()), RECOVERED_AT_ONCE)

    async def join(self, info: NodeInfo) -> None:
        """Announce this node and take the roles that the records give it. ConfigError: another process is this node.

        Returns when it has joined, or TRIED_SECONDS after its registration: it goes on to try its connections."""
        self.registration.info = replace(info, joining=JUST_REGISTERED)
        self._tick()
        self._unwatch = self.store.watch.on_change(lambda name: self.registration.call_soon(self.news.named, name))
        await self.registration.register()
        self.news.start()
        self.reach.look()
        with suppress(TimeoutError):
            async with asyncio.timeout(TRIED_SECONDS):
                await self.reach.joined.wait()

    def registered(self, registration: int) -> None:
        """This node is registered, in this life."""
        self.replicas.registered(registration)
        self.links.set_registration(registration)
        self.suspects.registered(registration)

    def lease_lost(self) -> None:
        """Whatever waits for a leader asks other nodes from now on."""
        self.leaders.all_changed()

    def joined_again(self) -> None:
        self.news.named(EVERYTHING)

    def _tick(self) -> None:
        self._tick_at = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        self.suspects.look(self.replicas.service.streams, asyncio.get_running_loop().time())
        self.registration.tick()
        self.reach.look()
        self.replicas.tick()

    # ---- leaving

    async def leave(self, seconds: float) -> None:
        """Say that this node shuts down; hand over what it leads, and wait until no leader waits for its acks any more.

        Returns after `seconds` at the latest, and at once when no other node can take over."""
        replicas = self.replicas
        if not (replicas.leading or replicas.followers) or not self.registration.is_open or len(self.nodes()) < 2:
            return
        self._leaving.add(SHUTS_DOWN)
        try:
            await self.registration.update(leaving=True)
        except NsqhaError as error:
            logger.warning("not_announced", "other nodes could not be informed that this node leaves: %s", error)
            return
        replicas.retire()
        deadline = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < deadline and self._needed():
            await asyncio.sleep(0.01)

    async def unfit(self, why: str, unfit: bool) -> bool:
        """Others are to lead for this reason, or need not for it any more. False: it is not announced, as no other node
        would be left that could lead. Unavailable, OutcomeUnknown."""
        if not self.registration.is_open:
            raise Unavailable("this node is not registered")
        others = [info for uid, info in self.nodes().items() if uid != self.node]
        possible = not unfit or any(not (info.leaving or info.poisoned or info.joining) for info in others)
        reasons = self._leaving = self._leaving | {why} if unfit and possible else self._leaving - {why}
        if SHUTS_DOWN not in reasons:
            await self.registration.update(leaving=bool(reasons), leaving_why="; ".join(sorted(reasons)))
        return possible

    async def decline(self, part: str, why: str) -> None:
        """This node is to lead only where no other can, because of this part of it; no `why`: not for that any more.
        It follows as before, so replicas stay in sync. Unavailable, OutcomeUnknown."""
        if not self.registration.is_open:
            raise Unavailable("this node is not registered")
        self._declining[part] = why
        await self.registration.update(declines="; ".join(filter(None, self._declining.values())))

    def _needed(self) -> bool:
        """Whether there is something that others should take over before this node goes."""
        if any(len(leadership.meta.isr) > 1 for leadership in self.replicas.leading.values()):
            return True
        view = self.view()
        metas = (meta for topic in view.topics.values() for meta in topic.record.partitions.values())
        return any(
            self.node in meta.isr and len(meta.isr) > meta.min_isr and meta.leader in view.nodes
            for meta in metas
            if meta.leader != self.node
        )

    async def close(self) -> None:
        """Leave the cluster; nothing is led or followed any more."""
        self._closing = True
        self.registration.end()
        self.suspects.close()
        self._unwatch()
        if self._tick_at is not None:
            self._tick_at.cancel()
        self.news.stop()
        self.links.close()
        await self.peers.close()
        await self.registration.close()
