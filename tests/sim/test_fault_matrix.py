"""Every cell of the matrix of faults that stay, in one life; `make sim-matrix` lives fifty of each."""

from __future__ import annotations

import pytest

from tests.sim.fault_matrix import CELLS, OPEN, outcome_of

SEED = 0


@pytest.mark.parametrize("name", [name for name in CELLS if name not in OPEN])
def test_a_fault_that_stays(name: str) -> None:
    outcome = outcome_of((name, SEED, False))
    assert not outcome.violation, str(outcome)


def test_only_cells_of_the_matrix_are_called_open() -> None:
    assert CELLS.keys() >= OPEN.keys()


def test_replicas_that_do_not_reach_each_other_need_not_serve() -> None:
    assert not CELLS["bridge-leader"].cut & {("leader", "follower"), ("second", "leader")}
    assert CELLS["bridge-leader"].served
    assert CELLS["zone-leader"].served
    assert CELLS["store_away-leader"].no_store == {"leader"}
