"""Consumers of this node that read partitions which other nodes lead.

    socket -- Consumer --+-- Subscription --> Delivery                                     partitions led here
                         +-- RemoteSubscriptions -- RemoteSubscription -- RelayLink --Relay stream--> RelayService

Each partition of the topic that is not led here gets a `RemoteSubscription` at its leader, which has the client
as a consumer of its channel like any other. Messages come as whole frames and are written to the socket as they are;
runs of FIN lines go back as they came. The leader owns time-outs, and takes back what is in flight when the stream or
the subscription ends. When the leader changes, or registers anew, the subscription is opened at the next one; a late
FIN then fails as with nsqd.

A leader that has consumers of its own for the channel serves only those until their RDY is used up (`standby`), and
says when that changes.

The RDY window is shared out as `nsqha.server.routing.rdy_credit` says. It is looked at again when RDY changes, when a
leader says what it holds or that it is backlogged, and, as long as one of them is, every ROTATE_SECONDS.

Who stays and who goes: a client that subscribed here while this node led a partition of the topic may have been sent by
lookup; its connection ends when a partition that served it leaves, so that it looks up again. All others have this
node as their fixed address: for them a change of leader is a pause.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nsqha import hot, ids
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2, routing_pb2
from nsqha.server.partition.delivery import NO_REMOTE
from nsqha.server.routing.hints import from_wire
from nsqha.server.routing.leaders import LeaderAt, Leaders, is_another
from nsqha.server.routing.rdy_credit import LentCredit, shares
from nsqha.server.routing.relayed_clients import to_wire

if TYPE_CHECKING:
    from nsqha.clock import Now
    from nsqha.server.http.stats import ClientStats
    from nsqha.server.partition.delivery import Consumer, Subscription
    from nsqha.server.partition.topic import Topic
    from nsqha.server.peers.api import Peers, PeerStream

RETRY_SECONDS = 0.05
ROTATE_SECONDS = 0.1
BACKLOGGED_SECONDS = 1.5  # who was backlogged counts as backlogged for so long; a leader repeats it every second
TAKEN_BYTES = 256 << 10  # the leader hears of bytes that the client took in such steps
GREETING_SECONDS = 1.0

_FIN_ERROR = b"E_FIN_FAILED"
_REQ_ERROR = b"E_REQ_FAILED"

logger = Logger("relay")


class RelayLink:
    """The Relay stream to one node: a `StreamHandler`. It ends with its stream; the next one is another object."""

    def __init__(self, relaying: Relaying, peers: Peers, leader: LeaderAt, greeting: routing_pb2.Greeting) -> None:
        self.node = leader.node
        self.address = leader.peer_address
        self.ended = False
        self.subscriptions: dict[int, RemoteSubscription] = {}
        self._relaying = relaying
        self._loop = relaying.loop
        self._registration = relaying.leaders.registration(leader.node)
        self._greeted = False
        self._commands: list[routing_pb2.RelayCommand] = []  # not sent
        self._scheduled = False
        self._stream: PeerStream = peers.stream(leader.peer_address, "Relay", self)
        self._stream.send(routing_pb2.RelayRequest(greeting=greeting))
        self._patience = self._loop.call_later(GREETING_SECONDS, self._waited)

    def add(self, subscription: RemoteSubscription, subscribe: routing_pb2.RelaySubscribe) -> int:
        """Begin a subscription; its number."""
        number = self._relaying.next_number()
        self.subscriptions[number] = subscription
        self.send(routing_pb2.RelayCommand(number=number, subscribe=subscribe))
        return number

    def remove(self, number: int) -> None:
        """End a subscription: what it has in flight waits for another consumer."""
        if self.subscriptions.pop(number, None) is not None:
            self.send(routing_pb2.RelayCommand(number=number, unsubscribe=True))
        if not self.subscriptions:
            self._loop.call_soon(self._close_if_unused)

    def send(self, command: routing_pb2.RelayCommand) -> None:
        """Send it at the end of the tick."""
        if self.ended:
            return
        self._commands.append(command)
        self._schedule()

    def _schedule(self) -> None:
        if self._greeted and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._scheduled = False
        commands, self._commands = self._commands, []
        if commands and not self.ended:
            self._stream.send(routing_pb2.RelayRequest(commands=commands))

    def on_message(self, message: routing_pb2.RelayReply) -> None:
        if message.HasField("greeting"):
            self._greeted = True
            self._patience.cancel()
            self._schedule()
        for event in message.events:
            subscription = self.subscriptions.get(event.number)
            if subscription is None:
                continue  # it was unsubscribed meanwhile
            match event.WhichOneof("event"):
                case "messages":
                    subscription.messages(event.messages)
                case "error":
                    subscription.error(event.error)
                case "status":
                    subscription.status(event.status)
                case "closed":
                    del self.subscriptions[event.number]
                    subscription.closed(event.closed)

    def on_closed(self, why: str) -> None:
        self._end(why)

    def leaders_changed(self) -> None:
        """Its node may have registered anew: a host that lost its power ends no stream."""
        if is_another(self._relaying.leaders.registration(self.node), self._registration):
            self.close("it has registered anew")

    def _waited(self) -> None:
        self.close("no answer")

    def _close_if_unused(self) -> None:
        if not self.subscriptions:
            self._send()
            self.close("it serves no consumer any more")

    def close(self, why: str) -> None:
        self._end(why)
        self._stream.close(why)

    def _end(self, why: str) -> None:
        if self.ended:
            return
        self.ended = True
        self._patience.cancel()
        self._relaying.link_ended(self)
        subscriptions, self.subscriptions = self.subscriptions, {}
        if subscriptions:
            logger.info("relay_ended", "%d subscriptions at %s: %s", len(subscriptions), self.address, why)
        for subscription in subscriptions.values():
            subscription.lost()


class RemoteSubscription:
    """A consumer's place at one partition that another node leads."""

    def __init__(self, places: RemoteSubscriptions, number: int) -> None:
        self.partition = number
        self.credit = LentCredit()
        self.accepted = False  # the leader has the consumer
        self.standby = False
        self.backlogged_until = 0.0
        self.in_flight = 0  # as last heard
        self._places = places
        self._link: RelayLink | None = None
        self._leader: LeaderAt | None = None
        self._subscription = 0
        self._received = 0  # bytes
        self._taken = 0  # of them, as the leader knows
        # The two lowest of the 16 bits that the first four digits are do not belong to the partition.
        prefixes = b"|".join(b"%04x" % (number << 2 | low) for low in range(4))
        self._fins = re.compile(rb"(?:FIN (?:%b)[0-9a-f]{12}\n)*+" % prefixes)

    # ---- its leader

    @property
    def open(self) -> bool:
        return self._link is not None

    def seek(self) -> None:
        """Have it open at the node that leads now; does nothing if it is, or if no leader is known."""
        places = self._places
        leader = places.relaying.leader(places.consumer.topic, self.partition)
        if self._link is not None:
            if leader is None or leader == self._leader:
                return
            self.end()
        if leader is None:
            places.not_led(self.partition)
            return
        self._leader = leader
        self._link = places.relaying.link(leader)
        self._subscription = self._link.add(self, places.subscribe(leader, self.partition))

    def end(self) -> None:
        """Read nothing more from there."""
        link, self._link = self._link, None
        if link is not None:
            link.remove(self._subscription)
        self._forget()

    def lost(self) -> None:
        """The stream ended."""
        self._lost(None)

    def closed(self, closed: routing_pb2.RelayClosed) -> None:
        if closed.gone:
            self._link = None
            self._forget()
            self._places.consumer.dismiss()
        else:
            self._lost(from_wire(closed.leader) if closed.HasField("leader") else None)

    def _lost(self, hint: LeaderAt | None) -> None:
        assert self._leader is not None, "it was open"
        self._link = None
        self._forget()
        self._places.not_led(self.partition, by=self._leader.node, hint=hint)
        self._places.lost()

    def _forget(self) -> None:
        self.accepted = self.standby = False
        self.in_flight = self._received = self._taken = 0
        self.backlogged_until = 0.0
        self.credit = LentCredit()

    # ---- from the leader

    def messages(self, frames: bytes) -> None:
        end, count = hot.walk(frames, 0, len(frames), len(frames))
        if end != len(frames):
            raise ValueError(f"{len(frames)} bytes for {self._places.consumer.topic} are not whole messages")
        consumer = self._places.consumer
        consumer.message_count += count
        consumer.wire.send_messages(frames)
        self._received += len(frames)
        if consumer.wire.writable and self._received - self._taken >= TAKEN_BYTES:
            self.resumed()

    def resumed(self) -> None:
        """The client takes bytes."""
        if self._link is not None and self._taken != self._received:
            self._taken = self._received
            self._send(routing_pb2.RelayCommand(taken=self._taken))

    def error(self, frame: bytes) -> None:
        """FIN, REQ or TOUCH failed."""
        consumer = self._places.consumer
        if frame.startswith(_FIN_ERROR, 8):
            consumer.finish_count -= 1
        elif frame.startswith(_REQ_ERROR, 8):
            consumer.requeue_count -= 1
        consumer.wire.reply(frame)

    def status(self, status: routing_pb2.RelayStatus) -> None:
        self.accepted = True
        self.credit.heard(status.serial, status.held)
        self.in_flight = status.in_flight
        self.standby = status.standby
        if status.backlogged:
            self.backlogged_until = self._places.relaying.loop.time() + BACKLOGGED_SECONDS
        self._places.balance()

    # ---- to the leader

    def lend(self, size: int) -> None:
        serial = self.credit.set(size)
        self._send(routing_pb2.RelayCommand(window=routing_pb2.RelayWindow(size=size, serial=serial)))

    def fin_run(self, data: bytes, pos: int, end: int) -> int:
        match = self._fins.match(data, pos, end)
        assert match is not None, "it matches nothing, too"
        stop = match.end()
        if stop != pos and self._link is not None:
            self._places.consumer.finish_count += (stop - pos) // 21
            self._send(routing_pb2.RelayCommand(finish=data[pos:stop]))
            return stop
        return pos

    def req(self, message_id: bytes, delay_ms: int) -> bool:
        requeue = routing_pb2.RelayRequeue(message_id=message_id, delay_ms=delay_ms)
        sent = self._send(routing_pb2.RelayCommand(requeue=requeue))
        self._places.consumer.requeue_count += sent
        return sent

    def touch(self, message_id: bytes) -> bool:
        return self._send(routing_pb2.RelayCommand(touch=message_id))

    def _send(self, command: routing_pb2.RelayCommand) -> bool:
        if self._link is None:
            return False
        command.number = self._subscription
        self._link.send(command)
        return True


class RemoteSubscriptions:
    """A consumer's places at partitions led elsewhere, and its window's parts: what `Consumer.remote` is."""

    def __init__(self, relaying: Relaying, consumer: Consumer) -> None:
        self.relaying = relaying
        self.consumer = consumer
        self.subscriptions: dict[int, RemoteSubscription] = {}
        self._connection = relaying.next_number()
        self._turn = 0
        self._backlogged_here = 0.0  # until
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    def subscribe(self, leader: LeaderAt, number: int) -> routing_pb2.RelaySubscribe:
        consumer = self.consumer
        return routing_pb2.RelaySubscribe(
            key=replication_pb2.PartitionKey(topic_uid=leader.topic_uid, partition=number),
            topic=consumer.topic,
            channel=consumer.channel,
            msg_timeout_ms=round(consumer.msg_timeout * 1000),
            sample_rate=consumer.sample_rate,
            client=to_wire(self.relaying.describe(consumer), self._connection),
            pinned=consumer.only is not None,
        )

    def follow(self, partitions: int, led: set[int]) -> None:
        """Read all partitions that are not led here from their leaders."""
        if self._ended:
            return
        for number in [n for n in self.subscriptions if n in led or n >= partitions]:
            self.subscriptions.pop(number).end()
        for number in range(partitions):
            if number not in led and self.consumer.reads(number):
                subscription = self.subscriptions.get(number)
                if subscription is None:
                    subscription = self.subscriptions[number] = RemoteSubscription(self, number)
                subscription.seek()
        self.balance()

    @property
    def missing(self) -> list[int]:
        """Partitions whose leader is known and does not have this consumer yet."""
        topic, relaying = self.consumer.topic, self.relaying
        return [
            n
            for n, subscription in self.subscriptions.items()
            if not subscription.accepted and relaying.leader(topic, n) is not None
        ]

    def not_led(self, number: int, *, by: int = 0, hint: LeaderAt | None = None) -> None:
        """As `Leaders.not_led`; looks again in a moment if others are asked."""
        if self.relaying.leaders.not_led(self.consumer.topic, number, by=by, hint=hint):
            self.relaying.seek_later(self.consumer.topic)

    def lost(self) -> None:
        """A leader is gone: its part of the window is free."""
        self.balance()
        self.relaying.seek_later(self.consumer.topic)

    def end(self) -> None:
        """The client is gone."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        subscriptions, self.subscriptions = self.subscriptions, {}
        for subscription in subscriptions.values():
            subscription.end()
        self.consumer.lent_credit = 0

    # ---- the window

    @property
    def in_flight(self) -> int:
        return sum(subscription.in_flight for subscription in self.subscriptions.values())

    def starved(self) -> None:
        """A partition here has messages perhaps, and no room."""
        now = self.relaying.loop.time()
        if now >= self._backlogged_here and any(
            subscription.delivery.has_backlog(self.relaying.now()) for subscription in self._here()
        ):
            self._backlogged_here = now + BACKLOGGED_SECONDS
            self.relaying.loop.call_soon(self.balance)

    def _here(self) -> list[Subscription]:
        return list(self.consumer.subscriptions.values())

    def balance(self) -> None:
        """Lend what should be lent, take back what should not."""
        if self._ended:
            return
        now, consumer = self.relaying.loop.time(), self.consumer
        subscriptions = [
            subscription
            for subscription in self.subscriptions.values()
            if subscription.accepted and not subscription.standby
        ]
        here = bool(consumer.subscriptions)
        backlogged = [subscription.backlogged_until > now for subscription in subscriptions]
        parts = shares(consumer.rdy, [*backlogged, self._backlogged_here > now] if here else backlogged, self._turn)
        mine = parts.pop() if here else 0
        wanted = dict(zip(subscriptions, parts, strict=True))
        for subscription in self.subscriptions.values():
            size = wanted.get(subscription, 0)
            if subscription.accepted and size < subscription.credit.size:
                subscription.lend(size)
        lent = sum(subscription.credit.held for subscription in self.subscriptions.values())
        free = consumer.rdy - lent - max(consumer.in_flight, mine)
        for subscription, size in wanted.items():
            more = min(size, subscription.credit.held + max(free, 0))
            if more > subscription.credit.size:
                held = subscription.credit.held
                subscription.lend(more)
                free -= subscription.credit.held - held
        before, consumer.lent_credit = (
            consumer.lent_credit,
            sum(subscription.credit.held for subscription in self.subscriptions.values()),
        )
        if consumer.lent_credit < before and here:
            consumer.wake()
        if self._timer is None and (any(backlogged) or self._backlogged_here > now) and len(parts) + here > 1:
            self._timer = self.relaying.loop.call_later(ROTATE_SECONDS, self._rotate)

    def _rotate(self) -> None:
        self._timer = None
        self._turn += 1
        self.balance()

    # ---- for the connection

    def resumed(self) -> None:
        for subscription in self.subscriptions.values():
            subscription.resumed()

    def fin_run(self, data: bytes, pos: int, end: int) -> int:
        subscription = self._subscription_of(data[pos + 4 : pos + 20])
        return pos if subscription is None else subscription.fin_run(data, pos, end)

    def req(self, message_id: bytes, delay_ms: int) -> bool:
        subscription = self._subscription_of(message_id)
        return subscription is not None and subscription.req(message_id, delay_ms)

    def touch(self, message_id: bytes) -> bool:
        subscription = self._subscription_of(message_id)
        return subscription is not None and subscription.touch(message_id)

    def _subscription_of(self, message_id: bytes) -> RemoteSubscription | None:
        number = ids.parse_message_id(message_id)
        return None if number is None else self.subscriptions.get(ids.partition_of(number))


class Relaying:
    """All consumers of one node that read from others, and the links that they use."""

    def __init__(
        self,
        topics: Mapping[str, Topic],
        leaders: Leaders,
        peers: Peers,
        *,
        loop: asyncio.AbstractEventLoop,
        now: Callable[[], Now],
        describe: Callable[[Consumer], ClientStats],
    ) -> None:
        self.loop = loop
        self.now = now
        self.describe = describe
        self._topics = topics
        self.leaders = leaders
        self._peers = peers
        self._links: dict[int, RelayLink] = {}
        self._places: dict[str, dict[RemoteSubscriptions, None]] = {}  # by topic, in the order in which they came
        self._looking: set[str] = set()  # topics to look at again in a moment
        self._numbers = 0
        self._closed = False
        self._unwatch = leaders.when_changed(self._changed)

    # ---- consumers

    def attach(self, consumer: Consumer) -> RemoteSubscriptions:
        """Have this consumer read the partitions that others lead."""
        places = RemoteSubscriptions(self, consumer)
        consumer.remote = places
        self._places.setdefault(consumer.topic, {})[places] = None
        self._follow(places)
        return places

    def detach(self, consumer: Consumer) -> None:
        """The client is gone."""
        places = consumer.remote
        if isinstance(places, RemoteSubscriptions):
            consumer.remote = NO_REMOTE
            places.end()
            found = self._places.get(consumer.topic, {})
            found.pop(places, None)
            if not found:
                self._places.pop(consumer.topic, None)

    def _follow(self, places: RemoteSubscriptions) -> None:
        topic = self._topics.get(places.consumer.topic)
        led = {partition.number for partition in topic.led} if topic is not None else set()
        places.follow(self.leaders.partitions(places.consumer.topic), led)

    # ---- leaders

    def _changed(self, topic: str) -> None:
        if not self._closed:
            for link in list(self._links.values()):
                link.leaders_changed()
            for places in list(self._places.get(topic, ())):
                self._follow(places)

    def seek_later(self, topic: str) -> None:
        """A leader was lost; who leads now may not be known yet."""
        if topic not in self._looking and not self._closed:
            self._looking.add(topic)
            self.loop.call_later(RETRY_SECONDS, self._look_again, topic)

    def _look_again(self, topic: str) -> None:
        self._looking.discard(topic)
        self._changed(topic)

    def leader(self, topic: str, number: int) -> LeaderAt | None:
        """The leader of the partition, if that is another node."""
        if number >= self.leaders.partitions(topic):
            return None
        leader = self.leaders.leader(topic, number)
        return None if leader is None or leader.node == self.leaders.node or self._closed else leader

    # ---- links

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def link(self, leader: LeaderAt) -> RelayLink:
        link = self._links.get(leader.node)
        if link is not None and link.address == leader.peer_address:
            return link
        if link is not None:
            link.close("the node has another address now")
        greeting = routing_pb2.Greeting(
            cluster_id=self.leaders.cluster_id, node_uid=self.leaders.node, target_uid=leader.node
        )
        link = self._links[leader.node] = RelayLink(self, self._peers, leader, greeting)
        return link

    def link_ended(self, link: RelayLink) -> None:
        if self._links.get(link.node) is link:
            del self._links[link.node]

    def close(self) -> None:
        """The node stops."""
        self._closed = True
        self._unwatch()
        for link in list(self._links.values()):
            link.close("this node is stopping")
