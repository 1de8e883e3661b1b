"""A whole cluster for tests: etcd, lookup daemons and nodes as real processes on loopback, and their faults.

    with Cluster.running(tmp_path, nodes=3, lookupds=2) as cluster:
        cluster.create("orders", "steady")
        cluster.leader("orders").kill()
        cluster.wait_leader("orders")

Members keep their ports, folders and flags for life, so one that is started again is the same one. They are ended by
their pid; the kernel ends them should the test process die. When a test fails, the end of every log is printed.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")  # see tests/conftest.py; runs without pytest come here

import grpc

from nsqha.cli.brokers.v2client import RefusedByServer, Subscriber, V2Publisher
from nsqha.cli.log import folders
from nsqha.clock import SystemClock
from nsqha.election.etcd.client import EtcdOptions
from nsqha.election.etcd.store import EtcdStore
from nsqha.election.model import PartitionMeta
from nsqha.errors import NotFound, NsqhaError
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.pb.v1.replication_pb2_grpc import ReplicationStub
from tests import freezing
from tests.etcd_server import EtcdMembers, EtcdServer
from tests.integration.servers import LOOPBACK, CannotStart, Daemon, Host, Lookupd, Node, free_port, wait_until
from tests.jepsen.checkers.judgement import Report, summary
from tests.jepsen.checkers.settling import settled
from tests.jepsen.checkers.storage import compare, entries_of, stored
from tests.jepsen.history import Settled, Stored
from tests.jepsen.load.background import Background
from tests.jepsen.load.cluster import ClusterLoad, Endpoint

LEASE_SECONDS = 2.0  # the shortest that a node takes
PUBLISHES = 250  # more than the publishers of a load have outstanding
SILENCE_SECONDS = 1.0  # in which a load has hundreds of publishes OK'd
OUTCOME_SECONDS = 30.0  # after which a node that is cut off answers a publish that it wrote; its clients wait so long
LOG_TAIL = 4000  # bytes of each member's log that a failed test shows
CLUSTER_NAME = "nsqha"

Flags = Sequence[str] | Callable[[str], Sequence[str]]  # of all members, or of the one with this name


class Member(Node):
    """One broker of the cluster."""

    def __init__(
        self,
        directory: Path,
        name: str,
        etcd: Iterable[str],
        *,
        sync: str,
        flags: Sequence[str],
        host: Host = LOOPBACK,
        data: Path | None = None,
    ) -> None:
        """`data`: its data directory, if that is not in `directory`."""
        self.name = name
        own = [
            *(f"--etcd-endpoint={endpoint}" for endpoint in etcd),
            f"--cluster-name={CLUSTER_NAME}",
            f"--node-name={name}",
            f"--broadcast-address={host.ip}",
            f"--lease-ttl={LEASE_SECONDS:.0f}s",
        ]
        flags = [*own, *flags, "", ""]  # gRPC and peers
        super().__init__(directory, sync=sync, flags=flags, host=host, data=data)

    def draw_ports(self) -> None:
        super().draw_ports()
        self.grpc_port, self.peer_port = free_port(), free_port()
        self.flags[-2:] = [f"--grpc-address={self.grpc}", f"--peer-address={self.peer}"]

    @property
    def grpc(self) -> str:
        return f"{self.host.ip}:{self.grpc_port}"

    @property
    def peer(self) -> str:
        return f"{self.host.ip}:{self.peer_port}"

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def joined(self) -> bool:
        """Whether this life of the process has been a member."""
        return re.search(rf"\({self.name}\), life \d+\s", self.log()) is not None

    def wipe(self) -> None:
        """Its disk is lost: the data directory is empty again."""
        assert not self.running, "it still runs"
        shutil.rmtree(self.data)
        self.data.mkdir()

    def status(self, *keys: tuple[int, int], cluster_id: int, seconds: float = 2.0) -> pb.StatusReply:
        """What it says of its replicas: of all, or of these (topic uid, partition). grpc.RpcError if it can not."""
        request = pb.StatusRequest(cluster_id=cluster_id)
        for uid, number in keys:
            request.keys.add(topic_uid=uid, partition=number)
        with grpc.insecure_channel(self.grpc) as channel:
            reply: pb.StatusReply = ReplicationStub(channel).Status(request, timeout=seconds)
            return reply

    def __repr__(self) -> str:
        return self.name


def freeze(daemon: Daemon) -> None:
    """SIGSTOP: it is silent, and knows nothing of it."""
    freezing.stop(daemon.pid)


def thaw(daemon: Daemon) -> None:
    os.kill(daemon.pid, signal.SIGCONT)


class Cluster:
    """Owner of all members. Use `running`."""

    def __init__(
        self,
        folder: Path,
        etcd: EtcdServer | EtcdMembers,
        *,
        nodes: int = 3,
        lookupds: int = 1,
        sync: str = "always",
        flags: Flags = (),
        lookupd_flags: Sequence[str] = (),
        access: EtcdOptions | None = None,
    ) -> None:
        """`access`: how this test reaches etcd, if that takes more than its endpoints."""
        self.folder = folder
        self.etcds = etcd
        self.access = access or EtcdOptions(etcd.endpoints)
        self._sync = sync
        self._flags = flags
        self._lookupd_flags = lookupd_flags
        self.nodes = [self.make(f"n{n}") for n in range(1, nodes + 1)]
        self.lookupds = [self.make_lookupd(f"lookupd{n}") for n in range(1, lookupds + 1)]
        self._store: EtcdStore | None = None

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path, **options: Any) -> Iterator[Cluster]:
        """Everything serves and is known to the controller, on an etcd of one member; nothing is left when the block
        ends. `options` are those of the class."""
        (folder / "etcd").mkdir(parents=True, exist_ok=True)
        with EtcdServer.running(folder / "etcd") as etcd, cls(folder, etcd, **options).started() as cluster:
            yield cluster

    @contextlib.contextmanager
    def started(self) -> Iterator[Cluster]:
        """As `running`, on the etcd that there is."""
        try:
            self.start()
            yield self
        except BaseException:
            self.show_logs()
            raise
        finally:
            self.close()

    @property
    def etcd(self) -> EtcdServer:
        """The only member of its etcd."""
        assert isinstance(self.etcds, EtcdServer)
        return self.etcds

    def make(self, name: str) -> Member:
        flags, host = self._flags(name) if callable(self._flags) else self._flags, self.host(name)
        return Member(self.folder / name, name, self.etcds.endpoints, sync=self._sync, flags=flags, host=host)

    def make_lookupd(self, name: str) -> Lookupd:
        host = self.host(name)
        own = [*(f"--etcd-endpoint={endpoint}" for endpoint in self.etcds.endpoints), f"--broadcast-address={host.ip}"]
        return Lookupd(self.folder / name, [*own, *self._lookupd_flags], host=host)

    def host(self, name: str) -> Host:
        """Where the daemon with this name runs."""
        return LOOPBACK

    @contextlib.contextmanager
    def another(self, name: str) -> Iterator[Member]:
        """One more member, which is not started and not counted."""
        member = self.make(name)
        try:
            yield member
        finally:
            member.__exit__()

    @property
    def daemons(self) -> list[Daemon]:
        return [*self.lookupds, *self.nodes]

    def start(self) -> None:
        """Start everybody who is not running."""
        for daemon in self.daemons:
            if daemon._process is None:
                daemon.spawn()
        for daemon in self.daemons:
            try:
                self.wait_listening([daemon])
            except CannotStart:
                # Between drawing a port and using it others may take it; nobody knows the first one yet.
                if daemon.starts > 1 or "Address already in use" not in daemon.log():
                    raise
                daemon.kill()
                daemon.draw_ports()
                daemon.start()
        self.wait_registered(len(self.nodes))

    def wait_listening(self, daemons: Iterable[Daemon]) -> None:
        for daemon in daemons:
            wait_until(daemon.listening, f"{daemon.directory.name} listens", 60)

    def wait_registered(self, nodes: int) -> None:
        """Until so many are, and not only as they were before they were killed: such a registration lasts its lease."""

        def registered() -> bool:
            running = [node for node in self.nodes if node.running]
            joined = sum(node.joined for node in running)
            return len(self.controller()["nodes"]) == nodes and joined >= min(nodes, len(running))

        wait_until(registered, f"{nodes} nodes are registered", 30)

    def wait_leases_over(self, *members: Member) -> None:
        """Until these, or all that run, know that they have no lease any more: etcd is away."""
        nodes = members or tuple(node for node in self.nodes if node.running)

        def over() -> bool:
            return all(b"nsqha_cluster_registered 0.0" in node.request("/metrics") for node in nodes)

        wait_until(over, f"the leases of {nodes} are over")

    def close(self) -> None:
        if self._store is not None:
            with contextlib.suppress(NsqhaError):
                self._store.close()
        for daemon in self.daemons:
            daemon.__exit__()

    def show_logs(self) -> None:
        """The end of every log of every life, to stdout, which the test runner keeps."""
        for daemon in self.daemons:
            for life in range(1, daemon.starts + 1):
                path = daemon.directory / f"log.{life}"
                text = path.read_text(errors="replace") if path.exists() else ""
                print(f"---- {daemon.directory.name}, life {life}\n{text[-LOG_TAIL:]}", file=sys.stdout)

    # ---- what the cluster says

    @property
    def lookupd(self) -> Lookupd:
        """One that runs."""
        return next(daemon for daemon in self.lookupds if daemon._process is not None)

    def controller(self) -> dict[str, Any]:
        """GET /controller of one that runs; no nodes if it has nothing to say."""
        try:
            return dict(self.lookupd.json("/controller"))
        except (OSError, ValueError):
            return {"nodes": [], "controller": None, "here": False}

    def active_lookupd(self) -> Lookupd | None:
        """The one that is controller now."""
        for daemon in self.lookupds:
            if daemon._process is not None:
                with contextlib.suppress(OSError, ValueError):
                    if daemon.json("/controller")["here"]:
                        return daemon
        return None

    @property
    def store(self) -> EtcdStore:
        """The metadata, to look at."""
        if self._store is None:
            self._store = EtcdStore(self.access, CLUSTER_NAME, SystemClock(), random.Random(), cluster_id=0)
        return self._store

    @property
    def cluster_id(self) -> int:
        return self.store.records.cluster().record.cluster_id

    def meta(self, topic: str, number: int = 0) -> PartitionMeta | None:
        """The partition's record, read linearizably; None: there is no such topic."""
        found = self.store.records.topic(topic)
        return None if found is None else found.record.partitions[number]

    def member(self, uid: int) -> Member | None:
        """The member with this node uid, if it is registered."""
        info = self.store.watch.view().nodes.get(uid)
        return next((node for node in self.nodes if info is not None and node.name == info.name), None)

    def uid(self, member: Member) -> int:
        """The node uid by which a member is registered; 0: it is not."""
        return next((uid for uid, info in self.store.watch.view().nodes.items() if info.name == member.name), 0)

    def producers(self, topic: str) -> list[int]:
        """TCP ports that /lookup names for the topic."""
        try:
            answer = self.lookupd.json(f"/lookup?topic={topic}")
        except (OSError, ValueError):
            return []
        return [producer["tcp_port"] for producer in answer["producers"]]

    def leader_now(self, topic: str) -> Member | None:
        """Who leads the (only) partition of a topic, as /lookup has it; None: nobody that is known."""
        ports = self.producers(topic)
        return next((node for node in self.nodes if node.tcp_port in ports and node.running), None)

    def leader(self, topic: str) -> Member:
        """As `leader_now`, waited for."""
        found: Member = wait_until(lambda: self.leader_now(topic), f"{topic} has a leader", 15)
        return found

    def followers(self, topic: str) -> list[Member]:
        leader = self.leader(topic)
        return [node for node in self.nodes if node is not leader and node.running]

    def wait_isr(self, topic: str, size: int, *, seconds: float = 20.0, number: int = 0) -> PartitionMeta:
        """The record, once the ISR has that many members and its leader is registered."""

        def enough() -> PartitionMeta | None:
            meta = self.meta(topic, number)
            return meta if meta is not None and len(meta.isr) == size and self.member(meta.leader) else None

        meta: PartitionMeta = wait_until(enough, f"the ISR of {topic}/{number} has {size} members", seconds)
        return meta

    def all_in_sync(self) -> bool:
        """Whether every ISR is full, under a leader that is registered."""
        metas = [meta for topic in self.store.records.topics().values() for meta in topic.record.partitions.values()]
        return all(len(meta.isr) == len(meta.replicas) and self.member(meta.leader) for meta in metas)

    def named_in_records(self) -> set[int]:
        """Node uids that have, or should have, a replica."""
        metas = [meta for topic in self.store.records.topics().values() for meta in topic.record.partitions.values()]
        return {uid for meta in metas for uid in (*meta.replicas, *meta.isr)}

    def create(self, topic: str, *channels: str, at: Member | None = None, isr: int | None = None) -> None:
        """Make a topic with channels at one node, and wait until its replicas are in sync."""
        node = at or self.nodes[0]
        node.request(f"/topic/create?topic={topic}", b"")
        for channel in channels:
            wait_until(
                lambda c=channel: posted(node, f"/channel/create?topic={topic}&channel={c}"),  # type: ignore[misc]
                f"{topic}/{channel} is made",
            )
        self.wait_isr(topic, min(3, len(self.nodes)) if isr is None else isr)

    # ---- replicas

    def ends(self, topic: str, number: int = 0) -> dict[str, tuple[int, int, int]]:
        """(end, chain, committed) of every replica that answers."""
        found = self.store.records.topic(topic)
        assert found is not None, f"there is no topic {topic}"
        ends = {}
        for node in self.nodes:
            if not node.running:
                continue
            with contextlib.suppress(grpc.RpcError):
                reply = node.status((found.record.uid, number), cluster_id=self.cluster_id)
                for replica in reply.replicas:
                    ends[node.name] = (replica.end, replica.chain, replica.committed)
        return ends

    def believing_leaders(self, topic: str, number: int = 0) -> list[str]:
        """Who says that it leads."""
        found = self.store.records.topic(topic)
        assert found is not None, f"there is no topic {topic}"
        key = (found.record.uid, number)
        names = []
        for node in self.nodes:
            with contextlib.suppress(grpc.RpcError):
                reply = node.status(key, cluster_id=self.cluster_id)
                names += [node.name for replica in reply.replicas if replica.role == pb.ROLE_LEADER]
        return names

    def wait_level(self, topic: str, *, replicas: int = 3, number: int = 0, seconds: float = 20.0) -> int:
        """Until all replicas end at the same place with the same chain, committed; that end."""

        def level() -> int:
            ends = self.ends(topic, number)
            same = len(ends) == replicas and len({(end, chain) for end, chain, _ in ends.values()}) == 1
            end, _, _ = next(iter(ends.values()), (0, 0, 0))
            return end if same and all(committed == end for _, _, committed in ends.values()) else 0

        try:
            return int(wait_until(level, "level", seconds))
        except AssertionError:
            raise AssertionError(f"the replicas of {topic}/{number} do not meet: {self.ends(topic, number)}") from None

    def check_replicas(self) -> dict[tuple[str, int], int]:
        """The replicas of every topic meet, and have the same bytes. Nothing runs afterwards. Returns the log id where
        each partition ends, for `stored`."""
        topics = wait_until(lambda: (self.store.records.topics(),), "etcd answers")[0]
        found = {name: topic.record for name, topic in topics.items()}
        ends = {
            (name, number): self.wait_level(name, replicas=len(meta.replicas), number=number)
            for name, record in found.items()
            for number, meta in record.partitions.items()
        }
        self.kill_everybody()
        for (name, number), end in ends.items():
            differences = self.differences(name, number, end=end)
            assert not differences, differences
        return ends

    def stored(self, ends: dict[tuple[str, int], int]) -> Iterator[Stored | Settled]:
        """The messages in the files of all nodes, which are stopped, and when channels were done with them, for the
        checkers."""
        for (name, number), end in ends.items():
            for node in self.nodes:
                yield from stored(0.0, node.name, node.data, name, number, end=end)
                yield from settled(0.0, node.name, node.data, name, number, end=end)

    def kill_everybody(self) -> None:
        """No election can follow: what they have on disk can be compared."""
        for daemon in self.daemons:
            daemon.kill()

    def differences(self, topic: str, number: int = 0, *, end: int = 0) -> list[str]:
        """Where the logs of the members differ below `end`, byte by byte; for nodes that are stopped."""
        logs = {}
        for node in self.nodes:
            with contextlib.suppress(NotFound):  # it has no replica
                for folder in folders(str(node.data), topic, number):
                    logs[node.name] = entries_of(folder)
        return [f"{topic}/{number}: {line}" for line in compare(logs, end=end)]


def published_and_read_through(node: Member, topic: str, count: int = 200) -> None:
    """Clients with one fixed address; the channel is there."""
    bodies = [b"%d" % random.getrandbits(60) for _ in range(count)]

    def published() -> bool:
        publisher = V2Publisher(node.tcp, 2 * OUTCOME_SECONDS)
        try:
            publisher.publish(topic, bodies)
        except RefusedByServer:
            return False
        finally:
            publisher.close()
        return True

    wait_until(published, "publishes are OK'd", 2 * OUTCOME_SECONDS)
    reader = Subscriber(node.tcp, 20, topic, "steady", window=50)
    reader.wait_at_most(0.05)
    missing = set(bodies)

    def read() -> bool:
        messages = reader.messages()
        missing.difference_update(message.body for message in messages)
        if messages:
            reader.answer(messages, None, None)
        return not missing

    wait_until(read, "they are read", 30)
    reader.leave()


def posted(node: Daemon, path: str) -> bool:
    """Whether a POST was answered with success."""
    try:
        node.request(path, b"")
    except (urllib.error.HTTPError, OSError):
        return False
    return True


def gone(daemon: Daemon, seconds: float = 20.0) -> int:
    """The exit status of a daemon that ends by itself."""
    process = daemon._process
    assert process is not None
    status = process.wait(seconds)
    daemon._process = None
    return status


__all__ = [
    "CannotStart",
    "Cluster",
    "Member",
    "UnderLoad",
    "freeze",
    "gone",
    "pause",
    "posted",
    "thaw",
]


def pause(seconds: float) -> None:
    """Let the cluster live for a while; nothing rests on how long exactly."""
    time.sleep(seconds)


class UnderLoad:
    """A block in which clients publish and consume, and after which everything that was OK'd must have come out.

    with UnderLoad(cluster, "orders"):
        cluster.leader("orders").kill()

    Publishes are OK'd before the block begins, and others after it, so that a run in which nothing happens fails.
    """

    report: Report

    def __init__(
        self, cluster: Cluster, topic: str, *channels: str, enter: Callable[[], None] = lambda: None, **options: Any
    ) -> None:
        """The topic and the channels are there. `enter` takes the clients' thread to a host of theirs."""
        nodes = [Endpoint(node.tcp_port, node.http_port, node.name, node.grpc) for node in cluster.nodes]
        lookupds = [daemon.http_port for daemon in cluster.lookupds]
        hosts = {port: daemon.host.ip for daemon in cluster.daemons for port in (daemon.tcp_port, daemon.http_port)}
        options.setdefault("hosts", hosts)
        options.setdefault("seed", random.randrange(1 << 30))
        self._background = Background(
            lambda: ClusterLoad(
                nodes=nodes, lookupds=lookupds, topic=topic, channels=channels or ("steady",), **options
            ),
            enter,
        )

    @property
    def clients(self) -> ClusterLoad:
        return self._background.load

    def __enter__(self) -> UnderLoad:
        self._background.start()
        try:
            self.goes_on()
        except BaseException:
            self._background.close()
            raise
        return self

    def goes_on(self, seconds: float = 2 * OUTCOME_SECONDS) -> None:
        """Returns when more publishes were OK'd than can have been under way."""
        enough = len(self.clients.oks) + PUBLISHES
        wait_until(lambda: len(self.clients.oks) >= enough, "publishes are OK'd", seconds)

    def falls_silent(self) -> None:
        """Returns when nothing has been OK'd for a while."""
        clients = self.clients
        wait_until(lambda: clients.now() - max(clients.oks) > SILENCE_SECONDS, "no publish is OK'd any more")

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.closing(self._background):
            if kind is None:
                self.goes_on()
                self.report = self._background.finish()
                print(summary(self.report))
                assert self.report.ok and not self._background.stuck, f"{self._background.stuck}\n{self.report}"
