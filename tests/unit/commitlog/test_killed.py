"""A process is killed, the next one goes on with what it left, and later the machine goes off.

What the first one did not come to sync is in the page cache for the second one to see, names of files too. What the
second one says is durable has to be so with all that it rests on.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from nsqha.commitlog.entry import Entry
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.recordfile import RecordFile
from nsqha.commitlog.storage import OsStorage
from tests.sim.storage import Crashed, SimStorage
from tests.unit.commitlog.logs import add, contents, new_log, reopen, roll, sync

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
