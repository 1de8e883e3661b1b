"""A disk in trouble is announced after so many looks that found it so, and trusted again after as many others."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from nsqha.errors import Unavailable
from nsqha.server.node.cluster.disk_watch import (
    CALM_FACTOR,
    CALM_LOOKS,
    CALM_LOOKS_MAX,
    FORGET_LOOKS,
    LOOKS,
    REFUSING_LOOKS,
    DiskWatch,
)

FULL = "disk low: 1 bytes free, 2 required"


class DiskWatchRig:
    def __init__(self) -> None:
        self.round = 0
        self.journal = 0
        self.refuses = ""
        self.away = False
        self.alone = False
        self.told: list[bool] = []
        self.declined: list[str] = []
        self.watch = DiskWatch(
            lambda: (self.round, self.journal), lambda: self.refuses, self.announce, self.spawn, slow_seconds=2.0
        )

    async def announce(self, hangs: bool, declines: str) -> bool:
        if self.away:
            raise Unavailable("etcd is away")
        if self.alone and hangs:
            return False
        self.told.append(hangs)
        self.declined.append(declines)
        return True

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        with suppress(StopIteration):
            work.send(None)

    def look(self, times: int, *, next_round: int = 0) -> None:
        for _ in range(times):
            self.round += next_round
            self.watch.look()


def test_rounds_that_end_are_no_news_however_many_there_are() -> None:
    rig = DiskWatchRig()
    rig.look(3 * LOOKS)
    rig.look(3 * LOOKS, next_round=1)
    rig.look(LOOKS - 1)  # one that takes long
    rig.look(3 * LOOKS, next_round=1)
    assert rig.told == []


def test_a_round_that_does_not_end_is_told_once_and_taken_back_after_a_while() -> None:
    rig = DiskWatchRig()
    rig.round = 7
    rig.look(LOOKS)
    assert rig.told == []
    rig.look(5)
    assert rig.told == [True]
    for _ in range(3):
        rig.look(CALM_LOOKS - 1, next_round=1)
        rig.look(1)  # the last one takes two looks
    assert rig.told == [True]
    rig.look(CALM_LOOKS, next_round=1)
    assert rig.told == [True, False]
    rig.look(3 * CALM_LOOKS, next_round=1)
    assert rig.told == [True, False]


def test_what_could_not_be_told_is_told_as_soon_as_it_can_be() -> None:
    rig = DiskWatchRig()
    rig.away = True
    rig.round = 7
    rig.look(2 * LOOKS)
    assert rig.told == []
    rig.away = False
    rig.look(1)
    assert rig.told == [True]


def test_a_write_of_the_journal_that_does_not_end_is_told_as_a_round_is() -> None:
    rig = DiskWatchRig()
    rig.journal = 3
    rig.look(LOOKS + 1, next_round=1)
    assert rig.told == [True]


def test_one_slow_round_is_no_news_and_the_second_one_soon_after_is() -> None:
    rig = DiskWatchRig()
    slow = lambda: (rig.look(1, next_round=1), rig.look(2))  # noqa: E731
    slow()
    rig.look(CALM_LOOKS, next_round=1)
    slow()
    assert rig.told == []
    rig.look(CALM_LOOKS - 2, next_round=1)
    slow()
    assert rig.told == [True]


def test_rounds_shorter_than_a_replica_may_be_late_are_no_news() -> None:
    rig = DiskWatchRig()
    for _ in range(50):
        rig.look(1, next_round=1)
        rig.look(1)
    assert rig.told == []


def test_each_time_that_trouble_comes_back_a_longer_calm_ends_it() -> None:
    rig = DiskWatchRig()
    for calm in (CALM_LOOKS, CALM_LOOKS * CALM_FACTOR, CALM_LOOKS * CALM_FACTOR**2):
        rig.refuses = FULL
        rig.look(REFUSING_LOOKS)
        rig.refuses = ""
        rig.look(calm - 1)
        assert rig.declined[-1] == FULL
        rig.look(1)
        assert rig.declined[-1] == ""
    for _ in range(9):
        rig.refuses = FULL
        rig.look(REFUSING_LOOKS)
        rig.refuses = ""
        rig.look(CALM_LOOKS_MAX)
        assert rig.declined[-1] == ""


def test_trouble_that_is_long_past_does_not_count() -> None:
    rig = DiskWatchRig()
    for _ in range(3):
        rig.refuses = FULL
        rig.look(REFUSING_LOOKS)
        rig.refuses = ""
        rig.look(FORGET_LOOKS)
    rig.refuses = FULL
    rig.look(REFUSING_LOOKS)
    rig.refuses = ""
    rig.look(CALM_LOOKS)
    assert rig.declined[-1] == ""


def test_a_refusal_is_no_news_and_one_after_the_other_is() -> None:
    rig = DiskWatchRig()
    rig.refuses = FULL
    rig.look(REFUSING_LOOKS - 1)
    rig.refuses = ""
    rig.look(1)
    rig.refuses = FULL
    rig.look(REFUSING_LOOKS - 1)
    assert rig.declined == []
    rig.look(5)
    assert (rig.told, rig.declined) == ([False], [FULL])


def test_what_no_other_node_could_take_over_is_told_when_one_can() -> None:
    rig = DiskWatchRig()
    rig.alone = True
    rig.round = 7
    rig.look(2 * LOOKS)
    assert rig.told == []
    rig.alone = False
    rig.look(1)
    assert rig.told == [True]
