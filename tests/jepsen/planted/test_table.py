"""The table of planted bugs: one row each, and one control for all that are looked for in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jepsen.planted import __main__ as runner
from tests.jepsen.planted.__main__ import Table, parsed
from tests.jepsen.planted.bugs import BUGS, Bug
from tests.jepsen.planted.hunting import Found

LIKE = [name for name, bug in BUGS.items() if bug.hunt == BUGS["commit_without_followers"].hunt]  # more than one


class Hunter:
    """Instead of clusters: what is found, and what is wrong without a bug."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, found: Found | None, wrong: str = "") -> None:
        self.controls: list[int] = []  # rounds of each

        def control(bug: Bug, folder: Path, *, seed: int, rounds: int) -> str:
            self.controls.append(rounds)
            return wrong

        monkeypatch.setattr(runner, "hunted", lambda bug, folder, *, seed, seconds: found)
        monkeypatch.setattr(runner, "control", control)


def found_after(rounds: int) -> Found:
    return Found("lost", "N1-leader", 61.4, rounds, "LOST: 3")


def test_a_row_has_bug_faults_seed_who_saw_it_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    Hunter(monkeypatch, found=found_after(1))
    table = Table(parsed(["--seed", "9"]))
    table.add(BUGS[LIKE[0]])
    cells = [cell.strip() for cell in table.rows[0].strip("|").split("|")]
    assert cells == [LIKE[0], "N1-leader, sync=always", "9", "lost", "61", "green, 0 s"]
    assert len(cells) == len(str(table).splitlines()[0].strip("|").split("|"))
    assert not table.wrong


def test_a_control_counts_for_all_of_the_same_faults_and_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hunter = Hunter(monkeypatch, found=found_after(2))
    table = Table(parsed([]))
    table.add(BUGS[LIKE[0]])
    table.add(BUGS[LIKE[1]])
    assert hunter.controls == [2]
    assert f"green, see `{LIKE[0]}`" in table.rows[1]
    monkeypatch.setattr(runner, "hunted", lambda bug, folder, *, seed, seconds: found_after(3))
    table.add(BUGS[LIKE[1]])
    assert hunter.controls == [2, 3]


def test_what_survives_and_what_is_red_without_a_bug_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    hunter = Hunter(monkeypatch, found=None)
    table = Table(parsed(["--minutes", "2"]))
    table.add(BUGS[LIKE[0]])
    assert "| SURVIVED | 120 |" in table.rows[0]
    assert (table.wrong, hunter.controls) == (1, [])

    hunter = Hunter(monkeypatch, found=found_after(1), wrong="LOST: 1\n(1, 2) on orders")
    table = Table(parsed([]))
    table.add(BUGS[LIKE[0]])
    table.add(BUGS[LIKE[1]])
    assert all("| NOT GREEN: LOST: 1 |" in row for row in table.rows)
    assert (table.wrong, hunter.controls) == (2, [1, 1])
