"""SIGSTOP that has taken effect when it returns: kill() comes back while threads of the process still run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def stop(pid: int, seconds: float = 10.0) -> None:
    """Stop a process, and wait until each of its threads stands still."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + seconds
    while not all(_state(task) in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    """One letter, as proc(5) has it; a thread that has gone counts as dead."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
