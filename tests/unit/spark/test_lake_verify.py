"""verify: everything that is done to a lake or a log is found, and named by offsets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pyspark_nsqha.lake.archive import Subject, once
from pyspark_nsqha.lake.commits.commit import ManifestCommits
from pyspark_nsqha.lake.commits.manifest import Addition, LakeFile, LakeState
from pyspark_nsqha.lake.contents import CheckedRows, Problem, checked
from pyspark_nsqha.lake.task import Tell, Verified, write_piece
from pyspark_nsqha.lake.verify import LakeReport, anchors, verify
from pyspark_nsqha.model import Split
from pyspark_nsqha.snapshot import SnapshotRequest
from tests.unit.spark.lake_rig import DAY, FakeLog, Lake, Partition

NOT_FULL, FULL = False, True


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    log = FakeLog([Partition(number=0), Partition(number=1)])
    rng = random.Random(7)
    for n in range(160):
        log.partitions[n % 2].publish(*[rng.randbytes(rng.randrange(200)) for _ in range(n % 5)])
    lake = Lake(tmp_path / "lake", log)
    once(log, lake.rounds(), Subject(("orders",)))
    return lake


def report(
    lake: Lake,
    *,
    full: bool = False,
    state: LakeState | None = None,
    topics: Sequence[str] = ("orders",),
    meanwhile: Callable[[], None] = lambda: None,
) -> LakeReport:
    def check(work: list[tuple[LakeFile, Split | None]]) -> list[CheckedRows]:
        meanwhile()
        return [checked(file, split, lake.store, lake.log.read) for file, split in work]

    pins = lake.log.snapshot(SnapshotRequest(("orders",))).pins
    return verify(
        state or lake.commits.state(),
        lake.store,
        topics,
        pins=pins,
        read=lake.log.read,
        check=check if full else None,
        now_again=lambda: lake.log.snapshot(SnapshotRequest(("orders",))).pins,
    )


def files(lake: Lake, partition: int = 0) -> list[LakeFile]:
    return [file for file in lake.commits.state().addition().files if file.partition == partition]


def ranges(problems: Sequence[Problem]) -> set[tuple[str, int, int, int]]:
    return {(one.kind, one.partition, one.first, one.end) for one in problems}


@pytest.mark.parametrize("full", [NOT_FULL, FULL])
def test_a_whole_lake_has_no_problem(lake: Lake, full: bool) -> None:
    found = report(lake, full=full)
    assert (found.problems, found.failed, found.notes) == ([], [], [])
    assert found.anchors == 2
    total = sum(p.last.end_offset for p in lake.log.partitions)
    assert (found.rows_read, found.rows_compared) == ((total, total) if full else (0, 0))
    assert [(p.first, p.end, p.behind) for p in found.partitions] == [
        (0, p.last.end_offset, 0) for p in lake.log.partitions
    ]


@pytest.mark.parametrize("full", [NOT_FULL, FULL])
def test_a_deleted_file_is_named(lake: Lake, full: bool) -> None:
    gone = files(lake)[1]
    (lake.folder / gone.path).unlink()
    found = report(lake, full=full)
    assert ranges(found.problems) == {("gap", 0, gone.first, gone.end)}
    assert found.problems[0].file == gone.path


def test_every_flipped_byte_is_named(lake: Lake) -> None:
    """Every twentieth, that is."""
    file = min(files(lake), key=lambda file: file.bytes)
    path = lake.folder / file.path
    whole = path.read_bytes()
    for at in range(0, len(whole), 20):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        problems = checked(file, None, lake.store, lake.log.read).problems
        assert problems, at
        assert all(one.file == file.path and file.first <= one.first < one.end <= file.end for one in problems)
    path.write_bytes(whole)
    assert not checked(file, None, lake.store, lake.log.read).problems


def test_a_shorter_file_and_one_of_another_range_are_seen_at_once(lake: Lake) -> None:
    first, second, third = files(lake)[:3]
    path = lake.folder / first.path
    path.write_bytes(path.read_bytes()[:-1])
    state = lake.commits.state()
    life = second.life
    swapped = replace(second, bytes=third.bytes)
    (lake.folder / second.path).write_bytes((lake.folder / third.path).read_bytes())
    state.files[life] = tuple(swapped if file == second else file for file in state.files[life])
    problems = report(lake, state=state).problems
    assert {one.file for one in problems} == {first.path, second.path}
    assert any(f"its footer says that it has [{third.first}, {third.end})" in one.why for one in problems)


def test_a_hole_between_files_is_a_gap(lake: Lake) -> None:
    state = lake.commits.state()
    life, whole = next(iter(state.files.items()))
    state.files[life] = (*whole[:2], *whole[3:])
    assert ("gap", life.partition, whole[2].first, whole[2].end) in ranges(report(lake, state=state).problems)


def test_what_the_log_has_before_the_lake_begins_is_a_gap(lake: Lake) -> None:
    state = lake.commits.state()
    life, whole = next(iter(state.files.items()))
    state.files[life] = whole[1:]
    assert ranges(report(lake, state=state).problems) == {("gap", life.partition, whole[0].first, whole[0].end)}
    lake.log.partitions[life.partition].trim(whole[0].end_log_id - 1)
    assert report(lake, state=state).problems == []


def test_files_of_two_logs_do_not_meet(lake: Lake) -> None:
    state = lake.commits.state()
    life, whole = next(iter(state.files.items()))
    state.files[life] = (replace(whole[0], chain=1), *whole[1:])
    problems = report(lake, state=state).problems
    assert ranges(problems) == {("mismatch", life.partition, whole[1].first, whole[1].end)}
    assert "not chained to" in problems[0].why


def test_a_lake_of_another_log_does_not_have_the_brokers_chain(lake: Lake) -> None:
    partition = lake.log.partitions[0]
    entries = partition.entries
    partition.entries = entries[:-1]
    partition.publish(*[b"x" for _ in range(entries[-1][0].count)], epoch=2)
    last = files(lake)[-1]
    problems = report(lake).problems
    assert ranges(problems) == {("mismatch", 0, last.first, last.end)}
    assert "the log's entry" in problems[0].why


def test_a_log_that_ends_before_the_lake_is_told(lake: Lake) -> None:
    end = lake.log.partitions[0].last.end_offset
    del lake.log.partitions[0].entries[-6:]
    now = lake.log.partitions[0].last.end_offset
    assert ("mismatch", 0, now, end) in ranges(report(lake).problems)


def test_rows_that_are_not_the_logs_are_named_one_by_one(lake: Lake, tmp_path: Path) -> None:
    """Files that are right in themselves, of a log with another message."""
    changed, lake.log = FakeLog([Partition()]), FakeLog([Partition()])
    for n in range(30):
        changed.partitions[0].publish(b"the same", b"not the same" if n == 20 else b"the same")
        lake.log.partitions[0].publish(b"the same", b"the same")
    other = Lake(tmp_path / "other", changed)
    once(changed, other.rounds(), Subject(("orders",)))
    other.log = lake.log
    wrong = lake.log.partitions[0].entries[20][0].end_offset - 1
    found = report(other, full=True)
    assert ("mismatch", 0, wrong, wrong + 1) in ranges(found.problems)
    assert any(one.why == "value differs from the log" for one in found.problems)


def test_only_what_the_log_still_has_is_compared(lake: Lake) -> None:
    partition = lake.log.partitions[0]
    partition.trim(17)
    found = report(lake, full=True)
    assert found.problems == [] and found.failed == []
    left = partition.last.end_offset - partition.pin().start.offset
    assert found.rows_compared == left + lake.log.partitions[1].last.end_offset
    assert found.rows_read == sum(p.last.end_offset for p in lake.log.partitions)


def test_what_the_log_has_behind_the_lake_is_counted_and_no_problem(lake: Lake) -> None:
    lake.log.partitions[0].publish(b"later", b"and later")
    found = report(lake)
    assert found.problems == [] and [p.behind for p in found.partitions] == [2, 0]


def test_a_topic_that_the_lake_does_not_have_is_a_problem(lake: Lake) -> None:
    found = verify(lake.commits.state(), lake.store, ["nothing"])
    assert [one.topic for one in found.problems] == ["nothing"]


def test_gaps_with_a_reason_are_told_and_no_problem(tmp_path: Path) -> None:
    log = FakeLog([Partition()])
    for _ in range(10):
        log.partitions[0].publish(b"a", b"b")
    log.partitions[0].lose(5)
    lake = Lake(tmp_path / "lake", log)
    once(log, lake.rounds(), Subject(("orders",)))
    found = report(lake, full=True)
    assert (found.problems, found.failed) == ([], [])
    assert [(gap.first, gap.end, gap.reason) for gap in found.missing] == [(8, 10, "lost")]
    assert found.rows_compared == 18


def test_messages_that_the_log_lost_later_are_still_in_the_lake(lake: Lake) -> None:
    partition = lake.log.partitions[0]
    lost = next(entry for entry, *_ in partition.entries[12:] if entry.count)
    partition.lose(lost.log_id)
    found = report(lake, full=True)
    assert (found.problems, found.failed) == ([], [])
    assert found.rows_compared == found.rows_read - lost.count


def test_what_is_in_neither_is_a_gap(lake: Lake) -> None:
    """The newest manifests are gone, and so is what the log had."""
    manifests = sorted((lake.folder / "manifest").iterdir())
    for path in manifests[len(manifests) // 2 :]:
        path.unlink()
    state = lake.commits.state()
    expected = set()
    for partition in lake.log.partitions:
        end = next(state.end(life) or 0 for life in state.files if life.partition == partition.number)
        partition.trim(len(partition.entries) - 1)
        expected.add(("gap", partition.number, end, partition.pin().start.offset))
    assert ranges(report(lake).problems) == expected


def test_a_partition_that_was_never_archived_is_listed(lake: Lake) -> None:
    new = Partition(number=2)
    for n in range(9):
        new.publish(b"%d" % n)
    lake.log.partitions.append(new)
    found = report(lake)
    assert found.problems == [] and "[0, 9) of the log are not in the lake yet" in found.notes[0]
    assert [(p.life.partition, p.first, p.end, p.files, p.behind) for p in found.partitions][2:] == [(2, 0, 0, 0, 9)]
    new.trim(4)
    found = report(lake)
    assert ranges(found.problems) == {("gap", 2, 0, 4)}
    assert [(p.first, p.behind) for p in found.partitions][2:] == [(4, 5)]


def test_a_lake_that_has_only_former_lives_of_a_topic_is_a_gap(lake: Lake) -> None:
    new = Partition(number=0, uid=0x999)
    lake.log.partitions[:] = [new]
    assert report(lake).problems == [], "nothing was published to it"
    new.publish(b"a", b"b")
    new.publish(b"c")
    found = report(lake)
    assert ranges(found.problems) == {("gap", 0, 0, 3)} and "uid 0000000000000abc" in found.problems[0].why
    new.trim(1)
    assert ranges(report(lake).problems) == {("gap", 0, 0, 2), ("gap", 0, 2, 3)}


@pytest.mark.parametrize("batches", [1, 5])
def test_what_retention_takes_while_everything_is_read_is_compared_no_more(lake: Lake, batches: int) -> None:
    partition = lake.log.partitions[0]
    found = report(lake, full=True, meanwhile=lambda: partition.trim(batches))
    assert (found.problems, found.failed) == ([], [])
    assert found.rows_read == sum(p.last.end_offset for p in lake.log.partitions) > found.rows_compared > 0


def test_splits_name_the_hold(lake: Lake) -> None:
    seen: list[str] = []

    def check(work: list[tuple[LakeFile, Split | None]]) -> list[CheckedRows]:
        seen.extend(split.hold_id for _, split in work if split)
        return [CheckedRows() for _ in work]

    def read(split: Split, tell: Tell) -> Iterator[Verified]:
        seen.append(split.hold_id)
        return lake.log.read(split, tell)

    pins = lake.log.snapshot(SnapshotRequest(("orders",))).pins
    verify(lake.commits.state(), lake.store, ["orders"], pins=pins, read=read, check=check, hold_id="h7")
    assert len(seen) > 4 and set(seen) == {"h7"}


def test_what_was_recorded_as_missing_and_is_in_the_log_is_a_problem(tmp_path: Path) -> None:
    log = FakeLog([Partition()])
    partition = log.partitions[0]
    for _ in range(10):
        partition.publish(b"a", b"b")
    before = partition.entries[4]
    partition.lose(5)
    lake = Lake(tmp_path / "lake", log)
    once(log, lake.rounds(), Subject(("orders",)))
    assert report(lake).problems == []
    partition.entries[4] = before
    problems = report(lake).problems
    assert ranges(problems) == {("mismatch", 0, 8, 10)} and "recorded as missing (lost), but the log" in problems[0].why
    partition.trim(5)
    assert report(lake).problems == []


def test_files_that_no_manifest_names_are_noted(lake: Lake) -> None:
    stray = lake.folder / replace(files(lake)[0], topic_uid=9).path
    stray.write_bytes(b"x")
    found = report(lake)
    assert found.problems == [] and "1 files are not in any manifest" in found.notes[0]


def test_the_end_of_each_unproven_piece_is_an_anchor(lake: Lake) -> None:
    whole = files(lake)
    assert list(anchors(whole)) == [whole[-1]]
    assert list(anchors([*whole[:2], *whole[3:]])) == [whole[1], whole[-1]]
    unknown = [whole[0], replace(whole[1], chain_before=None), *whole[2:]]
    assert list(anchors(unknown)) == [whole[0], whole[-1]]


def test_a_partition_with_two_days_is_one_chain(tmp_path: Path) -> None:
    log = FakeLog([Partition()])
    for n in range(8):
        log.partitions[0].publish(b"m", at_ns=20_000 * DAY + n * DAY // 3)
        log.partitions[0].publish(at_ns=20_000 * DAY + n * DAY // 3 + 1)
    lake = Lake(tmp_path / "lake", log, split_bytes=1 << 20)
    once(log, lake.rounds(), Subject(("orders",)))
    assert len(files(lake)) == 3
    assert report(lake, full=True).problems == []
    assert list(anchors(files(lake))) == files(lake)[-1:]


def test_a_manifest_that_is_gone_is_refused(lake: Lake) -> None:
    from pyspark_nsqha.lake.commits.manifest import BadManifest

    (lake.folder / "manifest/00000000000000000001.json").unlink()
    with pytest.raises(BadManifest, match=r"00000000000000000001.json is missing in .* but later ones exist"):
        ManifestCommits(lake.store).state()


def test_what_was_written_by_a_task_is_what_is_checked(lake: Lake) -> None:
    """A file written anew, without a crash, is the same one."""
    state = lake.commits.state()
    before = {path: lake.store.read(path) for path in lake.named()}
    for partition in lake.log.partitions:
        from pyspark_nsqha.lake.plan import pieces

        hints = [(file.first, file.end) for file in files(lake, partition.number)]
        for piece in pieces(partition.pin(cuts=True), LakeState(), split_bytes=lake.split_bytes):
            if (piece.split.first, piece.split.end) in hints:
                write_piece(piece.split, lake.store, lake.log.read, run="again")
    assert before == {path: lake.store.read(path) for path in lake.named()}
    assert state.addition() == Addition(state.addition().files)
