from __future__ import annotations

import contextlib
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nsqha.commitlog.files.open_logs import OpenLogs
from nsqha.commitlog.log import LogIdentity, LogLimits, PartitionLog
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.storage import File, OsStorage
from nsqha.errors import AppendFailed, Poisoned
from tests.open_files import open_below
from tests.unit.commitlog.logs import add, roll, sync


def logs_on(path: Path, count: int, open_logs: OpenLogs) -> list[PartitionLog]:
    made = []
    for number in range(count):
        identity = LogIdentity(9, number)
        limits = LogLimits(segment_bytes=200)
        log = PartitionLog.create(OsStorage(), f"{path}/{number}", identity, cache=BatchCache(0), limits=limits)
        log.share_descriptors(open_logs)
        made.append(log)
    return made


def open_count(log: PartitionLog) -> int:
    return sum(pair.is_open for pair in log.files.pairs)


def test_a_log_opens_its_files_as_it_uses_them_and_few_have_them_open(tmp_path: Path) -> None:
    open_logs = OpenLogs(3)
    logs = logs_on(tmp_path, 10, open_logs)
    assert not any(map(open_count, logs))
    for turn in range(5):
        for log in logs:
            add(log, b"%d" % turn)
            sync(log)
            assert sum(map(open_count, logs)) <= 3
    assert len(open_below(tmp_path)) <= 6
    assert [log.end.offset for log in logs] == [5] * 10
    assert [bytes(log.message(4))[-1:] for log in logs] == [b"4"] * 10


def test_a_log_that_is_not_durable_keeps_its_files_and_is_asked_to_be_synced(tmp_path: Path) -> None:
    open_logs = OpenLogs(1)
    lazy, other, third = logs_on(tmp_path, 3, open_logs)
    wanted = []
    lazy.on_wanted_durable = lambda: wanted.append(True)
    add(lazy, b"not synced")
    add(other, b"a")
    assert open_count(lazy) and wanted
    sync(other)
    sync(lazy)
    add(third, b"b")
    assert not open_count(lazy) and not open_count(other) and open_count(third)


def test_who_would_open_one_more_waits_until_others_are_durable(tmp_path: Path) -> None:
    logs = logs_on(tmp_path, 4, OpenLogs(1))
    one, two, three, four = logs
    went_on = []
    for log in (one, two):
        assert not log.share.lacking(lambda: went_on.append("not asked"))
        add(log, b"not synced")
    assert three.share.lacking(lambda: went_on.append("three"))
    assert four.share.lacking(lambda: went_on.append("four"))
    assert not two.share.lacking(lambda: went_on.append("open already"))
    sync(one)
    assert not open_count(one) and went_on == ["three", "four"]
    add(three, b"a")
    assert four.share.lacking(lambda: went_on.append("again"))
    two.close()
    assert went_on == ["three", "four", "again"] and not four.share.lacking(lambda: None)


def test_old_files_that_were_read_are_closed_with_the_rest(tmp_path: Path) -> None:
    open_logs = OpenLogs(1)
    log, other = logs_on(tmp_path, 2, open_logs)
    for n in range(20):
        add(log, b"%d" % n * 20)
        if log.needs_roll:
            roll(log)
    sync(log)
    for offset in range(20):
        log.message(offset)
    assert open_count(log) > 2
    add(other, b"a")
    assert open_count(log) == 0
    assert bytes(log.message(0)).endswith(b"0" * 20)


def test_a_failed_sync_is_remembered_though_files_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, other = logs_on(tmp_path, 2, OpenLogs(1))
    add(log, b"a")

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, "broken")

    ticket = log.unsynced()
    assert ticket is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails)
        with pytest.raises(Poisoned):
            ticket.run()
    add(other, b"a")
    assert open_count(log), "its files would forget that they failed"
    again = log.unsynced()
    assert again is not None
    with pytest.raises(Poisoned):
        again.run()


def test_a_lack_of_descriptors_refuses_a_write_and_leaves_the_log_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [log] = logs_on(tmp_path, 1, OpenLogs(1))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(OsStorage, "open", full)
        with pytest.raises(AppendFailed):
            add(log, b"a")
    assert log.poisoned is None
    add(log, b"b")
    sync(log)
    assert bytes(log.message(0)).endswith(b"b")


def test_threads_that_open_a_file_at_once_share_one_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [log] = logs_on(tmp_path, 1, OpenLogs(1))
    together = threading.Barrier(2)
    really = OsStorage.open

    def slow(self: OsStorage, path: str, **how: bool) -> File:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.2)
        return really(self, path, **how)

    monkeypatch.setattr(OsStorage, "open", slow)
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(lambda _: log.files.pairs[-1].segment, range(2))
    assert one is two


def test_files_that_another_thread_opened_are_closed_by_the_owner_of_the_logs(tmp_path: Path) -> None:
    owner = threading.get_ident()
    open_logs = OpenLogs(1, lambda: threading.get_ident() == owner)
    one, two, three = logs_on(tmp_path, 3, open_logs)
    with ThreadPoolExecutor(1) as threads:
        for log in (one, two):
            assert threads.submit(lambda log=log: log.files.pairs[-1].segment).result()  # type: ignore[misc]
    assert open_count(one) and open_count(two)
    add(three, b"a")
    assert not open_count(one) and not open_count(two) and open_count(three)
