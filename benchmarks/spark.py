"""What Spark jobs over the log cost: CPU seconds of JVM, Python and broker per GB, beside Spark's own Parquet.

    python -m benchmarks.spark [--mb 600] [--rounds 3] [-k noop,task-parquet]

One broker, one topic of four partitions, half-random JSON of 600 bytes in MPUBs; local[2]; everything is warm: each job
has run once before it is measured, and the page cache has the log. A figure is the median of the rounds. CPU is read
from the processes themselves (`procstat`): on a busy machine it stays what it is, within some percent; the load is
printed beside it. A row that is over its bound is measured again, twice as often, before it counts.

    noop            all columns, verified, to Spark's noop sink
    tuples          the same rows by the same verified scan, but one Python tuple each: what batches are for
    parquet-scan    Spark's own Parquet reader on the same rows, to noop
    task-parquet    the tasks of `nsqha spark archive`: verified, Arrow, Parquet (zstd), nothing through the JVM
    df-parquet      df.write.parquet from our source: what that saves
    fetch           one process reads every range from the broker and looks at nothing

`python -m benchmarks.spark_scan` has the scan without Spark.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from nsqha.cli.brokers.v2client import V2Publisher
from pyspark_nsqha import jobs
from pyspark_nsqha.lake import archive
from pyspark_nsqha.lake.archive import Subject
from pyspark_nsqha.lake.commits.commit import ManifestCommits
from pyspark_nsqha.lake.rounds import Rounds, RoundSettings
from pyspark_nsqha.lake.store import Store
from pyspark_nsqha.lake.task import PieceTask
from pyspark_nsqha.options import ConnectOptions
from pyspark_nsqha.planner import PlannedRange, plan
from pyspark_nsqha.reading.fetch import runs
from pyspark_nsqha.snapshot import Segments, SnapshotRequest

from .procstat import PROC, ProcessTree
from .spark_scan import bodies

GB = 1e9
TOPIC = "orders"
PARTITIONS = 4
MPUB = 200
TICK = os.sysconf("SC_CLK_TCK")
TRIES = 3  # of one measurement


@dataclass
class Cost:
    """CPU seconds of one run, and its wall seconds."""

    jvm: float
    python: float
    broker: float
    wall: float

    @property
    def total(self) -> float:
        """Of JVM and Python: what Spark's users pay."""
        return self.jvm + self.python


@dataclass
class Job:
    """One row of the table."""

    name: str
    work: Callable[[], object]
    costs: list[Cost] = field(default_factory=list)

    def median(self, of: Callable[[Cost], float]) -> float:
        return statistics.median([of(cost) for cost in self.costs])


@dataclass(frozen=True)
class Bound:
    """A figure that has to hold: `value()` <= limit (or >=, for ratios that are gains)."""

    text: str
    jobs: tuple[str, ...]
    value: Callable[[], float]
    limit: float
    at_least: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


class Broker:
    """A node of its own, with the log in it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "nsqha", "dev", "--json", "--data-dir", str(folder / "data")]
        command += ["--sync=interval", *(f"--{name}-port=0" for name in ("tcp", "http", "grpc", "segments"))]
        command += ["--lookupd-tcp-port=0", "--lookupd-http-port=0"]
        self._stderr = (folder / "log").open("wb")
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._stderr, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the broker did not start: {(folder / 'log').read_text()[-2000:]}")
        node = json.loads(line)["nodes"][0]
        self.tcp, self.grpc = str(node["tcp"]), str(node["grpc"])
        self.tree = ProcessTree([self._process.pid])

    def run(self, *words: str) -> None:
        """A command of `nsqha`."""
        command = [sys.executable, "-m", "nsqha", *words, "--grpc-address", self.grpc]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._stderr.close()


def publish(broker: Broker, size: int) -> int:
    """About so many bytes of messages, spread over the partitions; how many messages."""
    broker.run("topic", "create", TOPIC, "--partitions", str(PARTITIONS))
    broker.run("topic", "set", TOPIC, "--retention", "forever", "--retention-bytes", "unlimited")
    broker.run("channel", "create", TOPIC, "c")
    source = bodies(random.Random(1))
    pool = [next(source) for _ in range(50_000)]
    count = 0
    publishers = [V2Publisher(broker.tcp, 60) for _ in range(2 * PARTITIONS)]
    while count * len(pool[0]) < size:
        for publisher in publishers:
            at = count % (len(pool) - MPUB)
            publisher.publish(TOPIC, pool[at : at + MPUB])
            count += MPUB
    for publisher in publishers:
        publisher.close()
    return count


# ---- measuring


def _stat(pid: int) -> tuple[str, float, float, int] | None:
    """Name, own CPU seconds, those of children that ended, and the parent."""
    try:
        head, _, tail = (PROC / str(pid) / "stat").read_text().rpartition(")")
    except OSError:
        return None
    words = tail.split()
    own, ended = int(words[11]) + int(words[12]), int(words[13]) + int(words[14])
    return head.partition("(")[2], own / TICK, ended / TICK, int(words[1])


class Session:
    """CPU of this process's JVM and of all the Python below it."""

    def read(self) -> tuple[float, float]:
        """(JVM, Python) so far. Python that ended counts as its parent's.

        All processes are listed and put below their parents here: the `children` files of /proc may leave out some of
        them while others end (proc(5)), and a JVM that was left out made a job's cost negative."""
        here = os.getpid()
        found = {int(entry): stat for entry in os.listdir(PROC) if entry.isdigit() and (stat := _stat(int(entry)))}
        jvm = python = 0.0
        for name, own, ended, parent in found.values():
            while parent in found and parent != here:
                parent = found[parent][3]
            if parent != here:
                continue
            if name == "java":
                jvm += own
                python += ended
            else:
                python += own + ended
        return jvm, python


@contextmanager
def measured(job: Job, session: Session, broker: Broker, *, here: bool) -> Iterator[None]:
    """Note what the body costs. `here`: this process's own CPU is Python's share.

    Nothing is noted where a process and its CPU went meanwhile: Spark ends workers that were idle, and they count for
    none of the others."""
    jvm, python = session.read()
    ours, broker_ns, begun = time.process_time(), broker.tree.cpu_ns(), time.monotonic()
    yield
    wall = time.monotonic() - begun
    time.sleep(0.2)  # what a task leaves behind it is over by then
    jvm_now, python_now = session.read()
    if jvm_now < jvm or python_now < python:
        return
    python_used = time.process_time() - ours if here else python_now - python
    job.costs.append(Cost(jvm_now - jvm, python_used, (broker.tree.cpu_ns() - broker_ns) / 1e9, wall))


# ---- jobs


def tuples_source() -> type:
    """A data source as one would write it first: the same reader, but rows are Python tuples."""
    from pyspark.sql.datasource import DataSource, DataSourceReader

    from pyspark_nsqha import DefaultSource

    class Reader(DataSourceReader):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def partitions(self) -> Any:
            return self.inner.partitions()

        def read(self, partition: Any) -> Any:
            for batch in self.inner.read(partition):
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    class Tuples(DataSource):
        def __init__(self, options: Any) -> None:
            super().__init__(options)
            self.inner = DefaultSource(options)

        @classmethod
        def name(cls) -> str:
            return "nsqha_tuples"

        def schema(self) -> Any:
            return self.inner.schema()

        def reader(self, schema: Any) -> Any:
            return Reader(self.inner.reader(schema))

    return Tuples


def jobs_of(spark: Any, broker: Broker, folder: Path) -> list[Job]:
    """The rows of the table, in the order in which they are run."""
    segments = Segments(ConnectOptions((broker.grpc,)))
    runs_of_archive = count()

    def source(name: str) -> Any:
        return spark.read.format(name).option("brokers", broker.grpc).option("subscribe", TOPIC).load()

    def noop(frame: Any) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def df_parquet() -> None:
        source("nsqha").write.mode("overwrite").option("compression", "zstd").parquet(str(folder / "df"))

    def task_parquet() -> None:
        number = next(runs_of_archive)
        lake = folder / f"lake-{number}"
        store = Store(str(lake))

        def write(splits: Any, run: str) -> Any:
            return jobs.run_tasks(spark, PieceTask(store, run, None, 30.0, 3), splits)

        settings = RoundSettings(f"{number:016x}")
        subject = Subject((TOPIC,), channel=f"bench-{number}")
        archive.once(segments, Rounds(ManifestCommits(store), store, write, settings), subject)
        shutil.rmtree(lake)

    def fetch() -> None:
        ends = segments.snapshot(SnapshotRequest((TOPIC,))).pins
        ranges = tuple((TOPIC, pin.identity.partition, pin.start.offset, pin.end.offset) for pin in ends)
        pins = segments.snapshot(SnapshotRequest((TOPIC,), ranges=ranges)).pins
        for task in plan([PlannedRange(pin, pin.start.offset, pin.end.offset) for pin in pins], split_bytes=64 << 20):
            for part in task:
                for run in runs(part.split):
                    assert len(run.frames)

    spark.dataSource.register(tuples_source())
    return [
        Job("noop", lambda: noop(source("nsqha"))),
        Job("tuples", lambda: noop(source("nsqha_tuples"))),
        Job("df-parquet", df_parquet),
        Job("parquet-scan", lambda: noop(spark.read.parquet(str(folder / "df")))),
        Job("task-parquet", task_parquet),
        Job("fetch", fetch),
    ]


def bounds_of(rows: dict[str, Job], gigabytes: float) -> list[Bound]:
    """Those of docs/spark.md whose rows were run."""

    def per_gb(name: str, of: Callable[[Cost], float]) -> Callable[[], float]:
        return lambda: rows[name].median(of) / gigabytes

    def ratio(over: str, under: str, of: Callable[[Cost], float] = lambda cost: cost.total) -> Callable[[], float]:
        return lambda: rows[over].median(of) / rows[under].median(of)

    gain = ratio("df-parquet", "task-parquet")
    found = [
        Bound("all columns to noop: Python", ("noop",), per_gb("noop", lambda c: c.python), 2.5),
        Bound("all columns to noop: with the JVM", ("noop",), per_gb("noop", lambda c: c.total), 5.5),
        Bound("tuples / batches: Python", ("tuples", "noop"), ratio("tuples", "noop", lambda c: c.python), 4, True),
        Bound("tuples / batches: with the JVM", ("tuples", "noop"), ratio("tuples", "noop"), 2.5, True),
        Bound("batches / Spark's Parquet scan", ("noop", "parquet-scan"), ratio("noop", "parquet-scan"), 1.6),
        Bound("Parquet written in the task", ("task-parquet",), per_gb("task-parquet", lambda c: c.total), 5.5),
        Bound("df.write.parquet / in the task", ("df-parquet", "task-parquet"), gain, 2.5, True),
        Bound("fetch alone: reader", ("fetch",), per_gb("fetch", lambda c: c.python), 0.6),
        Bound("fetch alone: broker", ("fetch",), per_gb("fetch", lambda c: c.broker), 0.4),
    ]
    return [bound for bound in found if set(bound.jobs) <= rows.keys()]


def show(rows: dict[str, Job], gigabytes: float) -> None:
    """The table: CPU seconds per GB, medians, with the range of the sum."""
    print(f"{'job':<14} {'JVM':>6} {'Python':>7} {'broker':>7} {'sum':>6}  {'(min-max)':<13} {'MB/s best':>9}")
    for job in rows.values():
        totals = sorted(cost.total / gigabytes for cost in job.costs)
        spread = f"({totals[0]:.2f}-{totals[-1]:.2f})"
        best = gigabytes * 1000 / min(cost.wall for cost in job.costs)
        jvm, python, broker = (job.median(of) / gigabytes for of in (_jvm, _python, _broker))
        figures = f"{jvm:>6.2f} {python:>7.2f} {broker:>7.2f} {jvm + python:>6.2f}"
        print(f"{job.name:<14} {figures}  {spread:<13} {best:>9.0f}")


def _jvm(cost: Cost) -> float:
    return cost.jvm


def _python(cost: Cost) -> float:
    return cost.python


def _broker(cost: Cost) -> float:
    return cost.broker


def main(argv: list[str] | None = None) -> int:
    """Print the table and the bounds; 1 if one does not hold."""
    parser = argparse.ArgumentParser(description="What Spark jobs over the log cost")
    parser.add_argument("--mb", type=int, default=600, help="bytes of messages, in MB")
    parser.add_argument("--rounds", type=int, default=3, help="times that each job is measured")
    parser.add_argument("-k", default="", help="only these jobs, comma separated")
    asked = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="nsqha-bench-spark-"))
    broker = Broker(folder)
    try:
        messages = publish(broker, asked.mb * 1_000_000)
        return measure(broker, folder, asked, messages)
    finally:
        broker.close()
        shutil.rmtree(folder, ignore_errors=True)


def measure(broker: Broker, folder: Path, asked: argparse.Namespace, messages: int) -> int:
    """Warm up, measure, judge."""
    pins = Segments(ConnectOptions((broker.grpc,))).snapshot(SnapshotRequest((TOPIC,))).pins
    gigabytes = sum(pin.end.position - pin.start.position for pin in pins) / GB
    print(f"{messages:,} messages, {gigabytes:.2f} GB of frames, {len(pins)} partitions; load {os.getloadavg()[0]:.1f}")
    wanted = [name for name in asked.k.split(",") if name]
    with jobs.session("nsqha bench", master="local[2]", conf={"spark.sql.shuffle.partitions": "2"}) as spark:
        session = Session()
        rows = {job.name: job for job in jobs_of(spark, broker, folder)}
        if unknown := set(wanted) - rows.keys():
            raise SystemExit(f"there is no job {sorted(unknown)[0]}; there are {', '.join(rows)}")
        needed = {*wanted, *(["df-parquet"] if "parquet-scan" in wanted else [])} if wanted else set(rows)
        for name in [name for name in rows if name not in needed]:
            del rows[name]
        for job in rows.values():
            job.work()

        def again(names: Iterable[str], rounds: int) -> None:
            for _ in range(rounds):
                for name in names:
                    wanted_of = len(rows[name].costs) + 1
                    for _ in range(TRIES):
                        with measured(rows[name], session, broker, here=name == "fetch"):
                            rows[name].work()
                        if len(rows[name].costs) == wanted_of:
                            break

        again(rows, asked.rounds)
        bounds = bounds_of(rows, gigabytes)
        if over := [bound for bound in bounds if not bound.holds(bound.value())]:
            again(dict.fromkeys(name for bound in over for name in bound.jobs), 2 * asked.rounds)
    show(rows, gigabytes)
    print(f"\n{'bound':<36} {'seen':>6} {'limit':>6}")
    missed = False
    for bound in bounds:
        value = bound.value()
        missed |= not bound.holds(value)
        sign = ">=" if bound.at_least else "<="
        print(f"{bound.text:<36} {value:>6.2f} {sign}{bound.limit:>4}{'' if bound.holds(value) else '  missed'}")
    print(f"load now {os.getloadavg()[0]:.1f}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
