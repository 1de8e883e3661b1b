"""One lookup daemon: sockets, registry and API with one beginning and one end.

lookupd = Lookupd(LookupdOptions(tcp_address="127.0.0.1:0", http_address="127.0.0.1:0"))
await lookupd.start()
lookupd.tcp_address, lookupd.http_address        # "127.0.0.1:43121", "127.0.0.1:40233"
await lookupd.stop()
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
from typing import TYPE_CHECKING

import uvloop

from lookupd.changes import MetadataChanges
from lookupd.cluster_api import LookupCluster
from lookupd.controller import ControllerShell, MetadataGate
from lookupd.directory import LookupDirectory
from lookupd.http_api import LookupdApi
from lookupd.listeners import LookupdHttp
from lookupd.registry import Registry
from lookupd.standby import gone
from lookupd.tcp import Admissions, TcpServer, identity
from nsqha import __version__, nsqlog
from nsqha.clock import Clock, SystemClock
from nsqha.cluster_secret import read_secret
from nsqha.election.controller.planner import PlanLimits
from nsqha.election.controller.rounds import ControllerLimits
from nsqha.election.store import MetadataStore
from nsqha.errors import ConfigError, StaleMetadata, Unavailable
from nsqha.nsqlog import Logger, by_turns
from nsqha.options import SECOND, LoadedOptions, LookupdOptions, host_name, networks, version_line
from nsqha.server.authorization.audit import Audit
from nsqha.server.authorization.exposure import warn_if_open
from nsqha.server.authorization.guard import Guard
from nsqha.server.peers.api import Peers
from nsqha.server.runtime.allocator import full_collections
from nsqha.server.runtime.listen import (
    bound_address,
    bound_port,
    check_free,
    is_tcp,
    listen,
    raise_open_files_limit,
)
from nsqha.server.runtime.service_manager import ServiceManager
from nsqha.server.runtime.tasks import TaskGroup

if TYPE_CHECKING:
    from nsqha.election.etcd.store import EtcdStore


class Lookupd:
    """The daemon as an object, so that `nsqha dev` and tests run it in their own process."""

    def __init__(
        self,
        options: LookupdOptions,
        *,
        clock: Clock | None = None,
        store: MetadataStore | None = None,
        peers: Peers | None = None,
        gate: MetadataGate | None = None,
        guard: Guard | None = None,
    ) -> None:
        """With the metadata store of a cluster, and a way to reach its nodes, this is also a controller of it.

        No other may use the store (it opens a session). The caller closes both, after `stop`. `gate` says when the
        metadata are not trusted; `guard`: who may do what, everybody without one."""
        clock = clock or SystemClock()
        inactive_s = options.inactive_producer_timeout_ns / SECOND
        self._options = options
        self._logger = Logger("lookupd")
        self.registry = Registry(
            inactive_timeout_s=inactive_s, tombstone_lifetime_s=options.tombstone_lifetime_ns / SECOND
        )
        lifetime_s = options.tombstone_lifetime_ns / SECOND
        self.controller: ControllerShell | None = None
        self._cluster: LookupCluster | None = None
        audit = Audit()
        if store is not None:
            assert peers is not None, "a controller needs a way to reach nodes"
            name = f"{options.broadcast_address or host_name()}:{options.http_address.rpartition(':')[2]}"
            self.controller = ControllerShell(
                store, peers, clock, name=name, limits=_limits(options), gate=gate, gone=gone, audit=audit
            )
            changes = MetadataChanges(
                store.records, store.intents, random.SystemRandom(), channels_max=options.max_topic_channels
            )
            directory = LookupDirectory(lifetime_s)
            self._cluster = LookupCluster(self.controller, directory, changes, name=options.cluster_name, gate=gate)
        self._tcp = TcpServer(
            self.registry, clock, self._logger, silence_s=inactive_s, admissions=_admissions(options, guard)
        )
        if guard is not None:
            guard.file.on_change.append(self._tcp.judge_again)
        api = LookupdApi(self.registry, clock, self._cluster, describe=self._described)
        self._http = LookupdHttp(options, api, self._logger, guard, audit)
        self.tcp_address = self.http_address = self.https_address = self.metrics_address = ""

    async def start(self) -> None:
        """Listen on all addresses. ConfigError if one cannot be bound; then it listens on none."""
        tcp, http = listen(self._options.tcp_address, flag="tcp-address"), self._http
        try:
            http.bind()
        except ConfigError:
            tcp.close()
            raise
        self.tcp_address, self.http_address = bound_address(tcp), http.address("http")
        self.https_address, self.metrics_address = http.address("https"), http.address("metrics")
        await self._tcp.start(tcp, self._identity(bound_port(tcp)))
        await http.start()
        self._logger.info("tcp_listening", "TCP: listening on %s", self.tcp_address, address=self.tcp_address)
        if self.controller is not None:
            await self.controller.start()
        if self._cluster is not None:
            self._cluster.start()
        http.log_addresses()

    async def stop(self) -> None:
        if self._cluster is not None:
            await self._cluster.close()
        if self.controller is not None:
            await self.controller.stop()
        self._tcp.stop()
        await self._http.close()

    def _described(self) -> dict[str, object]:
        """This daemon in the form in which the Youzan fork lists lookup daemons. There is no RPC to it."""
        host, ports = self._options.broadcast_address or host_name(), {}
        for kind, address in (("TcpPort", self.tcp_address), ("HttpPort", self.http_address)):
            ports[kind] = address.rpartition(":")[2]
        name = f"{host}:{ports['TcpPort']}:{ports['HttpPort']}"
        return {"ID": name, "NodeIP": host, **ports, "RpcPort": "", "Epoch": 0}

    def _identity(self, tcp_port: int) -> bytes:
        host = host_name()
        return identity(
            broadcast_address=self._options.broadcast_address or host,
            hostname=host,
            http_port=self._http.port,
            tcp_port=tcp_port,
        )


def _admissions(options: LookupdOptions, guard: Guard | None) -> Admissions | None:
    """Who may register. ConfigError: the file with the cluster's secret can not be used."""
    if guard is None:
        return None
    found = networks(options.register_from_cidr, "--register-from-cidr")
    return Admissions(guard, found, read_secret(options.cluster_secret_file))


def _limits(options: LookupdOptions) -> ControllerLimits:
    return ControllerLimits(plan=PlanLimits().replacing_after(options.replace_after_ns / SECOND))


def serve(loaded: LoadedOptions[LookupdOptions]) -> int:
    """Run until SIGINT or SIGTERM; returns the exit status."""
    options = loaded.options
    nsqlog.configure(prefix=options.log_prefix, level=options.log_level, format=options.log_format)
    logger = Logger("lookupd")
    logger.info("starting", "nsqha %s (%s)", __version__, version_line("nsqlookupd"))
    for notice in loaded.notices:
        logger.info("option_notice", "%s", notice)
    raise_open_files_limit()
    try:
        uvloop.run(_until_signal(options))
    except (ConfigError, Unavailable, StaleMetadata) as error:
        logger.fatal("refused", "failed to start nsqlookupd - %s", error)
        return 1
    logger.info("stopped", "bye")
    return 0


async def _until_signal(options: LookupdOptions) -> None:
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.set)
    manager = ServiceManager.of(os.environ)
    manager.starting(loop, "opens the metadata")
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(by_turns(loop.call_soon, threading.get_ident))
        clock = SystemClock()
        guard = Guard.of(options.access_file, clock)
        store, peers = await _join(options, clock, stack) if options.etcd_endpoints else (None, None)
        if guard is not None:
            watching = TaskGroup()
            watching.spawn(guard.file.watch())
            stack.callback(watching.cancel)
        else:
            ports = {"TCP": options.tcp_address, "HTTP": options.http_address, "HTTPS": options.https_address}
            warn_if_open(ports)
        lookupd = Lookupd(options, clock=clock, store=store, peers=peers, gate=store, guard=guard)
        await lookupd.start()
        full_collections.start(loop)
        manager.ready(f"answers at {lookupd.http_address}")
        await signalled.wait()
        manager.stopping()
        await lookupd.stop()
    manager.close()


async def _join(options: LookupdOptions, clock: Clock, stack: contextlib.AsyncExitStack) -> tuple[EtcdStore, Peers]:
    """The cluster's metadata and a way to its nodes; both are closed with `stack`.

    All that may refuse this start is checked before: etcd may not have the cluster yet, and then it begins here."""
    # grpc takes a tenth of a second to import, and a daemon without a cluster does not need it.
    from nsqha.election.etcd.access import open_store
    from nsqha.pb.v1 import replication_pb2, routing_pb2
    from nsqha.server.peers import renewing
    from nsqha.server.runtime import certificates

    files = certificates.CertificateFiles.of(options)
    if files is not None:
        watching = TaskGroup()
        watching.spawn(certificates.watch([files]))
        stack.callback(watching.cancel)
    secret = read_secret(options.cluster_secret_file)
    if options.https_address:
        certificates.ClientCertificate(options)
    for name in ("tcp", "http", "https", "metrics"):
        if is_tcp(address := getattr(options, f"{name}_address")):
            check_free(address, flag=f"{name}-address")
    logger = Logger("metadata")
    store = await asyncio.to_thread(
        open_store,
        options,
        clock,
        random.SystemRandom(),
        trouble=lambda text: logger.warning("metadata_trouble", "%s", text),
        new_cluster=options.new_cluster,
    )
    stack.callback(store.close)
    described = (replication_pb2.DESCRIPTOR, routing_pb2.DESCRIPTOR)
    services = [service for file in described for service in file.services_by_name.values()]
    peers = renewing.peers(services, files, secret)
    stack.push_async_callback(peers.close)
    return store, peers
