"""Twenty kill -9 under load, ten in each sync mode; `make crash KILLS=200` for the long run.

NSQHA_CRASH_SEED=N repeats the choices of a failed run.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from tests.jepsen import suite
from tests.jepsen.faults.table import LONE_FAULTS

KILLS = 10


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("sync", "partitions"), [("always", 1), ("interval", 3)])
def test_nothing_acknowledged_is_lost_when_the_broker_is_killed(sync: str, partitions: int, tmp_path: Path) -> None:
    seed = int(os.environ.get("NSQHA_CRASH_SEED") or secrets.randbelow(1 << 31))
    plan = suite.Plan(
        list(LONE_FAULTS.values()),
        seed=seed,
        sync=sync,
        count=KILLS,
        drawn=True,
        apart=False,
        lone=True,
        partitions=partitions,
        pace=0.8,
    )
    try:
        run = suite.run(tmp_path, plan)
    except AssertionError as error:
        raise AssertionError(f"NSQHA_CRASH_SEED={seed}\n{error}") from None
    # A run in which nothing happened proves nothing.
    assert run.figures.counts.total() == KILLS
    assert run.figures.invalid == []
    assert run.judged is not None
    figures = run.judged.figures
    assert figures.kills >= KILLS
    assert figures.ok > 500, str(run.judged)
    assert figures.settled > 100, str(run.judged)
