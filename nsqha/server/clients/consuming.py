"""The one SUB of a client, and what the client says of its window afterwards.

What it says of single messages (FIN, REQ, TOUCH) the session gives to `ConsumerAcks`, from the SUB on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nsqha.errors import NsqhaError
from nsqha.server.partition.consumer_acks import ConsumerAcks
from nsqha.server.partition.delivery import Consumer, Wire
from nsqha.wire import encoder, errors
from nsqha.wire.commands import CLOSING

if TYPE_CHECKING:
    from nsqha.server.clients.auth import Permissions
    from nsqha.server.clients.context import ClientContext
    from nsqha.server.clients.flow import CommandFlow
    from nsqha.server.clients.negotiation import Negotiation


class ClientConsuming:
    """What one connection consumes: implements `wire.handler.ConsumeHandler`."""

    __slots__ = ("_context", "_flow", "_negotiation", "_permissions", "_wire", "consumer")

    def __init__(
        self,
        wire: Wire,
        context: ClientContext,
        flow: CommandFlow,
        permissions: Permissions,
        negotiation: Negotiation,
    ) -> None:
        self.consumer: Consumer | None = None
        self._wire = wire
        self._context = context
        self._flow = flow
        self._permissions = permissions
        self._negotiation = negotiation

    def subscribe(self, topic: str, channel: str, partition: int | None) -> None:
        self._flow.after_replies(lambda: self._flow.wait_for(self._subscribe(topic, channel, partition)))

    async def _subscribe(self, topic: str, channel: str, partition: int | None) -> Callable[[], None] | None:
        flow, subscriptions = self._flow, self._context.subscriptions
        refusal = await self._refusal(topic, channel)
        if refusal is not None:
            return lambda: flow.refuse(refusal)
        consumer = self._new_consumer(topic, channel, partition)
        try:
            await subscriptions.subscribe(consumer)
        except NsqhaError as error:
            failure = errors.sub_failed(str(error))
            return lambda: flow.refuse(failure)
        if flow.closed:
            subscriptions.unsubscribe(consumer)
            return None
        self.consumer = consumer
        flow.session.consuming.acks = ConsumerAcks(consumer, flow.replies.reply, self._context.now)
        return lambda: flow.replies.reply(encoder.OK)

    async def _refusal(self, topic: str, channel: str) -> bytes | None:
        """The error frame for a client that may not read the channel; None: it may."""
        permissions = self._permissions
        if not permissions.needed:
            return None
        if permissions.expired and not await permissions.ask():
            return errors.AUTH_FAILED
        denial = permissions.denial("SUB", topic, channel)
        return None if denial is None else encoder.error(denial)

    def _new_consumer(self, topic: str, channel: str, partition: int | None) -> Consumer:
        agreed = self._negotiation.agreed
        timeout_ms = agreed.msg_timeout_ms if agreed else self._context.limits.msg_timeout_default_ms
        return Consumer(
            self._wire,
            topic=topic,
            channel=channel,
            only=partition,
            msg_timeout=timeout_ms / 1000,
            sample_rate=agreed.sample_rate if agreed else 0,
        )

    def named_partitions(self, topic: str) -> int:
        return self._context.publishing.named_partitions(topic)

    def ready(self, count: int) -> None:
        consumer = self.consumer
        if consumer is not None and self._flow.session.consuming.state != CLOSING:
            consumer.ready(count)

    def cls(self) -> None:
        if self.consumer is not None:
            self.consumer.ready(0)
        self._flow.replies.reply(encoder.CLOSE_WAIT)
