"""The store: a file is there whole or not at all, in a folder and in an object store that refuses when it likes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from pyspark_nsqha.lake import store as module
from pyspark_nsqha.lake.archive import Subject, once
from pyspark_nsqha.lake.commits.commit import ManifestCommits
from pyspark_nsqha.lake.rounds import Rounds, RoundSettings
from pyspark_nsqha.lake.store import Exists, Store, StoreFailed
from pyspark_nsqha.lake.task import write_piece
from tests.unit.spark.lake_rig import FakeLog, Partition


class Objects(fs.FileSystemHandler):  # type: ignore[misc]
    """An object store in memory. It refuses writes once `room` uploads were made."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.memory = fs._MockFileSystem()
        self.room = room
        self.calls = 0
        self._comes: tuple[int, Callable[[], None]] | None = None

    def in_front_of(self, call: int, comes: Callable[[], None]) -> None:
        """Somebody else comes in front of this request, counted from the next one on."""
        self._comes = self.calls + call, comes

    def _called(self) -> None:
        self.calls += 1
        if self._comes is not None and self.calls > self._comes[0]:
            comes, self._comes = self._comes[1], None
            comes()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def get_type_name(self) -> str:
        return "objects"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        self._called()
        return self.memory.get_file_info(paths)

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        self._called()
        return self.memory.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self.memory.create_dir(path, recursive=recursive)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self._called()
        if self.room == 0:
            raise OSError(f"When uploading {path}: AWS Error ACCESS_DENIED\nduring PutObject: quota exceeded")
        self.room -= 1
        return self.memory.open_output_stream(path)

    def open_input_stream(self, path: str) -> Any:
        self._called()
        return self.memory.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        return self.memory.open_input_file(path)

    def delete_file(self, path: str) -> None:
        self._called()
        self.memory.delete_file(path)

    # What the handler has to have and the store never asks for.
    delete_dir = delete_dir_contents = delete_root_dir_contents = move = copy_file = open_append_stream = None


Objects.__abstractmethods__ = frozenset()


def objects(room: int = 1 << 30) -> tuple[Store, Objects]:
    handler = Objects(room)
    return Store("bucket/lake", fs.PyFileSystem(handler)), handler


@pytest.fixture(params=["folder", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(str(tmp_path / "lake")) if request.param == "folder" else objects()[0]


def test_what_was_written_is_read_and_listed(store: Store) -> None:
    store.write("data/a/x", b"1", run="r")
    store.write("data/b/y", b"22", run="r")
    store.write("data/a/x", b"333", run="r")
    assert store.read("data/a/x") == b"333"
    assert [(one.path, one.size) for one in store.list("data", recursive=True)] == [("data/a/x", 3), ("data/b/y", 2)]
    assert [one.path for one in store.list("data/a")] == ["data/a/x"]
    assert list(store.list("nothing")) == [] == list(store.list("tmp"))


def test_a_name_is_created_once(store: Store) -> None:
    store.create("manifest/1", b"one", run="r")
    with pytest.raises(Exists):
        store.create("manifest/1", b"two", run="r")
    assert store.read("manifest/1") == b"one"
    assert list(store.list("tmp")) == []


def test_what_is_not_there_is_said_and_removing_it_is_nothing(store: Store) -> None:
    store.remove("data/x")
    for look in (store.read, store.open):
        with pytest.raises(FileNotFoundError):
            look("data/x")


def test_of_two_that_create_one_name_in_an_object_store_one_succeeds() -> None:
    """The other one comes in front of each request of the first."""
    at, outcomes = 0, set()
    while True:
        store, handler = objects()
        other = Store("bucket/lake", store._given)
        done: dict[str, bool] = {}

        def comes(other: Store = other, done: dict[str, bool] = done) -> None:
            done["theirs"] = created(other, b"theirs")

        handler.in_front_of(at, comes)
        done["ours"] = created(store, b"ours")
        if "theirs" not in done:
            break
        content = store.read("manifest/1")
        assert done == {"ours": content == b"ours", "theirs": content == b"theirs"}, at
        assert Store("bucket/lake", store._given).read("manifest/1") == content
        outcomes.add(content)
        at += 1
    assert at > 8 and outcomes == {b"ours", b"theirs"}


def created(store: Store, data: bytes) -> bool:
    try:
        store.create("manifest/1", data, run="r")
    except Exists:
        return False
    return True


def test_what_somebody_died_in_front_of_creating_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = objects()
    upload = store._upload

    def dies(path: str, data: Any) -> None:
        if path == "manifest/1":
            raise KeyboardInterrupt
        upload(path, data)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(store, "_upload", dies)
        store.create("manifest/1", b"ours", run="r")
    assert store.proposed("manifest/1") == (b"ours",)
    assert not created(store, b"theirs") and store.read("manifest/1") == b"ours"
    assert store.proposed("manifest/1") == ()


def test_a_store_goes_out_with_a_task(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("x", b"1", run="r")
    assert pickle.loads(pickle.dumps(store)).read("x") == b"1"


@pytest.mark.parametrize("uri", ["s3://key:secret@bucket/lake", "s3://key@bucket/lake"])
def test_credentials_are_not_taken_from_a_uri(uri: str) -> None:
    with pytest.raises(StoreFailed, match="in the environment") as refused:
        Store(uri)
    assert "secret" not in str(refused.value)


def test_a_uri_that_is_none_is_one_line() -> None:
    with pytest.raises(StoreFailed, match=r"^nowhere://x cannot be used for a lake: [^\n]+$"):
        Store("nowhere://x").read("a")


@pytest.mark.parametrize("uri", ["file://{}", "{}", "file://{}/"])
def test_a_folder_is_local_however_it_is_written(uri: str, tmp_path: Path) -> None:
    store = Store(uri.format(tmp_path))
    assert (store.local or "").rstrip("/") == str(tmp_path)
    store.write("a/b", b"1", run="r")
    assert (tmp_path / "a/b").read_bytes() == b"1"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreFailed, match=r"^cannot write a of .*/file/lake: .*Not a directory"):
        Store(str(tmp_path / "file/lake")).write("a", b"1", run="r")


def test_nothing_is_left_of_a_write_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(StoreFailed, match="No space left"):
        store.write("a", b"1", run="r")
    monkeypatch.undo()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# ---- a lake of objects


def log() -> FakeLog:
    made = FakeLog([Partition(step=500)])
    for n in range(60):
        made.partitions[0].publish(b"%d" % n * 20)
    return made


def archive(
    store: Store, made: FakeLog, run: str, topic: str = "orders", split_bytes: int = 500, rounds: int = 4
) -> int:
    def write(splits: Any, run: str) -> Any:
        return [write_piece(split, store, made.read, run=run) for split in splits]

    settings = RoundSettings(run, split_bytes=split_bytes, round_bytes=rounds * split_bytes)
    return once(made, Rounds(ManifestCommits(store), store, write, settings), Subject((topic,))).rows


def test_a_store_that_refuses_half_way_commits_nothing_and_is_gone_on_with_later() -> None:
    made = log()
    _, counting = objects()
    whole = Store("bucket/lake", fs.PyFileSystem(counting))
    assert archive(whole, made, "whole") == 60
    uploads = (1 << 30) - counting.room
    for room in range(uploads):
        made.floors.clear()
        store, handler = objects(room)
        with pytest.raises(StoreFailed, match=r"^cannot write [^\n]*ACCESS_DENIED[^\n]*$"):
            archive(store, made, "first")
        handler.room = 1 << 30
        archive(store, made, "second")
        state = ManifestCommits(store).state()
        [life] = state.files
        assert state.covered(life) == [(0, 60)], room
        there = {file.path for file in store.list("data", recursive=True)}
        assert there == {file.path for file in state.files[life]}, room


@pytest.mark.parametrize("topic", ["orders", "users"])
def test_two_archivers_of_one_lake_of_objects_lose_nothing(topic: str) -> None:
    """The second one does all of its work in front of each request of the first: on the same topic, or on another."""
    at = came = 0
    while not at or came:
        made = FakeLog([Partition(step=300)])
        if topic != "orders":
            made.partitions.append(Partition(topic, 0, 0x77))
        for partition in made.partitions:
            for n in range(12):
                partition.publish(b"%d" % n * 20)
        store, handler = objects()
        other = Store("bucket/lake", store._given)
        came = 0

        def comes(other: Store = other, made: FakeLog = made) -> None:
            nonlocal came
            came += 1
            archive(other, made, "second", topic, 300)

        handler.in_front_of(at, comes)
        archive(store, made, "first", rounds=1)
        handler.in_front_of(1 << 30, comes)
        state = ManifestCommits(Store("bucket/lake", store._given)).state()
        there = {file.path: file.size for file in store.list("data", recursive=True)}
        for life, files in state.files.items():
            assert state.covered(life) == [(0, 12)], at
            assert all(there.get(file.path) == file.bytes for file in files), at
            assert made.floors["archive", life.topic, 0] == 12, at
        assert {life.topic for life in state.files} == {"orders", *([topic] if came else [])}
        at += 1
    assert at > 25
