"""An older copy of a data directory is recognised at its start, and none of its logs is trusted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.storage import MemStorage
from nsqha.election.model import FolderUse
from nsqha.errors import Conflict
from nsqha.server.integrity.suspect_logs import good_name
from nsqha.server.node.cluster import folder_life
from nsqha.server.node.cluster.folder_life import FolderLife
from tests.fakes.metadata import FakeFolders

KEY = (7, 0)
NAME = 11


class Directory:
    """A data directory in its uses, and copies of it; the metadata store is never away."""

    def __init__(self) -> None:
        self.uses = FakeFolders()
        self.storage = MemStorage()
        self.journal: NodeJournal | None = None

    def start(self) -> FolderLife:
        self.journal = NodeJournal.open(self.storage, "data", random.Random(1), page_cache="here")
        life = FolderLife(self.journal, self.uses)
        life.begin()
        return life

    def lead(self) -> None:
        assert self.journal is not None
        self.journal.stage(KEY, promise=3, log_uid=NAME)
        self.journal.commit()

    def end(self) -> None:
        assert self.journal is not None
        self.journal.close()

    def copy(self) -> bytes:
        file = self.storage.open("data/journal")
        return file.pread(file.size(), 0)

    def put_back(self, content: bytes) -> None:
        file = self.storage.open("data/journal")
        file.truncate(0)
        file.pwrite(content, 0)
        file.sync()

    @property
    def trusted(self) -> bool:
        assert self.journal is not None
        record = self.journal.record(KEY)
        assert record is not None and record.promise_trusted == record.log_uid_trusted
        return good_name(self.journal, KEY, "always") == NAME


@pytest.fixture
def directory() -> Directory:
    directory = Directory()
    directory.start()
    directory.lead()
    return directory


def test_a_directory_that_goes_on_is_trusted(directory: Directory) -> None:
    for _ in range(3):
        directory.end()
        directory.start()
        assert directory.trusted


def test_a_copy_of_an_earlier_use_is_not_trusted_until_recovered(directory: Directory) -> None:
    copy = directory.copy()
    directory.end()
    directory.start()
    directory.end()
    directory.put_back(copy)
    directory.start()
    assert not directory.trusted
    directory.end()  # before any log was opened
    directory.start()
    assert not directory.trusted


def test_a_copy_made_during_a_long_use_is_not_trusted(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = directory.copy()
    assert directory.journal is not None
    life = FolderLife(directory.journal, directory.uses)

    async def counted() -> None:
        stored = asyncio.Event()

        async def in_thread(call: Callable[[], None]) -> None:
            call()
            stored.set()

        running = asyncio.create_task(life.run(in_thread))
        await stored.wait()
        running.cancel()

    monkeypatch.setattr(folder_life, "RAISE_SECONDS", 0.0)
    asyncio.run(counted())
    directory.end()
    directory.put_back(copy)
    directory.start()
    assert not directory.trusted


def test_a_node_that_died_between_journal_and_record_is_trusted(directory: Directory) -> None:
    directory.end()
    before = dict(directory.uses.records)
    directory.start()
    directory.uses.records = before
    directory.end()
    directory.start()
    assert directory.trusted
    directory.end()
    directory.start()
    assert directory.trusted


def test_a_disk_that_failed_and_could_not_journal_it_is_known(directory: Directory) -> None:
    life = FolderLife(directory.journal, directory.uses)  # type: ignore[arg-type]
    life.failed("fdatasync failed")
    directory.end()
    directory.start()
    assert directory.journal is not None and directory.journal.page_cache_lost(KEY)
    assert good_name(directory.journal, KEY, "interval") == 0
    assert directory.uses.read(directory.journal.identity.node_uid) == FolderUse(directory.journal.identity.node_uid, 2)


def test_two_processes_do_not_share_a_directory_and_its_copy(directory: Directory) -> None:
    assert directory.journal is not None
    directory.uses.records[directory.journal.identity.node_uid] = FolderUse(directory.journal.identity.node_uid, 9)
    with pytest.raises(Conflict, match="use 9"):
        FolderLife(directory.journal, directory.uses).failed("late")
