from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.figures import Cell, Spread, latencies, marks_of, percentile, ratio, summarise


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.sampled_from([0.5, 0.99, 0.999, 1.0]))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[int], share: float) -> None:
    values.sort()
    found = percentile(values, share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    smaller = [value for value in values if value < found]
    assert len(smaller) < share * len(values)


def test_percentiles_of_a_thousand() -> None:
    values = list(range(1, 1001))
    assert [percentile(values, share) for share in (0.5, 0.99, 0.999, 1.0)] == [500, 990, 999, 1000]


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1], 0.0), ([1], 1.1)])
def test_no_percentile_of_nothing(values: list[int], share: float) -> None:
    with pytest.raises(ValueError):
        percentile(values, share)


def test_latencies_are_in_microseconds() -> None:
    figures = latencies("ack", [3_000, 1_000, 2_000])
    assert figures == {"ack_p50_us": 2.0, "ack_p99_us": 3.0, "ack_p999_us": 3.0, "ack_max_us": 3.0}
    assert latencies("ack", []) == {}


def cell(round_: int, value: float | None, failure: str | None = None) -> Cell:
    return Cell("w", "s", round_, {} if value is None else {"cpu_us": value}, failure=failure)


def test_a_summary_leaves_failed_cells_out() -> None:
    cells = [cell(0, 1.0), cell(1, 3.0), cell(2, 2.0), cell(3, 99.0, "it broke")]
    assert summarise(cells) == {"cpu_us": Spread(2.0, 1.0, 3.0)}


def test_ratios_pair_rounds() -> None:
    # The machine became three times slower in round 1; each pair still says 2.
    ours, theirs = [cell(0, 1.0), cell(1, 3.0)], [cell(1, 6.0), cell(0, 2.0)]
    assert ratio(ours, theirs, "cpu_us") == Spread(2.0, 2.0, 2.0)


def test_a_round_without_partner_is_no_pair() -> None:
    assert ratio([cell(0, 1.0), cell(1, None)], [cell(1, 5.0)], "cpu_us") is None
    assert ratio([cell(0, 1.0)], [cell(0, 4.0, "broke")], "cpu_us") is None


def test_marks() -> None:
    assert marks_of({"client_share": 0.71, "steal_share": 0.0}) == ["client-bound"]
    assert marks_of({"client_share": 0.69, "others_share": 0.5}) == ["noisy"]
    assert marks_of({}) == []


def test_spread_of_one() -> None:
    assert Spread.of([1.5]) == Spread(1.5, 1.5, 1.5)
    assert not math.isnan(Spread.of([1, 2]).median)
