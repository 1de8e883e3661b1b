"""`SkipDamage`: stopped channels continue behind what cannot be read, and what no replica has is given up.

A channel stops at a damaged batch until another replica repairs it. With this request an operator has each leader ask
the other replicas once more, mark as lost what none of them has, and let the channels pass it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nsqha.admin.fan_out import RETRY_SECONDS, FanOut
from nsqha.admin.topic_request import CALL_SECONDS, concerned, for_leader, serving, topic_of
from nsqha.pb.v1 import admin_pb2

if TYPE_CHECKING:
    from nsqha.admin.peer_admins import PeerAdmins
    from nsqha.server.node.broker import Broker
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic

ASK_SECONDS = 2.0  # for asking other replicas for what is about to be given up
BEGIN_SECONDS = 1.5  # for an epoch to begin, before leaders are asked again

Found = list[Any] | str  # SkippedDamage and GivenUp of one partition, or why there is no answer


@dataclass(frozen=True)
class SkipDamage:
    """The request, a `TopicRequest`.

    Without a channel it is for all of them: what no replica has is given up too, so that new replicas can be made
    without it. That works also with a leader that does not serve yet: one that was just elected may wait for exactly
    such a replica."""

    broker: Broker
    topic: Topic
    message: Any

    async def here(self, numbers: list[int]) -> dict[int, Found]:
        one_channel = self.message.HasField("channel")
        given_up = {} if one_channel else await _give_up(self.broker, self.topic, numbers)
        await _begun(self.topic, [n for n in numbers if not given_up.get(n)])
        skipped = {partition.number: _skip(partition, self.message) for partition in serving(self.topic, numbers)}
        if any(skipped.values()):
            await self.topic.commit_events()
        return {n: skipped.get(n, []) + given_up.get(n, []) for n in {*skipped, *(n for n in given_up if given_up[n])}}

    async def ask(self, peers: PeerAdmins, address: str, numbers: list[int]) -> dict[int, Found]:
        message = for_leader(self.topic, self.message, numbers)
        reply = await peers.call(address, "SkipDamage", message, seconds=CALL_SECONDS)
        found: dict[int, Found] = {error.partition: error.error for error in reply.errors if not error.not_led}
        elsewhere = {error.partition for error in reply.errors if error.not_led}
        for number in {*numbers} - {*found} - elsewhere:
            found[number] = [one for one in (*reply.skipped, *reply.given_up) if one.partition == number]
        return found

    def failed(self, number: int, why: str) -> Found:
        return why


async def skip_damage(broker: Broker, message: Any, fan_out: FanOut) -> Any:
    """Carry the request out in every partition concerned; returns when that is in their logs."""
    topic = topic_of(broker, message)
    numbers, _ = concerned(topic, message)
    answers = await fan_out.answers(SkipDamage(broker, topic, message), numbers)
    not_led = message.HasField("here")
    response = admin_pb2.SkipDamageResponse()
    for number, answer in sorted(answers.items()):
        if isinstance(answer, str):
            response.errors.add(partition=number, error=answer, not_led=not_led)
        else:
            response.skipped.extend(one for one in answer if isinstance(one, admin_pb2.SkippedDamage))
            response.given_up.extend(one for one in answer if isinstance(one, admin_pb2.GivenUp))
    return response


async def _give_up(broker: Broker, topic: Topic, numbers: list[int]) -> dict[int, list[Any]]:
    if broker.cluster is None:
        return {}
    mark_lost, led = broker.cluster.replicas.integrity.mark_lost, [n for n in numbers if topic.leads(n) is not None]
    lost = await asyncio.gather(*[mark_lost.give_up((topic.record.uid, n), seconds=ASK_SECONDS) for n in led])
    return {
        number: [
            admin_pb2.GivenUp(partition=number, first_offset=one.first_offset, end_offset=one.end_offset)
            for one in ranges
        ]
        for number, ranges in zip(led, lost, strict=True)
    }


async def _begun(topic: Topic, numbers: list[int]) -> None:
    """Wait a short time for partitions led here whose epoch has only begun; after that leaders are asked again."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + BEGIN_SECONDS
    while loop.time() < deadline and any((p := topic.leads(n)) is not None and not p.serving for n in numbers):
        await asyncio.sleep(RETRY_SECONDS)


def _skip(partition: Partition, request: Any) -> list[Any]:
    skipped = []
    for name, delivery in partition.deliveries.items():
        if request.HasField("channel") and name != request.channel:
            continue
        range_ = delivery.skip_damage()
        if range_ is not None:
            first, end, lost = range_
            skipped.append(
                admin_pb2.SkippedDamage(
                    channel=name, partition=partition.number, first_offset=first, end_offset=end, messages_lost=lost
                )
            )
    return skipped
