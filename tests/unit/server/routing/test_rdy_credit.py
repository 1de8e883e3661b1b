"""Sharing out one RDY window, and what is believed of parts that are lent."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from nsqha.server.routing.rdy_credit import LentCredit, shares


def test_with_none_backlogged_all_share_alike():
    assert shares(9, [False, False, False], 0) == [3, 3, 3]
    assert shares(0, [False, False], 0) == [0, 0]
    assert shares(5, [], 0) == []


def test_the_backlogged_get_what_the_others_do_not_keep():
    assert shares(120, [True, False, False], 0) == [100, 10, 10]
    assert shares(3, [True, False, False], 0) == [3, 0, 0]


def test_one_message_goes_round():
    assert [shares(1, [True, False, True, True], turn).index(1) for turn in range(4)] == [0, 2, 3, 0]


@given(st.integers(0, 3000), st.lists(st.booleans(), max_size=12), st.integers(0, 100))
def test_all_of_the_window_is_shared_out_and_no_more(rdy: int, backlogged: list[bool], turn: int):
    parts = shares(rdy, backlogged, turn)
    assert sum(parts) == (rdy if backlogged else 0)
    assert min(parts, default=0) >= 0
    wanting = [part for part, wants in zip(parts, backlogged, strict=True) if wants]
    assert max(wanting, default=0) - min(wanting, default=0) <= 1


def test_every_backlogged_one_gets_its_turn():
    total = [sum(parts) for parts in zip(*[shares(2, [True] * 5, turn) for turn in range(5)], strict=True)]
    assert total == [2] * 5


def test_an_old_word_is_not_believed():
    credit = LentCredit()
    credit.set(10)
    lowered = credit.set(2)
    credit.heard(lowered - 1, 4)
    assert credit.held == 10, "the leader had not heard of it yet, and may have filled the window since"
    credit.heard(lowered, 4)
    assert credit.held == 4, "it has four in flight still"
    credit.heard(lowered, 2)
    assert credit.held == 2


@given(st.integers(0, 2**32))
def test_what_is_held_is_never_more_than_believed(seed: int):
    """A leader that fills its window whenever it can, and words that are under way both ways."""
    rng = random.Random(seed)
    credit, in_flight, window, serial = LentCredit(), 0, 0, 0
    down: deque[tuple[int, int]] = deque()
    up: deque[tuple[int, int]] = deque()
    for _ in range(60):
        match rng.randrange(5):
            case 0:
                size = rng.randrange(6)
                down.append((size, credit.set(size)))
            case 1 if down:
                window, serial = down.popleft()
                up.append((serial, max(window, in_flight)))
            case 2 if up:
                credit.heard(*up.popleft())
            case 3 if in_flight < window:
                in_flight += 1
            case 4 if in_flight:
                in_flight -= 1
                up.append((serial, max(window, in_flight)))
        assert in_flight <= credit.held
