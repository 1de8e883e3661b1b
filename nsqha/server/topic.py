"""A topic on this node: its metadata record, the partitions that are led here, and the consumers by channel.

The record (settings, channel list, who leads what) belongs to the metadata store; this object holds the last version
read. A change of the channel list goes: compare-and-set in the store (`Metadata.change_channels`) -> `versioned` -> a
`channels` event in the log of each partition led here (`reconcile`) -> applied when it is committed -> deliveries.

Owner of which partitions this node leads (`led`): publishes, consumers, statistics and administration ask nowhere else.
Invariants: each led partition has one delivery for each of its channels; a consumer has a leg at every led partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from nsqha import ids
from nsqha.clock import Now
from nsqha.cursor.channel import Channel
from nsqha.cursor.partition import Forgotten
from nsqha.cursor.state import Created, Deleted, Effect
from nsqha.election.model import TopicRecord, Versioned
from nsqha.server.delivery import Consumer, Delivery
from nsqha.server.partition import Partition

NewDelivery = Callable[[Partition, Channel], Delivery]


class Topic:
    """The local part of one topic."""

    def __init__(
        self,
        record: Versioned[TopicRecord],
        partitions: Sequence[Partition],
        new_delivery: NewDelivery,
    ) -> None:
        self.versioned = record
        self.led: tuple[Partition, ...] = ()  # by number; replaced, never changed: who walks it may await
        self.consumers: dict[str, list[Consumer]] = {}
        self.deleting = False
        self.leaving: set[str] = set()  # channels that are being deleted
        self._new_delivery = new_delivery
        for partition in partitions:
            self.add_led(partition)

    @property
    def name(self) -> str:
        return self.versioned.record.name

    @property
    def record(self) -> TopicRecord:
        return self.versioned.record

    @property
    def ephemeral(self) -> bool:
        return ids.is_ephemeral(self.name)

    def partition_for(self, connection_number: int) -> Partition:
        """Sticky per connection, so that what one connection publishes keeps its order."""
        return self.led[connection_number % len(self.led)]

    def leads(self, number: int) -> Partition | None:
        """The partition, if this node leads it."""
        return next((partition for partition in self.led if partition.number == number), None)

    def channel_names(self) -> list[str]:
        return sorted({name for partition in self.led for name in partition.cursors.channels})

    def has_channel(self, name: str) -> bool:
        return any(name in partition.cursors.channels for partition in self.led)

    def serves(self, name: str) -> bool:
        """Whether consumers of this channel can be attached: every partition has it, and it is to stay."""
        return name not in self.leaving and all(p.serving and name in p.deliveries for p in self.led)

    @property
    def paused(self) -> bool:
        return self.record.channels.paused

    def wake(self, channel: str) -> None:
        """Deliveries of the channel may go on."""
        for partition in self.led:
            if channel in partition.deliveries:
                partition.deliveries[channel].wake()

    # ---- partitions come and go with leadership

    def add_led(self, partition: Partition) -> None:
        """This node leads the partition from now on."""
        partition.on_effects = lambda effects: self._happened(partition, effects)
        self._sync_deliveries(partition)
        others = [led for led in self.led if led.number != partition.number]
        self.led = tuple(sorted([*others, partition], key=lambda led: led.number))

    def remove_led(self, partition: Partition, why: str) -> None:
        """This node does not lead it any more: who was served from it looks for the leader anew."""
        self.led = tuple(led for led in self.led if led is not partition)
        for delivery in partition.deliveries.values():
            for consumer in delivery.consumers:
                consumer.wire.close()

    # ---- channels come and go with committed events

    def _happened(self, partition: Partition, effects: Sequence[Effect | Forgotten]) -> None:
        """A committed batch changed channels: bring deliveries and windows in line."""
        for effect in effects:
            if isinstance(effect, (Created, Deleted)):
                self._sync_deliveries(partition)
            elif isinstance(effect, Forgotten):
                delivery = partition.deliveries.get(effect.channel.name)
                if delivery is not None:
                    delivery.forgotten(effect.counts)

    def _sync_deliveries(self, partition: Partition) -> None:
        """Open deliveries for new channels, close those of deleted ones."""
        channels = partition.cursors.channels
        for name, delivery in list(partition.deliveries.items()):
            if channels.get(name) is not delivery.channel:
                del partition.deliveries[name]
                for consumer in delivery.consumers:
                    consumer.wire.close()
        for name, channel in channels.items():
            if name not in partition.deliveries:
                partition.deliveries[name] = self._new_delivery(partition, channel)

    # ---- consumers

    def attach(self, consumer: Consumer) -> None:
        """Give the consumer its place at each partition, which has to serve the channel."""
        self.consumers.setdefault(consumer.channel, []).append(consumer)
        for partition in self.led:
            partition.deliveries[consumer.channel].attach(consumer)

    def detach(self, consumer: Consumer, now: Now) -> bool:
        """The consumer is gone. True if it was the last of its channel."""
        for leg in list(consumer.legs.values()):
            leg.delivery.detach(leg, now)
        remaining = self.consumers.get(consumer.channel, [])
        if consumer in remaining:
            remaining.remove(consumer)
        if remaining:
            return False
        return self.consumers.pop(consumer.channel, None) is not None

    def all_consumers(self) -> list[Consumer]:
        return [consumer for consumers in self.consumers.values() for consumer in consumers]

    # ---- the logs follow the record

    async def reconcile(self) -> None:
        """Bring the log of every led partition in line with the record; returns when that is committed."""
        for partition in self.led:
            partition.cursors.reconcile(self.record.channels)
        await self.commit_events()

    async def commit_events(self) -> None:
        """Have the channel events that are queued committed in every led partition."""
        await asyncio.gather(*[partition.commit_events() for partition in self.led])
