"""The cache of committed state: what a restart finds, when it is written, what is forgotten."""

from __future__ import annotations

import os
import shutil

import pytest

from nsqha.cursor.cache import lmdb_cache, lmdb_proof, lmdb_tables
from nsqha.cursor.cache.lmdb_cache import LmdbCache
from nsqha.cursor.cache.lmdb_tables import TablesError
from nsqha.cursor.committed.checkpoint import digest, encode
from nsqha.cursor.committed.loading import CACHE, LOG_START
from nsqha.cursor.deferred.deferred_set import Deferred
from nsqha.cursor.deferred.store import DeferredStore
from nsqha.cursor.turns import TOLD_LOOKS
from tests.unit.cursor.cache_rig import KEY, MAP, CacheRig, flush, load, rig_with_deferred
from tests.unit.cursor.judged import SMALL
from tests.unit.cursor.tiny import Leader, TinyLog
from tests.unit.cursor.tiny_cache import CountedLog


def test_a_restart_goes_on_where_the_cache_is(path: str) -> None:
    rig = rig_with_deferred(path)
    assert flush(rig.cache)
    applied = rig.leader.log.log_id
    rig.leader.publish(1)
    rig.defer(1, 3)
    rig.cache.close()

    cache = LmdbCache.open(path, map_bytes=MAP)
    loaded, counted = load(cache, rig.leader.log)
    assert loaded.source == CACHE
    assert counted.entries_read == 1 + rig.leader.log.log_id - applied
    assert digest(loaded.state) == digest(TinyLog.rebuild(rig.leader.log))
    assert isinstance(loaded.state.channels["c"].deferred, DeferredStore)
    cache.close()


def test_what_was_loaded_is_not_written_again(path: str) -> None:
    rig = rig_with_deferred(path)
    assert flush(rig.cache)
    rig.cache.close()
    cache = LmdbCache.open(path, map_bytes=MAP)
    assert load(cache, rig.leader.log)[0].batches == 0
    assert cache.take(0.0) is None
    cache.close()


def test_what_is_not_written_is_read_from_the_log(path: str) -> None:
    rig = rig_with_deferred(path)
    rig.cache.close()
    cache = LmdbCache.open(path, map_bytes=MAP)
    assert load(cache, rig.leader.log)[0].source == LOG_START
    cache.close()


def test_nothing_is_written_when_nothing_changed(path: str) -> None:
    rig = rig_with_deferred(path)
    assert rig.cache.take(0.0) is not None
    rig = rig_with_deferred(path + "2")
    assert flush(rig.cache)
    assert rig.cache.take(1.0) is None and rig.cache.overlaid == 0


def test_deleting_the_folder_loses_nothing(path: str) -> None:
    rig = rig_with_deferred(path)
    assert flush(rig.cache)
    rig.cache.close()
    shutil.rmtree(path)
    cache = LmdbCache.open(path, map_bytes=MAP)
    loaded, _ = load(cache, rig.leader.log)
    assert loaded.source == LOG_START and len(loaded.state.channels["c"].deferred) == 20
    assert flush(cache)
    cache.close()


def test_partitions_do_not_see_each_other(path: str) -> None:
    cache = LmdbCache.open(path, map_bytes=MAP)
    leaders = []
    for key in [(1, 0), (1, 1), (1, 256), (256, 1)]:
        leader = Leader()
        counted = CountedLog(leader.log)
        channel = leader.create("c")
        leader.publish(10 + key[1] % 7)
        leader.deliver(channel)
        for offset in range(key[1] % 5 + 1):
            channel.req(offset, 1, 10_000_000, leader.now)
        leader.flush()
        cache.load(key, counted, counted.read)
        leaders.append((key, leader))
    assert flush(cache)
    cache.close()
    cache = LmdbCache.open(path, map_bytes=MAP)
    for key, leader in leaders:
        counted = CountedLog(leader.log)
        loaded = cache.load(key, counted, counted.read)
        assert (loaded.source, loaded.batches) == (CACHE, 0)
        assert digest(loaded.state) == digest(leader.cursors.state)
    cache.close()


def test_the_checkpoint_that_is_being_written_is_remembered(path: str) -> None:
    """Its last frame completes it, also for who starts in the middle of it."""
    rig = CacheRig(path)
    rig.leader = Leader(rig.leader.log, limits=SMALL)
    for n in range(20):
        rig.leader.create(f"channel-{n}")
    rig.leader.cursors.checkpoints.begin(rig.leader.cursors.state.snapshot())
    rig.leader.publish(1, force=True)
    assert rig.leader.cursors.state.partial is not None
    assert flush(rig.cache)
    rig.cache.close()
    rig.leader.flush()
    assert rig.leader.cursors.state.checkpoint.as_of
    cache = LmdbCache.open(path, map_bytes=MAP)
    loaded, _ = load(cache, rig.leader.log)
    assert loaded.source == CACHE
    assert loaded.state.checkpoint == rig.leader.cursors.state.checkpoint
    cache.close()


def test_loading_many_deferred_messages_keeps_few_in_memory(path: str, small_room: None) -> None:
    rig = rig_with_deferred(path, 200)
    rig.cache.close()
    cache = LmdbCache.open(path, map_bytes=MAP)
    loaded, _ = load(cache, rig.leader.log)
    assert loaded.source == LOG_START and len(loaded.state.channels["c"].deferred) == 100
    assert cache.overlaid <= 3
    assert digest(loaded.state) == digest(rig.leader.cursors.state)
    assert flush(cache)
    assert digest(loaded.state) == digest(rig.leader.cursors.state)
    cache.close()


def test_a_full_layer_asks_to_be_written(path: str, small_room: None) -> None:
    rig = rig_with_deferred(path)
    assert flush(rig.cache)
    asked = []
    rig.cache.on_full = lambda: asked.append(rig.cache.pressing)
    rig.defer(1, 3)
    assert not asked
    rig.defer(5)
    assert asked == [True]
    taken = rig.cache.take(0.0)
    assert taken is not None and not rig.cache.pressing
    rig.cache.write(taken)
    rig.cache.written(taken, 0.0)
    rig.cache.close()


def test_rows_written_early_are_proven_with_the_next_whole_write(path: str, small_room: None) -> None:
    rig = rig_with_deferred(path)
    assert flush(rig.cache, 100.0)
    rig.defer(1, 3, 5, 7)
    taken = rig.cache.take(99.0)
    assert taken is not None and not taken.whole
    rig.cache.write(taken)
    rig.cache.written(taken, 99.0)
    assert rig.cache.overlaid == 0
    assert lmdb_proof.unproven(path), "the rows are not those of the head"
    assert rig.cache.take(99.0) is None
    assert flush(rig.cache, 200.0)
    rig.assert_all_is_cached()


def test_writes_take_a_small_share_of_the_time(path: str) -> None:
    rig = rig_with_deferred(path)
    taken = rig.cache.take(100.0)
    assert taken is not None
    assert rig.cache.take(100.5) is None  # one at a time
    rig.cache.write(taken)
    rig.cache.written(taken, 102.0)
    rig.defer(1)
    assert rig.cache.take(103.0) is None
    assert rig.cache.take(102.0 + 2 * lmdb_cache.IDLE_SHARE) is not None


def rows_at_rest(cache: LmdbCache) -> int:
    assert cache.tables is not None
    with cache.tables._env.begin() as txn:
        counts = [txn.stat(table)["entries"] for table in (cache.tables._rows, cache.tables._due)]
    assert counts[0] == counts[1]
    return counts[0]


def test_rows_of_an_emptied_channel_are_deleted_in_time(path: str, small_room: None) -> None:
    rig = rig_with_deferred(path)
    assert flush(rig.cache) and rows_at_rest(rig.cache) == 20
    rig.leader.cursors.requests.empty("c")
    rig.leader.flush()
    assert len(rig.leader.cursors.state.channels["c"].deferred) == 0
    for _ in range(20):
        assert flush(rig.cache)
    assert rows_at_rest(rig.cache) == 0
    assert rig.cache.take(1e9) is None
    rig.cache.close()


def test_a_deleted_topic_leaves_nothing(path: str) -> None:
    rig = rig_with_deferred(path)
    assert flush(rig.cache)
    rig.cache.forget(KEY)
    assert flush(rig.cache) and flush(rig.cache)
    assert rows_at_rest(rig.cache) == 0 and rig.cache.tables is not None and not rig.cache.tables.partitions()
    rig.cache.close()


def test_what_no_partition_claims_is_swept(path: str) -> None:
    rig = rig_with_deferred(path)
    assert flush(rig.cache)
    rig.cache.close()
    cache = LmdbCache.open(path, map_bytes=MAP)
    cache.sweep()
    assert flush(cache) and rows_at_rest(cache) == 0
    cache.close()
    rig = rig_with_deferred(path)
    assert flush(rig.cache)
    rig.cache.sweep()
    assert flush(rig.cache) and rows_at_rest(rig.cache) == 20
    rig.cache.close()


def test_a_file_that_is_mostly_free_is_written_anew(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_tables, "SPARSE_BYTES", 40 << 10)
    rig = rig_with_deferred(path, 6000)
    assert flush(rig.cache)
    big = os.path.getsize(f"{path}/data.mdb")
    rig.leader.cursors.requests.empty("c")
    rig.leader.publish(1)
    rig.leader.deliver(rig.leader.cursors.channels["c"])
    rig.defer(6000)
    for _ in range(3):
        assert flush(rig.cache)
    rig.cache.close()
    cache = LmdbCache.open(path, map_bytes=MAP)
    assert os.path.getsize(f"{path}/data.mdb") < big / 3
    loaded, _ = load(cache, rig.leader.log)
    assert loaded.source == CACHE and loaded.state.channels["c"].deferred.next_offset(0) == 6000
    cache.close()
    assert lmdb_proof.unproven(path) is None


def test_what_the_cache_says_of_a_row_is_what_was_put(path: str) -> None:
    tables = lmdb_tables.Tables.open(path, map_bytes=MAP)
    row = Deferred((1 << 63) - 1, -5, 65535, 1 << 62)
    number = (1 << 32) - 2
    tables.write_rows([(number, {row.offset: row}, [row.offset])])
    assert tables.get(number, row.offset) == row
    assert tables.by_due(number, (-(1 << 63), -1), 9) == [row] == tables.by_offset(number, 0, 9)
    tables.close()


def test_of_a_log_in_use_a_snapshot_is_read_now_and_the_log_itself_later(path: str) -> None:
    rig = rig_with_deferred(path)
    assert flush(rig.cache)
    expected = encode(rig.leader.cursors.state)
    snapshot, log = CountedLog(rig.leader.log), CountedLog(rig.leader.log)
    loaded = rig.cache.load(KEY, snapshot, snapshot.read, later=(log, log.read))
    assert loaded.source == LOG_START and encode(loaded.state) == expected and not log.entries_read
    assert flush(rig.cache)
    read = snapshot.entries_read
    rig.cache.lost(TablesError("gone"))
    assert encode(loaded.state) == expected
    assert snapshot.entries_read == read and log.entries_read > 0
    rig.cache.close()


def test_only_the_state_that_is_given_back_leaves(path: str) -> None:
    rig = rig_with_deferred(path)
    first, _ = load(rig.cache, rig.leader.log)
    second, _ = load(rig.cache, rig.leader.log)
    rig.cache.give_back(KEY, first.state)
    assert rig.cache._partitions[KEY].state is second.state
    rig.cache.give_back(KEY, second.state)
    assert not rig.cache._partitions
    rig.cache.close()


def test_others_on_the_host_read_nothing_of_it(path: str) -> None:
    tables = lmdb_tables.Tables.open(path)
    tables.close()
    lmdb_proof.prove(path)
    modes = {name: os.stat(f"{path}/{name}").st_mode & 0o007 for name in (".", *os.listdir(path))}
    assert {".", "data.mdb", "lock.mdb", "proof"} <= modes.keys() and not any(modes.values())


def test_of_many_partitions_what_its_owner_found_busy_is_written_next(path: str) -> None:
    rig = rig_with_deferred(path)
    others = [TinyLog() for _ in range(3 * TOLD_LOOKS)]
    for number, log in enumerate(others):
        counted = CountedLog(log)
        rig.cache.load((7, number), counted, counted.read)
    assert flush(rig.cache)
    assert rig.cache.take(1e6) is None, "in this turn it has nothing to do"
    rig.leader.publish(1)
    rig.cache.look_at(KEY)
    taken = rig.cache.take(1e6)
    assert taken is not None and [part.partition.key for part in taken.parts] == [KEY]
    rig.cache.written(taken, 1e6)
