"""A run of the fault suite of some minutes: a partition, a kill, a power loss, a stop, a full disk, each once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jepsen import suite
from tests.jepsen.faults.table import FAULTS
from tests.jepsen.hosts.probe import lacking

SMOKE = ("N1-leader", "P1-leader", "D1-leader", "P2-leader", "D4-leader")


@pytest.mark.timeout(600)
def test_five_faults_lose_nothing_and_each_bites(tmp_path: Path) -> None:
    kinds = [FAULTS[each] for each in SMOKE]
    if missing := lacking(set().union(*(kind.needs for kind in kinds))):
        pytest.skip(missing)
    plan = suite.Plan(kinds, seed=7, count=len(kinds), drawn=False, rate=300.0)
    run = suite.run(tmp_path, plan)
    print(run.figures, run.outcomes, sep="\n")
    assert run.figures.counts == dict.fromkeys(SMOKE, 1)
    assert run.figures.invalid == []
    assert run.outcomes.ok > 1000
