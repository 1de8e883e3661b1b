"""A node whose metadata are in doubt at its start: it recovers its logs, reports what it has, waits for an operator.

    in doubt --recover, serve Evidence, announce--> held --accepted names this node--> an ordinary start

Nothing is led, followed or served to clients; only the gRPC port answers, only with evidence, and only to peers that
may query a running node (`nsqha.server.peers.identity`), as far as any record known here identifies them. It ends when

- `accepted` of a later generation names this node: the journal follows it, durably, before anything else;
- the doubt was not about an older state: the right etcd answers again, or only a hold was in place and is removed.

A node that is killed anywhere here has the same doubt at its next start.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nsqha.cluster_secret import read_secret
from nsqha.election.etcd.access import etcd_options, stored_topics
from nsqha.election.etcd.metadata_restore import EtcdAcceptance, EtcdSnapshot
from nsqha.election.metadata_restore import WaitingNode
from nsqha.election.model import NodeInfo, foreign_folder
from nsqha.election.session import View
from nsqha.errors import ConfigError, NsqhaError, Unavailable
from nsqha.nsqlog import Logger
from nsqha.options import Options
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers.api import PeerIdentity
from nsqha.server.safe_mode import inventory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nsqha.clock import Clock
    from nsqha.commitlog.journal import NodeJournal
    from nsqha.election.model import TopicRecord, Versioned
    from nsqha.server.opening.opener import PartitionOpener
    from nsqha.server.runtime.certificates import CertificateFiles
    from nsqha.server.runtime.disk import DiskRounds

POLL_SECONDS = 0.5

logger = Logger("safe_mode")


@dataclass
class SafeMode:
    """What a node in safe mode works with."""

    options: Options
    journal: NodeJournal
    clock: Clock
    disk: DiskRounds
    opener: PartitionOpener
    stop: asyncio.Event  # set: the process shall end
    certificates: CertificateFiles | None = None  # of the gRPC port, read again during the wait


async def until_accepted(safe_mode: SafeMode, why: str) -> bool:
    """Wait until the node may start; False: the process shall end instead.

    ConfigError: etcd has another cluster under this cluster's name."""
    options, journal = safe_mode.options, safe_mode.journal
    loop = asyncio.get_running_loop()
    acceptance = open_acceptance(options, safe_mode.clock)
    logger.error(
        "metadata_in_doubt",
        "%s: nothing is led or followed until nsqha cluster accept-metadata is run on any host",
        why,
    )
    server: _InventoryServer | None = None
    said = ""
    try:
        while True:
            try:
                look = await loop.run_in_executor(None, acceptance.look)
                if may_start(look, journal):
                    break
                if server is None:
                    server = await _InventoryServer.start(safe_mode)
                node = waiting_node(options, journal, server.address, held=True, why=why)
                await loop.run_in_executor(None, acceptance.announce, node)
                said = ""
            except NsqhaError as error:
                if isinstance(error, ConfigError):
                    raise
                if str(error) != said:
                    logger.warning("not_announced", "etcd does not answer; trying again: %s", error)
                    said = str(error)
            try:
                await asyncio.wait_for(safe_mode.stop.wait(), POLL_SECONDS)
            except TimeoutError:
                continue
            return False
        await safe_mode.disk.run(lambda: follow(journal, look, options.data_path))
        logger.info("metadata_believed", "starting with the current metadata, generation %d",
                 journal.identity.generation)  # fmt: skip
        return True
    finally:
        if server is not None:
            await server.close()
        await loop.run_in_executor(None, acceptance.close)


def may_start(look: EtcdSnapshot, journal: NodeJournal) -> bool:
    """Whether this node may trust the metadata in etcd. ConfigError: they are another cluster's."""
    mine = journal.identity
    if look.cluster_id not in (0, mine.cluster_id) and mine.cluster_id:
        theirs = f"etcd has cluster {look.cluster_id:016x} under this name, "
        raise ConfigError(theirs + foreign_folder(mine.cluster_id, has_joined=bool(mine.etcd_cluster_id)))
    if look.hold is not None or not look.cluster_id:
        return False
    if accepts(look, journal):
        return True
    return not doubt_about(look, journal)


def accepts(look: EtcdSnapshot, journal: NodeJournal) -> bool:
    """Whether an operator accepted metadata for this node that are newer than what it last followed."""
    accepted, mine = look.accepted.record, journal.identity
    return accepted.generation > mine.generation and mine.node_uid in accepted.nodes


def doubt_about(look: EtcdSnapshot, journal: NodeJournal) -> str:
    """Why the journal contradicts this etcd; empty: it does not."""
    mine = journal.identity
    if mine.etcd_cluster_id not in (0, look.etcd_cluster_id):
        return f"etcd is cluster {look.etcd_cluster_id:016x}, this node belongs to {mine.etcd_cluster_id:016x}"
    if mine.in_doubt or look.revision < mine.revision_seen:
        return f"etcd was put back to an older state; this node has seen revision {mine.revision_seen}"
    return ""


def broken_promise(journal: NodeJournal, topics: Mapping[str, Versioned[TopicRecord]]) -> str:
    """Why metadata with these epochs must be older than what this node has seen; empty: no promise shows it.

    A node promises only epochs that it has read. A revision that went back is hidden once other nodes have made enough
    changes since; a promise above the epoch is not."""
    for name, topic in topics.items():
        for number, meta in topic.record.partitions.items():
            known = journal.record((topic.record.uid, number))
            if known is not None and known.promise_trusted and known.promise > meta.epoch:
                return (
                    f"this node has promised epoch {known.promise} of {name}/{number}, and the metadata are at "
                    f"{meta.epoch}: etcd was put back to an older state"
                )
    return ""


def warn_of_unknown(data_path: str, view: View) -> None:
    """Log which topics have logs here although the metadata neither have nor deleted them. The logs stay."""
    known = {topic.record.uid for topic in view.topics.values()} | set(view.tombstones)
    for name, uid, numbers in inventory.folders(data_path):
        if uid not in known:
            logger.warning(
                "logs_unknown",
                "topic %s with uid %016x is not in the metadata; its %d partitions on this node stay",
                name,
                uid,
                len(numbers),
            )


def remember_doubt(journal: NodeJournal) -> None:
    """Write the doubt to the journal: this etcd may look newer at the next start. A foreign one is noticed anyway."""
    journal.node.doubt_metadata()
    journal.commit()


def follow(journal: NodeJournal, look: EtcdSnapshot, data_path: str) -> None:
    """Write to the journal that this node has seen and follows these metadata. Runs on the disk thread."""
    stage_followed(journal, look)
    journal.commit()
    inventory.forget_seen(data_path)


def stage_followed(journal: NodeJournal, look: EtcdSnapshot) -> None:
    """The journal is to say that this node has seen and follows these metadata."""
    generation = look.accepted.record.generation if accepts(look, journal) else journal.identity.generation
    journal.node.accept_metadata(
        cluster_id=look.cluster_id,
        etcd_cluster_id=look.etcd_cluster_id,
        revision_seen=look.revision,
        generation=generation,
    )


def open_acceptance(options: Options, clock: Clock) -> EtcdAcceptance:
    """Create the access to etcd's records of the acceptance; nothing is sent yet."""
    return EtcdAcceptance(
        etcd_options(options), options.cluster_name, clock, lambda text: logger.warning("etcd", "%s", text)
    )


def waiting_node(options: Options, journal: NodeJournal, grpc_address: str, *, held: bool, why: str) -> WaitingNode:
    """What this node announces, so that the operator's accept-metadata finds it."""
    mine = journal.identity
    host, _, port = grpc_address.rpartition(":")
    if host in ("0.0.0.0", "[::]", ""):
        host = options.broadcast_address
    return WaitingNode(
        mine.node_uid,
        name=options.node_name or f"{mine.node_uid:016x}",
        grpc_address=f"{host}:{port}",
        cluster_id=mine.cluster_id,
        generation=mine.generation,
        held=held,
        why=why,
    )


class _InventoryServer:
    """The gRPC port of a node in safe mode."""

    def __init__(self, server: Any, peers: Any, address: str) -> None:
        self._server = server
        self._peers = peers
        self.address = address

    @classmethod
    async def start(cls, safe_mode: SafeMode) -> _InventoryServer:
        """Recover every log, then listen. Unavailable: the port cannot be opened, or etcd cannot be read."""
        options, journal = safe_mode.options, safe_mode.journal
        stored = await asyncio.get_running_loop().run_in_executor(None, stored_topics, options, safe_mode.clock)
        seen = await safe_mode.disk.run(lambda: inventory.read_seen(options.data_path))
        held = await safe_mode.disk.run(
            lambda: inventory.RecoveredInventory.recovered(options.data_path, safe_mode.opener, journal, seen, stored)
        )
        mine = journal.identity
        status = pb.StatusReply(node_uid=mine.node_uid, poisoned=journal.node.poisoned, replicas=held.replicas)
        answer = inventory.reply(
            status,
            options.node_name,
            held=True,
            generation=mine.generation,
            view_revision=seen.revision,
            topics=(*seen.topics, *held.topics),
        )

        records = [*(topic.record for topic in stored.values()), *(topic.record for topic in seen.topics)]
        found = await cls.serve(options, answer, mine.cluster_id, members(records), safe_mode.certificates)
        logger.info("held", "%d logs are recovered; evidence is served on %s", len(held.replicas), found.address)
        return found

    @classmethod
    async def serve(
        cls,
        options: Options,
        answer: pb.EvidenceReply,
        cluster_id: int,
        nodes: View,
        certificates: CertificateFiles | None,
    ) -> _InventoryServer:
        """Answer members of `nodes` and lookup daemons. Unavailable: the port cannot be opened."""
        from grpc import aio

        from nsqha.server.peers import calls as peer_grpc
        from nsqha.server.peers import renewing
        from nsqha.server.peers.identity import MembersOnly

        async def answered(peer: PeerIdentity, request: pb.EvidenceRequest) -> pb.EvidenceReply:
            check_cluster(request, cluster_id)
            return answer

        peers = peer_grpc.peer_server(options)
        MembersOnly(peers, lambda: nodes).on_call("Evidence", answered)
        gates = peer_grpc.gates(read_secret(options.cluster_secret_file))
        server = aio.server(interceptors=gates, options=peer_grpc.server_options())
        peers.add_to(server)
        return cls(server, peers, await renewing.listen(server, options.grpc_address, certificates))

    async def close(self) -> None:
        self._peers.close()
        await self._server.stop(grace=0.5)


def members(records: Iterable[TopicRecord]) -> View:
    """The nodes of the cluster that records name: registrations are in the etcd that is in doubt."""
    metas = (meta for record in records for meta in record.partitions.values())
    return View(nodes={uid: NodeInfo(uid) for meta in metas for uid in (*meta.replicas, *meta.isr)})


def check_cluster(request: pb.EvidenceRequest, cluster_id: int) -> None:
    if cluster_id not in (0, request.cluster_id):  # 0: a new node, which has nothing
        raise Unavailable(f"this node does not belong to cluster {request.cluster_id:016x}")
