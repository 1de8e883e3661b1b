"""The harness of mutants: what it plants, what it counts, and that it leaves nothing behind."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from tests.mutation import Mutant, OutOfDate, Patch, Suite, instead


def attempt(mutant: Mutant[str], seed: int) -> str | None:
    """The rule: a square root is not negative. Seeds below 3 do not look at it."""
    with mutant.plant():
        if mutant.hint == "old":
            raise OutOfDate("math.sqrt is another function")
        return "it is negative" if seed >= 3 and math.sqrt(4) < 0 else None


def negative() -> list[Patch]:
    return [instead(math, "sqrt", lambda x: 0.0), instead(math, "sqrt", lambda x: -2.0)]


def harmless() -> Iterator[None]:
    yield


def make() -> Suite[str]:
    suite = Suite("tests.unit.test_mutation", attempt, runs=10)
    suite.add(negative, "no root is negative", "new")
    suite.add(harmless, "nothing", "new")
    return suite


SUITE = make()


def test_the_run_that_notices_is_counted_and_nothing_stays_planted() -> None:
    assert SUITE.noticed("negative", range(10)) == (4, "it is negative")
    assert math.sqrt(4) == 2.0


def test_a_mutant_survives_all_runs_or_all_the_time() -> None:
    assert SUITE.noticed("harmless", range(10)) is None
    assert SUITE.noticed("negative", range(10), seconds=-1.0) is None


def test_survivors_make_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert SUITE.main(["negative", "--workers", "1"]) == 0
    assert SUITE.main(["--workers", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["negative", "4", "it", "is", "negative"]
    assert "no run notices that this is broken: nothing" in lines
    assert lines[-1].startswith("1 of 2 mutants noticed")


def test_a_mutant_that_does_not_fit_is_no_success() -> None:
    suite = Suite("tests.unit.test_mutation", attempt, runs=10)
    suite.add(negative, "no root is negative", "old")
    with pytest.raises(OutOfDate):
        suite.noticed("negative", range(10))
