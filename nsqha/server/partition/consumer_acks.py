"""What a consumer says of the messages that are in flight to it: FIN, REQ and TOUCH.

The partition bits of a message id name the subscription, which is the consumer's place at that partition; the channel
there decides. What is of a partition that another node leads is passed on to it (`Remote`). A run of FINs is handed on
as one piece of the bytes that came, with no object per message; only what the channel does not take at once is looked
at one by one. A success has no reply; a failure has one, in its turn, and the connection lives.
"""

from __future__ import annotations

from collections.abc import Callable

from nsqha import ids
from nsqha.clock import Now
from nsqha.cursor.live.flight import NOT_IN_FLIGHT
from nsqha.server.partition.delivery import Consumer, Subscription
from nsqha.wire import errors

_HEX = b"0123456789abcdef"


class ConsumerAcks:
    """FIN, REQ and TOUCH of one consumer."""

    __slots__ = ("_consumer", "_now", "_reply")

    def __init__(self, consumer: Consumer, reply: Callable[[bytes], None], now: Callable[[], Now]) -> None:
        self._consumer = consumer
        self._reply = reply  # writes an error frame after the replies of earlier commands
        self._now = now

    def fin_run(self, data: bytes, pos: int, end: int, singly: int) -> int:
        """Returns where it stopped: at `end`, or behind `singly` FINs that had to be looked at one by one."""
        consumer = self._consumer
        while pos < end and singly:
            digits = data[pos + 4 : pos + 8]
            subscription = None if digits.strip(_HEX) else consumer.subscriptions.get(int(digits, 16) >> 2)
            if subscription is not None:
                new, count = subscription.channel.fin_run(data, pos, end, subscription.owner)
                if count:
                    consumer.in_flight -= count
                    consumer.finish_count += count
                    consumer.wake()
                    if subscription.delivery.latency is not None:
                        self._note_latency(subscription, data[new - 17 : new - 1], count)
                if new != pos:
                    pos = new
                    continue
            elif (new := consumer.remote.fin_run(data, pos, end)) != pos:
                pos = new
                continue
            self._fin_one(consumer, data[pos + 4 : pos + 20])
            pos += 21
            singly -= 1
        return pos

    def _fin_one(self, consumer: Consumer, message_id: bytes) -> None:
        subscription, offset = self._find(consumer, message_id)
        why = subscription.channel.fin(offset, subscription.owner) if subscription is not None else NOT_IN_FLIGHT
        if why is not None:
            self._reply(errors.fin_failed(message_id, why))
            return
        assert subscription is not None
        consumer.in_flight -= 1
        consumer.finish_count += 1
        consumer.wake()
        if subscription.delivery.latency is not None:
            self._note_latency(subscription, message_id, 1)

    def _note_latency(self, subscription: Subscription, message_id: bytes, count: int) -> None:
        """As nsqd, at FIN; a run of FINs counts with the age of its last message."""
        subscription.delivery.finished(int(message_id, 16) - subscription.id_base, count, self._now())

    def req(self, message_id: bytes, delay_ms: int) -> None:
        consumer = self._consumer
        subscription, offset = self._find(consumer, message_id)
        if subscription is None:
            if consumer.remote.req(message_id, delay_ms):
                return
            self._reply(errors.req_failed(message_id, NOT_IN_FLIGHT))
            return
        why = subscription.channel.req(offset, subscription.owner, delay_ms, self._now())
        if why is not None:
            self._reply(errors.req_failed(message_id, why))
            return
        consumer.in_flight -= 1
        consumer.requeue_count += 1
        consumer.wake()

    def touch(self, message_id: bytes) -> None:
        consumer = self._consumer
        subscription, offset = self._find(consumer, message_id)
        if subscription is None:
            if consumer.remote.touch(message_id):
                return
            self._reply(errors.touch_failed(message_id, NOT_IN_FLIGHT))
            return
        why = subscription.channel.touch(offset, subscription.owner, self._now(), consumer.msg_timeout)
        if why is not None:
            self._reply(errors.touch_failed(message_id, why))

    def _find(self, consumer: Consumer, message_id: bytes) -> tuple[Subscription | None, int]:
        number = ids.parse_message_id(message_id)
        if number is None:
            return None, 0
        subscription = consumer.subscriptions.get(ids.partition_of(number))
        return (subscription, number - subscription.id_base) if subscription is not None else (None, 0)
