"""Full collections do not scan again what earlier ones found alive; cycles in it are found all the same."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

from nsqha.server.runtime.allocator import (
    LONG_SECONDS,
    MADE,
    MIDDLE_PER_FULL,
    SHARE,
    WHOLE_SECONDS,
    WORTH_BYTES,
    YOUNG,
    YOUNG_PER_MIDDLE,
    FullCollections,
)


class FakeCollector:
    """A collector that takes `seconds` for each object that it scans."""

    def __init__(self) -> None:
        self.now = 0.0
        self.used = 0.0
        self.stands_still = 0.0  # for others, during each collection
        self.callbacks: list[Any] = []
        self.scanned: list[int] = []
        self.objects = 0
        self.frozen = 0
        self.resident = 100 << 20
        self.thresholds = (700, 10, 10)

    def set_threshold(self, *thresholds: int) -> None:
        assert len(thresholds) == 3
        self.thresholds = thresholds  # type: ignore[assignment]

    def clock(self) -> float:
        return self.now

    def cpu(self) -> float:
        return self.used

    def freeze(self) -> None:
        self.frozen, self.objects = self.frozen + self.objects, 0

    def unfreeze(self) -> None:
        self.frozen, self.objects = 0, self.frozen + self.objects

    def collect(self) -> None:
        for tell in self.callbacks:
            tell("start", {"generation": 2})
        self.scanned.append(self.objects)
        self.now += self.objects * 1e-6 + self.stands_still
        self.used += self.objects * 1e-6
        for tell in self.callbacks:
            tell("stop", {"generation": 2})


class NoTimer:
    def call_later(self, *how: object) -> None:
        pass


def started() -> tuple[FullCollections, FakeCollector]:
    collector = FakeCollector()
    collections = FullCollections(
        clock=collector.clock, cpu=collector.cpu, collector=collector, resident=lambda: collector.resident
    )
    collector.objects = 100_000
    collections.start(cast(Any, NoTimer()))
    assert not collector.scanned and collector.frozen == 100_000
    assert collector.thresholds == (YOUNG, YOUNG_PER_MIDDLE, MIDDLE_PER_FULL)
    return collections, collector


def test_what_outlived_a_long_collection_is_not_scanned_again() -> None:
    _, collector = started()
    for _ in range(10):
        collector.objects += 30_000
        collector.collect()
    assert collector.scanned == [30_000] * 10 and collector.frozen == 400_000


def test_what_is_scanned_in_no_time_stays_where_it_is() -> None:
    _, collector = started()
    few = int(LONG_SECONDS / 2e-6)
    collector.objects = few
    collector.collect()
    assert collector.objects == few


def test_a_short_one_that_had_to_wait_for_a_core_is_short() -> None:
    collections, collector = started()
    collector.stands_still = 10 * LONG_SECONDS
    collector.objects = 1000
    collector.collect()
    collector.resident += WORTH_BYTES
    collections.look()
    assert collector.objects == 1000 and collector.scanned == [1000], "nothing was set aside, so nothing is to be found"


def test_everything_is_scanned_again_when_the_process_has_grown_but_not_too_often() -> None:
    collections, collector = started()
    collector.objects = 400_000
    collector.collect()
    collections.look()
    assert collector.scanned[-1] == 400_000, "it has not grown"
    collector.resident += WORTH_BYTES
    collections.look()
    assert collector.scanned[-1] == 500_000 and collector.frozen == 500_000
    collector.now += 0.9 * SHARE * 0.5
    collector.resident += WORTH_BYTES
    collector.objects = 30_000
    collector.collect()
    collections.look()
    assert collector.scanned[-1] == 30_000, "too early: it took longer the last time"


def test_everything_is_scanned_again_after_an_hour() -> None:
    collections, collector = started()
    collector.objects = 400_000
    collector.collect()
    collector.now += WHOLE_SECONDS
    collections.look()
    assert collector.scanned[-1] == 500_000


def test_nothing_is_scanned_again_while_nothing_was_set_aside() -> None:
    collections, collector = started()
    collector.now += 1e9
    collections.look()
    assert not collector.scanned


def test_a_cycle_that_was_set_aside_is_freed_in_the_end() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    now = [0.0]
    collections = FullCollections(clock=lambda: now[0], cpu=lambda: now[0])
    try:
        collections.start(cast(Any, NoTimer()))
        cycle = Cycle()
        gone = weakref.ref(cycle)
        collections._observe("start", {"generation": 2})
        now[0] = 1.0
        collections._observe("stop", {"generation": 2})
        del cycle
        gc.collect()
        assert gone() is not None, "it was set aside"
        now[0] += WHOLE_SECONDS
        collections.look()
        assert gone() is None
    finally:
        gc.callbacks.remove(collections._observe)
        gc.unfreeze()


def test_what_is_made_to_stay_is_set_aside_without_a_look_at_it():
    collections, collector = started()
    for number in range(1, 3 * MADE):
        collector.objects += 300
        collections.made()
        assert collector.objects == 300 * (number % MADE)
    assert not collector.scanned
    collector.resident += WORTH_BYTES
    collector.now += 1.0
    collections.look()
    assert collector.scanned == [100_000 + 300 * (3 * MADE - 1)], "a cycle in it is found when the process has grown"


def test_a_process_whose_collections_nobody_looks_after_sets_nothing_aside():
    collector = FakeCollector()
    collections = FullCollections(collector=collector)
    collector.objects = 10
    for _ in range(2 * MADE):
        collections.made()
    assert collector.frozen == 0
