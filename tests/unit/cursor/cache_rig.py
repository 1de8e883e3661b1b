"""A leader whose committed state is cached, and what a restart finds of it."""

from __future__ import annotations

from nsqha.cursor.cache.lmdb_cache import LmdbCache
from nsqha.cursor.committed.checkpoint import digest, encode
from nsqha.cursor.committed.loading import CACHE, LoadedState
from nsqha.cursor.committed.state import PartitionState
from tests.unit.cursor.tiny import Leader, TinyLog
from tests.unit.cursor.tiny_cache import CountedLog

KEY = (0xABCDEF, 3)
MAP = 16 << 20


def load(cache: LmdbCache, log: TinyLog) -> tuple[LoadedState, CountedLog]:
    counted = CountedLog(log)
    return cache.load(KEY, counted, counted.read), counted


def flush(cache: LmdbCache, now: float = 0.0) -> bool:
    """Write everything now; whether all is written."""
    taken = cache.take(now, force=True)
    if taken is None:
        return cache.failure is None
    cache.write(taken)
    cache.written(taken, now)
    return taken.error is None


class CacheRig:
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

    def assert_all_is_cached(self) -> None:
        """A start has everything from the cache, and reads no batch of the log."""
        self.cache.close()
        cache = LmdbCache.open(self.path, map_bytes=MAP)
        loaded, _ = load(cache, self.leader.log)
        assert (loaded.source, loaded.batches) == (CACHE, 0)
        assert digest(loaded.state) == digest(self.leader.cursors.state)
        cache.close()


class CachedLog(TinyLog):
    """A log whose leaders begin with what the cache has."""

    def __init__(self, cache: LmdbCache) -> None:
        super().__init__()
        self.cache = cache
        self.loaded: LoadedState | None = None

    def rebuild(self) -> PartitionState:
        self.loaded, _ = load(self.cache, self)
        assert encode(self.loaded.state) == encode(super().rebuild())
        return self.loaded.state


def rig_with_deferred(path: str, count: int = 40) -> CacheRig:
    rig = CacheRig(path)
    channel = rig.leader.create("c")
    rig.leader.publish(count)
    rig.leader.deliver(channel)
    rig.defer(*range(0, count, 2))
    return rig
