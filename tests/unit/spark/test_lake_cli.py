"""`nsqha spark archive` in a loop, and what its flags refuse: without Spark and without a broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.cli import build_parser
from nsqha.cli.spark import lake as spark_lake
from nsqha.cli.terminal import exits
from pyspark_nsqha import jobs, snapshot
from pyspark_nsqha.jobs import CannotStart
from pyspark_nsqha.lake import archive, task
from pyspark_nsqha.lake.commits.commit import ManifestCommits
from pyspark_nsqha.lake.commits.manifest import LakeState
from pyspark_nsqha.lake.rounds import RoundTotals
from pyspark_nsqha.lake.store import StoreFailed
from pyspark_nsqha.lake.task import Tell, Verified
from pyspark_nsqha.model import Split
from tests.unit.spark.lake_rig import FakeLog, Lake, Partition


def status(*words: str) -> int:
    args = build_parser("spark").parse_args(["spark", *words])
    found: int = args.run(args)
    return found


class Stopped(Exception):
    """The test has seen enough."""


class Loop:
    """What one round of the archive does after the other, and how long is waited between them."""

    def __init__(self, *rounds: Callable[[Callable[[str], None]], RoundTotals]) -> None:
        self.rounds = list(rounds)
        self.pauses: list[float] = []
        self.running = True

    def once(self, log: Any, made: Any, subject: Any, **_: Any) -> RoundTotals:
        return self.rounds.pop(0)(made.step)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if not self.rounds:
            raise Stopped


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Loop], int]:
    def run(loop: Loop) -> int:
        @contextmanager
        def started(*_: Any) -> Iterator[None]:
            yield None

        monkeypatch.setattr(spark_lake, "started", started)
        monkeypatch.setattr(spark_lake, "_look", lambda *_: None)
        rounds = lambda args, session, progress, step: (SimpleNamespace(step=step), None)  # noqa: E731
        monkeypatch.setattr(spark_lake, "_rounds", rounds)
        clock = SimpleNamespace(sleep=loop.sleep, monotonic=lambda: 0.0, time_ns=lambda: 0)
        monkeypatch.setattr(spark_lake, "time", clock)
        monkeypatch.setattr(archive, "once", loop.once)
        monkeypatch.setattr(jobs, "is_running", lambda session: loop.running)
        return status("archive", "orders", "--to", "lake", "--interval", "60s")

    return run


def nothing_new(step: Callable[[str], None]) -> RoundTotals:
    return RoundTotals()


def fails(error: Exception) -> Callable[[Callable[[str], None]], RoundTotals]:
    def failing(step: Callable[[str], None]) -> RoundTotals:
        raise error

    return failing


def commits_and_fails(step: Callable[[str], None]) -> RoundTotals:
    step("commit")
    step("committed")
    raise StoreFailed("the store is full")


@pytest.mark.parametrize("error", [StoreFailed("full"), CannotStart("the Spark job failed: executor lost")])
@pytest.mark.parametrize("before", [nothing_new, commits_and_fails])
def test_failures_that_pass_are_waited_for_longer_and_longer(run: Any, before: Any, error: Exception) -> None:
    loop = Loop(before, *[fails(error)] * 4, nothing_new, fails(error))
    with pytest.raises(Stopped):
        run(loop)
    after = [60.0, 120.0, 240.0, 300.0] if before is nothing_new else [120.0, 240.0, 300.0, 300.0]
    assert loop.pauses == [60.0, *after, 60.0, 60.0]


def test_what_fails_before_anything_worked_is_an_end(run: Any) -> None:
    loop = Loop(fails(StoreFailed("no such bucket")), nothing_new)
    with pytest.raises(exits.Exit, match="no such bucket"):
        run(loop)
    assert loop.pauses == []


def test_without_spark_nothing_is_tried_again(run: Any) -> None:
    loop = Loop(nothing_new, fails(StoreFailed("x")), nothing_new)
    loop.running = False
    with pytest.raises(exits.Exit):
        run(loop)


@pytest.mark.parametrize("place", ["end", "-2h", "@2026-11-20T10:00", "2026-11-20T10:00Z", "17"])
def test_the_end_of_a_range_is_no_lake(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        status("backfill", "orders", "--from", "-2d", f"--to={place}")
    assert ended.value.code == exits.USAGE
    assert f"--to '{place}' is a time, not a lake: use --until" in capsys.readouterr().err


def test_partitions_that_failed_beside_others_are_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    args = SimpleNamespace(parser=SimpleNamespace(prog="p"), json=False)
    why = {("orders", 0): "away"}
    assert spark_lake._tell(args, RoundTotals(failed=why, partitions=2), 1.0) == exits.PARTLY  # type: ignore[arg-type]
    assert spark_lake._tell(args, RoundTotals(failed=why, partitions=1), 1.0) == exits.FAILED  # type: ignore[arg-type]


def test_a_lake_of_a_table_is_not_compacted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manifest").mkdir()
    (tmp_path / "manifest/table").write_bytes(b"nsqha.messages")
    with pytest.raises(SystemExit) as ended:
        status("compact", "--lake", str(tmp_path))
    assert ended.value.code == exits.USAGE and "is an Iceberg table" in capsys.readouterr().err


@pytest.mark.parametrize("cluster", ["c1", "c2"])
def test_verify_holds_the_log_before_it_reads_the_lake_and_lets_it_go(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = FakeLog([Partition()], cluster="c1")
    log.partitions[0].publish(b"a")
    lake = Lake(tmp_path / "lake", log)
    archive.once(log, lake.rounds(), archive.Subject(("orders",)))
    log.cluster = cluster
    state = ManifestCommits.state

    def read_state(commits: ManifestCommits, *, durable: bool = False) -> LakeState:
        log.calls.append("state")
        assert log.holds == {"hold"}
        return state(commits, durable=durable)

    def read_log(split: Split, tell: Tell, **_: Any) -> Iterator[Verified]:
        assert split.hold_id == "hold"
        return log.read(split, tell)

    log.calls.clear()
    monkeypatch.setattr(snapshot, "Segments", lambda connection: log)
    monkeypatch.setattr(ManifestCommits, "state", read_state)
    monkeypatch.setattr(task, "read_log", read_log)
    words = ("verify", "orders", "--lake", str(lake.folder))
    if cluster == "c1":
        assert status(*words) == exits.OK
    else:
        with pytest.raises(exits.Exit, match="is the lake of cluster c1, but these brokers are of cluster c2"):
            status(*words)
    assert log.calls == ["snapshot", "state", "release"] and log.holds == set()
