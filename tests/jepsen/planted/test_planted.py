"""Every planted bug still fits the product: what it replaces is there, is called alike, and is the product's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.jepsen.deployment import Broker
from tests.jepsen.faults.table import FAULTS
from tests.jepsen.planted.__main__ import SEED, parsed
from tests.jepsen.planted.bugs import BUGS, FOUND, SOUGHT, Bug
from tests.jepsen.planted.directed import DIRECTED, chosen
from tests.jepsen.planted.hunting import checkers
from tests.mutation import OutOfDate


class Replacements:
    """What patches of the product replace while they are made."""

    def __init__(self) -> None:
        self.found: list[tuple[object, str, object, object]] = []  # owner, name, before, now

    @contextmanager
    def noted(self) -> Iterator[None]:
        enter = mock._patch.__enter__

        def wrong(patch: Any) -> Any:
            now = enter(patch)
            self.found.append((patch.target, patch.attribute, patch.temp_original, now))
            return now

        with mock.patch.object(mock._patch, "__enter__", wrong):
            yield
        self.found = [each for each in self.found if each[1] != "__enter__"]


def replacements(bug: Bug) -> list[tuple[object, str, object, object]]:
    """OutOfDate if it can not be planted."""
    replaced = Replacements()
    try:
        with replaced.noted(), bug.mutant.plant():
            pass
    except AttributeError as error:
        raise OutOfDate(f"{bug.name}: {error}") from error
    return replaced.found


def check_calls(owner: object, name: str, before: object, now: object) -> None:
    """OutOfDate unless what is called as the one before can be called as the one now."""
    if isinstance(before, property) != isinstance(now, property):
        raise OutOfDate(f"{owner}.{name} is a property, or it was one")
    if isinstance(before, (property, type)) or not (callable(before) and callable(now)):
        return
    if inspect.iscoroutinefunction(before) != inspect.iscoroutinefunction(now):
        raise OutOfDate(f"{owner}.{name} is awaited, or it was")
    kinds = inspect.Parameter
    places = list(inspect.signature(before).parameters.values())
    positional = [None for each in places if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    named = {each.name: None for each in places if each.kind is kinds.KEYWORD_ONLY}
    try:
        inspect.signature(now).bind(*positional, **named)
    except TypeError as error:
        raise OutOfDate(f"{owner}.{name}: {error}") from error


@pytest.mark.parametrize("name", list(BUGS))
def test_a_planted_bug_fits_the_product(name: str) -> None:
    bug = BUGS[name]
    found = replacements(bug)
    for owner, attribute, before, now in found:
        check_calls(owner, attribute, before, now)
    modules = [str(getattr(owner, "__module__", "") or getattr(owner, "__name__", "")) for owner, *_ in found]
    assert any(module.split(".")[0] in ("nsqha", "lookupd") for module in modules), "a real process has nothing of it"
    assert bug.mutant.rule


def test_each_has_faults_that_exist() -> None:
    for bug in BUGS.values():
        plan = bug.hunt.plan(7, (bug.plant,))
        assert plan.kinds
        for kind in plan.kinds:
            assert plan.sync in kind.syncs, f"{bug.name}: {kind.id} promises nothing with sync={plan.sync}"


def test_a_directed_fault_is_none_of_the_drawn_ones_and_can_be_had_by_its_id() -> None:
    assert not DIRECTED.keys() & FAULTS.keys()
    assert [kind.id for kind in chosen(["D1-first", "P1-leader"])] == ["D1-first", "P1-leader"]
    with pytest.raises(ValueError, match="D1-last"):
        chosen(["D1-last"])


def test_a_broker_that_is_to_die_at_a_fail_point_has_its_bugs_as_before(tmp_path: Path) -> None:
    plant = BUGS["floor_ignored"].plant
    broker = Broker(tmp_path, "n1", ["http://127.0.0.1:1"], sync="always", flags=[], plants=[plant])
    for failpoints in ["after-sync:3"], []:
        broker.programmed(failpoints=failpoints)
        given = [word for word in broker.program if word.startswith(("--plant", "--failpoint"))]
        assert given == [*(f"--failpoint={point}" for point in failpoints), f"--plant={plant}"]


def test_what_was_found_before_is_looked_for_by_default_and_nothing_else() -> None:
    assert not parsed([]).names
    assert len(FOUND) >= 20
    assert len(BUGS) == len(FOUND) + len(SOUGHT)
    assert parsed(["floor_ignored", "--minutes", "5"]).names == ["floor_ignored"]
    assert parsed([]).seed == SEED


def test_a_plant_that_does_not_fit_any_more_is_told() -> None:
    def two(self: object, a: int, *, b: int) -> None: ...
    def one(self: object, a: int) -> None: ...
    async def later(self: object, a: int, *, b: int) -> None: ...

    others: list[Callable[..., Any]] = [one, later]
    for other in others:
        with pytest.raises(OutOfDate):
            check_calls(object, "two", two, other)
    check_calls(object, "two", two, lambda self, *arguments, **named: None)


@pytest.mark.parametrize(
    ("text", "who"),
    [
        ("[]\nkills 0 ()\nlost 2, dropped 0\nLOST: 2\n    (1, 2) on orders\nBELOW FLOOR: 1\n", "lost, below floor"),
        ("not within 30 s: every ISR is full again", "liveness"),
        ("not within 60 s: publishes are OK'd", "availability"),
        ("['orders/0: n1 and n2 have other bytes from log id 7 on']", "storage"),
        ("the replicas of orders/0 do not meet: {}", "storage"),
        ("nsqd ended while starting:\nTraceback", "start"),
    ],
)
def test_who_saw_it_is_known_by_what_was_said(text: str, who: str) -> None:
    assert checkers(text) == who
