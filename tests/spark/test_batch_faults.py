"""Batch reads of a real cluster while it comes apart: whoever is left serves, and what is read is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyspark_nsqha.options import ConnectOptions
from pyspark_nsqha.planner import PlannedRange, plan
from pyspark_nsqha.reading.fetch import runs
from pyspark_nsqha.snapshot import Segments, SnapshotRequest
from tests.integration.cluster import Cluster, freeze, thaw
from tests.integration.servers import wait_until
from tests.spark.rig import Gate, KnownLog, answers, digests, failure

pytestmark = pytest.mark.timeout(180)


def test_a_leader_is_killed_while_it_is_read_from(spark: Any, cluster: Cluster, log: KnownLog, tmp_path: Path) -> None:
    gate, leader = Gate(tmp_path), log.leader()
    before = answers(leader)
    with gate.reading(log.read(spark, host=leader.name)) as reading:
        gate.wait_reached(2)
        assert answers(leader) > before, "it is asked first"
        leader.kill()
    log.check(reading.rows())


def test_one_replica_that_is_left_is_enough(spark: Any, cluster: Cluster, log: KnownLog, tmp_path: Path) -> None:
    gate, last = Gate(tmp_path), cluster.nodes[2]
    with gate.reading(log.read(spark, host="n1")) as reading:
        gate.wait_reached(2)
        cluster.nodes[0].kill()
        cluster.nodes[1].kill()
        before = answers(last)
    log.check(reading.rows())
    assert answers(last) > before


def test_a_replica_that_falls_silent_is_left_after_its_time(
    spark: Any, cluster: Cluster, log: KnownLog, tmp_path: Path
) -> None:
    gate, silent = Gate(tmp_path), log.followers()[0]
    with gate.reading(log.read(spark, host=silent.name, timeoutMs=2000)) as reading:
        gate.wait_reached(2)
        freeze(silent)
        try:
            gate.open()
            log.check(reading.rows_in_time())
        finally:
            thaw(silent)


def test_a_follower_that_is_behind_says_so_and_another_one_serves(spark: Any, cluster: Cluster) -> None:
    """One that comes back is behind for some tenths of a second, and Spark takes longer to begin: the splits are read
    here, as a task does, at once and until one of them has met it."""
    log = KnownLog.published(cluster, "behind", 200, partitions=1)
    follower = log.followers()[0]
    segments = Segments(ConnectOptions(tuple(node.grpc for node in cluster.nodes)))
    for _ in range(6):
        follower.kill()
        cluster.wait_isr("behind", 2)
        log.publish(1500)
        follower.start()
        cluster.wait_registered(3)
        end = segments.snapshot(SnapshotRequest(("behind",))).pins[0].end.offset
        [pin] = segments.snapshot(SnapshotRequest(("behind",), ranges=(("behind", 0, 0, end),))).pins
        served = answers(follower)
        [[part]] = plan([PlannedRange(pin, 0, end)], split_bytes=1 << 40)
        assert sum(len(run.entries) for run in runs(part.split, host=follower.name)) > 0
        if answers(follower, 409):
            assert answers(follower) == served
            break
    assert answers(follower, 409)
    log.check(digests(log.read(spark, host=follower.name)).collect())


def test_a_byte_that_is_wrong_in_one_replica_is_read_from_another(spark: Any, cluster: Cluster, log: KnownLog) -> None:
    follower = log.followers()[0]
    with log.damaged([follower], offset=1500):
        before = answers(follower)
        log.check(digests(log.read(spark, host=follower.name)).collect())
        assert answers(follower) > before


def test_a_batch_that_is_wrong_everywhere_is_what_the_mode_says(
    spark: Any, cluster: Cluster, log: KnownLog, spark_log: Path
) -> None:
    with log.damaged(cluster.nodes, offset=1500) as entry:
        line = failure(digests(log.read(spark)))
        assert line.startswith(f"{log.topic}/0"), line
        assert str(entry.first_offset) in line, line
        assert "nsqha log verify" in line, line

        left = digests(log.read(spark, mode="DROPMALFORMED")).collect()
        log.check(left, lost=entry.count)
        told = f"{log.topic}/0: of offsets "
        wait_until(
            lambda: [
                line
                for line in spark_log.read_text().splitlines()
                if told in line and f"{entry.count} in batches that do not verify" in line
            ],
            "they are counted in the log",
        )

        rows = log.read(spark, mode="PERMISSIVE")
        [row] = rows.filter("_corrupt IS NOT NULL").selectExpr("partition", "offset", "value", "_corrupt").collect()
        assert (row.partition, row.offset, row.value) == (0, entry.first_offset, None)
        assert len(row._corrupt) == entry.size
        log.check(digests(rows.filter("_corrupt IS NULL")).collect(), lost=entry.count)
    log.check(digests(log.read(spark)).collect())
