"""Whose turn it is: by the order in which connections began to rest, and by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nsqha.server.runtime.budget import TURN_SECONDS, SharedTurns

PART_SECONDS = TURN_SECONDS / 4


class TurnByTurn:
    """Each turn runs what was there at its beginning."""

    def __init__(self) -> None:
        self.now = 0.0
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def turn(self) -> None:
        due, self.soon = self.soon, []
        for callback in due:
            callback()


class Port:
    """Strangers that never have enough, and how much they got in each turn of the loop."""

    def __init__(self, strangers: int, part: float = PART_SECONDS) -> None:
        self.loop = TurnByTurn()
        self.turns = SharedTurns(self.loop, lambda: self.loop.now)
        self.part = part
        self.served: list[int] = []
        for number in range(strangers):
            self.turns.later(lambda number=number: self.go_on(number))  # type: ignore[misc]

    def go_on(self, number: int) -> None:
        self.served.append(number)
        self.loop.now += self.part
        self.turns.later(lambda: self.go_on(number))


@pytest.mark.parametrize("strangers", [4, 40, 4_000])
def test_a_turn_costs_the_same_however_many_rest(strangers: int) -> None:
    port = Port(strangers)
    for _ in range(100):
        before = port.loop.now
        port.loop.turn()
        assert 0 < port.loop.now - before < TURN_SECONDS + PART_SECONDS


def test_who_rests_longest_goes_on_first_and_nobody_twice_before_another() -> None:
    port = Port(10)
    for _ in range(50):
        port.loop.turn()
    assert port.served == [n % 10 for n in range(len(port.served))] and len(port.served) >= 150


def test_one_goes_on_once_in_a_turn_although_there_is_time_left() -> None:
    port = Port(2, part=0.0)
    port.loop.turn()
    assert port.served == [0, 1]
    port.loop.turn()
    assert port.served == [0, 1, 0, 1]


def test_one_whose_part_is_too_long_does_not_stop_the_others() -> None:
    port = Port(3, part=10 * TURN_SECONDS)
    for _ in range(6):
        port.loop.turn()
    assert port.served == [0, 1, 2, 0, 1, 2], "one in each turn"


def test_who_comes_later_is_behind_those_who_wait() -> None:
    port = Port(6)
    port.loop.turn()
    port.turns.later(lambda: port.served.append(99))
    while 99 not in port.served:
        port.loop.turn()
    before = port.served[: port.served.index(99)]
    assert set(before) == set(range(6)) and len(before) < 12, "each of the others had its turn, and hardly one a second"


def test_a_bug_in_one_of_them_costs_only_itself() -> None:
    port = Port(0)

    def fail() -> None:
        raise ZeroDivisionError

    port.turns.later(fail)
    port.turns.later(lambda: port.served.append(1))
    with pytest.raises(ZeroDivisionError):
        port.loop.turn()
    port.loop.turn()
    assert port.served == [1]
    port.turns.later(lambda: port.served.append(2))
    port.loop.turn()
    assert port.served == [1, 2]


def test_nothing_runs_while_nobody_rests() -> None:
    port = Port(0)
    port.turns.later(lambda: port.served.append(1))
    port.loop.turn()
    assert port.served == [1] and not port.loop.soon
