"""What every storage promises: one suite over the machine's file system, memory and the simulated disk."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsqha.commitlog.storage import MemStorage, OsStorage, Storage
from nsqha.errors import ConfigError, Poisoned
from tests.fakes.disk import FaultyStorage
from tests.sim.storage import SimStorage

Place = tuple[Storage, str]


MAKE: dict[str, Callable[[], Storage]] = {
    "os": OsStorage,
    "memory": MemStorage,
    "simulated": SimStorage,
    "faulty": FaultyStorage,
}


@pytest.fixture(params=[*MAKE])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    storage = MAKE[request.param]()
    top = f"{tmp_path}/top" if request.param == "os" else "top"
    storage.make_dirs(top)
    return storage, top


def test_a_file_is_what_was_written_to_it(place: Place) -> None:
    storage, top = place
    file = storage.open(f"{top}/f", create=True)
    assert file.size() == 0
    file.pwrite(b"hello", 0)
    file.pwrite(bytearray(b"world"), 5)
    file.pwrite(memoryview(b"HE"), 0)
    assert file.pread(100, 0) == b"HElloworld"
    assert file.pread(3, 5) == b"wor"
    assert file.pread(3, 10) == b""
    assert file.pread(5, 100) == b""
    assert file.size() == 10


def test_a_gap_reads_as_zeros(place: Place) -> None:
    storage, top = place
    file = storage.open(f"{top}/f", create=True)
    file.pwrite(b"x", 3)
    assert file.pread(10, 0) == b"\0\0\0x"


def test_truncating_shortens_and_lengthens_with_zeros(place: Place) -> None:
    storage, top = place
    file = storage.open(f"{top}/f", create=True)
    file.pwrite(b"abcdef", 0)
    file.truncate(3)
    assert file.pread(10, 0) == b"abc"
    file.truncate(5)
    assert file.pread(10, 0) == b"abc\0\0"


def test_allocated_space_is_zeros_and_keeps_what_is_there(place: Place) -> None:
    storage, top = place
    file = storage.open(f"{top}/f", create=True)
    file.pwrite(b"abc", 0)
    file.allocate(5)
    assert file.pread(10, 0) == b"abc\0\0"
    file.allocate(2)
    assert file.size() == 5


def test_handles_of_one_name_share_the_bytes(place: Place) -> None:
    storage, top = place
    one = storage.open(f"{top}/f", create=True)
    two = storage.open(f"{top}/f", create=True)
    one.pwrite(b"abc", 0)
    assert two.pread(3, 0) == b"abc"
    assert storage.open(f"{top}/f", read_only=True).pread(3, 0) == b"abc"


def test_sync_close_and_cache_calls_may_be_repeated(place: Place) -> None:
    storage, top = place
    file = storage.open(f"{top}/f", create=True)
    file.pwrite(b"abc", 0)
    for _ in range(2):
        file.sync()
        file.drop_cache()
        storage.sync_dir(top)
    assert file.pread(3, 0) == b"abc"
    file.close()
    file.close()


def test_a_missing_file_is_an_error_unless_created(place: Place) -> None:
    storage, top = place
    with pytest.raises(FileNotFoundError):
        storage.open(f"{top}/f")
    with pytest.raises(FileNotFoundError):
        storage.open(f"{top}/no/f", create=True)
    with pytest.raises(FileNotFoundError):
        storage.remove(f"{top}/f")
    with pytest.raises(FileNotFoundError):
        storage.list_dir(f"{top}/no")
    with pytest.raises(FileNotFoundError):
        storage.rename(f"{top}/f", f"{top}/g")
    assert not storage.exists(f"{top}/f")


def test_names_are_listed_renamed_and_removed(place: Place) -> None:
    storage, top = place
    storage.make_dirs(f"{top}/d/e")
    storage.make_dirs(f"{top}/d/e")
    for name in ("b", "a", "d/c"):
        storage.open(f"{top}/{name}", create=True).pwrite(name.encode(), 0)
    assert storage.list_dir(top) == ["a", "b", "d"]
    assert storage.list_dir(f"{top}/d") == ["c", "e"]
    storage.rename(f"{top}/a", f"{top}/b")
    assert storage.list_dir(top) == ["b", "d"]
    assert storage.open(f"{top}/b").pread(1, 0) == b"a"
    storage.remove(f"{top}/b")
    assert storage.list_dir(top) == ["d"]
    storage.remove_tree(f"{top}/d")
    storage.remove_tree(f"{top}/d")
    assert storage.list_dir(top) == []
    assert not storage.exists(f"{top}/d/e")


def test_the_folder_of_all_topics_is_not_synced_again_for_each_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, synced = OsStorage(), list[str]()
    monkeypatch.setattr(storage, "sync_dir", lambda path: synced.append(os.path.relpath(path, tmp_path)))
    for topic in ("a", "b", "c"):
        storage.make_dirs(f"{tmp_path}/topics/{topic}/0")
    first, second = ["..", ".", "topics", "topics/a"], [".", "topics", "topics/b"]
    assert synced == [*first, *second, "topics", "topics/c"]
    synced.clear()
    other = OsStorage()  # of another process: the one that made `topics` may have been killed before its sync
    monkeypatch.setattr(other, "sync_dir", storage.sync_dir)
    other.make_dirs(f"{tmp_path}/topics/d")
    assert synced == [".", "topics"]


def test_folders_may_be_made_before_their_names_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, synced = OsStorage(), list[str]()
    monkeypatch.setattr(storage, "sync_dir", lambda path: synced.append(os.path.relpath(path, tmp_path)))
    for topic in ("a", "b", "b"):  # also where they are: who made them may not have come to sync them
        above = storage.begin_dirs(f"{tmp_path}/topics/{topic}/0", 2)
        assert above == [f"{tmp_path}/topics/{topic}", f"{tmp_path}/topics"]
        assert storage.list_dir(above[0]) == ["0"]
    assert synced == ["..", "."], "what is above, once"
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        storage.begin_dirs(f"{tmp_path}/file", 1)


def test_folders_are_made_alike_everywhere(place: Place) -> None:
    storage, top = place
    assert storage.begin_dirs(f"{top}/d/e", 2) == [f"{top}/d", *([top] if top else [])]
    assert storage.begin_dirs(f"{top}/d/e", 1) == [f"{top}/d"]
    assert storage.list_dir(f"{top}/d") == ["e"] and storage.list_dir(top) == ["d"]


def test_a_removed_file_lives_on_for_those_who_hold_it(place: Place) -> None:
    storage, top = place
    file = storage.open(f"{top}/f", create=True)
    file.pwrite(b"abc", 0)
    storage.remove(f"{top}/f")
    assert file.pread(3, 0) == b"abc"
    file.sync()


def test_a_lock_is_held_once(place: Place) -> None:
    storage, top = place
    lock = storage.lock(f"{top}/lock")
    with pytest.raises(ConfigError, match="another process"):
        storage.lock(f"{top}/lock")
    lock.close()
    storage.lock(f"{top}/lock").close()


@pytest.mark.parametrize("storage", [OsStorage(), SimStorage(), FaultyStorage()])
def test_a_file_whose_sync_failed_is_poisoned_for_ever(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    storage.make_dirs(str(tmp_path))
    file, other = (storage.open(str(tmp_path / name), create=True) for name in "ab")
    for each in (file, other):
        each.pwrite(b"abc", 0)
        each.sync()
    file.pwrite(b"def", 3)
    match storage:
        case OsStorage():
            monkeypatch.setattr(os, "fdatasync", refuse)
        case FaultyStorage():
            storage.failing = "sync"
        case _:
            storage.fail("sync", "a", times=1)
    with pytest.raises(Poisoned):
        file.sync()
    monkeypatch.undo()
    if isinstance(storage, FaultyStorage):
        storage.failing = ""
    for _ in range(2):
        with pytest.raises(Poisoned):
            file.sync()
    other.sync()


@pytest.mark.parametrize(("cut", "read"), [(0, b"new"), (1, bytes(3))])
def test_what_a_failed_sync_lost_in_the_simulation_is_lost_until_it_is_cut(cut: int, read: bytes) -> None:
    """The pages behind a cut are others. Whoever opens the file anew is not told of the failure."""
    storage = SimStorage(random.Random(1))
    storage.make_dirs("/d")
    file = storage.open("/d/a", create=True)
    file.pwrite(b"old", 0)
    storage.fail("sync", "a")
    with pytest.raises(Poisoned):
        file.sync()
    again = storage.open("/d/a")
    again.truncate(cut)
    again.pwrite(b"new", 0)
    again.sync()
    again.drop_cache()
    assert again.pread(3, 0) == read


def test_a_write_that_a_full_disk_refuses_changes_nothing_and_names_the_cause() -> None:
    storage = FaultyStorage("top")
    file = storage.open("top/f", create=True)
    file.pwrite(b"abc", 0)
    storage.bytes_max = 4
    for refused in (lambda: file.pwrite(b"de", 3), lambda: file.allocate(5)):
        with pytest.raises(OSError, match="No space left") as caught:
            refused()
        assert caught.value.errno == errno.ENOSPC
    file.pwrite(b"ABCD", 0)
    assert file.pread(10, 0) == b"ABCD" and storage.used == 4
    storage.remove("top/f")
    storage.open("top/g", create=True).pwrite(b"efgh", 0)
    storage.failing = "pwrite"
    with pytest.raises(OSError, match="No space left"):
        storage.open("top/g").pwrite(b"x", 0)
    assert storage.open("top/g").pread(10, 0) == b"efgh"


def test_of_two_syncs_at_once_that_fail_no_one_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports a lost write to the first who asks; a roll asks while a disk round does."""
    file = OsStorage().open(str(tmp_path / "a"), create=True)
    asked, told, calls = threading.Event(), threading.Event(), []

    def fdatasync(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            asked.set()
            assert told.wait(10)
            raise OSError(errno.EIO, "the first is told")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    outcomes: list[str] = []

    def sync() -> None:
        try:
            file.sync()
        except Poisoned:
            outcomes.append("failed")
        else:
            outcomes.append("synced")

    first, second = threading.Thread(target=sync), threading.Thread(target=sync)
    first.start()
    assert asked.wait(10)
    second.start()
    second.join(0.05)
    told.set()
    for thread in (first, second):
        thread.join(10)
    assert outcomes == ["failed", "failed"]
