"""Entries of a log that nobody else has, written anew: from memory, from their frames, or marked; and not too soon."""

from __future__ import annotations

import errno
import random

import pytest

from nsqha.commitlog.corruption.verify import verify
from nsqha.commitlog.entry import BROKEN_CHAIN, FAULTY, Entry
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.errors import AppendFailed, Poisoned
from tests.sim.storage import Crashed
from tests.unit.commitlog.damaged_logs import COMMITLOG, ONE_PAIR, SEGMENT, Built
from tests.unit.commitlog.logs import contents, reopen

PAIRS = LogLimits(segment_bytes=500)


def built(limits: LogLimits = ONE_PAIR, *, held: bool = False) -> Built:
    """Ten batches; nothing of them is in memory, unless `held`."""
    log = Built(limits=limits)
    if not held:
        log.log.shelf.clear()
    return log


def rebuild(log: PartitionLog, first: int = 1, end: int = 99) -> list[str]:
    """All that can be done; what became of each range."""
    outcomes = []
    while (job := log.repair.rebuilding(first, end)) is not None:
        done = job.run()
        assert done is not None
        outcomes.append(done.what)
    return outcomes


# ---- memory


@pytest.mark.parametrize("limits", [ONE_PAIR, PAIRS], ids=["one pair", "pairs"])
def test_what_memory_has_is_written_back_as_it_was(limits: LogLimits) -> None:
    log = built(limits, held=True)
    for log_id in (3, 4, 9):
        log.flip_entry(log_id)
        log.flip_data(log_id)
    assert set(rebuild(log.log)) == {"proven"}
    log.log.shelf.clear()
    assert contents(log.log) == log.contents and not verify(log.log).problems
    image = log.storage.crash(random.Random(1))
    assert contents(reopen(image, local_durable=11, limits=limits).log) == log.contents


def test_frames_that_rot_while_memory_has_them_are_written_back_too() -> None:
    log = built(held=True)
    log.flip_data(6)
    assert rebuild(log.log, 6, 7) == ["proven"]
    log.log.shelf.clear()
    assert contents(log.log) == log.contents


def test_in_front_of_what_memory_has_entries_are_rebuilt_from_their_frames() -> None:
    log = built(held=True)
    for _ in range(6):
        log.log.shelf.drop_oldest()
    for log_id in (5, 6, 7, 8):
        log.flip_entry(log_id)
    log.flip_data(8)
    assert rebuild(log.log) == ["proven", "proven"]
    log.log.shelf.clear()
    assert contents(log.log) == log.contents


# ---- what is not so any more


@pytest.mark.parametrize("path", [COMMITLOG, SEGMENT])
def test_nothing_is_overwritten_that_can_be_read_again(path: str) -> None:
    """A path to the disk that is away for a moment: all that it reads is zeros."""
    log = built()
    files = log.storage.contents()
    log.storage.spoil(COMMITLOG, 1)
    job = log.log.repair.rebuilding(1, 11)
    assert job is not None
    log.storage.unspoil(COMMITLOG)
    if path == SEGMENT:
        for sector in range(4):
            log.storage.spoil(SEGMENT, sector)
    assert job.run() is None
    assert log.storage.contents() == files and log.log.repair.rebuilding(1, 11) is None


def test_a_neighbour_that_can_not_be_read_any_more_is_looked_for_again() -> None:
    log = built()
    log.flip_entry(4)
    job = log.log.repair.rebuilding(4, 5)
    assert job is not None
    files = log.storage.contents()
    log.storage.spoil(COMMITLOG, 0)
    assert job.run() is None and log.storage.contents() == files
    log.storage.unspoil(COMMITLOG)
    assert rebuild(log.log) == ["proven"] and contents(log.log) == log.contents


@pytest.mark.parametrize("path", [COMMITLOG, SEGMENT])
def test_nothing_is_faulty_that_can_not_be_read_now(path: str) -> None:
    log = built()
    log.flip_entry(8)
    if path == COMMITLOG:
        log.flip_data(8)
        log.storage.flip(SEGMENT, log.entry(8).position * 8)  # the size of a frame
    files = log.storage.contents()
    for sector in range(4):
        log.storage.spoil(path, sector if path == SEGMENT else 1)
    job = log.log.repair.rebuilding(1, 11)
    assert job is not None
    with pytest.raises(AppendFailed, match="unreadable sector"):
        job.run()
    assert log.storage.contents() == files
    log.storage.unspoil(path)
    assert rebuild(log.log) == ["faulty" if path == COMMITLOG else "proven"]
    assert path == COMMITLOG or contents(log.log) == log.contents


def test_a_start_goes_on_without_what_can_not_be_read() -> None:
    log = built()
    log.flip_entry(8)
    for sector in range(4):
        log.storage.spoil(SEGMENT, sector)
    job = log.log.repair.rebuilding(1, 11, starting=True)
    assert job is not None and (done := job.run()) is not None and done.what == "faulty"
    assert log.log.entry(8).flags & FAULTY


# ---- a disk that refuses


@pytest.mark.parametrize("operation", ["pwrite", "sync"])
def test_a_disk_that_refuses_is_asked_again_unless_it_is_a_sync(operation: str) -> None:
    log = built()
    log.flip_entry(5)
    log.storage.fail(operation, COMMITLOG, code=errno.ENOSPC)
    job = log.log.repair.rebuilding(5, 6)
    assert job is not None
    with pytest.raises(AppendFailed if operation == "pwrite" else Poisoned):
        job.run()
    if operation == "pwrite":
        rebuild(log.log)  # unless the write that failed wrote all
        assert contents(log.log) == log.contents and not verify(log.log).problems


# ---- crashes


@pytest.mark.parametrize("what", ["proven", "faulty", "held", "missing"])
@pytest.mark.parametrize("seed", range(6))
def test_broken_off_at_any_moment_it_comes_to_the_same(what: str, seed: int) -> None:
    """A start finds damage still, or none, and does the rest of it."""

    def damaged() -> Built:
        log = built(PAIRS, held=what == "held")
        first = log.log.files.pairs[1].first.log_id
        if what == "missing":
            log.log.files.pairs[1].release()
            log.storage.remove(log.log.files.pairs[1].path(".commitlog"))
            log.storage.sync_dir(log.log.directory)
        else:
            log.zero_entries(first, first + 2)
        if what == "faulty":
            log.storage.flip(log.file(first, ".segment"), 0)
        if what == "held":
            log.flip_data(first)
            log.flip_data(first + 1)
        return log

    undisturbed = damaged()
    assert rebuild(undisturbed.log) == ["faulty" if what == "faulty" else "proven"]
    expected = entries(undisturbed.log)
    for operations in range(1, 20):
        rng = random.Random(seed)
        log = damaged()
        log.storage.crash_after(operations)
        try:
            rebuild(log.log)
        except Crashed:
            after = reopen(log.storage.crash(rng), local_durable=11, limits=PAIRS).log
            rebuild(after)
            if what == "held":  # memory went with the process: frames that were not on the disk by then are lost
                both = zip(entries(after), expected, strict=True)
                assert all(one == other or one.flags & BROKEN_CHAIN for one, other in both)
            else:
                assert entries(after) == expected
                assert verify(after).problems == () or what == "faulty"
        else:
            assert entries(log.log) == expected
            assert operations > 2
            return
    raise AssertionError("it does not come to an end")


def entries(log: PartitionLog) -> list[Entry]:
    return list(log.entries(log.start.log_id, log.end.log_id))


# ---- missing files


@pytest.mark.parametrize("suffix", [".commitlog", ".segment"])
def test_a_file_that_is_gone_is_made_anew_for_good(suffix: str) -> None:
    log = built(PAIRS)
    old = log.log.files.pairs[1]
    first, end = old.first.log_id, log.log.end_of(old).log_id
    if suffix == ".segment":
        log.zero_entries(first, end)
    old.release()
    log.storage.remove(old.path(suffix))
    log.storage.sync_dir(old.directory)
    assert rebuild(log.log) == ["proven" if suffix == ".commitlog" else "faulty"]
    image = log.storage.crash(random.Random(3))
    found = reopen(image, local_durable=11, limits=PAIRS)
    assert image.exists(old.path(suffix)) and found.report.restored_anchors == 0
    if suffix == ".commitlog":
        assert contents(found.log) == log.contents and not verify(found.log).problems
    else:
        bad = [(p.first.log_id, p.end.log_id) for p in verify(found.log).problems]
        assert bad and bad[0][0] == first


def test_files_that_can_not_be_made_now_are_made_later() -> None:
    log = built(PAIRS)
    old = log.log.files.pairs[1]
    old.release()
    log.storage.remove(old.path(".commitlog"))
    log.storage.fail("create", old.path(".commitlog"), code=errno.ENOSPC)
    job = log.log.repair.rebuilding(1, 99)
    assert job is not None
    with pytest.raises(AppendFailed):
        job.run()
    assert rebuild(log.log) == ["proven"] and contents(log.log) == log.contents
