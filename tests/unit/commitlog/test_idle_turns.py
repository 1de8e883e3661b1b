"""Of many logs, the busy ones are looked at each second and the idle ones in turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nsqha.commitlog.entry import Place
from nsqha.commitlog.idle_turns import IDLE_LOOKS, IdleTurns


def partitions(count: int, *, idle: bool) -> list[Any]:
    made = []
    for _ in range(count):
        end = Place(1, 0, 0)
        made.append(SimpleNamespace(log=SimpleNamespace(end=end, idle_at=end if idle else None)))
    return made


def test_a_look_at_many_idle_partitions_costs_what_one_at_a_few_does():
    turns, many = IdleTurns(), partitions(5000, idle=True)
    assert {len(turns.choose(many)) for _ in range(300)} == {IDLE_LOOKS}


def test_each_idle_partition_has_its_turn():
    turns, many = IdleTurns(), partitions(2 * IDLE_LOOKS + 7, idle=True)
    seen = [id(partition) for _ in range(3) for partition in turns.choose(many)]
    assert sorted(seen) == sorted(map(id, many))


def test_a_few_are_all_looked_at_each_time():
    turns, few = IdleTurns(), partitions(IDLE_LOOKS, idle=True)
    assert turns.choose(few) == few == turns.choose(few)


def test_what_was_appended_to_is_looked_at_in_the_next_second_and_once():
    turns, many = IdleTurns(), partitions(1000, idle=True)
    many[3].log.end = Place(1, 0, 0)  # equal, and another one: what is compared is whether something was written
    many[777].log.end = Place(2, 1, 50)
    chosen = turns.choose(many)
    assert len(chosen) == len({id(partition) for partition in chosen}) == IDLE_LOOKS + 1  # one has its turn as well
    assert any(partition is many[777] for partition in chosen)


def test_partitions_that_went_away_shorten_the_round():
    turns, many = IdleTurns(), partitions(3 * IDLE_LOOKS, idle=True)
    turns.choose(many)
    turns.choose(many)
    assert len(turns.choose(many[: IDLE_LOOKS + 1])) == IDLE_LOOKS
