"""A process is killed, the next one goes on with what it left, and later the machine goes off.

What the first one did not come to sync is in the page cache for the second one to see, names of files too. What the
second one says is durable has to be so with all that it rests on.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
from pathlib import Path

import pytest

from nsqha.commitlog.entry import Entry
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.recordfile import RecordFile
from nsqha.commitlog.storage import OsStorage, parent
from tests.sim.storage import Crashed, SimStorage
from tests.unit.commitlog.logs import DIRECTORY, add, contents, new_log, reopen, roll, sync

LIMITS = LogLimits(segment_bytes=700)


def write_some(log: PartitionLog, acked: list[tuple[Entry, bytes]], batches: int) -> None:
    for n in range(batches):
        entry = add(log, b"%d" % n * 60)
        sync(log)
        acked.append((entry, bytes(log.read(entry))))
        if log.needs_roll:
            roll(log)


@pytest.mark.parametrize("seed", range(4))
def test_a_log_that_a_killed_process_left(seed: int) -> None:
    died = 0
    for n in range(1, 200):
        rng = random.Random(1000 * seed + n)
        storage = SimStorage(rng)
        acked: list[tuple[Entry, bytes]] = []
        storage.crash_after(n)
        try:
            write_some(new_log(storage, limits=LIMITS), acked, 12)
        except Crashed:
            died += 1
        storage.kill()
        log, report = (recovery := reopen(storage, local_durable=1, limits=LIMITS)).log, recovery.report
        assert not report.damage and not report.restored_anchors and not report.verdict.alarm, f"killed at change {n}"
        write_some(log, acked, rng.randrange(3))
        after = reopen(storage.crash(rng), local_durable=log.local_durable, limits=LIMITS)
        left = {entry.log_id: (entry, data) for entry, data in contents(after.log)}
        assert [left.get(entry.log_id) for entry, _ in acked] == acked, f"killed at change {n}"
        assert not after.report.damage and not after.report.restored_anchors
    assert died > 40


def of_a_killed_process(n: int, rng: random.Random) -> tuple[SimStorage, str]:
    """A node's disk on which a process was killed at the n-th change that a new log makes; which change that was."""
    storage = SimStorage(rng)
    storage.make_dirs(parent(parent(DIRECTORY)))
    storage.crash_after(n)
    change = ""
    try:
        new_log(storage)
    except Crashed as crashed:
        change = str(crashed)
    storage.kill()
    return storage, change


def write_one(log: PartitionLog) -> tuple[Entry, bytes]:
    entry = add(log, b"acknowledged")
    assert sync(log) == log.end.log_id
    return entry, bytes(log.read(entry))


@pytest.mark.parametrize("again", ["recovered", "made anew"])
def test_a_new_log_whose_process_was_killed_at_any_step(again: str) -> None:
    """What is OK'd by the next process is there after the power went: also the names that only the first one made."""
    changes: list[str] = []
    for n in range(1, 20):
        for seed in range(20):
            storage, change = of_a_killed_process(n, random.Random(seed))
            if again == "recovered":
                log, report = (recovery := reopen(storage)).log, recovery.report
                assert not report.damage and not report.restored_anchors and not report.verdict.alarm, change
            else:  # the record says that nothing was ever promised
                log = new_log(storage)
            acked = write_one(log)
            after = reopen(storage.crash(random.Random(seed)), local_durable=log.local_durable)
            assert contents(after.log) == [acked], change
            assert not after.report.damage and not after.report.verdict.alarm, change
        changes.append(change)
    made = [change.split(",")[0].replace(DIRECTORY, "0").replace("0" * 20, "") for change in changes if change]
    assert made == [
        "make_dir data/topics/topic-0",
        "make_dir 0",
        "create 0/.segment",
        "create 0/.commitlog",
        "pwrite 0/.commitlog",
        "sync 0/.commitlog",
        "sync 0/.segment",
        "sync_dir 0",
        "sync_dir data/topics/topic-0",
        "sync_dir data/topics",
    ]


def test_a_new_log_when_the_power_went_at_any_step() -> None:
    """It is there and empty, and another loss of power takes nothing of what is OK'd then."""
    for n in range(1, 20):
        for seed in range(20):
            left = of_a_killed_process(n, random.Random(seed))[0].crash(random.Random(seed))
            log, report = (recovery := reopen(left, local_durable=1)).log, recovery.report
            assert log.end.log_id == 1 and not report.verdict.alarm and not report.restored_anchors, f"change {n}"
            acked = write_one(log)
            after = reopen(left.crash(random.Random(seed)), local_durable=log.local_durable)
            assert contents(after.log) == [acked], f"change {n}"


def test_a_recovery_of_a_new_log_that_was_killed_as_well() -> None:
    for n in range(1, 20):
        for second in range(1, 20):
            storage, _ = of_a_killed_process(n, random.Random(n))
            storage.crash_after(second)
            try:
                reopen(storage)
            except Crashed:
                pass
            storage.kill()
            acked = write_one(log := reopen(storage).log)
            after = reopen(storage.crash(random.Random(second)), local_durable=log.local_durable)
            assert contents(after.log) == [acked], f"changes {n}, {second}"


def test_a_new_log_that_could_not_be_made_leaves_no_name_in_doubt() -> None:
    """The process goes on: who finds the folders later looks at the lowest name only, once there is an entry."""
    for operation, at_once in itertools.product(("create", "pwrite"), (True, False)):
        for seed in range(20):
            storage = SimStorage(random.Random(seed))
            storage.fail(operation, DIRECTORY, code=errno.ENOSPC)
            with pytest.raises(OSError):
                new_log(storage, at_once=at_once)
            assert not storage.list_dir(DIRECTORY)
            left = storage.crash(random.Random(seed))
            assert left.exists(DIRECTORY), "its name is durable"


def with_its_first_entries(n: int, rng: random.Random) -> tuple[SimStorage, list[tuple[Entry, bytes]], str]:
    """The disk of a lone node whose process was killed at the n-th change of a log that is made durable with its first
    entries; what a round had synced of it by then; which change that was."""
    storage, synced, change = SimStorage(rng), [], ""
    storage.make_dirs(parent(parent(DIRECTORY)))
    storage.crash_after(n)
    try:
        log = new_log(storage, at_once=False)
        written = [(entry := add(log, b"%d" % n), bytes(log.read(entry))) for n in range(2)]
        sync(log)
        synced = written
    except Crashed as crashed:
        change = str(crashed)
    return storage, synced, change


STEPS = 20  # more than there are


def test_a_log_before_its_first_round_when_the_power_went_at_any_step() -> None:
    """What a round has synced is there; all else is no damage, whatever is left of it."""
    for n, seed in itertools.product(range(1, STEPS), range(40)):
        storage, synced, change = with_its_first_entries(n, random.Random(seed))
        left = storage.crash(random.Random(seed))
        log, report = (recovery := reopen(left, local_durable=1)).log, recovery.report
        assert contents(log)[: len(synced)] == synced, change
        assert not report.damage and not report.restored_anchors and not report.verdict.alarm, change
        acked = [*contents(log), write_one(log)]
        after = reopen(left.crash(random.Random(seed)), local_durable=log.local_durable)
        assert contents(after.log) == acked, change


def test_a_log_before_its_first_round_whose_process_was_killed_at_any_step() -> None:
    """The next process finds entries under names that are not on the disk, and acknowledges more behind them."""
    changes: list[str] = []
    for n in range(1, STEPS):
        for seed in range(40):
            storage, _, change = with_its_first_entries(n, random.Random(seed))
            storage.kill()
            log, report = (recovery := reopen(storage, local_durable=1)).log, recovery.report
            assert not report.damage and not report.restored_anchors and not report.verdict.alarm, change
            acked = [*contents(log), write_one(log)]
            after = reopen(storage.crash(random.Random(seed)), local_durable=log.local_durable)
            assert contents(after.log) == acked, change
            assert not after.report.damage and not after.report.verdict.alarm, change
        changes.append(change)
    made = [change.split(",")[0].replace(DIRECTORY, "0").replace("0" * 20, "") for change in changes if change]
    assert made == [
        "make_dir data/topics/topic-0",
        "make_dir 0",
        "create 0/.segment",
        "create 0/.commitlog",
        "pwrite 0/.commitlog",
        *["pwrite 0/.segment", "pwrite 0/.commitlog"] * 2,
        "sync 0/.segment",
        "sync 0/.commitlog",
        "sync_dir 0",
        "sync_dir data/topics/topic-0",
        "sync_dir data/topics",
    ]


def test_only_the_first_round_of_a_log_has_the_names_of_its_folders() -> None:
    log = new_log(storage := SimStorage(random.Random(1)), at_once=False)
    assert log.unsynced() is None and not log.close_idle_files()
    add(log, b"a")
    first, second = log.unsynced(), log.unsynced()
    assert first is not None and second is not None and len(first.files) == len(second.files) == 5
    first.run()
    assert log.synced(first) == 2 and log.close_idle_files()
    add(log, b"b")
    later = log.unsynced()
    assert later is not None and len(later.files) == 2
    assert reopen(storage.crash(random.Random(1))).log.end.log_id >= 2


def test_a_log_that_rolls_before_its_first_round_has_made_its_names_durable() -> None:
    for seed in range(20):
        log = new_log(storage := SimStorage(random.Random(seed)), at_once=False)
        acked = [(entry := add(log, b"a"), bytes(log.read(entry)))]
        roll(log)
        assert contents(reopen(storage.crash(random.Random(seed)), local_durable=2).log) == acked


def test_a_record_file_that_a_killed_process_made_anew() -> None:
    for n in range(1, 10):
        for seed in range(8):
            storage = SimStorage(random.Random(seed))
            storage.make_dirs("d")
            file = RecordFile.create(storage, "d/f", b"one")
            storage.crash_after(n)
            try:
                file.replace(b"two")
            except Crashed:
                pass
            storage.kill()
            file, _ = RecordFile.load(storage, "d/f")
            file.append(b"acknowledged")
            left = RecordFile.inspect(storage.crash(random.Random(seed)), "d/f")
            assert left.payloads[-1] == b"acknowledged", f"killed at change {n}"


def test_a_folder_that_a_killed_process_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync_dir = OsStorage.sync_dir

    def note(self: OsStorage, path: str) -> None:
        synced.append(os.path.relpath(path, tmp_path))
        sync_dir(self, path)

    monkeypatch.setattr(OsStorage, "sync_dir", note)
    OsStorage().make_dirs(f"{tmp_path}/a/b/c")
    assert synced[-3:] == [".", "a", "a/b"], "each before anything is made in it"
    synced.clear()
    OsStorage().make_dirs(f"{tmp_path}/a/b/c")
    assert synced == ["a/b"]


def test_a_folder_whose_name_nobody_here_can_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that somebody else made, in a folder that may not be read; and the top of a file system."""

    def refuse(self: OsStorage, path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(OsStorage, "sync_dir", refuse)
    OsStorage().make_dirs(f"{tmp_path}/a")
    OsStorage().make_dirs("/")
    OsStorage().make_dirs("/proc")
    with pytest.raises(PermissionError):
        OsStorage().make_dirs(f"{tmp_path}/a/b")
