"""Where a publish goes, and publishes that come over HTTP and gRPC.

A connection asks `PublishRoutes` once per topic and keeps the answer (`Connections.forget_targets` takes it away); HTTP
and gRPC ask for each publish. The answer of a single node is a partition: one per connection, so that what one
connection publishes keeps its order. In a cluster (`Forwarder`) it is a `PartitionPublisher` to one partition, which
continues through changes of its leader. Batches and outcomes belong to the partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from nsqha.errors import OutcomeUnknown, Unavailable
from nsqha.hot import NOT_STORED
from nsqha.options import Options
from nsqha.server.partition.partition import Partition
from nsqha.server.routing.publisher import PartitionPublisher
from nsqha.server.runtime.budget import PublishBudget
from nsqha.server.topics.topics import Topics


class PublishRoutes(Protocol):
    """Chooses where a source (a connection, or one publish over HTTP or gRPC) publishes to."""

    clustered: bool
    """Whether partitions may be led elsewhere. Then a partition that a client names counts, even where there is one."""

    def publisher(self, topic: str, source: int, number: int | None = None) -> Partition | PartitionPublisher | None:
        """Where this source publishes to the topic, or to that partition of it; None if there is no such topic yet."""


class SingleNodePublishRoutes:
    """The `PublishRoutes` of a single node: every partition is led here."""

    clustered = False

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    def publisher(self, topic: str, source: int, number: int | None = None) -> Partition | None:
        found = self._topics.get(topic)
        if found is None or found.deleting:
            return None
        return found.partition_for(source) if number is None else found.leads(number)


class PublishWaiter:
    """The outcome of a publish that came over HTTP or gRPC."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future

    @property
    def source(self) -> object:
        """A publish of its own: its caller waits for it."""
        return self

    def stored(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def failed(self, why: str) -> None:
        if not self.future.done():
            error = Unavailable if why.startswith(NOT_STORED) else OutcomeUnknown
            self.future.set_exception(error(why))


class Publishing:
    """Takes publishes to partitions."""

    def __init__(
        self,
        topics: Topics,
        options: Options,
        *,
        loop: asyncio.AbstractEventLoop,
        budget: PublishBudget,
        routes: PublishRoutes,
        refusal: Callable[[], str | None],
        next_number: Callable[[], int],
    ) -> None:
        self.routes = routes
        self.refusal = refusal  # why nothing can be published now; None if it can
        self._topics = topics
        self._loop = loop
        self._budget = budget
        self._next_number = next_number
        self._wait_seconds = options.publish_wait_ns / 1e9
        self._partitions_of_new = options.topic_partitions

    def named_partitions(self, topic: str) -> int:
        """How many partitions of the topic a client may name; 0: there is no choice, and nsqd's clients name none."""
        found = self._topics.get(topic)
        partitions = self._partitions_of_new if found is None else len(found.record.partitions)
        return partitions if partitions > 1 or self.routes.clustered else 0

    def patience(self) -> float:
        """Until when a publish that came just now waits for room; loop time."""
        return self._loop.time() + self._wait_seconds

    async def publish(
        self,
        topic: str,
        frames: bytes,
        *,
        partition: int | None = None,
        deliver_in_ms: int | None = None,
        until: float | None = None,
    ) -> None:
        """Store blank frames as one unit; returns when they are committed. `partition`: one of `named_partitions`;
        None: any. `until`: as `room`."""
        refusal = self.refusal()
        if refusal is not None:
            raise Unavailable(refusal)
        await self._topics.topic_for_client(topic)
        await self.room(until)  # the last wait: all who are woken look whether there still is room
        target = self.routes.publisher(topic, self._next_number(), partition)
        if target is None:
            raise Unavailable(f"topic {topic} is being deleted")
        waiter = PublishWaiter(self._loop.create_future())
        target.publish(frames, waiter, deliver_in_ms or None)
        await waiter.future

    async def room(self, until: float | None = None) -> None:
        """Return when the node takes more publishes; Unavailable if it does not in time: `until` then, if it is known
        when the publish came."""
        await self._budget.wait((self.patience() if until is None else until) - self._loop.time())
