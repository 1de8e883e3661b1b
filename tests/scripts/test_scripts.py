"""Every script tells what happens, and tells something else when a rule of the product is broken: see `transcript`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.transcript import play
from tests.sim.mutants import SUITE

SCRIPTS = sorted(Path(__file__).parent.glob("*.script"))
BROKEN = {
    "corrupt": "page_cache_trusted_after_a_power_loss",
    "expand": "joins_before_it_caught_up",
    "failover": "epoch_unchecked",
    "shrink": "floor_ignored",
    "swap": "effective_too_small",
    "transfer": "promise_not_journalled",
    "truncation": "never_caught_up",
    "unknown": "unknown_taken_for_refused",
    "write": "commit_before_the_disk",
}
"""script -> a planted bug of the simulation that it shows"""


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    assert play(path.read_text()) == path.read_text()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_shows_a_broken_rule(path: Path) -> None:
    with SUITE.mutants[BROKEN[path.stem]].plant():
        assert play(path.read_text()) != path.read_text()


def test_there_are_scripts() -> None:
    assert {path.stem for path in SCRIPTS} == set(BROKEN)
