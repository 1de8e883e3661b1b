"""The TLA+ spec, in the configurations that take seconds; `make spec` runs all of them."""

from __future__ import annotations

import os

import pytest

from tests.spec.tlc import CONFIGS, INVARIANTS, SPEC, Config, ToolMissing, check, spec_constants, tools


@pytest.fixture
def java() -> None:
    """Without Java the spec can not be checked: a failure in CI, elsewhere a test that is skipped and says why."""
    try:
        tools()
    except ToolMissing as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))


@pytest.mark.usefixtures("java")
@pytest.mark.parametrize("config", [c for c in CONFIGS if c.smoke], ids=lambda config: config.name)
def test_controls_hold_and_mutants_break_the_invariant_that_is_named(config: Config) -> None:
    assert check(config).judge(config) is None


def test_each_rule_that_can_be_switched_off_has_a_configuration() -> None:
    mutants = {name for name in spec_constants() if name.startswith("Mut")}
    assert mutants == {name for c in CONFIGS if c.violates for name in c.constants if name.startswith("Mut")}


def test_each_invariant_is_defined_in_the_spec() -> None:
    text = SPEC.read_text(encoding="utf-8")
    assert [name for name in INVARIANTS if f"\n{name} ==" not in text] == []
