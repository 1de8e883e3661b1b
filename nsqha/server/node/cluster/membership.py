"""This node as a member of a cluster: its session in the metadata store, what it hears from there, and its peers.

    watch (store's thread) --hint--> loop --refresh--> Topics.adopt / drop, Replicas.settle
    session: lease, registration, ticks; lost -> another one, and every role is looked at again

What the watch brings is a hint: it says which record to look at. Roles are taken only on a linearizable read. While the
store can not be reached nothing is decided here and everything that runs goes on: publishing needs only the ISR.

A record that is missing removes nothing. Only a tombstone does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from nsqha import ids
from nsqha.election.model import NodeInfo, PartitionMeta, Tombstone, TopicRecord, TopicSettings, Versioned
from nsqha.election.placement import Load, able, min_isr_of, place, replicas_wanted
from nsqha.errors import ConfigError, NsqhaError, Unavailable
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers.identity import Members
from nsqha.server.replica.leading.sender import FollowerStreams
from nsqha.server.routing.hints import Hints
from nsqha.server.routing.leaders import LeaderAt
from nsqha.server.runtime.tasks import Background

if TYPE_CHECKING:
    from nsqha.clock import Clock
    from nsqha.election.session import ClusterSession, View
    from nsqha.election.store import MetadataStore
    from nsqha.server.node.cluster.disk_watch import DiskWatch
    from nsqha.server.node.cluster.routing import Routing
    from nsqha.server.peers.api import Peers, PeerServer, PeerStream
    from nsqha.server.replica.roles import Replicas
    from nsqha.server.topics.topics import Topics

logger = Logger("cluster")

T = TypeVar("T")

WORKERS = 8  # calls to the metadata store at a time
TICK_SECONDS = 0.1
REJOIN_SECONDS = 1.0
DROP_AGAIN_SECONDS = 10.0  # what is left of a deleted topic is tried again


class LiveStream:
    """A controller's stream to this node, whose end is news to both; it is told whom we lost."""

    def __init__(self, cluster: Membership, stream: PeerStream) -> None:
        self._cluster = cluster
        self.stream = stream

    def on_message(self, message: pb.LiveMessage) -> None:
        pass

    def on_closed(self, why: str) -> None:
        self._cluster.live.pop(self, None)


class Membership:
    """The membership of one node."""

    def __init__(
        self,
        store: MetadataStore,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
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
        self.live: dict[LiveStream, None] = {}  # in the order in which they came
        self.links = FollowerStreams(loop, peers, pb.PushHello(cluster_id=cluster_id, node_uid=node))
        self.spawn = Background(loop).spawn  # belongs to nobody who could be cancelled
        self.members = Members(self.view)
        self.hints = Hints(
            self,
            routing_peers,
            epoch_of=self._epoch_of,
            addresses=lambda: {uid: info.grpc_address for uid, info in self.nodes().items()},
            cut_off=lambda: not (self.has_lease or self._closing),
            spawn=self.spawn,
        )
        self.on_fatal: Callable[[str], None] = lambda why: None  # this process must end
        self.topics: Topics  # set by the broker, as they need each other
        self.routing: Routing
        self.replicas: Replicas
        self.disk_watch: DiskWatch
        self._loop = loop
        self._clock = clock
        self._ttl_s = ttl_s
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="metadata")
        self._session: ClusterSession | None = None
        self._life: object = None  # which session counts
        self._registering = False
        self._leaving = False  # for good
        self._info: NodeInfo | None = None
        self._names: dict[str, None] = {}  # records to look at, the first named first
        self._news = asyncio.Event()
        self._unwatch: Callable[[], None] = lambda: None
        self._watchers: list[Callable[[str], None]] = []
        self._lost_to: dict[int, int] = {}  # nodes whose stream to us ended -> the life in which it did
        self._dropping: set[int] = set()  # uids of deleted topics that are being removed here
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._tick_at: asyncio.TimerHandle | None = None

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Carry out a blocking call to the store."""
        return self._loop.run_in_executor(self._pool, call)

    def view(self) -> View:
        """All records, as the watch last brought them."""
        return self.store.view()

    def has_seen_end_of(self, topic: Versioned[TopicRecord]) -> bool:
        """Whether the watch is behind the end of a topic whose record somebody has read."""
        view = self.view()
        now = view.topics.get(topic.record.name)
        return view.revision >= topic.version and (now is None or now.record.uid != topic.record.uid)

    def nodes(self) -> Mapping[int, NodeInfo]:
        """The nodes that are alive, as far as is known."""
        return self.view().nodes

    # ---- who leads (`nsqha.server.routing.leaders.Leaders`)

    def name_of(self, node: int) -> str:
        """What the node's certificate may call it; empty: unknown."""
        return self.members.name_of(node)

    def alive(self, node: int) -> bool:
        """Whether a node is registered, as far as is known."""
        return node in self.nodes() or self.hints.names(node)

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has; 0: it is not known."""
        found = self.view().topics.get(topic)
        return 0 if found is None else len(found.record.partitions)

    def leader(self, topic: str, number: int) -> LeaderAt | None:
        """Who leads a partition; None: nobody at the moment."""
        found = self.view().topics.get(topic)
        meta = None if found is None else found.record.partitions.get(number)
        if found is None or meta is None:
            return None
        return self.hints.leader((found.record.uid, number), meta.epoch) or self.recorded(topic, number)

    def recorded(self, topic: str, number: int) -> LeaderAt | None:
        """Who leads a partition, by the record alone."""
        view = self.view()
        found = view.topics.get(topic)
        meta = None if found is None else found.record.partitions.get(number)
        info = None if meta is None else view.nodes.get(meta.leader)
        if found is None or meta is None or info is None or meta.successor:
            return None
        return LeaderAt(meta.leader, info.grpc_address, info.peer_address, meta.epoch, found.record.uid)

    def not_led(self, topic: str, number: int, *, by: int = 0, hint: LeaderAt | None = None) -> bool:
        """A node takes nothing for a partition: it does not lead, and says perhaps who does, or it is not there."""
        found = self.view().topics.get(topic)
        return found is not None and self.hints.not_led(topic, (found.record.uid, number), by, hint)

    def _epoch_of(self, topic: str, key: tuple[int, int]) -> int | None:
        found = self.view().topics.get(topic)
        meta = None if found is None or found.record.uid != key[0] else found.record.partitions.get(key[1])
        return None if meta is None else meta.epoch

    def when_changed(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call with the name of each topic whose leaders may have changed; the result ends it."""
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback)

    def changed(self, topic: str) -> None:
        """Tell everybody who wants to know who leads."""
        for callback in list(self._watchers):
            try:
                callback(topic)
            except Exception as error:
                # The others have to know, and the record is still to be followed.
                logger.error("change_not_told", "topic %s", topic, error=error)

    # ---- placement of what is made here

    def placed(
        self, settings: TopicSettings, log_uids: Mapping[int, int], *, alone: bool = False, first: int = 0
    ) -> dict[int, PartitionMeta]:
        """New partitions from `first` on: those in `log_uids` led by this node, others by whom the controller elects.

        `alone`: an #ephemeral topic, which nobody else has a copy of."""
        nodes = {} if alone else able(self.nodes())
        if self._info is None or not self.replicas.registration:
            raise Unavailable("this node is only just joining the cluster")
        if log_uids:
            nodes.setdefault(self.node, self._info)
        load = Load.of(m.replicas for t in self.view().topics.values() for m in t.record.partitions.values())
        wanted = replicas_wanted(settings, nodes)
        mine = place(sorted(log_uids), wanted, nodes, load, prefer=self.node)
        others = place([n for n in range(first, settings.partitions) if n not in log_uids], wanted, nodes, load)
        metas = {}
        for number, replicas in {**mine, **others}.items():
            meta = PartitionMeta(replicas=replicas, min_isr=min_isr_of(settings, len(replicas)))
            if number in log_uids:
                isr = {self.node: log_uids[number]}
                life = self.replicas.registration
                meta = replace(meta, leader=self.node, isr=isr, registration=life, nothing_acked=True)
            metas[number] = meta
        return metas

    # ---- joining

    def serve(self, server: PeerServer) -> None:
        """What other nodes may ask of this one."""
        server.on_stream("Push", self.replicas.service.receive)
        server.on_stream("Live", self._accept_live)
        self.hints.register(server)
        self.replicas.answers.register(server)
        self.routing.serve(server)

    def _accept_live(self, stream: PeerStream) -> LiveStream:
        live = LiveStream(self, stream)
        self.live[live] = None
        self._tell(live)
        return live

    def _tell(self, live: LiveStream) -> None:
        live.stream.send(
            pb.LiveMessage(
                cluster_id=self.cluster_id,
                node_uid=self.node,
                registration=self.replicas.registration,
                suspects=sorted(self._lost_to),
            )
        )

    def stream_lost(self, node: int) -> None:
        """A leader's stream to us ended: perhaps it is gone. The controller looks."""
        if not self._closing and node:
            info = self.nodes().get(node)
            self._lost_to[node] = info.registration if info is not None else 0
            for live in self.live:
                self._tell(live)

    def stream_found(self, node: int) -> None:
        """It is there."""
        if node in self._lost_to:
            del self._lost_to[node]
            for live in self.live:
                self._tell(live)

    def _forgive(self, view: View) -> None:
        """A node that is back, or gone for good, is blamed no more: in another life it may never push to us."""
        for node, registration in list(self._lost_to.items()):
            info = view.nodes.get(node)
            if info is None or info.registration != registration:
                self.stream_found(node)

    async def recover(self) -> None:
        """Open every log that this node has; nobody is led yet and nobody knows of us."""
        view = self.view()
        for tombstone in view.tombstones.values():
            await self._drop(tombstone)
        for topic in view.topics.values():
            self.topics.adopt(topic)
            await self.replicas.recover(topic)

    async def join(self, info: NodeInfo) -> None:
        """Announce this node and take the roles that the records give it. ConfigError: another process is this node."""
        self._info = info
        self._tick()
        self._unwatch = self.store.watch(self._hint)
        await self._register()
        self._names[""] = None
        self._news.set()
        self._tasks.append(self._loop.create_task(self._follow_records()))

    async def _register(self) -> None:
        assert self._info is not None
        life = self._life = object()
        lost = lambda: self._call_soon(self._session_lost, life)  # noqa: E731
        self._registering = True
        try:
            session = self._session = await self.run(lambda: self.store.open_session(ttl_s=self._ttl_s, lost=lost))
            info = self._info
            try:
                self._info = await self.run(lambda: session.register(info))
                if self._session is not session:
                    raise Unavailable("the lease ended while this node registered")
            except BaseException:
                self._session = self._life = None  # what an abandoned session says later concerns nobody
                await self.run(session.close)
                raise
        finally:
            self._registering = False
        self.replicas.registered(self._info.registration)
        self.links.set_registration(self._info.registration)
        for live in self.live:
            self._tell(live)
        logger.info("registered", "node %016x (%s), life %d", self.node, info.name, self._info.registration)

    def _session_lost(self, life: object) -> None:
        """The lease is gone."""
        if not self._closing and life is self._life:
            logger.warning("lease_lost", "the others may take this node for dead; joining again")
            self._session = None
            for topic in self.view().topics:
                self.changed(topic)  # whoever waits for a leader asks other nodes from now on
            if not self._registering:  # else that fails, and is tried again
                self.spawn(self._rejoin())

    async def _rejoin(self) -> None:
        while not self._closing:
            try:
                await self._register()
            except ConfigError as error:
                self.on_fatal(str(error))
                return
            except Exception as error:
                logger.info("join_delayed", "%s: %s", type(error).__name__, error)
                await asyncio.sleep(REJOIN_SECONDS)
            else:
                self._names[""] = None
                self._news.set()
                return

    @property
    def has_lease(self) -> bool:
        """Whether the others count on this node being there."""
        return self._session is not None and self._session.fresh(self._clock.monotonic())

    async def update(self, **changes: Any) -> None:
        """Change what this node says of itself."""
        if self._session is not None and self._info is not None:
            session, info = self._session, replace(self._info, **changes)
            self._info = await self.run(lambda: session.update(info))

    def _tick(self) -> None:
        self._tick_at = self._loop.call_later(TICK_SECONDS, self._tick)
        if self._session is not None:
            self._session.ticked()
        self.replicas.tick()

    # ---- news

    def _hint(self, name: str) -> None:
        """On the store's thread: a record changed."""
        self._call_soon(self._hinted, name)

    def _call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            pass  # the loop is closed: the process ends

    def _hinted(self, name: str) -> None:
        self._names[name] = None
        self._news.set()

    async def _follow_records(self) -> None:
        while not self._closing:
            await self._news.wait()
            self._news.clear()
            names, self._names = self._names, {}
            try:
                self._look_at(names)
            except Exception as error:
                # Whatever it was: a node that does not follow the records any more takes no role ever again.
                if isinstance(error, NsqhaError):
                    logger.warning("records_delayed", "%s", error)
                else:
                    logger.error("records_failed", "trying again", error=error)
                self._names |= names
                self._loop.call_later(REJOIN_SECONDS, self._news.set)

    def _look_at(self, names: Collection[str]) -> None:
        """Have everything done that follows from these records; waits for none of it."""
        view = self.view()
        self.hints.prune()
        everything = "" in names
        if everything or any(name.startswith("nodes/") for name in names):
            self.members.view()
            self._forgive(view)
            self.replicas.nodes_changed()
            for topic_name in view.topics:
                self.changed(topic_name)
        for uid, tombstone in view.tombstones.items():
            if everything or f"tombstones/{uid:016x}" in names or f"topics/{tombstone.name}" in names:
                self.spawn(self._drop(tombstone))
        named = [name.removeprefix("topics/") for name in names if name.startswith("topics/")]
        for name in list(view.topics) if everything else named:
            topic = view.topics.get(name)
            if topic is not None:
                self.topics.adopt(topic)
                # Roles are taken side by side: one partition that waits for its disk delays no other.
                self.spawn(self.replicas.settle(topic))
            elif ids.is_ephemeral(name):
                self._vanished(name)
            self.changed(name)
        if everything:
            for name in [name for name in self.topics if ids.is_ephemeral(name) and name not in view.topics]:
                self._vanished(name)

    def _vanished(self, name: str) -> None:
        """The record of an #ephemeral topic went with the node that made it. A change of it may be under way that waits
        for that node: nobody's role waits for that."""
        topic = self.topics.get(name)
        if topic is not None:
            self.spawn(self.topics.vanished(topic))

    async def _drop(self, tombstone: Tombstone) -> None:
        """Remove what is left of a deleted topic. What can not go now goes later, and keeps no other from its role."""
        if tombstone.uid in self._dropping:
            return
        self._dropping.add(tombstone.uid)
        try:
            await self.topics.dropped(tombstone)
        except Exception as error:
            text = "of the deleted topic %s; trying again: %s: %s"
            logger.warning("files_remain", text, tombstone.name, type(error).__name__, error)
            self._loop.call_later(DROP_AGAIN_SECONDS, self._hinted, f"tombstones/{tombstone.uid:016x}")
        finally:
            self._dropping.discard(tombstone.uid)

    # ---- leaving

    async def leave(self, seconds: float) -> None:
        """Say that this node shuts down; hand over what it leads, and wait for nobody to wait for its acks any more.

        Returns after `seconds` at the latest, and at once when nobody can take over."""
        replicas = self.replicas
        if not (replicas.leading or replicas.followers) or self._session is None or len(self.nodes()) < 2:
            return
        self._leaving = True
        try:
            await self.update(leaving=True)
        except NsqhaError as error:
            logger.warning("not_announced", "the cluster could not be told that this node leaves: %s", error)
            return
        replicas.retire()
        deadline = self._loop.time() + seconds
        while self._loop.time() < deadline and self._needed():
            await asyncio.sleep(0.01)

    async def disk_hangs(self, hangs: bool) -> None:
        """Others are to lead, or need not any more. Unavailable, OutcomeUnknown."""
        if self._session is None:
            raise Unavailable("this node is not registered")
        if not self._leaving:
            await self.update(leaving=hangs)

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
        self._unwatch()
        if self._tick_at is not None:
            self._tick_at.cancel()
        for task in self._tasks:
            task.cancel()
        self.links.close()
        await self.peers.close()
        session = self._session
        if session is not None:
            await self.run(session.close)
        await self.run(self.store.close)
        self._pool.shutdown(wait=False)
