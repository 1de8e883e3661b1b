"""Errors that a broker logged, beside the faults of its run."""

from __future__ import annotations

import re
from pathlib import Path

from tests.jepsen.checkers.errors import EXPLAINED, unexplained
from tests.jepsen.faults.table import FAULTS

ROOT = Path(__file__).resolve().parents[2]


def test_a_fault_explains_what_is_said_of_it_and_nothing_else() -> None:
    errors = [("log_damaged", "a range"), ("state_diverged", "not of its log"), ("partition_stopped", "a bug")]
    assert unexplained(errors, ["D8-segment", "N1-leader"]) == [
        "state_diverged: not of its log",
        "partition_stopped: a bug",
    ]
    assert unexplained(errors[:1], ["N2-pair"]) == ["log_damaged: a range"]
    assert unexplained(errors[:1], []) == ["log_damaged: a range"]


def test_the_table_names_errors_and_faults_that_there_are() -> None:
    code = "".join(path.read_text() for path in (ROOT / "nsqha").rglob("*.py"))
    assert not [event for event in EXPLAINED if not re.search(rf'"{event}"', code)]
    assert {letter for letters in EXPLAINED.values() for letter in letters} <= {fault[0] for fault in FAULTS}
