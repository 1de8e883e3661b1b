"""Streams against a segment service made of numbers: one message per batch, 100 bytes each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark_nsqha.model import Cut, Identity, Pin, ReadFailed, Replica
from pyspark_nsqha.snapshot import Asked, Snapshot
from pyspark_nsqha.stream import Plans, stream_options
from pyspark_nsqha.stream_offsets import Records, from_json, to_json
from pyspark_nsqha.stream_witnesses import Witnesses

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

    def cut(self, log_id: int) -> Cut:
        return Cut(log_id - 1, log_id, (log_id - 1) * MESSAGE_BYTES, log_id)

    @property
    def end(self) -> int:
        return len(self.chains) - 1

    def pin(self, topic: str, partition: int, cuts: tuple[Cut, ...]) -> Pin:
        start, end = self.cut(self.start + 1), self.cut(self.end + 1)
        identity = Identity(topic, self.uid, partition, 0)
        return Pin(identity, start, end, self.epoch, self.chains[-1], cuts, (Replica("127.0.0.1:1"),))


class Service:
    """Snapshots, holds and reader channels of some logs."""

    def __init__(self, **logs: Log) -> None:
        self.logs = {(name, 0): log for name, log in logs.items()}
        self.floors: dict[tuple[str, int], int] = {}
        self.moves: list[tuple[str, bool, dict[int, int]]] = []
        self.holds: list[str] = []
        self.released: list[str] = []
        self.asked: list[Asked] = []
        self.entries_asked: list[int] = []
        self.refuses = ""

    def snapshot(self, asked: Asked) -> Snapshot:
        self.asked.append(asked)
        ranges = {(topic, partition): (first, end) for topic, partition, first, end in asked.ranges or ()}
        pins = []
        for key, log in sorted(self.logs.items()):
            if ranges and key not in ranges:
                continue
            first, end = ranges.get(key, (0, 0))
            low, high = max(first, log.start), min(end, log.end)
            cuts = tuple(log.cut(at + 1) for at in range(low, high + 1)) if ranges else ()
            pins.append(log.pin(*key, cuts))
        if asked.hold_ms:
            self.holds.append(f"{len(self.holds) + 1:016x}")
        return Snapshot(tuple(pins), hold_id=self.holds[-1] if asked.hold_ms else "")

    def commit_reader(
        self, topic: str, channel: str, offsets: Mapping[int, int], *, back: bool = False
    ) -> dict[int, int]:
        if self.refuses:
            raise ReadFailed(self.refuses)
        self.moves.append((topic, back, dict(offsets)))
        return dict(offsets)

    def release_hold(self, hold_id: str) -> int:
        self.released.append(hold_id)
        return 1

    def entry_at(self, pin: Pin, log_id: int) -> bytes | None:
        self.entries_asked.append(log_id)
        log = self.logs[pin.identity.topic, 0]
        if log_id <= log.start:
            return None
        return bytes(60) + log.chains[log_id].to_bytes(8, "big") + bytes(12)


class Query:
    """A query as Spark runs it: offsets go through the text of a checkpoint."""

    def __init__(self, service: Service, checkpoint: list[str] | None = None, **options: object) -> None:
        self.now = 1000.0
        given = {"brokers": "b:1", "subscribePattern": ".*", "startingOffsets": "earliest", **options}
        parsed = stream_options({name: str(value) for name, value in given.items()})
        self.plans = Plans(
            parsed, service, Witnesses(service.entry_at), now=lambda: self.now, sleep=self._sleep  # type: ignore[arg-type]
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
