"""Whose turn it is: by the order in which connections began to rest, and by a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from nsqha.server.runtime.budget import FRESH_SECONDS, TURN_SECONDS, SharedTurns

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

    def __init__(self, strangers: int, part: float = PART_SECONDS, between: float = 0.0) -> None:
        """`between`: seconds that publishers take after each part."""
        self.loop = TurnByTurn()
        self.turns = SharedTurns(self.loop, lambda: self.loop.now, between=self.look)
        self.part = part
        self.between = between
        self.served: list[int] = []
        self.looks: list[int] = []  # how many were served before
        for number in range(strangers):
            self.turns.later(lambda number=number: self.go_on(number))  # type: ignore[misc]

    def look(self) -> bool:
        self.looks.append(len(self.served))
        self.loop.now += self.between
        return self.between > 0

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


def test_a_disk_round_waits_for_one_part_and_not_for_a_turn() -> None:
    port = Port(10)
    port.loop.turn()
    assert port.looks == [1, 2, 3, 4]


@pytest.mark.parametrize(("between", "served"), [(PART_SECONDS, 2), (TURN_SECONDS, 2), (PART_SECONDS / 4, 4)])
def test_publishers_take_half_of_what_strangers_have_and_no_more(between: float, served: int) -> None:
    port = Port(10, between=between)
    port.loop.turn()
    assert len(port.served) == served


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


class Crowd(Port):
    """Beside those that rest: clients that have sent a little each, in every turn, and wait for no answer."""

    def __init__(self, clients: int, strangers: int, part: float = PART_SECONDS) -> None:
        super().__init__(strangers, part)
        self.clients = range(clients)
        self.runs = [0] * clients
        self.waiting: set[int] = set()

    def read_all(self) -> None:
        """As the loop reads every socket once in a turn."""
        for client in self.clients:
            if client in self.waiting:
                continue
            if self.turns.enter():
                self.run(client)
                self.turns.leave()
            else:
                self.waiting.add(client)
                self.turns.wait(lambda client=client: self.go_in(client))  # type: ignore[misc]

    def go_in(self, client: int) -> None:
        self.waiting.remove(client)
        assert self.turns.enter(), "it is its turn"
        self.run(client)
        self.turns.leave()

    def run(self, client: int) -> None:
        self.runs[client] += 1
        self.loop.now += self.part


@pytest.mark.parametrize("clients", [4, 40, 4_000])
@pytest.mark.parametrize("strangers", [0, 400])
def test_a_turn_costs_the_same_however_many_ask_for_little(clients: int, strangers: int) -> None:
    crowd = Crowd(clients, strangers)
    for _ in range(100):
        before = crowd.loop.now
        crowd.loop.turn()
        crowd.read_all()
        assert crowd.loop.now - before < FRESH_SECONDS + TURN_SECONDS + 2 * PART_SECONDS


def test_many_who_ask_for_little_wait_for_each_other_and_for_no_stranger_that_rests() -> None:
    crowd = Crowd(clients=100, strangers=10_000)
    for _ in range(100):
        crowd.loop.turn()
        crowd.read_all()
    assert max(crowd.runs) - min(crowd.runs) <= 2
    assert sum(crowd.runs) >= 100 * FRESH_SECONDS / PART_SECONDS


def test_few_who_ask_for_little_never_rest_whatever_strangers_do() -> None:
    crowd = Crowd(clients=4, strangers=1_000)
    for n in range(100):
        crowd.loop.turn()
        crowd.read_all()
        assert crowd.runs == [n + 1] * 4


def test_what_is_begun_counts_before_it_is_done() -> None:
    """A request that is handled by a task of its own takes its time after its turn was given."""

    async def main() -> None:
        port, begun = Port(0), 0

        async def request() -> None:
            nonlocal begun
            await port.turns.enter_for(FRESH_SECONDS / 2)
            begun += 1

        requests = [asyncio.ensure_future(request()) for _ in range(10)]
        steps = []
        while begun < len(requests):
            for _ in range(3):
                await asyncio.sleep(0)
            steps.append(begun)
            port.loop.turn()
        assert steps == [2, 4, 6, 8, 10]

    asyncio.run(main())


def test_a_request_whose_client_is_gone_takes_no_turn() -> None:
    async def main() -> None:
        port = Port(0)
        port.turns.charge(FRESH_SECONDS)
        gone = asyncio.ensure_future(port.turns.enter_for(TURN_SECONDS))
        await asyncio.sleep(0)
        gone.cancel()
        port.turns.later(lambda: port.served.append(1))
        port.loop.turn()
        assert port.served == [1]

    asyncio.run(main())
