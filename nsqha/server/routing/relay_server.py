"""The leader's side of relayed consumers: clients of other nodes, as consumers of a channel here.

A `RelayedConsumer` is a `Consumer` with one place, whose wire is the stream: what it has in flight is keyed by (stream,
number), and waits for another consumer as soon as the stream or the subscription ends. Its window is what its node
lends. Where clients connected here read the channel it stands by: it keeps what it has in flight and gets no more, so
nothing crosses the network that they can take. When their RDY is used up and messages wait, it is served beside them,
each as its RDY allows; when one of them has room again and nothing waits, it stands by again (once a second).

An ephemeral channel is made here when the first relayed consumer comes, and goes with the last consumer of any kind; a
durable one is in the topic's record, and a leader that has not heard of it yet reads the record.

Messages of one tick leave in one message per stream. A subscription has at most UNTAKEN_BYTES that its client's socket
has not taken, besides the last run; that bounds what waits in the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Protocol

from nsqha import ids
from nsqha.clock import Now
from nsqha.errors import NotFound, NsqhaError, Unavailable, WrongKind
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import routing_pb2
from nsqha.server.partition.consumer_acks import ConsumerAcks
from nsqha.server.partition.delivery import Consumer
from nsqha.server.partition.topic import Topic
from nsqha.server.peers.api import PeerServer, PeerStream
from nsqha.server.routing.forward_server import check_greeting
from nsqha.server.routing.hints import hint_of
from nsqha.server.routing.leaders import Leaders

UNTAKEN_BYTES = 1 << 20
MESSAGE_BYTES = 1 << 20
RETRY_SECONDS = 0.05
PLACE_SECONDS = 10.0  # a subscription that has no place after so long is closed, and tried again by its node

logger = Logger("relay")


class ChannelCreator(Protocol):
    """What the leader does about channels that it does not have yet."""

    async def ensure_here(self, topic: Topic, channel: str) -> None:
        """Bring the logs led here in line with what is wanted. NotFound: the record has no such channel.
        WrongKind: it is a reader's."""

    async def leave(self, topic: str, channel: str) -> None:
        """A consumer left it, perhaps the last one."""


class RelayWire:
    """A relayed consumer's socket: the stream."""

    def __init__(self, stream: RelayStream, number: int) -> None:
        self._stream = stream
        self._number = number
        self._untaken = 0  # bytes
        self._sent = 0
        self.writable = True
        self.closed = False

    def send_messages(self, data: Any) -> None:
        self._sent += len(data)
        self._untaken += len(data)
        if self._untaken >= UNTAKEN_BYTES:
            self.writable = False
        self._stream.messages(self._number, data)

    def taken(self, total: int) -> None:
        """The client's socket took this part of what was sent."""
        self._untaken = self._sent - total
        self.writable = self._untaken < UNTAKEN_BYTES and not self.closed

    def reply(self, data: bytes) -> None:
        self._stream.event(routing_pb2.RelayEvent(number=self._number, error=data))

    def close(self) -> None:
        """Channel or topic are gone."""
        self._stream.close_subscription(self._number, gone=True, why="deleted topic/channel")


class RelayedConsumer(Consumer):
    """A client of another node, at one partition led here."""

    wire: RelayWire
    relayed = True

    def __init__(self, stream: RelayStream, number: int, subscribe: routing_pb2.RelaySubscribe) -> None:
        super().__init__(
            RelayWire(stream, number),
            topic=subscribe.topic,
            channel=subscribe.channel,
            only=subscribe.key.partition,
            msg_timeout=subscribe.msg_timeout_ms / 1000,
            sample_rate=subscribe.sample_rate,
        )
        self.key = (subscribe.key.topic_uid, subscribe.key.partition)
        self.number = number
        self.client = subscribe.client if subscribe.HasField("client") else None
        self.pinned = subscribe.pinned
        self.beside = False  # clients connected here read the channel, too
        self.standby = False  # they can take all there is
        self.window = 0
        self.serial = 0
        self.acks = ConsumerAcks(self, self.wire.reply, stream.service.now)
        self.stream = stream
        self._sent_status: tuple[int, int, bool, bool] | None = None  # None: not accepted yet
        self._sent_in_flight = 0

    def dismiss(self) -> None:
        """Its node hears it, and does the rest."""
        self.wire.close()

    def set_window(self, size: int, serial: int) -> None:
        self.window, self.serial = size, serial
        self.rdy = 0 if self.standby else size
        self.wake()
        self.stream.look_at(self)

    def set_standby(self, standby: bool) -> None:
        """Clients connected here read the channel as well, or do not any more."""
        if standby != self.beside:
            self.beside = standby
            self._stand_by(standby)

    def _stand_by(self, standby: bool) -> None:
        if standby != self.standby:
            self.standby = standby
            self.rdy = 0 if standby else self.window
            for subscription in self.subscriptions.values():
                subscription.delivery.note_standby(self)
            self.wake()
            self.stream.look_at(self)

    def stand_by_again(self, now: Now) -> None:
        """Stand by if clients connected here have room again, and nothing waits."""
        if self.beside and not self.standby:
            places = [subscription.delivery for subscription in self.subscriptions.values()]
            if all(delivery.has_room_here() and not delivery.has_backlog(now) for delivery in places):
                self._stand_by(True)

    def attached(self) -> None:
        for subscription in self.subscriptions.values():
            subscription.delivery.note_standby(self)
        self.stream.look_at(self)

    def starved(self) -> None:
        self._stand_by(False)
        self.stream.look_at(self)

    def moved(self, why: str) -> None:
        self.stream.close_subscription(self.number, gone=False, why=why)

    def status(self, now: Now, *, figures: bool) -> routing_pb2.RelayStatus | None:
        """What its node should know; None if it does. `figures`: also if only a figure changed."""
        if not self.subscriptions:
            return None
        held = max(self.window, self.in_flight)
        full = self.in_flight >= self.rdy and not self.standby and self.wire.writable
        backlogged = full and any(
            subscription.delivery.has_backlog(now) for subscription in self.subscriptions.values()
        )
        status = (self.serial, held, backlogged, self.standby)
        # A window that is used up again and again is sent again: its node forgets after a while.
        if status == self._sent_status and not (figures and (backlogged or self.in_flight != self._sent_in_flight)):
            return None
        self._sent_status, self._sent_in_flight = status, self.in_flight
        return routing_pb2.RelayStatus(
            serial=self.serial, held=held, backlogged=backlogged, standby=self.standby, in_flight=self.in_flight
        )


class RelayStream:
    """One node whose clients are served from here: a `StreamHandler`."""

    def __init__(self, service: RelayService, stream: PeerStream) -> None:
        self.service = service
        self.consumers: dict[int, RelayedConsumer] = {}
        self.node = 0  # its uid
        self._stream = stream
        self._greeted = False
        self._runs: dict[int, list[Any]] = {}
        self._events: list[routing_pb2.RelayEvent] = []
        self._looking: dict[int, RelayedConsumer] = {}
        self._scheduled = False

    # ---- from the other node

    def on_message(self, message: routing_pb2.RelayRequest) -> None:
        if message.HasField("greeting"):
            check_greeting(message.greeting, self.service.leaders, self._stream)
            self._greeted = True
            self.node = message.greeting.node_uid
            leaders = self.service.leaders
            mine = routing_pb2.Greeting(
                cluster_id=leaders.cluster_id, node_uid=leaders.node, target_uid=message.greeting.node_uid
            )
            self._stream.send(routing_pb2.RelayReply(greeting=mine))
        elif not self._greeted:
            raise Unavailable("a stream begins with a greeting")
        for command in message.commands:
            self._run(command)

    def _run(self, command: routing_pb2.RelayCommand) -> None:
        what = command.WhichOneof("command")
        if what == "subscribe":
            self._subscribe(command.number, command.subscribe)
            return
        consumer = self.consumers.get(command.number)
        if consumer is None:
            return  # closed from here, and the other side hears of it
        match what:
            case "window":
                consumer.set_window(command.window.size, command.window.serial)
            case "finish":
                lines = command.finish
                consumer.acks.fin_run(lines, 0, len(lines), len(lines))
            case "requeue":
                consumer.acks.req(command.requeue.message_id, command.requeue.delay_ms)
            case "touch":
                consumer.acks.touch(command.touch)
            case "taken":
                consumer.wire.taken(command.taken)
                consumer.wake()
            case "unsubscribe":
                self._remove(command.number)
                return
        self.look_at(consumer)

    def _subscribe(self, number: int, subscribe: routing_pb2.RelaySubscribe) -> None:
        if number in self.consumers:
            raise ValueError(f"there is a subscription {number} already")
        if not (ids.valid_name(subscribe.channel) and ids.valid_name(subscribe.topic)):
            raise ValueError("a subscription to a name that is none")
        consumer = self.consumers[number] = RelayedConsumer(self, number, subscribe)
        topic = self.service.topic(subscribe)
        if topic is None:
            why = f"{subscribe.topic}/{subscribe.key.partition} is not led by this node"
            self.close_subscription(number, gone=False, why=why)
            return
        topic.attach(consumer)
        if not consumer.subscriptions:
            self.service.find_place(topic, consumer, self)

    def _remove(self, number: int) -> None:
        consumer = self.consumers.pop(number, None)
        self._runs.pop(number, None)
        self._looking.pop(number, None)
        if consumer is not None:
            consumer.wire.closed = True
            consumer.wire.writable = False
            self.service.detach(consumer)
            self.service.ended_count += consumer.message_count

    def close_subscription(self, number: int, *, gone: bool, why: str) -> None:
        """End it from here."""
        if number in self.consumers:
            consumer = self.consumers[number]
            self._remove(number)
            leader = None if gone else hint_of(self.service.leaders, consumer.topic, consumer.key)
            closed = routing_pb2.RelayClosed(gone=gone, why=why, leader=leader)
            self.event(routing_pb2.RelayEvent(number=number, closed=closed))

    def on_closed(self, why: str) -> None:
        self.service.streams.pop(self, None)
        for number in list(self.consumers):
            self._remove(number)

    # ---- to the other node

    def messages(self, number: int, data: Any) -> None:
        self._runs.setdefault(number, []).append(data)
        self._schedule()

    def event(self, event: routing_pb2.RelayEvent) -> None:
        self._events.append(event)
        self._schedule()

    def look_at(self, consumer: RelayedConsumer) -> None:
        """Its status may have changed: see at the end of the tick."""
        self._looking[consumer.number] = consumer
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.service.loop.call_soon(self._send)

    def _send(self, figures: bool = False) -> None:
        self._scheduled = False
        looking, self._looking = self._looking, {}
        now = self.service.now()
        for number, consumer in looking.items():
            status = consumer.status(now, figures=figures)
            if status is not None:
                self._events.append(routing_pb2.RelayEvent(number=number, status=status))
        runs, self._runs = self._runs, {}
        events, self._events = self._events, []
        reply = routing_pb2.RelayReply()
        room = MESSAGE_BYTES
        for number, pieces in runs.items():
            for data in joined(pieces, MESSAGE_BYTES):
                if reply.events and len(data) > room:
                    self._stream.send(reply)
                    reply, room = routing_pb2.RelayReply(), MESSAGE_BYTES
                reply.events.add(number=number, messages=data)
                room -= len(data)
        reply.events.extend(events)
        if reply.events:
            self._stream.send(reply)

    def tell_figures(self) -> None:
        """Once a second."""
        now = self.service.now()
        for consumer in self.consumers.values():
            consumer.stand_by_again(now)
        self._looking.update(self.consumers)
        self._send(figures=True)


def joined(pieces: Sequence[Any], bytes_max: int) -> Iterator[bytes]:
    """The pieces in order, as few as possible of at most `bytes_max`; a larger piece stays alone."""
    gathered: list[Any] = []
    size = 0
    for piece in pieces:
        if gathered and size + len(piece) > bytes_max:
            yield b"".join(gathered)
            gathered, size = [], 0
        gathered.append(piece)
        size += len(piece)
    if gathered:
        yield b"".join(gathered)


class RelayService:
    """Serves clients of other nodes."""

    def __init__(
        self,
        topics: Mapping[str, Topic],
        channels: ChannelCreator,
        leaders: Leaders,
        *,
        loop: asyncio.AbstractEventLoop,
        now: Callable[[], Now],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.leaders = leaders
        self.loop = loop
        self.now = now
        self.streams: dict[RelayStream, None] = {}  # in the order in which they came
        self._topics = topics
        self._channels = channels
        self._spawn = spawn
        self.ended_count = 0  # messages that consumers got which are gone

    @property
    def relayed(self) -> int:
        """Messages that consumers at other nodes got from here."""
        here = (consumer.message_count for stream in self.streams for consumer in stream.consumers.values())
        return self.ended_count + sum(here)

    def register(self, server: PeerServer) -> None:
        server.on_stream("Relay", self._accept)

    def _accept(self, stream: PeerStream) -> RelayStream:
        handler = RelayStream(self, stream)
        self.streams[handler] = None
        return handler

    def topic(self, subscribe: routing_pb2.RelaySubscribe) -> Topic | None:
        """The topic, if this node leads the partition."""
        found = self._topics.get(subscribe.topic)
        if found is None or found.deleting or found.record.uid != subscribe.key.topic_uid:
            return None
        return found if found.leads(subscribe.key.partition) is not None else None

    def find_place(self, topic: Topic, consumer: RelayedConsumer, stream: RelayStream) -> None:
        """The channel is not here yet, or the partition's epoch has only begun."""
        self._spawn(self._find_place(topic, consumer, stream))

    async def _find_place(self, topic: Topic, consumer: RelayedConsumer, stream: RelayStream) -> None:
        deadline = self.loop.time() + PLACE_SECONDS
        why = "the leader has only just been elected"
        while not consumer.subscriptions and not consumer.wire.closed:
            try:
                await self._channels.ensure_here(topic, consumer.channel)
            except (NotFound, WrongKind) as error:
                stream.close_subscription(consumer.number, gone=True, why=str(error))
                return
            except NsqhaError as error:
                why = str(error)
            if consumer.subscriptions or consumer.wire.closed:
                return
            if self.loop.time() > deadline:
                stream.close_subscription(consumer.number, gone=False, why=why)
                return
            await asyncio.sleep(RETRY_SECONDS)

    def detach(self, consumer: RelayedConsumer) -> None:
        topic = self._topics.get(consumer.topic)
        if topic is None:
            return
        last = topic.detach(consumer, self.now())
        if last and ids.is_ephemeral(consumer.channel) and not topic.deleting:
            self._spawn(self._channels.leave(consumer.topic, consumer.channel))

    def tell_figures(self) -> None:
        """About once a second: so late may a status be that says nothing new but a figure."""
        for stream in self.streams:  # one that a send ends hears of that, and leaves them, later: `StreamHandler`
            stream.tell_figures()
