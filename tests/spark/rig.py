"""What the slow tests of the batch source share: known messages in a real cluster, and reads that stop in the middle.

log = KnownLog.published(cluster, "orders", count=6000)
gate = Gate(tmp_path)
with gate.reading(log.read(spark)) as reading:
    gate.wait_reached(2)                 # two tasks have their first rows, and wait
    cluster.nodes[0].kill()
    gate.open()
log.check(reading.rows())
"""

from __future__ import annotations

import hashlib
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from nsqha.cli.brokers.admin import Admin
from nsqha.cli.brokers.v2client import V2Publisher
from nsqha.commitlog.entry import Entry
from nsqha.commitlog.files.pairs import SEGMENT
from nsqha.commitlog.reading.lookup import LogIdentity, LogReader
from nsqha.commitlog.storage import OsStorage
from tests.integration.cluster import Cluster, Member
from tests.integration.servers import wait_until

READ_SECONDS = 100.0  # for one job, whatever happens to it
HELD_SECONDS = 90.0  # a task waits no longer before a gate that nobody opens
FILE_BYTES = 1 << 20  # of each segment: a split takes several requests, and retention finds files to take
FILLING = random.Random(13).randbytes(16 << 10)  # which no compression makes smaller


def body(number: int, size: int) -> bytes:
    """A message that no other one is equal to."""
    return f"{number} ".encode() + FILLING[number % 997 :][:size]


@dataclass
class KnownLog:
    """A topic, and every message that was published to it."""

    cluster: Cluster
    topic: str
    digests: list[str] = field(default_factory=list)

    @classmethod
    def published(cls, cluster: Cluster, topic: str, count: int, *, partitions: int = 2, size: int = 8000) -> KnownLog:
        """`count` messages over all partitions, which all replicas have; channel `done` has nothing left to read."""
        log = cls(cluster, topic)
        with Admin(cluster.nodes[0].grpc, 10) as admin:
            admin.call("CreateTopic", topic=topic, channels=["done"], settings={"partitions": partitions})
        wait_until(cluster.all_in_sync, f"{topic} is in sync", 30)
        log.publish(count, size=size)
        cluster.nodes[0].request(f"/channel/empty?topic={topic}&channel=done", b"")
        log.wait_level()
        return log

    def publish(self, count: int, *, size: int = 8000, at: Member | None = None) -> None:
        """More messages, through all nodes in turn or through one, so that every partition gets some."""
        first, at_once = len(self.digests), 50
        bodies = [body(number, size) for number in range(first, first + count)]
        publishers = [V2Publisher(node.tcp, 30) for node in ([at] if at else self.cluster.nodes) if node.running]
        for index, begin in enumerate(range(0, count, at_once)):
            publishers[index % len(publishers)].publish(self.topic, bodies[begin : begin + at_once])
        for publisher in publishers:
            publisher.close()
        self.digests += [hashlib.md5(one).hexdigest() for one in bodies]

    def wait_level(self) -> None:
        for number in range(self.partitions):
            self.cluster.wait_level(self.topic, number=number)

    # ---- the cluster's side of it

    @property
    def partitions(self) -> int:
        return len(self.record.partitions)

    @property
    def record(self) -> Any:
        found = self.cluster.store.records.topic(self.topic)
        assert found is not None, f"there is no topic {self.topic}"
        return found.record

    def leader(self, number: int = 0) -> Member:
        """Who leads a partition, by the cluster's metadata."""

        def leads() -> Member | None:
            meta = self.cluster.meta(self.topic, number)
            member = None if meta is None else self.cluster.member(meta.leader)
            return member if member is not None and member.running else None

        found: Member = wait_until(leads, f"{self.topic}/{number} has a leader", 30)
        return found

    def followers(self, number: int = 0) -> list[Member]:
        leader = self.leader(number)
        return [node for node in self.cluster.nodes if node is not leader]

    def folder(self, member: Member, number: int = 0) -> Path:
        """Where a replica's files are."""
        return member.data / "topics" / f"{self.topic}-{self.record.uid:016x}" / str(number)

    def files(self, member: Member, number: int = 0) -> LogReader:
        """A replica's files, as they are now."""
        identity = LogIdentity(self.record.uid, number)
        return LogReader.open(OsStorage(), str(self.folder(member, number)), identity)

    @contextmanager
    def damaged(self, members: Sequence[Member], offset: int, number: int = 0) -> Iterator[Entry]:
        """A byte of this message, the same one, is another one in these replicas; the entry of its batch."""
        damaged: list[tuple[Path, int]] = []
        try:
            for member in members:
                log = self.files(member, number)
                entry = log.entry_for_offset(offset)
                assert entry is not None
                pair = log.files.pair_of(entry.log_id)
                damaged.append((Path(pair.path(SEGMENT)), entry.position - pair.position + 200))
                log.close()
                _flip(*damaged[-1])
            yield entry
        finally:
            for path, at in damaged:
                _flip(path, at)

    def starts(self, number: int = 0) -> list[int]:
        """The position of the oldest byte that each replica has."""
        folders = [self.folder(node, number) for node in self.cluster.nodes]
        return [min((int(file.stem) for file in folder.glob("*.segment")), default=-1) for folder in folders]

    def described(self) -> Any:
        """What `nsqha topic show` shows."""
        node = next(node for node in self.cluster.nodes if node.running)
        with Admin(node.grpc, 10) as admin:
            return admin.call("DescribeTopic", topic=self.topic).topic

    def holds(self) -> list[Any]:
        return [hold for partition in self.described().partitions for hold in partition.holds]

    def keep(self, milliseconds: int) -> None:
        """`nsqha topic set --retention`."""
        node = next(node for node in self.cluster.nodes if node.running)
        with Admin(node.grpc, 10) as admin:
            admin.call("UpdateTopicSettings", topic=self.topic, retention_ms=milliseconds)

    def trimmed(self) -> bool:
        """Whether every replica of every partition has lost its oldest file."""
        return all(start > 0 for number in range(self.partitions) for start in self.starts(number))

    # ---- Spark's side of it

    def reader(self, spark: Any, **options: object) -> Any:
        found = spark.read.format("nsqha").option("subscribe", self.topic)
        found = found.option("brokers", ",".join(node.grpc for node in self.cluster.nodes if node.running))
        for name, value in options.items():
            found = found.option(name.replace("__", "."), str(value))
        return found

    def read(self, spark: Any, **options: object) -> Any:
        """The DataFrame of everything, in small batches."""
        return self.reader(spark, **{"batchBytes": "256k", **options}).load()

    def check(self, rows: list[Any], *, lost: int = 0) -> None:
        """Each message is there once; all but so many."""
        places = Counter((row.partition, row.offset) for row in rows)
        assert len(places) == len(rows), f"twice: {[place for place, n in places.items() if n > 1][:5]}"
        extra = Counter(row.digest for row in rows) - Counter(self.digests)
        assert not extra, f"{sum(extra.values())} rows were never published"
        assert len(rows) == len(self.digests) - lost


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x55]))


def digests(frame: Any) -> Any:
    """Place and digest of each row's value: what `KnownLog.check` takes."""
    return frame.selectExpr("partition", "offset", "md5(value) AS digest")


class Gate:
    """Every task that has its first rows waits before it, until it is opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / f"gate-{time.monotonic_ns()}"
        self.folder.mkdir()

    def reading(self, frame: Any) -> Reading:
        """A job with its rows, behind this gate."""
        return Reading(self._in_front_of(frame), self)

    def _in_front_of(self, frame: Any) -> Any:
        folder = str(self.folder)

        # Not a name of this module: it is pickled with its code, so that workers need no tests.
        def through(batches: Iterator[Any]) -> Iterator[Any]:
            import os
            import time

            for index, batch in enumerate(batches):
                if not index:
                    open(os.path.join(folder, f"reached-{time.monotonic_ns()}-{os.getpid()}"), "w").close()
                    until = time.monotonic() + HELD
                    while not os.path.exists(os.path.join(folder, "open")) and time.monotonic() < until:
                        time.sleep(0.02)
                yield batch

        HELD = HELD_SECONDS
        return digests(frame.mapInArrow(through, frame.schema))

    def wait_reached(self, tasks: int) -> None:
        reached = lambda: len(list(self.folder.glob("reached-*"))) >= tasks  # noqa: E731
        wait_until(reached, f"{tasks} tasks have their first rows", 60)

    def open(self) -> None:
        (self.folder / "open").touch()


class Reading:
    """A job that runs while the test does something else. Nothing of it is left when the block ends."""

    def __init__(self, frame: Any, gate: Gate) -> None:
        self._frame = frame
        self._gate = gate
        self._rows: list[Any] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._rows = self._frame.collect()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._gate.open()
        self._join()

    def rows(self) -> list[Any]:
        """What it found; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._rows

    def rows_in_time(self) -> list[Any]:
        """As `rows`, once the job is over."""
        self._join()
        return self.rows()

    def _join(self) -> None:
        self._thread.join(READ_SECONDS)
        assert not self._thread.is_alive(), f"the job is not over after {READ_SECONDS:.0f} s"

    def why(self) -> str:
        """The line with which our code failed it."""
        assert self._error is not None, f"{len(self._rows)} rows were read"
        return line_of(self._error)


def line_of(error: BaseException) -> str:
    """Of an error from Spark: the one line that our code said, without the JVM's trace around it."""
    found = re.findall(r"pyspark_nsqha\.\w+\.\w+: (.*)", str(error))
    assert found, f"our code said nothing in {error}"
    return str(found[-1])


def failure(frame: Any) -> str:
    """The line with which a job that has to fail does."""
    try:
        rows = frame.collect()
    except Exception as error:
        return line_of(error)
    raise AssertionError(f"it did not fail but has {len(rows)} rows")


def answers(member: Member, status: int = 200) -> int:
    """How many requests for bytes a node has answered so."""
    text = member.request("/metrics").decode()
    found = re.search(rf'^nsqha_segments_requests_total\{{status="{status}"\}} (\S+)', text, re.MULTILINE)
    return int(float(found[1])) if found else 0


__all__ = ["FILE_BYTES", "Gate", "KnownLog", "digests", "failure", "line_of", "answers"]
