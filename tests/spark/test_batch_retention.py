"""Batch reads and retention: what a hold keeps is read, what nobody held is named or counted, and never invented."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli.brokers.admin import Admin
from pyspark_nsqha.options import ConnectOptions
from pyspark_nsqha.snapshot import Segments
from tests.integration.cluster import Cluster
from tests.integration.servers import wait_until
from tests.spark.rig import Gate, KnownLog, digests, failure

pytestmark = pytest.mark.timeout(180)

names = count(1)
TASKS = {"splitBytes": "8m"}  # two for each partition: half of them begin when the gate is open
AT_ONCE_MS = 1000  # the shortest that takes everything that is not held


@pytest.fixture
def log(cluster: Cluster) -> KnownLog:
    """A topic of its own, of two partitions of about 10 MB, for retention to take."""
    return KnownLog.published(cluster, f"kept-{next(names)}", 2400)


def retention_has_been(cluster: Cluster, log: KnownLog) -> None:
    """Retention is told to take everything, and has had the time: it took another topic of the same nodes."""
    witness = KnownLog.published(cluster, f"witness-{next(names)}", 900, partitions=3)
    for each in (log, witness):
        each.keep(AT_ONCE_MS)
    wait_until(witness.trimmed, "retention takes what nobody holds", 30)


def test_what_a_hold_keeps_is_read_whatever_retention_says(
    spark: Any, cluster: Cluster, log: KnownLog, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    with gate.reading(log.read(spark, **TASKS)) as reading:
        gate.wait_reached(2)
        retention_has_been(cluster, log)
        assert log.starts(0) == log.starts(1) == [0, 0, 0]
    log.check(reading.rows())
    (hold,) = {hold.id for hold in log.holds()}
    assert Segments(ConnectOptions((cluster.nodes[0].grpc,))).release_hold(hold) == 2
    wait_until(log.trimmed, "retention goes on", 30)


def test_a_hold_that_is_over_lets_retention_go_on(spark: Any, cluster: Cluster, log: KnownLog) -> None:
    frame = log.read(spark, **TASKS, holdMs=4000)
    assert len(log.holds()) == 2
    log.keep(AT_ONCE_MS)
    wait_until(log.trimmed, "retention goes on", 30)
    assert not log.holds()
    line = failure(digests(frame))
    expected = rf"{log.topic}/\d: asked for \[0, \d+\), there is \[\d+, \d+\): retention removed \d+ messages"
    assert re.match(expected, line)


def test_a_new_leader_keeps_what_the_old_one_had_promised(spark: Any, cluster: Cluster, log: KnownLog) -> None:
    frame = log.read(spark, **TASKS)
    (promised,) = {hold.id for hold in log.holds()}
    old = log.leader(0)
    old.kill()
    wait_until(lambda: log.leader(0) is not old, "another one leads", 30)
    wait_until(lambda: {hold.id for hold in log.holds()} == {promised} and len(log.holds()) == 2, "it holds", 30)
    old.start()
    wait_until(cluster.all_in_sync, "everything is in sync", 60)
    retention_has_been(cluster, log)
    assert log.starts(0) == log.starts(1) == [0, 0, 0]
    log.check(digests(frame).collect())


def test_without_a_hold_what_retention_took_fails_the_job_or_is_counted(
    spark: Any, cluster: Cluster, log: KnownLog, tmp_path: Path, spark_log: Path
) -> None:
    gate = Gate(tmp_path)
    late = {loss: log.read(spark, **TASKS, holdMs=0, failOnDataLoss=loss) for loss in ("true", "false")}
    with gate.reading(log.read(spark, **TASKS, holdMs=0)) as reading:
        gate.wait_reached(2)
        assert not log.holds()
        log.keep(AT_ONCE_MS)
        wait_until(log.trimmed, "retention takes it", 30)
    planned_and_available = rf"{log.topic}/\d.*\[\d+, \d+\).*there is \[\d+, \d+\)"
    assert re.match(planned_and_available, reading.why()), reading.why()
    line = failure(digests(late["true"]))
    assert re.match(planned_and_available, line), line

    rows = digests(late["false"]).collect()
    log.check(rows, lost=len(log.digests) - len(rows))
    assert len(rows) < len(log.digests)
    assert counted(log, spark_log, r"retention removed (\d+) messages \[\d+, \d+\)") == len(log.digests) - len(rows)


def test_what_retention_takes_of_a_running_read_is_counted_where_that_is_wanted(
    spark: Any, cluster: Cluster, log: KnownLog, tmp_path: Path, spark_log: Path
) -> None:
    gate = Gate(tmp_path)
    with gate.reading(log.read(spark, **TASKS, holdMs=0, failOnDataLoss="false")) as reading:
        gate.wait_reached(2)
        log.keep(AT_ONCE_MS)
        wait_until(log.trimmed, "retention takes it", 30)
    rows = reading.rows()
    lost = len(log.digests) - len(rows)
    assert lost > 0
    log.check(rows, lost=lost)
    assert counted(log, spark_log, r"(\d+) removed by retention") == lost


def counted(log: KnownLog, spark_log: Path, pattern: str) -> int:
    """The sum of what workers and planners said of this topic."""
    lines = [line for line in spark_log.read_text().splitlines() if f"{log.topic}/" in line]
    return sum(int(found[1]) for line in lines if (found := re.search(pattern, line)))


@pytest.mark.parametrize("when", ["before it is planned", "while it is read"])
def test_a_topic_that_was_made_anew_is_another_one(
    spark: Any, cluster: Cluster, log: KnownLog, tmp_path: Path, when: str
) -> None:
    frame, gate = log.read(spark, **TASKS), Gate(tmp_path)

    def anew() -> None:
        with Admin(cluster.nodes[0].grpc, 20) as admin:
            admin.call("DeleteTopic", topic=log.topic)
        KnownLog.published(cluster, log.topic, 100)

    if when == "before it is planned":
        anew()
        line = failure(digests(frame))
    else:
        with gate.reading(frame) as reading:
            gate.wait_reached(2)
            anew()
        line = reading.why()
    expected = rf"{log.topic}/\d.*the topic was deleted or created again since load\(\).*; load it again"
    assert re.match(expected, line), line
