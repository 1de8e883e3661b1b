"""Partitions and their leaders as those see them who publish: what becomes of a publish is the test's to say.

    partition = FakePartition(loop, budget)
    partition.publish(frames, reply)         waits in the product's own queue
    partition.waiting[0].stored()            OK for this one; `store` for all of them, `refuse` says why not
    partition.abandon("...")                 this node does not lead it any more

    leaders = FakeLeaders(node)
    leaders.appoint("t", 0, 2, epoch=5)      what this node believes

Topics are `server.partition.topic.Topic` itself. `tests/contract/test_partitions.py` checks these beside the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from nsqha import hot
from nsqha.election.model import TopicRecord, Versioned
from nsqha.hot import NOT_STORED, Reply
from nsqha.replication.pauses import ProcessPause
from nsqha.server.partition.context import PartitionLifecycle
from nsqha.server.partition.publishes import WaitingPublishes
from nsqha.server.partition.topic import Topic
from nsqha.server.routing.hints import Hints
from nsqha.server.routing.leaders import LeaderAt
from nsqha.server.runtime.budget import PublishBudget

CLUSTER = 77
TOPIC_UID = 5


def bodies(frames: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(frames):
        end, _ = hot.walk(frames, at, len(frames), 1)
        found.append(frames[at + hot.HEADER : end])
        at = end
    return found


class HeldPublish:
    """A publish that waits for its outcome."""

    def __init__(self, partition: FakePartition, frames: bytes, reply: Reply) -> None:
        self.frames = frames
        self._partition = partition
        self._reply = reply

    def stored(self) -> None:
        self._partition.budget.give(len(self.frames))
        self._partition.log += bodies(self.frames)
        self._reply.stored()

    def failed(self, why: str) -> None:
        self._partition.budget.give(len(self.frames))
        self._reply.failed(why)


class FakePartition:
    """A partition without a log; with `at_once` it stores what it is given at once."""

    def __init__(
        self,
        loop: Any,
        budget: PublishBudget,
        number: int = 0,
        log: list[bytes] | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        self.number = number
        self.budget = budget
        self.log = [] if log is None else log  # bodies, in the order in which they were stored
        self.at_once = at_once
        self.life = PartitionLifecycle(ProcessPause())
        self.bodies: list[bytes] = []  # in the order in which they came
        self.waited: list[float] = []
        self.delays: list[int | None] = []
        runtime: Any = SimpleNamespace(loop=loop, budget=budget)
        empty: Any = SimpleNamespace(
            cursors=SimpleNamespace(state=SimpleNamespace(channels={}, pump=0)),
            log=SimpleNamespace(end=SimpleNamespace(offset=0)),
        )
        self._publishes = WaitingPublishes(runtime, empty, self.life, lambda: None, None)
        self._waiting: list[HeldPublish] = []
        self.queue = self._publishes.open_queue

    @property
    def closed(self) -> bool:
        return self.life.closed

    def publish(self, frames: bytes, reply: Reply, delay_ms: int | None = None, *, waited: float = 0.0) -> None:
        self._publishes.publish(frames, reply, delay_ms, waited=waited)
        if self.closed:
            return
        self.waited.append(waited)
        self.delays.append(delay_ms)
        if self.at_once:
            self.store()

    @property
    def waiting(self) -> list[HeldPublish]:
        """Publishes without an outcome, in the order in which they came; a test may take some of them out."""
        taken = self._publishes.queue.take_all()
        for frames, (reply, _) in zip(taken.runs, taken.waiters, strict=True):
            self.bodies += bodies(frames)
            self._waiting.append(HeldPublish(self, frames, reply))
        return self._waiting

    def store(self) -> None:
        while self.waiting:
            self.waiting.pop(0).stored()

    def refuse(self, why: str) -> None:
        while self.waiting:
            self.waiting.pop(0).failed(why)

    def abandon(self, why: str) -> None:
        self.life.end(why)
        self._publishes.queue.closed = True
        self.refuse(f"{NOT_STORED}{why}")


def topic(record: TopicRecord | None = None, *led: Any) -> Topic:
    """The product's topic; `led` need no more of a partition than a test uses."""
    unused: Any = None
    made = Topic(Versioned(record or TopicRecord("t", TOPIC_UID, 3), 1), (), unused)
    made.led = led
    return made


class FakeLeaders:
    """What one node believes: a test changes it. With `hear`, also by what other nodes say."""

    cluster_id = CLUSTER

    def __init__(self, node: int) -> None:
        self.node = node
        self.topics: dict[str, dict[int, LeaderAt | None]] = {}
        self.epochs: dict[tuple[str, int], int] = {}
        self.callbacks: list[Callable[[str], None]] = []
        self.dead: set[int] = set()
        self.registrations: dict[int, int] = {}  # 1 for all others
        self.cut_off = False
        self.hints: Hints | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    def hear(self, peers: Any, server: Any, nodes: int) -> None:
        """Take hints; `nodes`: how many there are."""
        loop = asyncio.get_running_loop()

        def spawn(work: Any) -> None:
            self.tasks.add(task := loop.create_task(work))
            task.add_done_callback(self.tasks.discard)

        self.hints = Hints(
            self,
            peers,
            epoch_of=lambda topic, key: self.epochs.get((topic, key[1])),
            addresses=lambda: {n: f"n{n}" for n in range(1, nodes + 1)},
            cut_off=lambda: self.cut_off,
            spawn=spawn,
        )
        self.hints.register(server)

    def close(self) -> None:
        for task in list(self.tasks):
            task.cancel()

    def name_of(self, node: int) -> str:
        return f"n{node}"

    def alive(self, node: int) -> bool:
        return node not in self.dead

    def registration(self, node: int) -> int:
        return self.registrations.get(node, 1) if self.alive(node) else 0

    def partitions(self, topic: str) -> int:
        return len(self.topics.get(topic, ()))

    def leader(self, topic: str, number: int) -> LeaderAt | None:
        hint = None
        if self.hints is not None:
            hint = self.hints.leader((TOPIC_UID, number), self.epochs.get((topic, number), 0))
        return hint or self.recorded(topic, number)

    def recorded(self, topic: str, number: int) -> LeaderAt | None:
        at = self.topics.get(topic, {}).get(number)
        return at if at is not None and self.alive(at.node) else None

    def not_led(self, topic: str, number: int, *, by: int = 0, hint: LeaderAt | None = None) -> bool:
        return self.hints is not None and self.hints.not_led(topic, (TOPIC_UID, number), by, hint)

    def when_changed(self, callback: Callable[[str], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def appoint(self, topic: str, number: int, node: int | None, epoch: int = 1, *, tell: bool = True) -> None:
        """`node` leads; None: no node does."""
        at = None if node is None else LeaderAt(node, f"n{node}", f"n{node}", epoch, TOPIC_UID)
        self.topics.setdefault(topic, {})[number] = at
        self.epochs[topic, number] = epoch
        if tell:
            self.tell(topic)

    def tell(self, topic: str) -> None:
        for callback in list(self.callbacks):
            callback(topic)
