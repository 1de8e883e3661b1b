"""Runs cells: which workload against which subject, in which order, and never more than one server at a time.

Over the rounds the subjects alternate A B, B A, A B ..., so that a machine that becomes slower or faster while the
benchmark runs does not favour one of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from . import disk
from .client import Refused
from .figures import Cell, marks_of
from .loadgen import LoadError
from .place import Place, Scale, WrongResult, cores_for
from .procstat import load_average
from .servers import IMPLEMENTATIONS, CannotStart, NotForThisSubject, Server, Subject, compile_modules, fresh_server
from .workloads import Workload, tls_flags


@dataclass(frozen=True)
class Plan:
    """Everything a run needs to know."""

    subjects: Sequence[Subject]
    workloads: Sequence[Workload]
    scale: Scale
    sync: str
    rounds: int
    pinned: bool = False


def order(subjects: Sequence[Subject], rounds: int) -> Iterator[tuple[int, Subject]]:
    """(round, subject) so that neighbours differ as little in time as they can."""
    for number in range(rounds):
        for subject in subjects if number % 2 == 0 else reversed(subjects):
            yield number, subject


def steps(plan: Plan) -> list[tuple[Workload, int, Subject]]:
    """All cells of a run, in order."""
    return [
        (workload, number, subject)
        for workload in plan.workloads
        for number, subject in order(plan.subjects, min(plan.rounds, workload.rounds_max))
    ]


def run(plan: Plan, workspace: Path, report: Callable[[int, int, Cell], None]) -> list[Cell]:
    """Run all cells; each is reported as it ends. A cell that fails does not end the run."""
    cells: list[Cell] = []
    todo = steps(plan)
    compile_modules()
    server_cores, client_cores = cores_for(plan.pinned)
    if client_cores:
        os.sched_setaffinity(0, client_cores)
    for position, (workload, number, subject) in enumerate(todo, start=1):
        cell = _cell(plan, workload, number, subject, workspace, server_cores)
        if cell is not None:
            cells.append(cell)
            report(position, len(todo), cell)
    return cells


def _cell(
    plan: Plan, workload: Workload, number: int, subject: Subject, workspace: Path, cores: set[int] | None
) -> Cell | None:
    cell = Cell(workload.name, subject.name, number)
    load = load_average()
    server: Server | None = None
    try:
        flags = [*workload.flags, *(tls_flags(workspace) if workload.tls else ())]
        with fresh_server(subject, workspace, sync=workload.sync or plan.sync, flags=flags, cores=cores) as server:
            try:
                _check_implementation(server)
                disk.warm_memory(workspace, plan.scale.bytes_max * 3 // 2)
                cell.figures = workload.measure(Place(server, plan.scale, workspace))
            except Exception:
                cell.failure = server.log_tail()
                raise
        cell.figures["load_average"] = load
        cell.marks = marks_of(cell.figures)
        cell.failure = None
    except NotForThisSubject:
        return None
    except (WrongResult, LoadError, CannotStart, Refused, OSError, ValueError) as error:
        said = f"\n{cell.failure}" if cell.failure else ""
        cell.failure = f"{type(error).__name__}: {error}{said}"
    return cell


def _check_implementation(server: Server) -> None:
    """A figure of the compiled functions must not come from the twin because they were never built."""
    try:
        active = json.loads(server.get("/stats?format=json"))["nsqha"]["hot"]
    except (ValueError, KeyError):
        return  # not our broker
    if server.subject.name in IMPLEMENTATIONS and active != server.subject.name:
        raise WrongResult(f"the broker runs its {active} functions: build the others or say --implementation {active}")


@contextmanager
def temporary_workspace(parent: Path | None) -> Iterator[Path]:
    """A directory for data, removed at the end; TERM ends a run as Ctrl-C does, so that it is removed then too."""
    directory = Path(tempfile.mkdtemp(prefix="nsqha-bench-", dir=parent))
    # Set even for INT: a shell that starts this in the background has it ignored.
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    previous = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for number, handler in previous.items():
            signal.signal(number, handler)


def filesystem_of(path: Path) -> str:
    """`ext4 on /dev/vda` for the mount that holds `path`."""
    best, text = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        if path.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, text = mount, f"{kind} on {device}"
    return text


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
