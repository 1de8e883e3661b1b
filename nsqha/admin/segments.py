"""The Segments service: snapshots of what is committed, holds, and reader channels, for the whole cluster.

    any node --topics, per leader--> leaders: `server.segments.pins` --> one PartitionSnapshot for each partition
    hold: committed at each leader before its partition is pinned

A request goes to each leader once, for all of what it leads. A partition without an answer is asked for again while
leaders change, for LEADER_SECONDS, and then has an `error` that says why. If a leader gave no answer and another node
leads now, that node is asked once, however late it is. Bytes are not served here (docs/segments.md).

The work for a request ends with it: the search for borders stops when the caller is gone, and a hold whose id did not
reach the caller is released.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import re2

from nsqha import ids
from nsqha.admin.answers import answers
from nsqha.admin.fan_out import NO_LEADER, FanOut, leads_not
from nsqha.admin.peer_admins import PeerAdmins
from nsqha.admin.topic_request import CALL_SECONDS, for_leader, serving, topic_of
from nsqha.cursor.committed.holds import HOLD_MS_MAX
from nsqha.errors import LimitReached, NotFound, NsqhaError, OutcomeUnknown, Unavailable
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import admin_pb2, segments_pb2, segments_pb2_grpc
from nsqha.server.runtime.listen import reason
from nsqha.server.runtime.tasks import StillUnderWay
from nsqha.server.segments.pins import Effort, PinRequest, TooManyBorders, pin
from nsqha.server.segments.renewals import HoldRenewals

if TYPE_CHECKING:
    from nsqha.server.node.broker import Broker
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic
    from nsqha.server.topics.reader_channels import ReaderChannels

LEADER_SECONDS = 2.0  # for leaders to be found, while they are elected
AGAIN_SECONDS = 0.05
SNAPSHOT_SECONDS = 20.0  # to another node, while it looks for borders in its files; less than readers wait for all
RENEW_SECONDS = 8.0  # to another node; longer than HOLD_SECONDS of `renewals`, after which it answers in any case
TIMES_MAX = 16
RANGES_MAX = 20_000
PINS_AT_ONCE = 16  # partitions whose holds are committed side by side
SNAPSHOTS_MAX = 32  # that are worked on at once

logger = Logger("segments")

Key = tuple[str, int]


class SegmentsService(segments_pb2_grpc.SegmentsServicer):
    """The Segments service of one node. Readers of the log may ask any node."""

    def __init__(self, broker: Broker, others: PeerAdmins | None, rng: random.Random | None = None) -> None:
        """`others`: how to ask other nodes; None for a single node."""
        self._broker = broker
        self._others = others
        self._rng = rng or random.SystemRandom()
        self._fan_out = FanOut(None if broker.cluster is None else broker.cluster.leaders, others)
        # Borders are looked for in files, thousands of them if need be: apart from all other reads, and one at a time.
        # Ends are looked up in no time, and do not wait for them.
        self._borders = ThreadPoolExecutor(1, thread_name_prefix="segment borders")
        self._ends = ThreadPoolExecutor(1, thread_name_prefix="segment ends")
        self._snapshots = 0
        self.renewals = HoldRenewals(broker.log_source, self._renew_elsewhere)

    def close(self) -> None:
        """The node stops."""
        self._borders.shutdown(wait=False, cancel_futures=True)
        self._ends.shutdown(wait=False, cancel_futures=True)

    # ---- snapshots

    @answers
    async def Snapshot(self, request: Any) -> Any:
        if self._snapshots >= SNAPSHOTS_MAX:
            raise Unavailable(f"{SNAPSHOTS_MAX} snapshots are being made here: ask again, or ask another node")
        self._snapshots += 1
        try:
            return await self._snapshot(request)
        finally:
            self._snapshots -= 1

    async def _snapshot(self, request: Any) -> Any:
        topics = self._topics(request)
        _check(request)
        hold = _hold_id(request.hold_id) if request.hold_id else self._rng.getrandbits(64) or 1
        message = segments_pb2.SnapshotRequest()
        message.CopyFrom(request)
        if request.hold_ms:
            message.hold_id = f"{hold:016x}"
        files = self._borders if request.cut_points else self._ends
        snapshot = _SnapshotWork(self._broker, message, files, self.renewals, Effort())
        try:
            if request.HasField("here"):
                found = await snapshot.here(topics)
                response = segments_pb2.SnapshotResponse(partitions=found.values())
            else:
                response = await _Everywhere(self._broker, self._others).answer(snapshot, topics)
        except BaseException:
            if request.hold_ms and not request.hold_id:
                self._broker.spawn(self._give_up(message.hold_id))
            raise
        finally:
            snapshot.effort.ended = True
        response.hold_id = message.hold_id
        response.cluster_id = f"{self._broker.parts.journal.identity.cluster_id:016x}"
        if request.hold_ms:
            response.hold_until_ns = self._broker.clock.wall_ns() + request.hold_ms * 1_000_000
        return response

    def _topics(self, request: Any) -> list[Topic]:
        """The topics that a request names. NotFound, ValueError."""
        topics = self._broker.topics
        if bool(request.topics) == bool(request.pattern):
            raise ValueError("name topics, or give a pattern for their names; one of the two")
        if request.pattern:
            try:
                pattern = re2.compile(request.pattern)
            except re2.error as error:
                raise ValueError(f"pattern {request.pattern!r} is no regular expression (RE2): {error}") from None
            names = [n for n in sorted(topics) if pattern.fullmatch(n) and not ids.is_ephemeral(n)]
            return [topic for n in names if (topic := topics.get(n)) is not None and not topic.deleting]
        found = []
        for name in dict.fromkeys(request.topics):
            if ids.is_ephemeral(name):
                raise ValueError(f"topic {name}: #ephemeral topics keep nothing that could be read later")
            try:
                found.append(topics.topic(name))
            except NotFound:
                if not request.HasField("here"):
                    raise
        return found

    # ---- holds

    @answers
    async def RenewHold(self, request: Any) -> Any:
        hold = _hold_id(request.hold_id)
        partitions, until_ns = await self.renewals.renew_here(hold)
        if not request.HasField("here"):
            for reply in await self._ask_others("RenewHold", request):
                partitions += reply.partitions
                until_ns = min([end for end in (until_ns, reply.until_ns) if end], default=0)
            if not partitions:
                raise NotFound(f"nothing is held by {request.hold_id}: its time is over, or it was released")
        return segments_pb2.RenewHoldResponse(partitions=partitions, until_ns=until_ns)

    @answers
    async def ReleaseHold(self, request: Any) -> Any:
        partitions = await self.renewals.release_here(_hold_id(request.hold_id))
        if not request.HasField("here"):
            partitions += sum(reply.partitions for reply in await self._ask_others("ReleaseHold", request))
            if not partitions:
                raise NotFound(f"nothing is held by {request.hold_id}: its time is over, or it was released before")
        return segments_pb2.ReleaseHoldResponse(partitions=partitions)

    async def _give_up(self, hold_id: str) -> None:
        """Release a hold whose id the caller never got: else it would hold the log until it expires."""
        request = segments_pb2.ReleaseHoldRequest(hold_id=hold_id)
        here, there = self.renewals.release_here(int(hold_id, 16)), self._ask_others("ReleaseHold", request)
        for outcome in await asyncio.gather(here, there, return_exceptions=True):
            if isinstance(outcome, NsqhaError):
                logger.warning("hold_not_released", "hold %s of a snapshot that failed: %s", hold_id, outcome)

    async def _renew_elsewhere(self, hold: int) -> None:
        await self._ask_others("RenewHold", segments_pb2.RenewHoldRequest(hold_id=f"{hold:016x}"))

    async def _ask_others(self, rpc: str, request: Any) -> list[Any]:
        """Ask every other node that is alive. Raises Unavailable if one does not answer."""
        cluster = self._broker.cluster
        if cluster is None or self._others is None:
            return []
        message = type(request)(hold_id=request.hold_id, here=admin_pb2.Here())
        nodes = [info for uid, info in cluster.nodes().items() if uid != cluster.node and info.grpc_address]
        calls = [self._others.call(info.grpc_address, rpc, message, seconds=RENEW_SECONDS) for info in nodes]
        replies = await asyncio.gather(*calls, return_exceptions=True)
        lost = [
            f"{info.name}: {reply}" for info, reply in zip(nodes, replies, strict=True) if isinstance(reply, Exception)
        ]
        if lost:
            raise Unavailable(f"not every node could be asked: {'; '.join(lost)}; ask again")
        return list(replies)

    # ---- reader channels

    @answers
    async def CommitReader(self, request: Any) -> Any:
        if not ids.valid_name(request.channel) or ids.is_ephemeral(request.channel):
            raise ValueError(f"{request.channel!r} is not a name for a reader channel")
        topic = topic_of(self._broker, request)
        readers = self._broker.channels.readers
        if not request.HasField("here"):
            readers.topic_of_life(request.topic, request.topic_uid)
        there = topic.record.partitions
        wrong = [n for n in request.offsets if n not in there]
        if wrong:
            raise NotFound(f"topic {topic.name} has no partition {wrong[0]}, only {len(there)}")
        if not request.HasField("here"):
            await readers.ensure(request.topic, request.channel)

        work = CommitFloors(readers, topic, request)
        floors = await self._fan_out.answers(work, sorted(request.offsets))
        return segments_pb2.CommitReaderResponse(floors=[floors[n] for n in sorted(floors)])


@dataclass(frozen=True)
class CommitFloors:
    """A CommitReader: move a reader channel's floor, in each partition. A `TopicRequest`."""

    readers: ReaderChannels
    topic: Topic
    message: Any

    async def here(self, numbers: list[int]) -> dict[int, Any]:
        wanted = {p.number: self.message.offsets[p.number] for p in serving(self.topic, numbers)}
        done = await self.readers.commit(
            self.topic.name,
            self.message.channel,
            wanted,
            back=self.message.back,
            topic_uid=self.topic.record.uid,
        )
        return {number: _floor(number, outcome) for number, outcome in done.items()}

    async def ask(self, peers: PeerAdmins, address: str, numbers: list[int]) -> dict[int, Any]:
        message = for_leader(self.topic, self.message, numbers)
        reply = await peers.call(address, "CommitReader", message, seconds=CALL_SECONDS)
        return {floor.partition: floor for floor in reply.floors if not floor.not_led}

    def failed(self, number: int, why: str) -> Any:
        return segments_pb2.CommittedFloor(partition=number, error=why, not_led=self.message.HasField("here"))


def _floor(number: int, outcome: int | NsqhaError) -> Any:
    if isinstance(outcome, NsqhaError):
        return segments_pb2.CommittedFloor(partition=number, error=str(outcome) or type(outcome).__name__)
    return segments_pb2.CommittedFloor(partition=number, offset=outcome)


def _check(request: Any) -> None:
    if request.hold_ms > HOLD_MS_MAX:
        raise ValueError(f"hold_ms is {request.hold_ms}; it can be at most {HOLD_MS_MAX}, and is renewed by reading")
    if len(request.timestamps_ns) > TIMES_MAX:
        raise ValueError(f"{len(request.timestamps_ns)} timestamps; at most {TIMES_MAX} at once")
    if len(request.ranges) > RANGES_MAX:
        raise ValueError(f"{len(request.ranges)} ranges; at most {RANGES_MAX} at once")
    for one in request.ranges:
        if one.first > one.end:
            raise ValueError(f"range [{one.first}, {one.end}) of {one.topic}/{one.partition} is reversed")


def _hold_id(text: str) -> int:
    if len(text) != 16 or not set(text) <= set("0123456789abcdef") or not int(text, 16):
        raise ValueError(f"{text!r} is not the id of a hold: 16 lowercase hex digits")
    return int(text, 16)


@dataclass(frozen=True)
class _SnapshotWork:
    """Carries out one request for what this node leads."""

    broker: Broker
    request: Any  # with a hold's id, if one is wanted
    files: Executor
    renewals: HoldRenewals
    effort: Effort

    async def here(self, topics: Iterable[Topic], wanted: Collection[Key] | None = None) -> dict[Key, Any]:
        """The pins of partitions that are led here and serve; only of `wanted`, if given."""
        turns = asyncio.Semaphore(PINS_AT_ONCE)
        ranges = self.ranges()

        async def one(topic: Topic, partition: Partition) -> Any:
            async with turns:
                return await self._pin(topic, partition, ranges)

        led = [
            (topic, partition)
            for topic in topics
            for partition in topic.led
            if partition.serving and (wanted is None or (topic.name, partition.number) in wanted)
        ]
        if ranges is not None:
            led = [(topic, partition) for topic, partition in led if (topic.name, partition.number) in ranges]
        pins = await asyncio.gather(*[one(topic, partition) for topic, partition in led])
        return {(topic.name, p.number): pinned for (topic, p), pinned in zip(led, pins, strict=True) if pinned}

    def ranges(self) -> Mapping[Key, list[tuple[int, int]]] | None:
        """The wanted ranges by partition; None: whole partitions."""
        if not self.request.ranges:
            return None
        found: dict[Key, list[tuple[int, int]]] = {}
        for one in self.request.ranges:
            found.setdefault((one.topic, one.partition), []).append((one.first, one.end))
        return found

    async def _pin(
        self, topic: Topic, partition: Partition, ranges: Mapping[Key, list[tuple[int, int]]] | None
    ) -> Any | None:
        request, key = self.request, (topic.name, partition.number)
        mine = None if ranges is None else ranges[key]
        wanted = PinRequest(request.timestamps_ns, request.cut_points, mine, request.channel)
        try:
            if request.hold_ms:
                first = 0 if mine is None else min(first for first, _ in mine)
                await self._hold(partition, first)
            return await pin(self.broker.log_source, topic, partition, wanted, self.files, self.effort)
        except TooManyBorders:
            raise  # the others would be too many as well
        except Unavailable:
            return None  # it is not led here any more, or not yet
        except NsqhaError as error:
            return _without(topic, partition.number, str(error) or type(error).__name__)
        except OSError as error:
            logger.warning("snapshot_failed", "%s: %s", partition.log.directory, reason(error))
            return _without(topic, partition.number, f"its files cannot be read: {reason(error)}")

    async def _hold(self, partition: Partition, first: int) -> None:
        hold, hold_ms = int(self.request.hold_id, 16), self.request.hold_ms
        try:
            await self.renewals.make(partition, hold, first, hold_ms)
        except (OutcomeUnknown, StillUnderWay) as error:
            raise OutcomeUnknown(f"it could not be held: {error}; a snapshot without hold_ms is answered") from None


@dataclass(frozen=True)
class _Everywhere:
    """A snapshot of all leaders."""

    broker: Broker
    others: PeerAdmins | None

    async def answer(self, snapshot: _SnapshotWork, topics: list[Topic]) -> Any:
        wanted = [(t.name, n) for t in topics for n in sorted(t.record.partitions)]
        ranges = snapshot.ranges()
        if ranges is not None:
            for name, number in ranges.keys() - set(wanted):
                raise NotFound(f"there is no partition {number} of topic {name} among those asked for")
            wanted = [key for key in wanted if key in ranges]
        named = {topic.name: topic for topic in topics}
        found: dict[Key, Any] = {}
        why: dict[Key, str] = {}
        asked_of: dict[Key, int | None] = {}  # who was known as its leader then
        loop = self.broker.parts.loop
        deadline = loop.time() + LEADER_SECONDS
        missing, last = wanted, False
        while True:
            found.update(await snapshot.here(topics, set(missing)))
            missing = [key for key in missing if key not in found]
            asked: dict[str, list[Key]] = {}
            for key in missing:
                asked_of[key] = self._led_by(*key)
                address, why[key] = self._leader(*key)
                if address:
                    asked.setdefault(address, []).append(key)
            calls = [self._ask(address, snapshot.request, keys, named, why) for address, keys in asked.items()]
            for part in await asyncio.gather(*calls):
                found.update(part)
            missing = [key for key in missing if key not in found]
            if last or not missing:
                break
            if loop.time() < deadline:
                await asyncio.sleep(AGAIN_SECONDS)
            else:  # perhaps because a leader has frozen, and another one leads by now
                missing = [key for key in missing if self._led_by(*key) not in (None, asked_of[key])]
                last = True
        for name, number in wanted:
            if (name, number) not in found:
                found[name, number] = _without(named[name], number, why[name, number])
        return segments_pb2.SnapshotResponse(partitions=[found[key] for key in sorted(wanted)])

    def _led_by(self, name: str, number: int) -> int | None:
        """The node that is known as the leader."""
        cluster = self.broker.cluster
        leader = None if cluster is None else cluster.leaders.leader(name, number)
        return None if leader is None else leader.node

    def _leader(self, name: str, number: int) -> tuple[str, str]:
        """The address of a partition's leader, and the error text if that node does not answer for it."""
        cluster = self.broker.cluster
        if cluster is None:
            return "", "it has only begun, or is closed"
        leader = cluster.leaders.leader(name, number)
        if leader is None:
            return "", NO_LEADER
        if leader.node == cluster.node:
            return "", "this node has only begun to lead it"
        return leader.address, leads_not(leader.address)

    async def _ask(
        self, address: str, request: Any, keys: list[Key], named: Mapping[str, Topic], why: dict[Key, str]
    ) -> dict[Key, Any]:
        assert self.others is not None, "this node is alone"
        message = segments_pb2.SnapshotRequest()
        message.CopyFrom(request)
        message.pattern = ""
        del message.topics[:], message.ranges[:]
        message.topics.extend(dict.fromkeys(name for name, _ in keys))
        wanted = set(keys)
        message.ranges.extend(one for one in request.ranges if (one.topic, one.partition) in wanted)
        message.here.SetInParent()
        try:
            reply = await self.others.call(address, "Snapshot", message, seconds=SNAPSHOT_SECONDS)
        except LimitReached:
            raise  # more than one node does for one request
        except (NsqhaError, ValueError) as error:
            why.update(dict.fromkeys(keys, str(error)))
            return {}
        return {
            (found.topic, found.partition): found
            for found in reply.partitions
            if (found.topic, found.partition) in wanted and found.topic_uid == named[found.topic].record.uid
        }


def _without(topic: Topic, number: int, why: str) -> Any:
    """The answer for a partition about which nothing is known but an error."""
    uid = topic.record.uid
    return segments_pb2.PartitionSnapshot(topic=topic.name, topic_uid=uid, partition=number, error=why)
