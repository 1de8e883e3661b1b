"""A log that has acknowledged without fsync stays one, whatever the setting is now."""

from __future__ import annotations

import random
from typing import cast

import pytest

from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.log import PartitionLog
from nsqha.commitlog.storage import MemStorage
from nsqha.server.integrity.suspect_logs import good_name
from nsqha.server.opening.sync_history import SyncHistory, weakest

KEY = (7, 0)
NAME = 11


class LogEnds:
    """A log of so many entries, of which so many are on the disk."""

    def __init__(self, end: int, durable: int) -> None:
        self.end = self
        self.log_id = end
        self.local_durable = durable


def log(end: int, durable: int) -> PartitionLog:
    return cast(PartitionLog, LogEnds(end, durable))


class Lives:
    """The lives of one node's journal; `page_cache` changes where the host restarts."""

    def __init__(self) -> None:
        self._storage = MemStorage()
        self.begin("first")

    def begin(self, page_cache: str) -> None:
        if page_cache != "first":
            self.journal.close()
        self.journal = NodeJournal.open(self._storage, "data", random.Random(1), page_cache=page_cache)
        self.syncs = SyncHistory(self.journal)

    def open(self, sync: str, end: int = 5) -> None:
        lazy = self.syncs.promised(KEY, sync, log(end, end))
        self.journal.stage(KEY, promise=1, log_uid=NAME, lazy=lazy, recovered=True)
        self.journal.commit()

    @property
    def lazy(self) -> bool:
        return self.journal.records()[KEY].lazy  # type: ignore[index]


@pytest.fixture
def lives() -> Lives:
    return Lives()


@pytest.mark.parametrize("sync", ["interval", "none"])
def test_another_setting_after_a_power_loss_does_not_vouch_for_the_log(lives: Lives, sync: str) -> None:
    lives.open(sync)
    lives.begin("after the power loss")
    assert weakest(lives.journal, KEY, "always") == "none"
    assert good_name(lives.journal, KEY, "always") == 0


def test_a_log_that_was_always_synced_is_vouched_for_after_a_power_loss(lives: Lives) -> None:
    lives.open("always")
    lives.begin("after the power loss")
    assert good_name(lives.journal, KEY, "always") == NAME
    assert good_name(lives.journal, KEY, "interval") == 0


def test_the_flag_ends_when_all_that_was_written_before_is_on_the_disk(lives: Lives) -> None:
    lives.open("interval")
    lives.syncs.synced(KEY, log(8, 8))
    assert lives.lazy  # what comes next may be acknowledged at once
    assert not lives.syncs.changes(KEY, "always", log(9, 8))
    lives.syncs.synced(KEY, log(12, 8))
    assert lives.lazy
    lives.syncs.synced(KEY, log(12, 9))
    assert not lives.lazy


def test_a_change_to_interval_waits_for_the_journal_once(lives: Lives) -> None:
    lives.open("always")
    assert not lives.lazy
    assert lives.syncs.changes(KEY, "interval", log(5, 5))
    assert lives.lazy and lives.journal.dirty
    lives.journal.commit()
    assert not lives.syncs.changes(KEY, "none", log(6, 5))


def test_a_change_back_before_the_round_keeps_the_flag(lives: Lives) -> None:
    lives.open("interval")
    lives.syncs.changes(KEY, "always", log(9, 5))
    lives.syncs.changes(KEY, "interval", log(9, 5))
    lives.syncs.synced(KEY, log(9, 9))
    assert lives.lazy


def test_a_log_opened_with_always_was_synced_by_its_recovery(lives: Lives) -> None:
    lives.open("interval")
    lives.begin("first again")
    lives.open("always")
    assert lives.lazy  # until the journal knows its end
    lives.syncs.synced(KEY, log(5, 5))
    assert not lives.lazy


def test_a_topic_without_a_journal_has_no_flag(lives: Lives) -> None:
    assert not lives.syncs.changes(KEY, "none", log(1, 1))
    lives.syncs.synced(KEY, log(1, 1))
    assert lives.journal.record(KEY) is None
