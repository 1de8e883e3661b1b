"""ListMessages and ChangeMessages: what a channel holds, message by message, and what an operator does to them.

A page is per partition, from its leader; a client that wants more asks again with `after`. A change is one page, too:
up to 1,000 messages per partition and call, so no call holds a leader's loop for long, and whoever selects a million
does it in steps. It is answered when it is committed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.admin.fan_out import FanOut
from nsqha.admin.topic_request import CALL_SECONDS, concerned, concerned_by, for_leader, serving, topic_of
from nsqha.clock import Now
from nsqha.cursor.deferred.dead import death_of
from nsqha.cursor.live.acting import Action, act, check
from nsqha.cursor.live.looking import Held, MessageState, held, page_of
from nsqha.errors import Conflict, LogCorrupt, NotFound, NsqhaError, OutcomeUnknown
from nsqha.pb.v1 import admin_pb2
from nsqha.server.clients.figures import client_stats

if TYPE_CHECKING:
    from nsqha.admin.peer_admins import PeerAdmins
    from nsqha.cursor.live.channel import Channel
    from nsqha.server.node.broker import Broker
    from nsqha.server.partition.delivery import Delivery
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic

LIMIT = 100
LIMIT_MAX = 1000
BODY_BYTES = 4096  # of a body in a list
BODIES_BYTES = 2 << 20  # of all in an answer, shared by its partitions
DUE_NS_MAX = (1 << 62) - 1
_BODY = 34  # where it begins in a message's frame
_LISTED = (MessageState.IN_FLIGHT, MessageState.WAITING, MessageState.DEFERRED, MessageState.DEAD)


@dataclass(frozen=True)
class PerPartition:
    """A request with an answer of one kind for each partition, a `TopicRequest`."""

    topic: Topic
    message: Any
    rpc: str
    answer: Any  # the message class
    do: Callable[[Partition], Any]  # NsqhaError: the partition's answer is that
    changes: bool = False

    async def here(self, numbers: list[int]) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        changed: list[Partition] = []
        for partition in serving(self.topic, numbers):
            try:
                answers[partition.number] = self.do(partition)
                if self.changes and answers[partition.number].changed:
                    changed.append(partition)
            except NsqhaError as error:
                if isinstance(error, NotFound) and self.rpc == "ListMessages" and self.message.message_id:
                    raise
                answers[partition.number] = self.answer(partition=partition.number, error=str(error))
            await asyncio.sleep(0)  # each may take some milliseconds
        outcomes = await asyncio.gather(*[p.commit_events() for p in changed], return_exceptions=True)
        for partition, outcome in zip(changed, outcomes, strict=True):
            if isinstance(outcome, NsqhaError):
                why = f"done, but not known to be committed: {outcome}"
                answers[partition.number] = self.answer(partition=partition.number, error=why)
            elif isinstance(outcome, BaseException):
                raise outcome
        return answers

    async def ask(self, peers: PeerAdmins, address: str, numbers: list[int]) -> dict[int, Any]:
        reply = await peers.call(
            address, self.rpc, for_leader(self.topic, self.message, numbers), seconds=CALL_SECONDS
        )  # fmt: skip
        return {answer.partition: answer for answer in reply.partitions if not answer.not_led}

    def failed(self, number: int, why: str) -> Any:
        return self.answer(partition=number, error=why, not_led=self.message.HasField("here"))


# ---- looking


async def list_messages(broker: Broker, message: Any, fan_out: FanOut) -> Any:
    """A page of each partition concerned, or one message. ValueError: the request makes no sense."""
    topic, limit = _topic(broker, message), _limit(message, LIMIT)
    id_ = message.message_id or None
    numbers, number = concerned(topic, message, id_) if id_ is not None else (_numbers(topic, message), 0)
    state = None if id_ is not None else _state(message.state)

    def do(partition: Partition) -> Any:
        delivery, now = _delivery(partition, message.channel), partition.now()
        cursor = delivery.channel.cursor
        answer = admin_pb2.HeldMessages(partition=partition.number)
        if state is None:
            found = held(cursor, number - partition.id_base)
            if found is None:
                raise NotFound(f"channel {message.channel} has not got message {id_}, or not yet")
            answer.messages.append(_shown(partition, delivery, found, now, bodies=message.bodies))
            return answer
        page = page_of(cursor, state, _after(message, partition.number), limit)
        room = BODIES_BYTES // len(numbers)
        for n, one in enumerate(page.messages):
            shown = _shown(partition, delivery, one, now, bodies=message.bodies)
            room -= _cut(shown)
            answer.messages.append(shown)  # a copy
            if room < 0 and n + 1 < len(page.messages):
                _set_next(answer, _place_of(one))
                return answer
        _set_next(answer, page.next)
        return answer

    request = PerPartition(topic, message, "ListMessages", admin_pb2.HeldMessages, do)
    answers = await fan_out.answers(request, numbers)
    return admin_pb2.ListMessagesResponse(partitions=[answers[n] for n in sorted(answers)])


def _shown(partition: Partition, delivery: Delivery, one: Held, now: Now, *, bodies: bool) -> Any:
    shown = admin_pb2.HeldMessage(
        message_id=f"{partition.id_base + one.offset:016x}",
        offset=one.offset,
        state=one.state.value,  # type: ignore[arg-type]  # its numbers are those of the .proto file
        attempts=one.attempts,
    )
    if one.state is MessageState.DEAD:
        shown.died_ns, reason = death_of(one.due_ns)
        shown.reason = reason  # type: ignore[assignment]  # its numbers are those of the .proto file
    elif one.due_ns:
        shown.due_ns = one.due_ns
    if one.deadline:
        at = now.wall_ns + round((one.deadline - now.mono) * 1e9)
        if one.state is MessageState.IN_FLIGHT:
            shown.times_out_ns = at
        else:
            shown.due_ns = at
    if one.owner:
        shown.client = _client(delivery, one.owner)
    try:
        frame = partition.log.message(one.offset, one.position)
    except (LogCorrupt, OSError) as error:
        shown.error = str(error)
        return shown
    shown.published_ns = int.from_bytes(frame[8:16])
    if bodies:
        shown.body = bytes(frame[_BODY:])
        shown.body_bytes = len(shown.body)
    return shown


def _cut(shown: Any) -> int:
    """A list has the beginnings of bodies; how many bytes."""
    if len(shown.body) > BODY_BYTES:
        shown.body = shown.body[:BODY_BYTES]
    return len(shown.body)


def _client(delivery: Delivery, owner: int) -> str:
    consumer = delivery.consumer_of(owner)
    if consumer is None:
        return ""
    if not consumer.relayed:
        return client_stats(consumer.wire, consumer).remote_address
    from nsqha.server.routing.relayed_clients import relayed_stats  # only nodes of a cluster load it

    return next((client.remote_address for client in relayed_stats([consumer])), "")


# ---- acting


async def change_messages(broker: Broker, message: Any, fan_out: FanOut) -> Any:
    """Do something to messages by id, or to a page of a selection. ValueError: the request makes no sense."""
    topic, limit = _topic(broker, message), _limit(message, LIMIT_MAX)
    if not message.action:
        raise ValueError("say what to do: finish, requeue, defer or kill")
    action = Action(message.action)
    if action is Action.DEFER and not 0 < message.due_ns <= DUE_NS_MAX:
        raise ValueError(
            f"due_ns is {message.due_ns}; it must be 1 to {DUE_NS_MAX}, nanoseconds since 1970: before 2116"
        )
    if message.message_ids:
        if message.state or message.reason or message.older_than_ms or message.after:
            raise ValueError("give ids, or a state and what narrows it, not both")
        if len(message.message_ids) > limit:
            raise ValueError(f"{len(message.message_ids)} ids; {limit} at most at a time")
        named = concerned_by(topic, message)
        numbers = sorted(named)
    else:
        state = _state(message.state)
        if message.reason and state is not MessageState.DEAD:
            raise ValueError("only dead letters have a reason")
        numbers = _numbers(topic, message)

    def do(partition: Partition) -> Any:
        delivery, now = _delivery(partition, message.channel), partition.now()
        answer = admin_pb2.ChangedMessages(partition=partition.number)
        if message.message_ids:
            offsets = [value - partition.id_base for value in named[partition.number]]
        else:
            offsets = _select(partition, delivery.channel, state, message, now, limit, answer)
        _change(partition, delivery, offsets, action, message, now, answer)
        return answer

    acts = not message.plan_only
    request = PerPartition(topic, message, "ChangeMessages", admin_pb2.ChangedMessages, do, changes=acts)
    answers = await fan_out.answers(request, numbers)
    if message.message_ids and not message.HasField("here"):
        for n in numbers:
            _say_of_each(answers[n], [f"{value:016x}" for value in named[n]])
    return admin_pb2.ChangeMessagesResponse(partitions=[answers[n] for n in sorted(answers)])


def _say_of_each(answer: Any, message_ids: list[str]) -> None:
    """Complete a partition's answer: each id is among `done` or `failed`."""
    if answer.error:
        for id_ in message_ids:
            answer.failed.add(message_id=id_, error=answer.error)
    failed = {one.message_id for one in answer.failed}
    answer.done.extend(id_ for id_ in message_ids if id_ not in failed)


async def finish_message(broker: Broker, fan_out: FanOut, topic: str, channel: str, message_id: str) -> None:
    """Nobody gets the message any more. ValueError: that is no message id. NotFound; Conflict: it is finished already,
    or its partition could not say; OutcomeUnknown: it may be done."""
    request = admin_pb2.ChangeMessagesRequest(
        topic=topic, channel=channel, message_ids=[message_id], action=admin_pb2.MESSAGE_ACTION_FINISH
    )
    (answer,) = (await change_messages(broker, request, fan_out)).partitions
    if answer.error:
        raise OutcomeUnknown(f"partition {answer.partition}: {answer.error}")
    for failed in answer.failed:
        raise Conflict(f"message {failed.message_id}: {failed.error}")


def _select(
    partition: Partition, channel: Channel, state: MessageState, message: Any, now: Now, limit: int, answer: Any
) -> list[int]:
    """Up to `limit` offsets of the selection, among the next LIMIT_MAX messages in this state where it is narrowed."""
    narrowed = message.reason or message.older_than_ms
    page = page_of(channel.cursor, state, _after(message, partition.number), LIMIT_MAX if narrowed else limit)
    before_ns = now.wall_ns - message.older_than_ms * 1_000_000
    offsets: list[int] = []
    for n, one in enumerate(page.messages, 1):
        if message.reason and death_of(one.due_ns)[1] != message.reason:
            continue
        if message.older_than_ms and (one.died_ns or _published_ns(partition, one)) > before_ns:
            continue
        offsets.append(one.offset)
        if len(offsets) == limit and n < len(page.messages):
            _set_next(answer, _place_of(one))
            return offsets
    _set_next(answer, page.next)
    return offsets


def _place_of(one: Held) -> tuple[int, int]:
    return (one.due_ns if one.state is MessageState.DEAD else 0, one.offset)


def _published_ns(partition: Partition, one: Held) -> int:
    try:
        return int.from_bytes(partition.log.message(one.offset, one.position)[8:16])
    except (LogCorrupt, OSError):
        return 0  # so it is old enough: it can not be delivered


def _change(
    partition: Partition, delivery: Delivery, offsets: list[int], action: Action, message: Any, now: Now, answer: Any
) -> None:
    cursor = delivery.channel.cursor
    owners = Counter[int]()
    for offset in offsets:
        try:
            if message.plan_only:
                check(cursor, offset, action)
            elif owner := act(cursor, offset, action, now, due_ns=message.due_ns):
                owners[owner] += 1
            answer.changed += 1
        except NsqhaError as error:
            answer.failed.add(message_id=f"{partition.id_base + offset:016x}", error=str(error))
    if not message.plan_only:
        delivery.forgotten(owners)  # wakes it, too: an #ephemeral channel has no commit that would
        partition.deliveries.arm(now.mono)


# ---- requests


def _topic(broker: Broker, message: Any) -> Topic:
    topic = topic_of(broker, message)
    # Of an #ephemeral channel only the leaders know.
    known = broker.cluster is not None and ids.is_ephemeral(message.channel)
    if not known and not topic.has_channel(message.channel):
        raise NotFound(f"there is no channel {message.channel} of topic {message.topic}")
    return topic


def _delivery(partition: Partition, channel: str) -> Delivery:
    found = partition.deliveries.get(channel)
    if found is None:
        raise NotFound(f"there is no channel {channel}")
    return found


def _limit(message: Any, usual: int) -> int:
    if message.limit > LIMIT_MAX:
        raise ValueError(f"limit is {message.limit}; it must be at most {LIMIT_MAX}")
    return message.limit or usual


def _state(value: int) -> MessageState:
    if value not in _LISTED:
        raise ValueError("say which messages: those in flight, waiting, deferred or dead")
    return MessageState(value)


def _numbers(topic: Topic, message: Any) -> list[int]:
    numbers, _ = concerned(topic, message)
    places = {place.partition for place in message.after}
    return [number for number in numbers if number in places] if places else numbers


def _after(message: Any, number: int) -> tuple[int, int]:
    place = next((place for place in message.after if place.partition == number), None)
    return (place.due_ns, place.offset) if place is not None else (0, -1)


def _set_next(answer: Any, place: tuple[int, int] | None) -> None:
    if place is not None:
        answer.next.CopyFrom(
            admin_pb2.MessagePlace(partition=answer.partition, due_ns=place[0], offset=max(place[1], 0))
        )
