"""Archive, backfill and verify in a real Spark, from a real node whose retention takes what the lake has."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli.brokers.admin import Admin
from nsqha.cli.brokers.v2client import V2Publisher
from pyspark_nsqha import jobs
from pyspark_nsqha.lake.archive import Subject, once
from pyspark_nsqha.lake.backfill import backfill
from pyspark_nsqha.lake.commits.commit import ManifestCommits
from pyspark_nsqha.lake.contents import CheckTask
from pyspark_nsqha.lake.rounds import Rounds, RoundSettings, RoundTotals
from pyspark_nsqha.lake.store import Store
from pyspark_nsqha.lake.task import PieceTask, read_log
from pyspark_nsqha.lake.verify import LakeReport, verify
from pyspark_nsqha.model import PinnedPartition, ReadFailed
from pyspark_nsqha.options import ConnectOptions
from pyspark_nsqha.snapshot import Segments, SnapshotRequest
from tests.integration.servers import Node, free_port, wait_until

pytest.importorskip("pyspark")
pytestmark = pytest.mark.timeout(180)

FILE_BYTES = 1 << 18
names = count(1)


class Broker(Node):
    """A node that is alone, with small files, so that retention finds some to take."""

    def __init__(self, directory: Path) -> None:
        self.grpc = f"127.0.0.1:{free_port()}"
        flags = [f"--grpc-address={self.grpc}", f"--max-bytes-per-file={FILE_BYTES}", "--segments-address=127.0.0.1:0"]
        super().__init__(directory, sync="none", flags=flags)

    def listening(self) -> bool:
        return super().listening() and "gRPC: listening on" in self.log()

    def admin(self, rpc: str, **fields: Any) -> Any:
        with Admin(self.grpc, 10) as admin:
            return admin.call(rpc, **fields)

    @property
    def segments(self) -> Segments:
        return Segments(ConnectOptions((self.grpc,)))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("node")) as node:
        yield node


class Archived:
    """A topic, what was published to it, and its lake."""

    def __init__(self, spark: Any, node: Broker, folder: Path) -> None:
        self.spark = spark
        self.node = node
        self.topic = f"lake-{next(names)}"
        self.folder = folder
        self.store = Store(str(folder))
        self.bodies: list[bytes] = []
        self._random = random.Random(5)
        node.admin("CreateTopic", topic=self.topic, settings={"partitions": 2})

    def publish(self, messages: int) -> None:
        for at in range(2):  # a connection keeps to its partition
            publisher = V2Publisher(self.node.tcp, 20)
            for first in range(0, messages // 2, 50):
                some = [b"%d-%d " % (at, first + n) + self._random.randbytes(400) for n in range(50)]
                publisher.publish(self.topic, some)
                self.bodies += some
            publisher.close()

    def rounds(self) -> Rounds:
        run = f"run{next(names)}"

        def write(splits: Any, run: str) -> Any:
            return jobs.run_tasks(self.spark, PieceTask(self.store, run), splits)

        return Rounds(ManifestCommits(self.store), self.store, write, RoundSettings(run, split_bytes=1 << 20))

    def archive(self) -> RoundTotals:
        return once(self.node.segments, self.rounds(), Subject((self.topic,)))

    def pins(self) -> tuple[PinnedPartition, ...]:
        return self.node.segments.snapshot(SnapshotRequest((self.topic,))).pins

    def trimmed(self) -> bool:
        return all(pin.start.offset > 0 for pin in self.pins())

    def keep_nothing(self) -> None:
        self.node.admin("UpdateTopicSettings", topic=self.topic, retention_ms=1000)

    def verify(self, *, full: bool = False) -> LakeReport:
        check: Callable[..., Any] = partial(jobs.run_tasks, self.spark, CheckTask(self.store))
        state = ManifestCommits(self.store).state()
        return verify(state, self.store, [self.topic], pins=self.pins(), read=read_log, check=check if full else None)

    def load(self, **options: object) -> Any:
        given = {"subscribe": self.topic, "brokers": self.node.grpc}
        return self.spark.read.format("nsqha").options(**given, **options).load()

    def lake_files(self) -> list[Path]:
        return sorted(self.folder.rglob("*.parquet"))


@pytest.fixture
def archived(spark: Any, node: Broker, tmp_path: Path) -> Archived:
    return Archived(spark, node, tmp_path / "lake")


def values(table: Any) -> list[bytes]:
    return sorted(bytes(row.value) for row in table.select("value").collect())


def test_what_retention_took_is_in_the_lake_and_both_are_one_history(archived: Archived) -> None:
    archived.publish(2000)
    totals = archived.archive()
    assert totals.rows == 2000 and not totals.failed and not totals.missing
    archived.keep_nothing()
    archived.publish(600)
    wait_until(archived.trimmed, "retention takes what is in the lake", 30)
    floors = archived.node.segments.snapshot(SnapshotRequest((archived.topic,), channel="archive")).floors
    assert sum(floors.values()) == 2000

    table = archived.load(archive=str(archived.folder))
    assert values(table) == sorted(archived.bodies)
    rows = table.select("partition", "offset").collect()
    assert len({(row.partition, row.offset) for row in rows}) == len(rows) == 2600
    assert len(values(archived.load(failOnDataLoss="false"))) < 2600

    assert archived.archive().rows == 600
    assert backfill(archived.node.segments, archived.rounds(), topics=(archived.topic,)).files == 0
    report = archived.verify(full=True)
    assert (report.problems, report.failed, report.missing) == ([], [], [])
    assert report.rows_read == 2600 > report.rows_compared > 0
    parquet = archived.spark.read.parquet(*map(str, archived.lake_files()))
    assert values(parquet) == sorted(archived.bodies)


def test_nothing_is_unlinked_that_is_not_in_the_lake(archived: Archived) -> None:
    archived.publish(200)
    archived.archive()
    archived.publish(2000)
    archived.keep_nothing()
    witness = Archived(archived.spark, archived.node, archived.folder)
    archived.node.admin("CreateChannel", topic=witness.topic, channel="other")
    witness.publish(2000)
    archived.node.admin("EmptyChannel", topic=witness.topic, channel="other")
    witness.keep_nothing()
    wait_until(witness.trimmed, "retention takes what nobody waits for", 30)
    state = ManifestCommits(archived.store).state()
    for pin in archived.pins():
        ends = [state.end(life) or 0 for life in state.files if life.partition == pin.identity.partition]
        assert pin.start.offset <= max(ends)
    archived.archive()
    assert values(archived.spark.read.parquet(*map(str, archived.lake_files()))) == sorted(archived.bodies)


def test_a_deleted_file_and_a_flipped_byte_are_named(archived: Archived) -> None:
    archived.publish(2000)
    archived.archive()
    assert archived.verify().problems == []
    gone, flipped = archived.lake_files()[0], archived.lake_files()[-1]
    gone.unlink()
    raw = bytearray(flipped.read_bytes())
    raw[len(raw) // 2] ^= 1
    flipped.write_bytes(raw)
    named = {file.path: file for file in ManifestCommits(archived.store).state().addition().files}
    fast, full = archived.verify(), archived.verify(full=True)
    assert {(one.kind, one.file) for one in fast.problems} == {("gap", str(gone.relative_to(archived.folder)))}
    assert {one.file for one in full.problems} == {str(path.relative_to(archived.folder)) for path in (gone, flipped)}
    for one in full.problems:
        assert named[one.file].first <= one.first < one.end <= named[one.file].end


def test_a_range_of_time_is_exact(archived: Archived, tmp_path: Path) -> None:
    archived.publish(500)
    time.sleep(0.01)
    since = time.time_ns()
    archived.publish(300)
    until = time.time_ns()
    time.sleep(0.01)
    archived.publish(100)
    totals = backfill(
        archived.node.segments, archived.rounds(), topics=(archived.topic,), since_ns=since, until_ns=until
    )
    assert totals.rows == 300
    assert values(archived.spark.read.parquet(*map(str, archived.lake_files()))) == sorted(archived.bodies[500:800])


def test_times_reach_back_into_the_lake(archived: Archived) -> None:
    archived.publish(1000)
    time.sleep(0.01)
    middle = time.time_ns()
    time.sleep(0.01)  # the option has whole milliseconds; the next message must not be in the middle's own
    archived.publish(1000)
    archived.archive()
    archived.keep_nothing()
    archived.publish(600)
    wait_until(archived.trimmed, "retention takes what is in the lake", 30)
    stamp = f"{middle // 10**6 + 1}"
    table = archived.load(archive=str(archived.folder), startingTimestamp=stamp)
    assert values(table) == sorted(archived.bodies[1000:])


def test_the_archive_names_what_is_wrong_with_its_channel(archived: Archived) -> None:
    archived.publish(100)
    archived.archive()
    other = Archived.__new__(Archived)
    other.__dict__.update(archived.__dict__)
    other.store = Store(str(archived.folder.parent / "other"))
    with pytest.raises(ReadFailed, match=rf"{archived.topic}/\d: channel archive is at offset \d+, but .*nsqha seek"):
        other.archive()
    archived.node.admin("CreateChannel", topic=archived.topic, channel="workers")
    with pytest.raises(ReadFailed, match="workers"):
        once(archived.node.segments, other.rounds(), Subject((archived.topic,), channel="workers"))
