"""A data directory that is not at its path any more is closed; what is removed on purpose closes nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from nsqha import hot
from nsqha.errors import Poisoned
from nsqha.server.node import data_watch
from nsqha.server.node.broker import Broker
from nsqha.server.node.data_watch import DataWatch, differences, inode_at
from tests.unit.server.broker_rig import on_a_broker


class Watched:
    """The watch of a broker, looked with by hand."""

    def __init__(self, broker: Broker) -> None:
        self.failures: list[str] = []
        self.folder = Path(broker.options.data_path)
        self.watch = DataWatch(str(self.folder), broker.parts.opener.folders.open_logs, self._failed)

    def _failed(self, error: BaseException) -> None:
        assert isinstance(error, Poisoned)
        self.failures.append(str(error))

    async def looks(self, count: int) -> list[bool]:
        return [await self.watch.look() for _ in range(count)]


async def published(broker: Broker, topic: str) -> None:
    await broker.publishing.publish(topic, hot.frame(b"one"))


@on_a_broker
async def test_a_folder_that_is_removed_is_noticed_at_the_second_look(broker: Broker) -> None:
    await published(broker, "t")
    watched = Watched(broker)
    assert await watched.looks(2) == [False, False]
    shutil.rmtree(watched.folder)
    assert await watched.looks(2) == [False, True]
    assert "No such file or directory, while this process writes there" in watched.failures[0]
    watched.folder.mkdir()


@on_a_broker
async def test_another_folder_in_its_place_is_noticed(broker: Broker) -> None:
    """As when its volume is unmounted: the mount point has a folder of its own."""
    watched = Watched(broker)
    watched.folder.rename(f"{watched.folder}.away")
    watched.folder.mkdir()
    assert await watched.looks(2) == [False, True]
    assert "another file is at this path" in watched.failures[0]


@on_a_broker
async def test_the_files_of_one_topic_that_are_removed_are_noticed(broker: Broker) -> None:
    await published(broker, "a")
    await published(broker, "b")
    watched = Watched(broker)
    (folder,) = (watched.folder / "topics").glob("b-*")
    shutil.rmtree(folder)
    assert await watched.looks(2) == [False, True]
    assert str(folder) in watched.failures[0]


@on_a_broker
async def test_what_is_missing_once_is_forgiven(broker: Broker) -> None:
    watched = Watched(broker)
    for _ in range(3):
        watched.folder.rename(f"{watched.folder}.away")
        assert await watched.looks(1) == [False]
        Path(f"{watched.folder}.away").rename(watched.folder)
        assert await watched.looks(1) == [False]
    assert not watched.failures


@on_a_broker
async def test_a_topic_that_is_deleted_closes_nothing(broker: Broker) -> None:
    watched = Watched(broker)
    for n in range(3):
        await published(broker, f"t{n}")
        await watched.looks(1)
        log = broker.topics[f"t{n}"].led[0].log  # the watch had it at its last look
        deleted = asyncio.create_task(broker.topics.delete_topic(f"t{n}"))
        while not deleted.done():
            assert await watched.looks(1) == [False]
        assert not log.files.written()
        assert await watched.looks(2) == [False, False]
    assert not watched.failures


class RolledLog:
    """A log whose newest files are other ones, or closed, whenever the watch has an answer about those of before."""

    def __init__(self, path: str) -> None:
        self.path, self.open, self.files = path, True, self

    def written(self) -> dict[str, tuple[int, int]]:
        return {self.path: (1, 1)} if self.open else {}

    def some(self, count: int) -> list[RolledLog]:
        return [self]


def test_an_answer_about_files_that_were_closed_meanwhile_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").write_text("")
    log, failures = RolledLog(str(tmp_path / "gone")), []
    watch = DataWatch(str(tmp_path), cast(Any, log), failures.append)

    def looked(wanted: dict[str, tuple[int, int]]) -> dict[str, str]:
        assert log.path in wanted
        log.open = False
        return differences(wanted)

    async def looks() -> None:
        for _ in range(3):
            log.open = True
            assert not await watch.look()

    monkeypatch.setattr(data_watch, "differences", looked)
    asyncio.run(looks())
    assert not failures


def test_only_errors_that_say_that_it_is_gone_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_text("")
    path = str(tmp_path / "f")
    inode = inode_at(path)
    assert differences({path: inode}) == {}
    for code, counts in ((5, True), (116, True), (2, True), (13, False), (4, False)):

        def failing(path: str, code: int = code) -> os.stat_result:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(data_watch.os, "stat", failing)
        assert bool(differences({path: inode})) is counts
        monkeypatch.undo()


@on_a_broker
async def test_of_many_logs_some_are_looked_at_in_turn(broker: Broker) -> None:
    for n in range(5):
        await published(broker, f"t{n}")
    logs = broker.parts.opener.folders.open_logs
    seen = [id(log) for _ in range(3) for log in logs.some(2)]
    assert len(seen) == len(set(seen)) == 5
    assert len(logs.some(9)) == 5
