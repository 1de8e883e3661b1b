"""Random lives of a partition against the naive model, and a check that the check can fail.

`python -m tests.unit.cursor.mutants` is the long form: every rule switched off, every time found.
"""

from __future__ import annotations

import pytest

from tests.unit.cursor.history import History
from tests.unit.cursor.mutants import SUITE


@pytest.mark.parametrize("block", range(8))
def test_random_histories_agree_with_the_model(block):
    for seed in range(block * 50, block * 50 + 50):
        History(seed).run()


@pytest.mark.parametrize("block", range(2))
def test_random_histories_of_ordered_channels_agree_with_the_model(block):
    for seed in range(block * 50, block * 50 + 50):
        History(seed, ordered=True).run()


def test_long_histories_agree_with_the_model():
    for seed in range(5):
        History(10_000 + seed, steps=600).run()


@pytest.mark.parametrize(
    "name",
    [
        "floor_is_next_read",
        "seek_drops_deferred",
        "pump_ignores_channels",
        "unlink_without_checkpoint",
        "share_is_ignored",
    ],
)
def test_a_broken_rule_is_noticed(name):
    assert SUITE.noticed(name, range(300)) is not None


def test_there_is_a_mutant_for_every_rule():
    assert len(SUITE.mutants) >= 15
    assert len({mutant.rule for mutant in SUITE.mutants.values()}) == len(SUITE.mutants)


@pytest.mark.parametrize("name", SUITE.mutants)
def test_every_mutant_fits_the_product(name):
    SUITE.noticed(name, range(3))  # OutOfDate if what it replaces has changed
