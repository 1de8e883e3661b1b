"""Recovery of folders: anchors, pairs that can not be used, what a roll or a removal left, what is not ours."""

from __future__ import annotations

import random

import pytest

from nsqha.commitlog.corruption.verify import verify
from nsqha.commitlog.entry import ENTRY_BYTES, VERSION_AT
from nsqha.commitlog.files.pairs import unlink_some
from nsqha.commitlog.log import LogLimits, Place
from nsqha.commitlog.reading.lookup import LogReader
from nsqha.commitlog.recovery import settle
from nsqha.errors import ConfigError, LogCorrupt, Poisoned
from nsqha.frames import EPOCH_START, PROGRESS
from tests.sim.storage import Crashed, SimStorage
from tests.unit.commitlog.damaged_logs import COMMITLOG, ONE_PAIR, SEGMENT, Built
from tests.unit.commitlog.logs import (
    DIRECTORY,
    IDENTITY,
    SMALL,
    add,
    contents,
    drop_pairs,
    event,
    new_log,
    reopen,
    roll,
    sync,
)


def test_an_empty_folder_is_a_new_log() -> None:
    recovery = reopen(SimStorage(), known=False)
    assert recovery.report.created and recovery.report.new_log_uid and not recovery.report.verdict.alarm
    assert recovery.log.end.log_id == 1


def test_a_folder_that_lost_everything_is_an_alarm() -> None:
    recovery = reopen(SimStorage(), local_durable=100)
    assert recovery.report.created and recovery.report.new_log_uid and recovery.report.verdict.alarm
    assert not recovery.report.clean


@pytest.mark.parametrize("first", ["genesis", "copy"])
def test_a_lost_anchor_is_derived_again(first: str) -> None:
    built = Built(limits=LogLimits(segment_bytes=800))
    pair = built.log.files.pairs[0 if first == "genesis" else -2]
    file = built.storage.open(pair.path(".commitlog"))
    file.pwrite(bytes(ENTRY_BYTES), 0)
    file.sync()
    recovery = reopen(built.storage, local_durable=11, limits=built.limits)
    assert recovery.report.restored_anchors == 1
    assert contents(recovery.log) == built.contents
    assert verify(recovery.log).problems == ()


@pytest.mark.parametrize(("left", "told"), [(0, 0), (9, 0), (ENTRY_BYTES, 1)])
def test_an_anchor_that_a_crash_cut_short_is_no_damage_but_a_flipped_one_is(left: int, told: int) -> None:
    built = Built(limits=LogLimits(segment_bytes=800))
    roll(built.log)
    pair = built.log.files.pairs[-1]
    built.shorten(pair.path(".commitlog"), left)
    if left == ENTRY_BYTES:
        built.storage.flip(pair.path(".commitlog"), 100)
    looked_at = verify(LogReader.open(built.storage, DIRECTORY, IDENTITY))
    assert len(looked_at.problems) == told and looked_at.batches == 10
    recovery = reopen(built.storage, local_durable=11, limits=built.limits)
    assert (recovery.report.restored_anchors, recovery.report.clean) == (told, not told)
    assert contents(recovery.log) == built.contents and verify(recovery.log).problems == ()


@pytest.mark.parametrize("lost", [1, 3])
def test_the_anchor_of_the_oldest_pair_can_do_without_the_one_before(lost: int) -> None:
    built = Built(limits=LogLimits(segment_bytes=800))
    drop_pairs(built.log, built.log.pairs[1].first)
    kept = contents(built.log)
    file = built.storage.open(built.log.files.pairs[0].path(".commitlog"))
    file.pwrite(bytes(ENTRY_BYTES * lost), 0)
    file.sync()
    recovery = reopen(built.storage, local_durable=11, limits=built.limits)
    log = recovery.log
    assert (log.start, log.end) == (built.log.start, built.log.end)
    for entry, data in kept[lost:]:
        assert (log.entry(entry.log_id), log.read(entry)) == (entry, data)
    for offset in range(kept[lost][0].first_offset, log.end.offset):
        assert log.batch_at(offset) is not None


def test_a_partition_of_which_no_commitlog_can_be_read_stays_closed() -> None:
    built = Built(limits=LogLimits(segment_bytes=800))
    drop_pairs(built.log, built.log.end)
    built.shorten(built.log.files.pairs[0].path(".commitlog"), 0)
    with pytest.raises(LogCorrupt, match="restore"):
        reopen(built.storage, local_durable=11, limits=built.limits)


def test_a_replica_of_which_no_commitlog_can_be_read_begins_anew_under_another_name() -> None:
    built = Built(limits=LogLimits(segment_bytes=800))
    drop_pairs(built.log, built.log.end)
    position = built.log.files.pairs[0].position
    built.shorten(built.log.files.pairs[0].path(".commitlog"), 0)
    recovery = reopen(built.storage, local_durable=0, limits=built.limits, replicas=2)
    assert recovery.log.end.log_id == 1 and recovery.report.new_log_uid
    names = built.storage.list_dir(DIRECTORY)
    assert f"{position:020d}.segment.unreadable" in names, "the bytes are kept"


def test_a_pair_that_can_not_be_used_is_set_aside_so_that_it_never_comes_back() -> None:
    built = Built(limits=LogLimits(segment_bytes=800), batches=8)
    before, last = built.log.files.pairs[-2:]
    built.flip_entry(last.anchor.log_id, 1, 2)
    built.shorten(last.path(".commitlog"), 0)
    recovery = reopen(built.storage, local_durable=9, limits=built.limits)
    assert recovery.report.unreadable == (last.position,) and recovery.report.verdict.alarm
    names = built.storage.list_dir(DIRECTORY)
    assert [name for name in names if name.endswith(".unreadable")] == [
        f"{last.position:020d}.commitlog.unreadable",
        f"{last.position:020d}.segment.unreadable",
    ]
    log = recovery.log
    assert log.files.pairs[-1].position == before.position
    assert log.end == Place(9, last.first.offset, last.position), "where the lost pair began"
    add(log, b"on", seconds=100)
    sync(log)
    again = reopen(built.storage, local_durable=log.end.log_id, limits=built.limits)
    assert again.report.clean and contents(again.log) == contents(log)


def test_what_a_crash_left_of_a_roll_goes() -> None:
    built = Built()
    left = built.storage.open(f"{DIRECTORY}/00000000000000009999.commitlog", create=True)
    left.pwrite(b"half an anchor", 0)
    built.storage.open(f"{DIRECTORY}/00000000000000009999.segment", create=True)
    recovery = reopen(built.storage, local_durable=11, limits=ONE_PAIR)
    assert contents(recovery.log) == built.contents
    assert built.storage.list_dir(DIRECTORY) == ["00000000000000000000.commitlog", "00000000000000000000.segment"]


def test_a_pair_that_was_being_dropped_goes() -> None:
    built = Built(limits=LogLimits(segment_bytes=400))
    first = built.log.files.pairs[0]
    built.storage.rename(first.path(".commitlog"), first.path(".dropping"))
    recovery = reopen(built.storage, local_durable=11, limits=built.limits)
    assert recovery.log.start == built.log.files.pairs[1].first
    assert len(built.storage.list_dir(DIRECTORY)) == 2 * len(recovery.log.pairs)


def test_half_a_log_that_goes_as_a_whole_never_passes_for_one_that_was_shortened() -> None:
    """The partition may come back to this node before it starts again, and the log would have lost its beginning."""
    whole = begun = 0
    for n in range(1, 40):
        rng = random.Random(n)
        built = Built(limits=SMALL, batches=200)
        assert len(built.log.pairs) > 3
        built.log.close()
        built.storage.crash_after(n)
        try:
            while unlink_some(built.storage, DIRECTORY, 3):
                pass
        except Crashed:
            pass
        recovery = reopen(built.storage.crash(rng), local_durable=built.log.end.log_id, replicas=3)
        if recovery.report.created:
            begun += 1
            assert recovery.report.new_log_uid and recovery.log.end.log_id == 1
        else:
            whole += 1
            assert contents(recovery.log) == built.contents
    assert whole and begun


def test_files_that_do_not_belong_here_are_left_alone() -> None:
    built = Built()
    built.storage.open(f"{DIRECTORY}/notes.txt", create=True)
    assert reopen(built.storage, local_durable=11, limits=ONE_PAIR).report.clean
    assert "notes.txt" in built.storage.list_dir(DIRECTORY)


def test_sectors_that_can_not_be_read_are_damage() -> None:
    built = Built()
    built.storage.spoil(SEGMENT, 1)
    recovery = reopen(built.storage, local_durable=1, limits=ONE_PAIR)
    first = recovery.report.verdict.cut_at
    assert first is not None
    assert built.entry(first).position < 1024 and built.entry(first).end_position > 512


def test_epochs_are_rebuilt_from_the_frame_that_starts_one() -> None:
    storage = SimStorage()
    log = new_log(storage, limits=ONE_PAIR)
    add(log, b"1")
    add(log, b"2", events=event(b"", EPOCH_START), epoch=2)
    add(log, b"3", events=event(b"", PROGRESS), epoch=2)
    sync(log)
    was = contents(log)
    file = storage.open(COMMITLOG)
    file.pwrite(bytes(ENTRY_BYTES), 2 * ENTRY_BYTES)
    file.sync()
    recovery = reopen(storage, local_durable=4, limits=ONE_PAIR)
    assert [damage.what for damage in recovery.report.damage] == ["proven"]
    assert contents(recovery.log) == was


def test_a_failed_sync_during_recovery_does_not_report_an_end() -> None:
    built = Built()
    built.storage.fail("sync")
    with pytest.raises(Poisoned):
        reopen(built.storage, local_durable=11, limits=ONE_PAIR)


# ---- what it costs


def test_a_log_that_is_whole_is_synced_once_and_one_that_was_changed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    acting = SimStorage.acting

    def noted(storage: SimStorage, operation: str, path: str) -> None:
        if operation == "sync":
            synced.append(path.rpartition(".")[2])
        acting(storage, operation, path)

    built = Built()
    monkeypatch.setattr(SimStorage, "acting", noted)
    log = reopen(built.storage, local_durable=11, limits=ONE_PAIR).log
    assert synced == ["segment", "commitlog"], "a start with a thousand logs waits for each of them"
    pair = log.files.pair_of(10)
    pair.segment.pwrite(b"torn", log.end.position - pair.position)
    synced.clear()
    assert reopen(built.storage, local_durable=11, limits=ONE_PAIR).report.trimmed_bytes == 4
    assert synced == ["segment", "commitlog"] * 2


def test_several_logs_are_settled_before_the_first_is_recovered() -> None:
    built = Built()
    was = built.contents
    settled = settle(built.storage, DIRECTORY, IDENTITY)
    built.storage.fail("sync", times=99)  # so recovery does not wait for the disk
    log = reopen(built.storage, local_durable=11, limits=ONE_PAIR, settled=settled).log
    assert contents(log) == was and log.local_durable == log.end.log_id


# ---- what a later version wrote


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("field", ["version", "crc_kind"])
@pytest.mark.parametrize("which", [1, 4, 10, "anchor"])
def test_a_batch_of_a_later_version_is_refused_and_nothing_is_changed(
    which: int | str, field: str, replicas: int
) -> None:
    built = Built(limits=LogLimits(segment_bytes=800)) if which == "anchor" else Built()
    if which == "anchor":
        pair = built.log.files.pairs[-1]
        path, at, entry = pair.path(".commitlog"), 0, pair.anchor
    else:
        assert isinstance(which, int)
        path, at, entry = COMMITLOG, built.log.files.pair_of(which).slot(which), built.entry(which)
    file = built.storage.open(path)
    file.pwrite(entry._replace(**{field: 2}).encode(), at)
    file.sync()
    before = built.storage.contents()
    said = rf"^{DIRECTORY}: batch {entry.log_id} has version .*; start a newer version$"
    with pytest.raises(ConfigError, match=said):
        reopen(built.storage, replicas=replicas, local_durable=11, limits=built.limits)
    assert built.storage.contents() == before


def test_bytes_that_do_not_verify_are_of_no_later_version() -> None:
    built = Built()
    built.flip_entry(4, VERSION_AT, VERSION_AT + 1)
    (cut,) = reopen(built.storage, local_durable=1, limits=built.limits).report.cuts
    assert (cut.at.log_id, cut.why) == (4, "torn"), "as any other end that does not verify"
