"""What was taken out of a layered set is passed over once, however often somebody asks for what is left."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable

import pytest

from nsqha.cursor.deferred.deferred_set import BEFORE_ALL, Deferred
from nsqha.cursor.deferred.gaps import Gaps
from nsqha.cursor.deferred.store import DeferredStore
from tests.unit.cursor.counted_table import ROWS, store_of

MANY = 20 * ROWS
GONE = MANY // 2
FIRST = 10**9
FEW = 12  # rows that a question reads which finds its answer at once

QUESTIONS: dict[str, Callable[[DeferredStore], object]] = {
    "next_offset": lambda held: held.next_offset(0),
    "items": lambda held: next(iter(held.items()), None),
    "below": lambda held: next(iter(held.below(FIRST + MANY, 0)), None),
    "counted_from": lambda held: held.counted_from(FIRST + GONE),
    "next_due": lambda held: held.next_due(BEFORE_ALL),
    "due": lambda held: held.due(BEFORE_ALL, 10**6, 1),
}


def half_gone() -> tuple[DeferredStore, Callable[[], int]]:
    """Messages that became due, were delivered and finished in their order, and a table that is not written yet."""
    held, table = store_of([Deferred(FIRST + n, n, 1) for n in range(MANY)])
    for n in range(GONE):
        held.remove(FIRST + n)
    table.take_read()
    return held, table.take_read


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_is_gone_is_passed_over_once(name: str) -> None:
    held, read = half_gone()
    ask = QUESTIONS[name]
    asked = ask(held)
    assert read() >= GONE
    for _ in range(10):
        assert ask(held) == asked
        assert read() <= FEW


def test_it_goes_on_from_there_when_more_is_taken_out_and_put_in() -> None:
    held, read = half_gone()
    held.next_offset(0)
    held.next_due(BEFORE_ALL)
    read()
    for n in range(GONE, GONE + 500):
        held.remove(FIRST + n)
        assert held.next_offset(0) == FIRST + n + 1
        assert held.next_due(BEFORE_ALL) == n + 1
    assert read() <= 500 * 2 * FEW
    held.put(Deferred(FIRST + 7, 7, 2))
    assert (held.next_offset(0), held.next_due(BEFORE_ALL)) == (FIRST + 7, 7)
    held.remove(FIRST + 7)
    assert (held.next_offset(0), held.next_due(BEFORE_ALL)) == (FIRST + GONE + 500, GONE + 500)


def test_a_reader_amid_the_set_has_a_gap_of_its_own() -> None:
    held, read = half_gone()
    for n in range(GONE + 2000, MANY - 2000):
        held.remove(FIRST + n)
    for _ in range(2):
        read()
        assert held.next_offset(0) == FIRST + GONE
        assert held.next_offset(FIRST + GONE + 2000) == FIRST + MANY - 2000
        assert held.next_due(BEFORE_ALL) == GONE
        assert held.next_due((GONE + 2000, FIRST)) == MANY - 2000
    assert read() <= 4 * FEW
    for n in range(MANY - 2000, MANY):
        held.remove(FIRST + n)
    assert held.next_offset(FIRST + GONE + 2100) is None
    read()
    assert held.next_offset(FIRST + GONE + 2200) is None
    assert read() <= FEW


def test_a_checkpoint_of_the_set_passes_over_nothing_again() -> None:
    held, read = half_gone()
    held.next_offset(0)
    read()
    assert len([*held.snapshot().items()]) == MANY - GONE
    assert read() <= 1.2 * (MANY - GONE)


def test_an_emptied_set_has_no_gaps() -> None:
    held, _ = half_gone()
    assert held.next_offset(0) == FIRST + GONE
    held.clear()
    assert held.next_offset(0) is None
    held.put(Deferred(3, 5, 1))
    assert (held.next_offset(0), held.next_due(BEFORE_ALL)) == (3, 5)


@pytest.mark.parametrize("seed", range(30))
def test_nothing_lies_between_a_place_and_behind_it(seed: int) -> None:
    rng = random.Random(seed)
    gaps, there = Gaps(0), set(rng.sample(range(60), 20))
    for _ in range(400):
        place = rng.randrange(62)
        action = rng.random()
        if action < 0.4:
            order = sorted(there)
            at = bisect_left(order, gaps.behind(place))
            gaps.found(place, order[at] if at < len(order) else 100)
        elif action < 0.6:
            there.add(place)
            gaps.put(place)
        elif action < 0.8:
            there.discard(place)
        else:
            gaps = gaps.copy()
        for n in range(62):
            assert gaps.behind(n) >= n
            assert not there & set(range(n, gaps.behind(n)))
