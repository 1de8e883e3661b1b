"""Handing committed messages of one channel of one partition to its consumers.

A consumer is one connection. Its RDY window (`rdy - in_flight`) covers all partitions of the topic; a `Subscription` is
its place at one of them. First deliveries are slices of committed batches, as many messages as the window allows at a
time; only redeliveries are rendered one by one.

Fairness: a pump deals the backlog out evenly over the consumers that are ready. Where messages come by the hundred, the
pieces of one pump would cost more in system calls than the messages do; then one consumer gets them and the next one
those of the next pump.

The deliveries of one partition, by channel, are pumped together and watched by one alarm:

    a commit         -> pump               every channel may have something new
    a window opened  -> wake -> [the end of the tick] -> those that were woken, all at one moment
    a read failed    -> wake_later -> wake
    the alarm rings  -> the partition, for its events -> due
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from nsqha import hot
from nsqha.clock import Now
from nsqha.commitlog.entry import BatchCorrupt
from nsqha.cursor.events import deliver_at_in
from nsqha.cursor.live.channel import NOTHING_WAITS
from nsqha.errors import LogCorrupt, NotInLog
from nsqha.frames import HAS_ATTRIBUTES
from nsqha.nsqlog import Logger
from nsqha.quantile import LatencyWindow

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.commitlog.reading.reader import Batch
    from nsqha.cursor.live.channel import Channel
    from nsqha.cursor.partition import PartitionCursors
    from nsqha.server.partition.context import PartitionLifecycle

logger = Logger("delivery")

OWNER_MAX = 65535
DEAL_EVENLY = 32  # up to this number of messages for each
DEAL_MIN = 1000  # otherwise at least this number at a time, if windows allow
READ_RETRY_SECONDS = 1.0  # after files of the log could not be opened
CLOCK_SET_SECONDS = 1.0  # so far apart from each other the two clocks come only if one is set, or the host slept
SLACK_SECONDS = 0.01  # deadlines closer than this share one timer


class DeliveredPartition(Protocol):
    """The partition whose committed messages are delivered, as far as deliveries look at it."""

    number: int
    id_base: int
    log: PartitionLog
    cursors: PartitionCursors
    deliveries: Deliveries
    life: PartitionLifecycle
    on_damage: Callable[[int, int], object]
    @property
    def closed(self) -> bool:
        """Whether it takes nothing more."""

    @property
    def held_up(self) -> bool:
        """Whether events can not be written just now, however urgent they are."""

    def now(self) -> Now:
        """Read both clocks."""


class Wire(Protocol):
    """Where a consumer's frames go."""

    writable: bool

    def send_messages(self, data: Any) -> None:
        """Write whole message frames, not counted as a reply."""

    def reply(self, data: bytes) -> None:
        """Write an error frame after the replies of earlier commands."""

    def close(self) -> None:
        """Drop the connection."""


class Sub(Enum):
    """How far the SUB of a consumer is."""

    ASKED = 1
    DISMISSED = 2  # what it was attached to was deleted, or is led by another node now
    ANSWERED = 3


class Consumer:
    """A subscribed connection: its window and its counters.

    The window covers what is in flight from partitions led here and what is lent to other nodes
    (`relay_client`).
    """

    relayed = False  # its client is connected to another node
    standby = False  # it is relayed, and clients connected here can take all there is
    direct = True  # this node was a leader of the topic at SUB: lookup may have sent it here

    def __init__(
        self,
        wire: Wire,
        *,
        topic: str,
        channel: str,
        msg_timeout: float,
        sample_rate: int,
        only: int | None = None,
    ) -> None:
        """`only`: the partition it reads; None: all."""
        self.only = only
        self.wire = wire
        self.topic = topic
        self.channel = channel
        self.msg_timeout = msg_timeout
        self.sample_rate = sample_rate
        self.rdy = 0
        self.in_flight = 0
        self.sub = Sub.ASKED
        self.message_count = 0
        self.finish_count = 0
        self.requeue_count = 0
        self.subscriptions: dict[int, Subscription] = {}
        self.lent_credit = 0  # parts of the window, at leaders on other nodes
        self.remote: Remote = NO_REMOTE  # its subscriptions to partitions that other nodes lead

    @property
    def room(self) -> int:
        return self.rdy - self.in_flight - self.lent_credit if self.wire.writable else 0

    def reads(self, partition: int) -> bool:
        """Whether it reads this partition of its topic."""
        return self.only is None or self.only == partition

    def ready(self, count: int) -> None:
        """RDY."""
        self.rdy = count
        self.remote.balance()
        self.wake()

    def set_standby(self, standby: bool) -> None:
        """Clients connected here read the channel, or do not any more: nothing to one of them."""

    def attached(self) -> None:
        """It has got a place at a partition."""

    def starved(self) -> None:
        """A partition could hand out nothing, perhaps for want of room."""
        if self.lent_credit:
            self.remote.starved()

    def moved(self, why: str) -> None:
        """A partition that it was served from is not led here any more. Who came for this leader looks it up again."""
        if self.direct:
            self.dismiss()

    def dismiss(self) -> None:
        """Its topic or channel is gone. The connection ends, as with nsqd; before its SUB is answered, it is attached
        anew instead: a connection that ends without an answer says nothing to its client."""
        if self.sub is Sub.ANSWERED:
            self.wire.close()
        else:
            self.sub = Sub.DISMISSED

    def wake(self) -> None:
        """The window opened: look for messages at the end of this tick, each time at another partition first."""
        subscriptions = self.subscriptions
        if len(subscriptions) == 1:
            for subscription in subscriptions.values():
                subscription.delivery.wake()
            return
        for number in subscriptions:
            subscriptions[number] = subscriptions.pop(number)  # the last now
            break
        for subscription in subscriptions.values():
            subscription.delivery.wake()


class Remote(Protocol):
    """A consumer's subscriptions to partitions that other nodes lead."""

    @property
    def in_flight(self) -> int:
        """As last heard."""

    def balance(self) -> None:
        """The window changed."""

    def starved(self) -> None:
        """A partition here needs some of what is lent."""

    def resumed(self) -> None:
        """The client takes bytes again."""

    def fin_run(self, data: bytes, pos: int, end: int) -> int:
        """Pass on the FIN lines at `pos` that belong to one partition elsewhere; where they end, `pos` if none does."""

    def req(self, message_id: bytes, delay_ms: int) -> bool:
        """Pass it on; False if the message is of no partition that is read elsewhere."""

    def touch(self, message_id: bytes) -> bool:
        """As `req`."""


class NoRemote:
    """The `Remote` of a consumer that reads only what this node leads."""

    in_flight = 0

    def balance(self) -> None:
        """The whole window is for this node."""

    def starved(self) -> None:
        """Nothing is lent."""

    def resumed(self) -> None:
        """No other node waits for the client."""

    def fin_run(self, data: bytes, pos: int, end: int) -> int:
        return pos

    def req(self, message_id: bytes, delay_ms: int) -> bool:
        return False

    def touch(self, message_id: bytes) -> bool:
        return False


NO_REMOTE = NoRemote()


class Subscription:
    """A consumer's place at one partition of its channel."""

    __slots__ = ("channel", "consumer", "delivery", "id_base", "owner")

    def __init__(self, consumer: Consumer, delivery: Delivery, owner: int) -> None:
        self.consumer = consumer
        self.delivery = delivery
        self.owner = owner
        self.channel = delivery.channel
        self.id_base = delivery.partition.id_base


class Delivery:
    """One channel of one partition, and the consumers it feeds."""

    def __init__(
        self, partition: DeliveredPartition, channel: Channel, rng: random.Random, latency: LatencyWindow | None
    ) -> None:
        self.partition = partition
        self.latency = latency  # of messages from publish to FIN; None: not asked for
        self.channel = channel
        self.stuck: str | None = None  # why nothing more can be read; shown in /stats
        self.damage: tuple[int, int] | None = None  # the offsets that can not be read, if that is why
        self._rng = rng
        self._subscriptions: dict[int, Subscription] = {}  # by owner, in the order in which they came
        self._standing_by: dict[Consumer, None] = {}  # clients of other nodes, while those connected here suffice
        self._turn = 0
        self.woken = False  # it is pumped at the end of the tick
        self.delayed = False  # files could not be opened: it is pumped later
        self._batch: Batch | None = None
        self._offset = 0  # of the message at `_position` of `_batch`
        self._position = 0
        self._dues: dict[int, int] = {}  # deliver-at times of messages in `_batch`

    # ---- consumers

    def attach(self, consumer: Consumer) -> Subscription:
        owner = next(n for n in range(1, OWNER_MAX + 1) if n not in self._subscriptions)
        subscription = Subscription(consumer, self, owner)
        self._subscriptions[owner] = subscription
        consumer.subscriptions[self.partition.number] = subscription
        consumer.attached()
        return subscription

    def detach(self, subscription: Subscription, now: Now) -> None:
        """The consumer is gone; what it had in flight waits for the next one."""
        if self._subscriptions.pop(subscription.owner, None) is None:
            return
        self._standing_by.pop(subscription.consumer, None)
        subscription.consumer.subscriptions.pop(self.partition.number, None)
        subscription.consumer.in_flight -= self.channel.detach(subscription.owner, now)
        self.wake()

    @property
    def consumers(self) -> list[Consumer]:
        return [subscription.consumer for subscription in self._subscriptions.values()]

    def consumer_of(self, owner: int) -> Consumer | None:
        """Who has messages in flight under this number."""
        subscription = self._subscriptions.get(owner)
        return subscription.consumer if subscription is not None else None

    def finished(self, offset: int, count: int, now: Now) -> None:
        """`count` messages up to `offset` were finished: remember their age. Called only if `latency` is wanted."""
        assert self.latency is not None
        try:
            entry = self.partition.log.entry_for_offset(offset)
        except LogCorrupt:
            return  # a figure is not worth a connection
        if entry is not None:
            self.latency.add(max(0, now.wall_ns - entry.timestamp_ns), now.mono, count)

    def forgotten(self, counts: Mapping[int, int]) -> None:
        """A seek, an empty, or an operator: these deliveries are no longer in flight."""
        for owner, count in counts.items():
            subscription = self._subscriptions.get(owner)
            if subscription is not None:
                subscription.consumer.in_flight -= count
        self._batch = None
        self.channel.answers.followed.forget()
        self.wake()

    def note_standby(self, consumer: Consumer) -> None:
        """A consumer of another node stands by from now on, or does not any more."""
        if consumer.standby:
            self._standing_by[consumer] = None
        else:
            self._standing_by.pop(consumer, None)

    def has_room_here(self) -> bool:
        """Whether a client that is connected here could take a message."""
        return any(s.consumer.room > 0 and not s.consumer.relayed for s in self._subscriptions.values())

    # ---- time

    def due(self, now: Now) -> None:
        """Time out what is overdue and hand out what has become due."""
        for owner, count in self.channel.expire(now):
            subscription = self._subscriptions.get(owner)
            if subscription is not None:
                subscription.consumer.in_flight -= count
                subscription.consumer.wake()
        self.pump(now)

    # ---- handing out

    def wake(self) -> None:
        """Look for messages at the end of this tick."""
        if not self.woken:
            self.woken = True
            self.partition.deliveries.wake(self)

    def pump(self, now: Now) -> None:
        """Hand out as much as windows and backlog allow."""
        channel = self.channel
        if not self._subscriptions or channel.paused or self.stuck is not None:
            return
        if not self.partition.life.delivers(now.mono):
            return
        if (followed := channel.answers.followed).offset >= 0:
            followed.look(channel.cursor.ring, now.mono)
        try:
            if channel.cursor.next_read >= self.partition.cursors.state.pump and channel.redelivery(now) is None:
                return
            ready = [s for s in self._subscriptions.values() if s.consumer.room > 0]
            if not ready:
                for consumer in self.consumers:
                    consumer.starved()
                return
            self._redeliver(ready, now)
            while ready:
                place = channel.cursor.next_read
                self._deliver(ready, now)
                if channel.turn_at == NOTHING_WAITS:
                    break
                if not self._redeliver(ready, now) and channel.cursor.next_read == place:
                    break
            if self._standing_by and not ready and self.has_backlog(now):
                for consumer in list(self._standing_by):
                    consumer.starved()
        except LogCorrupt as error:
            self.stuck = str(error)
            if isinstance(error, BatchCorrupt):
                self.damage = (error.first.offset, error.end.offset)
                self.partition.on_damage(error.first.log_id, error.end.log_id)
            elif isinstance(error, NotInLog):
                if self.partition.life.wrong_state(self.partition, error):
                    return
                start = 0 if error.carried else self.partition.log.start.offset
                self.damage = (error.offset, max(error.offset + 1, start))
            text = "%s/%s stopped: %s; restore the files, or go on without: nsqha log skip %s"
            topic = next((c.topic for c in self.consumers), "")
            logger.error("channel_stuck", text, topic, channel.name, error, topic, channel=channel.name)
        except OSError as error:
            # Too many open files, or no memory: that passes, and says nothing of the bytes.
            if not self.delayed:
                logger.warning("read_delayed", "%s: %s; trying again", channel.name, error, channel=channel.name)
                self.partition.deliveries.wake_later(self)
        except Exception as error:
            # A broken invariant: better this channel is silent than wrong, and no other one is either.
            self.stuck = f"{type(error).__name__}: {error}"
            logger.error("channel_stuck", "%s stopped", channel.name, error=error, channel=channel.name)

    def has_backlog(self, now: Now) -> bool:
        """Whether a consumer with room would get something."""
        channel = self.channel
        if channel.paused or self.stuck is not None or not self.partition.life.delivers(now.mono):
            return False
        return channel.redelivery(now) is not None or channel.next_run(self.partition.cursors.state.pump, 1) is not None

    def mended(self) -> None:
        """What could not be read can be read again."""
        if self.damage is not None:
            self.stuck = self.damage = self._batch = None
            self.wake()

    def skip_damage(self) -> tuple[int, int, int] | None:
        """Go on behind what can not be read: [first, end) and how many messages this channel loses; None: not stuck."""
        if self.damage is None:
            return None
        first, end = self.damage
        held = self.channel.cursor.deferred_overlay.get(first)
        position = held.position if held is not None else 0
        lost_copy = bool(position) and self.partition.log.entry_at_position(position) is None
        lost = self.channel.cursor.give_up(first, end, carried=lost_copy)
        self.stuck = self.damage = self._batch = None
        self.wake()
        return first, end, lost

    def _redeliver(self, ready: list[Subscription], now: Now) -> int:
        """Hand out what is not new and has its turn; how many messages."""
        channel = self.channel
        count = 0
        while ready and (redelivery := channel.redelivery(now)) is not None:
            subscription = ready[self._turn % len(ready)]
            self._turn += 1
            frame = self.partition.log.message(redelivery.offset, redelivery.position)
            consumer = subscription.consumer
            channel.redelivered(redelivery, subscription.owner, now.mono + consumer.msg_timeout)
            consumer.in_flight += 1
            consumer.message_count += 1
            consumer.wire.send_messages(hot.patch_attempts(frame, redelivery.attempts))
            count += 1
            if consumer.room <= 0:
                ready.remove(subscription)
        return count

    def _deliver(self, ready: list[Subscription], now: Now) -> None:
        """Hand out what is new, until it is the turn of something else."""
        channel = self.channel
        end = self.partition.cursors.state.pump
        while ready:
            subscription = ready[self._turn % len(ready)]
            consumer = subscription.consumer
            room = consumer.room
            if room <= 0:
                ready.remove(subscription)
                continue
            if len(ready) > 1:
                self._turn += 1
                share = (end - channel.cursor.next_read) // len(ready) + 1
                room = min(room, share if share <= DEAL_EVENLY else max(share, DEAL_MIN))
            run = channel.next_run(end, room)
            if run is None:
                return
            first, stop = run
            batch = self._batch_of(first)
            position = self._position
            if self._dues and (stop := self._not_due(first, stop, now)) == first:
                if first + 1 >= channel.turn_at:
                    return
                continue
            position_end, count = hot.walk(batch.data, position, len(batch.data), stop - first)
            if count == 0:
                raise LogCorrupt(f"no message frame at offset {first}")
            if consumer.sample_rate:
                self._deliver_sample(subscription, first, count, batch, position, now)
            else:
                channel.delivered(first, first + count, subscription.owner, now.mono + consumer.msg_timeout)
                consumer.in_flight += count
                consumer.message_count += count
                consumer.wire.send_messages(memoryview(batch.data)[position:position_end])
                if (followed := channel.answers.followed).offset < 0 and now.mono >= followed.next_at:
                    self._follow(batch.data, position, first, count, now)
            self._offset = first = first + count
            self._position = position_end
            if first >= end or first >= channel.turn_at:
                return

    def _follow(self, data: bytes | bytearray, position: int, first: int, count: int, now: Now) -> None:
        """Of `count` messages that go out, the frames at `position`, the one in the middle is followed to its FIN."""
        if middle := count // 2:
            position, _ = hot.walk(data, position, len(data), middle)
        published_ns = int.from_bytes(data[position + 8 : position + 16])
        self.channel.answers.followed.begin(first + middle, (now.wall_ns - published_ns) / 1e9, now.mono)

    def _not_due(self, first: int, stop: int, now: Now) -> int:
        """Where a run has to end because of a message whose deliver-at time is not over; that one, if first, waits.

        The pump defers such messages as it passes; here come only those that a seek made readable again.
        """
        waiting = [offset for offset, due_ns in self._dues.items() if first <= offset < stop and due_ns > now.wall_ns]
        if not waiting:
            return stop
        offset = min(waiting)
        if offset == first:
            self.channel.meet(offset, self._dues[offset], now)
        return offset

    def _deliver_sample(
        self, subscription: Subscription, first: int, count: int, batch: Batch, position: int, now: Now
    ) -> None:
        """As nsqd: a message passes if a number drawn from 0..99 is at most the sample rate; others are dropped."""
        channel, consumer = subscription.channel, subscription.consumer
        for offset in range(first, first + count):
            end, _ = hot.walk(batch.data, position, len(batch.data), 1)
            if self._rng.randrange(100) > consumer.sample_rate:
                channel.drop(offset, offset + 1)
            else:
                channel.delivered(offset, offset + 1, subscription.owner, now.mono + consumer.msg_timeout)
                consumer.in_flight += 1
                consumer.message_count += 1
                consumer.wire.send_messages(memoryview(batch.data)[position:end])
            position = end

    def _batch_of(self, offset: int) -> Batch:
        """The batch that holds `offset`, with `_position` at its frame (behind attribute frames)."""
        batch = self._batch
        if batch is None or not batch.first_offset <= offset < batch.end_offset:
            batch = self.partition.log.batch_at(offset)
            if batch is None:
                raise NotInLog(offset, f"offset {offset} is not in the log")
            self._batch = batch
            self._dues = deliver_at_in(batch.data, batch.first_offset) if batch.flags & HAS_ATTRIBUTES else {}
            self._position = batch.locate(offset)
        elif offset != self._offset:
            self._position = batch.locate(offset)
        else:
            self._position = hot.skip_control(batch.data, self._position, len(batch.data))
        self._offset = offset
        return batch


class Deliveries(dict[str, Delivery]):
    """The deliveries of one partition by channel name; opened and closed by `Topic`."""

    def __init__(
        self,
        partition: DeliveredPartition,
        loop: asyncio.AbstractEventLoop,
        ring: Callable[[], None],
        flush: Callable[[], None],
        finished: Callable[[Now], None],
    ) -> None:
        """`ring`: a deadline is over, of a channel or of an event. `flush`: write events now. `finished`: the FINs of a
        tick are taken, and what they made room for is delivered."""
        super().__init__()
        self._partition = partition
        self._loop = loop
        self._woken: list[Delivery] = []
        self._flush = flush
        self._finished = finished
        self._alarm = Alarm(loop, ring)
        self._events_alarm = Alarm(loop, ring)  # moved when progress rides, or it would ring for nothing
        self._wall_ahead = 0.0  # of the monotonic clock

    def pump(self, now: Now) -> None:
        """Hand out what windows and backlogs allow, to every channel."""
        if self:
            for delivery in list(self.values()):
                delivery.pump(now)
        self.arm(now.mono)

    def wake(self, delivery: Delivery) -> None:
        """Pump this one at the end of the tick."""
        if not self._woken:
            self._loop.call_soon(self._pump_woken)
        self._woken.append(delivery)

    def wake_all(self) -> None:
        """Pump every channel at the end of this tick: what held all of them back is over."""
        for delivery in self.values():
            delivery.wake()

    def wake_later(self, delivery: Delivery) -> None:
        """Pump it in a while, whatever happens until then."""
        delivery.delayed = True
        self._loop.call_later(READ_RETRY_SECONDS, self._wake_delayed, delivery)

    def _wake_delayed(self, delivery: Delivery) -> None:
        delivery.delayed = False
        delivery.wake()

    def _pump_woken(self) -> None:
        woken, self._woken = self._woken, []
        for delivery in woken:
            delivery.woken = False
        partition = self._partition
        # Every FIN of this tick has come; the alarm would hold an ordered channel up by its slack for each message. And
        # first: the disk works while the channels are looked at.
        self._write_progress()
        if partition.closed:
            return
        now = partition.now()
        for delivery in woken:
            delivery.pump(now)
        self._write_progress()  # what pumps have settled
        self._finished(now)
        self.arm(now.mono, woken)

    def _write_progress(self) -> None:
        partition = self._partition
        if partition.cursors.next_waits and not (partition.closed or partition.held_up):
            self._flush()

    def due(self, now: Now) -> None:
        """Time out what is overdue and hand out what has become due; `arm` is the caller's."""
        for delivery in list(self.values()):
            delivery.due(now)

    def watch_clock(self, now: Now) -> None:
        """Called about once a second: what is due by the wall clock may be so although no timer says it."""
        ahead = now.wall_ns / 1e9 - now.mono
        if abs(ahead - self._wall_ahead) > CLOCK_SET_SECONDS:
            self._wall_ahead = ahead
            self.due(now)
            self.arm(now.mono)

    def arm(self, now: float, changed: Iterable[Delivery] | None = None) -> None:
        """Make sure that the loop comes back for the earliest deadline of any channel, and for overdue events.
        `changed`: of no others can it be earlier than when this was called last."""
        partition = self._partition
        deadline = partition.cursors.event_deadline()
        if deadline is not None and not partition.held_up:
            self._events_alarm.move(deadline, now)
        deadline = None
        for delivery in self.values() if changed is None else changed:
            mine = delivery.channel.next_deadline()
            if mine is not None and (deadline is None or mine < deadline):
                deadline = mine
        if deadline is not None:
            self._alarm.set(deadline, now)

    def cancel(self) -> None:
        """No more alarms."""
        self._alarm.cancel()
        self._events_alarm.cancel()


class Alarm:
    """Calls back at the earliest deadline that was set since it last did, or at the one that it was moved to."""

    __slots__ = ("_at", "_call", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call = call
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0

    def set(self, deadline: float, now: float) -> None:
        """Call at `deadline`, in seconds of the same clock as `now`; never at once, and perhaps a slack late."""
        if self._timer is not None:
            if self._at <= deadline + SLACK_SECONDS:
                return
            self._timer.cancel()
        self._at = max(deadline, now + SLACK_SECONDS)
        self._timer = self._loop.call_later(self._at - now, self._ring)

    def move(self, deadline: float, now: float) -> None:
        """Call at `deadline` and not before: a timer that is set anew costs less than a turn of the loop."""
        if self._timer is not None and abs(deadline - self._at) > SLACK_SECONDS:
            self._timer.cancel()
            self._timer = None
        self.set(deadline, now)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._call()
