"""The leader's side of forwarded publishes: they go into the local partition, and what came of them goes back.

A publish for a partition that is not led here is refused, never passed on; with it goes who leads, by the records as
they are known here. One that comes in the moment between the election of this node and the start of its epoch waits for
that, in order, for PARK_SECONDS at most: the sender would only ask again and again. Outcomes of one tick leave in one
message.

What is under way here for one other node is at most `forward_client.WINDOW_BYTES`, or one publish that is larger. The
sender keeps to it, and reads its clients no faster; one that does not loses its stream. It counts in this node's
`PublishBudget`, what waits here as well as what a partition has, so clients of this node are not read meanwhile; a node
that serves `n` others holds at most `n` windows more than its budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from nsqha import hot
from nsqha.errors import Unavailable
from nsqha.hot import NOT_STORED, OUTCOME_UNKNOWN
from nsqha.ids import PartitionKey
from nsqha.pb.v1 import routing_pb2
from nsqha.server.partition.partition import Partition
from nsqha.server.partition.topic import Topic
from nsqha.server.peers.api import PeerServer, PeerStream
from nsqha.server.routing import forward_client as forwarding
from nsqha.server.routing.hints import hint_of
from nsqha.server.routing.leaders import Leaders
from nsqha.server.runtime.budget import PublishBudget

DRAIN_SECONDS = 0.01
PARK_SECONDS = 0.5


def check_greeting(greeting: routing_pb2.Greeting, leaders: Leaders, stream: PeerStream) -> None:
    """Unavailable if the other side is not, or does not mean, who it should."""
    if greeting.cluster_id != leaders.cluster_id:
        raise Unavailable(f"this node does not belong to cluster {greeting.cluster_id:016x}")
    if greeting.target_uid != leaders.node:
        raise Unavailable(f"this is node {leaders.node:016x}, not {greeting.target_uid:016x}")
    if not stream.peer.may_be(greeting.node_uid, leaders.name_of(greeting.node_uid)):
        raise Unavailable(f"{stream.peer} may not speak for node {greeting.node_uid:016x}")


class ForwardedReply:
    """One publish of another node that waits for its outcome: a `Reply` of the partition."""

    __slots__ = ("key", "partition", "sequence", "stream", "topic")

    def __init__(
        self, stream: ForwardStream, sequence: int, partition: Partition, topic: str, key: PartitionKey
    ) -> None:
        self.stream = stream
        self.sequence = sequence
        self.partition = partition
        self.topic = topic
        self.key = key

    @property
    def source(self) -> object:
        """Its publishes keep their order, and have one share of a batch together."""
        return self.stream

    def stored(self) -> None:
        self.stream.stored(self.sequence)

    def failed(self, why: str) -> None:
        text = why.removeprefix(NOT_STORED).removeprefix(OUTCOME_UNKNOWN)
        if not why.startswith(NOT_STORED):
            self.stream.failed(self.sequence, routing_pb2.FORWARD_OUTCOME_UNKNOWN, text)
        elif self.partition.closed:
            self.stream.not_leader(self.sequence, text, self.topic, self.key)
        else:
            self.stream.failed(self.sequence, routing_pb2.FORWARD_OUTCOME_REFUSED, text)


class ForwardStream:
    """One node that forwards publishes to this one: a `StreamHandler`."""

    def __init__(self, service: ForwardService, stream: PeerStream) -> None:
        self._service = service
        self._stream = stream
        self._greeted = False
        self._answers = routing_pb2.ForwardReply()
        self._refused: dict[PartitionKey, str] = {}  # what `_answers` says is not led here: the topics' names
        self._scheduled = False
        self._sizes: dict[int, int] = {}  # of what is under way, by sequence
        self._bytes = 0  # of these
        self._parked: dict[str, dict[PartitionKey, list[routing_pb2.ForwardedPublish]]] = {}  # by topic

    def on_message(self, message: routing_pb2.ForwardRequest) -> None:
        if message.HasField("greeting"):
            check_greeting(message.greeting, self._service.leaders, self._stream)
            self._greeted = True
            mine = routing_pb2.Greeting(
                cluster_id=self._service.leaders.cluster_id,
                node_uid=self._service.leaders.node,
                target_uid=message.greeting.node_uid,
            )
            self._stream.send(routing_pb2.ForwardReply(greeting=mine))
        elif not self._greeted:
            raise Unavailable("a stream begins with a greeting")
        for publish in message.publishes:
            self._publish(publish)

    def _publish(self, publish: routing_pb2.ForwardedPublish) -> None:
        sequence, frames = publish.sequence, publish.frames
        size = len(frames)
        if self._sizes and self._bytes + size > forwarding.WINDOW_BYTES:
            raise ValueError(f"publish {sequence} to {publish.topic}: {self._bytes} bytes are under way already")
        self._sizes[sequence] = size
        self._bytes += size
        end, count = hot.walk(frames, 0, size, size)
        if not count or end != size:
            raise ValueError(f"publish {sequence} to {publish.topic} is not a run of message frames")
        self._service.forwarded += count
        key = (publish.key.topic_uid, publish.key.partition)
        partition = self._service.partition(*key, publish.topic)
        behind = key in self._parked.get(publish.topic, ())
        if behind or (partition is None and self._service.elected(*key, publish.topic)):
            self._park(key, publish)
        else:
            self._store(partition, publish)

    def _park(self, key: PartitionKey, publish: routing_pb2.ForwardedPublish) -> None:
        """It, and all that come after it, until this node leads or it has taken too long."""
        waiting = self._parked.setdefault(publish.topic, {})
        if key not in waiting:
            waiting[key] = []
            self._service.loop.call_later(PARK_SECONDS, self._unpark, publish.topic, key, waiting[key])
        waiting[key].append(publish)
        self._service.budget.take(len(publish.frames))

    def leaders_changed(self, topic: str) -> None:
        """This node may lead one of its partitions now, or is not to lead it any more."""
        service = self._service
        # Of this topic alone: where a thousand wait, each of them brings this up.
        for key, parked in list(self._parked.get(topic, {}).items()):
            if service.partition(*key, topic) or not service.elected(*key, topic):
                self._unpark(topic, key, parked)

    def _unpark(self, topic: str, key: PartitionKey, parked: list[routing_pb2.ForwardedPublish]) -> None:
        waiting = self._parked.get(topic, {})
        if waiting.get(key) is parked:
            del waiting[key]
            if not waiting:
                del self._parked[topic]
            for publish in parked:
                self._service.budget.give(len(publish.frames))  # a partition counts what it takes
                self._store(self._service.partition(*key, publish.topic), publish)

    def _store(self, partition: Partition | None, publish: routing_pb2.ForwardedPublish) -> None:
        sequence, frames = publish.sequence, publish.frames
        key = (publish.key.topic_uid, publish.key.partition)
        if partition is None:
            self.not_leader(sequence, f"{publish.topic}/{key[1]} is not led by this node", publish.topic, key)
            return
        refusal = self._service.refusal()
        if refusal is not None:
            self.failed(sequence, routing_pb2.FORWARD_OUTCOME_REFUSED, refusal)
            return
        delay_ms = publish.defer_ms if publish.HasField("defer_ms") else None
        reply = ForwardedReply(self, sequence, partition, publish.topic, key)
        partition.publish(frames, reply, delay_ms, waited=publish.waited_ms / 1000)

    # ---- outcomes

    def stored(self, sequence: int) -> None:
        self._bytes -= self._sizes.pop(sequence)
        self._answers.stored.append(sequence)
        self._schedule()

    def not_leader(self, sequence: int, why: str, topic: str, key: PartitionKey) -> None:
        self._refused[key] = topic
        self.failed(sequence, routing_pb2.FORWARD_OUTCOME_NOT_LEADER, why)

    def failed(self, sequence: int, outcome: routing_pb2.ForwardOutcome.ValueType, why: str) -> None:
        self._bytes -= self._sizes.pop(sequence)
        self._answers.failures.add(sequence=sequence, outcome=outcome, why=why)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._service.loop.call_soon(self._send)

    def _send(self) -> None:
        self._scheduled = False
        answers, self._answers = self._answers, routing_pb2.ForwardReply()
        refused, self._refused = self._refused, {}
        for key, topic in refused.items():
            if (hint := hint_of(self._service.leaders, topic, key)) is not None:
                answers.leaders.append(hint)
        self._stream.send(answers)

    @property
    def silent(self) -> bool:
        """Whether every publish was answered, and the answers have left."""
        return not self._sizes and not self._scheduled and not self._stream.pending

    def on_closed(self, why: str) -> None:
        """What is under way continues, and its outcome is not sent. What is parked is dropped: to the sender it is
        unknown."""
        for parked in [parked for waiting in self._parked.values() for parked in waiting.values()]:
            self._service.budget.give(sum(len(publish.frames) for publish in parked))
        self._parked.clear()
        self._service.streams.pop(self, None)


class ForwardService:
    """Takes publishes of other nodes."""

    def __init__(
        self,
        topics: Mapping[str, Topic],
        leaders: Leaders,
        *,
        loop: asyncio.AbstractEventLoop,
        budget: PublishBudget,
        refusal: Callable[[], str | None],
    ) -> None:
        """`budget`: the node's; `refusal`: why this node, which goes on leading, stores nothing now."""
        self.leaders = leaders
        self.loop = loop
        self.budget = budget
        self.refusal = refusal
        self.forwarded = 0  # messages that came from other nodes
        self.streams: dict[ForwardStream, None] = {}  # in the order in which they came
        self._topics = topics
        leaders.when_changed(self._leaders_changed)

    def register(self, server: PeerServer) -> None:
        server.on_stream("Forward", self._accept)

    def _accept(self, stream: PeerStream) -> ForwardStream:
        handler = ForwardStream(self, stream)
        self.streams[handler] = None
        return handler

    def _leaders_changed(self, topic: str) -> None:
        for stream in list(self.streams):
            stream.leaders_changed(topic)

    def elected(self, topic_uid: int, number: int, topic: str) -> bool:
        """Whether the record names this node as leader, which does not lead yet."""
        leader = self.leaders.recorded(topic, number)
        return leader is not None and leader.node == self.leaders.node and leader.topic_uid == topic_uid

    def partition(self, topic_uid: int, number: int, topic: str) -> Partition | None:
        """The partition, if this node leads it and takes publishes for it."""
        found = self._topics.get(topic)
        if found is None or found.deleting or found.record.uid != topic_uid:
            return None
        partition = found.leads(number)
        return None if partition is None or partition.closed else partition

    async def drain(self, seconds: float) -> None:
        """Let the answers leave that are owed: partitions are closed, streams are about to be. Waits no longer."""
        deadline = self.loop.time() + seconds
        while not all(stream.silent for stream in self.streams) and self.loop.time() < deadline:
            await asyncio.sleep(DRAIN_SECONDS)
