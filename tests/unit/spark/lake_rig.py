"""A log in memory, what the segment service says of it, and a lake in a folder: for tests of archive and verify."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsqha import hot
from nsqha.commitlog.entry import Entry, genesis, next_entry
from nsqha.frames import LOST
from pyspark_nsqha.lake.commits.commit import ManifestCommits
from pyspark_nsqha.lake.parquet import SCHEMA
from pyspark_nsqha.lake.rounds import Rounds, RoundSettings
from pyspark_nsqha.lake.store import Store
from pyspark_nsqha.lake.task import PieceOutcome, Tell, Verified, write_piece
from pyspark_nsqha.model import (
    CutPoint,
    FetchedRun,
    Gone,
    PartitionLife,
    PinnedPartition,
    ReadFailed,
    ReplicaAddress,
    Split,
)
from pyspark_nsqha.reading.entries import verify
from pyspark_nsqha.reading.scan import MissingRange, record_batches
from pyspark_nsqha.snapshot import Snapshot, SnapshotRequest

SECOND = 10**9
DAY = 24 * 3600 * SECOND
NOON = 20_000 * DAY + DAY // 2


@dataclass
class Partition:
    """One partition: batches in memory, in the broker's own form."""

    topic: str = "orders"
    number: int = 0
    uid: int = 0xABC
    step: int = 4000  # bytes between cuts, about
    entries: list[tuple[Entry, bytes, bytes]] = field(default_factory=list)
    start: int = 0  # of the batches that are still there
    lost: set[int] = field(default_factory=set)

    @property
    def identity(self) -> PartitionLife:
        return PartitionLife(self.topic, self.uid, self.number, self.number << 50 | 5 << 30)

    @property
    def last(self) -> Entry:
        return self.entries[-1][0] if self.entries else genesis(self.uid, self.number)

    def publish(self, *bodies: bytes, at_ns: int = 0, epoch: int = 1) -> None:
        """One batch; none is one of events."""
        previous = self.last
        timestamp_ns = at_ns or max(previous.timestamp_ns + SECOND, NOON)
        frames = [hot.frame(body) for body in bodies] or [b"\0\0\0\x04\0\0\0\x14"]
        data = bytearray(b"".join(frames))
        count = hot.stamp(data, 0, self.identity.id_base + previous.end_offset, timestamp_ns)
        entry, raw = next_entry(
            previous,
            bytes(data),
            count=count,
            flags=0 if bodies else 1,
            timestamp_ns=timestamp_ns,
            epoch=epoch,
            durable=0,
        )
        self.entries.append((entry, raw, bytes(data)))

    def trim(self, batches: int) -> None:
        """Retention takes so many."""
        self.start += batches

    def lose(self, log_id: int, flag: int = LOST) -> None:
        """An operator gives a batch up; or with FAULTY, recovery could not read it."""
        entry, *_ = self.entries[log_id - 1]
        lost = entry._replace(flags=entry.flags | flag)
        self.entries[log_id - 1] = (lost, lost.encode(), b"")

    def cut(self, index: int) -> CutPoint:
        entry = self.entries[index][0] if index < len(self.entries) else None
        if entry is None:
            last = self.last
            return CutPoint(last.end_offset, last.log_id + 1, last.end_position, last.timestamp_ns)
        return CutPoint(entry.first_offset, entry.log_id, entry.position, entry.timestamp_ns)

    def pin(self, *, cuts: bool = False) -> PinnedPartition:
        start, end = self.cut(self.start), self.cut(len(self.entries))
        found = [start]
        for index in range(self.start, len(self.entries)):
            if self.cut(index + 1).position - found[-1].position > self.step:
                here = self.cut(index)
                if here.log_id > found[-1].log_id:
                    found.append(here)
        found.append(end)
        replicas = (ReplicaAddress("fake:1", "", True),)
        last = self.last
        return PinnedPartition(
            self.identity, start, end, last.epoch, last.chain, tuple(found) if cuts else (), replicas
        )

    def read(self, split: Split, tell: Tell, *, batches_a_run: int = 3) -> Iterator[Verified]:
        """As `task.read_log`."""
        if split.first_log_id <= self.start:
            raise Gone(f"{self.topic}/{self.number}: gone", planned=(split.first, split.end))
        before = None
        for first in range(split.first_log_id - 1, split.end_log_id - 1, batches_a_run):
            part = self.entries[first : min(first + batches_a_run, split.end_log_id - 1)]
            run = FetchedRun(first + 1, b"".join(raw for _, raw, _ in part), b"".join(data for *_, data in part))
            entries = verify(run, split.identity, before, at=(split.at_log_id, split.chain))
            gaps: list[MissingRange] = []
            batches = list(
                record_batches(
                    run,
                    entries,
                    split.identity,
                    columns=SCHEMA.names,
                    first=split.first,
                    end=split.end,
                    skip_unreadable=True,
                    missing=gaps.append,
                )
            )
            for gap in gaps:
                tell(*gap)
            before = entries.last
            yield Verified(entries, batches)


@dataclass
class FakeLog:
    """Partitions, reader channels and holds of a cluster."""

    partitions: list[Partition] = field(default_factory=list)
    floors: dict[tuple[str, str, int], int] = field(default_factory=dict)
    holds: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    cluster: str = ""
    away: set[tuple[str, int]] = field(default_factory=set)  # partitions without a leader
    stuck: set[tuple[str, int]] = field(default_factory=set)  # partitions whose floors cannot be moved

    def partition(self, topic: str, number: int) -> Partition:
        return next(p for p in self.partitions if (p.topic, p.number) == (topic, number))

    def snapshot(self, asked: SnapshotRequest, *, partial: bool = False) -> Snapshot:
        self.calls.append("snapshot")
        found = [p for p in self.partitions if p.topic in asked.topics or asked.pattern]
        if not found:
            raise ReadFailed(f"there is no topic {asked.topics}")
        failed = {(p.topic, p.number): "no leader" for p in found if (p.topic, p.number) in self.away}
        if failed and not partial:
            raise ReadFailed(f"no snapshot of {failed}")
        found = [p for p in found if (p.topic, p.number) not in failed]
        if asked.hold_ms:
            self.holds.add("hold")
        times = {
            (p.topic, p.number): {
                at: next((e.first_offset for e, *_ in p.entries[p.start :] if e.timestamp_ns >= at), p.last.end_offset)
                for at in asked.times_ns
            }
            for p in found
        }
        floors = {
            (p.topic, p.number): self.floors[asked.channel, p.topic, p.number]
            for p in found
            if (asked.channel, p.topic, p.number) in self.floors
        }
        pins = tuple(p.pin(cuts=asked.ranges is not None) for p in found)
        return Snapshot(pins, times, floors, "hold" if asked.hold_ms else "", self.cluster, failed)

    def release_hold(self, hold_id: str) -> int:
        self.calls.append("release")
        self.holds.discard(hold_id)
        return 1

    def commit_reader(
        self, topic: str, channel: str, offsets: Mapping[int, int], *, back: bool = False, topic_uid: int = 0
    ) -> dict[int, int]:
        for partition in offsets:
            assert topic_uid == self.partition(topic, partition).pin().identity.topic_uid
        self.calls.append(f"commit {topic} {dict(offsets)}{' back' if back else ''}")
        if stuck := [number for number in offsets if (topic, number) in self.stuck]:
            raise ReadFailed(f"the floor of channel {channel} was not moved in {topic}/{stuck}")
        for partition, offset in offsets.items():
            key = channel, topic, partition
            self.floors[key] = offset if back else max(self.floors.get(key, 0), offset)
        return dict(offsets)

    def read(self, split: Split, tell: Tell) -> Iterator[Verified]:
        return self.partition(split.identity.topic, split.identity.partition).read(split, tell)


class Crash(BaseException):
    """The process is gone."""


@dataclass
class Lake:
    """A lake in a folder, and runs that write it from a log."""

    folder: Path
    log: FakeLog
    split_bytes: int = 4000
    round_bytes: int = 20_000
    strict: bool = False
    steps: list[str] = field(default_factory=list)
    crash_at: int = -1
    runs: int = 0

    @property
    def store(self) -> Store:
        return Store(str(self.folder))

    @property
    def commits(self) -> ManifestCommits:
        return ManifestCommits(self.store)

    def rounds(self, write: Callable[[Sequence[Split], str], list[PieceOutcome]] | None = None) -> Rounds:
        self.runs += 1
        settings = RoundSettings(f"run{self.runs}", self.split_bytes, self.round_bytes, self.strict)
        return Rounds(self.commits, self.store, write or self.write, settings, step=self.step)

    def step(self, name: str) -> None:
        if len(self.steps) == self.crash_at:
            raise Crash(name)
        self.steps.append(name)

    def write(self, splits: Sequence[Split], run: str) -> list[PieceOutcome]:
        outcomes = []
        for split in splits:
            self.step("task")
            outcomes.append(write_piece(split, self.store, self.log.read, run=run))
        return outcomes

    def data_files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in (self.folder / "data").rglob("*.parquet"))

    def named(self) -> list[str]:
        return sorted(file.path for file in self.commits.state().addition().files)
