"""A replay without Spark: what a task publishes and tells, how fast, and what is planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition

from pyspark_nsqha.model import CutPoint, PartitionLife, PinnedPartition, ReadFailed, Split
from pyspark_nsqha.planner import SplitPart
from pyspark_nsqha.snapshot import Snapshot
from pyspark_nsqha.writing.replay import grouped, log_bytes, named, planned_ids, planned_range
from pyspark_nsqha.writing.replay_state import ReplaySpan
from pyspark_nsqha.writing.replay_task import (
    BURST_SECONDS,
    Destination,
    Pace,
    ReadAndPublish,
    batches_of,
    spans_of,
    until,
)
from pyspark_nsqha.writing.sink import SinkOptions
from tests.unit.spark.scripted_nsqd import ScriptedNsqd


class Clock:
    """Sleeping is what makes it go on."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


def batch(partition: int, first: int, end: int) -> pa.RecordBatch:
    offsets = range(first, end)
    return pa.record_batch(
        {
            "partition": pa.array([partition] * len(offsets), pa.int32()),
            "offset": pa.array(offsets, pa.int64()),
            "value": pa.array([b"%d/%d" % (partition, offset) for offset in offsets], pa.binary()),
        }
    )


def bodies(partition: int, first: int, end: int) -> list[bytes]:
    return [b"%d/%d" % (partition, offset) for offset in range(first, end)]


def destination(*nsqd: str, **more: object) -> Destination:
    return Destination(SinkOptions(nsqd, "again", batch_bytes=1 << 10, timeout_ms=2000), **more)  # type: ignore[arg-type]


# ---- how fast


def test_a_rate_holds_over_all_that_is_sent() -> None:
    clock = Clock()
    pace = Pace(50, now=clock.now, sleep=clock.sleep)
    for _ in range(100):
        pace.paid(5)
    assert clock.at - 100 == pytest.approx(500 / 50)


def test_what_sending_took_counts() -> None:
    clock = Clock()
    pace = Pace(10, now=clock.now, sleep=clock.sleep)
    for _ in range(20):
        clock.at += 0.05  # on the wire
        pace.paid(1)
    assert clock.at - 100 == pytest.approx(2.0)


def test_after_a_pause_only_so_much_is_made_up_for() -> None:
    clock = Clock()
    pace = Pace(100, now=clock.now, sleep=clock.sleep)
    clock.at += 3600
    began, sent = clock.at, 0
    while clock.at == began:
        pace.paid(10)
        sent += 10
    assert sent <= 100 * BURST_SECONDS + 10


def test_at_a_low_rate_messages_go_one_by_one() -> None:
    assert Pace(0.5).step == 1
    assert Pace(1000).step == 200
    assert Pace(None).step is None


def test_a_paced_task_sends_small_commands_and_waits_for_all_of_them() -> None:
    clock = Clock()
    pace = Pace(100, now=clock.now, sleep=clock.sleep)
    with ScriptedNsqd() as nsqd:
        outcome = destination(nsqd.address).publish([batch(0, 0, 60)], [ReplaySpan(0, 0, 60)], pace=pace)
        assert clock.at - 100 == pytest.approx(0.6)
        assert outcome.sent == 60
        assert [count for _, count in nsqd.commands] == [20, 20, 20]


# ---- what a task tells


def test_a_task_publishes_everything_in_order_and_tells_so() -> None:
    with ScriptedNsqd() as nsqd:
        spans = [ReplaySpan(0, 0, 300), ReplaySpan(1, 7, 9)]
        outcome = destination(nsqd.address).publish([batch(0, 0, 100), batch(0, 100, 300), batch(1, 7, 9)], spans)
        assert nsqd.bodies == bodies(0, 0, 300) + bodies(1, 7, 9)
    assert outcome.done == tuple(spans)
    assert (outcome.rows, outcome.sent, outcome.possible_duplicates, outcome.failed) == (302, 302, 0, "")


def test_each_message_is_deferred() -> None:
    with ScriptedNsqd() as nsqd:
        destination(nsqd.address, defer_ms=5000).publish([batch(0, 0, 3)], [ReplaySpan(0, 0, 3)])
        assert [(topic, defer) for topic, defer, _ in nsqd.log] == [("again", 5000)] * 3


def test_a_task_that_is_refused_tells_what_is_stored_and_what_perhaps_is() -> None:
    with ScriptedNsqd(["ok", "ok", "refuse"]) as nsqd:
        outcome = destination(nsqd.address).publish([batch(0, 0, 1000)], [ReplaySpan(0, 0, 1000), ReplaySpan(1, 0, 5)])
        stored = len(nsqd.bodies)
        assert 0 < stored < 1000
        assert nsqd.bodies == bodies(0, 0, stored)
    assert outcome.done == (ReplaySpan(0, 0, stored),)
    assert outcome.sent == stored
    assert outcome.possible_duplicates > 0
    assert "E_BAD_MESSAGE" in outcome.failed


def test_what_was_read_before_a_failure_is_published_and_not_sent_again() -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield batch(0, 0, 10)
        raise ReadFailed("orders/0: gone")

    with ScriptedNsqd() as nsqd:
        outcome = destination(nsqd.address).publish(rows(), [ReplaySpan(0, 0, 20)])
        assert nsqd.bodies == bodies(0, 0, 10)
    assert outcome.done == (ReplaySpan(0, 0, 10),)
    assert outcome.failed == "orders/0: gone"
    assert outcome.possible_duplicates == 0


def test_a_lost_connection_is_gone_on_from_and_counted() -> None:
    with ScriptedNsqd(["lose"]) as nsqd:
        outcome = destination(nsqd.address).publish([batch(0, 0, 10)], [ReplaySpan(0, 0, 10)])
        assert nsqd.bodies == bodies(0, 0, 10) * 2
    assert (outcome.sent, outcome.possible_duplicates, outcome.failed) == (10, 10, "")


def test_a_bug_in_a_task_is_one_line_and_everything_is_perhaps_stored(capfd: pytest.CaptureFixture[str]) -> None:
    def read(part: InputPartition) -> Iterator[pa.RecordBatch]:
        raise AssertionError("never")

    task = ReadAndPublish(SimpleNamespace(read=read), destination("127.0.0.1:1"))  # type: ignore[arg-type]
    outcome = task((task_of(ReplaySpan(0, 3, 8)),))
    assert outcome.failed.startswith("AssertionError: never")
    assert outcome.possible_duplicates == 5
    assert outcome.done == ()
    assert "Traceback" in capfd.readouterr().err


def test_spans_are_done_up_to_the_last_stored_message() -> None:
    spans = [ReplaySpan(0, 0, 10), ReplaySpan(0, 20, 30), ReplaySpan(1, 0, 5)]
    assert list(until(spans, None)) == []
    assert list(until(spans, (0, 4))) == [ReplaySpan(0, 0, 5)]
    assert list(until(spans, (0, 29))) == spans[:2]
    assert list(until(spans, (1, 0))) == [*spans[:2], ReplaySpan(1, 0, 1)]


def test_rows_one_by_one_become_batches_that_are_neither_long_nor_large() -> None:
    rows = [(0, offset, b"x" * 10) for offset in range(7)] + [(1, 0, b"y" * 100), (1, 1, b"z")]
    found = list(batches_of(iter(rows), rows_max=4, bytes_max=100))
    assert [one.num_rows for one in found] == [4, 4, 1]
    assert [tuple(row.values()) for one in found for row in one.to_pylist()] == rows
    assert found[0].schema == batch(0, 0, 1).schema
    assert [one.num_rows for one in batches_of(rows[:8], rows_max=100, bytes_max=30)] == [3, 3, 2]
    assert list(batches_of([])) == []


# ---- tasks


def task_of(*spans: ReplaySpan) -> InputPartition:
    empty = Split(PartitionLife("orders", 1, 0, 0), 0, 0, 1, 1, 0, 0, 0, 0)
    return InputPartition(
        tuple(
            SplitPart(
                replace(empty, identity=PartitionLife("orders", 1, one.partition, 0), first=one.first, end=one.end)
            )
            for one in spans
        )
    )


def test_groups_are_neighbours_of_about_the_same_size_and_not_more_than_cores() -> None:
    parts = [task_of(ReplaySpan(0, at, at + 10)) for at in range(0, 100, 10)]
    groups = grouped(parts, 3)
    assert [span.first for group in groups for span in spans_of(group)] == list(range(0, 100, 10))
    assert sorted(len(group) for group in groups) == [3, 3, 4]
    assert len(grouped(parts[:2], 8)) == 2
    assert grouped([], 8) == []
    empty = [task_of(ReplaySpan(0, 5, 5))]
    assert len(grouped([*parts, *empty], 3)) == 3


def test_only_columns_that_a_query_may_name_are_read() -> None:
    assert named("get_json_object(cast(VALUE as string), '$.x') = 'y'") == ("value", "partition", "offset")
    assert "timestamp" in named("`Timestamp` > now()") and "id" not in named("`Timestamp` > now()")
    assert len(named("count(*) > 1")) > 10


# ---- what is planned

PINS = (
    PinnedPartition(PartitionLife("orders", 7, 0, 0x5000), CutPoint(10, 2, 1000, 0), CutPoint(110, 9, 11_000, 0), 1, 2),
    PinnedPartition(
        PartitionLife("orders", 7, 1, 0x4000000005000), CutPoint(0, 1, 0, 0), CutPoint(50, 9, 5000, 0), 1, 2
    ),
)


def test_a_range_of_time_is_what_the_snapshot_says_of_each_partition() -> None:
    found = Snapshot(PINS, {("orders", 0): {5: 40, 9: 60}, ("orders", 1): {5: 50, 9: 50}})
    assert planned_range(found) == [ReplaySpan(0, 10, 110), ReplaySpan(1, 0, 50)]
    assert planned_range(found, since_ns=5) == [ReplaySpan(0, 40, 110)]
    assert planned_range(found, since_ns=5, until_ns=9) == [ReplaySpan(0, 40, 60)]
    assert planned_range(found, until_ns=9) == [ReplaySpan(0, 10, 60), ReplaySpan(1, 0, 50)]


def test_offsets_that_are_not_there_are_refused_and_say_what_is() -> None:
    found = Snapshot(PINS)
    assert planned_range(found, offsets=[ReplaySpan(0, 10, 110), ReplaySpan(1, 3, 3)]) == [ReplaySpan(0, 10, 110)]
    with pytest.raises(ReadFailed, match=r"partition 0: asked for \[10, 111\), there is \[10, 110\)"):
        planned_range(found, offsets=[ReplaySpan(0, 10, 111)])
    with pytest.raises(ReadFailed, match=r"partition 0: asked for \[9, 20\), there is \[10, 110\)"):
        planned_range(found, offsets=[ReplaySpan(0, 9, 20)])
    with pytest.raises(ReadFailed, match=r"there is no partition 2"):
        planned_range(found, offsets=[ReplaySpan(2, 0, 1)])


def test_ids_are_found_in_their_partitions_and_missing_ones_are_named() -> None:
    found = Snapshot(PINS)
    ids = [f"{0x5000 + 10:016x}", f"{0x4000000005000 + 49:016x}"]
    assert planned_ids(found, ids) == ([ReplaySpan(0, 10, 11), ReplaySpan(1, 49, 50)], 0)
    trimmed = f"{0x5000 + 9:016x}"
    with pytest.raises(ReadFailed, match=rf"1 of the ids, such as {trimmed}, are not in the log"):
        planned_ids(found, [*ids, trimmed])
    assert planned_ids(found, [*ids, trimmed], skip_missing=True) == ([ReplaySpan(0, 10, 11), ReplaySpan(1, 49, 50)], 1)


def test_bytes_are_those_between_borders_in_proportion() -> None:
    pin = replace(PINS[0], cuts=(CutPoint(10, 2, 1000, 0), CutPoint(60, 5, 2000, 0), CutPoint(110, 9, 11_000, 0)))
    assert log_bytes(pin, ReplaySpan(0, 10, 110)) == 10_000
    assert log_bytes(pin, ReplaySpan(0, 10, 35)) == 500
    assert log_bytes(pin, ReplaySpan(0, 59, 61)) == 20 + 180
    assert log_bytes(pin, ReplaySpan(0, 0, 10)) == 1000  # of a lake, as the whole log on average
