"""Where a publish goes, and publishes that come over HTTP and gRPC.

A connection asks once per topic and keeps the answer (`Connection.forget_targets` takes it away); HTTP and gRPC ask for
each publish. The answer is a partition that this node leads: one per connection, so that what one connection publishes
keeps its order. Batches and outcomes belong to the partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nsqha.errors import OutcomeUnknown, Unavailable
from nsqha.options import Options
from nsqha.server.budget import PublishBudget
from nsqha.server.partition import Partition
from nsqha.server.topics import Topics


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
            error = OutcomeUnknown if why.startswith("outcome unknown") else Unavailable
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
        self._topics = topics
        self._loop = loop
        self._budget = budget
        self._next_number = next_number
        self._wait_seconds = options.publish_wait_ns / 1e9

    def partition_for(self, topic: str, connection_number: int) -> Partition | None:
        """The partition that this connection publishes to; None if the topic has to be made first."""
        found = self._topics.get(topic)
        return found.partition_for(connection_number) if found is not None and not found.deleting else None

    async def publish(self, topic: str, frames: bytes, count: int, *, deliver_in_ms: int | None = None) -> None:
        """Store blank frames as one unit; returns when they are committed."""
        refusal = self.refusal()
        if refusal is not None:
            raise Unavailable(refusal)
        await self._budget.wait(self._wait_seconds)
        found = await self._topics.topic_for_client(topic)
        partition = found.partition_for(self._next_number())
        waiter = PublishWaiter(self._loop.create_future())
        if deliver_in_ms:
            partition.publish_deferred(frames, deliver_in_ms, waiter)
        else:
            partition.publish(frames, waiter)
        await waiter.future
