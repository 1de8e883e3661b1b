"""What verbs of `nsqha spark` refuse before Spark starts and before anything is written."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.cli import build_parser
from nsqha.cli.spark import lake as spark_lake
from nsqha.cli.terminal import exits
from pyspark_nsqha import jobs, snapshot
from pyspark_nsqha.lake.commits.manifest import Life
from pyspark_nsqha.lake.store import Store
from pyspark_nsqha.lake.verify import LakePartition, LakeReport
from pyspark_nsqha.model import ReadFailed

NOBODY = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def session(*_: Any, **__: Any) -> Any:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(jobs, "session", session)


def refused(*words: str) -> exits.Exit:
    args = build_parser("spark").parse_args(["spark", *words])
    with pytest.raises(exits.Exit) as ended:
        args.run(args)
    return ended.value


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "orders", "--broker", NOBODY),
        ("verify", "orders", "--full", "--broker", NOBODY),
        ("verify", "orders", "--lake-only"),
        ("compact",),
        ("lag", "--broker", NOBODY),
        ("replay", "orders", "--from", "start", "--into", "again", "--broker", NOBODY),
    ],
    ids=lambda words: " ".join(words[:3]),
)
@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_is_no_lake_is_said_to_be_none(words: tuple[str, ...], there: bool, tmp_path: Path) -> None:
    folder = tmp_path / "laek"
    if there:
        (folder / "manifest").mkdir(parents=True)
        (folder / "manifest/notes.txt").write_text("no manifest")
    found = refused(*words, "--lake", str(folder))
    assert found.status == exits.NOT_FOUND
    assert str(found) == f"{folder} is not a lake: it has no manifest; nsqha spark archive --to makes one"
    assert folder.exists() == there


@pytest.mark.parametrize("verb", ["archive", "backfill"])
@pytest.mark.parametrize("theirs", ["meta.json", "topics/orders", "data/orders-0/log"])
def test_a_folder_of_somebody_else_does_not_become_a_lake(verb: str, theirs: str, tmp_path: Path) -> None:
    (tmp_path / theirs).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / theirs).write_text("theirs")
    found = refused(verb, "orders", "--to", str(tmp_path), "--broker", NOBODY)
    assert (found.status, str(found)) == (
        exits.FAILED,
        f"{tmp_path} is not empty and is not a lake; name an empty folder",
    )


STOPPED = [(), ("tmp/run-1", "plan/run-1.json"), ("data/topic=orders/day=2026-11-20/x.parquet",)]


@pytest.mark.parametrize("ours", STOPPED)
def test_what_a_run_that_was_stopped_left_is_gone_on_from(ours: tuple[str, ...], tmp_path: Path) -> None:
    for path in ours:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("ours")
    found = refused("archive", "orders", "--to", str(tmp_path), "--broker", NOBODY, "--timeout", "1s")
    assert found.status == exits.UNREACHABLE, found


class Log:
    """Brokers that have one topic."""

    def __init__(self, connection: object) -> None:
        pass

    def snapshot(self, asked: snapshot.SnapshotRequest) -> Any:
        if missing := set(asked.topics) - {"orders"}:
            raise ReadFailed(f"there is no topic {', '.join(missing)}; `nsqha topic list` shows what there is")
        return SimpleNamespace(pins=[SimpleNamespace(identity=SimpleNamespace(topic="orders"))])


@pytest.mark.parametrize(
    "words",
    [
        "archive {} --to lake",
        "backfill {} --to lake",
        "verify {} --lake made",
        "verify {} --full --lake made",
        "replay {} --from start --into x",
    ],
)
def test_a_misspelled_topic_is_told_with_the_one_that_may_be_meant(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made/manifest").mkdir(parents=True)
    (tmp_path / f"made/manifest/{1:020d}.json").touch()
    monkeypatch.setattr(snapshot, "Segments", Log)
    monkeypatch.setattr("pyspark_nsqha.writing.replay.Segments", Log)
    found = refused(*words.format("ordesr").split())
    assert found.status == exits.NOT_FOUND
    assert str(found) == "there is no topic ordesr; `nsqha topic list` shows what there is (did you mean orders?)"
    assert "did you mean" not in str(refused(*words.format("payments").split()))


def test_only_its_lines_about_statistics_are_kept_from_pyiceberg(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args: Any = SimpleNamespace(format="iceberg", catalog="default", table="nsqha.messages")
    spark_lake._commits(args, Store(str(tmp_path)))
    logger = logging.getLogger("pyiceberg.io.pyarrow")
    logger.warning("PyArrow statistics missing for column %d when writing file", 3)
    logger.warning("something else")
    shown = [one.getMessage() for one in caplog.records if one.name == logger.name]
    assert shown == ["something else"]


def test_lives_of_one_name_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*behind: int | None) -> list[str]:
        lives = [LakePartition(Life("orders", uid, 0), 0, 1, 1, 1, 1, one) for uid, one in enumerate(behind, 0xA)]
        args: Any = SimpleNamespace(parser=SimpleNamespace(prog="p"), json=False, strict=False, full=False)
        spark_lake._tell_report(args, LakeReport(lives), 1.0)
        return [line.partition(": offsets")[0] for line in capsys.readouterr().out.splitlines()[:-1]]

    assert told(5) == told(None) == ["orders/0"]
    assert told(None, 5) == ["orders/0 (earlier topic of this name)", "orders/0"]
    assert told(None, None) == ["orders/0 (topic uid 000000000000000a)", "orders/0 (topic uid 000000000000000b)"]


@pytest.mark.parametrize("verb", ["archive", "backfill", "verify", "compact", "replay", "lag"])
def test_help_says_what_an_interrupt_is(verb: str) -> None:
    epilog = build_parser("spark").verbs()["spark"].verbs()[verb].epilog or ""
    assert "130 interrupted" in " ".join(epilog.split())
