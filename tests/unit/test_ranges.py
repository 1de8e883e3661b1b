"""RangeSet against a plain set of integers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from nsqha.ranges import RangeSet

operations = st.lists(
    st.tuples(st.sampled_from(["add", "discard", "cut", "swallow"]), st.integers(0, 60), st.integers(0, 20)),
    max_size=30,
)


@given(operations)
def test_behaves_like_a_set(steps: list[tuple[str, int, int]]) -> None:
    ranges, model = RangeSet(), set[int]()
    for what, first, length in steps:
        end = first + length
        if what == "add":
            ranges.add(first, end)
            model |= set(range(first, end))
        elif what == "discard":
            ranges.discard(first, end)
            model -= set(range(first, end))
        elif what == "cut":
            ranges.cut_below(first)
            model = {x for x in model if x >= first}
        else:
            floor = first
            while floor in model:
                floor += 1
            assert ranges.swallow(first) == floor
            model = {x for x in model if x >= floor}
        pairs = list(ranges)
        assert {x for a, b in pairs for x in range(a, b)} == model
        assert all(a < b for a, b in pairs)
        assert all(left[1] < right[0] for left, right in itertools.pairwise(pairs))
        assert ranges.total() == len(model)
        for x in range(82):
            assert (x in ranges) == (x in model)
            assert ranges.count_below(x) == sum(m < x for m in model)
            assert ranges.next_held(x) == min((m for m in model if m >= x), default=None)
            gap = x
            while gap in model:
                gap += 1
            assert ranges.end_of_range(x) == gap


def test_equality_and_copy_are_by_content() -> None:
    ranges = RangeSet([(1, 3), (3, 5), (9, 9)])
    assert list(ranges) == [(1, 5)]
    other = ranges.copy()
    assert other == ranges
    other.add(7, 8)
    assert other != ranges
