"""A request about a whole topic: which partitions it concerns, and what one of them answers.

A `TopicRequest` carries itself out in the partitions that this node leads. `nsqha.admin.fan_out` sends it to the
leaders of all others, with `here` in its message: a node that gets it answers for what it leads and asks no other
node. For a partition that it does not lead it answers `not_led` at once, and the caller looks for the leader again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from nsqha import ids
from nsqha.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from nsqha.admin.peer_admins import PeerAdmins
    from nsqha.server.node.broker import Broker
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic

CALL_SECONDS = 5.0  # for another node to answer

NOT_LED = "this node does not lead it"

T_co = TypeVar("T_co", covariant=True)


class TopicRequest(Protocol[T_co]):
    """One request; `T_co` is its answer for one partition."""

    @property
    def topic(self) -> Topic: ...

    @property
    def message(self) -> Any:
        """The request as it came. It has a field `here`."""

    async def here(self, numbers: list[int]) -> Mapping[int, T_co]:
        """Carry it out in these partitions, which this node led a moment ago. A partition without an answer is not led
        here any more, or its epoch has only begun. NotFound, ValueError: the request is invalid for every partition."""

    async def ask(self, peers: PeerAdmins, address: str, numbers: list[int]) -> Mapping[int, T_co]:
        """Have the node at this address carry it out in these partitions (`for_leader`). A partition without an answer
        is not led there. Unavailable: it was not asked."""

    def failed(self, number: int, why: str) -> T_co:
        """The answer for a partition without one; `why` says the reason."""


def for_leader(topic: Topic, message: Any, numbers: Collection[int]) -> Any:
    """The same message for what one other node leads: of ids, places and offsets only those of these partitions."""
    copy = type(message)()
    copy.CopyFrom(message)
    copy.here.topic_uid = topic.record.uid
    copy.here.partitions.extend(numbers)
    fields = message.DESCRIPTOR.fields_by_name
    if "message_ids" in fields:
        del copy.message_ids[:]
        copy.message_ids.extend(id_ for id_ in message.message_ids if ids.partition_of(id_number(id_)) in numbers)
    if "after" in fields:
        del copy.after[:]
        copy.after.extend(place for place in message.after if place.partition in numbers)
    if "offsets" in fields:
        for number in set(message.offsets).difference(numbers):
            del copy.offsets[number]
    return copy


def topic_of(broker: Broker, message: Any) -> Topic:
    """The topic that a message names. NotFound; Unavailable if the asking node knows it and this one does not yet."""
    try:
        return broker.topics.topic(message.topic)
    except NotFound as error:
        if message.HasField("here"):
            raise Unavailable(str(error)) from None
        raise


def meant_here(topic: Topic, message: Any) -> set[int]:
    """The partitions that are led here, if the message means this life of the topic."""
    if message.HasField("here") and message.here.topic_uid not in (0, topic.record.uid):
        return set()
    return {partition.number for partition in topic.led}


def why_silent(topic: Topic, number: int) -> str:
    """Why this node gives no answer for a partition."""
    partition = topic.leads(number)
    return NOT_LED if partition is None else partition.begins


def serving(topic: Topic, numbers: Collection[int]) -> list[Partition]:
    """Those of the partitions that are led here and may write channel events: their epoch start is committed."""
    return [p for n in numbers if (p := topic.leads(n)) is not None and p.serving]


def concerned(topic: Topic, message: Any, message_id: str | None = None) -> tuple[list[int], int]:
    """The partitions that a message names, and the number in the message id if it has one."""
    there = sorted(topic.record.partitions)
    chosen = there
    if message.HasField("here") and message.here.partitions:
        chosen = sorted(set(message.here.partitions))
    if message.HasField("partition"):
        chosen = [n for n in chosen if n == message.partition]
        if not chosen:
            raise NotFound(f"topic {topic.name} has no partition {message.partition}, only {len(there)}")
    if message_id is None:
        return chosen, 0
    number = id_number(message_id)
    if ids.partition_of(number) not in there:
        raise NotFound(f"message id {message_id} is not one of topic {topic.name}")
    chosen = [n for n in chosen if n == ids.partition_of(number)]
    if not chosen:
        raise NotFound(f"message id {message_id} is one of partition {ids.partition_of(number)}, which is not meant")
    return chosen, number


def concerned_by(topic: Topic, message: Any) -> dict[int, list[int]]:
    """The numbers in the message ids of a message that has many, each once, by partition. ValueError, NotFound for one
    that cannot be one of the topic, and of the partition that the message names. Another node's message may name ids of
    partitions that it does not ask for here (nodes of an older version); these are left out."""
    found: dict[int, list[int]] = {}
    asked = set(message.here.partitions) if message.HasField("here") else None
    for id_ in dict.fromkeys(message.message_ids):
        if not asked or ids.partition_of(id_number(id_)) in asked:
            (number,), value = concerned(topic, message, id_)
            found.setdefault(number, []).append(value)
    return found


def id_number(message_id: str) -> int:
    """The number in a message id. ValueError: it is none."""
    number = ids.parse_message_id(message_id.encode())
    if number is None:
        raise ValueError(f"{message_id!r} is not a message id: 16 lowercase hex digits")
    return number


def choice(message: Any, oneof: str) -> str:
    """The field of a oneof that a message has; "" if none."""
    return message.WhichOneof(oneof) or ""
