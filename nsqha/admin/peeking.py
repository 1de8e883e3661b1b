"""Peek: committed messages as they are stored, merged by time over all partitions of a topic and their leaders.

    partitions led here ----run per partition---+
    partitions led elsewhere --one stream each--+--> merged by (timestamp, partition) --> skip, count --> the caller

A stream from another leader begins with one head for each partition: how many messages will come, or why none. So "the
last n of all" is known before the first is sent. An error for what cannot be read comes after the messages.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nsqha.admin.fan_out import FanOut
from nsqha.admin.topic_request import CALL_SECONDS, choice, concerned, for_leader, topic_of
from nsqha.commitlog.control import iter_frames
from nsqha.cursor import events
from nsqha.errors import LogCorrupt, NotFound, NsqhaError, Unavailable
from nsqha.frames import ATTRIBUTES, MESSAGE
from nsqha.pb.v1 import admin_pb2

if TYPE_CHECKING:
    from nsqha.admin.peer_admins import PeerAdmins
    from nsqha.commitlog.reading.reader import Batch
    from nsqha.server.node.broker import Broker
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic

PEEK_DEFAULT = 100
PEEK_MAX = 10_000
PEEK_TURN = 256  # messages before other work on the loop gets its turn

Run = AsyncGenerator[Any, None]  # messages, ordered by time


async def peek(broker: Broker, message: Any, fan_out: FanOut) -> Run:
    """Yield committed messages from some place on, oldest first, all partitions merged by time."""
    topic = topic_of(broker, message)
    chosen = choice(message, "from")
    numbers, number = concerned(topic, message, message.message_id if chosen == "message_id" else None)
    count_max = message.count_max or PEEK_DEFAULT
    if count_max > PEEK_MAX or (chosen == "last" and message.last > PEEK_MAX):
        raise ValueError(f"at most {PEEK_MAX} messages can be peeked at once")
    heads = Heads(topic, message, number)
    asked = message.HasField("here")
    try:
        counts = await fan_out.answers(heads, numbers)
        errors = heads.errors
        errors |= {n: what for n, what in counts.items() if isinstance(what, str)}
        if asked:
            for n in numbers:
                yield _head(n, counts[n])
        elif len(errors) == len(numbers):
            raise Unavailable("; ".join(f"partition {n}: {why}" for n, why in sorted(errors.items())))
        skip = 0
        if chosen == "last" and not asked:
            skip = max(sum(what for what in counts.values() if isinstance(what, int)) - message.last, 0)
        elif chosen == "last":
            count_max = message.last * len(numbers)  # the asking node drops what is too old
        n = 0
        async with aclosing(merged(heads.runs)) as messages:
            async for one in messages:
                n += 1
                if n > skip:
                    yield one
                if n == skip + count_max:
                    break
    finally:
        for run in heads.runs:
            await run.aclose()
    for n, why in sorted(errors.items()):
        if not asked:
            yield admin_pb2.PeekedMessage(partition=n, error=why)


@dataclass(frozen=True)
class Heads:
    """A `TopicRequest` for the number of messages from the place on, or why there are none; `runs` collects them."""

    topic: Topic
    message: Any
    number: int  # the one in the message id, if the place is an id
    runs: list[Run] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)  # of partitions whose run ended early

    async def here(self, numbers: list[int]) -> dict[int, int | str]:
        found: dict[int, int | str] = {}
        for partition in [p for n in numbers if (p := self.topic.leads(n)) is not None]:
            place = _place(partition, self.message, self.number, self.topic)
            found[partition.number] = partition.high_watermark - place
            self.runs.append(_in_turns(_messages(partition, place)))
        return found

    async def ask(self, peers: PeerAdmins, address: str, numbers: list[int]) -> dict[int, int | str]:
        stream = _opened(peers, address, for_leader(self.topic, self.message, numbers))
        found: dict[int, int | str] = {}
        for _ in numbers:
            head = await anext(stream, None)
            if head is None:
                raise Unavailable(f"{address} did not say what it has")
            if not head.not_led:
                found[head.partition] = head.error or int(head.count)
        here = [n for n, what in found.items() if isinstance(what, int)]
        self.runs.append(_until_lost(stream, here, self.errors))
        return found

    def failed(self, number: int, why: str) -> int | str:
        return why


def _head(number: int, what: int | str) -> Any:
    if isinstance(what, str):
        return admin_pb2.PeekedMessage(partition=number, error=what, not_led=True)
    return admin_pb2.PeekedMessage(partition=number, count=what)


async def _opened(peers: PeerAdmins, address: str, message: Any) -> Run:
    """Yield what a leader sends: its heads, then messages."""
    async for one in peers.stream(address, "PeekMessages", message, seconds=CALL_SECONDS):
        yield one


async def _until_lost(stream: Run, numbers: Sequence[int], errors: dict[int, str]) -> Run:
    """Yield what a leader sends; if the stream breaks, note an error for its partitions."""
    try:
        async for message in stream:
            yield message
    except LogCorrupt:
        raise
    except NsqhaError as error:
        errors.update(dict.fromkeys(numbers, f"not all of it: {error}"))
    finally:
        await stream.aclose()


async def merged(runs: Sequence[Run]) -> Run:
    """Merge runs, each of which is in order, by time."""
    heap = []
    firsts = await asyncio.gather(*[anext(run, None) for run in runs])
    for n, (run, first) in enumerate(zip(runs, firsts, strict=True)):
        if first is not None:
            heap.append((first.timestamp_ns, first.partition, n, first, run))
    heapq.heapify(heap)
    while heap:
        _, _, n, message, run = heap[0]
        yield message
        following = await anext(run, None)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (following.timestamp_ns, following.partition, n, following, run))


async def _in_turns(messages: Iterator[Any]) -> Run:
    """Yield messages of a partition led here; other work on the loop gets its turn in between."""
    for n, message in enumerate(messages, 1):
        yield message
        if n % PEEK_TURN == 0:
            await asyncio.sleep(0)


def _place(partition: Partition, request: Any, number: int, topic: Topic) -> int:
    end = partition.high_watermark
    match choice(request, "from"):
        case "offset":
            place = int(request.offset)
        case "message_id":
            place = number - partition.id_base
            if not 0 <= place < end:
                raise NotFound(f"message id {request.message_id} is not one of topic {topic.name}")
        case "timestamp_ns":
            entry = partition.log.entry_for_time(request.timestamp_ns)
            place = entry.first_offset if entry is not None else end
        case "last":
            place = end - request.last
        case _:
            place = 0
    return min(max(place, partition.log.start.offset), end)


def _messages(partition: Partition, offset: int) -> Iterator[Any]:
    """Yield what is committed from `offset` on, while the partition is open. LogCorrupt where it cannot be read."""
    while not partition.closed and (offset := max(offset, partition.log.start.offset)) < partition.high_watermark:
        batch = partition.log.batch_at(offset)
        if batch is None:
            continue  # retention removed it just now
        for message in _of_batch(partition, batch, offset):
            # The consumer of this generator may wait in between; what was committed once stays committed.
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
