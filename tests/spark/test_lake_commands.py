"""`nsqha spark archive`, `backfill`, `verify` as people run them: on a cluster, killed, two at once, without Java."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from nsqha.cli.brokers.admin import Admin
from nsqha.cli.brokers.v2client import V2Publisher
from pyspark_nsqha.lake.commits.commit import ManifestCommits
from pyspark_nsqha.lake.store import Store
from tests.integration.cluster import Cluster
from tests.integration.servers import BIN, wait_until
from tests.integration.spark_session import environment

pytestmark = pytest.mark.timeout(400)
names = count(1)
COMMAND_SECONDS = 180


class Lake:
    """A topic of a cluster, what was published to it, and the commands that archive it."""

    def __init__(self, cluster: Cluster, folder: Path, partitions: int = 2) -> None:
        self.cluster = cluster
        self.folder = folder
        self.topic = f"archived-{next(names)}"
        self.bodies: list[bytes] = []
        self.random = random.Random(3)
        with Admin(cluster.nodes[0].grpc, 20) as admin:
            admin.call("CreateTopic", topic=self.topic, settings={"partitions": partitions})

    @property
    def environment(self) -> dict[str, str]:
        return environment() | {"NSQHA_GRPC_ADDRESS": self.cluster.nodes[0].grpc}

    def publish(self, messages: int, size: int = 600) -> None:
        publishers = [V2Publisher(node.tcp, 20) for node in self.cluster.nodes if node.running]
        for at in range(0, messages, 100):
            some = [b"%d " % (at + n) + self.random.randbytes(size) for n in range(min(100, messages - at))]
            publishers[at // 100 % len(publishers)].publish(self.topic, some)
            self.bodies += some
        for publisher in publishers:
            publisher.close()

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        command = [str(BIN / "nsqha"), "spark", *words, "--master", "local[2]"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = more.pop("env", self.environment)
        return subprocess.Popen(command, env=env, text=True, start_new_session=True, **pipes, **more)

    def run(self, *words: str, **more: Any) -> tuple[int, str, str]:
        """Status, stdout, stderr."""
        process = self.start(*words, **more)
        out, err = process.communicate(timeout=COMMAND_SECONDS)
        assert "Traceback" not in err, err
        return process.returncode, out, err

    def archive(self, *more: str) -> dict[str, Any]:
        status, out, err = self.run("archive", self.topic, "--to", str(self.folder), "--once", "--json", *more)
        assert status == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    def verify(self, *more: str) -> tuple[int, dict[str, Any]]:
        status, out, _ = self.run("verify", self.topic, "--lake", str(self.folder), "--json", *more)
        return status, json.loads(out)

    def files(self) -> list[Path]:
        """Those that manifests name."""
        state = ManifestCommits(Store(str(self.folder))).state()
        return [self.folder / file.path for file in state.addition().files]

    def values(self) -> list[bytes]:
        return sorted(
            value for path in self.files() for value in pq.read_table(path, partitioning=None)["value"].to_pylist()
        )


@pytest.fixture
def lake(cluster: Cluster, tmp_path: Path) -> Iterator[Lake]:
    yield Lake(cluster, tmp_path / "lake")


def keep_nothing(lake: Lake) -> None:
    with Admin(lake.cluster.nodes[0].grpc, 20) as admin:
        admin.call("UpdateTopicSettings", topic=lake.topic, retention_ms=1000)

    def trimmed() -> bool:
        with Admin(lake.cluster.nodes[0].grpc, 20) as admin:
            topic = admin.call("DescribeTopic", topic=lake.topic).topic
        return all(partition.log_start_offset > 0 for partition in topic.partitions)

    wait_until(trimmed, "retention takes what is in the lake", 60)


def test_archive_retention_backfill_verify(lake: Lake) -> None:
    lake.publish(12_000)
    assert lake.archive()["rows"] == 12_000
    keep_nothing(lake)
    lake.publish(3000)
    status, out, err = lake.run("backfill", lake.topic, "--from", "-2d", "--to", str(lake.folder), "--json")
    assert (status, json.loads(out)["rows"]) == (0, 3000), err
    status, report = lake.verify("--full")
    assert (status, report["ok"], report["problems"]) == (0, True, [])
    assert report["rows_read"] == 15_000 > report["rows_compared"] >= 3000
    assert lake.values() == sorted(lake.bodies)

    gone, flipped = lake.files()[0], lake.files()[-1]
    gone.unlink()
    raw = bytearray(flipped.read_bytes())
    raw[len(raw) // 2] ^= 4
    flipped.write_bytes(raw)
    status, report = lake.verify("--full")
    assert status == 1 and not report["ok"]
    named = {lake.folder / problem["file"]: problem for problem in report["problems"]}
    assert named.keys() == {gone, flipped}
    assert all(problem["first"] < problem["end"] for problem in named.values())


def test_an_archiver_that_is_killed_is_completed_by_the_next_one(lake: Lake, tmp_path: Path) -> None:
    lake.publish(20_000)
    rng = random.Random(8)
    killed = 0
    for attempt in range(6):
        process = lake.start("archive", lake.topic, "--to", str(lake.folder), "--once", "--split-bytes", "1MB")
        # From when it writes its first plan on: before, nothing can be half done.
        begin = time.monotonic()
        plans = lake.folder / "plan"
        while process.poll() is None and not (plans.is_dir() and any(plans.iterdir())):
            time.sleep(0.005)
            assert time.monotonic() < begin + COMMAND_SECONDS
        time.sleep(rng.random() * 0.6)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.communicate()
        lake.publish(500 * (attempt + 1))
    assert killed >= 2
    lake.archive()
    assert lake.values() == sorted(lake.bodies)
    assert sorted(lake.folder.rglob("*.parquet")) == sorted(lake.files())
    status, report = lake.verify("--full")
    assert (status, report["problems"]) == (0, [])


def test_two_archivers_at_once_write_each_message_once(lake: Lake) -> None:
    lake.publish(16_000)
    words = ("archive", lake.topic, "--to", str(lake.folder), "--once", "--json")
    both = [lake.start(*words, "--split-bytes", size) for size in ("1MB", "3MB")]
    done = [process.communicate(timeout=COMMAND_SECONDS) for process in both]
    assert [process.returncode for process in both] == [0, 0], done
    assert sum(json.loads(out)["rows"] for out, _ in done) == 16_000
    assert lake.values() == sorted(lake.bodies)
    assert sorted(lake.folder.rglob("*.parquet")) == sorted(lake.files())


def test_a_service_archives_what_comes_and_ends_at_ctrl_c(lake: Lake) -> None:
    lake.publish(1000)
    process = lake.start("archive", lake.topic, "--to", str(lake.folder), "--interval", "1s")
    try:
        for _ in range(2):
            wait_until(lambda: lake.folder.is_dir() and lake.values() == sorted(lake.bodies), "it is archived", 120)
            lake.publish(500)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in err
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_small_files_are_merged(lake: Lake) -> None:
    for _ in range(2):
        lake.publish(1000)
        lake.archive("--split-bytes", "100kB")
    before = len(lake.files())
    files = ManifestCommits(Store(str(lake.folder))).state().files.values()
    small = sum(len(some) for some in files if len(some) > 1)
    assert small
    status, out, err = lake.run("compact", "--lake", str(lake.folder), "--keep", "0s", "--json")
    assert (status, json.loads(out)["merged"]) == (0, small), err
    assert len(lake.files()) < before and lake.values() == sorted(lake.bodies)
    status, report = lake.verify("--full")
    assert (status, report["problems"]) == (0, [])


def test_iceberg_has_each_message_once(lake: Lake, tmp_path: Path) -> None:
    pytest.importorskip("pyiceberg")
    catalog = {
        "PYICEBERG_CATALOG__DEFAULT__URI": f"sqlite:///{tmp_path}/catalog.db",
        "PYICEBERG_CATALOG__DEFAULT__WAREHOUSE": f"file://{tmp_path}/warehouse",
    }
    words = ("archive", lake.topic, "--to", str(lake.folder), "--once", "--format", "iceberg", "--json")
    for _ in range(2):
        lake.publish(1000)
        status, _, err = lake.run(*words, env=lake.environment | catalog)
        assert status == 0, err
    from pyiceberg.catalog import load_catalog

    settings = {key.rpartition("__")[2].lower(): value for key, value in catalog.items()}
    table = load_catalog("default", **settings).load_table("nsqha.messages")
    assert sorted(table.scan().to_arrow()["value"].to_pylist()) == sorted(lake.bodies)
    assert lake.verify("--full")[0] == 0


def test_what_is_wrong_is_one_line(lake: Lake, tmp_path: Path) -> None:
    lake.publish(100)
    to = ("--to", str(lake.folder), "--once")
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\nexec python3 -S -E "$@"\n')
    bare.chmod(0o755)
    env = lake.environment
    asked = {
        "is never archived": (("archive", "x#ephemeral", *to), env, 2),
        "give topics by name, or --pattern": (("archive", *to), env, 2),
        "there is no java": (("archive", lake.topic, *to), env | {"JAVA_HOME": str(tmp_path)}, 1),
        "no topic": (("archive", "nothing-here", *to), env, 3),
        "no broker answers": (("archive", lake.topic, *to, "--broker", "127.0.0.1:1"), env, 6),
        "cannot be used for a lake": (("archive", lake.topic, "--to", "nowhere://x", "--once"), env, 1),
        "is not before --until": (("backfill", lake.topic, "--from", "-1h", "--until", "-2h", *to[:2]), env, 2),
        "it has no manifest": (("verify", lake.topic, "--lake", str(tmp_path / "empty"), "--lake-only"), env, 3),
        "workers cannot run": (("archive", lake.topic, *to), env | {"PYSPARK_PYTHON": str(bare)}, 1),
    }
    for text, (words, env, status) in asked.items():
        got, out, err = lake.run(*words, env=env)
        said = [line for line in (out + err).splitlines() if line.strip()]
        assert got == status, (text, err)
        assert len(said) == 1 and text in said[0], (text, said)
    shutil.rmtree(lake.folder, ignore_errors=True)
