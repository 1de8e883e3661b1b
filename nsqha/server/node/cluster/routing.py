"""What a node of a cluster does for clients that are connected to the wrong node, put together.

    forward_*    publishes to where their partition is led
    relay_*      messages of partitions led elsewhere to consumers here, and the reverse
    channel_sync changes of channels to every leader

Made once the node is a member, before it listens; a single node has none of this.

A consumer reads all partitions of its topic: those led here, the others through `Relaying`. SUB answers when each of
them whose leader is there has the consumer, so that nothing published later is missed; that needs no metadata if the
channel is known. An ephemeral channel does not outlive its leader's epoch: it is made again at the next leader.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from nsqha import ids
from nsqha.errors import NotFound, OutcomeUnknown, Unavailable
from nsqha.server.clients.figures import client_stats
from nsqha.server.clients.subscribe import check_room
from nsqha.server.node.parts import ClientRoutes, RoutedNode
from nsqha.server.partition.delivery import Consumer, Sub
from nsqha.server.routing.channel_sync import Reconciler
from nsqha.server.routing.forward_client import Forwarder
from nsqha.server.routing.forward_server import ForwardService
from nsqha.server.routing.relay_client import Relaying
from nsqha.server.routing.relay_server import RelayService
from nsqha.server.topics.channel_leaders import ClusterChannelLeaders

if TYPE_CHECKING:
    from nsqha.server.partition.topic import Topic
    from nsqha.server.peers.api import Peers, PeerServer
    from nsqha.server.routing.leaders import Leaders

DRAIN_SECONDS_MAX = 1.0
ATTACHED_POLL_SECONDS = 0.005  # how often a SUB checks whether every leader has its consumer
MAKE_AGAIN_SECONDS = 0.05


class Routing:
    """The parts of one node."""

    def __init__(self, node: RoutedNode, leaders: Leaders, peers: Peers) -> None:
        """`peers` should be connections of their own: publishes and messages must not hold up replication."""
        options, loop, topics, channels = node.options, node.loop, node.topics, node.channels
        wait_seconds = options.publish_wait_ns / 1e9
        self._peers = peers
        self.forwarder = Forwarder(
            topics,
            leaders,
            peers,
            loop=loop,
            budget=node.budget,
            wait_seconds=wait_seconds,
            outcome_seconds=options.publish_outcome_wait_ns / 1e9,
            refusal=node.availability.refuses_publish,
        )
        self.forward_service = ForwardService(
            topics, leaders, loop=loop, budget=node.budget, refusal=node.availability.refuses_publish
        )
        self.relaying = Relaying(
            topics,
            leaders,
            peers,
            loop=loop,
            now=node.now,
            describe=lambda consumer: client_stats(consumer.wire, consumer),
        )
        self.relay_service = RelayService(topics, channels, leaders, loop=loop, now=node.now, spawn=node.spawn)
        self.reconciler = Reconciler(
            leaders,
            peers,
            loop=loop,
            seconds=wait_seconds,
            follow=channels.led.follow,
            carry_out=channels.led.carry_out,
            led_elsewhere=channels.led.led_elsewhere,
            known_channels=lambda topic: topics.announcer.known_channels(topic),  # whichever it is by then
        )
        channels.leaders = ClusterChannelLeaders(topics, channels.led, self.reconciler)
        consumers = ClusterConsumerRoutes(node, self.relaying)
        self.for_clients = ClientRoutes(self.forwarder, consumers, refusal=node.availability.ends)
        self._unwatch = leaders.when_changed(consumers.leaders_changed)

    def serve(self, server: PeerServer) -> None:
        """What other nodes may ask of this one."""
        self.forward_service.register(server)
        self.relay_service.register(server)
        self.reconciler.register(server)

    def keep_house(self) -> None:
        """About once a second."""
        self.forwarder.keep_house()
        self.relay_service.tell_figures()

    async def drain(self) -> None:
        """Partitions are closed: let the answers leave that other nodes wait for, and hear those that ours wait for."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DRAIN_SECONDS_MAX
        await self.forward_service.drain(DRAIN_SECONDS_MAX)
        while not self.forwarder.idle and loop.time() < deadline:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """The node stops; after `drain`."""
        self._unwatch()
        self.forwarder.close()
        self.relaying.close()
        await self._peers.close()


class ClusterConsumerRoutes:
    """The `ConsumerRoutes` of a cluster's node: a consumer reads what is led here, and the rest from other nodes."""

    def __init__(self, node: RoutedNode, relaying: Relaying) -> None:
        self._topics = node.topics
        self._channels = node.channels
        self._relaying = relaying
        self._wait_seconds = node.options.publish_wait_ns / 1e9
        self._consumers_max = node.options.max_channel_consumers
        self._availability = node.availability
        self._spawn = node.spawn

    async def attach(self, topic: Topic, consumer: Consumer) -> bool:
        """Unavailable if a leader does not know the channel in time; the caller detaches the consumer then."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_seconds
        if not await self._channels.ensure(topic, consumer.channel):
            return False
        check_room(topic, consumer, self._consumers_max)
        consumer.direct = bool(topic.led)
        topic.attach(consumer)
        elsewhere = self._relaying.attach(consumer)
        while missing := sorted([*topic.places_missing(consumer), *elsewhere.missing]):
            if self._availability.exiting:
                raise Unavailable("exiting")
            if topic.deleting or consumer.sub is Sub.DISMISSED:
                return False
            if loop.time() > deadline:
                raise Unavailable(f"the leaders of partitions {missing} of {topic.name} did not answer in time")
            await asyncio.sleep(ATTACHED_POLL_SECONDS)
            if topic.places_missing(consumer):
                await self._channels.ensure(topic, consumer.channel)
        return True

    def detach(self, consumer: Consumer) -> None:
        self._relaying.detach(consumer)

    def leaders_changed(self, name: str) -> None:
        """A partition may be led here now whose #ephemeral channels ended with its last leader."""
        topic = self._topics.get(name)
        if topic is not None and not self._availability.exiting:
            for channel in [channel for channel in topic.consumers.here if ids.is_ephemeral(channel)]:
                if any(topic.places_missing(consumer) for consumer in topic.consumers.here[channel]):
                    self._spawn(self._make_again(topic, channel))

    async def _make_again(self, topic: Topic, channel: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_seconds
        while loop.time() < deadline and not topic.deleting and not self._availability.exiting:
            if not any(topic.places_missing(consumer) for consumer in topic.consumers.here.get(channel, ())):
                return
            with suppress(NotFound, Unavailable, OutcomeUnknown):  # led elsewhere again, or it continues
                await self._channels.ensure(topic, channel)
            await asyncio.sleep(MAKE_AGAIN_SECONDS)
