"""A topic on this node: its metadata record, the partitions that are led here, and the consumers by channel.

The record (settings, channel list, who leads what) belongs to the metadata store; this object holds the last version
read. A change of the channel list goes: compare-and-set in the store (`NodeMetadata.change_channels`) -> `versioned` ->
a `channels` event in the log of each partition led here (`reconcile`) -> applied when it is committed -> deliveries.

Owner of which partitions this node leads (`led`): publishes, consumers, statistics and administration ask nowhere else.
Invariants: each led partition has one delivery for each of its channels; a consumer has a subscription at every led
partition that serves its channel.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from nsqha import ids
from nsqha.clock import Now
from nsqha.cursor.committed.state import ChannelState, Created, Deleted, Effect, EpochStarted, Listed
from nsqha.cursor.live.channel import Channel
from nsqha.cursor.live.followed import NO_TIMES, ChannelTimes
from nsqha.cursor.partition import Forgotten
from nsqha.election.model import ChannelList, TopicRecord, Versioned
from nsqha.nsqlog import Logger
from nsqha.server.partition.delivery import Consumer, Delivery
from nsqha.server.partition.partition import Partition

logger = Logger("topic")

NewDelivery = Callable[[Partition, Channel], Delivery]


class TopicConsumers:
    """The consumers of one topic, whatever partitions they are served from.

    Clients of other nodes (`relayed`) stand by while clients connected here read the channel in the same partition and
    have room.
    """

    def __init__(self) -> None:
        self.here: dict[str, list[Consumer]] = {}  # connected here, by channel
        self.relayed: dict[str, list[Consumer]] = {}  # connected elsewhere

    def add(self, consumer: Consumer) -> None:
        self._group(consumer).setdefault(consumer.channel, []).append(consumer)

    def remove(self, consumer: Consumer) -> bool:
        """False if it is not there."""
        group = self._group(consumer)
        remaining = group.get(consumer.channel, [])
        if consumer not in remaining:
            return False
        remaining.remove(consumer)
        if not remaining:
            del group[consumer.channel]
        return True

    def _group(self, consumer: Consumer) -> dict[str, list[Consumer]]:
        return self.relayed if consumer.relayed else self.here

    def reads(self, channel: str) -> bool:
        """Whether a consumer reads the channel from here."""
        return bool(self.here.get(channel) or self.relayed.get(channel))

    def set_standby(self, channel: str) -> None:
        """Say to relayed consumers of the channel whether clients connected here read it, too."""
        here = {consumer.only for consumer in self.here.get(channel, ())}
        for consumer in self.relayed.get(channel, ()):
            consumer.set_standby(None in here or consumer.only in here)

    def of(self, channel: str) -> list[Consumer]:
        """Those of one channel."""
        return [*self.here.get(channel, ()), *self.relayed.get(channel, ())]

    def all(self) -> list[Consumer]:
        return [c for group in (self.here, self.relayed) for consumers in group.values() for c in consumers]


class EndedCounts:
    """What was counted for one topic and its channels in partitions that are not led here any more.

    Counters never go back, whatever is led here: who draws differences would see everything once more.
    """

    def __init__(self) -> None:
        self.topic = Counter[str]()
        self._channels: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._times: dict[str, ChannelTimes] = {}

    def channel(self, name: str) -> Counter[str]:
        """Those of one channel; empty if nothing was counted."""
        return self._channels.get(name, Counter[str]())

    def times(self, channel: str) -> ChannelTimes:
        """What messages of the channel took."""
        return self._times.get(channel, NO_TIMES)

    def keep(self, partition: Partition) -> None:
        """The partition is not led here any more."""
        published = partition.batches.publishes
        self.topic.update(
            message_count=published.message_count,
            message_bytes=published.message_bytes,
            inherited_count=published.inherited_count,
        )
        for name, delivery in partition.deliveries.items():
            channel = delivery.channel
            self._channels[name].update(
                message_count=channel.cursor.message_count,
                inherited_count=channel.cursor.counted.inherited,
                requeue_count=channel.answers.requeued,
                timeout_count=channel.answers.timed_out,
                finish_count=channel.finished_count,
                skipped_count=channel.cursor.passing.skipped,
                dropped_count=channel.cursor.passing.dropped,
                expired_count=channel.cursor.passing.expired,
                **{reason.label: count for reason, count in channel.cursor.dead.died.items()},
            )
            self._times[name] = ChannelTimes.sum((self.times(name), channel.answers.times()))

    def forget(self, channel: str) -> None:
        """The channel was deleted: another one of its name begins at nothing."""
        self._channels.pop(channel, None)
        self._times.pop(channel, None)


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
        self.consumers = TopicConsumers()
        self.told: tuple[ChannelList | None, Sequence[Partition]] = (None, ())  # what lookup daemons heard last is of
        self.deleting = False
        self.leaving: set[str] = set()  # channels that are being deleted
        self.ended = EndedCounts()
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
        """Those of the record, and what the logs led here have besides: #ephemeral ones, and what is being deleted."""
        return sorted(
            {name for partition in self.led for name in partition.cursors.channels} | set(self.record.channels.channels)
        )

    def has_channel(self, name: str) -> bool:
        return name in self.record.channels.channels or any(name in p.cursors.channels for p in self.led)

    def is_reader(self, name: str) -> bool | None:
        """Whether the channel is one of those that readers of the log's files keep; None: it is not there."""
        listed = self.record.channels.channels.get(name)
        if listed is not None:
            return listed.reader
        logged = [p.cursors.channels[name].committed for p in self.led if name in p.cursors.channels]
        return any(channel.reader for channel in logged) if logged else None

    def serves(self, name: str) -> bool:
        """Whether consumers of this channel can be attached: every partition has it, and it is to stay."""
        return name not in self.leaving and all(p.serving and name in p.deliveries for p in self.led)

    def knows(self, name: str) -> bool:
        """In a cluster: the channel is there and stays, and what is led here has it, as far as it serves at all."""
        there = ids.is_ephemeral(name) or name in self.record.channels.channels
        return there and name not in self.leaving and all(not p.serving or name in p.deliveries for p in self.led)

    @contextmanager
    def leaves(self, channel: str) -> Iterator[None]:
        """It is being deleted: a consumer that comes meanwhile is attached when that is over, however it ends."""
        self.leaving.add(channel)
        try:
            yield
        finally:
            self.leaving.discard(channel)
            for partition in self.led:
                self._give_places(partition, self.consumers.of(channel))

    def wake(self, channel: str) -> None:
        """Deliveries of the channel may go on."""
        for partition in self.led:
            if channel in partition.deliveries:
                partition.deliveries[channel].wake()

    # ---- partitions come and go with leadership

    def add_led(self, partition: Partition) -> None:
        """This node leads the partition from now on; consumers get their place when its epoch has begun."""
        partition.batches.outstanding.on_effects = lambda effects: self._happened(partition, effects)
        for channel in partition.cursors.channels.values():
            self._open_delivery(partition, channel.committed)
        others = [led for led in self.led if led.number != partition.number]
        self.led = tuple(sorted([*others, partition], key=lambda led: led.number))
        self._give_places(partition, self.consumers.all())

    def remove_led(self, partition: Partition, why: str) -> None:
        """This node does not lead it any more. Clients that came here because it did look for the leader again;
        those of other nodes are sent on; the others read on from the next leader (`relay_client`)."""
        self.led = tuple(led for led in self.led if led is not partition)
        self.ended.keep(partition)
        now = partition.now()
        for delivery in partition.deliveries.values():
            for consumer in delivery.consumers:
                try:
                    try:
                        delivery.detach(consumer.subscriptions[partition.number], now)
                    finally:
                        consumer.moved(why)
                except Exception as error:  # the others would wait here, with what they have in flight, for ever
                    logger.error("consumer_not_informed", "%s/%d", self.name, partition.number, error=error)

    # ---- channels come and go with committed events

    def _happened(self, partition: Partition, effects: Sequence[Effect | Forgotten]) -> None:
        """A committed batch changed channels: bring deliveries and windows in line."""
        for effect in effects:
            if isinstance(effect, Created):
                self._open_delivery(partition, effect.channel)
                self._give_places(partition, self.consumers.of(effect.channel.name))
            elif isinstance(effect, Deleted):
                self._close_delivery(partition, effect.channel)
            elif isinstance(effect, Listed):
                for committed in effect.paused:
                    if (delivery := partition.deliveries.get(committed.name)) is not None:
                        delivery.wake()
            elif isinstance(effect, EpochStarted):
                # The record may have changed while the epoch could not write events yet.
                if partition.serving and partition.cursors.requests.reconcile(self.record.channels):
                    partition.write_events()
                self._give_places(partition, self.consumers.all())
            elif isinstance(effect, Forgotten):
                delivery = partition.deliveries.get(effect.channel.name)
                if delivery is not None:
                    delivery.forgotten(effect.counts)

    def _open_delivery(self, partition: Partition, committed: ChannelState) -> None:
        """The channel came, and may be gone again."""
        channel = partition.cursors.channels.get(committed.name)
        if channel is not None and channel.committed is committed and channel.name not in partition.deliveries:
            partition.deliveries[channel.name] = self._new_delivery(partition, channel)

    def _close_delivery(self, partition: Partition, committed: ChannelState) -> None:
        """The channel has gone; one of its name may be there again."""
        delivery = partition.deliveries.get(committed.name)
        if delivery is not None and delivery.channel.committed is committed:
            del partition.deliveries[committed.name]
            self.ended.forget(committed.name)
            for consumer in delivery.consumers:
                consumer.dismiss()

    # ---- consumers

    def attach(self, consumer: Consumer) -> None:
        """Give the consumer its place at each partition that serves the channel; at others when they do."""
        self.consumers.add(consumer)
        for partition in self.led:
            self._give_place(partition, consumer)
        self.consumers.set_standby(consumer.channel)

    def detach(self, consumer: Consumer, now: Now) -> bool:
        """The consumer is gone. True if it was the last of its channel."""
        for subscription in list(consumer.subscriptions.values()):
            subscription.delivery.detach(subscription, now)
        if not self.consumers.remove(consumer):
            return False
        self.consumers.set_standby(consumer.channel)
        return not self.consumers.reads(consumer.channel)

    def _give_places(self, partition: Partition, consumers: list[Consumer]) -> None:
        for consumer in consumers:
            self._give_place(partition, consumer)

    def _give_place(self, partition: Partition, consumer: Consumer) -> None:
        delivery = partition.deliveries.get(consumer.channel)
        mine = consumer.reads(partition.number)
        stays = consumer.channel not in self.leaving
        if delivery is not None and delivery.channel.committed.reader:
            return
        if (
            mine
            and stays
            and delivery is not None
            and partition.serving
            and partition.number not in consumer.subscriptions
        ):
            delivery.attach(consumer)
            delivery.wake()

    def places_missing(self, consumer: Consumer) -> list[int]:
        """Partitions led here that it reads, and that do not serve it yet."""
        return [
            partition.number
            for partition in self.led
            if partition.number not in consumer.subscriptions and consumer.reads(partition.number)
        ]

    # ---- the logs follow the record

    async def reconcile(self) -> None:
        """Bring the log of every led partition in line with the record; returns when that is committed."""
        for partition in self.led:
            partition.cursors.requests.reconcile(self.record.channels)
        await self.commit_events()

    async def commit_events(self) -> None:
        """Have the channel events that are queued committed in every led partition."""
        await asyncio.gather(*[partition.commit_events() for partition in self.led])
