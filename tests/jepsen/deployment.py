"""A whole cluster under test, each part on a host of its own: who is where, who leads, and who is broken at the moment.

    with Deployment.built(folder, sync="always") as deployment:
        deployment.create(TOPIC, *CHANNELS)
        deployment.leader_of(TOPIC).kill()

    n1 n2 n3            brokers              lookupd1 lookupd2    lookup daemons
    e1 e2 e3            etcd members         clients              where the load runs

`apart=False` puts everybody on loopback, which needs nothing; then only faults of processes can be had.

Invariants: a name is a host, a daemon and a victim. What a fault breaks is in `broken` until it is healed, so that no
two faults have the same victim. Every process ends with this one: the kernel sees to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nsqha.errors import NsqhaError
from tests.etcd_server import EtcdMembers, EtcdServer
from tests.integration.cluster import Cluster, Member
from tests.integration.installed_tree import InstalledTree, installed
from tests.integration.servers import LOOPBACK, Daemon, Host, Lookupd, free_port, wait_until
from tests.jepsen.hosts.disks import Disk
from tests.jepsen.hosts.groups import Group
from tests.jepsen.hosts.namespaces import NETWORK
from tests.jepsen.hosts.network import Network
from tests.jepsen.load.plan import SEGMENT_BYTES
from tests.jepsen.program import command
from tests.jepsen.switches.clock import ClockFile
from tests.jepsen.switches.names import NamesFile
from tests.jepsen.switches.stalls import StallFile
from tests.jepsen.switches.states import StatesFile

LEASE_SECONDS = 3  # as a node's default
TOPIC = "orders"
CHANNELS = ("steady", "other")
DISK_BYTES = 1 << 30  # sparse
ETCD_NAMES = ("e1", "e2", "e3")
CLIENTS = "clients"
SCRUB_BYTES_PER_SECOND = 16 << 20
SCRUB = ("--scrub-interval=10s", f"--scrub-bytes-per-second={SCRUB_BYTES_PER_SECOND}")  # finds damage soon
SMALL = (f"--segment-bytes={SEGMENT_BYTES}",)  # so that segments roll, and go, under faults
WITH_HARNESS = ("setpriv", "--pdeathsig", "KILL")  # an etcd ends when this process does, as daemons of ours do

LISTENS_SECONDS = 60.0
STATES_SECONDS = 30.0  # for a broker to compare its channel states
ETCD_AWAY = re.compile(r"FATAL: .*\betcd\b")  # why a daemon ended while it started

_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")

_numbers = itertools.count(1)  # two deployments of one process have different groups


class NotNow(Exception):
    """Nobody is left whom this fault could hit, or the cluster is in no state for it: the fault is not injected."""


class Hosts:
    """What daemons run on: the network with the clients' host on it, and disks; none of it on loopback. Use `made`."""

    def __init__(self, folder: Path, network: Network | None, stack: contextlib.ExitStack) -> None:
        self.network = network
        self.disks: dict[str, Disk] = {}
        self._groups: dict[str, Group] = {}
        self._folder = folder
        self._stack = stack

    @classmethod
    @contextlib.contextmanager
    def made(cls, folder: Path, *, apart: bool) -> Iterator[Hosts]:
        """NotPossible says what is missing."""
        with contextlib.ExitStack() as stack:
            network = stack.enter_context(Network.made()) if apart else None
            if network is not None:
                network.host(CLIENTS)
            yield cls(folder, network, stack)

    def disk(self, name: str) -> Disk:
        """That of a host, which is made if it is not there."""
        assert self.network is not None
        if name not in self.disks:
            self.network.host(name)
            made = Disk.made(self._folder / f"disk-{name}", inside=self.network.namespaces(name), size=DISK_BYTES)
            self.disks[name] = self._stack.enter_context(made)
        return self.disks[name]


    def group(self, name: str) -> Group:
        """The control group of a host, which is made if it is not there, and has nobody in it."""
        if name not in self._groups:
            self._groups[name] = self._stack.enter_context(Group.made(f"{name}-{next(_numbers)}"))
        return self._groups[name]


class Broker(Member):
    """One of the brokers, with switches of tests in its process: its loop can stall, its wall clock be wrong."""

    def __init__(
        self, directory: Path, name: str, etcd: Iterable[str], *, plants: Sequence[str] = (), **options: Any
    ) -> None:
        """`plants`: bugs that every life of it has."""
        super().__init__(directory, name, etcd, **options)
        self.stalls = StallFile(directory / "stall")
        self.clock = ClockFile(directory / "clock")
        self.names = NamesFile(directory / "names")
        self.states = StatesFile(directory / "states")
        self._plants = plants
        self.programmed()

    def programmed(self, *, failpoints: Sequence[str] = ()) -> None:
        """What it is from its next start on."""
        self.program = command(
            "nsqd",
            clock_file=self.clock.path,
            stall_file=self.stalls.path,
            names_file=self.names.path,
            states_file=self.states.path,
            failpoints=failpoints,
            plants=self._plants,
        )


class Deployment(Cluster):
    """Owner of all hosts and daemons. Use `built`."""

    def __init__(
        self, folder: Path, etcd: EtcdMembers, hosts: Hosts, *, plants: Sequence[str] = (), **options: Any
    ) -> None:
        self._plants = plants  # see tests.jepsen.program
        self.network = hosts.network
        self.disks = hosts.disks  # of brokers and etcd members; empty on loopback
        self._made_disk = hosts.disk
        self.broken: set[str] = set()
        self.topic = TOPIC
        self.settled: dict[str, float] = {}  # seconds after the last healing until each was so
        self.other_tree: Path | None = None  # of another version of the product, that is installed here
        self.group = hosts.group
        super().__init__(folder, etcd, **options)
        self.spare = self.make(f"n{len(self.nodes) + 1}")  # a broker that only some faults start

    @classmethod
    @contextlib.contextmanager
    def built(
        cls, folder: Path, *, sync: str, nodes: int = 3, apart: bool = True, plants: Sequence[str] = ()
    ) -> Iterator[Deployment]:
        """Everything serves. NotPossible if hosts can not be made here. `plants`: bugs that its daemons have."""
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(Hosts.made(folder, apart=apart))
            etcd = EtcdMembers([_etcd_member(folder / name, name, hosts) for name in ETCD_NAMES])
            stack.callback(etcd.kill)
            etcd.start()
            flags = [f"--lease-ttl={LEASE_SECONDS}s", *(["--insecure-cluster"] if apart else []), *SCRUB, *SMALL]
            deployment = cls(folder, etcd, hosts, plants=plants, nodes=nodes, lookupds=2, sync=sync, flags=flags)
            yield stack.enter_context(deployment._serving())

    @contextlib.contextmanager
    def _serving(self) -> Iterator[Deployment]:
        """As `started`, whose logs are for tests that fail: those of a run are kept in its folder."""
        try:
            self.start()
            yield self
        finally:
            self.close()
            self.spare.__exit__()

    def host(self, name: str) -> Host:
        return LOOPBACK if self.network is None else self.network.host(name)

    def make(self, name: str) -> Broker:
        assert not callable(self._flags)
        data = None if self.network is None else self._made_disk(name).at / "data"
        return Broker(
            self.folder / name,
            name,
            self.etcds.endpoints,
            sync=self._sync,
            flags=self._flags,
            host=self.host(name),
            data=data,
            plants=self._plants,
        )

    def host_in(self, name: str, group: Group) -> Host:
        """A host for a daemon that is to be in a control group from its start on."""
        host = self.host(name)
        return Host(host.ip, (*group.prefix, *host.prefix))

    def other_version(self, version: str, *, oldest: int, newest: int) -> InstalledTree:
        """The tree that the run was given, or one that is made."""
        if self.other_tree is not None:
            return InstalledTree(self.other_tree)
        return installed(self.folder, version=version, oldest=oldest, newest=newest)

    def make_lookupd(self, name: str) -> Lookupd:
        daemon = super().make_lookupd(name)
        if self._plants:
            daemon.program = command("nsqlookupd", plants=self._plants)
        return daemon

    # ---- who is who

    @property
    def apart(self) -> bool:
        return self.network is not None

    @property
    def etcd_members(self) -> Sequence[EtcdServer]:
        assert isinstance(self.etcds, EtcdMembers)
        return self.etcds.members

    @property
    def names(self) -> list[str]:
        """Of all hosts but that of the clients, where somebody runs."""
        daemons = [*self.daemons, *([self.spare] if self.spare.running else [])]
        return [*(daemon.directory.name for daemon in daemons), *(etcd.name for etcd in self.etcd_members)]

    def member(self, uid: int) -> Member | None:
        """The spare one counts, too."""
        info = self.store.watch.view().nodes.get(uid)
        return self.spare if info is not None and info.name == self.spare.name else super().member(uid)

    def is_broken(self, member: Daemon | EtcdServer) -> bool:
        return name_of(member) in self.broken

    @property
    def brokers(self) -> list[Broker]:
        return [node for node in self.nodes if isinstance(node, Broker)]

    @property
    def whole_names(self) -> list[str]:
        """Hosts that no fault has hit."""
        return [name for name in self.names if name not in self.broken]

    @property
    def whole_nodes(self) -> list[Broker]:
        """Brokers that no fault has hit."""
        return [node for node in self.brokers if not self.is_broken(node)]

    @property
    def whole_lookupds(self) -> list[Lookupd]:
        return [daemon for daemon in self.lookupds if not self.is_broken(daemon)]

    @property
    def whole_etcds(self) -> list[EtcdServer]:
        return [etcd for etcd in self.etcd_members if not self.is_broken(etcd)]

    def leader_of(self, topic: str | None = None, number: int = 0) -> Broker:
        """Who leads a partition of the topic under load, as the metadata have it; NotNow if that is nobody whole."""
        found = self.store.watch.view().topics.get(topic or self.topic)
        leader = None if found is None else self.member(found.record.partitions[number].leader)
        if not isinstance(leader, Broker) or self.is_broken(leader):
            raise NotNow("no leader that is whole")
        return leader

    def followers_of(self, topic: str | None = None) -> list[Broker]:
        """The other brokers that are whole."""
        leader = self.leader_of(topic)
        return [node for node in self.whole_nodes if node is not leader]

    def controller_now(self) -> Lookupd:
        """The lookup daemon that is controller; NotNow if none that is whole says so."""
        for daemon in self.whole_lookupds:
            with contextlib.suppress(OSError, ValueError):
                if daemon.json("/controller")["here"]:
                    return daemon
        raise NotNow("no controller that is whole")

    def enter_clients(self) -> None:
        """The calling thread goes to the clients' host, for good: its sockets are there."""
        if self.network is None:
            return
        with open(f"/proc/{self.network.namespaces(CLIENTS).pid}/ns/net") as space:
            if _libc.setns(space.fileno(), NETWORK):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    @property
    def addresses(self) -> dict[int, str]:
        """Where ports are, for clients."""
        daemons = [*self.daemons, self.spare]
        return {port: daemon.host.ip for daemon in daemons for port in (daemon.tcp_port, daemon.http_port)}

    # ---- after faults

    def revive(self) -> None:
        """Start again, as an init system would, who ended because etcd was away while it started, unless a fault has
        it: then its healing starts it."""
        for daemon in self.daemons:
            if not self.is_broken(daemon):
                start_again(daemon)

    def wait_listening(self, daemons: Iterable[Daemon]) -> None:
        """Who ends meanwhile because etcd was away is started again."""
        for daemon in daemons:

            def listens(daemon: Daemon = daemon) -> bool:
                start_again(daemon)
                return daemon.listening()

            wait_until(listens, f"{daemon.directory.name} listens", LISTENS_SECONDS)

    def settle(self, seconds: float) -> float:
        """Everybody serves, is registered, and every ISR is full; how long that took. AssertionError: not in time."""
        began = time.monotonic()
        marks = {}
        self.revive()
        for etcd in self.etcd_members:
            etcd.wait()
        marks["etcd"] = time.monotonic()
        self.wait_listening(self.daemons)
        marks["listening"] = time.monotonic()
        self.wait_registered(len(self.nodes))
        marks["registered"] = time.monotonic()
        left = max(1.0, seconds - (time.monotonic() - began))
        wait_until(self.all_in_sync, "every ISR is full again", left)
        marks["in sync"] = time.monotonic()
        self.settled = {what: mark - began for what, mark in marks.items()}
        return time.monotonic() - began

    def check_states(self) -> None:
        """Each channel state of each replica is what its log says. AssertionError. To be called when all is well."""
        wrong = [f"{node.name}: {text}" for node in self.brokers for text in node.states.wrong(STATES_SECONDS)]
        assert not wrong, "channel states are not of their logs:\n" + "\n".join(wrong[:5])

    def epoch_and_isr(self) -> tuple[int, int]:
        """Of the first partition of the topic under load, as the metadata were seen last."""
        with contextlib.suppress(NsqhaError, KeyError):
            meta = self.store.watch.view().topics[self.topic].record.partitions[0]
            return meta.epoch, len(meta.isr)
        return 0, 0


def start_again(daemon: Daemon) -> None:
    """One that ended because etcd was away while it started; who ended for another reason stays as it is."""
    process = daemon._process
    if process is not None and process.poll() is not None and ETCD_AWAY.search(daemon.log()):
        daemon.kill()
        daemon.spawn()


def name_of(member: Daemon | EtcdServer) -> str:
    return member.name if isinstance(member, EtcdServer) else member.directory.name


def one_of(rng: random.Random, members: Sequence[T]) -> T:
    """One, drawn; NotNow if there is none."""
    if not members:
        raise NotNow("nobody is left")
    return rng.choice(members)


def _etcd_member(folder: Path, name: str, hosts: Hosts) -> EtcdServer:
    """On its own disk, with syncs, where there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    host, apart = LOOPBACK, hosts.network is not None
    if hosts.network is not None:
        host, data = hosts.network.host(name), hosts.disk(name).at / "data"
        data.mkdir(mode=0o700)
        (folder / "data").symlink_to(data)  # the log stays in the folder
    prefix = (*host.prefix, *WITH_HARNESS)
    member = EtcdServer(folder, name=name, ip=host.ip, prefix=prefix, synced=apart)
    member.client_port, member.peer_port = free_port(), free_port()
    return member
