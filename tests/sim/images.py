"""Crash images: run a workload on a simulated disk up to some moment, then look at what a restart may find.

    for image in crash_images(MyWorkload, seeds=range(100), images=5):
        check(image)

A workload does things with the storage it is given, and keeps a history of what it was told (acknowledged, synced,
refused) that is exact at every moment: `run` ends early with `Crashed` when the machine goes off in mid-operation.
Everything is drawn from the seed; a check that fails names it (`image.label`), and `crash_images(..., seeds=[n])`
repeats it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tests.sim.storage import SECTOR, Crashed, SimStorage


class Workload(Protocol):
    """Something that uses a disk and remembers what it was promised."""

    def run(self) -> None:
        """Do it all; may raise Crashed at any operation."""


W = TypeVar("W", bound=Workload)


@dataclass
class Image(Generic[W]):
    """One possible state of the disk after a crash."""

    label: str
    history: W  # shared by all images of a seed: read it only
    storage: SimStorage
    rng: random.Random


def crash_images(
    make: Callable[[SimStorage, random.Random], W], *, seeds: Iterable[int], images: int, operations_max: int = 400
) -> Iterator[Image[W]]:
    """For every seed one workload that crashes somewhere (or ends), and several images of that moment."""
    for seed in seeds:
        rng = random.Random(seed)
        storage = SimStorage(rng)
        workload = make(storage, rng)
        storage.crash_after(rng.randrange(1, operations_max))
        try:
            workload.run()
        except Crashed:
            pass
        for n in range(images):
            image_rng = random.Random(seed * 1_000_003 + n)
            yield Image(f"seed {seed}, image {n}", workload, storage.crash(image_rng), image_rng)


def every_crash(make: Callable[[SimStorage, random.Random], W], *, images: int) -> Iterator[Image[W]]:
    """One workload, crashed at its 1st, 2nd, 3rd... operation and after its last one, several images each.

    `make` does what comes before; only `run` is taken apart.
    """
    n = 0
    crashed = True
    while crashed:
        n += 1
        storage = SimStorage(random.Random(n))
        workload = make(storage, random.Random(0))
        storage.crash_after(n)
        try:
            workload.run()
            crashed = False
        except Crashed:
            pass
        for i in range(images):
            image_rng = random.Random(n * 1_000_003 + i)
            yield Image(f"operation {n}, image {i}", workload, storage.crash(image_rng), image_rng)


@contextmanager
def named(image: Image[W]) -> Iterator[None]:
    """Put the image's name into every failure."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"crash image: {image.label}")
        raise


def flip_one_bit(storage: SimStorage, rng: random.Random, directory: str) -> tuple[str, int] | None:
    """Flip one random bit of one file under `directory`, small files as likely as large ones; (path, bit)."""
    files = [(path, data) for path, data in storage.contents().items() if path.startswith(directory) and data]
    if not files:
        return None
    path, data = rng.choice(files)
    bit = rng.randrange(len(data) * 8)
    storage.flip(path, bit)
    return path, bit


def blank_one_sector(storage: SimStorage, rng: random.Random, directory: str) -> tuple[str, int] | None:
    """Lose one random sector of one file under `directory`; (path, sector)."""
    files = [(path, data) for path, data in storage.contents().items() if path.startswith(directory) and data]
    if not files:
        return None
    path, data = rng.choice(files)
    sector = rng.randrange(-(-len(data) // SECTOR))
    storage.blank(path, sector)
    return path, sector
