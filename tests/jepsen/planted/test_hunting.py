"""The suite sees a bug that real brokers have: on loopback, with the first fault that does harm."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.jepsen.deployment import Deployment
from tests.jepsen.faults.fault import FaultKind, Injected
from tests.jepsen.planted.bugs import BUGS
from tests.jepsen.planted.hunting import Rounds, checkers
from tests.jepsen.suite import Plan

BACK_NS = -3600 * 10**9


def clocks_go_back(deployment: Deployment, rng: random.Random) -> Injected:
    """All alike, so that each agrees with the others."""
    for broker in deployment.brokers:
        broker.clock.set(offset_ns=BACK_NS)

    def proof() -> str:
        looks = [broker.clock.looks() for broker in deployment.brokers]
        assert all(looks)
        return f"brokers looked at their clocks {looks} times"

    return Injected("all clocks go back an hour", frozenset(), lambda: None, proof)


def test_a_clock_that_goes_back_is_seen_where_time_is_not_clamped(tmp_path: Path) -> None:
    kind = FaultKind("back", "all clocks go back", "stamps never fall", clocks_go_back, seconds=(1.0, 1.0))
    plan = Plan([kind], seed=1, apart=False, simple=True, plants=(BUGS["clock_unclamped"].plant,))
    run = Rounds(tmp_path, plan, most=1)
    with pytest.raises(AssertionError) as found:
        run.go(60, rounds=1)
    assert "disorder" in checkers(str(found.value)).split(", "), str(found.value)[-3000:]
    assert run.faults == ["back"]
