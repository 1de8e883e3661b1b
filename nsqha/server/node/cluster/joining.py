"""What a node needs before it can be one of a cluster: the metadata in etcd, other nodes, and what it says of itself.

Imported only by nodes that have an etcd endpoint: etcd and gRPC take time to import.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from nsqha import NSQ_VERSION, __version__
from nsqha.cluster_secret import read_secret
from nsqha.election.etcd.access import look_at, open_store
from nsqha.election.model import PEER_LEVEL, PEER_LEVEL_OLDEST, NodeInfo, unlike_levels
from nsqha.election.session import StoreIdentity
from nsqha.errors import ConfigError, NsqhaError, StaleMetadata
from nsqha.nsqlog import Logger
from nsqha.options import Options
from nsqha.server.node.cluster.folder_life import FolderLife
from nsqha.server.node.cluster.membership import Membership
from nsqha.server.opening.page_cache import folder_name
from nsqha.server.peers import renewing
from nsqha.server.peers.calls import SERVICES
from nsqha.server.safe_mode import hold as held
from nsqha.server.safe_mode import inventory

if TYPE_CHECKING:
    from nsqha.clock import Clock
    from nsqha.commitlog.journal import NodeJournal
    from nsqha.server.runtime.certificates import CertificateFiles

logger = Logger("cluster")


async def open_cluster(
    options: Options, journal: NodeJournal, clock: Clock, rng: random.Random, certificates: CertificateFiles | None
) -> Membership:
    """The cluster that this node's journal names, or that its etcd has. Unavailable, ConfigError, StaleMetadata.

    Nothing is written into journal, folder and etcd before the last check has passed, so that a start that is refused
    changes nothing for the next one, or for the node whose folder was copied. Only a doubt is remembered, and a cluster
    that is not there yet begins."""
    loop = asyncio.get_running_loop()
    secret = read_secret(options.cluster_secret_file)
    generation = await loop.run_in_executor(None, lambda: _generation(options, journal, clock))
    mine = journal.identity
    store = await loop.run_in_executor(
        None,
        lambda: open_store(
            options,
            clock,
            rng,
            cluster_id=mine.cluster_id,
            seen=StoreIdentity(mine.etcd_cluster_id, mine.revision_seen),
            trouble=lambda text: logger.warning("etcd", "%s", text),
            new_cluster=options.new_cluster,
        ),
    )
    cluster = store.records.cluster().record
    if why := held.broken_promise(journal, store.watch.view().topics):
        await loop.run_in_executor(None, store.close)
        held.remember_doubt(journal)
        raise StaleMetadata(why)
    if why := unlike_nodes(store.watch.view().nodes, mine.node_uid):
        await loop.run_in_executor(None, store.close)
        raise ConfigError(why)
    identity = store.identity()
    folder = FolderLife(journal, store.folders)
    starting = replace(_named(options, mine.node_uid), folder=folder_name(options.data_path))
    ttl_s = options.lease_ttl_ns / 1e9
    try:
        journal.node.join(cluster.cluster_id, etcd_cluster_id=identity.etcd_cluster_id)
        journal.node.stage_revision(identity.revision)
        journal.node.follow_generation(generation)
        claim = await loop.run_in_executor(None, lambda: store.sessions.claim(starting, ttl_s=ttl_s))
        folder.registered = claim.release  # from then on the registration keeps others out
        await loop.run_in_executor(None, folder.begin)
    except NsqhaError:
        await loop.run_in_executor(None, store.close)
        raise
    await loop.run_in_executor(None, inventory.forget_seen, options.data_path)
    await loop.run_in_executor(None, held.warn_of_unknown, options.data_path, store.watch.view())
    return Membership(
        store,
        loop=loop,
        clock=clock,
        folder=folder,
        node=mine.node_uid,
        cluster_id=cluster.cluster_id,
        peers=renewing.peers(SERVICES, certificates, secret),
        routing_peers=renewing.peers(SERVICES, certificates, secret),
        ttl_s=ttl_s,
    )


def _generation(options: Options, journal: NodeJournal, clock: Clock) -> int:
    """The generation of the acceptance that this node may follow, in the staged journal. StaleMetadata: it may not
    start with these metadata."""
    look = look_at(options, clock)
    if held.may_start(look, journal):
        if held.accepts(look, journal):
            held.stage_followed(journal, look)
    elif why := held.doubt_about(look, journal) or look.why_not:
        ours = look.etcd_cluster_id == journal.identity.etcd_cluster_id
        if ours and held.doubt_about(look, journal):
            held.remember_doubt(journal)
        raise StaleMetadata(why)
    # Else there is no such cluster: the store begins it, or says why not.
    return look.accepted.record.generation


def node_info(
    options: Options, node_uid: int, boot_id: str, *, tcp: int, http: int, grpc: str, peer: str, segments: str
) -> NodeInfo:
    """What this node says of itself; `tcp` and `http` are ports, `grpc`, `peer` and `segments` addresses."""
    name = options.broadcast_address
    http = options.broadcast_http_port or http
    return replace(
        _named(options, node_uid, tcp),
        folder=folder_name(options.data_path),
        zone=options.topology_zone,
        region=options.topology_region,
        http_address=f"{name}:{http}",
        grpc_address=_reachable(grpc, name),
        peer_address=_reachable(peer, name),
        segments_address=_reachable(segments, name),
        boot_id=boot_id,
        version=NSQ_VERSION,
        build=__version__,
        peer_level=PEER_LEVEL,
        peer_level_oldest=PEER_LEVEL_OLDEST,
    )


def _named(options: Options, node_uid: int, tcp: int = 0) -> NodeInfo:
    """Who a node is, before it serves; `tcp`: the port where it listens for clients, if that is known already."""
    name, port = options.broadcast_address, options.broadcast_tcp_port or tcp
    address = f"{name}:{port or options.tcp_address.rpartition(':')[2]}"
    return NodeInfo(
        node_uid,
        name=options.node_name or address,
        host=options.host,
        hostname=socket.gethostname(),
        broadcast_address=name,
        tcp_address=address,
    )


def unlike_nodes(nodes: Mapping[int, NodeInfo], mine: int) -> str:
    """Why this build cannot join these nodes: one that the others cannot speak to would only hold up publishes."""
    for uid, node in nodes.items():
        why = unlike_levels(node.peer_level_oldest, node.peer_level, node.build or "of an unknown version")
        if why and uid != mine:
            return f"node {node.name or f'{uid:016x}'} of the cluster: {why}"
    return ""


def unreachable_addresses(info: NodeInfo) -> list[str]:
    """The addresses of a node that only its own host reaches, though its broadcast address is not such a one."""
    if _is_loopback(info.broadcast_address):
        return []
    named = {"grpc": info.grpc_address, "peer": info.peer_address, "segments": info.segments_address}
    return [
        f"--{name}-address={address}"
        for name, address in named.items()
        if _is_loopback(address.rpartition(":")[0].strip("[]"))
    ]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reachable(address: str, name: str) -> str:
    """An address of ours as others dial it; `name` stands for all interfaces. Empty stays empty."""
    host, _, port = address.rpartition(":")
    return f"{name}:{port}" if address and host in ("0.0.0.0", "[::]", "") else address
