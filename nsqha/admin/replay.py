"""Seek and undo: from a time, an id or "start" to offsets, and what that would cost.

    timestamp   the first batch at or after it, less the clock skew (below); none: the end
    message id  its partition and offset; an id that this topic has never used is refused
    offset      itself; start: the log start; end: the pump
    ... clamped to [log start, pump] by `nsqha.cursor.seek`

A plan comes first and is a forecast; the act answers with what happened. Each partition has its own answer, from its
leader (`nsqha.admin.fan_out`): one that cannot be moved says why and does not keep the others from moving.

**Clock skew.** Batches carry their leader's clock. The user who asks for "since 14:00" reads another clock, and with
several leaders there are several. A second more of old messages is cheaper than a missed one, so a timestamp means
`CLOCK_SKEW_NS` earlier unless the request names its own figure; machines that keep time by NTP agree far better.
Peek changes nothing and uses a timestamp as it is.

A plan's bytes come from the commitlog: no message is read for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.admin.fan_out import FanOut
from nsqha.admin.topic_request import CALL_SECONDS, choice, concerned, for_leader, serving, topic_of
from nsqha.commitlog.entry import BatchCorrupt
from nsqha.cursor import events
from nsqha.errors import LogCorrupt, NotFound, NsqhaError
from nsqha.pb.v1 import admin_pb2
from nsqha.server.topics.channels import in_steps

if TYPE_CHECKING:
    from nsqha.admin.peer_admins import PeerAdmins
    from nsqha.cursor.seek import SeekPlan
    from nsqha.server.node.broker import Broker
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic

CLOCK_SKEW_NS = 1_000_000_000


@dataclass(frozen=True)
class PlannedSeek:
    """A seek in one partition: its offset (None: back to before the last seek), and what it would cost."""

    target: int | None
    answer: Any


@dataclass(frozen=True)
class MoveChannel:
    """A Seek or an UndoSeek, a `TopicRequest`: plan, and unless only a plan is wanted, act in each partition."""

    broker: Broker
    topic: Topic
    rpc: str
    message: Any
    plan: Callable[[Partition], Awaitable[PlannedSeek]]

    async def here(self, numbers: list[int]) -> dict[int, Any]:
        planned: dict[int, PlannedSeek] = {}
        answers: dict[int, Any] = {}
        led = {partition.number: partition for partition in serving(self.topic, numbers)}
        for number, partition in led.items():
            try:
                planned[number] = await self.plan(partition)
            except _UnknownId:
                raise
            except NsqhaError as error:
                answers[number] = self.failed_here(number, error)
        if self.message.plan_only or not planned:
            return answers | {number: one.answer for number, one in planned.items()}
        targets = {number: one.target for number, one in planned.items()}
        done = await self.broker.channels.seek(self.topic.name, self.message.channel, targets)
        for number, outcome in done.items():  # a partition whose leader changed has no outcome: nothing was done
            if isinstance(outcome, NsqhaError):
                answers[number] = self.failed_here(number, outcome)
            else:
                clamped = planned[number].answer.clamped or outcome.clamped
                answers[number] = _answer(led[number], outcome, clamped)
        return answers

    async def ask(self, peers: PeerAdmins, address: str, numbers: list[int]) -> dict[int, Any]:
        message = for_leader(self.topic, self.message, numbers)
        reply = await peers.call(address, self.rpc, message, seconds=CALL_SECONDS)
        return {answer.partition: answer for answer in reply.partitions if not answer.not_led}

    def failed(self, number: int, why: str) -> Any:
        return admin_pb2.SeekPartition(partition=number, error=why, not_led=self.message.HasField("here"))

    def failed_here(self, number: int, error: NsqhaError) -> Any:
        return admin_pb2.SeekPartition(partition=number, error=str(error) or type(error).__name__)


async def seek(broker: Broker, message: Any, fan_out: FanOut) -> Any:
    """Move the channel to the target, in every partition concerned."""
    topic, target = _topic(broker, message), message.target
    message_id = target.message_id if choice(target, "to") == "message_id" else None
    numbers, number = concerned(topic, message, message_id)
    _check(target)

    async def plan(partition: Partition) -> PlannedSeek:
        to = _offset_of(partition, target, number, topic.name)
        found = await in_steps(partition.cursors.requests.planning_seek(message.channel, to))
        return PlannedSeek(to, _answer(partition, found, _before_log(partition, target, found)))

    return _response(message, await fan_out.answers(MoveChannel(broker, topic, "Seek", message, plan), numbers))


async def undo(broker: Broker, message: Any, fan_out: FanOut) -> Any:
    """Move the channel to where it was before its last seek, in every partition that had one."""
    topic = _topic(broker, message)
    numbers, _ = concerned(topic, message)

    async def plan(partition: Partition) -> PlannedSeek:
        found = await in_steps(partition.cursors.requests.planning_undo(message.channel))
        return PlannedSeek(None, _answer(partition, found, found.clamped))

    return _response(message, await fan_out.answers(MoveChannel(broker, topic, "UndoSeek", message, plan), numbers))


def _response(message: Any, answers: dict[int, Any]) -> Any:
    return admin_pb2.SeekResponse(partitions=[answers[n] for n in sorted(answers)], done=not message.plan_only)


def _answer(partition: Partition, plan: SeekPlan, clamped: bool) -> Any:
    first, end = sorted((plan.floor, plan.target))
    return admin_pb2.SeekPartition(
        partition=partition.number,
        from_offset=plan.floor,
        to_offset=plan.target,
        clamped=clamped,
        messages=plan.again - plan.skipped,
        again=plan.again,
        skipped=plan.skipped,
        deferred=plan.deferred,
        dead=plan.dead,
        in_flight=plan.in_flight,
        bytes=bytes_between(partition, first, end),
        undo_repeats=not plan.exact,
        deferred_again=plan.deferred_again,
        deferred_lost=plan.deferred_lost,
        to_timestamp_ns=timestamp_of(partition, plan.target),
    )


# ---- from words to offsets


class _UnknownId(NotFound):
    """No message has this id."""


def _topic(broker: Broker, message: Any) -> Topic:
    topic = topic_of(broker, message)
    # Of an #ephemeral channel only the leaders know.
    known = broker.cluster is not None and ids.is_ephemeral(message.channel)
    if not known and not topic.has_channel(message.channel):
        raise NotFound(f"there is no channel {message.channel} of topic {message.topic}")
    return topic


def _check(target: Any) -> None:
    """Raise ValueError for a target that is invalid for every partition."""
    if not choice(target, "to"):
        raise ValueError("say where to: timestamp_ns, offset, message_id, start or end")
    if target.clock_skew_ns < 0:
        raise ValueError(f"clock_skew_ns is {target.clock_skew_ns}; it cannot be negative")


def _offset_of(partition: Partition, target: Any, number: int, topic: str) -> int:
    """The offset that a seek goes to, not clamped yet. `number`: the number in the message id."""
    match choice(target, "to"):
        case "offset":
            return min(int(target.offset), ids.OFFSET_MAX)
        case "message_id":
            if not 0 <= number - partition.id_base < partition.high_watermark:
                raise _UnknownId(f"message id {target.message_id} is not one of topic {topic}")
            return number - partition.id_base
        case "start":
            return partition.cursors.state.log_start[0]
        case "timestamp_ns":
            skew_ns = target.clock_skew_ns if target.HasField("clock_skew_ns") else CLOCK_SKEW_NS
            entry = partition.log.entry_for_time(target.timestamp_ns - skew_ns)
            # Later than all that is here: what is written until the seek is, too, must not be passed over.
            return entry.first_offset if entry is not None else partition.log.end.offset
    return events.TARGET_END


def _before_log(partition: Partition, target: Any, plan: SeekPlan) -> bool:
    """Whether the target was outside the log, as a time before the oldest message of a shortened log is."""
    if plan.clamped or choice(target, "to") != "timestamp_ns":
        return plan.clamped
    first = timestamp_of(partition, plan.target)
    return 0 < plan.target <= partition.cursors.state.log_start[0] and target.timestamp_ns < first


def bytes_between(partition: Partition, first: int, end: int) -> int:
    """Bytes of the messages [first, end) in the log, by its commitlog."""
    if first >= end:
        return 0
    return max(_position(partition, end - 1, after=1) - _position(partition, first, after=0), 0)


def _position(partition: Partition, offset: int, *, after: int) -> int:
    """Roughly the position where the message begins, or ends: as if the messages of a batch were of one size."""
    log = partition.log
    try:
        entry = log.entry_for_offset(offset)
    except BatchCorrupt as hole:
        return hole.first.position
    if entry is None:
        return log.start.position
    return entry.position + entry.size * (offset + after - entry.first_offset) // entry.count


def timestamp_of(partition: Partition, offset: int) -> int:
    """When a message was published; 0 if it is not there or cannot be read."""
    try:
        entry = partition.log.entry_for_offset(offset)
    except LogCorrupt:
        return 0
    return entry.timestamp_ns if entry is not None else 0
