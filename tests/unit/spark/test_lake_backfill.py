"""A backfill: a range of time, each message once, over what is there already."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyspark_nsqha.lake.archive import Subject, once
from pyspark_nsqha.lake.backfill import backfill
from pyspark_nsqha.lake.commits.manifest import OffsetRange
from pyspark_nsqha.lake.rounds import DataLoss, RoundTotals
from pyspark_nsqha.model import ReadFailed
from tests.unit.spark.lake_rig import NOON, SECOND, FakeLog, Lake, Partition


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Two messages a second, from noon on."""
    log = FakeLog([Partition()])
    for n in range(60):
        log.partitions[0].publish(b"%d" % n * 30, b"%d" % n, at_ns=NOON + n * SECOND)
    return Lake(tmp_path / "lake", log)


def fill(lake: Lake, since: int | None, until: int | None, **more: object) -> tuple[RoundTotals, list[str]]:
    said: list[str] = []
    times = [None if second is None else NOON + second * SECOND for second in (since, until)]
    asked = {"since_ns": times[0], "until_ns": times[1], "warn": said.append} | more
    return backfill(lake.log, lake.rounds(), topics=("orders",), **asked), said  # type: ignore[arg-type]


def covered(lake: Lake) -> list[OffsetRange]:
    state = lake.commits.state()
    return [one for life in {*state.files, *state.missing} for one in state.covered(life)]


def test_a_range_of_time_begins_with_its_first_batch_and_ends_before_its_last(lake: Lake) -> None:
    totals, said = fill(lake, 10, 20)
    assert covered(lake) == [(20, 40)] and totals.rows == 20 and said == []
    fill(lake, None, 5)
    fill(lake, 55, None)
    assert covered(lake) == [(0, 10), (20, 40), (110, 120)]


def test_what_is_there_is_passed_over(lake: Lake) -> None:
    fill(lake, 10, 20)
    totals, _ = fill(lake, 5, 25)
    assert covered(lake) == [(10, 50)] and totals.rows == 20
    assert fill(lake, 5, 25)[0].files == 0


def test_a_partition_without_a_leader_is_told_and_stops_nobody(lake: Lake) -> None:
    lake.log.partitions.append(Partition(number=1))
    lake.log.away.add(("orders", 1))
    totals, _ = fill(lake, 10, 20)
    assert covered(lake) == [(20, 40)] and totals.partitions == 2
    assert next(iter(totals.failed.values())).startswith("orders/1: no snapshot: no leader")
    lake.log.away.add(("orders", 0))
    with pytest.raises(ReadFailed, match="orders/0: no snapshot"):
        fill(lake, 10, 20)
    assert lake.log.holds == set()


def test_a_lake_of_another_cluster_is_refused(lake: Lake) -> None:
    lake.log.cluster = "c1"
    fill(lake, 10, 20)
    lake.log.cluster = "c2"
    with pytest.raises(ReadFailed, match="is the lake of cluster c1"):
        fill(lake, 20, 30)


def test_no_channel_is_touched_and_the_hold_is_released(lake: Lake) -> None:
    fill(lake, None, None)
    assert not [call for call in lake.log.calls if call.startswith("commit")]
    assert lake.log.holds == set() and lake.log.calls[-1] == "release"


def test_after_retention_the_lake_and_the_log_are_the_whole_time(lake: Lake) -> None:
    once(lake.log, lake.rounds(), Subject(("orders",)))
    lake.log.partitions[0].trim(40)
    totals, said = fill(lake, None, None)
    assert (totals.files, totals.missing, said) == (0, [], [])
    assert covered(lake) == [(0, 120)]


def test_a_hole_between_lake_and_log_is_recorded_if_the_range_meets_it(lake: Lake) -> None:
    fill(lake, 0, 10)
    lake.log.partitions[0].trim(30)
    assert fill(lake, 40, 50)[0].missing == []
    totals, said = fill(lake, 5, 35)
    assert [(gap.first, gap.end) for gap in totals.missing] == [(20, 60)]
    assert len(said) == 1 and "retention" in said[0]


def test_messages_before_everything_that_is_known_are_said_to_be_gone(lake: Lake) -> None:
    lake.log.partitions[0].trim(30)
    assert fill(lake, 30, None)[1] == []
    _, said = fill(lake, 29, None)
    assert said == ["orders/0: log and lake begin at offset 60: what was before is gone, possibly a part of this range"]
    with pytest.raises(DataLoss, match=r"offset 60.*; without --strict the rest is written"):
        fill(lake, 29, None, strict=True)


def test_an_archive_fills_what_backfills_left_out(lake: Lake) -> None:
    fill(lake, 10, 20)
    fill(lake, 30, 40)
    once(lake.log, lake.rounds(), Subject(("orders",)))
    assert covered(lake) == [(0, 120)]
    links = [file.chain_before for file in lake.commits.state().addition().files]
    assert None not in links[:1]
