"""Whole nodes and controllers of a simulated cluster: what `nsqha.server.node.start` and `lookupd.daemon` put together,
over a simulated disk, network and metadata store.

A machine (`SimNode`) outlives its processes: it keeps the disk. A process is started, killed (the page cache stays),
loses power (what was not synced may be gone), is frozen, or dies at the n-th change of its disk from now.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lookupd.controller import ControllerShell
from nsqha.commitlog.journal import NodeJournal
from nsqha.cursor.cache.lmdb_cache import LmdbCache
from nsqha.election.controller.rounds import ControllerLimits
from nsqha.election.model import NodeInfo
from nsqha.errors import ConfigError, NsqhaError
from nsqha.options import Options
from nsqha.replication.clocks import BoundedClock
from nsqha.server.node.broker import Broker
from nsqha.server.node.cluster.folder_life import FolderLife
from nsqha.server.node.cluster.membership import Membership
from nsqha.server.node.parts import NodeParts
from nsqha.server.opening.opener import PartitionOpener
from nsqha.server.runtime.disk import DiskRounds
from tests.sim.loop import NodeLoop, SimClock, SimPool
from tests.sim.operators import AdminPort
from tests.sim.storage import Crashed, SimStorage

if TYPE_CHECKING:
    from nsqha.server.replica.roles import Replicas
    from tests.sim.metadata import SimMetadata
    from tests.sim.net import Network

DATA = "/tmp"  # any folder that exists: only its free space is looked at, and that is not used
RESTART_SECONDS = 0.5
MORE_THAN_THERE_IS = 1 << 62  # bytes


class MachineStorage(SimStorage):
    """A disk that tells when the moment of a planned crash has come."""

    on_crash: Callable[[], None] = lambda: None
    off = False

    def acting(self, operation: str, path: str) -> None:
        if self.off:
            raise Crashed(f"{operation} {path}: the machine is off")
        try:
            super().acting(operation, path)
        except Crashed:
            self.off = True
            self.on_crash()
            raise

    def next_process(self) -> MachineStorage:
        """The same disk and page cache for another process; this one does nothing any more."""
        after = MachineStorage(self.rng)
        after._names, after._disk_names = dict(self._names), dict(self._disk_names)
        after._name_changes = list(self._name_changes)
        after._dirs = set(self._dirs)
        after.lasting = self.lasting
        self.off = True
        return after

    def after_power_loss(self, rng: random.Random) -> MachineStorage:
        left = self.crash(rng)
        after = MachineStorage(self.rng)
        after._names, after._disk_names, after._dirs = left._names, left._disk_names, left._dirs
        after.lasting = self.lasting
        self.off = True
        return after


class Machine:
    """What nodes and controllers have in common: a name, and a process that may be gone."""

    def __init__(self, name: str, net: Network, metadata: SimMetadata, rng: random.Random) -> None:
        self.name = name
        self.net = net
        self.metadata = metadata
        self.rng = rng
        self.scheduler = metadata.scheduler
        self.loop: NodeLoop = self.scheduler.loop(name)
        self.loop.dead = True
        self.past: list[NodeLoop] = []
        self.disk_seconds = 0.001
        self.metadata_seconds = 0.001
        self.skew_ns = 0  # of its wall clock

    @property
    def up(self) -> bool:
        """Whether there is a process, frozen or not."""
        return not self.loop.dead

    @property
    def frozen(self) -> bool:
        return self.up and self.loop.frozen

    def _new_process(self) -> NodeLoop:
        assert not self.up
        self.past.append(self.loop)
        loop = self.loop = self.scheduler.loop(self.name)
        loop.job_seconds = self._job_seconds
        return loop

    def _job_seconds(self, kind: str) -> float:
        mean = self.metadata_seconds if kind.startswith("metadata") else self.disk_seconds
        return self.rng.uniform(0.1, 1.9) * mean

    def freeze(self) -> None:
        if self.up and not self.loop.frozen:
            self.loop.freeze()
            self.net.stalled(self.name, True)

    def thaw(self) -> None:
        if self.up and self.loop.frozen:
            self.loop.thaw()
        self.net.stalled(self.name, False)

    def _end_process(self, *, silent: bool) -> None:
        self.loop.kill()
        self.net.stalled(self.name, False)
        self.net.crash(self.name, silent=silent)


class SimNode(Machine):
    """One broker node."""

    def __init__(self, name: str, net: Network, metadata: SimMetadata, rng: random.Random, options: Options) -> None:
        super().__init__(name, net, metadata, rng)
        self.options = options
        self.storage = MachineStorage(random.Random(rng.getrandbits(64)))
        self.boots = 0  # of the machine
        self.disks = 0  # how often the disk was replaced
        self.lives = 0
        self.joined = False
        self.broker: Broker | None = None
        self.journal: NodeJournal | None = None
        self.cluster: Membership | None = None
        self.admin: AdminPort | None = None
        self.refused = ""  # why the last start ended
        self.disk_is_low = False
        self.may_lose_power: Callable[[], bool] = lambda: True
        self.on_start: Callable[[SimNode], None] = lambda node: None
        self.on_broker: Callable[[SimNode], None] = lambda node: None
        self.on_end: Callable[[SimNode, str], None] = lambda node, why: None

    @property
    def uid(self) -> int:
        return self.journal.identity.node_uid if self.journal is not None else 0

    @property
    def replicas(self) -> Replicas | None:
        """Of the process that runs, or ran last."""
        return None if self.cluster is None else getattr(self.cluster, "replicas", None)

    # ---- processes

    def start(self) -> None:
        """Begin a process; it is there when `joined`."""
        loop = self._new_process()
        self.lives += 1
        self.joined = False
        self.broker = None
        self.storage.on_crash = self._died_writing
        self.on_start(self)
        task = loop.create_task(self._run(loop))
        task.add_done_callback(lambda done: self._started(loop, done))

    def _died_writing(self) -> None:
        self.end("died at a write", power=self.rng.random() < 0.5 and self.may_lose_power())

    async def _run(self, loop: NodeLoop) -> None:
        rng = random.Random(self.rng.getrandbits(64))
        clock = BoundedClock(SimClock(self.scheduler, lambda: self.skew_ns), self.options.max_clock_skew_ns)
        journal = NodeJournal.open(self.storage, DATA, rng, page_cache=f"{self.name}-{self.boots}")
        self.journal = journal
        handle = self.metadata.handle(loop)
        workers = SimPool(loop, "metadata")
        record = (await loop.run_in_executor(workers, handle.records.cluster)).record
        identity = handle.identity()
        journal.node.join(record.cluster_id, etcd_cluster_id=identity.etcd_cluster_id)
        journal.node.stage_revision(identity.revision)
        folder = FolderLife(journal, self.metadata.folders)
        folder.begin()
        cluster = Membership(
            handle,
            loop=loop,
            clock=clock,
            folder=folder,
            node=journal.identity.node_uid,
            cluster_id=record.cluster_id,
            peers=self.net.peers(self.name),
            routing_peers=self.net.peers(self.name),
            ttl_s=self.options.lease_ttl_ns / 1e9,
        )
        broker: Broker
        disk = DiskRounds(loop, clock, lambda error: broker.fail(error), sync_pool=SimPool(loop, "fdatasync"))
        opener = PartitionOpener(
            self.options,
            loop=loop,
            clock=clock,
            disk=disk,
            journal=journal,
            rng=rng,
            fail=lambda error: broker.fail(error),
            storage=self.storage,
            cursor_cache=LmdbCache("", None),
        )
        broker = Broker(self.options, NodeParts(loop, clock, rng, journal, handle, disk, opener), cluster)
        broker.on_failure = lambda why: self._failed(loop, why)
        broker.availability.disk_low_bytes = MORE_THAN_THERE_IS if self.disk_is_low else 0
        cluster.on_fatal = lambda why: self._failed(loop, why)
        self.cluster = cluster
        broker.scrub.scrubber._storage = self.storage
        await broker.open_topics()
        server = self.net.server(self.name)
        cluster.serve(server)
        self.admin = AdminPort(broker, self.net.peers(self.name))
        self.admin.register(server)
        self.broker = broker
        self.on_broker(self)
        info = NodeInfo(
            cluster.node,
            name=self.name,
            host=self.name,
            broadcast_address=self.name,
            tcp_address=f"{self.name}:4150",
            http_address=f"{self.name}:4151",
            grpc_address=self.name,
            peer_address=self.name,
            boot_id=f"{self.name}-{self.boots}",
        )
        await cluster.join(info)
        self.joined = True

    def _started(self, loop: NodeLoop, task: asyncio.Task[None]) -> None:
        if loop.dead or task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        self.refused = f"{type(error).__name__}: {error}"
        if not isinstance(error, (NsqhaError, ConfigError, OSError, Crashed)):
            self.loop.call_exception_handler({"message": "start", "exception": error})
        self.end(f"could not start: {self.refused}")

    def _failed(self, loop: NodeLoop, why: str) -> None:
        """The disk failed: the process ends soon."""
        loop.call_later(self.rng.uniform(0.0, 0.2), lambda: self.end(f"poisoned: {why}"))

    def disk_low(self, low: bool) -> None:
        """Its disk has less free space than it wants, in this process and later ones; writes still succeed."""
        self.disk_is_low = low
        if self.broker is not None:
            self.broker.availability.disk_low_bytes = MORE_THAN_THERE_IS if low else 0

    async def stop(self) -> None:
        """A clean stop."""
        assert self.broker is not None
        self.broker.availability.exiting = True
        await self.broker.stop()

    def end(self, why: str, *, power: bool = False) -> None:
        """The process ends as it is; `power`: so does the machine."""
        if not self.up:
            return
        self._end_process(silent=power)
        self.joined = False
        if power:
            self.boots += 1
            self.storage = self.storage.after_power_loss(self.rng)
        else:
            self.storage = self.storage.next_process()
        self.on_end(self, why)

    def wipe(self) -> None:
        """A new, empty disk."""
        assert not self.up
        self.disks += 1
        self.storage = MachineStorage(random.Random(self.rng.getrandbits(64)))
        self.journal = None
        self.cluster = None

    def __repr__(self) -> str:
        return f"SimNode({self.name})"


class SimController(Machine):
    """A lookup daemon as far as it is a controller."""

    shell: ControllerShell | None = None

    def __init__(
        self, name: str, net: Network, metadata: SimMetadata, rng: random.Random, limits: ControllerLimits
    ) -> None:
        super().__init__(name, net, metadata, rng)
        self.limits = limits

    def start(self) -> None:
        loop = self._new_process()
        handle = self.metadata.handle(loop)
        shell = self.shell = ControllerShell(
            handle,
            self.net.peers(self.name),
            SimClock(self.scheduler, lambda: self.skew_ns),
            name=self.name,
            limits=self.limits,
        )
        loop.create_task(shell.start())

    def end(self, why: str = "") -> None:
        if self.up:
            self._end_process(silent=False)

    def machine(self) -> Any:
        """The machine of the term that runs here, if any."""
        return None if self.shell is None or self.shell.term is None else self.shell.term.machine
