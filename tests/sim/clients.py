"""Publishers and consumers of a simulated cluster, and the history of what they were told.

A publisher asks any node, as plain V2 clients do; its message says who sent it and which one it is. A consumer looks
for a partition's leader, subscribes there, finishes most of what it gets, lets some time out, sends some back, and
looks anew when it is closed or served nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

from nsqha import hot, ids
from nsqha.errors import NsqhaError, OutcomeUnknown
from nsqha.server.partition.consumer_acks import ConsumerAcks
from nsqha.server.partition.delivery import Consumer

if TYPE_CHECKING:
    from nsqha.server.partition.partition import Partition
    from tests.sim.loop import NodeLoop, Scheduler
    from tests.sim.node import SimNode

RDY = 20
MSG_TIMEOUT_SECONDS = 2.0
LOOK_SECONDS = 0.3
HURRIED_PAUSE_SECONDS = 1.0
LASTING_SECONDS = (1.0, 4.0)  # files last for less
STUBBORN_ATTEMPTS = 5


class History:
    """What clients know."""

    def __init__(self) -> None:
        self.attempts: dict[bytes, str] = {}  # body -> topic
        self.acked: dict[bytes, float] = {}  # body -> when
        self.unknown: set[bytes] = set()
        self.failed: dict[bytes, str] = {}  # definitely not stored
        self.groups: list[list[bytes]] = []  # what was sent as one
        self.delivered: dict[tuple[str, str], Counter[bytes]] = {}  # (topic, channel) -> body -> times
        self.last: dict[tuple[str, str], dict[bytes, float]] = {}  # ... -> when it came last
        self.finished: dict[tuple[str, str], dict[bytes, float]] = {}  # ... -> when it was finished last

    def came(self, topic: str, channel: str, body: bytes, now: float) -> None:
        self.delivered.setdefault((topic, channel), Counter())[body] += 1
        self.last.setdefault((topic, channel), {})[body] = now

    def done(self, topic: str, channel: str, body: bytes, now: float) -> None:
        self.finished.setdefault((topic, channel), {})[body] = now


class Publisher:
    """One client that publishes, at a rate, through nodes that the seed picks: another one when a publish failed."""

    def __init__(
        self,
        name: str,
        topic: str,
        scheduler: Scheduler,
        client: NodeLoop,
        nodes: Sequence[SimNode],
        rng: random.Random,
        history: History,
        *,
        pause_seconds: float,
        body_bytes_max: int,
        delay_seconds: float,
        lasting: bool = False,
    ) -> None:
        """`lasting`: one publish of four is deferred for longer than files last."""
        self.name = name
        self.topic = topic
        self.sent = 0
        self.stopped = False
        self._scheduler = scheduler
        self._client = client
        self._nodes = nodes
        self._rng = rng
        self._history = history
        self._pause = pause_seconds
        self._size = body_bytes_max
        self._delay = delay_seconds
        self._lasting = lasting
        self._node = rng.choice(nodes)
        self._timer = client.call_later(rng.uniform(0, pause_seconds), self._next)

    def hurry(self) -> None:
        """Publish every second from now on: what waits for an acknowledgement does not wait for an attempt."""
        if self._pause > HURRIED_PAUSE_SECONDS:
            self._pause = HURRIED_PAUSE_SECONDS
            self._timer.cancel()
            self._next()

    def _next(self) -> None:
        if self.stopped:
            return
        rng = self._rng
        self._timer = self._client.call_later(rng.expovariate(1 / self._pause), self._next)
        if rng.random() < 0.1 or not self._node.joined:
            self._node = rng.choice(self._nodes)
        node = self._node
        if not node.joined:
            return
        bodies = []
        for _ in range(1 if rng.random() < 0.8 else rng.randint(2, 8)):
            self.sent += 1
            body = f"{self.name}-{self.sent}|".encode()
            body += b"." * int(self._size * rng.random() ** 4)
            bodies.append(body)
            self._history.attempts[body] = self.topic
        if len(bodies) > 1:
            self._history.groups.append(bodies)
        node.loop.call_later(rng.uniform(0.0001, 0.001), self._arrives, node, node.loop, bodies)

    def _arrives(self, node: SimNode, loop: NodeLoop, bodies: list[bytes]) -> None:
        loop.create_task(self._publish(node, loop, bodies))

    async def _publish(self, node: SimNode, loop: NodeLoop, bodies: list[bytes]) -> None:
        assert node.broker is not None
        frames = b"".join(map(hot.frame, bodies))
        history = self._history
        delay = self._deferred_ms()
        told: Callable[[], None]
        acked = False
        try:
            await node.broker.publishing.publish(self.topic, frames, deliver_in_ms=delay)
        except OutcomeUnknown:
            told = lambda: history.unknown.update(bodies)  # noqa: E731
        except NsqhaError as error:
            text = str(error)
            told = lambda: history.failed.update(dict.fromkeys(bodies, text))  # noqa: E731
        else:
            now = self._scheduler.now
            told = lambda: history.acked.update(dict.fromkeys(bodies, now))  # noqa: E731
            acked = True
        if not loop.dead:
            told()
            if not acked and node is self._node:
                self._node = self._rng.choice(self._nodes)

    def _deferred_ms(self) -> int | None:
        if self._lasting and self._rng.random() < 0.25:
            return round(1000 * self._rng.uniform(*LASTING_SECONDS))
        return round(1000 * self._delay * self._rng.random() ** 2) if self._rng.random() < 0.03 else None


class SimWire:
    """A consumer's socket."""

    def __init__(self, on_messages: Callable[[bytes], None]) -> None:
        self.writable = True
        self.closed = False
        self._on_messages = on_messages
        # What statistics show of a connection: of one that has not identified.
        self.connected_at = 0
        self.negotiation = SimpleNamespace(agreed=None, permissions=SimpleNamespace(state=None))
        self.transport = SimpleNamespace(remote_address="192.0.2.1:1", tls=None)
        self.session = SimpleNamespace(consuming=SimpleNamespace(state=3))
        self.publisher = SimpleNamespace(counts={})

    def send_messages(self, data: Any) -> None:
        if not self.closed:
            self._on_messages(bytes(data))

    def reply(self, frame: bytes) -> None:
        """A FIN or REQ that was passed on failed."""

    def close(self) -> None:
        self.closed = True
        self.writable = False


class Reader:
    """One client that consumes a channel: of one partition, wherever that is led, or of a topic, at any node."""

    def __init__(
        self,
        topic: str,
        number: int | None,
        channel: str,
        client: NodeLoop,
        nodes: Sequence[SimNode],
        rng: random.Random,
        history: History,
        *,
        delay_seconds: float,
        fails: bool,
        stubborn: bool = False,
        on_delivery: Callable[[SimNode, str, str, bytes, bytes, int, int], None],
    ) -> None:
        """`number` None: any node will do, which passes on what others lead.

        `fails`: one message of twelve, while it is not diligent. `stubborn`: one of two fails a few times,
        and comes again without any delay.
        `on_delivery(node, topic, channel, message id, body, epoch, attempts)` is called for every message that
        comes; the epoch is that of the leader that delivers it, 0 if that is another node."""
        self.topic = topic
        self.number = number
        self.channel = channel
        self.diligent = False  # finish everything at once
        self._client = client
        self._nodes = nodes
        self._rng = rng
        self._history = history
        self._on_delivery = on_delivery
        self._delay = delay_seconds
        self._fails = fails
        self._stubborn = stubborn
        self._node: SimNode | None = None
        self._loop: NodeLoop | None = None
        self._consumer: Consumer | None = None
        self._subscribing = False
        client.call_later(rng.uniform(0, LOOK_SECONDS), self._look)

    # ---- where

    def _look(self) -> None:
        self._client.call_later(self._rng.uniform(0.5, 1.5) * LOOK_SECONDS, self._look)
        loop, consumer, node = self._loop, self._consumer, self._node
        if loop is not None and loop.dead:
            self._forget()
        elif self._subscribing:
            return  # SUB may take long; another one beside it would leave a consumer behind that nobody ends
        elif consumer is not None and node is not None and loop is not None:
            if loop.frozen:
                return
            served = self.number is None or self.number in consumer.subscriptions
            if consumer.wire.writable and served and self._rng.random() > 0.01:
                return
            loop.call_soon(self._leave, node, consumer)
            self._forget()
        able = [n for n in self._nodes if n.joined and not n.frozen and (self.number is None or self._leads(n))]
        if not able:
            return
        leader = able[0] if self.number is not None else self._rng.choice(able)
        self._node, self._loop, self._subscribing = leader, leader.loop, True
        leader.loop.call_soon(self._arrive, leader, leader.loop)

    def _leads(self, node: SimNode) -> bool:
        replicas = node.replicas
        return replicas is not None and any(
            leadership.topic == self.topic and key[1] == self.number for key, leadership in replicas.leading.items()
        )

    def _forget(self) -> None:
        self._node = self._loop = self._consumer = None
        self._subscribing = False

    def _arrive(self, node: SimNode, loop: NodeLoop) -> None:
        loop.create_task(self._subscribe(node, loop))

    async def _subscribe(self, node: SimNode, loop: NodeLoop) -> None:
        assert node.broker is not None
        consumer: Consumer
        wire = SimWire(lambda data: self._came(node, loop, consumer, data))
        consumer = Consumer(
            wire, topic=self.topic, channel=self.channel, msg_timeout=MSG_TIMEOUT_SECONDS, sample_rate=0
        )
        try:
            await node.broker.subscriptions.subscribe(consumer)
        except NsqhaError:
            if self._loop is loop:
                self._forget()
            return
        if self._loop is not loop:
            self._leave(node, consumer)
            return
        self._subscribing = False
        self._consumer = consumer
        consumer.ready(RDY)

    def _leave(self, node: SimNode, consumer: Consumer) -> None:
        consumer.wire.close()
        if node.broker is not None:
            node.broker.subscriptions.unsubscribe(consumer)

    # ---- messages

    def _came(self, node: SimNode, loop: NodeLoop, consumer: Consumer, data: bytes) -> None:
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            attempts = int.from_bytes(data[at + 16 : at + 18], "big")
            message_id, body = data[at + 18 : at + 34], data[at + 34 : at + 4 + size]
            at += 4 + size
            self._history.came(self.topic, self.channel, body, loop.time())
            subscription = consumer.subscriptions.get(ids.partition_of(int(message_id, 16)))
            epoch = 0 if subscription is None else cast("Partition", subscription.delivery.partition).leader.epoch
            self._on_delivery(node, self.topic, self.channel, message_id, body, epoch, attempts)
            dice = 0.0 if self.diligent else self._rng.random()
            if self._fails and not self.diligent and crc32(body) % 12 == 0:
                dice = 0.93 + 0.07 * dice
            if self._stubborn and not self.diligent and crc32(body) % 2 and attempts <= STUBBORN_ATTEMPTS:
                loop.call_later(0.001, self._requeue, node, consumer, message_id, 0.0)
            elif dice < 0.93:
                loop.call_later(self._rng.expovariate(100), self._finish, node, consumer, message_id, body)
            elif dice < 0.96:
                loop.call_later(0.01, self._requeue, node, consumer, message_id)

    def _verdicts(self, node: SimNode, consumer: Consumer, refused: list[bytes]) -> ConsumerAcks:
        assert node.broker is not None
        return ConsumerAcks(consumer, refused.append, node.broker.now)

    def _finish(self, node: SimNode, consumer: Consumer, message_id: bytes, body: bytes) -> None:
        if consumer.wire.writable:
            refused: list[bytes] = []
            data = b"FIN %b\n" % message_id
            self._verdicts(node, consumer, refused).fin_run(data, 0, len(data), 1)
            if not refused:  # or nobody knows yet: its leader is elsewhere
                self._history.done(self.topic, self.channel, body, self._client.time())

    def _requeue(self, node: SimNode, consumer: Consumer, message_id: bytes, delay: float | None = None) -> None:
        if consumer.wire.writable:
            seconds = self._rng.uniform(0, self._delay) if delay is None else delay
            self._verdicts(node, consumer, []).req(message_id, round(1000 * seconds))
