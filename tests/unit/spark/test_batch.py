"""The batch source without a session: what goes into plans and tasks, and what filters say about ranges."""

from __future__ import annotations

import pickle
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)
from pyspark.sql.types import StructType

from nsqha.cursor.committed.holds import HOLDS_MAX
from pyspark_nsqha import DefaultSource, batch
from pyspark_nsqha.batch import columns_of, restriction, schema
from pyspark_nsqha.model import CutPoint, PartitionLife, PinnedPartition, ReadFailed, ReplicaAddress
from pyspark_nsqha.options import OptionError
from pyspark_nsqha.planner import Restriction
from pyspark_nsqha.snapshot import Snapshot, SnapshotRequest

OPTIONS = {"brokers": "127.0.0.1:1", "subscribe": "orders"}
TWO = StructType().add("offset", "long").add("value", "binary")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SnapshotRequest]:
    """A broker with one partition of ten messages more each time it is asked, and what it was asked."""
    found: list[SnapshotRequest] = []

    def snapshot(_: Any, one: SnapshotRequest) -> Snapshot:
        found.append(one)
        end = CutPoint(10 * len(found), len(found) + 1, 1000 * len(found), 1)
        cuts = (CutPoint(0, 1, 0, 1), end) if one.ranges is not None else ()
        replicas = (ReplicaAddress("127.0.0.1:2"),)
        pin = PinnedPartition(PartitionLife("orders", 7, 0, 0), CutPoint(0, 1, 0, 1), end, 1, 99, cuts, replicas)
        return Snapshot((pin,), hold_id="00000000000000aa")

    monkeypatch.setattr(batch.Segments, "snapshot", snapshot)
    monkeypatch.setattr(batch, "_holds", {})
    return found


def test_the_package_is_light_to_import() -> None:
    """Spark imports it in every application that looks up a data source."""
    heavy = "{'numpy', 'pyarrow', 'grpc', 'google', 'nsqha'}"
    code = f"import sys; import pyspark.sql.datasource; before = set(sys.modules); import pyspark_nsqha; \
assert not {heavy} & {{name.split('.')[0] for name in set(sys.modules) - before}}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ends_are_pinned_once_for_all_plans_of_a_load(asked: list[SnapshotRequest]) -> None:
    source = DefaultSource(OPTIONS)
    assert len(asked) == 1
    plans = [pickle.loads(pickle.dumps(source)).reader(TWO).partitions() for _ in range(2)]
    ends = [[part.split.end for task in plan for part in task.value] for plan in plans]
    assert ends == [[10], [10]]
    assert DefaultSource(OPTIONS).pinned.pins[0].end.offset == 40


def test_the_snapshot_is_held_shortly_and_the_plan_makes_that_hold_long(asked: list[SnapshotRequest]) -> None:
    tasks = DefaultSource(OPTIONS).reader(TWO).partitions()
    assert [(one.hold_ms, one.hold_id) for one in asked] == [(120_000, ""), (900_000, "00000000000000aa")]
    assert tasks[0].value[0].split.hold_id == "00000000000000aa"
    assert asked[1].ranges == (("orders", 0, 0, 10),)


def test_what_the_user_says_about_the_hold_counts_from_the_load_on(asked: list[SnapshotRequest]) -> None:
    DefaultSource(OPTIONS | {"holdMs": "600000"}).reader(TWO).partitions()
    assert [one.hold_ms for one in asked] == [600_000, 600_000]


def test_loads_share_a_hold_while_it_is_young(asked: list[SnapshotRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition takes a bounded number of holds, and a hold never rises."""
    now = [1000.0]
    monkeypatch.setattr(batch, "monotonic", lambda: now[0])
    for now[0] in (1000.0, 1039.0, 1041.0, 1042.0):
        DefaultSource(OPTIONS)
    DefaultSource(OPTIONS | {"subscribe": "others"})
    shared = "00000000000000aa"
    assert [one.hold_id for one in asked] == ["", shared, "", shared, ""]


def test_a_load_that_shares_a_hold_does_not_shorten_it(asked: list[SnapshotRequest]) -> None:
    """A plan may have made it long since; its plan then asks under the same id."""
    DefaultSource(OPTIONS)
    second = DefaultSource(OPTIONS)
    assert [(one.hold_ms, one.hold_id) for one in asked] == [(120_000, ""), (0, "00000000000000aa")]
    assert second.pinned.hold_id == "00000000000000aa"


def test_queries_that_are_started_again_and_again_do_not_fill_a_partition_with_holds(
    asked: list[SnapshotRequest],
) -> None:
    """Each in a process of its own, so that none is shared. One every 10 s is faster than Spark starts."""
    for _ in range(100):
        batch._holds.clear()
        DefaultSource(OPTIONS)
    alive_at_once = max(one.hold_ms for one in asked) / 10_000
    assert alive_at_once < HOLDS_MAX / 2


@pytest.mark.parametrize("given", [{"subscribe": "or.ders,gone"}, {"assign": '{"or.ders":[0],"gone":[1]}'}])
def test_a_topic_that_is_not_there_ends_no_load_that_may_be_of_a_stream(
    asked: list[SnapshotRequest], given: dict[str, str]
) -> None:
    options = {"brokers": "127.0.0.1:1", "failOnDataLoss": "false", **given}
    source = DefaultSource(options)
    assert [(one.topics, one.pattern) for one in asked] == [((), r"gone|or\.ders")]
    source.streamReader(TWO)
    with pytest.raises(ReadFailed, match=r"there is no topic gone, or\.ders; `nsqha topic list` shows"):
        source.reader(TWO)


def test_a_topic_that_is_not_there_ends_the_load_where_losses_count(asked: list[SnapshotRequest]) -> None:
    DefaultSource(OPTIONS)
    assert (asked[0].topics, asked[0].pattern) == (("orders",), "")


def test_what_can_only_be_a_stream_holds_nothing(asked: list[SnapshotRequest]) -> None:
    DefaultSource(OPTIONS | {"commitChannel": "lake"})
    DefaultSource(OPTIONS | {"holdMs": "0"})
    assert [one.hold_ms for one in asked] == [0, 0]


def test_a_task_gets_its_splits_and_neither_snapshot_nor_options(asked: list[SnapshotRequest]) -> None:
    source = DefaultSource(OPTIONS | {"ids": ",".join(f"{n:016x}" for n in range(1000))})
    reader = source.reader(TWO)
    assert len(pickle.dumps(source)) < 500
    assert len(pickle.dumps(reader)) < 1500
    assert source.pinned is not None
    assert b"orders" not in pickle.dumps(reader)


def test_a_plan_without_a_message_has_no_task_and_reading_it_yields_nothing(asked: list[SnapshotRequest]) -> None:
    from pyspark.sql.datasource import InputPartition

    reader = DefaultSource(OPTIONS | {"endingOffsets": '{"orders":{"0":0}}'}).reader(TWO)
    assert reader.partitions() == []
    assert list(reader.read(InputPartition(None))) == []


def test_only_the_reader_that_pushes_has_pushfilters(asked: list[SnapshotRequest]) -> None:
    """Spark refuses all queries of a reader that has it while the conf is off."""
    plain = DefaultSource(OPTIONS).reader(TWO)
    pushing = DefaultSource(OPTIONS | {"pushdown": "true"}).reader(TWO)
    assert type(plain).pushFilters is DataSourceReader.pushFilters
    assert type(pushing).pushFilters is not DataSourceReader.pushFilters
    assert isinstance(plain.partitions(), list)


def test_all_filters_go_back_to_spark_and_the_ranges_are_shorter(asked: list[SnapshotRequest]) -> None:
    reader = DefaultSource(OPTIONS | {"pushdown": "true"}).reader(TWO)
    filters: list[Filter] = [GreaterThan(("offset",), 7), IsNotNull(("offset",))]
    assert list(reader.pushFilters(filters)) == filters
    [task] = reader.partitions()
    assert [(part.split.first, part.split.end) for part in task.value] == [(8, 10)]


def test_a_sink_pins_nothing_and_a_read_that_names_nothing_is_refused(asked: list[SnapshotRequest]) -> None:
    source = DefaultSource({"nsqd": "127.0.0.1:4150", "topic": "orders"})
    assert (source.pinned, asked) == (None, [])
    with pytest.raises(OptionError, match="give exactly one of subscribe, subscribePattern or assign; none is given"):
        DefaultSource({"brokers": "127.0.0.1:1"}).schema()
    with pytest.raises(OptionError, match="give exactly one of subscribe, subscribePattern or assign; none is given"):
        DefaultSource({"brokers": "127.0.0.1:1"}).reader(TWO)


# ---- columns


def test_columns_are_what_is_asked_for() -> None:
    assert schema(OPTIONS | {"columns": "offset,value"}) == "`offset` bigint, `value` binary"
    assert "_corrupt" not in schema(OPTIONS)
    assert schema(OPTIONS | {"mode": "PERMISSIVE"}).endswith(", `_corrupt` binary")
    assert schema(OPTIONS | {"mode": "PERMISSIVE", "columns": "id"}) == "`id` string"


@pytest.mark.parametrize(
    ("name", "kind", "nullable", "text"),
    [
        ("body", "binary", True, "schema: no column 'body'; there are key, value, "),
        ("offset", "integer", True, "schema: column offset is bigint, not int; cast it in a select"),
        ("deliver_at", "timestamp", False, "schema: column deliver_at has nulls; leave out its NOT NULL"),
    ],
)
def test_a_schema_of_the_users_has_our_columns_and_types(name: str, kind: str, nullable: bool, text: str) -> None:
    with pytest.raises(OptionError) as refusal:
        columns_of(StructType().add(name, kind, nullable))
    assert str(refusal.value).startswith(text)


# ---- filters


NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
NOON_NS = 1_795_176_000 * 10**9


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ([], {}),
        ([EqualTo(("topic",), "a")], {"topics": frozenset("a")}),
        ([In(("topic",), ("a", "b")), EqualTo(("topic",), "b")], {"topics": frozenset("b")}),
        ([EqualTo(("TOPIC",), "a")], {"topics": frozenset("a")}),
        ([EqualNullSafe(("topic",), None)], {"topics": frozenset()}),
        ([EqualTo(("partition",), 3)], {"partitions": frozenset({3})}),
        ([GreaterThan(("partition",), 3), LessThan(("partition",), 9)], {"partition_least": 4, "partition_most": 8}),
        ([GreaterThanOrEqual(("offset",), 3), LessThanOrEqual(("offset",), 9)], {"first": 3, "end": 10}),
        ([GreaterThan(("offset",), 3), LessThan(("offset",), 9)], {"first": 4, "end": 9}),
        ([LessThan(("offset",), -5)], {"end": 0}),
        ([In(("offset",), (3, 4, None))], {"offsets": frozenset({3, 4})}),
        ([In(("id",), ("00" * 8, "zz"))], {"ids": frozenset({"00" * 8})}),
        ([GreaterThanOrEqual(("timestamp",), NOON)], {"since_ns": NOON_NS}),
        ([GreaterThan(("timestamp",), NOON)], {"since_ns": NOON_NS}),
        ([LessThan(("timestamp",), NOON)], {"until_ns": NOON_NS + 1000}),
        ([LessThanOrEqual(("timestamp",), NOON)], {"until_ns": NOON_NS + 1000}),
        ([EqualTo(("timestamp",), NOON)], {"since_ns": NOON_NS, "until_ns": NOON_NS + 1000}),
        ([GreaterThan(("timestamp",), NOON.replace(tzinfo=None))], {}),
        ([GreaterThan(("timestamp_ns",), 5), LessThan(("timestamp_ns",), 9)], {"since_ns": 6, "until_ns": 9}),
        ([In(("timestamp_ns",), (5, 9))], {"since_ns": 5, "until_ns": 10}),
        ([Not(EqualTo(("topic",), "a")), Not(GreaterThan(("offset",), 3))], {}),
        ([EqualTo(("value",), b"a"), EqualTo(("headers", "key"), "a"), IsNotNull(("offset",))], {}),
    ],
)
def test_filters_become_ranges_and_what_says_nothing_is_passed_over(
    filters: list[Filter], left: dict[str, Any]
) -> None:
    assert restriction(filters) == Restriction(**left)
