"""The archive: each message once, whatever stops it, and retention never ahead of the lake."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pyspark_nsqha.lake import rounds, store
from pyspark_nsqha.lake.archive import Subject, once
from pyspark_nsqha.lake.commits.manifest import LakeState
from pyspark_nsqha.lake.plan import pieces
from pyspark_nsqha.lake.rounds import DataLoss, RoundTotals
from pyspark_nsqha.lake.store import Store, StoreFailed
from pyspark_nsqha.lake.task import PieceOutcome, write_piece
from pyspark_nsqha.model import ReadFailed
from pyspark_nsqha.reading.entries import FAULTY
from pyspark_nsqha.snapshot import Snapshot, SnapshotRequest
from tests.unit.spark.lake_rig import DAY, NOON, Crash, FakeLog, Lake, Partition

SUBJECT = Subject(("orders",))
Rows = list[tuple[int, int, int, bytes]]


def publish(log: FakeLog, batches: int, start: int = 0) -> None:
    for n in range(start, start + batches):
        log.partitions[n % 2].publish(*[b"%d:%d " % (n, i) * 20 for i in range(n % 7)])


@pytest.fixture
def log() -> FakeLog:
    log = FakeLog([Partition(number=0), Partition(number=1)])
    publish(log, 60)
    return log


@pytest.fixture
def lake(tmp_path: Path, log: FakeLog) -> Lake:
    return Lake(tmp_path / "lake", log)


def archive(lake: Lake) -> RoundTotals:
    return once(lake.log, lake.rounds(), SUBJECT)


def rows(lake: Lake) -> Rows:
    """Partition, uid, offset and value of all that the manifests name."""
    found: Rows = []
    for file in lake.commits.state().addition().files:
        table = pq.read_table(lake.folder / file.path, partitioning=None)
        columns = [table.column(name).to_pylist() for name in ("partition", "offset", "value")]
        found += [(number, file.topic_uid, offset, value) for number, offset, value in zip(*columns, strict=True)]
    return sorted(found)


def published(log: FakeLog) -> Rows:
    """The same of the log, as far as it can be read."""
    found: Rows = []
    for partition in log.partitions:
        for piece in pieces(partition.pin(cuts=True), LakeState()):
            for verified in partition.read(piece.split, lambda *_: None):
                for batch in verified.batches:
                    columns = [batch.column(name).to_pylist() for name in ("offset", "value")]
                    found += [(partition.number, partition.uid, *row) for row in zip(*columns, strict=True)]
    return sorted(found)


def test_everything_committed_is_in_the_lake_once(lake: Lake, log: FakeLog) -> None:
    totals = archive(lake)
    assert rows(lake) == published(log)
    assert totals.rows == len(rows(lake)) and totals.files == len(lake.named()) > 4
    assert lake.data_files() == lake.named()


def test_a_second_run_adds_what_is_new_and_nothing_else(lake: Lake, log: FakeLog) -> None:
    archive(lake)
    assert archive(lake).files == 0
    publish(log, 20, 60)
    archive(lake)
    assert rows(lake) == published(log)


def test_batches_without_messages_make_no_file(lake: Lake, log: FakeLog) -> None:
    archive(lake)
    log.partitions[0].publish()
    assert archive(lake).rounds == 0
    log.partitions[0].publish(b"behind")
    archive(lake)
    before, last = lake.commits.state().files[next(iter(lake.commits.state().files))][-2:]
    assert (last.first_log_id, last.chain_before) == (before.end_log_id, before.chain)


def test_no_file_spans_two_days(lake: Lake, log: FakeLog) -> None:
    partition = log.partitions[0]
    for n in range(6):
        partition.publish(b"a", b"b", at_ns=NOON + (n * DAY) // 2 + DAY // 2)
    archive(lake)
    assert rows(lake) == published(log)
    files = lake.commits.state().addition().files
    assert len({file.day for file in files}) == 4
    for file in files:
        assert file.first_timestamp_ns // DAY == file.last_timestamp_ns // DAY
        assert f"day={file.day}/" in file.path


def test_the_same_range_is_the_same_bytes_however_it_comes(lake: Lake, log: FakeLog, tmp_path: Path) -> None:
    partition = log.partitions[0]
    split = pieces(partition.pin(cuts=True), LakeState())[0].split

    def written(name: str, batches_a_run: int) -> list[bytes]:
        place = Store(str(tmp_path / name))
        read = partial(partition.read, batches_a_run=batches_a_run)
        outcome = write_piece(split, place, read, run="r")
        return [place.read(file.path) for file in outcome.addition.files]

    assert written("one", 1) == written("two", 5) == written("three", 100)


# ---- floors


def test_the_channel_is_made_while_a_hold_is_on_and_moves_only_behind_commits(lake: Lake, log: FakeLog) -> None:
    seen = []
    commit_reader = log.commit_reader

    def watched(
        topic: str, channel: str, offsets: dict[int, int], *, back: bool = False, topic_uid: int = 0
    ) -> dict[int, int]:
        state = lake.commits.state()
        ends = {life.partition: state.end(life) or 0 for life in state.files}
        assert log.holds == {"hold"}
        assert all(offset <= ends.get(partition, 0) for partition, offset in offsets.items())
        seen.append(back)
        return commit_reader(topic, channel, offsets, back=back, topic_uid=topic_uid)

    log.commit_reader = watched  # type: ignore[method-assign]
    archive(lake)
    assert seen[0] and not any(seen[1:]) and len(seen) > 2
    assert log.floors == {("archive", "orders", p.number): p.last.end_offset for p in log.partitions}
    assert log.holds == set()


def test_a_floor_that_a_crash_left_behind_is_raised_at_the_next_start(lake: Lake, log: FakeLog) -> None:
    archive(lake)
    log.floors["archive", "orders", 0] = 3
    archive(lake)
    assert log.floors["archive", "orders", 0] == log.partitions[0].last.end_offset


def test_a_floor_ahead_of_the_lake_is_refused(lake: Lake, log: FakeLog) -> None:
    log.floors = {("archive", "orders", 0): 7, ("archive", "orders", 1): 6}
    expected = (
        r"orders/0: channel archive is at offset 7, but .* has nothing from offset 0 on: "
        r".*: nsqha seek orders/0 archive 0$"
    )
    with pytest.raises(ReadFailed, match=expected):
        archive(lake)
    assert lake.named() == [] and log.holds == set()
    assert log.floors == {("archive", "orders", 0): 7, ("archive", "orders", 1): 6}


def test_a_floor_ahead_of_the_lake_is_what_it_is_where_the_log_has_no_more(lake: Lake, log: FakeLog) -> None:
    partition = log.partitions[0]
    partition.trim(20)
    log.floors = {("archive", "orders", 0): partition.pin().start.offset, ("archive", "orders", 1): 0}
    archive(lake)
    assert rows(lake) == published(log)


def in_trouble(log: FakeLog, trouble: str) -> None:
    """One of partition 0."""
    partition = log.partitions[0]
    if trouble == "away":
        log.away.add(("orders", 0))
    elif trouble == "cut":
        del partition.entries[-30:]
    elif trouble == "floor":
        log.floors["archive", "orders", 0] = 10**6
    else:
        log.stuck.add(("orders", 0))


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("away", "no leader"),
        ("cut", "the log was truncated"),
        ("floor", "nsqha seek orders/0"),
        ("stuck", "was not moved in"),
    ],
)
def test_a_partition_in_trouble_does_not_stop_the_others(lake: Lake, log: FakeLog, trouble: str, why: str) -> None:
    archive(lake)
    publish(log, 30, 60)
    in_trouble(log, trouble)
    totals = archive(lake)
    assert [(life.partition, why in text) for life, text in totals.failed.items()] == [(0, True)]
    assert totals.partitions == 2 and totals.rows
    life = next(life for life in lake.commits.state().files if life.partition == 1)
    assert lake.commits.state().end(life) == log.partitions[1].last.end_offset == log.floors["archive", "orders", 1]
    assert log.holds == set()


def test_a_partition_that_cannot_have_the_channel_is_not_archived(lake: Lake, log: FakeLog) -> None:
    log.stuck.add(("orders", 0))
    assert [life.partition for life in archive(lake).failed] == [0]
    assert {life.partition for life in lake.commits.state().files} == {1}


def test_where_all_partitions_are_in_trouble_it_is_an_error(lake: Lake, log: FakeLog) -> None:
    log.away = {("orders", 0), ("orders", 1)}
    with pytest.raises(ReadFailed, match=r"^orders/0: no snapshot: no leader"):
        archive(lake)
    assert log.holds == set()


def test_where_no_floor_can_be_moved_it_is_an_error(lake: Lake, log: FakeLog) -> None:
    """The channel is one for consumers: it is there, and has a floor."""
    log.floors = {("archive", "orders", 0): 0, ("archive", "orders", 1): 0}
    log.stuck = {("orders", 0), ("orders", 1)}
    with pytest.raises(ReadFailed, match=r"^orders/0: the floor of channel archive was not moved"):
        archive(lake)
    assert len(lake.commits.state().files) == 2 and log.holds == set()


def test_a_partition_that_loses_its_leader_while_it_is_divided_is_left_for_later(lake: Lake, log: FakeLog) -> None:
    snapshot = log.snapshot

    def loses(asked: SnapshotRequest, *, partial: bool = False) -> Snapshot:
        if asked.ranges is not None:
            log.away.add(("orders", 0))
        return snapshot(asked, partial=partial)

    log.snapshot = loses  # type: ignore[method-assign]
    assert [life.partition for life in archive(lake).failed] == [0]
    assert {life.partition for life in lake.commits.state().files} == {1}


def test_a_lake_is_of_one_cluster(lake: Lake, log: FakeLog) -> None:
    log.cluster = "c1"
    archive(lake)
    assert lake.commits.state().cluster == "c1"
    publish(log, 10, 60)
    archive(lake)
    log.cluster = "c2"
    with pytest.raises(ReadFailed, match="is the lake of cluster c1, but these brokers are of cluster c2"):
        archive(lake)
    assert [manifest["manifest"]["cluster"] for manifest in manifests(lake)][:2] == ["c1", ""]


def manifests(lake: Lake) -> list[Any]:
    return [json.loads(path.read_bytes()) for path in sorted((lake.folder / "manifest").iterdir())]


# ---- what is missing


def test_what_retention_took_meanwhile_is_recorded(lake: Lake, log: FakeLog) -> None:
    archive(lake)
    publish(log, 40, 60)
    before = lake.commits.state().end(next(iter(lake.commits.state().files)))
    log.partitions[0].trim(40)
    totals = archive(lake)
    start = log.partitions[0].pin().start.offset
    assert [(gap.first, gap.end, gap.reason) for gap in totals.missing] == [(before, start, "retention")]
    assert archive(lake).missing == []


def test_lost_batches_are_missing_and_the_files_go_round_them(lake: Lake, log: FakeLog) -> None:
    partition = log.partitions[0]
    lost = next(entry for entry, *_ in partition.entries[10:] if entry.count)
    partition.lose(lost.log_id)
    totals = archive(lake)
    assert [(gap.first, gap.end, gap.reason) for gap in totals.missing] == [
        (lost.first_offset, lost.end_offset, "lost")
    ]
    assert rows(lake) == published(log)
    assert archive(lake).missing == []


def test_what_recovery_could_not_read_is_tried_again_and_not_missing(lake: Lake, log: FakeLog) -> None:
    partition = log.partitions[0]
    at, before = next((n, row) for n, row in enumerate(partition.entries[10:], 10) if row[0].count)
    partition.lose(before[0].log_id, FAULTY)
    totals = archive(lake)
    [why] = totals.failed.values()
    assert totals.missing == [] and "faulty on every replica" in why and "nsqha log skip orders/0" in why
    assert log.floors["archive", "orders", 0] <= before[0].first_offset
    partition.entries[at] = before
    assert not archive(lake).failed
    assert rows(lake) == published(log)


def test_strict_commits_nothing_of_a_round_with_a_gap(lake: Lake, log: FakeLog) -> None:
    lake.strict = True
    log.partitions[0].lose(next(entry for entry, *_ in log.partitions[0].entries if entry.count).log_id)
    with pytest.raises(DataLoss, match=r"orders/0: offsets .* are missing \(lost\)"):
        archive(lake)
    assert lake.named() == []


def test_messages_that_do_not_come_are_no_gap_but_a_failure(lake: Lake, log: FakeLog) -> None:
    def short(splits, run):  # type: ignore[no-untyped-def]
        read = lambda split, tell: list(log.read(split, tell))[:-1]  # noqa: E731
        return [write_piece(split, lake.store, read, run=run) for split in splits]

    totals = once(log, lake.rounds(short), SUBJECT)
    assert totals.files == 0 and totals.missing == []
    assert all("were not read" in why for why in totals.failed.values())


# ---- topics and logs that change


def test_a_topic_made_anew_is_another_life_in_the_same_lake(lake: Lake, log: FakeLog) -> None:
    archive(lake)
    old = rows(lake)
    log.partitions[:] = [Partition(number=0, uid=0xDEF)]
    log.floors.clear()
    log.partitions[0].publish(b"new")
    archive(lake)
    assert rows(lake) == sorted([*old, (0, 0xDEF, 0, b"new")])


def test_new_partitions_and_topics_of_a_pattern_are_found(lake: Lake, log: FakeLog) -> None:
    subject = Subject(pattern="o.*")
    once(log, lake.rounds(), subject)
    log.partitions += [Partition(number=2), Partition("other", 0, 0x77)]
    for partition in log.partitions[2:]:
        partition.publish(b"new")
    once(log, lake.rounds(), subject)
    assert rows(lake) == published(log)
    assert ("archive", "other", 0) in log.floors


def test_a_log_that_was_cut_is_not_archived_behind_the_old_one(lake: Lake, log: FakeLog) -> None:
    archive(lake)
    kept = rows(lake)
    partition = log.partitions[0]
    del partition.entries[-4:]
    [why] = archive(lake).failed.values()
    assert re.match(r"orders/0: .* has messages up to offset \d+, but the log ends at \d+", why)
    for n in range(12):
        partition.publish(b"another %d" % n, b"history", epoch=2)
    totals = archive(lake)
    assert "does not follow what the lake has" in "".join(totals.failed.values())
    assert rows(lake) == kept


# ---- crashes and company


def forty() -> FakeLog:
    log = FakeLog([Partition(number=0), Partition(number=1)])
    publish(log, 40)
    return log


def check_completed(lake: Lake, at: int) -> None:
    """The next run, with another committed end, makes it whole and leaves nothing over."""
    publish(lake.log, 15, 40)
    archive(lake)
    assert rows(lake) == published(lake.log), at
    assert lake.data_files() == lake.named(), at
    assert not list((lake.folder / "plan").iterdir()), at
    assert lake.log.floors == {("archive", "orders", p.number): p.last.end_offset for p in lake.log.partitions}, at


def test_a_run_that_stops_between_any_two_steps_is_completed_by_the_next_one(tmp_path: Path) -> None:
    whole = Lake(tmp_path / "whole", forty(), round_bytes=8000)
    archive(whole)
    assert len(whole.steps) > 20
    for at in range(len(whole.steps)):
        lake = Lake(tmp_path / f"{at}", forty(), round_bytes=8000, crash_at=at)
        with pytest.raises(Crash):
            archive(lake)
        lake.crash_at = -1
        check_completed(lake, at)
        assert not list((lake.folder / "tmp").iterdir()), at


class Kill:
    """`os` for the store, of a process that is killed in front of its n-th change of files."""

    CHANGES = ("replace", "link", "unlink", "fsync", "mkdir")

    def __init__(self, at: int) -> None:
        self.left = at

    def __getattr__(self, name: str) -> object:
        real = getattr(os, name)
        if name not in self.CHANGES:
            return real

        def change(*args: object) -> object:
            if self.left == 0:
                raise Crash(name)
            self.left -= 1
            return real(*args)

        return change


def test_a_run_that_is_killed_while_it_changes_files_is_completed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "STALE_NS", 0)  # what the dead left under tmp/ is not waited for
    at = 0
    while True:
        lake = Lake(tmp_path / f"{at}", forty(), split_bytes=9000, round_bytes=12000)
        with monkeypatch.context() as patched:
            patched.setattr(store, "os", Kill(at))
            try:
                archive(lake)
                break
            except Crash:
                pass
        check_completed(lake, at)
        assert not list((lake.folder / "tmp").iterdir()), at
        at += 1
    assert at > 20


def test_of_two_archivers_the_later_one_plans_anew(lake: Lake, log: FakeLog, tmp_path: Path) -> None:
    """While the first one writes, a second one, with other borders, does everything."""
    other = Lake(lake.folder, log, split_bytes=9000)
    came: list[bool] = []

    def interrupted(splits, run):  # type: ignore[no-untyped-def]
        outcomes = lake.write(splits, run)
        if not came:
            came.append(True)
            plans = lake.folder / "plan"
            shutil.move(plans, tmp_path / "aside")  # it had not seen this plan yet
            archive(other)
            for plan in (tmp_path / "aside").iterdir():
                shutil.move(plan, plans / plan.name)
        return outcomes

    once(log, lake.rounds(interrupted), SUBJECT)
    assert rows(lake) == published(log)
    assert lake.data_files() == lake.named()


def test_a_second_archiver_that_sees_the_plan_writes_the_same_files(lake: Lake, log: FakeLog) -> None:
    other = Lake(lake.folder, log, split_bytes=9000)
    before: list[dict[str, bytes]] = []

    def interrupted(splits, run):  # type: ignore[no-untyped-def]
        outcomes = lake.write(splits, run)
        if not before:
            before.append({path: lake.store.read(path) for path in lake.data_files()})
            archive(other)
        return outcomes

    once(log, lake.rounds(interrupted), SUBJECT)
    assert before[0].items() <= {path: lake.store.read(path) for path in lake.named()}.items()
    assert rows(lake) == published(log)


@pytest.mark.parametrize("why", ["made anew", "taken"])
def test_plans_for_what_the_log_has_no_more_are_closed(lake: Lake, log: FakeLog, why: str) -> None:
    """A run that died after its first plan; nothing of it was committed."""
    lake.crash_at = 6
    with pytest.raises(Crash):
        archive(lake)
    lake.crash_at = -1
    assert list((lake.folder / "plan").iterdir())
    log.floors.clear()
    if why == "made anew":
        log.partitions[:] = [Partition(number=0, uid=0xDEF), Partition(number=1, uid=0xDEF)]
    else:
        for partition in log.partitions:
            partition.trim(len(partition.entries))
    publish(log, 10)
    archive(lake)
    assert rows(lake) == published(log)
    assert list((lake.folder / "plan").iterdir()) == []


def test_plans_of_partitions_that_do_not_answer_stay(lake: Lake, log: FakeLog) -> None:
    lake.crash_at = 6
    with pytest.raises(Crash):
        archive(lake)
    lake.crash_at = -1
    log.away.add(("orders", 0))
    archive(lake)
    assert list((lake.folder / "plan").iterdir())
    log.away.clear()
    archive(lake)
    assert rows(lake) == published(log) and list((lake.folder / "plan").iterdir()) == []


def test_a_store_that_refuses_half_way_commits_nothing_of_the_round(lake: Lake, log: FakeLog) -> None:
    def full(splits, run):  # type: ignore[no-untyped-def]
        outcomes = lake.write(splits, run)
        return [*outcomes[:-1], PieceOutcome(splits[-1], failed="cannot write x: no space", store_failed=True)]

    with pytest.raises(StoreFailed, match=r"^cannot write x: no space; nothing of this round was committed$"):
        once(log, lake.rounds(full), SUBJECT)
    assert lake.named() == []
    archive(lake)
    assert rows(lake) == published(log) and lake.data_files() == lake.named()


def test_a_partition_that_cannot_be_read_does_not_stop_the_others(lake: Lake, log: FakeLog) -> None:
    def half(splits, run):  # type: ignore[no-untyped-def]
        outcomes = lake.write(splits, run)
        return [
            PieceOutcome(split, failed="orders/0: away") if split.identity.partition == 0 and split.first else outcome
            for split, outcome in zip(splits, outcomes, strict=True)
        ]

    totals = once(log, lake.rounds(half), SUBJECT)
    assert list(totals.failed.values()) == ["orders/0: away"]
    done = {number for number, _, offset, _ in rows(lake) if offset > 50}
    assert done == {1}
    assert log.floors["archive", "orders", 1] == log.partitions[1].last.end_offset
    archive(lake)
    assert rows(lake) == published(log) and lake.data_files() == lake.named()


def test_files_that_the_driver_does_not_see_are_not_committed(lake: Lake, log: FakeLog, tmp_path: Path) -> None:
    elsewhere = Store(str(tmp_path / "elsewhere"))

    def away(splits, run):  # type: ignore[no-untyped-def]
        return [write_piece(split, elsewhere, log.read, run=run) for split in splits]

    with pytest.raises(StoreFailed, match="check that it is the same folder on every machine"):
        once(log, lake.rounds(away), SUBJECT)
    assert lake.named() == []


def test_borders_of_unknown_time_do_not_move_the_days_of_a_piece(log: FakeLog) -> None:
    """Where entries do not verify the time is 0: that is no day, least of all one in 1970."""
    pin = log.partitions[0].pin(cuts=True)
    [known] = pieces(pin, LakeState(), split_bytes=1 << 40)
    unknown = replace(
        pin,
        start=pin.start._replace(timestamp_ns=0),
        cuts=tuple(cut._replace(timestamp_ns=0) if cut.offset <= pin.start.offset else cut for cut in pin.cuts),
    )
    [piece] = pieces(unknown, LakeState(), split_bytes=1 << 40)
    assert piece.planned.last_day == known.planned.last_day
    assert piece.planned.first_day == piece.planned.last_day
