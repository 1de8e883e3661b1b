"""Seek, undo and peek: from what people say (a time, an id, "start") to offsets, and what that would cost.

    timestamp   the first batch at or after it, less the clock skew (below); none: the end
    message id  its partition and offset; an id that this topic never gave out is refused
    offset      itself; start: the log start; end: the pump
    ... clamped to [log start, pump] by `nsqha.cursor.seek`

A plan comes first and is a forecast; the act answers with what happened. Every partition answers for itself: one that
can not be moved says why and does not keep the others from moving.

**Clock skew.** Batches carry their leader's clock. Whoever says "since 14:00" reads another clock, and with several
leaders there are several. A second more of old messages is cheaper than a missed one, so a timestamp is taken to mean
`CLOCK_SKEW_NS` earlier unless the request names its own figure; machines that keep time by NTP agree far better.
Peek changes nothing and takes a timestamp as it is.

A plan's bytes come from the commitlog: no message is read for it.
"""

from __future__ import annotations

import heapq
from asyncio import sleep
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.commitlog.control import iter_frames
from nsqha.commitlog.entry import BatchCorrupt
from nsqha.cursor import events
from nsqha.errors import LogCorrupt, NotFound, NsqhaError
from nsqha.frames import ATTRIBUTES, MESSAGE
from nsqha.pb.v1 import admin_pb2

if TYPE_CHECKING:
    from nsqha.commitlog.reader import Batch
    from nsqha.cursor.seek import SeekPlan
    from nsqha.server.broker import Broker
    from nsqha.server.partition import Partition
    from nsqha.server.topic import Topic

CLOCK_SKEW_NS = 1_000_000_000
PEEK_DEFAULT = 100
PEEK_MAX = 10_000
PEEK_TURN = 256  # messages passed over before others get their turn


# ---- seek


async def seek(broker: Broker, request: Any) -> Any:
    """Plan, and unless only that is asked for, move the channel in every partition concerned."""
    topic = _topic(broker, request.topic, request.channel)
    target = request.target
    message_id = target.message_id if _choice(target, "to") == "message_id" else None
    partitions, number = _concerned(topic, request, message_id)
    targets: dict[int, int] = {}
    answers: dict[int, Any] = {}
    for partition in partitions:
        try:
            targets[partition.number] = to = _offset_of(partition, target, number)
            plan = partition.cursors.plan_seek(request.channel, to)
            answers[partition.number] = _answer(partition, plan, _before_log(partition, target, plan))
        except NsqhaError as error:
            targets.pop(partition.number, None)
            answers[partition.number] = _refusal(partition, error)
    if not request.plan_only:
        done = await broker.topics.seek_channel(request.topic, request.channel, targets)
        _merge(topic, answers, done)
    return admin_pb2.SeekResponse(partitions=[answers[n] for n in sorted(answers)], done=not request.plan_only)


async def undo(broker: Broker, request: Any) -> Any:
    """Go back to where the channel was before its last seek, in every partition that had one."""
    topic = _topic(broker, request.topic, request.channel)
    partitions, _ = _concerned(topic, request)
    answers: dict[int, Any] = {}
    for partition in partitions:
        try:
            before = _committed(partition, request.channel).undo
            if before is None:
                raise NotFound("there is no seek to undo")
            plan = partition.cursors.plan_seek(request.channel, before.floor)
            answers[partition.number] = _answer(partition, plan, plan.clamped)
        except NsqhaError as error:
            answers[partition.number] = _refusal(partition, error)
    if not request.plan_only:
        moving = {n: None for n, answer in answers.items() if not answer.error}
        _merge(topic, answers, await broker.topics.seek_channel(request.topic, request.channel, moving))
    return admin_pb2.SeekResponse(partitions=[answers[n] for n in sorted(answers)], done=not request.plan_only)


def _merge(topic: Topic, answers: dict[int, Any], done: dict[int, SeekPlan | NsqhaError]) -> None:
    """What was done instead of what was planned."""
    for partition in topic.led:
        outcome = done.get(partition.number)
        if isinstance(outcome, NsqhaError):
            answers[partition.number] = _refusal(partition, outcome)
        elif outcome is not None:
            clamped = answers[partition.number].clamped or outcome.clamped
            answers[partition.number] = _answer(partition, outcome, clamped)


def _answer(partition: Partition, plan: SeekPlan, clamped: bool) -> Any:
    messages = plan.again - plan.skipped
    first, end = sorted((plan.target, plan.target + messages))
    return admin_pb2.SeekPartition(
        partition=partition.number,
        from_offset=plan.floor,
        to_offset=plan.target,
        clamped=clamped,
        messages=messages,
        bytes=bytes_between(partition, first, end),
        undo_repeats=not plan.exact,
        to_timestamp_ns=timestamp_of(partition, plan.target),
    )


def _refusal(partition: Partition, error: NsqhaError) -> Any:
    return admin_pb2.SeekPartition(partition=partition.number, error=str(error) or type(error).__name__)


def _committed(partition: Partition, channel: str) -> Any:
    if channel not in partition.cursors.channels:
        raise NotFound(f"there is no channel {channel}")
    return partition.cursors.channels[channel].committed


# ---- from words to offsets


def _topic(broker: Broker, name: str, channel: str | None = None) -> Topic:
    topic = broker.topics.topic(name)
    if channel is not None and not topic.has_channel(channel):
        raise NotFound(f"there is no channel {channel} of topic {name}")
    return topic


def _choice(message: Any, oneof: str) -> str:
    """Which of its alternatives a message has; "" if none."""
    return message.WhichOneof(oneof) or ""


def _concerned(topic: Topic, request: Any, message_id: str | None = None) -> tuple[list[Partition], int]:
    """The partitions that a request speaks of, and the number behind the message id if it names one."""
    chosen = list(topic.led)
    if request.HasField("partition"):
        chosen = [p for p in chosen if p.number == request.partition]
        if not chosen:
            raise NotFound(f"topic {topic.name} has no partition {request.partition} here")
    if message_id is None:
        return chosen, 0
    number = ids.parse_message_id(message_id.encode())
    if number is None:
        raise ValueError(f"{message_id!r} is not a message id: 16 lowercase hex digits")
    named = ids.partition_of(number)
    chosen = [p for p in chosen if p.number == named and 0 <= number - p.id_base < p.high_watermark]
    if not chosen:
        raise NotFound(f"message id {message_id} is not one of topic {topic.name}")
    return chosen, number


def _offset_of(partition: Partition, target: Any, number: int) -> int:
    """Where a seek goes; it is clamped later."""
    match _choice(target, "to"):
        case "offset":
            return min(int(target.offset), ids.OFFSET_MAX)
        case "message_id":
            return number - partition.id_base
        case "start":
            return partition.cursors.log_start[0]
        case "end":
            return events.TARGET_END
        case "timestamp_ns":
            skew_ns = target.clock_skew_ns if target.HasField("clock_skew_ns") else CLOCK_SKEW_NS
            if skew_ns < 0:
                raise ValueError(f"clock_skew_ns is {skew_ns}; it can not be negative")
            entry = partition.log.entry_for_time(target.timestamp_ns - skew_ns)
            return entry.first_offset if entry is not None else events.TARGET_END
    raise ValueError("say where to: timestamp_ns, offset, message_id, start or end")


def _before_log(partition: Partition, target: Any, plan: SeekPlan) -> bool:
    """Whether the wish was outside the log. A time before the oldest message of a shortened log is."""
    if plan.clamped or _choice(target, "to") != "timestamp_ns":
        return plan.clamped
    first = timestamp_of(partition, plan.target)
    return 0 < plan.target <= partition.cursors.log_start[0] and target.timestamp_ns < first


def bytes_between(partition: Partition, first: int, end: int) -> int:
    """What the messages [first, end) take in the log, by its commitlog."""
    if first >= end:
        return 0
    return max(_position(partition, end - 1, after=1) - _position(partition, first, after=0), 0)


def _position(partition: Partition, offset: int, *, after: int) -> int:
    """About where the message begins, or ends: batches are weighed as if their messages were of one size."""
    log = partition.log
    try:
        entry = log.entry_for_offset(offset)
    except BatchCorrupt as hole:
        return hole.first.position
    if entry is None:
        return log.start.position
    return entry.position + entry.size * (offset + after - entry.first_offset) // entry.count


def timestamp_of(partition: Partition, offset: int) -> int:
    """When a message was published; 0 if it is not there or can not be read."""
    try:
        entry = partition.log.entry_for_offset(offset)
    except LogCorrupt:
        return 0
    return entry.timestamp_ns if entry is not None else 0


# ---- peek


async def peek(broker: Broker, request: Any) -> AsyncIterator[Any]:
    """Committed messages from some place on, oldest first, all partitions merged by time."""
    topic = _topic(broker, request.topic)
    chosen = _choice(request, "from")
    partitions, number = _concerned(topic, request, request.message_id if chosen == "message_id" else None)
    count_max = request.count_max or PEEK_DEFAULT
    if count_max > PEEK_MAX or (chosen == "last" and request.last > PEEK_MAX):
        raise ValueError(f"at most {PEEK_MAX} messages can be peeked at once")
    places = {p.number: _peek_from(p, request, number) for p in partitions}
    skip = 0
    if chosen == "last":
        skip = max(sum(p.high_watermark - places[p.number] for p in partitions) - request.last, 0)
    runs = [_messages(p, places[p.number]) for p in partitions]
    sent = 0
    for n, message in enumerate(heapq.merge(*runs, key=lambda m: (m.timestamp_ns, m.partition))):
        if n % PEEK_TURN == 0:
            await sleep(0)
        if n < skip:
            continue
        yield message
        sent += 1
        if sent == count_max:
            return


def _peek_from(partition: Partition, request: Any, number: int) -> int:
    end = partition.high_watermark
    match _choice(request, "from"):
        case "offset":
            place = int(request.offset)
        case "message_id":
            place = number - partition.id_base
        case "timestamp_ns":
            entry = partition.log.entry_for_time(request.timestamp_ns)
            place = entry.first_offset if entry is not None else end
        case "last":
            place = end - request.last
        case _:
            place = 0
    return min(max(place, partition.log.start.offset), end)


def _messages(partition: Partition, offset: int) -> Iterator[Any]:
    """What is committed from `offset` on, as long as the partition is open. LogCorrupt where it can not be read."""
    while not partition.closed and (offset := max(offset, partition.log.start.offset)) < partition.high_watermark:
        batch = partition.log.batch_at(offset)
        if batch is None:
            continue  # retention took it just now
        for message in _of_batch(partition, batch, offset):
            # Whoever takes these may wait in between; what was committed once stays so.
            if message.offset >= partition.high_watermark:
                return
            offset = message.offset + 1
            yield message


def _of_batch(partition: Partition, batch: Batch, first: int) -> Iterator[Any]:
    epoch = batch.entry.epoch
    # A run of batches may span a change of leader; then each message is asked for.
    same_epoch = partition.log.entry(batch.end_log_id - 1).epoch == epoch
    offset = batch.first_offset
    covers = deliver_at_ns = 0
    data = memoryview(batch.data)
    for frame in iter_frames(data):
        if frame.type == ATTRIBUTES:
            attributes = events.decode(frame.type, bytes(data[frame.payload_position : frame.end]))
            assert isinstance(attributes, events.Attributes)
            covers, deliver_at_ns = attributes.covers, attributes.deliver_at_ns
        if frame.type != MESSAGE:
            continue
        if offset >= first:
            at = frame.payload_position
            if not same_epoch:
                entry = partition.log.entry_for_offset(offset)
                epoch = entry.epoch if entry is not None else 0
            yield admin_pb2.PeekedMessage(
                partition=partition.number,
                offset=offset,
                message_id=bytes(data[at + 10 : at + 26]).decode("ascii", "replace"),
                timestamp_ns=int.from_bytes(data[at : at + 8], "big", signed=True),
                body=bytes(data[at + 26 : frame.end]),
                leader_epoch=epoch,
                deliver_at_ns=deliver_at_ns if covers > 0 else 0,
            )
        covers -= 1
        offset += 1


# ---- damage


async def skip_damage(broker: Broker, request: Any) -> Any:
    """Let stopped channels go on behind what can not be read; returns when that is in the log."""
    topic = broker.topics.topic(request.topic)
    skipped = []
    for partition in topic.led:
        if request.HasField("partition") and partition.number != request.partition:
            continue
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
    if skipped:
        await topic.commit_events()
    return admin_pb2.SkipDamageResponse(skipped=skipped)
