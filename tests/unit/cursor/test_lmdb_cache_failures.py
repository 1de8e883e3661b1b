"""What fails under the cache of committed state: writes, a full disk or map, rows that are gone, the folder itself."""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path

import pytest

from nsqha.cursor.cache import lmdb_cache, lmdb_tables
from nsqha.cursor.cache.lmdb_cache import LmdbCache, _grow
from nsqha.cursor.cache.lmdb_tables import TablesError
from nsqha.cursor.committed.checkpoint import digest
from nsqha.cursor.deferred.deferred_set import MemoryDeferred
from tests.unit.cursor.cache_rig import KEY, MAP, CachedLog, CacheRig, flush, load, rig_with_deferred
from tests.unit.cursor.tiny import Leader, TinyLog
from tests.unit.cursor.tiny_cache import CountedLog


def test_a_write_that_fails_is_tried_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_with_deferred(path)
    assert flush(rig.cache)
    real = lmdb_tables.Tables.write_rows

    def refuse(*args: object) -> None:
        raise TablesError("no space left on device")

    monkeypatch.setattr(lmdb_tables.Tables, "write_rows", refuse)
    for offset in range(1, 20, 2):
        rig.defer(offset)
        assert not flush(rig.cache)
    assert rig.cache.delayed and rig.cache.overlaid == 10 and not rig.cache.overfull
    assert digest(rig.leader.cursors.state) == digest(TinyLog.rebuild(rig.leader.log))
    monkeypatch.setattr(lmdb_cache, "OVERLAY_ROWS_MAX", 5)
    assert not flush(rig.cache) and rig.cache.overfull
    assert rig.cache.take(lmdb_cache.RETRY_SECONDS - 0.1) is None
    monkeypatch.setattr(lmdb_tables.Tables, "write_rows", real)
    assert flush(rig.cache, 10.0) and flush(rig.cache, 20.0)
    assert rig.cache.delayed is None and not rig.cache.overfull and rig.cache.overlaid == 0
    rig.assert_all_is_cached()


def test_a_disk_that_is_full_for_a_while(path: str) -> None:
    """LMDB itself, refused by the file system in the middle of its transactions."""
    rig = CacheRig(path)
    channel = rig.leader.create("c")
    rig.leader.publish(30_000)
    rig.leader.deliver(channel)
    rig.defer(*range(2_000))
    assert flush(rig.cache)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(f"{path}/data.mdb") + 100_000, limits[1]))
    try:
        for first in range(2_000, 26_000, 8_000):
            rig.defer(*range(first, first + 8_000))
            written = flush(rig.cache)
        assert not written and rig.cache.delayed and rig.cache.failure is None
        assert digest(rig.leader.cursors.state) == digest(TinyLog.rebuild(rig.leader.log))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert flush(rig.cache) and flush(rig.cache) and rig.cache.overlaid == 0
    rig.assert_all_is_cached()


def test_one_warning_when_writes_fail(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rig_with_deferred(path)

    def refuse(*args: object) -> None:
        raise TablesError("no space left on device")

    monkeypatch.setattr(lmdb_tables.Tables, "sync", refuse)
    caplog.set_level(logging.WARNING, "nsqha")
    for _ in range(3):
        assert not flush(rig.cache)
    assert len(caplog.records) == 1 and "no space left" in caplog.text
    rig.cache.close()


def test_a_full_map_grows(path: str) -> None:
    cache = LmdbCache.open(path, map_bytes=1 << 20)
    log = CachedLog(cache)
    leader = Leader(log)
    channel = leader.create("c")
    leader.publish(30_000)
    leader.deliver(channel)
    for offset in range(30_000):
        channel.req(offset, 1, 3_600_000 + offset * 7919 % 10_000, leader.now)
    leader.flush()
    pinned = leader.cursors.state.channels["c"].deferred.snapshot()
    for _ in range(5):
        if flush(cache):
            break
    assert cache.delayed is None and cache.overlaid == 0
    assert len(list(pinned.items())) == 30_000
    del pinned
    assert digest(leader.cursors.state) == digest(TinyLog.rebuild(log))
    cache.close()


def test_a_map_does_not_grow_under_a_reader(path: str) -> None:
    rig = rig_with_deferred(path)
    assert flush(rig.cache)
    pinned = rig.leader.cursors.state.channels["c"].deferred.snapshot()
    assert not _grow(rig.cache._use, path)
    assert len(list(pinned.items())) == 20
    del pinned
    assert _grow(rig.cache._use, path)
    assert len(list(rig.leader.cursors.state.channels["c"].deferred.items())) == 20
    rig.cache.close()


@pytest.mark.parametrize("when", ["written", "writing", "overlaid", "drained"])
def test_rows_that_can_not_be_read_any_more_come_from_the_log(
    path: str, when: str, monkeypatch: pytest.MonkeyPatch, small_room: None, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rig_with_deferred(path)
    cache = rig.cache
    if when == "drained":
        cache.close()
        cache = LmdbCache.open(path, map_bytes=MAP)
        log = rig.leader.log
        assert isinstance(log, CachedLog)
        log.cache = cache
        rig.leader = rig.leader.restart()
        rig.leader.deliver(rig.leader.cursors.channels["c"])
        rig.defer(1)
    else:
        assert flush(cache)
        rig.defer(1, 3)
        if when == "writing":
            taken = cache.take(0.0)
            assert taken is not None
            cache.write(taken)
            rig.defer(5)
        elif when == "written":
            assert flush(cache)
    state = rig.leader.cursors.state
    snapshot = state.channels["c"].deferred.snapshot()
    expected = digest(state)
    rows = list(snapshot.items())

    def refuse(*args: object) -> None:
        raise TablesError("the disk is broken")

    for name in ("get", "by_offset", "by_due", "pin", "highest", "head"):
        monkeypatch.setattr(lmdb_tables.Tables, name, refuse)
    assert digest(state) == expected
    assert list(snapshot.items()) == rows
    assert state.channels["c"].deferred.due((0, 0), 1 << 62, 5) == sorted(rows, key=lambda r: (r.due_ns, r.offset))[:5]
    rig.defer(7, 9)
    assert digest(rig.leader.cursors.state) == digest(TinyLog.rebuild(rig.leader.log))
    assert cache.take(1e9) is None
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    counted = CountedLog(rig.leader.log)
    assert digest(cache.load((9, 9), counted, counted.read).state) == digest(rig.leader.cursors.state)
    cache.close()


def test_a_failure_while_loading_leads_to_the_log(path: str, monkeypatch: pytest.MonkeyPatch, small_room: None) -> None:
    rig = rig_with_deferred(path)
    assert flush(rig.cache)
    rig.defer(1, 3, 5, 7)
    rig.cache.close()
    for failing in ("head", "by_offset", "highest", "get", "write_rows"):
        cache = LmdbCache.open(path, map_bytes=MAP)
        assert cache.failure is None

        def refuse(*args: object) -> None:
            raise TablesError("the disk is broken")

        with monkeypatch.context() as patched:
            patched.setattr(lmdb_tables.Tables, failing, refuse)
            loaded, _ = load(cache, rig.leader.log)
            assert digest(loaded.state) == digest(rig.leader.cursors.state), failing
        cache.close()


def test_a_folder_that_can_not_be_used_is_done_without(path: str, caplog: pytest.LogCaptureFixture) -> None:
    Path(path).parent.joinpath("file").write_text("")
    cache = LmdbCache.open(f"{Path(path).parent}/file/cursors.lmdb")
    assert cache.failure and "kept in memory" in caplog.text
    log = CachedLog(cache)
    leader = Leader(log)
    channel = leader.create("c")
    leader.publish(3)
    leader.deliver(channel)
    channel.req(1, 1, 10**7, leader.now)
    leader.flush()
    assert isinstance(channel.committed.deferred, MemoryDeferred) and len(channel.committed.deferred) == 1
    assert cache.take(0.0) is None and cache.overlaid == 0
    cache.sweep()
    cache.forget(KEY)
    cache.close()


def test_a_second_user_of_the_folder_gets_a_cache_in_memory(path: str) -> None:
    rig = rig_with_deferred(path)
    assert flush(rig.cache)
    other = LmdbCache.open(path, map_bytes=MAP)
    assert other.failure
    assert digest(load(other, rig.leader.log)[0].state) == digest(rig.leader.cursors.state)
    rig.cache.close()
