"""What one connection publishes, and where to.

A connection asks `PublishRoutes` once per topic and keeps the answer until `forget_targets`. For the topic that it
published to last it also keeps a `hot.Publisher`, which takes a read of nothing but whole PUBs without the session.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from nsqha import hot
from nsqha.errors import NsqhaError
from nsqha.hot import NOT_STORED
from nsqha.wire import encoder, errors

if TYPE_CHECKING:
    from nsqha.server.clients.auth import Permissions
    from nsqha.server.clients.context import ClientContext
    from nsqha.server.clients.flow import CommandFlow
    from nsqha.server.clients.transport import ClientTransport
    from nsqha.server.partition.partition import Partition
    from nsqha.server.routing.publisher import PartitionPublisher


class ClientPublisher:
    """The publishes of one connection: implements `wire.handler.PublishHandler`."""

    __slots__ = (
        "_budget",
        "_context",
        "_flow",
        "_number",
        "_permissions",
        "_replies",
        "_targets",
        "_transport",
        "counts",
        "quick",
    )

    def __init__(
        self,
        number: int,
        context: ClientContext,
        flow: CommandFlow,
        transport: ClientTransport,
        permissions: Permissions,
    ) -> None:
        """`number`: of the connection; a topic's partition is chosen by it."""
        self.counts: dict[str, int] = {}  # messages by topic
        self.quick: hot.Publisher | None = None  # to where this client published last
        self._number = number
        self._context = context
        self._flow = flow
        self._transport = transport
        self._permissions = permissions
        self._budget = context.budget
        self._replies = flow.replies
        # By topic, or by topic and partition where the client names one.
        self._targets: dict[str | tuple[str, int], tuple[Partition | PartitionPublisher, hot.Publisher | None]] = {}

    def publish(
        self,
        topic: str,
        frames: bytes,
        count: int,
        command: str,
        partition: int | None = None,
        delay_ms: int | None = None,
    ) -> None:
        key = topic if partition is None else (topic, partition)
        known = self._targets.get(key)
        if known is None or known[0].closed:
            again = partial(self.publish, topic, frames, count, command, partition, delay_ms)
            known = self._target(topic, partition, again, command)
            if known is None:
                return
        target, self.quick = known
        slot = self._replies.publish(command, count)
        self.counts[topic] = self.counts.get(topic, 0) + count
        target.publish(frames, slot, delay_ms)
        if self._budget.full:
            self._wait_for_room()

    def publish_deferred(self, topic: str, frame: bytes, delay_ms: int, partition: int | None) -> None:
        self.publish(topic, frame, 1, "DPUB", partition, delay_ms)

    def named_partitions(self, topic: str) -> int:
        return self._context.publishing.named_partitions(topic)

    def ensure_topic(self, topic: str) -> None:
        topics = self._context.topics
        if topic in self._targets or topic in topics:
            return

        async def create() -> None:
            try:
                await topics.topic_for_client(topic)
            except NsqhaError:
                pass  # the publish that follows reports it

        self._flow.wait_for(create())

    def forget_targets(self) -> None:
        """A topic came, went or changed its partitions, or bytes come in another form from now on."""
        self._targets.clear()
        self.quick = None

    # ---- where to

    def _target(
        self, topic: str, partition: int | None, again: Callable[[], None], command: str
    ) -> tuple[Partition | PartitionPublisher, hot.Publisher | None] | None:
        """Where this connection publishes to; None while the topic is being created or if it can not be."""
        publishing, flow = self._context.publishing, self._flow
        refusal = publishing.refusal()
        if refusal is not None:
            flow.refuse(errors.publish_failed(command, refusal))
            return None
        if partition is not None and not partition < publishing.named_partitions(topic):
            # The topic was deleted, and made with fewer.
            code = flow.session.publishing.fork.no_partition
            flow.refuse(errors.bad_partition(code, command, topic, partition))
            return None
        target = publishing.routes.publisher(topic, self._number, partition)
        if target is not None:
            if self._budget.full:
                # A client that has published before is not read then. Memory must not grow in a stall with each client
                # that connects again either.
                flow.wait_for(self._room(again, command))
                return None
            known = target, self._publisher_to(topic, partition, target)
            self._targets[topic if partition is None else (topic, partition)] = known
            return known

        async def create() -> Callable[[], None]:
            try:
                await self._context.topics.topic_for_client(topic)
            except NsqhaError as error:
                frame = errors.publish_failed(command, str(error))
                return lambda: flow.refuse(frame)
            return again

        flow.wait_for(create())
        return None

    def _publisher_to(
        self, topic: str, partition: int | None, target: Partition | PartitionPublisher
    ) -> hot.Publisher | None:
        """What takes the PUBs of a client that has passed every check, and sends nothing else."""
        queue = target.queue
        if queue is None or self._transport.codec is not None or self._permissions.asked_again:
            return None
        line = b"PUB %b\n" % (topic if partition is None else f"{topic} {partition}").encode()
        size_max = self._context.limits.msg_bytes_max
        time = self._context.loop.time
        return hot.Publisher(line, topic, size_max, queue, self._replies, self.counts, time, self._wait_for_room)

    # ---- room

    def _wait_for_room(self) -> None:
        if not self._flow.blocked:
            self._flow.block()
            self._budget.when_room(self._flow.unblock)

    async def _room(self, then: Callable[[], None], command: str) -> Callable[[], None]:
        try:
            await self._budget.wait(self._context.options.publish_wait_ns / 1e9)
        except NsqhaError as error:
            frame = errors.publish_failed(command, f"{NOT_STORED}{error}")
            return lambda: self._flow.refuse(frame)
        return then

    # ---- permission

    def check_publish(self, command: str, topic: str) -> bool:
        permissions = self._permissions
        if not permissions.needed:
            return True
        if permissions.expired:
            self._flow.wait_for(self._authorize_again())
            return False
        refusal = permissions.denial(command, topic)
        if refusal is not None:
            self._flow.refuse(encoder.error(refusal))
            return False
        return True

    async def _authorize_again(self) -> Callable[[], None] | None:
        return None if await self._permissions.ask() else lambda: self._flow.refuse(errors.AUTH_FAILED)
