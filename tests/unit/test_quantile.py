"""Latency windows and histograms."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqha.quantile import NOTHING, SAMPLES_MAX, Histogram, LatencyWindow, Result, merged


def window_of(*values: int, percentiles: tuple[float, ...] = (0.5, 1.0)) -> LatencyWindow:
    window = LatencyWindow(10.0, percentiles, 0.0)
    for value in values:
        window.add(value, 0.0)
    return window


def test_an_empty_window_reports_zeros() -> None:
    assert merged([window_of()], 0.0) == Result(0, ((0.5, 0), (1.0, 0)))


def test_without_windows_or_percentiles_there_is_nothing() -> None:
    assert merged((), 0.0) is NOTHING
    assert merged([window_of(5, percentiles=())], 0.0) == NOTHING


def test_percentiles_are_exact_while_everything_is_kept() -> None:
    values = list(range(1, 101))
    random.Random(1).shuffle(values)
    found = merged([window_of(*values, percentiles=(0.99, 0.5, 0.01, 1.0))], 0.0)
    assert found == Result(100, ((0.99, 99), (0.5, 50), (0.01, 1), (1.0, 100)))


def test_a_run_counts_as_often_as_it_is_long() -> None:
    window = LatencyWindow(10.0, (0.5, 0.95), 0.0)
    window.add(1, 0.0, times=90)
    window.add(100, 0.0, times=10)
    assert merged([window], 0.0) == Result(100, ((0.5, 1), (0.95, 100)))


def test_the_older_half_is_dropped_when_the_newer_is_over() -> None:
    window = LatencyWindow(10.0, (1.0,), 0.0)
    window.add(9, 1.0)
    window.add(5, 6.0)
    assert merged([window], 9.9) == Result(2, ((1.0, 9),))
    assert merged([window], 10.0) == Result(1, ((1.0, 5),))
    assert merged([window], 15.0) == Result(0, ((1.0, 0),))


def test_a_long_silence_drops_both_halves() -> None:
    window = LatencyWindow(10.0, (1.0,), 0.0)
    window.add(9, 4.9)
    window.add(7, 1000.0)
    assert merged([window], 1000.0) == Result(1, ((1.0, 7),))


def test_memory_is_bounded_and_the_estimate_good() -> None:
    window = LatencyWindow(10.0, (0.5, 0.99), 0.0)
    rng = random.Random(2)
    for _ in range(50_000):
        window.add(rng.randrange(1_000_000), 0.0)
    assert len(window._halves[1].samples) < SAMPLES_MAX
    seen, percentiles = merged([window], 0.0)
    assert seen == 50_000
    assert percentiles is not None
    assert percentiles[0][1] == pytest.approx(500_000, rel=0.1)
    assert percentiles[1][1] == pytest.approx(990_000, rel=0.02)


def test_a_huge_run_is_cheap() -> None:
    window = LatencyWindow(10.0, (0.5,), 0.0)
    window.add(3, 0.0, times=10_000_000)
    assert merged([window], 0.0) == Result(10_000_000, ((0.5, 3),))


def test_merging_weighs_every_window_by_what_it_saw() -> None:
    busy = LatencyWindow(10.0, (0.5, 1.0), 0.0)
    busy.add(1, 0.0, times=100_000)
    found = merged((busy, window_of(*[50] * 2000, 60)), 0.0)
    assert found == Result(102_001, ((0.5, 1), (1.0, 60)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 5000)), max_size=30),
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=4),
)
def test_percentiles_are_observed_values_in_order(runs: list[tuple[int, int]], percentiles: list[float]) -> None:
    window = LatencyWindow(10.0, sorted(percentiles), 0.0)
    for value, times in runs:
        window.add(value, 0.0, times)
    seen, found = merged([window], 0.0)
    assert seen == sum(times for _, times in runs)
    assert found is not None
    values = [value for _, value in found]
    assert values == sorted(values)
    assert set(values) <= {value for value, _ in runs} | {0}


def test_a_value_on_a_bound_belongs_to_it() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.observe(value)
    histogram.observe(0, times=2)
    assert histogram.data() == ((1, 2), (4, 2, 1), 8.0)


def test_data_is_of_that_moment() -> None:
    histogram = Histogram((1,))
    before = histogram.data()
    histogram.observe(0)
    assert before.counts == (0, 0)
