"""Of many logs, the busy ones are looked at each second and the idle ones in turn."""

from __future__ import annotations

import gc
from weakref import WeakKeyDictionary, ref

from nsqha.commitlog.idle_turns import IDLE_LOOKS, IdleTurns
from nsqha.commitlog.log import PartitionLog, wake
from nsqha.commitlog.storage import MemStorage
from tests.unit.commitlog.logs import add, new_log, sync

ROUND = 8  # seconds after which each of 200 had its turn


class Led:
    """A partition that is looked at."""

    def __init__(self, number: int, log: PartitionLog) -> None:
        self.number = number
        self.log = log


class Walked(WeakKeyDictionary[Led, None]):
    """All partitions; counts the walks over them."""

    walks = 0

    def keyrefs(self) -> list[ref[Led]]:
        self.walks += 1
        return super().keyrefs()


class Many:
    """Partitions that were looked at once, and had nothing to do then."""

    def __init__(self, count: int) -> None:
        self.turns = IdleTurns[Led]()
        self.turns._all = self.known = Walked()
        self.busy: set[int] = set()  # are never idle
        self.all = [Led(number, new_log(MemStorage())) for number in range(count)]
        for led in self.all:
            self.turns.add(led)
        self.look()

    def look(self) -> list[int]:
        """The numbers of those that are looked at in one second."""
        chosen = self.turns.choose()
        for led in chosen:
            led.log.idle_at = None if led.number in self.busy else led.log.end
            self.turns.looked(led)
        numbers = [led.number for led in chosen]
        assert len(numbers) == len(set(numbers))
        return numbers

    def round(self) -> list[int]:
        return [number for _ in range(ROUND) for number in self.look()]


def test_a_look_at_many_idle_partitions_costs_what_one_at_a_few_does():
    many = Many(200)
    assert {len(many.look()) for _ in range(ROUND - 1)} == {IDLE_LOOKS}
    assert many.known.walks == 1, "over all partitions, for the whole round"


def test_each_idle_partition_has_its_turn():
    many = Many(200)
    assert sorted(many.round()) == list(range(200))


def test_a_few_are_all_looked_at_each_time():
    few = Many(IDLE_LOOKS)
    assert few.look() == few.look() == list(range(IDLE_LOOKS))


def test_a_turn_at_the_end_of_a_round_is_as_long_as_others():
    many = Many(IDLE_LOOKS + 4)
    assert many.look() == [*range(IDLE_LOOKS, IDLE_LOOKS + 4), *range(IDLE_LOOKS - 4)]


def test_what_was_appended_to_is_looked_at_in_the_next_second_and_once():
    many = Many(200)
    add(many.all[150].log, b"a")
    add(many.all[150].log, b"b")
    assert many.look() == [150, *range(IDLE_LOOKS, 2 * IDLE_LOOKS)]
    assert many.look() == [*range(2 * IDLE_LOOKS, 3 * IDLE_LOOKS)]
    add(many.all[150].log, b"c")
    assert 150 in many.look(), "it wakes again"


def test_what_was_cut_or_woken_is_looked_at_in_the_next_second():
    many = Many(200)
    log = many.all[150].log
    add(log, b"a")
    sync(log)
    many.look()
    log.cutting(log.start.log_id)()
    wake(many.all[151].log)
    assert {150, 151} <= set(many.look())


def test_what_is_busy_is_looked_at_each_second_until_it_is_idle():
    many = Many(200)
    many.busy = {190}
    wake(many.all[190].log)
    assert all(190 in many.look() for _ in range(3))
    many.busy = set()
    assert 190 in many.look() and 190 not in many.look()


def test_what_is_new_is_looked_at_in_the_next_second():
    many = Many(200)
    new = Led(200, new_log(MemStorage()))
    many.all.append(new)
    many.turns.add(new)
    assert 200 in many.look() and 200 not in many.look()


def test_partitions_that_went_away_are_not_kept_for_their_turn():
    many = Many(200)
    many.look()
    del many.all[60:]
    gc.collect()
    assert set(many.look()) == set(range(2 * IDLE_LOOKS, 60)), "it was begun when there were more"
    assert many.known.walks == 1
    assert set(many.round()) == set(range(60))
