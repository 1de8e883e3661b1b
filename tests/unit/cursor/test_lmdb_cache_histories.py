"""Any life of a leader or follower, with crashes and cuts, is the same with a cache."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from nsqha.cursor.cache.lmdb_cache import CacheWrite, LmdbCache
from nsqha.cursor.cache.lmdb_tables import TablesError
from nsqha.cursor.committed.checkpoint import encode
from nsqha.cursor.committed.loading import CACHE, CHECKPOINT, LOG_START
from nsqha.cursor.committed.state import NEEDS_LOOK
from tests.unit.cursor.cache_rig import KEY, MAP, CachedLog, flush
from tests.unit.cursor.history import History
from tests.unit.cursor.tiny import TinyLog
from tests.unit.cursor.tiny_cache import CountedLog


class CachedHistory(History):
    """A random life whose leaders' committed state is cached; writes end late or never, restarts find anything."""

    def __init__(self, seed: int, path: str, **given: object) -> None:
        self.path = path
        self.luck = random.Random(seed * 7 + 1)
        self.cache = LmdbCache.open(path, map_bytes=MAP)
        self.taken: CacheWrite | None = None
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
            flush(self.cache)
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
                    flush(cache)
            assert encode(loaded.state) == encode(CutLog(log, at).log.rebuild())
            cache.close()
            copies.append({name: Path(path, name).read_bytes() for name in os.listdir(path)})
    assert sources.count(CACHE) > 5 and sources.count(LOG_START) > 5
