"""The files of the cache after a crash or damage: proven whole, or thrown away."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from nsqha.cursor.cache import lmdb_proof, lmdb_tables
from nsqha.cursor.cache.lmdb_cache import LmdbCache
from nsqha.cursor.committed.checkpoint import digest
from nsqha.cursor.committed.loading import CACHE, LOG_START
from tests.unit.cursor.cache_rig import MAP, flush, load, rig_with_deferred
from tests.unit.cursor.tiny import TinyLog

SECTOR = 512


def test_the_proof_covers_every_byte(path: str) -> None:
    rig = rig_with_deferred(path)
    assert flush(rig.cache)
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
    assert flush(rig.cache)
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
                assert flush(rig.cache)
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
            assert flush(cache)
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
