"""A running node whose metadata are in doubt: it continues what needs no decision, and announces the doubt.

    etcd foreign or older --> recorded on disk, announced under `waiting/`; publishing with a full ISR continues
    `hold` appears        --> the node stops and starts again in safe mode (`hold`), in the same process

The second also without a doubt: an acceptance is decided on a state that no node can change meanwhile. The process
continues; its clients are closed and connect again when the metadata are accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsqha.errors import NsqhaError
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.safe_mode import inventory
from nsqha.server.safe_mode.hold import accepts, check_cluster, open_acceptance, waiting_node

if TYPE_CHECKING:
    from nsqha.clock import Clock
    from nsqha.commitlog.journal import NodeJournal
    from nsqha.election.etcd.metadata_restore import EtcdAcceptance
    from nsqha.election.etcd.store import EtcdStore
    from nsqha.options import Options
    from nsqha.server.peers.api import PeerIdentity, PeerServer
    from nsqha.server.runtime.disk import DiskRounds
    from nsqha.server.runtime.journal import JournalWriter

POLL_SECONDS = 1.0

logger = Logger("safe_mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningNode:
    """The parts of the node that the monitor uses."""

    options: Options
    clock: Clock
    disk: DiskRounds
    journal: NodeJournal
    journal_writer: JournalWriter
    grpc_address: Callable[[], str]  # empty until the node listens there


class StaleMetadataMonitor:
    """Decides for one running node whether its metadata are in doubt (`why`)."""

    def __init__(
        self,
        node: RunningNode,
        store: EtcdStore,
        begin_again: Callable[[], None],
        *,
        cluster_id: int,
        status: Callable[[PeerIdentity, pb.StatusRequest], Awaitable[pb.StatusReply]],
    ) -> None:
        """`status` answers with the state of the node's replicas."""
        self.why = ""  # empty: the metadata are trusted
        self._node = node
        self._store = store
        self._cluster_id = cluster_id
        self._status = status
        self._begin_again = begin_again
        self._hinted = True  # an operator may have decided something
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._unwatch: Callable[[], None] = lambda: None

    def serve(self, server: PeerServer) -> None:
        """Answer Evidence calls on `server`."""
        server.on_call("Evidence", self._evidence)

    async def run(self) -> None:
        """Watch the metadata until the node has to start again."""
        loop = asyncio.get_running_loop()
        acceptance = open_acceptance(self._node.options, self._node.clock)
        self._unwatch = self._store.watch.on_change(lambda name: self._hint(loop, name))
        self._poll(loop)
        try:
            while True:
                self._due.clear()
                try:
                    if await self._looked(loop, acceptance):
                        logger.warning("begins_again", "an operator decides on the metadata: this node waits for it")
                        self._begin_again()
                        return
                except (NsqhaError, OSError) as error:
                    logger.info("doubt_delayed", "%s", error)
                    await asyncio.sleep(POLL_SECONDS)
                    self._hinted = True  # the hint is not handled yet
                    continue
                await self._due.wait()
        finally:
            self._unwatch()
            if self._timer is not None:
                self._timer.cancel()
            await loop.run_in_executor(None, acceptance.close)

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        """Once a second: a task that looks itself costs a node without a doubt five times as much."""
        self._timer = loop.call_later(POLL_SECONDS, self._poll, loop)
        if self._store.doubt or self.why:
            self._due.set()

    async def _looked(self, loop: asyncio.AbstractEventLoop, acceptance: EtcdAcceptance) -> bool:
        """Check the metadata, if there is a reason; returns whether the node has to start again."""
        if self._store.doubt and not self.why:
            await self._begin()
        if not self.why and not self._hinted:
            return False
        self._hinted = False
        look = await loop.run_in_executor(None, acceptance.look)
        journal = self._node.journal
        if look.hold is not None or (self.why and accepts(look, journal)):
            return True
        if self.why:
            options, address = self._node.options, self._node.grpc_address()
            waiting = waiting_node(options, journal, address, held=False, why=self.why)
            await loop.run_in_executor(None, acceptance.announce, waiting)
        return False

    def _hint(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        """Wake `run`; called on the store's thread."""
        if name in ("", "hold"):
            try:
                loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                pass  # the loop is closed: the process ends

    def _wake(self) -> None:
        self._hinted = True
        self._due.set()

    async def _begin(self) -> None:
        """Record the doubt, so that it also holds at the next start of this node."""
        node = self._node
        seen = inventory.seen_of(self._store.watch.view())
        await node.disk.run(lambda: inventory.write_seen(node.options.data_path, seen))
        identity = self._store.identity()
        node.journal.node.stage_revision(identity.revision)
        if not self._store.foreign:  # a foreign etcd is noticed at any start; this one may look newer by then
            node.journal.node.doubt_metadata()
        await node.journal_writer.promise()
        self.why = self._store.doubt
        logger.error(
            "metadata_in_doubt",
            "%s: no leader or replica is changed here until nsqha cluster accept-metadata is run on any host; "
            "publishing needs the other replicas in sync",
            self.why,
        )

    async def _evidence(self, peer: PeerIdentity, request: pb.EvidenceRequest) -> pb.EvidenceReply:
        check_cluster(request, self._cluster_id)
        status = await self._status(peer, pb.StatusRequest(cluster_id=request.cluster_id))
        # A node without doubt has seen nothing that the metadata do not contain.
        seen = inventory.seen_of(self._store.watch.view()) if self.why else inventory.Seen()
        return inventory.reply(
            status,
            self._node.options.node_name,
            held=False,
            generation=self._node.journal.identity.generation,
            view_revision=seen.revision,
            topics=seen.topics,
        )
