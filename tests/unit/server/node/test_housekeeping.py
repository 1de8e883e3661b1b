"""Housekeeping while many partitions begin to lead: what concerns partitions waits, for a while,
but not clock and disk."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from nsqha.server.node import housekeeping
from nsqha.server.node.housekeeping import HOUSEKEEPING_SECONDS, MANY_BEGINNING, PUT_OFF_SECONDS, Housekeeping
from tests.fakes.loop import VirtualLoop


class Node:
    """A node that counts what housekeeping looks at."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.looks: Counter[str] = Counter()
        self.beginning = 0
        count = self.looks.update
        parts = SimpleNamespace(
            loop=self.loop,
            clock=self.loop.clock,
            journal=SimpleNamespace(dirty=False),
            opener=SimpleNamespace(
                measures=SimpleNamespace(loop_lag_seconds=SimpleNamespace(observe=lambda seconds: None)),
                runtime=SimpleNamespace(turns=SimpleNamespace(choose=list)),
            ),
        )
        self.housekeeping = Housekeeping(
            cast(Any, parts),
            cast(Any, {}),
            cast(Any, self),
            cast(Any, SimpleNamespace(look_at_disk=lambda: count(["disk space"]))),
            journal_writer=cast(Any, None),
            cache_writer=cast(Any, SimpleNamespace(write=lambda: None)),
            spawn=lambda work: None,
            forget_targets=lambda: None,
        )

    def look_at_clock(self) -> None:
        self.looks["clock"] += 1

    def look_around(self) -> None:
        self.looks["disk"] += 1

    def keep_house(self) -> None:
        self.looks["partitions"] += 1


def test_partitions_are_looked_at_once_a_second() -> None:
    node = Node()
    node.housekeeping.start()
    node.loop.pass_time(3.5)
    assert node.looks["partitions"] == 3
    node.housekeeping.stop()


def test_while_many_begin_to_lead_only_clock_and_disk_are_looked_at() -> None:
    node = Node()
    node.housekeeping.start()
    node.beginning = MANY_BEGINNING
    node.loop.pass_time(HOUSEKEEPING_SECONDS + 2.5 * PUT_OFF_SECONDS)
    assert node.looks["partitions"] == 0
    assert min(node.looks[what] for what in ("clock", "disk", "disk space")) >= 3
    node.beginning = MANY_BEGINNING - 1
    node.loop.pass_time(PUT_OFF_SECONDS)
    assert node.looks["partitions"] == 1
    node.loop.pass_time(10 * HOUSEKEEPING_SECONDS)
    assert node.looks["partitions"] == 11, "as before"
    node.housekeeping.stop()


def test_if_they_do_not_come_to_lead_the_others_do_not_wait_for_ever() -> None:
    node = Node()
    node.housekeeping.start()
    node.beginning = 1000
    longest = HOUSEKEEPING_SECONDS + housekeeping.PUT_OFFS_MAX * PUT_OFF_SECONDS
    assert longest <= 3.0
    node.loop.pass_time(10 * longest)
    assert node.looks["partitions"] >= 9
    node.housekeeping.stop()
