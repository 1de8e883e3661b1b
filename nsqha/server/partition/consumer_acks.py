"""What a consumer says of the messages that are in flight to it: FIN, REQ and TOUCH.

The partition bits of a message id name the leg, which is the consumer's place at that partition; the channel there
decides. What is of a partition that another node leads is passed on to it (`Remote`). A run of FINs is handed on as one
piece of the bytes that came, with no object per message; only what the channel does not take at once is looked at one
by one. A success has no reply; a failure has one, in its turn, and the connection lives.
"""

from __future__ import annotations

from collections.abc import Callable

from nsqha import ids
from nsqha.clock import Now
from nsqha.cursor.flight import NOT_IN_FLIGHT
from nsqha.server.partition.delivery import Consumer, Leg
from nsqha.wire import errors

_HEX = b"0123456789abcdef"


class ConsumerAcks:
    """FIN, REQ and TOUCH of one consumer."""

    __slots__ = ("_consumer", "_now", "_reply")

    def __init__(self, consumer: Consumer, reply: Callable[[bytes], None], now: Callable[[], Now]) -> None:
        self._consumer = consumer
        self._reply = reply  # writes an error frame after the replies of earlier commands
        self._now = now

    def fin_run(self, data: bytes, pos: int, end: int) -> None:
        consumer = self._consumer
        while pos < end:
            digits = data[pos + 4 : pos + 8]
            leg = None if digits.strip(_HEX) else consumer.legs.get(int(digits, 16) >> 2)
            if leg is not None:
                new, count = leg.channel.fin_run(data, pos, end, leg.owner)
                if count:
                    consumer.in_flight -= count
                    consumer.finish_count += count
                    consumer.wake()
                    if leg.delivery.latency is not None:
                        self._note_latency(leg, data[new - 17 : new - 1], count)
                if new != pos:
                    pos = new
                    continue
            elif consumer.remote is not None and (new := consumer.remote.fin_run(data, pos, end)) != pos:
                pos = new
                continue
            self._fin_one(consumer, data[pos + 4 : pos + 20])
            pos += 21

    def _fin_one(self, consumer: Consumer, message_id: bytes) -> None:
        leg, offset = self._find(consumer, message_id)
        why = leg.channel.fin(offset, leg.owner) if leg is not None else NOT_IN_FLIGHT
        if why is not None:
            self._reply(errors.fin_failed(message_id, why))
            return
        assert leg is not None
        consumer.in_flight -= 1
        consumer.finish_count += 1
        consumer.wake()
        if leg.delivery.latency is not None:
            self._note_latency(leg, message_id, 1)

    def _note_latency(self, leg: Leg, message_id: bytes, count: int) -> None:
        """As nsqd, at FIN; a run of FINs counts with the age of its last message."""
        leg.delivery.finished(int(message_id, 16) - leg.id_base, count, self._now())

    def req(self, message_id: bytes, delay_ms: int) -> None:
        consumer = self._consumer
        leg, offset = self._find(consumer, message_id)
        if leg is None:
            if consumer.remote is not None and consumer.remote.req(message_id, delay_ms):
                return
            self._reply(errors.req_failed(message_id, NOT_IN_FLIGHT))
            return
        why = leg.channel.req(offset, leg.owner, delay_ms, self._now())
        if why is not None:
            self._reply(errors.req_failed(message_id, why))
            return
        consumer.in_flight -= 1
        consumer.requeue_count += 1
        consumer.wake()

    def touch(self, message_id: bytes) -> None:
        consumer = self._consumer
        leg, offset = self._find(consumer, message_id)
        if leg is None:
            if consumer.remote is not None and consumer.remote.touch(message_id):
                return
            self._reply(errors.touch_failed(message_id, NOT_IN_FLIGHT))
            return
        why = leg.channel.touch(offset, leg.owner, self._now(), consumer.msg_timeout)
        if why is not None:
            self._reply(errors.touch_failed(message_id, why))

    def _find(self, consumer: Consumer, message_id: bytes) -> tuple[Leg | None, int]:
        number = ids.parse_message_id(message_id)
        if number is None:
            return None, 0
        leg = consumer.legs.get(ids.partition_of(number))
        return (leg, number - leg.id_base) if leg is not None else (None, 0)
