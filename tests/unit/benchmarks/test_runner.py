"""Whole cells against the throw-away server."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import command, report
from benchmarks.figures import Cell
from benchmarks.loads import Consume, EndToEnd, Latency, Publish
from benchmarks.place import QUICK
from benchmarks.procstat import ProcessTree
from benchmarks.runner import Plan, order, run, steps, temporary_workspace
from benchmarks.servers import Subject, fresh_server
from benchmarks.verify import Verify
from benchmarks.workloads import WORKLOADS, Workload

SERVER = f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).with_name('v2_server.py')))}"
TINY = replace(
    QUICK, warmup_s=0.02, seconds=0.05, latency_s=0.1, backlog=2_000, backlog_s=1.0, verified=400, patience_s=0.3
)
A, B = Subject("a", SERVER), Subject("b", SERVER, ours=False)


def plan(*workloads: Workload, subjects: tuple[Subject, ...] = (A,), rounds: int = 1) -> Plan:
    return Plan(subjects=subjects, workloads=workloads, scale=TINY, sync="interval", rounds=rounds)


def test_subjects_alternate() -> None:
    assert [f"{subject.name}{number}" for number, subject in order((A, B), 3)] == ["a0", "b0", "b1", "a1", "a2", "b2"]


def test_long_rows_run_fewer_rounds() -> None:
    names = {each.name: each for each in WORKLOADS}
    todo = steps(plan(names["verify"], names["mpub-100"], subjects=(A, B), rounds=3))
    assert [workload.name for workload, _, _ in todo] == ["verify"] * 2 + ["mpub-100"] * 6


def one(workload: Workload, tmp_path: Path, subject: Subject = A) -> Cell:
    (cell,) = run(plan(workload, subjects=(subject,)), tmp_path, lambda *_: None)
    return cell


@pytest.mark.parametrize(
    "measure",
    [
        Publish(2, 20),
        Publish(2, 5, topics=10),
        Consume(1, 50, fins_per_send=1, req_every=10),
        EndToEnd(1, 2, 1, 100, batch=10, channels=3),
    ],
    ids=str,
)
def test_a_cell_measures(measure: object, tmp_path: Path) -> None:
    cell = one(Workload("row", "", measure), tmp_path)  # type: ignore[arg-type]
    assert cell.failure is None
    assert cell.figures["rate_per_s"] > 100
    assert cell.figures["cpu_us"] > 0
    assert list(tmp_path.iterdir()) == [], "the data is gone"


def test_latency_at_a_fixed_rate(tmp_path: Path) -> None:
    cell = one(Workload("row", "", Latency(1000)), tmp_path)
    assert cell.failure is None
    assert 0 < cell.figures["ack_p50_us"] <= cell.figures["ack_p999_us"]
    assert cell.figures["delivery_p50_us"] > 0
    assert 800 < cell.figures["rate_per_s"] < 1200


@pytest.mark.parametrize("fault", ["lose", "repeat", "alter", "swap", "error"])
def test_a_wrong_server_fails_verification(fault: str, tmp_path: Path) -> None:
    cell = one(Workload("verify", "", Verify()), tmp_path, Subject("wrong", f"{SERVER} --fault {fault}"))
    assert cell.failure is not None


@pytest.mark.parametrize("fault", ["lose", "repeat", "alter"])
def test_a_wrong_server_fails_at_full_speed_too(fault: str, tmp_path: Path) -> None:
    cell = one(Workload("row", "", EndToEnd(1, 20, 1, 100)), tmp_path, Subject("wrong", f"{SERVER} --fault {fault}"))
    assert cell.failure is not None and "WrongResult" in cell.failure


def test_a_right_server_passes_verification(tmp_path: Path) -> None:
    cell = one(Workload("verify", "", Verify()), tmp_path)
    assert cell.failure is None
    assert cell.figures["verified"] == 2 * 400


def test_a_server_that_does_not_start_is_a_failed_cell(tmp_path: Path) -> None:
    broken = Subject("broken", f"{shlex.quote(sys.executable)} -c 'raise SystemExit(\"no disk\")'")
    cell = one(Workload("row", "", Publish(1, 1)), tmp_path, broken)
    assert cell.failure is not None and "no disk" in cell.failure
    missing = one(Workload("row", "", Publish(1, 1)), tmp_path, Subject("missing", "/no/such/nsqd"))
    assert missing.failure is not None and "CannotStart" in missing.failure


def test_no_server_survives_an_interrupt(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), fresh_server(A, tmp_path, sync="interval") as server:
        tree: ProcessTree = server.tree
        assert len(tree.pids()) == 1
        raise KeyboardInterrupt
    assert tree.pids() == []
    assert list(tmp_path.iterdir()) == []


def test_the_workspace_is_removed(tmp_path: Path) -> None:
    with temporary_workspace(tmp_path) as workspace:
        (workspace / "left").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_and_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = tmp_path / "result.json"
    status = command.main(
        [
            *("--quick", "--seconds", "0.05", "-k", "mpub-100", "--server", SERVER, "--peer", f"other=>{SERVER}"),
            *("--data-dir", str(tmp_path), "--json", str(stored), "--check"),
        ]
    )
    printed = capsys.readouterr().out
    assert status == command.EXIT_MISSED, "the throw-away server is no 0.2 us server"
    assert "other beside compiled" in printed and "MISS" in printed
    text = stored.read_text()
    assert '"cpu_us"' in text and '"load_average_at_start"' in text


def test_unknown_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["-k", "no-such-row"])
    assert "--list" in capsys.readouterr().err


def test_a_table_has_a_line_per_row_and_subject() -> None:
    cells = [Cell("mpub-100", "a", number, {"cpu_us": 0.1 * (1 + number), "rate_per_s": 1e6}) for number in range(3)]
    cells.append(Cell("idle", "a", 0, failure="it broke\nand said so"))
    lines = report.table(cells).splitlines()
    assert len(lines) == 4
    assert "0.200 (0.100-0.300)" in lines[2]
    assert "1 of 1 FAILED" in lines[3]
