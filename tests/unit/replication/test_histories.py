"""Random lives of a small cluster: nothing acknowledged is ever lost or changed, and the checks can tell."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mutation import applied
from tests.unit.replication.history import History, heal
from tests.unit.replication.mutants import SUITE, unasserted

# Seeds at which each mutant is found at once; the search goes on from 0 when a change of the model moves them.
KNOWN = {
    "proposed_isr_only": 5,
    "recorded_isr_only": 17,
    "any_log_uid": 31,
    "commit_below_floor": 7,
    "ack_before_disk": 15,
    "floor_ignored": 2,
    "unknown_is_refused": 239,
    "join_without_committed": 5,
    "join_without_epoch_start": 134,
    "join_of_an_earlier_life": 2,
    "duplicates_by_id": 14,
    "no_promise": 55,
    "cut_at_the_shorter": 35,
}


@given(st.integers(0, 1 << 32), st.booleans())
@settings(max_examples=250, deadline=None)
def test_nothing_acknowledged_is_lost_whatever_happens(seed: int, hands_over: bool) -> None:
    History(seed, hands_over=hands_over).run()


def test_leaders_hand_over_in_these_lives() -> None:
    proposed = [change for seed in range(60) for change in History(seed, hands_over=True).run().proposed]
    assert proposed.count("transfer") >= 10


@given(st.integers(0, 1 << 32), st.booleans())
@settings(max_examples=80, deadline=None)
def test_without_more_faults_everybody_is_in_sync_again_and_all_is_committed(seed: int, hands_over: bool) -> None:
    tiny = History(seed, steps=80, hands_over=hands_over).run()
    leader = heal(tiny)
    if leader is not None:
        tiny.write(leader)
        heal(tiny)
        assert tiny.acked[tiny.nodes[leader].end - 1].epoch == tiny.meta.epoch


@pytest.mark.parametrize("name", SUITE.mutants)
def test_a_rule_that_is_switched_off_is_noticed(name: str) -> None:
    known = [KNOWN[name]] if name in KNOWN else []
    assert SUITE.noticed(name, [*known, *range(3000)]) is not None, f"not noticed: {SUITE.mutants[name].rule}"


def test_what_the_mutants_are_compared_with_survives() -> None:
    """The same lives with nothing but the assertions off."""
    rng = random.Random(7)
    with applied(unasserted()):
        for _ in range(60):
            History(rng.randrange(1 << 32)).run()
