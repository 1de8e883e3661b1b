"""The cache of committed state: right after any history, restart, loss or damage, and never in the way."""

from __future__ import annotations

import logging
import os
import random
import resource
import shutil
from pathlib import Path

import pytest

from nsqha.cursor import lmdb_cache, lmdb_partition, lmdb_proof, lmdb_tables
from nsqha.cursor.checkpoint import digest, encode
from nsqha.cursor.deferred import Deferred, MemoryDeferred
from nsqha.cursor.layered import LayeredDeferred
from nsqha.cursor.lmdb_cache import LmdbCache, Taken
from nsqha.cursor.lmdb_tables import TablesError
from nsqha.cursor.loading import CACHE, CHECKPOINT, LOG_START, Loaded
from nsqha.cursor.state import NEEDS_LOOK, PartitionState
from tests.unit.cursor.history import SMALL, History
from tests.unit.cursor.tiny import Leader, TinyLog
from tests.unit.cursor.tiny_cache import CountedLog

KEY = (0xABCDEF, 3)
MAP = 16 << 20
SECTOR = 512


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "cursors.lmdb")


@pytest.fixture
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers fill, transactions end and heads break after a few rows."""
    monkeypatch.setattr(lmdb_partition, "ROOM", 3)
    monkeypatch.setattr(lmdb_tables, "ROWS_PER_TXN", 2)
    monkeypatch.setattr(lmdb_cache, "ROWS_PER_TXN", 2)
    monkeypatch.setattr(lmdb_cache, "SLICE_ROWS", 2)
    monkeypatch.setattr(lmdb_cache, "BURIED_ROWS", 6)
    monkeypatch.setattr(lmdb_tables, "PIECE_BYTES", 64)


@pytest.fixture
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is written, but nobody waits for the disk."""
    monkeypatch.setattr(lmdb_tables.Tables, "sync", lambda tables: lmdb_proof.prove(tables._env.path()))
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)


def load(cache: LmdbCache, log: TinyLog) -> tuple[Loaded, CountedLog]:
    counted = CountedLog(log)
    return cache.load(KEY, counted, counted.read), counted


class Rig:
    """A leader whose committed state is cached."""

    def __init__(self, path: str, log: TinyLog | None = None) -> None:
        self.path = path
        self.cache = LmdbCache.open(path, map_bytes=MAP)
        self.leader = Leader(log if log is not None else CachedLog(self.cache))

    def defer(self, *offsets: int, delay_ms: int = 3_600_000) -> None:
        channel = self.leader.cursors.channels["c"]
        for offset in offsets:
            assert channel.req(offset, 1, delay_ms, self.leader.now) is None
        self.leader.flush()


class CachedLog(TinyLog):
    """A log whose leaders begin with what the cache has."""

    def __init__(self, cache: LmdbCache) -> None:
        super().__init__()
        self.cache = cache
        self.loaded: Loaded | None = None

    def rebuild(self) -> PartitionState:
        self.loaded, _ = load(self.cache, self)
        assert encode(self.loaded.state) == encode(super().rebuild())
        return self.loaded.state


def rig_with_deferred(path: str, count: int = 40) -> Rig:
    rig = Rig(path)
    channel = rig.leader.create("c")
    rig.leader.publish(count)
    rig.leader.deliver(channel)
    rig.defer(*range(0, count, 2))
    return rig


# ---- the ordinary


def test_a_restart_goes_on_where_the_cache_is(path: str) -> None:
    rig = rig_with_deferred(path)
    assert rig.cache.flush()
    applied = rig.leader.log.log_id
    rig.leader.publish(1)
    rig.defer(1, 3)
    rig.cache.close()

    cache = LmdbCache.open(path, map_bytes=MAP)
    loaded, counted = load(cache, rig.leader.log)
    assert loaded.source == CACHE
    assert counted.entries_read == 1 + rig.leader.log.log_id - applied
    assert digest(loaded.state) == digest(rig.leader.log.__class__.__mro__[1].rebuild(rig.leader.log))
    assert isinstance(loaded.state.channels["c"].deferred, LayeredDeferred)
    cache.close()


def test_what_was_loaded_is_not_written_again(path: str) -> None:
    rig = rig_with_deferred(path)
    assert rig.cache.flush()
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
    assert rig.cache.flush()
    assert rig.cache.take(1.0) is None and rig.cache.overlaid == 0


def test_deleting_the_folder_loses_nothing(path: str) -> None:
    rig = rig_with_deferred(path)
    assert rig.cache.flush()
    rig.cache.close()
    shutil.rmtree(path)
    cache = LmdbCache.open(path, map_bytes=MAP)
    loaded, _ = load(cache, rig.leader.log)
    assert loaded.source == LOG_START and len(loaded.state.channels["c"].deferred) == 20
    assert cache.flush()
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
    assert cache.flush()
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
    rig = Rig(path)
    for n in range(20):
        rig.leader.create(f"channel-{n}")
    rig.leader.cursors.limits = SMALL
    rig.leader.cursors.begin_checkpoint(rig.leader.cursors.state.snapshot())
    rig.leader.publish(1, force=True)
    assert rig.leader.cursors.state.partial is not None
    assert rig.cache.flush()
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
    assert cache.flush()
    assert digest(loaded.state) == digest(rig.leader.cursors.state)
    cache.close()


def test_a_full_layer_asks_to_be_written(path: str, small_room: None) -> None:
    rig = rig_with_deferred(path)
    assert rig.cache.flush()
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
    assert rig.cache.flush(100.0)
    rig.defer(1, 3, 5, 7)
    taken = rig.cache.take(99.0)
    assert taken is not None and not taken.whole
    rig.cache.write(taken)
    rig.cache.written(taken, 99.0)
    assert rig.cache.overlaid == 0
    assert lmdb_proof.unproven(path), "the rows are not those of the head"
    assert rig.cache.take(99.0) is None
    assert rig.cache.flush(200.0)
    rig.cache.close()
    cache = LmdbCache.open(path, map_bytes=MAP)
    loaded, _ = load(cache, rig.leader.log)
    assert (loaded.source, loaded.batches) == (CACHE, 0)
    assert digest(loaded.state) == digest(rig.leader.cursors.state)
    cache.close()


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


# ---- what nobody needs any more


def rows_at_rest(cache: LmdbCache) -> int:
    assert cache.tables is not None
    with cache.tables._env.begin() as txn:
        counts = [txn.stat(table)["entries"] for table in (cache.tables._rows, cache.tables._due)]
    assert counts[0] == counts[1]
    return counts[0]


def test_rows_of_an_emptied_channel_are_deleted_in_time(path: str, small_room: None) -> None:
    rig = rig_with_deferred(path)
    assert rig.cache.flush() and rows_at_rest(rig.cache) == 20
    rig.leader.cursors.empty("c")
    rig.leader.flush()
    assert len(rig.leader.cursors.state.channels["c"].deferred) == 0
    for _ in range(20):
        assert rig.cache.flush()
    assert rows_at_rest(rig.cache) == 0
    assert rig.cache.take(1e9) is None
    rig.cache.close()


def test_a_deleted_topic_leaves_nothing(path: str) -> None:
    rig = rig_with_deferred(path)
    assert rig.cache.flush()
    rig.cache.forget(KEY)
    assert rig.cache.flush() and rig.cache.flush()
    assert rows_at_rest(rig.cache) == 0 and rig.cache.tables is not None and not rig.cache.tables.partitions()
    rig.cache.close()


def test_what_no_partition_claims_is_swept(path: str) -> None:
    rig = rig_with_deferred(path)
    assert rig.cache.flush()
    rig.cache.close()
    cache = LmdbCache.open(path, map_bytes=MAP)
    cache.sweep()
    assert cache.flush() and rows_at_rest(cache) == 0
    cache.close()
    rig = rig_with_deferred(path)
    assert rig.cache.flush()
    rig.cache.sweep()
    assert rig.cache.flush() and rows_at_rest(rig.cache) == 20
    rig.cache.close()


def test_a_file_that_is_mostly_free_is_written_anew(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_tables, "SPARSE_BYTES", 40 << 10)
    rig = rig_with_deferred(path, 6000)
    assert rig.cache.flush()
    big = os.path.getsize(f"{path}/data.mdb")
    rig.leader.cursors.empty("c")
    rig.leader.publish(1)
    rig.leader.deliver(rig.leader.cursors.channels["c"])
    rig.defer(6000)
    for _ in range(3):
        assert rig.cache.flush()
    rig.cache.close()
    cache = LmdbCache.open(path, map_bytes=MAP)
    assert os.path.getsize(f"{path}/data.mdb") < big / 3
    loaded, _ = load(cache, rig.leader.log)
    assert loaded.source == CACHE and loaded.state.channels["c"].deferred.next_offset(0) == 6000
    cache.close()
    assert lmdb_proof.unproven(path) is None


# ---- what goes wrong


def test_a_write_that_fails_is_tried_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_with_deferred(path)
    assert rig.cache.flush()
    real = lmdb_tables.Tables.write_rows

    def refuse(*args: object) -> None:
        raise TablesError("no space left on device")

    monkeypatch.setattr(lmdb_tables.Tables, "write_rows", refuse)
    for offset in range(1, 20, 2):
        rig.defer(offset)
        assert not rig.cache.flush()
    assert rig.cache.delayed and rig.cache.overlaid == 10 and not rig.cache.overfull
    assert digest(rig.leader.cursors.state) == digest(TinyLog.rebuild(rig.leader.log))
    monkeypatch.setattr(lmdb_cache, "OVERLAY_ROWS_MAX", 5)
    assert not rig.cache.flush() and rig.cache.overfull
    assert rig.cache.take(lmdb_cache.RETRY_SECONDS - 0.1) is None
    monkeypatch.setattr(lmdb_tables.Tables, "write_rows", real)
    assert rig.cache.flush(10.0) and rig.cache.flush(20.0)
    assert rig.cache.delayed is None and not rig.cache.overfull and rig.cache.overlaid == 0
    rig.cache.close()
    cache = LmdbCache.open(path, map_bytes=MAP)
    loaded, _ = load(cache, rig.leader.log)
    assert (loaded.source, loaded.batches) == (CACHE, 0)
    assert digest(loaded.state) == digest(rig.leader.cursors.state)
    cache.close()


def test_a_disk_that_is_full_for_a_while(path: str) -> None:
    """LMDB itself, refused by the file system in the middle of its transactions."""
    rig = Rig(path)
    channel = rig.leader.create("c")
    rig.leader.publish(30_000)
    rig.leader.deliver(channel)
    rig.defer(*range(2_000))
    assert rig.cache.flush()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(f"{path}/data.mdb") + 100_000, limits[1]))
    try:
        for first in range(2_000, 26_000, 8_000):
            rig.defer(*range(first, first + 8_000))
            written = rig.cache.flush()
        assert not written and rig.cache.delayed and rig.cache.failure is None
        assert digest(rig.leader.cursors.state) == digest(TinyLog.rebuild(rig.leader.log))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert rig.cache.flush() and rig.cache.flush() and rig.cache.overlaid == 0
    rig.cache.close()
    cache = LmdbCache.open(path, map_bytes=MAP)
    loaded, _ = load(cache, rig.leader.log)
    assert (loaded.source, loaded.batches) == (CACHE, 0)
    assert digest(loaded.state) == digest(rig.leader.cursors.state)
    cache.close()


def test_one_warning_when_writes_fail(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rig_with_deferred(path)

    def refuse(*args: object) -> None:
        raise TablesError("no space left on device")

    monkeypatch.setattr(lmdb_tables.Tables, "sync", refuse)
    caplog.set_level(logging.WARNING, "nsqha")
    for _ in range(3):
        assert not rig.cache.flush()
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
        if cache.flush():
            break
    assert cache.delayed is None and cache.overlaid == 0
    assert len(list(pinned.items())) == 30_000
    del pinned
    assert digest(leader.cursors.state) == digest(TinyLog.rebuild(log))
    cache.close()


def test_a_map_does_not_grow_under_a_reader(path: str) -> None:
    rig = rig_with_deferred(path)
    assert rig.cache.flush()
    pinned = rig.leader.cursors.state.channels["c"].deferred.snapshot()
    assert not rig.cache._grow()
    assert len(list(pinned.items())) == 20
    del pinned
    assert rig.cache._grow()
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
        assert cache.flush()
        rig.defer(1, 3)
        if when == "writing":
            taken = cache.take(0.0)
            assert taken is not None
            cache.write(taken)
            rig.defer(5)
        elif when == "written":
            assert cache.flush()
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
    assert rig.cache.flush()
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
    assert rig.cache.flush()
    other = LmdbCache.open(path, map_bytes=MAP)
    assert other.failure
    assert digest(load(other, rig.leader.log)[0].state) == digest(rig.leader.cursors.state)
    rig.cache.close()


# ---- the file


def test_the_proof_covers_every_byte(path: str) -> None:
    rig = rig_with_deferred(path)
    assert rig.cache.flush()
    rig.cache.close()
    assert lmdb_proof.unproven(path) is None
    rng = random.Random(1)
    for name in ("data.mdb", "proof"):
        file = Path(path, name)
        good = file.read_bytes()
        for _ in range(200 if name == "proof" else 50):
            bad = bytearray(good)
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
            file.write_bytes(bad)
            assert lmdb_proof.unproven(path)
        for bad in (b"", good[:-1], good + b"\0", good[: len(good) // 2]):
            file.write_bytes(bad)
            assert lmdb_proof.unproven(path)
        file.write_bytes(good)
        file.unlink()
        assert lmdb_proof.unproven(path) is not None
        file.write_bytes(good)
    assert lmdb_proof.unproven(path) is None


def test_only_our_files_are_removed(path: str) -> None:
    rig = rig_with_deferred(path)
    assert rig.cache.flush()
    rig.cache.close()
    Path(path, "mine").write_text("keep")
    Path(path, "proof").write_bytes(b"garbage")
    LmdbCache.open(path, map_bytes=MAP).close()
    assert Path(path, "mine").read_text() == "keep"
    shutil.rmtree(path)
    Path(path).write_text("a file in our place")
    cache = LmdbCache.open(path, map_bytes=MAP)
    assert cache.failure is None
    cache.close()


class Images:
    """Files of the cache after each of several writes, as they lay there before and after each transaction."""

    def __init__(self, path: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.path = path
        self.rng = random.Random(seed)
        self.states: list[dict[str, bytes]] = []
        rig = rig_with_deferred(path, 60)
        real = lmdb_tables.Tables._write

        def photographed(tables: lmdb_tables.Tables, work: object) -> object:
            done = real(tables, work)  # type: ignore[arg-type]
            self.states.append(self._files())
            return done

        with monkeypatch.context() as patched:
            patched.setattr(lmdb_tables.Tables, "_write", photographed)
            for offset in range(1, 12, 2):
                rig.defer(offset)
                self.states.append(self._files())
                assert rig.cache.flush()
                self.states.append(self._files())
        rig.cache.close()
        self.log = rig.leader.log
        self.expected = digest(TinyLog.rebuild(self.log))

    def _files(self) -> dict[str, bytes]:
        return {name: Path(self.path, name).read_bytes() for name in os.listdir(self.path)}

    def image(self) -> dict[str, bytes]:
        """Sectors of two neighbouring moments at random, perhaps cut off, perhaps with one bit flipped."""
        rng = self.rng
        n = rng.randrange(1, len(self.states))
        before, after = self.states[n - 1], self.states[n]
        share = rng.choice([0.02, 0.5, 0.98])
        mixed: dict[str, bytes] = {}
        for name in after:
            old, new = before.get(name, b""), after[name]
            sectors = [
                (new if rng.random() < share else old)[at : at + SECTOR]
                for at in range(0, max(len(old), len(new)), SECTOR)
            ]
            mixed[name] = b"".join(sector.ljust(SECTOR, b"\0") for sector in sectors)[: max(len(old), len(new))]
        if rng.random() < 0.3:
            self._flip(mixed)
        if rng.random() < 0.1:
            name = rng.choice(sorted(mixed))
            mixed[name] = mixed[name][: rng.randrange(len(mixed[name]) + 1)]
        return mixed

    def flipped(self) -> dict[str, bytes]:
        """A complete write with one bit flipped."""
        image = dict(self.states[-1])
        self._flip(image)
        return image

    def _flip(self, image: dict[str, bytes]) -> None:
        name = self.rng.choice(sorted(name for name in image if image[name]))
        data = bytearray(image[name])
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        image[name] = bytes(data)

    def judge(self, image: dict[str, bytes]) -> str:
        """What a start finds there: the right state, whatever it is; where it came from."""
        shutil.rmtree(self.path)
        os.makedirs(self.path)
        for name, data in image.items():
            Path(self.path, name).write_bytes(data)
        cache = LmdbCache.open(self.path, map_bytes=MAP)
        try:
            assert cache.failure is None
            loaded, _ = load(cache, self.log)
            assert digest(loaded.state) == self.expected
            cache.sweep()
            assert cache.flush()
            assert digest(loaded.state) == self.expected
            return loaded.source
        finally:
            cache.close()


def test_crash_images_prove_themselves_or_are_thrown_away(
    path: str, monkeypatch: pytest.MonkeyPatch, small_room: None, fast_disk: None
) -> None:
    """LMDB is never shown a file that is not whole: it would end the process."""
    images = Images(path, monkeypatch, seed=5)
    sources = [images.judge(images.image()) for _ in range(160)]
    assert 10 < sources.count(CACHE) < 150, "the images are all whole, or all broken"
    assert images.judge(images.states[-1]) == CACHE
    damaged = [images.judge(images.flipped()) for _ in range(40)]
    # A flip in LMDB's lock file is none: that one is made anew.
    assert CACHE in damaged and LOG_START in damaged


# ---- any history


class CachedHistory(History):
    """A random life whose leaders' committed state is cached; writes end late or never, restarts find anything."""

    def __init__(self, seed: int, path: str, **given: object) -> None:
        self.path = path
        self.luck = random.Random(seed * 7 + 1)
        self.cache = LmdbCache.open(path, map_bytes=MAP)
        self.taken: Taken | None = None
        self.copies: list[dict[str, bytes]] = []
        self.sources: list[str] = []
        super().__init__(seed, **given)  # type: ignore[arg-type]

    def start(self) -> None:
        if not isinstance(self.log, CachedLog):
            self.log = CachedLog(self.cache)
        else:
            self.restart_cache()
        super().start()
        assert self.log.loaded is not None
        self.sources.append(self.log.loaded.source)

    def menu(self):
        steps, weights = super().menu()
        return [*steps, self.write_cache], [*weights, 15.0]

    def write_cache(self) -> None:
        """One step of a write: gathered, written, let go of."""
        for _ in range(self.luck.randrange(1, 4)):
            if self.taken is None:
                self.taken = self.cache.take(-1.0, force=self.luck.random() < 0.6)
            elif self.luck.random() < 0.3:
                self.cache.write_rows(self.taken)
            elif self.luck.random() < 0.5:
                self.cache.write(self.taken)
                if self.luck.random() < 0.2:
                    self.taken.error = TablesError("so it seemed")
                self.cache.written(self.taken, 0.0)
                self.taken = None
            else:
                self.cache.write(self.taken)

    def restart_cache(self) -> None:
        if self.luck.random() < 0.7:
            if self.taken is not None:
                self.cache.write(self.taken)
                self.cache.written(self.taken, 0.0)
            self.cache.flush()
        self.cache.close()
        self.taken = None
        self.copies.append({name: Path(self.path, name).read_bytes() for name in os.listdir(self.path)})
        luck = self.luck.random()
        if luck < 0.2:  # an old copy
            for name, data in self.luck.choice(self.copies).items():
                Path(self.path, name).write_bytes(data)
        elif luck < 0.3:
            shutil.rmtree(self.path)
        elif luck < 0.4:
            Path(self.path, "data.mdb").write_bytes(self.luck.randbytes(9999))
        self.cache = LmdbCache.open(self.path, map_bytes=MAP)
        self.log.cache = self.cache


def test_any_life_is_the_same_with_a_cache(tmp_path: Path, small_room: None, fast_disk: None) -> None:
    """Judged by the model and by rebuilding from the log after every step."""
    sources = []
    for seed in range(60):
        history = CachedHistory(seed, str(tmp_path / f"{seed}"))
        history.run()
        history.cache.close()
        sources += history.sources
    assert sources.count(CACHE) > 20 and sources.count(LOG_START) > 20 and CHECKPOINT in sources


class CutLog(CountedLog):
    """The beginning of a log; what follows may be another future."""

    def __init__(self, log: TinyLog, end: int) -> None:
        view = TinyLog()
        view.batches = log.batches[:end]
        if end:
            last = log.batches[end - 1][0]
            view.log_id, view.end_offset, view.end_position = last.log_id, last.end_offset, last.end_position
        super().__init__(view)


def another_future(log: TinyLog, at: int, *, same: bool) -> TinyLog:
    """The same up to `at`; then the batches of another leader, with other contents unless `same`."""
    other = TinyLog()
    other.batches = log.batches[:at]
    for n, (entry, data) in enumerate(log.batches[at:]):
        flags = entry.flags if same or n else entry.flags & ~NEEDS_LOOK
        other.batches.append((entry._replace(epoch=entry.epoch + 1, chain=entry.chain ^ 1, flags=flags), data))
    other.log_id, other.end_offset, other.end_position = log.log_id, log.end_offset, log.end_position
    return other


@pytest.mark.parametrize("block", range(4))
def test_a_follower_that_restarts_and_whose_log_is_cut_is_where_the_log_is(
    path: str, small_room: None, fast_disk: None, block: int
) -> None:
    """The log may have lost what the cache has applied, and have got something else in its place."""
    sources = []
    for seed in range(block * 8, block * 8 + 8):
        rng = random.Random(seed)
        history = History(seed, steps=80)
        history.unlink = lambda: None  # type: ignore[method-assign]
        same = bool(seed % 2)
        if not same:
            history.write_checkpoint = lambda: None  # type: ignore[method-assign]  # it would tell of the other future
        history.run()
        log, at = history.log, 0
        shutil.rmtree(path, ignore_errors=True)
        copies: list[dict[str, bytes]] = []
        for _ in range(8):
            if rng.random() < 0.5:  # cut, and another future
                at = rng.randrange(at + 1)
                log = another_future(log, at, same=same)
            elif copies and rng.random() < 0.3:
                for name, data in rng.choice(copies).items():
                    Path(path, name).write_bytes(data)
            cache = LmdbCache.open(path, map_bytes=MAP)
            view = CutLog(log, at)
            loaded = cache.load(KEY, view, view.read)
            sources.append(loaded.source)
            assert encode(loaded.state) == encode(view.log.rebuild())
            while at < len(log.batches) and rng.random() < 0.95:
                entry, data = log.batches[at]
                loaded.state.apply(entry, data)
                at += 1
                if rng.random() < 0.2:
                    cache.flush()
            assert encode(loaded.state) == encode(CutLog(log, at).log.rebuild())
            cache.close()
            copies.append({name: Path(path, name).read_bytes() for name in os.listdir(path)})
    assert sources.count(CACHE) > 5 and sources.count(LOG_START) > 5


def test_what_the_cache_says_of_a_row_is_what_was_put(path: str) -> None:
    tables = lmdb_tables.Tables.open(path, map_bytes=MAP)
    row = Deferred((1 << 63) - 1, -5, 65535, 1 << 62)
    number = (1 << 32) - 2
    tables.write_rows([(number, {row.offset: row}, [row.offset])])
    assert tables.get(number, row.offset) == row
    assert tables.by_due(number, (-(1 << 63), -1), 9) == [row] == tables.by_offset(number, 0, 9)
    tables.close()


# ---- a log in use


def test_of_a_log_in_use_a_snapshot_is_read_now_the_log_itself_later_and_nothing_that_is_stored(path: str) -> None:
    rig = rig_with_deferred(path)
    assert rig.cache.flush()
    expected = encode(rig.leader.cursors.state)
    snapshot, log = CountedLog(rig.leader.log), CountedLog(rig.leader.log)
    loaded = rig.cache.load(KEY, snapshot, snapshot.read, later=(log, log.read))
    assert loaded.source == LOG_START and encode(loaded.state) == expected and not log.entries_read
    assert rig.cache.flush()
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
