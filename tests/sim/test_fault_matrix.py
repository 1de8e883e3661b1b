"""One life of some cells of the matrix of faults that stay: nearly every fault at the leader, and elsewhere those that
other code answers. `make sim-matrix` lives fifty of every cell."""

from __future__ import annotations

import pytest

from tests.sim.fault_matrix import CELLS, outcome_of

SEED = 0
SHOWN_ELSEWHERE = {  # by stricter scenes
    "controllers_only-leader",
    "peer_port-leader",
    "clock_an_hour_ahead-leader",
    "clock_an_hour_behind-leader",
}
AT_THE_LEADER = [
    name
    for name in CELLS
    if name.endswith("-leader") and not name.startswith("one_way-") and name not in SHOWN_ELSEWHERE
]
ELSEWHERE = [
    "one_way-leader-follower",
    "one_way-follower-leader",
    "pair-leader-controller",
    "bridge-controller",
    "bridge-other",
    "from_all-follower",
    "store_away-follower",
    "frozen-follower",
    "full_disk-follower",
    "very_slow_disk-follower",
    "peer_port-follower",
    "nothing_arrives-controller",
    "store_away-controller",
    "frozen-controller",
]


@pytest.mark.parametrize("name", [*AT_THE_LEADER, *ELSEWHERE])
def test_a_fault_that_stays(name: str) -> None:
    outcome = outcome_of((name, SEED, False))
    assert not outcome.violation, str(outcome)


def test_what_is_shown_elsewhere_is_a_cell() -> None:
    assert CELLS.keys() >= SHOWN_ELSEWHERE


def test_replicas_that_do_not_reach_each_other_need_not_serve() -> None:
    assert not CELLS["bridge-leader"].cut & {("leader", "follower"), ("second", "leader")}
    assert CELLS["bridge-leader"].served
    assert CELLS["zone-leader"].served
    assert CELLS["store_away-leader"].no_store == {"leader"}
