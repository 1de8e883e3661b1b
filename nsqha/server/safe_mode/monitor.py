"""A node that runs and finds its metadata in doubt: it goes on with what needs no decision, and says so.

    etcd foreign or older --> remembered on disk, announced under `waiting/`; publishing under a full ISR goes on
    `hold` is put          --> this life of the node ends here; it starts again as a held one (`hold`)

The second also where nothing is in doubt: an acceptance is decided on what no node can change meanwhile. The process
goes on, its clients are closed and connect again when the metadata are accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

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

logger = Logger("doubt")


class RunningNode(Protocol):
    """The node whose metadata are watched, as far as the watch needs it."""

    options: Options
    clock: Clock
    disk: DiskRounds
    journal: NodeJournal
    journal_writer: JournalWriter
    grpc_address: str  # empty until the node listens there


class StaleMetadataMonitor:
    """Of one running node. Owner of whether it believes its metadata."""

    def __init__(
        self,
        node: RunningNode,
        store: EtcdStore,
        begin_again: Callable[[], None],
        *,
        cluster_id: int,
        status: Callable[[PeerIdentity, pb.StatusRequest], Awaitable[pb.StatusReply]],
    ) -> None:
        """`status`: what the node tells of its replicas."""
        self.why = ""  # empty: the metadata are believed
        self._node = node
        self._store = store
        self._cluster_id = cluster_id
        self._status = status
        self._begin_again = begin_again
        self._look = asyncio.Event()
        self._unwatch: Callable[[], None] = lambda: None

    def serve(self, server: PeerServer) -> None:
        """Be asked what this node has."""
        server.on_call("Evidence", self._evidence)

    async def run(self) -> None:
        """Until the node has to begin again."""
        loop = asyncio.get_running_loop()
        acceptance = open_acceptance(self._node.options, self._node.clock)
        self._unwatch = self._store.watch(lambda name: self._hint(loop, name))
        self._look.set()
        try:
            while True:
                try:
                    if await self._looked(loop, acceptance):
                        logger.warning("begins_again", "an operator decides on the metadata: this node waits for that")
                        self._begin_again()
                        return
                except (NsqhaError, OSError) as error:
                    logger.info("doubt_delayed", "%s", error)
                    await asyncio.sleep(POLL_SECONDS)
                    self._look.set()  # what was hinted at was not seen
                    continue
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._look.wait(), POLL_SECONDS)
        finally:
            self._unwatch()
            await loop.run_in_executor(None, acceptance.close)

    async def _looked(self, loop: asyncio.AbstractEventLoop, acceptance: EtcdAcceptance) -> bool:
        """Look after the metadata, if there is a reason; whether this life of the node is to end."""
        if self._store.doubt and not self.why:
            await self._begin()
        if not self.why and not self._look.is_set():
            return False
        self._look.clear()
        look = await loop.run_in_executor(None, acceptance.look)
        journal = self._node.journal
        if look.hold is not None or (self.why and accepts(look, journal)):
            return True
        if self.why:
            options, address = self._node.options, self._node.grpc_address
            waiting = waiting_node(options, journal, address, held=False, why=self.why)
            await loop.run_in_executor(None, acceptance.announce, waiting)
        return False

    def _hint(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        """On the store's thread."""
        if name in ("", "hold"):
            try:
                loop.call_soon_threadsafe(self._look.set)
            except RuntimeError:
                pass  # the loop is closed: the process ends

    async def _begin(self) -> None:
        """The metadata are doubted from now on, also by the next life of this node."""
        node = self._node
        seen = inventory.seen_of(self._store.view())
        await node.disk.run(lambda: inventory.write_seen(node.options.data_path, seen))
        identity = self._store.identity()
        node.journal.stage_revision(identity.revision)
        if not self._store.foreign:  # another etcd is another one also tomorrow; this one may look newer by then
            node.journal.doubt_metadata()
        await node.journal_writer.promise()
        self.why = self._store.doubt
        logger.error(
            "metadata_in_doubt",
            "%s: no leader and no replica is changed here until then; publishing needs the others in sync",
            self.why,
        )

    async def _evidence(self, peer: PeerIdentity, request: pb.EvidenceRequest) -> pb.EvidenceReply:
        check_cluster(request, self._cluster_id)
        status = await self._status(peer, pb.StatusRequest(cluster_id=request.cluster_id))
        # What a node that believes knows is what the metadata say.
        seen = inventory.seen_of(self._store.view()) if self.why else inventory.Seen()
        return inventory.reply(
            status,
            self._node.options.node_name,
            held=False,
            generation=self._node.journal.identity.generation,
            view_revision=seen.revision,
            topics=seen.topics,
        )
