"""compact: fewer files, the same messages, each in one file that counts, and the same proof."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from pyspark_nsqha.lake import compact as compact_module
from pyspark_nsqha.lake import names, plan
from pyspark_nsqha.lake.archive import Subject, once
from pyspark_nsqha.lake.commits import commit
from pyspark_nsqha.lake.commits.commit import ManifestCommits
from pyspark_nsqha.lake.commits.manifest import Addition, LakeFile, LakeState, Overlap
from pyspark_nsqha.lake.compact import (
    CannotMerge,
    CompactTotals,
    Group,
    Merged,
    MergeTask,
    compact,
    groups,
    remove_replaced,
)
from pyspark_nsqha.lake.contents import checked
from pyspark_nsqha.lake.store import StoreFailed
from pyspark_nsqha.lake.verify import verify
from pyspark_nsqha.snapshot import SnapshotRequest
from tests.unit.spark.lake_rig import DAY, FakeLog, Lake, Partition

HOUR_NS = 3600 * 10**9


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


def merge(lake: Lake, *, run: str = "merge", **more: object) -> CompactTotals:
    def tasks(found: Sequence[Group], tag: str) -> list[Merged]:
        return [MergeTask(lake.store, run, tag)(group) for group in found]

    return compact(lake.commits, lake.store, more.pop("tasks", tasks), run=run, **more)  # type: ignore[arg-type]


def later(lake: Lake, seconds: int) -> None:
    """Notes become so much older."""
    for note in (lake.folder / names.REPLACED).iterdir():
        before = note.stat().st_mtime - seconds
        os.utime(note, (before, before))


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
        pins=lake.log.snapshot(SnapshotRequest(("orders",))).pins,
        read=lake.log.read,
        check=lambda work: [checked(file, split, lake.store, lake.log.read) for file, split in work],
    )
    assert (report.problems, report.failed) == ([], [])


def test_verify_says_when_what_was_merged_is_removed(lake: Lake) -> None:
    old = len(files(lake))
    merge(lake, keep_ns=HOUR_NS)
    [note] = (lake.folder / names.REPLACED).iterdir()
    os.utime(note, (1_795_168_801, 1_795_168_801))
    found = verify(lake.commits.state(), lake.store, ["orders"])
    local = time.strftime("%Y-%m-%d %H:%M", time.localtime(1_795_168_800 + 3660))
    assert found.notes == [f"{old} files replaced by compact; the first compact after {local} removes them"]
    stray = lake.folder / files(lake)[0].path
    stray.with_name("stray.parquet").write_bytes(b"x")
    assert "1 files are not in any manifest" in verify(lake.commits.state(), lake.store, ["orders"]).notes[1]


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
    merge(lake, keep_ns=HOUR_NS)
    assert old < set(lake.data_files())
    later(lake, 3500)
    assert merge(lake, keep_ns=0).removed == 0, "who merged them keeps them for an hour"
    later(lake, 200)
    assert merge(lake, keep_ns=2 * HOUR_NS).removed == 0, "and who comes here for two"
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

    def interrupted(found: Sequence[Group], tag: str) -> list[Merged]:
        made = [MergeTask(lake.store, "merge", tag)(group) for group in found]
        if not came:
            came.append(True)
            lake.log.partitions[0].publish(b"meanwhile", at_ns=20_003 * DAY)
            once(lake.log, lake.rounds(), Subject(("orders",)))
        return made

    merge(lake, tasks=interrupted)
    assert (0, 48, b"meanwhile") in rows(lake)
    check_whole(lake)
    later(lake, 8000)
    merge(lake, keep_ns=0)
    assert lake.data_files() == lake.named()


def test_a_run_that_dies_leaves_what_was_there_and_its_file_is_removed_later(lake: Lake) -> None:
    before = rows(lake)

    def dies(found: Sequence[Group], tag: str) -> list[Merged]:
        MergeTask(lake.store, "merge", tag)(found[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(lake, tasks=dies)
    assert rows(lake) == before and lake.data_files() != lake.named()
    merge(lake, keep_ns=0)
    assert lake.data_files() != lake.named(), "it might be about to commit"
    later(lake, 7300)
    merge(lake, keep_ns=0)
    assert list(lake.store.list(names.REPLACED)) == []
    assert lake.data_files() == lake.named() and rows(lake) == before


def test_an_archiver_that_commits_all_the_time_does_not_make_it_merge_again(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    merges: list[int] = []
    append = ManifestCommits.append

    def counted(found: Sequence[Group], tag: str) -> list[Merged]:
        merges.append(len(found))
        return [MergeTask(lake.store, "merge", tag)(group) for group in found]

    def overtaken(commits: ManifestCommits, state: LakeState, addition: Addition, *, run: str) -> LakeState:
        if addition.replaced and lake.log.partitions[0].last.end_offset < 54:
            lake.log.partitions[0].publish(b"meanwhile", at_ns=20_003 * DAY)
            once(lake.log, lake.rounds(), Subject(("orders",)))
        return append(commits, state, addition, run=run)

    monkeypatch.setattr(ManifestCommits, "append", overtaken)
    merge(lake, tasks=counted)
    assert [body for *_, body in rows(lake)].count(b"meanwhile") == 6
    assert len(merges) == 2, "the old files, then what the archiver wrote"
    check_whole(lake)


@pytest.mark.parametrize("keep_ns", [0, 1, 2 * HOUR_NS])
def test_two_that_merge_at_once_leave_each_message_in_a_file(lake: Lake, keep_ns: int) -> None:
    """While the first one merges, a second one does all of its work; its clock is hours ahead."""
    before = rows(lake)
    came: list[bool] = []

    def interrupted(found: Sequence[Group], tag: str) -> list[Merged]:
        made = [MergeTask(lake.store, "slow", tag)(group) for group in found]
        if not came:
            came.append(True)
            with pytest.MonkeyPatch.context() as patched:
                ahead = time.time_ns() + 9 * HOUR_NS
                patched.setattr(commit, "time", SimpleNamespace(time_ns=lambda: ahead))
                merge(lake, run="quick", keep_ns=keep_ns)
        return made

    merge(lake, run="slow", tasks=interrupted)
    assert rows(lake) == before
    check_whole(lake)
    later(lake, 8000)
    merge(lake, keep_ns=0)
    assert rows(lake) == before and lake.data_files() == lake.named()


def test_new_files_of_a_run_that_is_at_work_are_not_removed(lake: Lake) -> None:
    """A second one, that keeps nothing, comes when the files are written, and dies when it has tidied."""

    def interrupted(found: Sequence[Group], tag: str) -> list[Merged]:
        made = [MergeTask(lake.store, "slow", tag)(group) for group in found]
        later(lake, 3500)

        def dies(found: Sequence[Group], tag: str) -> list[Merged]:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            merge(lake, run="quick", tasks=dies, keep_ns=0)
        return made

    before = rows(lake)
    assert merge(lake, run="slow", tasks=interrupted, keep_ns=0).files == 6
    assert rows(lake) == before


@pytest.mark.parametrize("gone", ["file", "shorter", "note"])
def test_what_was_merged_is_committed_only_if_it_is_there(lake: Lake, gone: str) -> None:
    before = lake.named()

    def interrupted(found: Sequence[Group], tag: str) -> list[Merged]:
        made = [MergeTask(lake.store, "slow", tag)(group) for group in found]
        path = lake.folder / made[0].file.path if made[0].file else lake.folder
        if gone == "note":
            [path] = (lake.folder / names.REPLACED).iterdir()
        if gone == "shorter":
            path.write_bytes(path.read_bytes()[1:])
        else:
            path.unlink()
        return made

    with pytest.raises(StoreFailed, match=r"nothing of (this round|it) was committed"):
        merge(lake, tasks=interrupted)
    assert lake.named() == before


def test_a_round_that_took_too_long_is_not_committed(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    before = lake.named()
    times = iter([0, compact_module.COMMIT_NS + 1])
    monkeypatch.setattr(compact_module, "_now_ns", lambda: next(times))
    with pytest.raises(StoreFailed, match="took so long"):
        merge(lake)
    assert lake.named() == before


def test_who_replaced_a_file_a_moment_ago_keeps_it_whatever_older_notes_say(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note of somebody who died names the same old files; they are replaced while the second one reads notes."""
    old = {file.path for file in files(lake)}

    def dies(found: Sequence[Group], tag: str) -> list[Merged]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(lake, run="dead", tasks=dies, keep_ns=0)
    later(lake, 8000)
    notes = compact_module._notes

    def meanwhile(*asked: Any) -> Any:
        found = notes(*asked)
        monkeypatch.setattr(compact_module, "_notes", notes)
        merge(lake, run="quick", keep_ns=HOUR_NS)
        return found

    monkeypatch.setattr(compact_module, "_notes", meanwhile)
    remove_replaced(lake.commits, lake.store, 0, "late")
    assert old < set(lake.data_files()) and not old & set(lake.named())


def test_a_file_that_somebody_died_in_front_of_committing_is_not_removed(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an object store, who comes next may complete the commit."""

    def dies(found: Sequence[Group], tag: str) -> list[Merged]:
        for group in found:
            MergeTask(lake.store, "merge", tag)(group)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(lake, tasks=dies)
    later(lake, 8000)
    new = set(lake.data_files()) - set(lake.named())
    commits = lake.commits
    monkeypatch.setattr(commits, "proposed", lambda state: new)
    assert remove_replaced(commits, lake.store, 0, "late") == 0
    assert new and new < set(lake.data_files())
    assert remove_replaced(lake.commits, lake.store, 0, "late") == len(new)


def test_a_commit_that_is_completed_meanwhile_is_seen(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Merged] = []

    def dies(found: Sequence[Group], tag: str) -> list[Merged]:
        made.extend(MergeTask(lake.store, "merge", tag)(group) for group in found)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(lake, tasks=dies)
    later(lake, 8000)
    before, notes = rows(lake), compact_module._notes
    addition = Addition(tuple(one.file for one in made if one.file), replaced=tuple(lake.named()))

    def meanwhile(*asked: Any) -> Any:
        found = notes(*asked)
        lake.commits.append(lake.commits.state(), addition, run="merge")
        return found

    monkeypatch.setattr(compact_module, "_notes", meanwhile)
    remove_replaced(lake.commits, lake.store, 0, "late")
    assert rows(lake) == before


def test_the_archiver_leaves_old_files_to_who_reads_them(lake: Lake) -> None:
    """An archiver that has a plan that never ends."""
    [life, *_] = lake.commits.state().files
    planned = plan.Planned(life, 0, 10**6, 1, 10**6, names.day_of(20_000 * DAY), names.day_of(20_003 * DAY))
    lake.store.write("plan/never-00000000000000000000.json", plan.encode([planned]), run="never")
    old = {file.path for file in files(lake)}
    merge(lake)
    lake.rounds().tidy(lake.commits.state())
    assert old < set(lake.data_files())


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
    both = replace(first, end=second.end, rows=second.end - first.first, merged="t")
    short = replace(first, merged="t")
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
