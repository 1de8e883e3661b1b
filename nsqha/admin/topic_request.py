"""A request about a whole topic, of which this node leads a part: which partitions it concerns, and who answers.

A node that is alone leads all of them. In a cluster the others are asked at their leaders (`Spread`), with `here` in
the request, so that they ask nobody else and answer for those partitions only. Who has been asked so answers for a
partition that it does not lead with `not_led`, at once: whoever asks looks for its leader again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.admin.fan_out import FanOut
from nsqha.admin.peer_admins import PeerAdmins
from nsqha.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from nsqha.server.node.broker import Broker
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic
    from nsqha.server.routing.leaders import Leaders

LEADER_SECONDS = 2.0  # for a leader to be found, while one is elected
CALL_SECONDS = 5.0  # for it to answer

NOT_LED = "this node does not lead it"

Answers = Mapping[int, Any]


class TopicRequest:
    """Takes requests to the leaders of a topic's partitions."""

    def __init__(self, leaders: Leaders | None, others: PeerAdmins | None, *, seconds: float = LEADER_SECONDS) -> None:
        """`leaders` and `others`: None for a node that is alone."""
        self._leaders = leaders
        self._others = others
        self._seconds = seconds

    @property
    def others(self) -> PeerAdmins:
        assert self._others is not None, "this node is alone"
        return self._others

    async def answers(
        self,
        topic: Topic,
        rpc: str,
        request: Any,
        numbers: Collection[int],
        *,
        here: Callable[[list[int]], Awaitable[Answers]],
        read: Callable[[Any], Answers] | None,
        failed: Callable[[int, str], Any],
        ask: Callable[[str, list[int]], Awaitable[Answers]] | None = None,
    ) -> dict[int, Any]:
        """An answer for each of the partitions: `here` carries the request out in what is led here, `read` finds the
        answers in another node's response, `failed` makes one for a partition that nobody answers for. NotFound,
        ValueError. `ask` instead of `read`: who is asked otherwise than by one call."""
        if self._leaders is None or request.HasField("here"):
            mine = _meant(topic, request)
            found = dict(await here([n for n in numbers if n in mine]))
            why = {n: waits(topic, n) if n in mine else NOT_LED for n in numbers}
            return found | {n: failed(n, why[n]) for n in numbers if n not in found}
        leaders = self._leaders

        async def call(address: str, numbers: list[int]) -> Answers:
            assert read is not None
            message = self.for_leader(topic, request, numbers)
            return read(await self.others.call(address, rpc, message, seconds=CALL_SECONDS))

        def leader(number: int) -> Any:
            found = leaders.leader(topic.name, number)
            return None if found is None or found.node == leaders.node else found

        fan_out = FanOut(
            here=here,
            ask=ask or call,
            leads=lambda number: topic.leads(number) is not None,
            waits=lambda number: waits(topic, number),
            leader=leader,
            failed=failed,
            seconds=self._seconds,
        )
        return await fan_out.over(numbers)

    def for_leader(self, topic: Topic, request: Any, numbers: Collection[int]) -> Any:
        """The same request for what one other node leads."""
        message = type(request)()
        message.CopyFrom(request)
        message.here.topic_uid = topic.record.uid
        message.here.partitions.extend(numbers)
        return message


def topic_of(broker: Broker, request: Any) -> Topic:
    """The topic that a request names. NotFound; Unavailable if whoever asks knows of it and this node does not yet."""
    try:
        return broker.topics.topic(request.topic)
    except NotFound as error:
        if request.HasField("here"):
            raise Unavailable(str(error)) from None
        raise


def _meant(topic: Topic, request: Any) -> set[int]:
    """What is led here, if this life of the topic is meant."""
    if request.HasField("here") and request.here.topic_uid not in (0, topic.record.uid):
        return set()
    return {partition.number for partition in topic.led}


def waits(topic: Topic, number: int) -> str:
    """Why this node gives no answer for a partition."""
    partition = topic.leads(number)
    return NOT_LED if partition is None else partition.begins


def serving(topic: Topic, numbers: Collection[int]) -> list[Partition]:
    """Those that are led here and may write channel events: not while an epoch has only begun."""
    return [p for n in numbers if (p := topic.leads(n)) is not None and p.serving]


def concerned(topic: Topic, request: Any, message_id: str | None = None) -> tuple[list[int], int]:
    """The partitions that a request speaks of, and the number behind the message id if it names one."""
    there = sorted(topic.record.partitions)
    chosen = there
    if request.HasField("here") and request.here.partitions:
        chosen = sorted(set(request.here.partitions))
    if request.HasField("partition"):
        chosen = [n for n in chosen if n == request.partition]
        if not chosen:
            raise NotFound(f"topic {topic.name} has no partition {request.partition}, only {len(there)}")
    if message_id is None:
        return chosen, 0
    number = ids.parse_message_id(message_id.encode())
    if number is None:
        raise ValueError(f"{message_id!r} is not a message id: 16 lowercase hex digits")
    chosen = [n for n in chosen if n == ids.partition_of(number)]
    if not chosen:
        raise NotFound(f"message id {message_id} is not one of topic {topic.name}")
    return chosen, number


def choice(message: Any, oneof: str) -> str:
    """Which of its alternatives a message has; "" if none."""
    return message.WhichOneof(oneof) or ""
