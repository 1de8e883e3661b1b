"""Distributions in bounded memory: latency percentiles over a sliding window, and histograms for Prometheus.

A `LatencyWindow` covers between half and the whole of its window: it has two half-windows, and drops the older one when
the time of the newer one is over. Each half keeps a systematic sample: every `stride`-th observation; when it has
`SAMPLES_MAX`, every second one is dropped and the stride doubles. Below that the percentiles are exact. There are no
random numbers, so that runs are reproducible.

Time is an argument (monotonic seconds); values are integers (nanoseconds in the broker, but nothing depends on it).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SAMPLES_MAX = 2048


class Result(NamedTuple):
    """How many observations the window has seen, and (quantile, value) in the order of the configured quantiles."""

    observations: int
    percentiles: tuple[tuple[float, int], ...] | None


NOTHING = Result(0, None)
"""The result if no percentiles are configured."""


class _Half:
    """A bounded systematic sample of the observations of half a window."""

    __slots__ = ("_skip", "count", "samples", "stride")

    def __init__(self) -> None:
        self.count = 0
        self.stride = 1
        self.samples = array("q")
        self._skip = 0

    def add(self, value: int, times: int) -> None:
        self.count += times
        due = self._skip + times
        while due >= self.stride:
            due -= self.stride
            self.samples.append(value)
            if len(self.samples) == SAMPLES_MAX:
                self.samples = self.samples[::2]
                self.stride *= 2
        self._skip = due


class LatencyWindow:
    """Percentiles of the observations of the last `window_seconds`."""

    __slots__ = ("_half_seconds", "_halves", "_rotated_at", "percentiles")

    def __init__(self, window_seconds: float, percentiles: Sequence[float], now: float) -> None:
        self.percentiles = tuple(percentiles)
        self._half_seconds = max(window_seconds / 2, 1e-9)
        self._rotated_at = now
        self._halves = (_Half(), _Half())  # older, newer

    def add(self, value: int, now: float, times: int = 1) -> None:
        """Add `times` observations of the same value: one call serves a whole run of FINs."""
        if now - self._rotated_at >= self._half_seconds:
            self._rotate(now)
        self._halves[1].add(value, times)

    def _rotate(self, now: float) -> None:
        halves_passed = int((now - self._rotated_at) / self._half_seconds)
        self._rotated_at += halves_passed * self._half_seconds
        self._halves = (self._halves[1] if halves_passed == 1 else _Half(), _Half())

    def _samples(self, now: float) -> tuple[_Half, _Half]:
        if now - self._rotated_at >= self._half_seconds:
            self._rotate(now)
        return self._halves


def merged(windows: Iterable[LatencyWindow], now: float) -> Result:
    """The percentiles of everything that `windows` saw; they must share their quantiles."""
    count = 0
    weighted: list[tuple[int, int]] = []
    percentiles: tuple[float, ...] = ()
    for window in windows:
        percentiles = window.percentiles
        for half in window._samples(now):
            count += half.count
            weighted += [(value, half.stride) for value in half.samples]
    if not percentiles:
        return NOTHING
    weighted.sort()
    cumulative: list[int] = []
    total = 0
    for _, weight in weighted:
        total += weight
        cumulative.append(total)
    found = []
    for quantile in percentiles:
        at = min(bisect_left(cumulative, quantile * total), len(weighted) - 1)
        found.append((quantile, weighted[at][0] if weighted else 0))
    return Result(count, tuple(found))


class HistogramData(NamedTuple):
    """A histogram at one moment. `counts` has one more place than `bounds`: what lies above the last bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


def summed(histograms: Iterable[HistogramData], nothing: HistogramData) -> HistogramData:
    """All of them as one; they have the bounds of `nothing`."""
    found = [nothing, *histograms]
    counts = tuple(map(sum, zip(*(data.counts for data in found), strict=True)))
    return HistogramData(nothing.bounds, counts, sum(data.sum for data in found))


class Histogram:
    """Counts of observations by upper bound; a value equal to a bound belongs to it."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds must rise"
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def empty(self) -> bool:
        """Whether nothing was observed."""
        return not any(self._counts)

    def data(self) -> HistogramData:
        return HistogramData(self._bounds, tuple(self._counts), self._sum)


SECONDS_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Bounds for disk and publish latencies: fine around an SSD's latencies, up to the time when publishes fail."""

MESSAGE_BOUNDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 300.0)
"""Bounds for what a message waits and takes: few, as each channel has them."""

ATTEMPT_BOUNDS = (1, 2, 3, 5, 10)
"""Bounds for the attempt at which a message is finished."""

BATCH_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Bounds for messages per group commit."""

EMPTY_SECONDS = Histogram(SECONDS_BOUNDS).data()
EMPTY_MESSAGES = Histogram(MESSAGE_BOUNDS).data()
EMPTY_ATTEMPTS = Histogram(ATTEMPT_BOUNDS).data()
EMPTY_BATCHES = Histogram(BATCH_BOUNDS).data()
