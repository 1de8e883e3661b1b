"""Seek and undo: from what people say (a time, an id, "start") to offsets, and what that would cost; and damage.

    timestamp   the first batch at or after it, less the clock skew (below); none: the end
    message id  its partition and offset; an id that this topic never gave out is refused
    offset      itself; start: the log start; end: the pump
    ... clamped to [log start, pump] by `nsqha.cursor.seek`

A plan comes first and is a forecast; the act answers with what happened. Every partition answers for itself: one that
can not be moved says why and does not keep the others from moving. Its leader says so (`Spread`), wherever it is.

**Clock skew.** Batches carry their leader's clock. Whoever says "since 14:00" reads another clock, and with several
leaders there are several. A second more of old messages is cheaper than a missed one, so a timestamp is taken to mean
`CLOCK_SKEW_NS` earlier unless the request names its own figure; machines that keep time by NTP agree far better.
Peek changes nothing and takes a timestamp as it is.

A plan's bytes come from the commitlog: no message is read for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.admin.fan_out import RETRY_SECONDS
from nsqha.admin.topic_request import TopicRequest, choice, concerned, serving, topic_of
from nsqha.commitlog.entry import BatchCorrupt
from nsqha.cursor import events
from nsqha.errors import LogCorrupt, NotFound, NsqhaError
from nsqha.pb.v1 import admin_pb2

ASK_SECONDS = 2.0  # that other replicas are asked for what is about to be given up
BEGIN_SECONDS = 1.5  # that an epoch may take to begin before they are asked again

if TYPE_CHECKING:
    from nsqha.cursor.seek import SeekPlan
    from nsqha.server.node.broker import Broker
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic

CLOCK_SKEW_NS = 1_000_000_000


# ---- seek


async def seek(broker: Broker, request: Any, whole: TopicRequest) -> Any:
    """Plan, and unless only that is asked for, move the channel in every partition concerned."""
    topic = _topic(broker, request)
    target = request.target
    message_id = target.message_id if choice(target, "to") == "message_id" else None
    numbers, number = concerned(topic, request, message_id)
    _check(target)

    async def here(numbers: list[int]) -> dict[int, Any]:
        targets: dict[int, int | None] = {}

        def planned(partition: Partition) -> Any:
            to = _offset_of(partition, target, number, topic.name)
            plan = partition.cursors.plan_seek(request.channel, to)
            targets[partition.number] = to
            return _answer(partition, plan, _before_log(partition, target, plan))

        return await _carry_out(broker, topic, request, numbers, planned, targets)

    return await _answered(topic, request, whole, "Seek", numbers, here)


async def undo(broker: Broker, request: Any, whole: TopicRequest) -> Any:
    """Go back to where the channel was before its last seek, in every partition that had one."""
    topic = _topic(broker, request)
    numbers, _ = concerned(topic, request)

    async def here(numbers: list[int]) -> dict[int, Any]:
        targets: dict[int, int | None] = {}

        def planned(partition: Partition) -> Any:
            before = _committed(partition, request.channel).undo
            if before is None:
                raise NotFound("there is no seek to undo")
            plan = partition.cursors.plan_seek(request.channel, before.floor)
            targets[partition.number] = None
            return _answer(partition, plan, plan.clamped)

        return await _carry_out(broker, topic, request, numbers, planned, targets)

    return await _answered(topic, request, whole, "UndoSeek", numbers, here)


async def _answered(
    topic: Topic, request: Any, whole: TopicRequest, rpc: str, numbers: Collection[int], here: Any
) -> Any:
    """The answers of all leaders."""

    def read(reply: Any) -> dict[int, Any]:
        return {answer.partition: answer for answer in reply.partitions if not answer.not_led}

    def failed(number: int, why: str) -> Any:
        return admin_pb2.SeekPartition(partition=number, error=why, not_led=request.HasField("here"))

    answers = await whole.answers(topic, rpc, request, numbers, here=here, read=read, failed=failed)
    return admin_pb2.SeekResponse(partitions=[answers[n] for n in sorted(answers)], done=not request.plan_only)


async def _carry_out(
    broker: Broker,
    topic: Topic,
    request: Any,
    numbers: Collection[int],
    planned: Callable[[Partition], Any],
    targets: Mapping[int, int | None],
) -> dict[int, Any]:
    """In those of the partitions that are led here: plan, then act; `planned` notes where to go in `targets`."""
    answers: dict[int, Any] = {}
    led = {partition.number: partition for partition in serving(topic, numbers)}
    for partition in led.values():
        try:
            answers[partition.number] = planned(partition)
        except _UnknownId:
            raise
        except NsqhaError as error:
            answers[partition.number] = _refusal(partition.number, error)
    if not request.plan_only and targets:
        done = await broker.channels.seek(request.topic, request.channel, targets)
        for number in targets:
            outcome = done.get(number)
            if outcome is None:
                del answers[number]  # led elsewhere by the time of its turn: nothing was done
            elif isinstance(outcome, NsqhaError):
                answers[number] = _refusal(number, outcome)
            else:
                answers[number] = _answer(led[number], outcome, answers[number].clamped or outcome.clamped)
    return answers


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


def _refusal(number: int, error: NsqhaError) -> Any:
    return admin_pb2.SeekPartition(partition=number, error=str(error) or type(error).__name__)


def _committed(partition: Partition, channel: str) -> Any:
    if channel not in partition.cursors.channels:
        raise NotFound(f"there is no channel {channel}")
    return partition.cursors.channels[channel].committed


# ---- from words to offsets


class _UnknownId(NotFound):
    """No message has this id."""


def _topic(broker: Broker, request: Any) -> Topic:
    topic = topic_of(broker, request)
    # Of an #ephemeral channel only the leaders know.
    known = broker.cluster is not None and ids.is_ephemeral(request.channel)
    if not known and not topic.has_channel(request.channel):
        raise NotFound(f"there is no channel {request.channel} of topic {request.topic}")
    return topic


def _check(target: Any) -> None:
    """ValueError for a target that means nothing anywhere."""
    if not choice(target, "to"):
        raise ValueError("say where to: timestamp_ns, offset, message_id, start or end")
    if target.clock_skew_ns < 0:
        raise ValueError(f"clock_skew_ns is {target.clock_skew_ns}; it can not be negative")


def _offset_of(partition: Partition, target: Any, number: int, topic: str) -> int:
    """Where a seek goes; it is clamped later. `number` stands behind the message id."""
    match choice(target, "to"):
        case "offset":
            return min(int(target.offset), ids.OFFSET_MAX)
        case "message_id":
            if not 0 <= number - partition.id_base < partition.high_watermark:
                raise _UnknownId(f"message id {target.message_id} is not one of topic {topic}")
            return number - partition.id_base
        case "start":
            return partition.cursors.log_start[0]
        case "timestamp_ns":
            skew_ns = target.clock_skew_ns if target.HasField("clock_skew_ns") else CLOCK_SKEW_NS
            entry = partition.log.entry_for_time(target.timestamp_ns - skew_ns)
            return entry.first_offset if entry is not None else events.TARGET_END
    return events.TARGET_END


def _before_log(partition: Partition, target: Any, plan: SeekPlan) -> bool:
    """Whether the wish was outside the log. A time before the oldest message of a shortened log is."""
    if plan.clamped or choice(target, "to") != "timestamp_ns":
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


# ---- damage


async def skip_damage(broker: Broker, request: Any, whole: TopicRequest) -> Any:
    """Let stopped channels go on behind what can not be read; returns when that is in the log.

    Of all channels: what no replica has is given up too, so that others can be made without it. That needs no leader
    that serves: one that was elected a moment ago may wait for just such a replica."""
    topic = topic_of(broker, request)
    numbers, _ = concerned(topic, request)

    async def here(numbers: list[int]) -> dict[int, Any]:
        given_up = {} if request.HasField("channel") else await _give_up(broker, topic, numbers)
        await _begun(topic, [n for n in numbers if not given_up.get(n)])
        skipped = {partition.number: _skip(partition, request) for partition in serving(topic, numbers)}
        if any(skipped.values()):
            await topic.commit_events()
        return {n: skipped.get(n, []) + given_up.get(n, []) for n in {*skipped, *(n for n in given_up if given_up[n])}}

    def read(reply: Any) -> dict[int, Any]:
        found: dict[int, Any] = {error.partition: error.error for error in reply.errors if not error.not_led}
        elsewhere = {error.partition for error in reply.errors if error.not_led}
        for number in numbers:
            if number not in found and number not in elsewhere:
                found[number] = [one for one in (*reply.skipped, *reply.given_up) if one.partition == number]
        return found

    def failed(number: int, why: str) -> Any:
        return why

    answers = await whole.answers(topic, "SkipDamage", request, numbers, here=here, read=read, failed=failed)
    not_led = request.HasField("here")
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
    giving_up, led = broker.cluster.replicas.giving_up, [n for n in numbers if topic.leads(n) is not None]
    lost = await asyncio.gather(*[giving_up.give_up((topic.record.uid, n), seconds=ASK_SECONDS) for n in led])
    return {
        number: [
            admin_pb2.GivenUp(partition=number, first_offset=one.first_offset, end_offset=one.end_offset)
            for one in ranges
        ]
        for number, ranges in zip(led, lost, strict=True)
    }


async def _begun(topic: Topic, numbers: list[int]) -> None:
    """Wait for those that are led here and have only begun, not for long; others are asked again after that."""
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
