"""Streams against a segment service made of numbers: one message per batch, 100 bytes each.

It refuses what brokers refuse: topics and partitions that are not there, and offsets of another life of a topic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc

from pyspark_nsqha.model import CutPoint, NotThere, PartitionLife, PinnedPartition, ReadFailed, ReplicaAddress
from pyspark_nsqha.snapshot import Snapshot, SnapshotRequest
from pyspark_nsqha.streams.offsets import Records, from_json, to_json
from pyspark_nsqha.streams.stream import Plans, stream_options
from pyspark_nsqha.streams.witnesses import Witnesses

MESSAGE_BYTES = 100


@dataclass
class Log:
    """One partition: message n is in the batch with log id n + 1, whose chain tells by whom it was written."""

    uid: int = 7
    start: int = 0
    chains: list[int] = field(default_factory=lambda: [0])  # by log id
    epoch: int = 1

    def append(self, messages: int, writer: int = 1) -> None:
        for _ in range(messages):
            self.chains.append((self.chains[-1] * 31 + writer) % (1 << 64))

    def cut(self, log_id: int) -> CutPoint:
        return CutPoint(log_id - 1, log_id, (log_id - 1) * MESSAGE_BYTES, log_id)

    @property
    def end(self) -> int:
        return len(self.chains) - 1

    def pin(self, topic: str, partition: int, cuts: tuple[CutPoint, ...]) -> PinnedPartition:
        start, end = self.cut(self.start + 1), self.cut(self.end + 1)
        identity = PartitionLife(topic, self.uid, partition, 0)
        return PinnedPartition(
            identity, start, end, self.epoch, self.chains[-1], cuts, (ReplicaAddress("127.0.0.1:1"),)
        )


def refuse(code: grpc.StatusCode, text: str) -> NoReturn:
    """As the client of the service raises it."""
    raise (NotThere if code is grpc.StatusCode.NOT_FOUND else ReadFailed)(text)


class Service:
    """Snapshots, holds and reader channels of some logs."""

    def __init__(self, **logs: Log) -> None:
        self.logs = {(name, 0): log for name, log in logs.items()}
        self.floors: dict[tuple[str, int], int] = {}  # of the life that is there
        self.moves: list[tuple[str, bool, dict[int, int]]] = []
        self.holds: list[str] = []
        self.released: list[str] = []
        self.asked: list[SnapshotRequest] = []
        self.entries_asked: list[int] = []
        self.refuses = ""

    def snapshot(self, asked: SnapshotRequest) -> Snapshot:
        self.asked.append(asked)
        assert bool(asked.topics) != bool(asked.pattern), "INVALID_ARGUMENT"
        for name in asked.topics:
            self._there(name)
        ranges = {(topic, partition): (first, end) for topic, partition, first, end in asked.ranges or ()}
        for topic, partition in ranges:
            if topic not in asked.topics or (topic, partition) not in self.logs:
                what = f"there is no partition {partition} of topic {topic} among those asked for"
                refuse(grpc.StatusCode.NOT_FOUND, f"{what}; `nsqha topic list` shows what there is")
        pins = []
        for key, log in sorted(self.logs.items()):
            if not (key[0] in asked.topics or (asked.pattern and re.fullmatch(asked.pattern, key[0]))):
                continue
            if ranges and key not in ranges:
                continue
            first, end = ranges.get(key, (0, 0))
            low, high = max(first, log.start), min(end, log.end)
            cuts = tuple(log.cut(at + 1) for at in range(low, high + 1)) if ranges else ()
            pins.append(log.pin(*key, cuts))
        if asked.hold_ms:
            self.holds.append(f"{len(self.holds) + 1:016x}")
        there = {key for key in self.floors if asked.channel and any(pin.identity.topic == key[0] for pin in pins)}
        floors = {key: self.floors[key] for key in there}
        return Snapshot(tuple(pins), floors=floors, hold_id=self.holds[-1] if asked.hold_ms else "")

    def _there(self, name: str) -> dict[int, Log]:
        """The partitions of a topic that is there."""
        found = {partition: log for (topic, partition), log in self.logs.items() if topic == name}
        if not found:
            refuse(grpc.StatusCode.NOT_FOUND, f"no topic '{name}'; `nsqha topic list` shows what there is")
        return found

    def make_anew(self, name: str, log: Log) -> None:
        """Delete a topic and make it again, which ends its channels, too."""
        assert log.uid != self.logs[name, 0].uid
        self.logs[name, 0] = log
        self.floors.pop((name, 0), None)

    def commit_reader(
        self, topic: str, channel: str, offsets: Mapping[int, int], *, back: bool = False, topic_uid: int = 0
    ) -> dict[int, int]:
        if self.refuses:
            raise ReadFailed(self.refuses)
        there = self._there(topic)
        for partition, offset in offsets.items():
            if partition not in there:
                refuse(grpc.StatusCode.NOT_FOUND, f"topic {topic} has no partition {partition}, only {len(there)}")
            log = there[partition]
            if topic_uid not in (0, log.uid):
                refuse(grpc.StatusCode.FAILED_PRECONDITION, f"topic {topic} was deleted and made again")
            target = min(max(offset, log.start), log.end)
            floor = self.floors.get((topic, partition), 0)
            self.floors[topic, partition] = target if back else max(floor, target)
        self.moves.append((topic, back, dict(offsets)))
        return {partition: self.floors[topic, partition] for partition in offsets}

    def release_hold(self, hold_id: str) -> int:
        self.released.append(hold_id)
        return 1

    def entry_at(self, pin: PinnedPartition, log_id: int) -> bytes | None:
        self.entries_asked.append(log_id)
        log = self.logs[pin.identity.topic, 0]
        if log_id <= log.start:
            return None
        return bytes(60) + log.chains[log_id].to_bytes(8, "big") + bytes(12)


class Query:
    """A query as Spark runs it: offsets go through the text of a checkpoint."""

    def __init__(self, service: Service, checkpoint: list[str] | None = None, **options: object) -> None:
        self.now = 1000.0
        which = {} if options.keys() & {"subscribe", "assign"} else {"subscribePattern": ".*"}
        given = {"brokers": "b:1", **which, "startingOffsets": "earliest", **options}
        parsed = stream_options({name: str(value) for name, value in given.items()})
        self.plans = Plans(
            parsed,
            service,
            Witnesses(service.entry_at),
            now=lambda: self.now,
            sleep=self._sleep,  # type: ignore[arg-type]
        )
        self.checkpoint = checkpoint if checkpoint is not None else []
        if not self.checkpoint:
            self.checkpoint.append(json.dumps(to_json(self.plans.initial())))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def at(self) -> Records:
        return from_json(json.loads(self.checkpoint[-1]))

    def batch(self, *, everything: bool = False, process: bool = True) -> dict[str, range]:
        """One trigger: the messages of its micro-batch by topic; nothing if there is none."""
        before = self.at
        end = json.dumps(to_json(self.plans.latest(before, everything=everything)))
        if end == self.checkpoint[-1]:
            return {}
        if process and len(self.checkpoint) > 1:
            self.plans.done(before)
        self.checkpoint.append(end)
        return self.replay()

    def replay(self) -> dict[str, range]:
        """The last micro-batch, as it is planned after a restart, too."""
        ends = [from_json(json.loads(text)) for text in self.checkpoint[-2:]]
        return messages(self.plans.tasks(*ends))


def messages(tasks: list[Any]) -> dict[str, range]:
    """What tasks read; each message once, in order."""
    found: dict[str, range] = {}
    for task in tasks:
        for part in task:
            split, topic = part.split, part.split.identity.topic
            so_far = found.get(topic, range(split.first, split.first))
            assert so_far.stop == split.first
            found[topic] = range(so_far.start, split.end)
    return found


def log(messages: int = 0, **fields: Any) -> Log:
    made = Log(**fields)
    made.append(messages)
    return made
