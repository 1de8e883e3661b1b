"""What damage does to files, and that it can prove it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jepsen.deployment import NotNow
from tests.jepsen.faults.damage import CHUNK, Change, cut_short, flipped, misplaced
from tests.jepsen.faults.table import FAULTS

SIZE = 5 * CHUNK + 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.mark.parametrize("change", [flipped, cut_short, misplaced])
def test_a_change_bites_and_says_where(path: Path, change: Callable[[Path, random.Random], Change]) -> None:
    for seed in range(20):
        before = path.read_bytes()
        made = change(path, random.Random(seed))
        assert made.bit()
        after = path.read_bytes()
        assert after != before
        assert after[: made.at] == before[: made.at]
        assert after[made.at + len(made.good) :] == before[made.at + len(made.good) :]
        path.write_bytes(before)
        assert not made.bit(), "what is mended is no damage"


def test_a_flip_changes_one_byte_and_a_cut_the_end(path: Path) -> None:
    assert len(flipped(path, random.Random(1)).good) == 1
    made = cut_short(path, random.Random(2))
    assert path.stat().st_size == made.at == SIZE - len(made.good)


def test_a_flip_is_not_behind_what_was_written(path: Path) -> None:
    path.write_bytes(b"record" + bytes(1 << 20))
    assert max(flipped(path, random.Random(seed)).at for seed in range(50)) < 6


def test_small_cuts_are_as_likely_as_large_ones(path: Path) -> None:
    whole, sizes = path.read_bytes(), []
    for seed in range(200):
        sizes.append(len(cut_short(path, random.Random(seed)).good))
        path.write_bytes(whole)
    assert sum(size < 128 for size in sizes) > 40
    assert sum(size > 4096 for size in sizes) > 10


def test_a_file_of_one_chunk_has_no_other_chunk(path: Path) -> None:
    path.write_bytes(bytes(CHUNK))
    with pytest.raises(NotNow):
        misplaced(path, random.Random(1))


def test_what_hits_a_copy_for_good_comes_alone() -> None:
    damage = [kind for kind in FAULTS.values() if kind.family in {f"D{n}" for n in range(8, 14)}]
    assert len(damage) == 14
    assert all(kind.alone for kind in damage)
    assert all("disks" in kind.needs for kind in FAULTS.values() if kind.id.startswith("D"))
