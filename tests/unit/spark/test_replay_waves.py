"""A replay's waves without Spark: how large they are, who gets which share of the rate, and what is noted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.datasource import InputPartition

from pyspark_nsqha.model import CutPoint, PartitionLife, PinnedPartition
from pyspark_nsqha.options import ConnectOptions
from pyspark_nsqha.snapshot import Snapshot
from pyspark_nsqha.writing.replay import WAVE_BYTES, WAVE_GROWTH_MAX, WAVE_READ_MAX, WAVE_SECONDS, Replay
from pyspark_nsqha.writing.replay_state import Order, ReplaySpan, ReplayState
from pyspark_nsqha.writing.replay_task import Destination, ReplayOutcome, spans_of
from pyspark_nsqha.writing.sink import SinkOptions
from tests.unit.spark.test_replay import task_of

CORES = 4
BYTES_EACH = 100


class Scripted(Replay):
    """A replay whose tasks are what a test says: each group's outcome is that of `outcome`."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.waves: list[int] = []
        self.rates: list[list[float | None]] = []
        self.notes: list[dict[str, Any]] = []
        self.outcome = lambda spans: ReplayOutcome(tuple(spans), total(spans), total(spans))

    def tasks_of(self, wave: Sequence[ReplaySpan]) -> Any:
        self.waves.append(total(wave))
        return None, [task_of(span) for span in wave]

    def send(self, reader: Any, groups: Sequence[tuple[InputPartition, ...]], to: Destination) -> list[ReplayOutcome]:
        self.rates.append([to.rate] * len(groups))
        if self.state.path is not None:
            self.notes.append(json.loads(self.state.path.read_text()))
        return [self.outcome(spans_of(group)) for group in groups]


def total(spans: Sequence[ReplaySpan]) -> int:
    return sum(span.messages for span in spans)


def scripted(*spans: ReplaySpan, path: Path | None = None, **more: Any) -> Scripted:
    pins = [
        PinnedPartition(
            PartitionLife("orders", 7, n, 0), CutPoint(0, 1, 0, 0), CutPoint(10**9, 9, BYTES_EACH * 10**9, 0), 1, 2
        )
        for n in range(2)
    ]
    return Scripted(
        ConnectOptions(("127.0.0.1:1",)),
        Snapshot(tuple(pins)),
        ReplayState(Order("orders", 7, "again"), spans, path),
        session=SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=CORES)),
        to=Destination(SinkOptions(("127.0.0.1:1",), "again")),
        **more,
    )


def test_tasks_of_a_wave_share_the_rate_and_no_wave_is_longer_than_its_seconds() -> None:
    replay = scripted(ReplaySpan(0, 0, 3000), ReplaySpan(1, 0, 3000), rate=90)
    assert replay.run() == []
    assert sum(replay.waves) == 6000
    assert max(replay.waves) <= 90 * WAVE_SECONDS + 2 * 2
    for rates in replay.rates:
        assert sum(rate or 0 for rate in rates) == pytest.approx(90)


def test_without_a_rate_a_wave_is_some_log_for_each_core() -> None:
    replay = scripted(ReplaySpan(0, 0, 10_000_000))
    replay.run()
    assert replay.waves[0] == CORES * WAVE_BYTES // BYTES_EACH
    assert replay.rates[0] == [None]


def test_a_query_that_selects_little_reads_more_from_wave_to_wave() -> None:
    replay = scripted(ReplaySpan(0, 0, 5_000_000), rate=10, where="false")
    replay.outcome = lambda spans: ReplayOutcome(tuple(spans))
    replay.run()
    assert replay.waves[0] <= 10 * WAVE_SECONDS + 1
    assert all(now <= before * WAVE_GROWTH_MAX for before, now in pairwise(replay.waves))
    assert replay.waves[1] > 4 * replay.waves[0]
    assert max(replay.waves) == WAVE_READ_MAX


def test_a_wave_is_noted_before_it_runs_and_when_it_has_ended(tmp_path: Path) -> None:
    replay = scripted(ReplaySpan(0, 0, 2000), rate=100, path=tmp_path / "state")
    replay.run()
    assert [note["running"] for note in replay.notes] == [[[0, 0, 1001]], [[0, 1001, 2000]]]
    assert [note["partitions"]["0"]["done"] for note in replay.notes] == [[], [[0, 1001]]]
    assert json.loads((tmp_path / "state").read_text())["running"] == []


def test_the_first_failure_ends_it_and_what_was_done_beside_it_is_not_sent_again() -> None:
    replay = scripted(ReplaySpan(0, 0, 100), ReplaySpan(1, 0, 100))

    def outcome(spans: Sequence[ReplaySpan]) -> ReplayOutcome:
        if spans[0].partition == 0:
            return ReplayOutcome((ReplaySpan(0, 0, 30),), rows=40, sent=30, possible_duplicates=10, failed="no broker")
        return ReplayOutcome(tuple(spans), 100, 100)

    replay.outcome = outcome
    assert replay.run() == ["no broker"]
    assert replay.state.remaining() == [ReplaySpan(0, 30, 100)]
    state = replay.state
    assert (state.sent, state.possible_duplicates, state.missing) == (130, 10, 0)


def test_what_is_planned_and_not_read_is_counted_as_missing() -> None:
    replay = scripted(ReplaySpan(0, 0, 100), skip_missing=True)
    replay.outcome = lambda spans: ReplayOutcome(tuple(spans), rows=93, sent=93)
    replay.run()
    assert (replay.state.sent, replay.state.missing, replay.state.left) == (93, 7, 0)


def test_how_far_it_is_is_told_wave_by_wave() -> None:
    told: list[tuple[int, int]] = []
    scripted(ReplaySpan(0, 0, 2500), rate=100).run(lambda done, total: told.append((done, total)))
    assert told == [(1001, 2500), (2002, 2500), (2500, 2500)]
