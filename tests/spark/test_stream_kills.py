"""kill -9 of drivers, executors and workers of a stream, in every phase of a micro-batch.

    offsets/N   the micro-batch is planned           out/part..        a task writes
    _spark_metadata/N   the sink has committed it    commits/N         Spark has, too

To files each message goes exactly once. To a topic it goes at least once.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli.brokers.admin import Admin
from nsqha.cli.brokers.v2client import V2Publisher
from tests.integration.devnode import DevNode
from tests.spark.stream_driver import Driver, newest

pytest.importorskip("pyspark")
pytestmark = pytest.mark.timeout(1500)

MESSAGES = 2000
PER_BATCH = 100


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("kills"), "--sync=none")
    yield node
    assert node.stop() == 0


def published(node: DevNode, topic: str) -> list[str]:
    """Numbered messages over two partitions."""
    with Admin(node.grpc, 10) as admin:
        admin.call("CreateTopic", topic=topic, settings={"partitions": 2})
    bodies = [f"{topic} {i:05d}" for i in range(MESSAGES)]
    for at in range(0, MESSAGES, 100):
        publisher = V2Publisher(node.tcp, 10)
        publisher.publish(topic, [body.encode() for body in bodies[at : at + 100]])
        publisher.close()
    return bodies


def source(node: DevNode, topic: str) -> dict[str, str]:
    return {
        "brokers": node.grpc,
        "subscribe": topic,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(PER_BATCH),
        "commitChannel": "lake",
        "splitBytes": "64k",
    }


def to_files(node: DevNode, topic: str, folder: Path) -> Driver:
    sink = {"format": "parquet", "path": str(folder / "out"), "checkpointLocation": str(folder / "checkpoint")}
    columns = ["CAST(value AS STRING) AS value", "partition", "offset"]
    return Driver(folder, source=source(node, topic), sink=sink, columns=columns)


def rows(spark: Any, folder: Path) -> list[tuple[str, int, int]]:
    return [tuple(row) for row in spark.read.parquet(str(folder / "out")).collect()]


def killed_one(driver: Driver, word: str, chance: random.Random) -> int:
    """How many processes with this word it killed, which is one or none: those of an executor that was killed end."""
    found = driver.members(word)
    try:
        os.kill(chance.choice(found), signal.SIGKILL)
    except (IndexError, ProcessLookupError):
        return 0
    return 1


def check_exactly_once(spark: Any, folder: Path, bodies: list[str]) -> None:
    found = rows(spark, folder)
    assert sorted(value for value, _, _ in found) == bodies
    assert len({(partition, offset) for _, partition, offset in found}) == len(bodies)


def test_a_driver_that_is_killed_in_any_phase_copies_each_message_once(
    spark: Any, node: DevNode, tmp_path: Path
) -> None:
    bodies = published(node, "driver-kills")
    driver = to_files(node, "driver-kills", tmp_path)
    out, checkpoint = tmp_path / "out", driver.checkpoint

    def parts() -> int:
        return sum(name.startswith("part-") for name in os.listdir(out)) if out.exists() else 0

    phases = {
        "a planned micro-batch": lambda: newest(checkpoint / "offsets"),
        "a file of a task": parts,
        "a micro-batch that the sink has committed": lambda: newest(out / "_spark_metadata"),
        "a committed micro-batch": lambda: newest(checkpoint / "commits"),
    }
    for what, look in phases.items():
        before = look()
        driver.start()
        try:
            # Not the first one: that may be what the last life left behind.
            driver.wait_above(before + 1, look, what)
        finally:
            driver.kill()
    assert newest(checkpoint / "commits") < MESSAGES // PER_BATCH, "it was killed on its way"
    driver.run_to_the_end()
    check_exactly_once(spark, tmp_path, bodies)


def test_executors_and_workers_that_are_killed_cost_no_message_and_no_duplicate(
    spark: Any, node: DevNode, tmp_path: Path
) -> None:
    bodies = published(node, "executor-kills")
    driver = to_files(node, "executor-kills", tmp_path)
    chance = random.Random(13)
    planned, committed = driver.checkpoint / "offsets", driver.checkpoint / "commits"
    driver.start({"spark.master": "local-cluster[2,1,512]", "spark.executor.memory": "512m"})
    try:
        for word in ("CoarseGrainedExecutorBackend", "pyspark.daemon", "CoarseGrainedExecutorBackend"):
            driver.wait_above(newest(planned), lambda: newest(planned), "micro-batch")
            driver.wait_above(0, partial(killed_one, driver, word, chance), word)
        driver.wait_above(newest(committed), lambda: newest(committed), "micro-batch behind the kills")
    finally:
        driver.kill()
    driver.run_to_the_end()
    check_exactly_once(spark, tmp_path, bodies)


def test_a_sink_whose_driver_is_killed_publishes_each_message_at_least_once(
    spark: Any, node: DevNode, tmp_path: Path
) -> None:
    bodies = published(node, "sink-kills")
    copy, checkpoint = "sink-kills-copy", tmp_path / "checkpoint"
    sink = {"format": "nsqha", "nsqd": node.tcp, "topic": copy, "checkpointLocation": str(checkpoint)}
    driver = Driver(tmp_path, source=source(node, "sink-kills"), sink=sink, columns=["value"])
    for folder in (checkpoint / "offsets", checkpoint / "commits", checkpoint / "offsets"):
        before = newest(folder)
        driver.start()
        try:
            driver.wait_above(before + 1, partial(newest, folder), f"micro-batch in {folder.name}")
        finally:
            driver.kill()
    driver.run_to_the_end()
    copied = spark.read.format("nsqha").options(brokers=node.grpc, subscribe=copy, columns="value").load()
    found = Counter(row.value.decode() for row in copied.collect())
    assert sorted(found) == bodies
    assert sum(found.values()) - MESSAGES <= 3 * PER_BATCH, "no more than the micro-batches that ran twice"
