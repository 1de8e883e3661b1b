"""A shared rate: short work is not slowed down, long work keeps to it, whoever does it."""

from __future__ import annotations

import pytest

from nsqha.server.replica.pace import BURST_SECONDS, Pace


def test_long_work_keeps_to_the_rate_after_a_burst() -> None:
    pace, now = Pace(100), 1000.0
    for _ in range(50):
        now += pace.done(40, now)
    assert now - 1000.0 == pytest.approx(50 * 40 / 100 - BURST_SECONDS)


def test_jobs_share_the_rate() -> None:
    pace = Pace(100)
    assert pace.done(100, 0.0) == 0.0
    assert [pace.done(50, 0.0), pace.done(50, 0.0)] == [0.5, 1.0]


def test_who_rested_long_has_no_more_than_a_burst() -> None:
    pace = Pace(100)
    pace.done(100, 0.0)
    assert pace.done(100, 1e6) == 0.0
    assert pace.done(100, 1e6) == 1.0


def test_without_a_rate_nobody_rests() -> None:
    assert Pace(0).done(1 << 60, 0.0) == 0.0
