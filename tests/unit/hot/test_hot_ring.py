"""The in-flight ring: examples, and Hypothesis against a dict."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FREE, IN_FLIGHT, FINISHED, SINGLE, WAITING, DEFERRED = range(6)
BASE = (1022 << 50) | (0x7FFFF << 30)


def fins(*offsets: int, base: int = BASE) -> bytes:
    return b"".join(b"FIN %016x\n" % (base + offset) for offset in offsets)


def fin(ring: Any, *offsets: int, owner: int = 1) -> int:
    data = fins(*offsets)
    count: int
    pos, count = ring.fin_run(data, 0, len(data), BASE, owner)
    assert pos == 21 * count
    return count


def ring_of(hot: ModuleType, count: int, *, low: int = 0, owner: int = 1) -> Any:
    ring = hot.Ring(low)
    ring.deliver(low, low + count, owner)
    return ring


def test_low_waits_for_the_hole(hot: ModuleType) -> None:
    ring = ring_of(hot, 4, low=10)
    assert fin(ring, 12, 11) == 2
    assert (ring.low, ring.next) == (10, 14)
    assert ring.finished_ranges(0, 99) == [(11, 13)]
    assert fin(ring, 10) == 1
    assert (ring.low, ring.finished_ranges(0, 99)) == (13, [])


def test_a_fin_counts_once_and_only_for_its_owner(hot: ModuleType) -> None:
    ring = ring_of(hot, 2)
    ring.deliver(2, 4, 2)
    assert fin(ring, 0, 0) == 1
    assert fin(ring, 1, 2) == 1  # stops at what another owner has
    assert fin(ring, 2, 3, owner=2) == 2
    assert (ring.low, ring.next) == (4, 4)
    assert fin(ring, 3, owner=2) == 0


@pytest.mark.parametrize("state", [FREE, SINGLE, WAITING])
def test_a_run_stops_at_what_is_not_in_flight(hot: ModuleType, state: int) -> None:
    ring = ring_of(hot, 6)
    ring.set(3, state, 1)
    assert fin(ring, 0, 1, 2, 3, 4, 5) == 3
    assert ring.low == 3
    assert ring.get(4) == IN_FLIGHT


@pytest.mark.parametrize(
    "line",
    [
        b"FIN 0FFFFFFFC0000001\n",
        b"FIN 000000000000000g\n",
        b"FIN 0000000000000001",
        b"FIN 00000000000001\n\n\n",
        b"FIN  00000000000001\n",
        b"REQ 0000000000000001\n",
        b"FIN 0000000000000001\r",
    ],
)
def test_a_run_stops_at_what_is_no_fin_of_ours(hot: ModuleType, line: bytes) -> None:
    ring = ring_of(hot, 3)
    data = b"NOP\n" + fins(0) + line + fins(1)
    assert ring.fin_run(data, 4, len(data), BASE, 1) == (25, 1)


@pytest.mark.parametrize("base", [0, 1, BASE, 2**63, 2**64 - 1, 2**64 - 3])
@pytest.mark.parametrize("number", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_an_id_out_of_range_is_never_in_flight(hot: ModuleType, base: int, number: int) -> None:
    ring = ring_of(hot, 5)
    data = b"FIN %016x\n" % number
    hit = 0 <= number - base < 5
    assert ring.fin_run(data, 0, 21, base, 1) == (21 * hit, int(hit))


def test_what_delivery_passes_over_is_finished(hot: ModuleType) -> None:
    ring = ring_of(hot, 2)
    ring.deliver(5, 6, 1)
    assert [ring.get(offset) for offset in range(7)] == [1, 1, 2, 2, 2, 1, 0]
    assert fin(ring, 0, 1) == 2
    assert ring.low == 5


def test_an_empty_ring_passes_over_any_distance(hot: ModuleType) -> None:
    ring = hot.Ring(0)
    ring.deliver(10**15, 10**15 + 1, 1)
    assert (ring.low, ring.next) == (10**15, 10**15 + 1)
    ring.settle(0, 10**18, FINISHED)
    assert (ring.low, ring.next) == (10**18, 10**18)


def test_a_ring_has_a_largest_span(hot: ModuleType) -> None:
    ring = ring_of(hot, 1)
    empty = hot.Ring(0)
    before = (ring.low, ring.next)
    calls: tuple[Callable[[], object], ...] = (
        lambda: ring.deliver(hot.SPAN_MAX, hot.SPAN_MAX + 1, 1),
        lambda: ring.deliver(2**62, 2**62 + 1, 1),
        lambda: ring.settle(1, hot.SPAN_MAX + 1, FINISHED),
        lambda: empty.deliver(5, 5 + hot.SPAN_MAX + 1, 1),
    )
    for call in calls:
        with pytest.raises(ValueError):
            call()
    assert (ring.low, ring.next) == before
    assert (empty.low, empty.next) == (0, 0)


def test_settling_moves_low_and_next(hot: ModuleType) -> None:
    ring = ring_of(hot, 4)
    ring.settle(2, 3, DEFERRED)
    assert ring.low == 0
    ring.settle(0, 2, FINISHED)
    assert (ring.low, ring.next) == (3, 4)
    ring.settle(6, 8, DEFERRED)
    assert ring.next == 8
    assert [ring.get(offset) for offset in range(3, 8)] == [IN_FLIGHT, FINISHED, FINISHED, DEFERRED, DEFERRED]
    assert ring.unfinished(0, 8) == 1
    assert ring.unfinished(0, 10) == 3
    ring.settle(9, 9, DEFERRED)
    assert ring.next == 8


def test_expire_takes_what_is_still_in_flight_of_that_owner(hot: ModuleType) -> None:
    ring = ring_of(hot, 4)
    ring.deliver(4, 6, 2)
    ring.set(2, SINGLE, 1)
    fin(ring, 1)
    assert ring.owned(1) == [0, 3]
    assert ring.expire(0, 6, 1) == [0, 3]
    assert ring.expire(0, 6, 1) == []
    assert [ring.get(offset) for offset in range(6)] == [WAITING, FINISHED, SINGLE, WAITING, IN_FLIGHT, IN_FLIGHT]
    assert (ring.owned(1), ring.owned(2)) == ([], [4, 5])


def test_reset_forgets(hot: ModuleType) -> None:
    ring = ring_of(hot, 100)
    ring.reset(7)
    assert (ring.low, ring.next, ring.get(7), ring.owned(1)) == (7, 7, FREE, [])
    ring.deliver(7, 9, 1)
    assert ring.owned(1) == [7, 8]
    assert fin(ring, 7, 8, 9) == 2  # 9 was in flight before


def test_a_million_slots_take_at_most_four_bytes_each_and_are_given_back(hot: ModuleType) -> None:
    ring = hot.Ring(0)
    for first in range(0, 1 << 20, 1 << 14):
        ring.deliver(first, first + (1 << 14), 1)
    assert sys.getsizeof(ring) <= 4 << 20
    for first in range(0, (1 << 20) - 100, 1 << 14):
        fin(ring, *range(first, min(first + (1 << 14), (1 << 20) - 100)))
    assert ring.owned(1) == list(range((1 << 20) - 100, 1 << 20))
    assert sys.getsizeof(ring) < 4096


def test_misuse_is_refused_and_changes_nothing(hot: ModuleType) -> None:
    ring = ring_of(hot, 4)
    calls: tuple[Callable[[], object], ...] = (
        lambda: ring.deliver(3, 5, 1),
        lambda: ring.deliver(6, 5, 1),
        lambda: ring.settle(0, 1, IN_FLIGHT),
        lambda: ring.settle(0, 1, 258),
        lambda: ring.set(0, 6),
        lambda: ring.set(0, -1),
        lambda: ring.set(4, WAITING),
        lambda: ring.set(-1, WAITING),
        lambda: ring.reset(-1),
        lambda: hot.Ring(-1),
    )
    for call in calls:
        with pytest.raises(ValueError):
            call()
    for owner in (-1, 65536):
        for function, *arguments in (
            (ring.deliver, 4, 5, owner),
            (ring.set, 0, WAITING, owner),
            (ring.owned, owner),
            (ring.expire, 0, 1, owner),
            (ring.fin_run, b"", 0, 0, 0, owner),
        ):
            with pytest.raises(OverflowError):
                function(*arguments)
    for base in (-1, 2**64):
        with pytest.raises(OverflowError):
            ring.fin_run(b"", 0, 0, base, 1)
    assert (ring.low, ring.next, ring.owned(1)) == (0, 4, [0, 1, 2, 3])


def test_repr_says_where_it_stands(hot: ModuleType) -> None:
    assert repr(ring_of(hot, 3, low=5)) == "Ring(low=5, next=8, unfinished=3)"


class Model:
    """The ring as a dict offset -> (state, owner)."""

    def __init__(self, low: int) -> None:
        self.reset(low)

    def reset(self, low: int) -> None:
        self.low = self.next = low
        self.slots: dict[int, tuple[int, int]] = {}

    def advance(self) -> None:
        while self.low < self.next and self.slots[self.low][0] in (FINISHED, DEFERRED):
            del self.slots[self.low]
            self.low += 1

    def reach(self, end: int) -> None:
        while self.next < end:
            self.slots[self.next] = (FINISHED, 0)
            self.next += 1

    def deliver(self, first: int, end: int, owner: int) -> None:
        if first < end:
            self.reach(end)
            for offset in range(first, end):
                self.slots[offset] = (IN_FLIGHT, owner)
            self.advance()

    def settle(self, first: int, end: int, state: int) -> None:
        if max(first, self.low) < end:
            self.reach(end)
            for offset in range(max(first, self.low), end):
                self.slots[offset] = (state, 0)
            self.advance()

    def fin_run(self, offsets: list[int], owner: int) -> int:
        count = 0
        for offset in offsets:
            if self.slots.get(offset) != (IN_FLIGHT, owner):
                break
            self.slots[offset] = (FINISHED, owner)
            count += 1
        self.advance()
        return count

    def set(self, offset: int, state: int, owner: int) -> None:
        self.slots[offset] = (state, owner)
        self.advance()

    def owned(self, first: int, end: int, owner: int) -> list[int]:
        return [
            offset
            for offset, slot in sorted(self.slots.items())
            if first <= offset < end and slot == (IN_FLIGHT, owner)
        ]

    def expire(self, first: int, end: int, owner: int) -> list[int]:
        found = self.owned(first, end, owner)
        for offset in found:
            self.slots[offset] = (WAITING, owner)
        return found

    def unfinished(self, first: int, end: int) -> int:
        return sum(
            self.slots.get(offset, (FREE, 0))[0] not in (FINISHED, DEFERRED)
            for offset in range(max(first, self.low), end)
        )

    def finished_ranges(self, first: int, end: int) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        for offset, (state, _) in sorted(self.slots.items()):
            if state == FINISHED and first <= offset < end:
                if ranges and ranges[-1][1] == offset:
                    ranges[-1] = (ranges[-1][0], offset + 1)
                else:
                    ranges.append((offset, offset + 1))
        return ranges


owners = st.integers(0, 3).map(lambda owner: owner * 257)
steps = st.lists(
    st.one_of(
        # numbers are relative: to next for a delivery, to low for everything else
        st.tuples(st.just("deliver"), st.sampled_from([0, 0, 0, 3, 70]), st.integers(0, 300), owners),
        st.tuples(st.just("settle"), st.integers(-5, 80), st.integers(0, 60), st.sampled_from([FINISHED, DEFERRED])),
        st.tuples(st.just("fin"), st.integers(-2, 40), st.integers(1, 300), owners),
        st.tuples(st.just("fins"), st.lists(st.integers(-2, 60), max_size=12), st.none(), owners),
        st.tuples(st.just("set"), st.integers(0, 100), st.integers(FREE, DEFERRED), owners),
        st.tuples(st.just("expire"), st.integers(-5, 80), st.integers(-5, 100), owners),
        st.tuples(st.just("reset"), st.integers(0, 100), st.none(), st.none()),
    ),
    max_size=25,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([0, 60, 2**49 - 7]), steps, st.integers(-5, 400), st.integers(-5, 400))
def test_behaves_like_a_dict(hot: ModuleType, low: int, history: list[Any], a: int, b: int) -> None:
    ring, model = hot.Ring(low), Model(low)
    for what, x, y, owner in history:
        if what == "deliver":
            first = model.next + x
            ring.deliver(first, first + y, owner)
            model.deliver(first, first + y, owner)
        elif what == "settle":
            first = model.low + x
            ring.settle(first, first + y, owner)
            model.settle(first, first + y, owner)
        elif what in ("fin", "fins"):
            around = list(range(x, x + y)) if what == "fin" else x
            offsets = [model.low + n for n in around if model.low + n >= 0]
            data = fins(*offsets)
            count = model.fin_run(offsets, owner)
            assert ring.fin_run(data, 0, len(data), BASE, owner) == (21 * count, count)
        elif what == "set" and model.low + x < model.next:
            ring.set(model.low + x, y, owner)
            model.set(model.low + x, y, owner)
        elif what == "expire":
            args = (model.low + x, model.low + x + y, owner)
            assert ring.expire(*args) == model.expire(*args)
        elif what == "reset":
            ring.reset(model.low + x)
            model.reset(model.low + x)
        assert (ring.low, ring.next) == (model.low, model.next)
    for offset in range(model.low - 2, model.next + 2):
        state, owner = model.slots.get(offset, (FREE, 0))
        assert (ring.get(offset), ring.owner(offset)) == (state, owner)
    first, end = model.low + a, model.low + b
    assert ring.unfinished(first, end) == model.unfinished(first, end)
    assert ring.finished_ranges(first, end) == model.finished_ranges(first, end)
    for owner in (0, 257, 514, 771):
        assert ring.owned(owner) == model.owned(model.low, model.next, owner)


def test_every_byte_at_every_place_of_an_id(hot: ModuleType) -> None:
    """A digit counts with its value; blank, CR and newline end the line; anything else is no id of ours."""
    for place in range(16):
        for byte in range(256):
            digits = bytearray(b"0123456789abcdef")
            digits[place] = byte
            line = b"FIN " + digits + b"\n"
            assert hot.fins_end(line, 0, 21) == (0 if byte in b" \r\n" else 21)
            ours = byte in b"0123456789abcdef"
            base = int(digits, 16) if ours else int(b"0123456789abcdef", 16)
            assert ring_of(hot, 1).fin_run(line, 0, 21, base, 1) == ((21, 1) if ours else (0, 0))
