"""Where a publish goes, and publishes that come over HTTP and gRPC.

A connection asks once per topic and keeps the answer (`Connections.forget_targets` takes it away); HTTP and gRPC ask
for each publish. The answer of a node that is alone is a partition: one per connection, so that what one connection
publishes keeps its order. In a cluster it is a `PartitionPublisher` to one partition, which goes on through changes of
its leader. Batches and outcomes belong to the partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsqha.errors import OutcomeUnknown, Unavailable
from nsqha.hot import NOT_STORED
from nsqha.options import Options
from nsqha.server.partition.partition import Partition
from nsqha.server.routing.publisher import PartitionPublisher
from nsqha.server.runtime.budget import PublishBudget
from nsqha.server.topics.topics import Topics

if TYPE_CHECKING:
    from nsqha.server.routing.forward_client import Forwarder


class PublishWaiter:
    """The outcome of a publish that came over HTTP or gRPC."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future

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
        refusal: Callable[[], str | None],
        next_number: Callable[[], int],
    ) -> None:
        self.refusal = refusal  # why nothing can be published now; None if it can
        self.forwarder: Forwarder | None = None  # None: this node is alone
        self._topics = topics
        self._loop = loop
        self._budget = budget
        self._next_number = next_number
        self._wait_seconds = options.publish_wait_ns / 1e9

    def target_for(self, topic: str, publisher: int) -> Partition | PartitionPublisher | None:
        """Where this publisher publishes to the topic; None if the topic has to be made first."""
        if self.forwarder is not None:
            return self.forwarder.publisher(topic, publisher)
        found = self._topics.get(topic)
        return found.partition_for(publisher) if found is not None and not found.deleting else None

    def patience(self) -> float:
        """Until when a publish that came just now waits for room; loop time."""
        return self._loop.time() + self._wait_seconds

    async def publish(
        self, topic: str, frames: bytes, *, deliver_in_ms: int | None = None, until: float | None = None
    ) -> None:
        """Store blank frames as one unit; returns when they are committed. `until`: as `room`."""
        refusal = self.refusal()
        if refusal is not None:
            raise Unavailable(refusal)
        await self._topics.topic_for_client(topic)
        await self.room(until)  # the last wait: all who are woken look whether there still is room
        target = self.target_for(topic, self._next_number())
        if target is None:
            raise Unavailable(f"topic {topic} is being deleted")
        waiter = PublishWaiter(self._loop.create_future())
        target.publish(frames, waiter, deliver_in_ms or None)
        await waiter.future

    async def room(self, until: float | None = None) -> None:
        """Return when the node takes more publishes; Unavailable if it does not in time: `until` then, if it is known
        when the publish came."""
        await self._budget.wait((self.patience() if until is None else until) - self._loop.time())
