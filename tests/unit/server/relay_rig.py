"""Nodes with real topics, partitions and deliveries that relay for each other over the simulated network."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from nsqha import hot, ids
from nsqha.clock import Now, read
from nsqha.commitlog.idle_turns import IdleTurns
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.reading.lookup import LogIdentity
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.retention import Retention
from nsqha.commitlog.storage import MemStorage
from nsqha.cursor.committed.state import PartitionState
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.partition import PartitionCursors
from nsqha.election.model import ChannelInfo, ChannelList, TopicRecord, Versioned
from nsqha.errors import NotFound
from nsqha.replication.leader import LeaderReplica
from nsqha.replication.pauses import ProcessPause
from nsqha.server.http.stats import ClientStats
from nsqha.server.partition.consumer_acks import ConsumerAcks
from nsqha.server.partition.context import LedLog, PartitionRuntime
from nsqha.server.partition.delivery import Consumer, Delivery, Sub
from nsqha.server.partition.partition import Partition
from nsqha.server.partition.retention import AbandonedPolicy, RetentionRunner
from nsqha.server.partition.topic import Topic
from nsqha.server.routing.relay_client import Relaying
from nsqha.server.routing.relay_server import RelayService
from nsqha.server.runtime.budget import PublishBudget
from nsqha.server.runtime.measures import Measures
from nsqha.server.topics.channel_list import wrong_kind
from tests.fakes.disk import FakeDisk
from tests.fakes.partitions import TOPIC_UID, FakeLeaders
from tests.sim.net import Network
from tests.unit.server.routing_rig import Nodes
from tests.unit.server.shell_rig import FakeWire, Outcome


class Store:
    """The metadata record, and the logs, that nodes hand on."""

    def __init__(self) -> None:
        self.record = TopicRecord("t", TOPIC_UID, 3, channels=self.channels(1, "c"))
        self.logs: dict[int, tuple[PartitionLog, PartitionState, int]] = {}

    @staticmethod
    def channels(version: int, *names: str) -> ChannelList:
        return ChannelList(version, False, {n: ChannelInfo(uid, paused=False) for uid, n in enumerate(names, 100)})

    def take(self, number: int) -> tuple[PartitionLog, PartitionState, int]:
        if number not in self.logs:
            identity = LogIdentity(TOPIC_UID, number)
            log = PartitionLog.create(MemStorage(), f"t/{number}", identity, cache=BatchCache(), limits=LogLimits())
            self.logs[number] = log, PartitionState(), 1
        return self.logs[number]


class Client(FakeWire):
    """A client's socket; what it does, as `Connection` does it."""

    def __init__(self, node: RelayNode, consumer_of: Any) -> None:
        super().__init__()
        self.node = node
        self.errors: list[bytes] = []
        self.most_in_flight = 0
        self.rdy = 0
        self.finished: set[bytes] = set()
        self.auto = False
        self.delay = 0.0
        self.consumer: Consumer = consumer_of(self)
        self.verdicts = ConsumerAcks(self.consumer, self.reply, node.now)

    def send_messages(self, data: Any) -> None:
        super().send_messages(data)
        if self.closed:
            return
        self.most_in_flight = max(self.most_in_flight, len(self.unanswered))
        if self.auto:
            self.node.loop.call_later(self.delay, self.fin_all)

    @property
    def ids(self) -> list[bytes]:
        return [message_id for message_id, _, _ in self.messages]

    @property
    def unanswered(self) -> list[bytes]:
        return [message_id for message_id in self.ids if message_id not in self.finished]

    def reply(self, data: bytes) -> None:
        self.errors.append(data[8:])

    def ready(self, count: int) -> None:
        self.rdy = count
        self.consumer.ready(count)

    def fin(self, *message_ids: bytes) -> None:
        data = b"".join(b"FIN %b\n" % message_id for message_id in message_ids)
        self.finished.update(message_ids)
        self.verdicts.fin_run(data, 0, len(data), len(data))

    def fin_all(self) -> None:
        if not self.closed:
            self.fin(*self.unanswered)

    def leave(self) -> None:
        self.closed = True
        self.writable = False
        self.node.relaying.detach(self.consumer)
        topic = self.node.topics["t"]
        topic.detach(self.consumer, self.node.now())


class RelayNode:
    """A node as far as consumers are concerned."""

    store: Store

    def __init__(self, net: Network, number: int) -> None:
        self.loop: Any = asyncio.get_running_loop()
        self.clock = self.loop.clock
        self.failures: list[BaseException] = []
        self.disk = FakeDisk(self.loop, self.failures.append, seconds=0.0)
        self.number = number
        self.rng = random.Random(number)
        self.leaders = FakeLeaders(number)
        self.peers = net.peers(f"n{number}")
        self.server = net.server(f"n{number}")
        self.budget = PublishBudget(self.loop, 1 << 20)
        self.topics = {"t": Topic(Versioned(self.store.record, 1), (), self._delivery)}
        self.tasks: set[asyncio.Task[None]] = set()
        self.service = RelayService(self.topics, self, self.leaders, loop=self.loop, now=self.now, spawn=self.spawn)
        self._keep_house()
        self.service.register(self.server)
        self.leaders.hear(self.peers, self.server, 4)
        self.relaying = Relaying(
            self.topics, self.leaders, self.peers, loop=self.loop, now=self.now, describe=self._describe
        )

    def _describe(self, consumer: Consumer) -> ClientStats:
        return ClientStats(
            client_id="me", hostname=f"h{self.number}", remote_address="10.0.0.9:5", state=3, connect_ts=7
        )

    def now(self) -> Now:
        return read(self.clock)

    @property
    def topic(self) -> Topic:
        return self.topics["t"]

    def spawn(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _delivery(self, partition: Partition, channel: Any) -> Delivery:
        return Delivery(partition, channel, self.rng, None)

    # ---- what `Channels` does for the relay

    async def ensure_here(self, topic: Topic, channel: str) -> None:
        topic.versioned = Versioned(self.store.record, topic.versioned.version + 1)
        if ids.is_ephemeral(channel):
            for partition in topic.led:
                partition.cursors.requests.create_ephemeral(channel, ids.new_uid(self.rng))
        elif channel not in topic.record.channels.channels:
            raise NotFound("deleted topic/channel")
        await topic.reconcile()
        if topic.is_reader(channel):
            raise wrong_kind(topic.name, channel, reader=True)

    async def leave(self, topic: str, channel: str) -> None:
        found = self.topics[topic]
        if not found.consumers.reads(channel):
            with found.leaves(channel):
                for partition in found.led:
                    partition.cursors.requests.delete_ephemeral(channel)
                await found.commit_events()

    # ---- leading

    def lead(self, number: int = 0) -> Partition:
        log, state, epoch = self.store.take(number)
        runtime = PartitionRuntime(
            loop=self.loop,
            clock=self.clock,  # type: ignore[arg-type]
            disk=self.disk,  # type: ignore[arg-type]
            measures=Measures(),
            pause=ProcessPause(),
            budget=self.budget,
            on_failure=lambda error: None,
            wait_seconds_max=5,
            written_seconds_max=30,
            sync_every=2500,
            sync_seconds=2,
            turns=IdleTurns(),
        )
        base = ids.id_base(number, 3)
        partition = Partition(
            runtime,
            LedLog(
                number,
                base,
                log,
                PartitionCursors(id_base=base, state=state, limits=ChannelLimits()),
                LeaderReplica(
                    node=self.number, epoch=epoch, isr=(self.number,), min_isr=1, sync_always=False,
                    end=log.end.log_id, durable=log.local_durable,
                ),
            ),
            retention=RetentionRunner(
                Retention(keep_ns=0, keep_bytes=0), AbandonedPolicy(), Measures().retention_removed
            ),
            sync="none",
            memory=None,
        )  # fmt: skip
        self.topic.add_led(partition)
        started = partition.start_epoch(self.store.record.channels)
        started.add_done_callback(lambda done: done.cancelled() or done.exception())
        return partition

    def step_down(self, number: int = 0) -> None:
        partition = self.topic.leads(number)
        assert partition is not None
        self.topic.remove_led(partition, "another leader was elected")
        partition.abandon("another leader was elected")
        self.store.logs[number] = partition.log, partition.cursors.state, partition.leader.epoch + 1
        self.leaders.tell("t")

    def publish(self, *bodies: bytes, number: int = 0) -> Outcome:
        partition = self.topic.leads(number)
        assert partition is not None
        outcome = Outcome()
        partition.publish(b"".join(map(hot.frame, bodies)), outcome)
        return outcome

    # ---- clients

    def subscribe(self, channel: str = "c", *, rdy: int = 0, timeout: float = 60.0, only: int | None = None) -> Client:
        def consumer_of(wire: Any) -> Consumer:
            return Consumer(wire, topic="t", channel=channel, msg_timeout=timeout, sample_rate=0, only=only)

        client = Client(self, consumer_of)
        client.consumer.direct, client.consumer.sub = bool(self.topic.led), Sub.ANSWERED
        self.topic.attach(client.consumer)
        self.relaying.attach(client.consumer)
        client.ready(rdy)
        return client

    def _keep_house(self) -> None:
        self.service.tell_figures()
        self._housekeeping = self.loop.call_later(1.0, self._keep_house)

    async def stop(self) -> None:
        self._housekeeping.cancel()
        for partition in self.topic.led:
            partition.abandon("stopped")
        self.relaying.close()
        self.leaders.close()
        for task in list(self.tasks):
            task.cancel()
        await self.peers.close()
        self.server.close()


class RelayNodes(Nodes):
    """`elect` makes a node the leader, as everybody comes to know."""

    def __init__(self, count: int = 2, seed: int = 1, partitions: int = 1) -> None:
        super().__init__(count, seed, self._make_node)
        self.store = Store()
        self.partitions = partitions

    def _make_node(self, net: Network, number: int) -> RelayNode:
        kind = type("Node", (RelayNode,), {"store": self.store})
        node: RelayNode = kind(net, number)
        for partition in range(self.partitions):
            node.leaders.appoint("t", partition, None)
        return node

    def make(self, number: int) -> RelayNode:
        """Another process of a node."""
        return self._make_node(self.net, number)

    def elect(self, node: int, number: int = 0) -> None:
        for each in self.all.values():
            if each.number != node and each.topic.leads(number) is not None:
                each.step_down(number)
        self.all[node].lead(number)
        epoch = self.store.take(number)[2]
        self.appoint("t", number, node, epoch)

    async def relayed(self, channel: str = "c", *, rdy: int, timeout: float = 60.0) -> Client:
        """A client of node 1 with all of its window lent to node 2, which leads."""
        self.elect(2)
        client: Client = self.all[1].subscribe(channel, rdy=rdy, timeout=timeout)
        await until(lambda: client.consumer.lent_credit == rdy)
        return client


async def until(condition: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
