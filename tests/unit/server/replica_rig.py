"""The replicas of one node over a journal and files in memory, on a loop whose time jumps; metadata and leaders are
the test's.

    rig = ReplicaRig()
    await rig.settle(rig.record(isr={A: 5}, replicas=(A, NODE)))      what the watch brings
    leader = rig.leader(A)                                            a stream of node A
    answer = await leader.open(epoch=2)                               -> Opened or Refused
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, cast

from nsqha import hot
from nsqha.clock import ManualClock
from nsqha.commitlog.entry import Entry
from nsqha.commitlog.journal import NodeJournal, inspect
from nsqha.commitlog.log import LogIdentity, LogLimits, PartitionLog
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.storage import MemStorage, Storage
from nsqha.cursor.cache.lmdb_cache import LmdbCache
from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord, TopicSettings, Versioned
from nsqha.errors import Unavailable
from nsqha.options import Options
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.opening.opener import PartitionOpener
from nsqha.server.partition.delivery import Delivery
from nsqha.server.partition.topic import Topic
from nsqha.server.peers.api import PeerIdentity
from nsqha.server.replica.following.follower import Follower
from nsqha.server.replica.replica_runtime import ReplicaRuntime
from nsqha.server.replica.roles import ReplicaLimits, Replicas
from nsqha.server.runtime.journal import JournalWriter
from tests.fakes.disk import FakeDisk
from tests.fakes.loop import VirtualLoop
from tests.fakes.metadata import FakeMetadata
from tests.fakes.peers import FakePeers

UID = 0x51
CLUSTER = 9
KEY = (UID, 0)
WIRE_KEY = pb.PartitionKey(topic_uid=UID, partition=0)
A, B = 101, 102  # other nodes
REGISTRATION = 40


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A test's coroutine, on a loop of its own."""

    async def main() -> None:
        await scenario()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


async def pause(seconds: float = 0.05) -> None:
    """Let everybody do what there is to do."""
    await asyncio.sleep(seconds)


class FakeCluster:
    """Remembers the nodes whose streams were lost."""

    def __init__(self, lost: list[int]) -> None:
        self._lost = lost

    def name_of(self, node: int) -> str:
        return ""

    def stream_lost(self, node: int) -> None:
        self._lost.append(node)

    def stream_found(self, node: int) -> None: ...

    def changed(self, topic: str) -> None: ...


class FakeLinks:
    def __init__(self) -> None:
        self.added: list[int] = []
        self.rests: dict[int, Any] = {}
        self.prepared: set[tuple[int, str]] = set()
        self.committed_of: list[Any] = []

    def prepare(self, node: int, address: str) -> None:
        self.prepared.add((node, address))

    def add(self, leader: Any, node: int, address: str, rest_after: Any = None) -> Any:
        self.added.append(node)
        self.rests[node] = rest_after
        return FakePushed()

    def registered(self, node: int, address: str, registration: int) -> None:
        pass

    def committed(self, leader: Any) -> None:
        self.committed_of.append(leader)


class FakePushed:
    def wake(self) -> None: ...
    def stop(self) -> None: ...


class LeaderStream:
    """A stream that another node opened to us, and what it was answered."""

    def __init__(self, rig: ReplicaRig, node: int) -> None:
        self.rig = rig
        self.node = node
        self.peer = PeerIdentity("somewhere")
        self.pending = 0
        self.replies: list[pb.PushReply] = []
        self.receiver = rig.replicas.service.receive(self)
        hello = pb.PushHello(cluster_id=CLUSTER, node_uid=node, registration=7, target_uid=rig.node)
        self.receiver.on_message(pb.PushMessage(hello=hello))

    def send(self, message: pb.PushReply) -> None:
        copy = pb.PushReply()
        copy.CopyFrom(message)
        self.replies.append(copy)

    def pull(self, give: Callable[[], pb.PushReply | None]) -> None:
        asyncio.get_running_loop().call_soon(self._ask, give)

    def _ask(self, give: Callable[[], pb.PushReply | None]) -> None:
        if not self.receiver.closed and (message := give()) is not None:
            self.send(message)

    def close(self, why: str = "") -> None:
        self.receiver.on_closed(why)

    def ask(self, epoch: int, log: PartitionLog, start: int | None = None) -> None:
        """Open with what a leader whose log this is says."""
        at = log.end.log_id if start is None else start
        message = pb.PushMessage()
        message.opens.add(
            key=WIRE_KEY, topic="t", epoch=epoch, start=at, chain=log.entry_before(at).chain, first=log.start.log_id
        )
        self.receiver.on_message(message)

    async def open(self, epoch: int, log: PartitionLog, start: int | None = None) -> Any:
        """Ask, and wait for the answer."""
        self.take()
        self.ask(epoch, log, start)
        for _ in range(1000):
            await asyncio.sleep(0.005)
            for answer in [*self.opened, *self.refused]:
                return answer
        raise AssertionError("no answer")

    def push(self, epoch: int, log: PartitionLog, first: int, end: int | None = None, committed: int = 0) -> None:
        from nsqha.commitlog.copying import read_run

        batch = read_run(log, first, end or log.end.log_id, 1 << 30)
        message = pb.PushMessage()
        message.appends.add(topic_uid=UID, epoch=epoch, entries=batch.entries, data=batch.data, committed=committed)
        self.receiver.on_message(message)

    def take(self) -> list[pb.PushReply]:
        taken, self.replies = self.replies, []
        return taken

    @property
    def opened(self) -> list[Any]:
        return [opened for reply in self.replies for opened in reply.opened]

    @property
    def refused(self) -> list[Any]:
        return [refused for reply in self.replies for refused in reply.refused]

    @property
    def acks(self) -> list[Any]:
        return [ack for reply in self.replies for ack in reply.acks]


class ReplicaRig:
    """One node's replicas."""

    def __init__(self, storage: Any = None, *, sync: str = "always", catch_up_bytes_per_second: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self.rng = random.Random(4)
        self.storage: Any = storage or MemStorage()
        self.failures: list[BaseException] = []
        self.disk = FakeDisk(loop, self.failures.append)
        self.journal = NodeJournal.open(self.storage, "data", self.rng, page_cache="boot")
        self.node = self.journal.identity.node_uid
        self.writer = JournalWriter(self.journal, self.disk, self.failures.append)  # type: ignore[arg-type]
        self.metadata = FakeMetadata(self.journal, self.failures.append, cluster_id=CLUSTER)
        self.peers = FakePeers(loop)
        self.links = FakeLinks()
        self.topic: Any = Topic(
            Versioned(TopicRecord("t", UID, 3), 1),
            (),
            lambda partition, channel: Delivery(partition, channel, self.rng, None),
        )
        self.nodes = {node: NodeInfo(node, grpc_address=f"n{node}", peer_address=f"n{node}") for node in (A, B)}
        self.opener = PartitionOpener(
            Options(data_path="data", sync=sync),
            loop=loop,
            clock=ManualClock(),
            disk=self.disk,  # type: ignore[arg-type]
            journal=self.journal,
            rng=self.rng,
            fail=self.failures.append,
            storage=self.storage,
            cursor_cache=LmdbCache("", None),
        )
        self.tasks: set[asyncio.Task[None]] = set()
        self.errors: list[BaseException] = []
        self.lost: list[int] = []
        self.clock = ManualClock()
        runtime = ReplicaRuntime(
            loop=loop,
            clock=self.clock,
            node=self.node,
            cluster_id=CLUSTER,
            journal=self.journal,
            journal_writer=self.writer,
            metadata=self.metadata.node,
            opener=self.opener,
            disk=cast(Any, self.disk),
            peers=cast(Any, self.peers),
            nodes=lambda: self.nodes,
            spawn=self.spawn,
            on_failure=self.failures.append,
        )
        self.replicas = Replicas(
            runtime,
            links=cast(Any, self.links),
            cluster=FakeCluster(self.lost),
            topic_of=lambda name, uid: cast(Any, self.topic),
            limits=ReplicaLimits(2500, 2.0, catch_up_bytes_per_second),
        )
        self.replicas.registered(REGISTRATION)
        self.version = 0

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            self.tasks.discard(done)
            if not done.cancelled() and (error := done.exception()) is not None:
                self.errors.append(error)

        task.add_done_callback(ended)

    def record(self, **meta: Any) -> Versioned[TopicRecord]:
        """The next version of the topic's record; what etcd has from now on."""
        self.version += 1
        meta.setdefault("replicas", (A, B, self.node))
        meta.setdefault("min_isr", 2)
        partition = PartitionMeta(version=self.version, **meta)
        record = TopicRecord("t", UID, 3, TopicSettings(), partitions={0: partition})
        versioned = Versioned(record, self.version)
        self.metadata.put(versioned)
        return versioned

    async def settle(self, record: Versioned[TopicRecord]) -> None:
        await self.replicas.settle(record)

    def leader(self, node: int) -> LeaderStream:
        return LeaderStream(self, node)

    @property
    def follower(self) -> Follower:
        return self.replicas.followers[KEY]


def log_of(*epochs: int, storage: Storage | None = None, limits: LogLimits | None = None) -> PartitionLog:
    """A leader's log: one batch of one message for each epoch that is named."""
    log = PartitionLog.create(
        storage or MemStorage(), "leader/0", LogIdentity(UID, 0), cache=BatchCache(), limits=limits
    )
    for epoch in epochs:
        add(log, epoch, b"m")
    return log


def add(log: PartitionLog, epoch: int, *bodies: bytes, durable: int = 0) -> Entry:
    """One batch more."""
    data = bytearray(b"".join(map(hot.frame, bodies)))
    timestamp_ns = log.next_timestamp(1000 * log.end.log_id)
    hot.stamp(data, 0, (3 << 30) + log.end.offset, timestamp_ns)
    return log.append(data, count=len(bodies), flags=0, timestamp_ns=timestamp_ns, epoch=epoch, durable=durable)


def copy_of(log: PartitionLog, end: int) -> PartitionLog:
    """Another log that has the same batches below `end`."""
    copy = log_of()
    for entry in log.entries(1, end):
        copy.append_copy(entry, log.read(entry))
    return copy


def serving(log: PartitionLog, epoch: int, committed: int = 0) -> Callable[[str, Any], Any]:
    """What a leader with this log answers."""
    from nsqha.commitlog import copying

    def answer(method: str, request: Any) -> Any:
        if request.epoch != epoch:
            raise Unavailable(f"not leading in epoch {request.epoch}")
        if method == "EpochEnd":
            found = copying.epoch_end(log, request.asked_epoch)
            return pb.EpochEndReply(epoch=found.epoch, end=found.end, chain=found.chain, start=log.start.log_id)
        ends: Any = {"committed": committed, "end": log.end.log_id, "end_position": log.end.position}
        if request.first < log.start.log_id:
            anchor = log.entry_before(log.start.log_id)
            return pb.FetchReply(anchor=anchor.encode(), **ends)
        if request.first >= log.end.log_id:
            return pb.FetchReply(**ends)
        batch = copying.read_run(log, request.first, request.end or log.end.log_id, request.max_bytes, lost=True)
        return pb.FetchReply(entries=batch.entries, data=batch.data, **ends)

    return answer


async def followed(rig: ReplicaRig, epoch: int = 1) -> tuple[Any, Any]:
    """A follower of A, in sync, and A's stream and log."""
    await rig.settle(rig.record(leader=A, epoch=epoch, isr={A: 5}))
    log = log_of()
    stream = rig.leader(A)
    opened = await stream.open(epoch, log)
    assert opened.DESCRIPTOR.name == "Opened" and not opened.behind
    return stream, log


def promised(rig: ReplicaRig) -> int:
    """What a start would find now."""
    found = [r for key, r in inspect(rig.storage, "data").partitions.items() if tuple(key) == KEY]
    return found[0].promise if found else 0


async def fit_to_lead(rig: ReplicaRig) -> int:
    """A replica with a log; the name of that log."""
    await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}))
    return rig.follower.log_uid
