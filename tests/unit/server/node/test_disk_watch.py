"""A disk that hangs is announced after so many looks at the same round, and trusted again after as many others."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from nsqha.errors import Unavailable
from nsqha.server.node.cluster.disk_watch import CALM_LOOKS, LOOKS, DiskWatch


class DiskWatchRig:
    def __init__(self) -> None:
        self.round = 0
        self.away = False
        self.told: list[bool] = []
        self.watch = DiskWatch(lambda: self.round, self.announce, self.spawn)

    async def announce(self, hangs: bool) -> None:
        if self.away:
            raise Unavailable("etcd is away")
        self.told.append(hangs)

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
