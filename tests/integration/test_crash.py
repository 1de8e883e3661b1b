"""Twenty kill -9 under load, ten in each sync mode; `make crash KILLS=200` for the long run.

NSQHA_CRASH_SEED=N repeats the choices of a failed run.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
import uvloop

from tests.jepsen import crash

KILLS = 10


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("sync", "partitions"), [("always", 1), ("interval", 3)])
def test_nothing_acknowledged_is_lost_when_the_broker_is_killed(sync: str, partitions: int, tmp_path: Path) -> None:
    seed = int(os.environ.get("NSQHA_CRASH_SEED") or secrets.randbelow(1 << 31))
    run = crash.run(tmp_path, seed=seed, kills=KILLS, sync=sync, partitions=partitions, pace=0.8)
    result = uvloop.run(run)
    assert result.ok, f"NSQHA_CRASH_SEED={seed}\n{result}"
    figures = result.report.figures
    # A run in which nothing happened proves nothing.
    assert figures.kills == KILLS
    assert figures.ok > 500, str(result)
    assert figures.settled > 100, str(result)
