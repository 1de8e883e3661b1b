"""What a node of a cluster does for clients that are connected to the wrong node, put together.

    forward_*    publishes to where their partition is led
    relay_*      messages of partitions led elsewhere to consumers here, and the reverse
    channel_sync changes of channels to every leader

Made once the node is a member, before it listens; a node that is alone has none of this.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nsqha.server.node.parts import RoutedNode
from nsqha.server.routing.channel_sync import Reconciler
from nsqha.server.routing.forward_client import Forwarder
from nsqha.server.routing.forward_server import ForwardService
from nsqha.server.routing.relay_client import Relaying
from nsqha.server.routing.relay_server import RelayService
from nsqha.server.topics.channel_leaders import ClusterChannelLeaders

if TYPE_CHECKING:
    from nsqha.server.peers.api import Peers, PeerServer
    from nsqha.server.routing.leaders import Leaders

DRAIN_SECONDS_MAX = 1.0


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
            refusal=node.refuses_publish,
        )
        self.forward_service = ForwardService(
            topics, leaders, loop=loop, budget=node.budget, refusal=node.refuses_publish
        )
        self.relaying = Relaying(topics, leaders, peers, loop=loop, now=node.now)
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
        node.publishing.forwarder = self.forwarder
        node.subscriptions.relaying = self.relaying
        channels.leaders = ClusterChannelLeaders(topics, channels.led, self.reconciler)
        self._unwatch = leaders.when_changed(node.subscriptions.leaders_changed)

    def serve(self, server: PeerServer) -> None:
        """What other nodes may ask of this one."""
        self.forward_service.register(server)
        self.relay_service.register(server)
        self.reconciler.register(server)

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
        self.relay_service.close()
        await self._peers.close()
