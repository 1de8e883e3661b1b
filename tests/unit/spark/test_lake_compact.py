"""compact: fewer files, the same messages, each in one file that counts, and the same proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pyspark_nsqha.lake import names
from pyspark_nsqha.lake.archive import Subject, once
from pyspark_nsqha.lake.commit import ManifestCommits
from pyspark_nsqha.lake.compact import CannotMerge, Group, Merged, MergeTask, Totals, compact, groups
from pyspark_nsqha.lake.contents import checked
from pyspark_nsqha.lake.manifest import Addition, LakeFile, Overlap
from pyspark_nsqha.lake.store import StoreFailed
from pyspark_nsqha.lake.verify import verify
from pyspark_nsqha.snapshot import Asked
from tests.unit.spark.lake_rig import DAY, FakeLog, Lake, Partition


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Two partitions over three days, archived every few batches."""
    log = FakeLog([Partition(number=0), Partition(number=1)])
    lake = Lake(tmp_path / "lake", log)
    for n in range(24):
        for partition in log.partitions:
            partition.publish(b"%d" % n * 9, b"second", at_ns=20_000 * DAY + n * DAY // 8)
        once(log, lake.rounds(), Subject(("orders",)))
    return lake


def merge(lake: Lake, *, run: str = "merge", **more: object) -> Totals:
    def tasks(found: Sequence[Group]) -> list[Merged]:
        return [MergeTask(lake.store, run)(group) for group in found]

    return compact(lake.commits, lake.store, more.pop("tasks", tasks), run=run, **more)  # type: ignore[arg-type]


def files(lake: Lake) -> list[LakeFile]:
    return list(lake.commits.state().addition().files)


def rows(lake: Lake) -> list[tuple[int, int, bytes]]:
    found = []
    for file in files(lake):
        table = pq.read_table(lake.folder / file.path, partitioning=None)
        found += list(zip(*(table[name].to_pylist() for name in ("partition", "offset", "value")), strict=True))
    return sorted(found)


def check_whole(lake: Lake) -> None:
    report = verify(
        lake.commits.state(),
        lake.store,
        ["orders"],
        pins=lake.log.snapshot(Asked(("orders",))).pins,
        read=lake.log.read,
        check=lambda work: [checked(file, split, lake.store, lake.log.read) for file, split in work],
    )
    assert (report.problems, report.failed) == ([], [])


def test_a_day_becomes_a_file_and_no_message_changes(lake: Lake) -> None:
    before = rows(lake)
    totals = merge(lake)
    assert (totals.merged, totals.files) == (48, 6)
    assert rows(lake) == before
    assert all(file.merged and file.path.endswith(".merged.parquet") for file in files(lake))
    check_whole(lake)
    assert merge(lake).files == 0


def test_a_group_is_no_larger_than_the_target(lake: Lake) -> None:
    whole = [file for file in files(lake) if file.partition == 0]
    target = 3 * max(file.bytes for file in whole)
    found = list(groups(whole, target))
    assert len(found) > 3 and all(len(group) > 1 for group in found)
    assert all(sum(file.bytes for file in group) <= target for group in found)
    assert list(groups(whole, 1)) == []


def test_files_that_do_not_meet_are_not_merged(lake: Lake) -> None:
    whole = [file for file in files(lake) if file.partition == 0][:6]
    assert [len(group) for group in groups(whole)] == [6]
    assert [len(group) for group in groups([*whole[:2], *whole[3:]])] == [2, 3]
    apart = replace(whole[3], first_log_id=whole[3].first_log_id + 1)
    assert [len(group) for group in groups([*whole[:3], apart, *whole[4:]])] == [3, 3]
    assert list(groups(whole[:1])) == []


def test_old_files_are_removed_only_when_they_were_replaced_long_enough_ago(lake: Lake) -> None:
    old = {file.path for file in files(lake)}
    merge(lake)
    assert old < set(lake.data_files())
    assert merge(lake).removed == 0
    assert merge(lake, keep_ns=0).removed == len(old)
    assert lake.data_files() == lake.named()
    assert list(lake.store.list(names.REPLACED)) == []
    check_whole(lake)


def test_the_archive_goes_on_behind_a_merged_file(lake: Lake) -> None:
    merge(lake)
    lake.log.partitions[0].publish(b"behind", at_ns=20_003 * DAY)
    once(lake.log, lake.rounds(), Subject(("orders",)))
    check_whole(lake)
    assert (0, 48, b"behind") in rows(lake)


def test_an_archiver_that_commits_meanwhile_is_let_by(lake: Lake) -> None:
    came: list[bool] = []

    def interrupted(found: Sequence[Group]) -> list[Merged]:
        made = [MergeTask(lake.store, "merge")(group) for group in found]
        if not came:
            came.append(True)
            lake.log.partitions[0].publish(b"meanwhile", at_ns=20_003 * DAY)
            once(lake.log, lake.rounds(), Subject(("orders",)))
        return made

    merge(lake, tasks=interrupted)
    assert (0, 48, b"meanwhile") in rows(lake)
    check_whole(lake)
    merge(lake, keep_ns=0)
    assert lake.data_files() == lake.named()


def test_a_run_that_dies_leaves_what_was_there_and_its_file_is_removed_later(lake: Lake) -> None:
    before = rows(lake)

    def dies(found: Sequence[Group]) -> list[Merged]:
        MergeTask(lake.store, "merge")(found[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(lake, tasks=dies)
    assert rows(lake) == before and lake.data_files() != lake.named()
    merge(lake, keep_ns=0)
    merge(lake, keep_ns=0)
    assert lake.data_files() == lake.named() and rows(lake) == before


def test_a_damaged_file_is_named_and_nothing_is_merged(lake: Lake) -> None:
    victim = files(lake)[3]
    path = lake.folder / victim.path
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 4] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CannotMerge, match=f"{victim.path}: .*nsqha spark verify --full"):
        merge(lake)
    path.unlink()
    with pytest.raises(CannotMerge, match="is gone"):
        merge(lake)
    assert not any(file.merged for file in files(lake))


def test_what_replaces_files_has_exactly_their_messages(lake: Lake) -> None:
    state = lake.commits.state()
    life, [first, second, *_] = next(iter(state.files.items()))
    both = replace(first, end=second.end, rows=second.end - first.first, merged=True)
    short = replace(first, merged=True)
    for addition in (
        Addition((short,), replaced=(first.path, second.path)),
        Addition((both,), replaced=(first.path,)),
        Addition((both,), replaced=(first.path, second.path, "data/x.parquet")),
        Addition((), replaced=(first.path,)),
    ):
        with pytest.raises(Overlap):
            state.with_added(addition, 99)
    after = state.with_added(Addition((both,), replaced=(first.path, second.path)), 99)
    assert after.files[life][0] == both and after.covered(life) == state.covered(life)


def test_a_lake_of_a_table_is_left_to_its_table(lake: Lake) -> None:
    lake.store.write(names.OF_TABLE, b"nsqha.messages", run="r")
    commits = ManifestCommits(lake.store)
    with pytest.raises(StoreFailed, match="use --format iceberg"):
        commits.append(commits.state(), Addition(), run="r")
