"""Figures that the broker gathers while it runs; per batch or per second, never per message."""

from __future__ import annotations

from collections import Counter

from nsqha.quantile import BATCH_BOUNDS, SECONDS_BOUNDS, Histogram


class Measures:
    """One node's histograms and counters; `server.node.snapshot` reads them."""

    def __init__(self) -> None:
        self.publish_seconds = Histogram(SECONDS_BOUNDS)  # from the flush of a batch to its commit
        self.batch_messages = Histogram(BATCH_BOUNDS)
        self.loop_lag_seconds = Histogram(SECONDS_BOUNDS)
        self.publish_errors: Counter[str] = Counter()
        self.log_events: Counter[str] = Counter()
