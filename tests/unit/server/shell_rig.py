"""A partition with its channels and consumers on a loop whose time moves only when told: no sockets, no sleeping.

    rig = PartitionRig()                      an open log in memory, sync=always, one channel "c"
    rig.publish(b"one")              -> Outcome, which remembers what it was told
    rig.turn()                       run what the loop has to do now
    rig.disk.sync()                  one disk round for whoever asked
    rig.pass_time(5)                 timers fire in order

The disk is handed in: a `FakeDisk` syncs, and does its jobs, when the test says so.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from nsqha import hot, ids
from nsqha.clock import ManualClock
from nsqha.commitlog.idle_turns import IdleTurns
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.reading.lookup import LogIdentity
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.retention import Retention
from nsqha.commitlog.storage import MemStorage, Storage
from nsqha.cursor.committed.state import Effect, PartitionState
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.partition import Forgotten, PartitionCursors
from nsqha.election.model import ChannelInfo, ChannelList
from nsqha.replication.leader import LeaderReplica
from nsqha.replication.pauses import ProcessPause
from nsqha.server.partition.context import LedLog, PartitionRuntime
from nsqha.server.partition.delivery import Consumer, Delivery, Sub
from nsqha.server.partition.memory import EphemeralMemory
from nsqha.server.partition.partition import Partition
from nsqha.server.partition.retention import AbandonedPolicy, RetentionRunner
from nsqha.server.runtime.budget import PublishBudget
from nsqha.server.runtime.measures import Measures
from tests.fakes.disk import FakeDisk
from tests.fakes.loop import VirtualLoop

NODE = 7


class Outcome:
    """A publisher who remembers every answer."""

    def __init__(self) -> None:
        self.answers: list[str] = []

    def stored(self) -> None:
        self.answers.append("OK")

    def failed(self, why: str) -> None:
        self.answers.append(why)


class FakeWire:
    """A consumer's socket."""

    def __init__(self) -> None:
        self.writable = True
        self.closed = False
        self.sent = bytearray()

    def send_messages(self, data: Any) -> None:
        self.sent += data

    def close(self) -> None:
        self.closed = True
        self.writable = False

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, _, body in self.messages]

    @property
    def messages(self) -> list[tuple[bytes, int, bytes]]:
        """(id, attempts, body) of everything sent."""
        found = []
        at = 0
        while at < len(self.sent):
            size = int.from_bytes(self.sent[at : at + 4], "big")
            frame = bytes(self.sent[at : at + 4 + size])
            found.append((frame[18:34], int.from_bytes(frame[16:18], "big"), frame[34:]))
            at += 4 + size
        return found


class PartitionRig:
    """One partition that this node leads."""

    def __init__(
        self,
        *,
        sync: str = "always",
        storage: Storage | None = None,
        limits: LogLimits | None = None,
        cursor_limits: ChannelLimits | None = None,
        memory: EphemeralMemory | None = None,
        channel: bool = True,
        ordered: bool = False,
        waiting_bytes_max: int = 1 << 20,
        **runtime: Any,
    ) -> None:
        self.clock = ManualClock()
        self.loop = VirtualLoop(self.clock)
        self.pause = ProcessPause()
        self.failures: list[BaseException] = []
        self.disk = FakeDisk(self.loop, self.failures.append, held=True)
        self.storage = storage or MemStorage()
        self.log = PartitionLog.create(
            self.storage, "topic/0", LogIdentity(5, 0), cache=BatchCache(), limits=limits or LogLimits()
        )
        self.cursors = PartitionCursors(
            id_base=ids.id_base(0, 3),
            state=PartitionState(),
            limits=cursor_limits or ChannelLimits(),
            bounded=memory is not None,
            ordered=ordered,
        )
        leader = LeaderReplica(
            node=NODE, epoch=1, isr=(NODE,), min_isr=1, sync_always=sync == "always", end=1, durable=1
        )
        settings: dict[str, Any] = {
            "wait_seconds_max": 5.0,
            "written_seconds_max": 30.0,
            "sync_every": 2500,
            "sync_seconds": 2.0,
        }
        self.budget = PublishBudget(self.loop, waiting_bytes_max)  # type: ignore[arg-type]
        self.runtime = self._runtime(settings | runtime)
        self._sync = sync
        self.memory = memory.log(self.storage) if memory and isinstance(self.storage, MemStorage) else None
        # As if its epoch start were committed; without the batch, log ids are simple.
        self.lead(leader, serving=True)
        self.version = 0
        if channel:
            self.channels("c")

    def lead(self, leader: LeaderReplica, *, serving: bool) -> None:
        """The partition in the epoch of this leader."""
        self.partition = Partition(
            self.runtime,
            LedLog(0, ids.id_base(0, 3), self.log, self.cursors, leader),
            retention=RetentionRunner(
                Retention(keep_ns=0, keep_bytes=0), AbandonedPolicy(), self.runtime.measures.retention_removed
            ),
            sync=self._sync,
            memory=self.memory,
        )
        self.partition.batches.outstanding.on_effects = self._happened
        self.partition.life.serving = serving
        self._sync_deliveries()

    def _runtime(self, settings: dict[str, Any]) -> PartitionRuntime:
        return PartitionRuntime(
            loop=self.loop,  # type: ignore[arg-type]
            clock=self.clock,
            disk=self.disk,  # type: ignore[arg-type]
            measures=Measures(),
            pause=self.pause,
            budget=self.budget,
            on_failure=self.failures.append,
            turns=IdleTurns(),
            **settings,
        )

    def channel_list(self, *names: str) -> ChannelList:
        """The next version of the metadata record."""
        self.version += 1
        channels = {name: ChannelInfo(uid, paused=False) for uid, name in enumerate(names, 100)}
        return ChannelList(self.version, False, channels)

    def channels(self, *names: str) -> None:
        """Make these the channels, committed."""
        self.cursors.requests.reconcile(self.channel_list(*names))
        self.partition.commit_events()
        self.disk.sync()

    def append_copied(self, *bodies: bytes) -> None:
        """A batch that a leader pushed here and nobody has committed."""
        data = bytearray(b"".join(map(hot.frame, bodies)))
        timestamp_ns = self.log.next_timestamp(self.clock.wall_ns())
        hot.stamp(data, 0, self.partition.id_base + self.log.end.offset, timestamp_ns)
        self.log.append(data, count=len(bodies), flags=0, timestamp_ns=timestamp_ns, epoch=1, durable=0)

    def _happened(self, effects: Sequence[Effect | Forgotten]) -> None:
        """As `Topic` does."""
        for effect in effects:
            if isinstance(effect, Forgotten):
                self.partition.deliveries[effect.channel.name].forgotten(effect.counts)
        self._sync_deliveries()

    def _sync_deliveries(self) -> None:
        for name, channel in self.cursors.channels.items():
            if name not in self.partition.deliveries:
                self.partition.deliveries[name] = Delivery(self.partition, channel, random.Random(1), None)

    def turn(self) -> None:
        self.loop.turn()

    def pass_time(self, seconds: float) -> None:
        self.loop.pass_time(seconds)

    def publish(self, *bodies: bytes, defer_ms: int | None = None) -> Outcome:
        outcome = Outcome()
        frames = b"".join(map(hot.frame, bodies))
        self.partition.publish(frames, outcome, defer_ms)
        return outcome

    def store(self, *bodies: bytes, defer_ms: int | None = None) -> Outcome:
        """Publish, and one disk round."""
        outcome = self.publish(*bodies, defer_ms=defer_ms)
        self.disk.sync()
        return outcome

    @property
    def floor(self) -> int:
        """What is committed as finished in "c"."""
        return self.cursors.channels["c"].committed.floor

    def consume(self, rdy: int, channel: str = "c", *, timeout: float = 60.0, sample_rate: int = 0) -> Consumer:
        """Attach a consumer with a `FakeWire`."""
        consumer = Consumer(FakeWire(), topic="t", channel=channel, msg_timeout=timeout, sample_rate=sample_rate)
        consumer.sub = Sub.ANSWERED
        self.partition.deliveries[channel].attach(consumer)
        consumer.rdy = rdy
        consumer.wake()
        self.turn()
        return consumer

    def finish(self, consumer: Consumer, n: int = 0) -> None:
        """FIN the nth message that it was sent."""
        self.fin(consumer, consumer.wire.messages[n][0])

    def fin(self, consumer: Consumer, *ids_: bytes) -> int:
        """FIN as the connection does it; how many it finished."""
        data = b"".join(b"FIN %b\n" % message_id for message_id in ids_)
        subscription = consumer.subscriptions[0]
        _, count = subscription.channel.fin_run(data, 0, len(data), subscription.owner)
        consumer.in_flight -= count
        consumer.wake()
        self.turn()
        return count
