"""A running node: everything from the lock file to the listeners, in the order in which it starts and stops.

Start: lock and journal -> metadata -> recover and lead every partition -> announce -> listen. Nothing is answered
before everything that was acknowledged earlier can be served again. Stop is the reverse.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import random
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from nsqha import __version__, hot
from nsqha.clock import Clock, SystemClock
from nsqha.cluster_secret import read_secret
from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.storage import OsStorage
from nsqha.election.embedded import EmbeddedStore
from nsqha.errors import ConfigError, StaleMetadata
from nsqha.nsqlog import Logger, by_turns
from nsqha.options import VERIFIED, Options, TlsRequired, version_line
from nsqha.replication.clocks import BoundedClock
from nsqha.server.authorization.exposure import warn_if_open
from nsqha.server.authorization.guard import Guard
from nsqha.server.clients.auth import AuthClient
from nsqha.server.clients.connection import Connection
from nsqha.server.http.broker_api import BoundPorts, announced_ports
from nsqha.server.node.broker import Broker
from nsqha.server.node.data_watch import DataWatch
from nsqha.server.node.parts import NodeParts
from nsqha.server.node.registrar import Credentials, ProducerIdentity, Registrar, read_token
from nsqha.server.opening.opener import PartitionOpener
from nsqha.server.opening.page_cache import boot_id, page_cache_of
from nsqha.server.runtime import listen
from nsqha.server.runtime.allocator import FreedMemory, full_collections, keep_large_blocks
from nsqha.server.runtime.disk import DiskRounds
from nsqha.server.runtime.grpc_threads import give_way_to_the_loop
from nsqha.server.runtime.measures import collector
from nsqha.server.runtime.service_manager import ServiceManager
from nsqha.server.runtime.tasks import TaskGroup, first_done
from nsqha.server.topics.topics import partitions_here
from nsqha.wire.limits import ProtocolLimits

if TYPE_CHECKING:
    import ssl

    from nsqha.election.etcd.store import EtcdStore
    from nsqha.server.clients.context import ClientContext
    from nsqha.server.node.cluster.membership import Membership
    from nsqha.server.peers.api import PeerServer
    from nsqha.server.peers.calls import GrpcPeerServer
    from nsqha.server.runtime.budget import SharedTurns
    from nsqha.server.runtime.certificates import CertificateFiles
    from nsqha.server.safe_mode.monitor import StaleMetadataMonitor
    from nsqha.server.segments.renewals import HoldRenewals

MS = 1_000_000
LEAVE_SECONDS_MAX = 5.0  # a stop waits so long for others to take over what this node leads

logger = Logger("node")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a node serves, as clients on this machine reach it."""

    tcp: str
    http: str
    https: str
    grpc: str
    segments: str
    peer: str
    metrics: str = ""


def ports_of(broker: Broker) -> dict[str, object]:
    """What a V2 client is told that asks for the other ports."""
    tcp_port, http_port = announced_ports(broker.options, broker.ports)
    return {"tcp_port": tcp_port, "http_port": http_port, "grpc_address": broker.ports.grpc_address}


def limits_of(options: Options) -> ProtocolLimits:
    """What the protocol checks, out of the flags."""
    return ProtocolLimits(
        msg_bytes_max=options.max_msg_size,
        body_bytes_max=options.max_body_size,
        rdy_count_max=options.max_rdy_count,
        req_timeout_ms_max=options.max_req_timeout_ns // MS,
        # As nsqd: the client timeout is a minute, a heartbeat is due in half of it.
        heartbeat_interval_ms_max=options.max_heartbeat_interval_ns // MS,
        msg_timeout_default_ms=options.msg_timeout_ns // MS,
        msg_timeout_ms_max=options.max_msg_timeout_ns // MS,
        output_buffer_bytes_max=options.max_output_buffer_size,
        output_buffer_timeout_default_ms=options.output_buffer_timeout_ns // MS,
        output_buffer_timeout_ms_min=options.min_output_buffer_timeout_ns // MS,
        output_buffer_timeout_ms_max=options.max_output_buffer_timeout_ns // MS,
        tls=bool(options.tls_cert),
        snappy=options.snappy,
        deflate=options.deflate,
        deflate_level_max=options.max_deflate_level,
        auth_required=bool(options.auth_http_addresses),
        topology_region=options.topology_region,
        topology_zone=options.topology_zone,
    )


def exposed(options: Options) -> dict[str, str]:
    """The listeners, by name, that ask nobody who it is."""
    found = {} if options.auth_http_addresses else {"TCP": options.tcp_address}
    if options.tls_required != TlsRequired.YES:
        found["HTTP"] = options.http_address
    if options.tls_cert and options.tls_client_auth_policy != VERIFIED:
        found["HTTPS"] = options.https_address
    if not options.cluster_tls_cert:
        found |= {} if options.cluster_secret_file else {"gRPC": options.grpc_address}
        found["segments"] = options.segments_address
    return found | {"metrics": options.metrics_address}


def make_data_folder(path: str) -> None:
    """Make the folder if it is not there, and say so: a mistyped --data-path looks like a broker without topics."""
    if os.path.isdir(path):
        return
    first = path
    while not os.path.exists(parent := os.path.dirname(first)):
        first = parent
    OsStorage().make_dirs(path)
    within = f", with the folders from {first} on" if first != path else ""
    logger.info("data_created", "DATA: %s was not there: made a new, empty data folder%s", path, within, data_path=path)


def advice(error: OSError) -> str:
    """What to do about a data folder that cannot be written; empty: nothing is known."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"; this process is user {os.geteuid()}: give it the folder (chown), or name another with --data-path"
    return "; the volume is read-only: mount it for writing" if error.errno == errno.EROFS else ""


def warn_of_nsqd_data(path: str) -> None:
    """Say that nsqd's queues are not read: a broker that starts on them looks like one that lost everything."""
    if os.path.exists(os.path.join(path, "nsqd.dat")):
        text = "DATA: %s has data of nsqd, which this broker does not read; `nsqha import nsqd %s` takes it over"
        logger.warning("nsqd_data_ignored", text, path, path)


class GrpcListener(Protocol):
    """Where a node listens for gRPC: administration, segments, and the calls of other nodes."""

    address: str
    renewals: HoldRenewals  # from `start` on

    async def start(self) -> None:
        """Listen. Unavailable or ConfigError if the address can not be had."""

    async def close(self) -> None: ...


OpenGrpc = Callable[[Broker, str, "GrpcPeerServer | None", "CertificateFiles | None"], GrpcListener]
"""Makes the listener of a broker at an address, with the services for other nodes; `start` is still to be called. Runs
in a thread."""


class GivenUp(Exception):
    """The process is to end before the node could start."""


class Node:
    """One broker in this process."""

    def __init__(
        self,
        options: Options,
        open_grpc: OpenGrpc,
        stop: asyncio.Event | None = None,
        sockets: dict[str, socket.socket] | None = None,
    ) -> None:
        """`stop` is set when the process is to end, which may be before the node could start. `sockets`: those of
        `listen.listen_all`, if it was called already."""
        self.options = replace(options, data_path=os.path.abspath(options.data_path or "."))
        self.failed: asyncio.Future[str] | None = None  # the disk failed: why
        self.begins_again = asyncio.Event()  # this life ends, and another one of the same process begins
        self._open_grpc = open_grpc
        self._stop = stop or asyncio.Event()
        self._sockets = sockets
        self._doubt: StaleMetadataMonitor | None = None
        self._broker: Broker | None = None
        self._clients: listen.Acceptor | None = None
        self._certificates: CertificateFiles | None = None
        self._closers: list[Any] = []
        self._tasks = TaskGroup()
        self.addresses = Addresses("", "", "", "", "", "")

    @property
    def broker(self) -> Broker:
        assert self._broker is not None, "the node was not started"
        return self._broker

    async def start(self) -> None:
        """Serve. ConfigError if a flag, the folder or a port can not be used; GivenUp."""
        options = self.options
        loop = asyncio.get_running_loop()
        self.failed = loop.create_future()
        logger.info("starting", "nsqha %s (%s)", __version__, version_line("nsqd"))
        logger.info("node_id", "ID: %d", options.node_id)
        logger.info("data", "DATA: %s, sync=%s, %s functions", options.data_path, options.sync, hot.ACTIVE)
        listen.raise_open_files_limit()
        guard = self._guard()
        if options.cluster_tls_cert:
            certificates = importlib.import_module("nsqha.server.runtime.certificates")
            self._certificates = certificates.CertificateFiles.of(options)
            self._tasks.spawn(certificates.watch([self._certificates]))
        # Sockets first: a port that is taken should not cost a recovery.
        sockets, self._sockets = self._sockets or listen.listen_all(options), None
        tls_context, auth_tls = self._tls_context(), self._auth_tls()
        clock = BoundedClock(SystemClock(), options.max_clock_skew_ns)
        rng = random.Random()
        self._make_data_path()
        warn_of_nsqd_data(options.data_path)
        journal = self._look_at_journal(rng)
        disk = DiskRounds(loop, clock, self._fail)
        # It writes files of its own: not before the node may use the folder.
        opener_of = cache(lambda: self._opener(loop, clock, disk, journal, rng))
        cluster = None
        if options.etcd_endpoints:
            await asyncio.to_thread(importlib.import_module, "nsqha.server.node.cluster.joining")
            cluster, sockets = await self._open_cluster(sockets, clock, rng, journal, disk, opener_of)
            store = cluster.store
        else:
            store = self._open_embedded(journal, rng)
            journal.commit()
        opener = opener_of()
        parts = NodeParts(loop, clock, rng, journal, store, disk, opener)
        broker = Broker(options, parts, cluster)
        self._broker = broker
        broker.endpoints.guard = guard
        broker.on_failure = self._failed
        if cluster is not None:
            cluster.on_fatal = self._failed
        ports = {name: listen.bound_port(sock) for name, sock in sockets.items() if name in ("tcp", "http", "https")}
        broker.endpoints.ports = BoundPorts(ports.get("tcp", 0), ports.get("http", 0), ports.get("https", 0))
        if isinstance(store, EmbeddedStore) and store.created and not journal.created:
            from nsqha.server.safe_mode.rebuilding import records

            storage = OsStorage()
            for record in await disk.run(lambda: list(records(storage, opener, journal, options.data_path))):
                store.records.put_recovered(record)
        await broker.open_topics()
        watch = DataWatch(options.data_path, opener.folders.open_logs, broker.fail)
        self._tasks.spawn(watch.run())
        limits = replace(limits_of(options), ports=lambda: ports_of(broker))
        if guard is not None:
            from nsqha.server.clients.token_auth import AnonymousState

            needs_none = AnonymousState(guard)
            limits = replace(limits, asks_auth=lambda: not needs_none.needs_no_auth)
            guard.file.on_change.append(broker.connections.judge_again)
        if options.audit_topic:
            from nsqha.server.authorization.audit_topic import AuditTopic

            at = broker.endpoints
            at.audit_topic = AuditTopic(options.audit_topic, broker.publishing.publish)
            at.audit.publish = at.audit_topic.put
            at.audit.topic = options.audit_topic
            broker.spawn(at.audit_topic.run())
        context = broker.client_context(limits, self._auth(broker, auth_tls), tls_context)
        self._announce(broker)
        await self._serve(broker, sockets, context)
        if cluster is not None:
            await self._register(broker, cluster)
        collector.start()
        keep_large_blocks()
        full_collections.start(loop)
        FreedMemory(loop).start()

    def _guard(self) -> Guard | None:
        """Who may do what, by the access file; without one it is said who everybody is. ConfigError."""
        options = self.options
        if options.lookupd_token_file:
            read_token(options.lookupd_token_file)  # it is read each time; one that can not be is said now
        guard = Guard.of(options.access_file, SystemClock(), options.audit_topic)
        if guard is not None:
            self._tasks.spawn(guard.file.watch())
        else:
            warn_if_open(exposed(options))
        return guard

    async def _open_cluster(
        self,
        sockets: dict[str, socket.socket],
        clock: Clock,
        rng: random.Random,
        journal: NodeJournal,
        disk: DiskRounds,
        opener_of: Callable[[], PartitionOpener],
    ) -> tuple[Membership, dict[str, socket.socket]]:
        """The cluster, and where this node listens then: while the metadata are not believed, nowhere. GivenUp."""
        joining = importlib.import_module("nsqha.server.node.cluster.joining")
        while True:
            try:
                return await joining.open_cluster(self.options, journal, clock, rng, self._certificates), sockets
            except StaleMetadata as error:
                for sock in sockets.values():
                    sock.close()  # clients go elsewhere: this may take until an operator comes
                held = importlib.import_module("nsqha.server.safe_mode.hold")
                await asyncio.to_thread(journal.commit)  # logs are recovered now
                safe_mode = held.SafeMode(
                    self.options, journal, clock, disk, opener_of(), self._stop, self._certificates
                )
                if not await held.until_accepted(safe_mode, str(error)):
                    journal.close()
                    disk.close()
                    raise GivenUp from None
                sockets = listen.listen_all(self.options)

    async def _register(self, broker: Broker, cluster: Membership) -> None:
        """Everything is served: now the others may know."""
        joining = importlib.import_module("nsqha.server.node.cluster.joining")
        uid, ports = broker.parts.journal.identity.node_uid, broker.endpoints.ports
        at = self.addresses
        info = joining.node_info(
            self.options,
            uid,
            boot_id(),
            tcp=ports.tcp,
            http=ports.http,
            grpc=at.grpc,
            peer=at.peer,
            segments=at.segments,
        )
        if local := joining.unreachable_addresses(info):
            text = "%s: registered beside --broadcast-address=%s, but only this host reaches it: give 0.0.0.0"
            logger.warning("loopback_registered", text, ", ".join(local), info.broadcast_address)
        await cluster.join(info)
        assert self._doubt is not None
        self._tasks.spawn(self._doubt.run())
        registration = cluster.registration
        await registration.run(registration.folder.registered)
        self._tasks.spawn(registration.folder.run(registration.run))

    def _opener(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        disk: DiskRounds,
        journal: NodeJournal,
        rng: random.Random,
    ) -> PartitionOpener:
        fail = self._fail
        return PartitionOpener(self.options, loop=loop, clock=clock, disk=disk, journal=journal, rng=rng, fail=fail)

    def _make_data_path(self) -> None:
        options = self.options
        try:
            make_data_folder(options.data_path)
        except FileExistsError:
            raise ConfigError(f"--data-path={options.data_path}: this is a file, not a folder") from None
        except OSError as error:
            raise ConfigError(f"--data-path={options.data_path}: {error.strerror}{advice(error)}") from None

    def _look_at_journal(self, rng: random.Random) -> NodeJournal:
        path = self.options.data_path
        journal = NodeJournal.look(OsStorage(), path, rng, page_cache=page_cache_of(path), new_lock=threading.Lock)
        if why := journal.node.poisoned:
            logger.warning("was_poisoned", "closed after a disk failure (%s); it is verified now", why)
        return journal

    def _open_embedded(self, journal: NodeJournal, rng: random.Random) -> EmbeddedStore:
        if journal.identity.etcd_cluster_id:
            cluster = journal.identity.cluster_id
            journal.close()
            raise ConfigError(
                f"--data-path={self.options.data_path} belongs to cluster {cluster:016x}: alone, this node would lead "
                "what others lead; give --etcd-endpoint, or another folder"
            )
        store = EmbeddedStore(
            OsStorage(),
            f"{self.options.data_path}/metadata",
            rng,
            cluster_id=journal.identity.cluster_id,
            revision_seen=journal.identity.revision_seen,
        )
        journal.node.join(store.records.cluster().record.cluster_id)
        return store

    def _tls_context(self) -> ssl.SSLContext | None:
        if not self.options.tls_cert:
            return None
        from nsqha.server.runtime import certificates

        certificate = certificates.ClientCertificate(self.options)
        self._tasks.spawn(certificates.watch([certificate]))
        return certificate.context

    def _auth_tls(self) -> ssl.SSLContext | None:
        """Of connections to auth servers. ConfigError."""
        if not self.options.auth_http_addresses:
            return None
        from nsqha.server.runtime import tls

        return tls.client_context(self.options)

    def _auth(self, broker: Broker, context: ssl.SSLContext | None) -> AuthClient | None:
        options = self.options
        if not options.auth_http_addresses:
            return None
        auth = AuthClient(
            options.auth_http_addresses,
            clock=broker.clock,
            rng=broker.parts.rng,
            post=options.auth_http_request_method == "post",
            connect_seconds=options.http_client_connect_timeout_ns / 1e9,
            request_seconds=options.http_client_request_timeout_ns / 1e9,
            tls=context,
        )
        broker.endpoints.auth_refused = auth.refused
        self._closers.append(auth.close)
        return auth

    def _announce(self, broker: Broker) -> None:
        options = self.options
        registrar = Registrar(
            ProducerIdentity(
                tcp_port=options.broadcast_tcp_port or broker.ports.tcp,
                http_port=options.broadcast_http_port or broker.ports.http,
                hostname=socket.gethostname(),
                broadcast_address=options.broadcast_address,
                topology_zone=options.topology_zone,
                topology_region=options.topology_region,
            ),
            broker.topics.registrations,
            partitions=partial(partitions_here, broker.topics),
            answer_bytes_max=options.max_body_size,
            channels_max=options.max_topic_channels,
            connect_seconds=options.http_client_connect_timeout_ns / 1e9,
            request_seconds=options.http_client_request_timeout_ns / 1e9,
            credentials=Credentials(
                options.lookupd_token_file,
                options.lookupd_tcp_addresses,
                read_secret(options.cluster_secret_file),
            ),
        )
        broker.endpoints.registrar = broker.topics.announcer = registrar
        registrar.set_peers(options.lookupd_tcp_addresses)
        broker.topics.first_channels.begin_all()
        self._closers.append(registrar.close)
        if options.statsd_address:
            from nsqha.server.node.statsd import StatsdPusher, host_prefix

            prefix = host_prefix(
                options.statsd_prefix, options.broadcast_address, options.broadcast_http_port or broker.ports.http
            )
            interval = options.statsd_interval_ns / 1e9
            pusher = StatsdPusher(broker, options.statsd_address, prefix, interval_seconds=interval)
            self._tasks.spawn(pusher.run())

    def _copy_audit(self, broker: Broker, server: PeerServer) -> None:
        """Changes of the audit topic are in the audit of every node of the cluster."""
        from nsqha.server.routing.audit_copies import AuditCopies

        cluster, audit = broker.cluster, broker.endpoints.audit
        assert cluster is not None
        copies = AuditCopies(
            audit,
            cluster.peers,
            lambda: cluster.leaders.members.view().nodes,
            cluster_id=cluster.cluster_id,
            node=broker.parts.journal.identity.node_uid,
            spawn=broker.spawn,
        )
        copies.register(server)
        audit.copied = copies.send

    async def _serve(self, broker: Broker, sockets: dict[str, socket.socket], context: ClientContext) -> None:
        clients = partial(Connection, context, broker.connections)
        self._clients = listen.Acceptor(sockets["tcp"], clients, turns=context.turns)
        await self._clients.start()
        logger.info("listening", "TCP: listening on %s", listen.bound_address(sockets["tcp"]), address="tcp")
        # aiohttp takes a third of a start to import: V2 clients are served meanwhile.
        http_api = await asyncio.to_thread(importlib.import_module, "nsqha.server.http.api")
        http = http_api.BrokerHttp(
            broker,
            sockets.get("http"),
            sockets.get("https"),
            context.tls_context,
            metrics=sockets.get("metrics"),
            guard=broker.endpoints.guard,
            audit=broker.endpoints.audit,
            turns=context.turns,
        )
        await http.start()
        self._closers.append(http.close)
        peers: GrpcPeerServer | None = None
        if broker.cluster is not None:
            from nsqha.server.peers.calls import peer_server
            from nsqha.server.peers.identity import MembersOnly
            from nsqha.server.safe_mode.monitor import RunningNode, StaleMetadataMonitor

            cluster = broker.cluster
            peers = peer_server(self.options, context.turns)
            checked = MembersOnly(peers, cluster.leaders.members.view)
            cluster.serve(checked)
            self._copy_audit(broker, checked)
            self._doubt = StaleMetadataMonitor(
                RunningNode(
                    options=self.options,
                    clock=broker.clock,
                    disk=broker.parts.disk,
                    journal=broker.parts.journal,
                    journal_writer=broker.journal_writer,
                    grpc_address=lambda: broker.ports.grpc_address,
                ),
                cast("EtcdStore", cluster.store),  # as `open_cluster` opened it
                self.begins_again.set,
                cluster_id=cluster.cluster_id,
                status=cluster.replicas.answers.status,
            )
            self._doubt.serve(checked)
        # gRPC takes a tenth of a second to import: not on the loop, clients are served already.
        address, certificates = self.options.grpc_address, self._certificates
        admin = await asyncio.to_thread(self._open_grpc, broker, address, peers, certificates)
        await admin.start()
        self._closers.append(admin.close)
        give_way_to_the_loop()
        broker.endpoints.ports = replace(broker.ports, grpc_address=admin.address)
        peer = "" if peers is None else self._serve_streams(peers, sockets["peer"], context.turns)
        if "segments" in sockets:
            await self._serve_segments(broker, sockets["segments"], admin.renewals)
        bound = {name: listen.bound_address(sock) for name, sock in sockets.items()}
        self.addresses = Addresses(
            tcp=bound.get("tcp", ""),
            http=bound.get("http", ""),
            https=bound.get("https", ""),
            grpc=admin.address,
            segments=broker.endpoints.segments_address,
            peer=peer,
            metrics=bound.get("metrics", ""),
        )

    def _serve_streams(self, peers: GrpcPeerServer, sock: socket.socket, turns: SharedTurns) -> str:
        """Open the peer port. When the node stops, it is closed before streams are ended. Returns where it listens."""
        from nsqha.server.peers.listener import PeerListener

        listener = PeerListener(peers, sock, self._certificates, turns)
        listener.start()
        self._closers.append(listener.close)
        return f"{listen.peer_address(self.options).rpartition(':')[0]}:{listen.bound_port(sock)}"

    async def _serve_segments(self, broker: Broker, sock: socket.socket, renewals: HoldRenewals) -> None:
        byte_server = await asyncio.to_thread(importlib.import_module, "nsqha.server.segments.byte_server")
        server = byte_server.ByteServer.of(
            broker.log_source, sock, self._certificates, renewals.read, broker.endpoints.guard
        )
        server.start()
        self._closers.append(server.close)
        broker.endpoints.segments, broker.endpoints.segments_address = server, server.address

    def _fail(self, error: BaseException) -> None:
        self.broker.fail(error)

    def _failed(self, why: str) -> None:
        if self.failed is not None and not self.failed.done():
            self.failed.set_result(why)

    async def stop(self, *, hand_over: bool = True) -> None:
        """Leave the lookup daemons, close listeners and clients, write what is left, sync, mark the stop clean."""
        broker = self.broker
        logger.info("stopping", "NSQ: stopping")
        if hand_over and broker.availability.failure is None:
            # Everything still runs: clients of this node notice a pause, and are served by other nodes then.
            await broker.side.leave(LEAVE_SECONDS_MAX)
        broker.availability.exiting = True
        if self._clients is not None:
            self._clients.close()
        self._tasks.cancel()
        for close in reversed(self._closers):
            await close()
        await broker.stop()
        logger.info("stopped", "bye")


def serve_until_signal(options: Options, open_grpc: OpenGrpc, sockets: dict[str, socket.socket]) -> int:
    """Run one node until SIGINT or SIGTERM (0), or until its disk fails (1). `sockets` are those of its first life."""
    import uvloop

    async def main() -> int:
        with by_turns(asyncio.get_running_loop().call_soon, threading.get_ident):
            return await live()

    async def live() -> int:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        manager = ServiceManager.of(os.environ)
        manager.starting(loop, "reads its log")
        bound: dict[str, socket.socket] | None = sockets
        while True:
            node, bound = Node(options, open_grpc, stop, bound), None
            try:
                await node.start()
            except GivenUp:
                return 0
            manager.ready(f"serves at {node.addresses.tcp}")
            assert node.failed is not None
            await first_done(stop.wait(), node.begins_again.wait(), node.failed)
            failed = node.failed.done()
            again = not stop.is_set() and not failed
            if not again:
                manager.stopping()
            await node.stop(hand_over=not again)
            if not again:
                manager.close()
                return 1 if failed else 0

    return uvloop.run(main())
