"""Processes that live and die with this one: how `nsqha dev` runs the parts of a cluster.

A child has a log file, a session of its own (Ctrl-C in the terminal reaches only the parent, which stops the children
in order) and, on Linux, dies with the parent: the kernel sends it SIGKILL when the parent ends, also after kill -9.
SIGKILL and not SIGTERM, because a child that hangs would survive the latter; what was acknowledged is safe.

    child = Child("node-1", argv, Path("data/node-1.log"))
    child.start()
    await child.ended()              # woken by SIGCHLD, no threads
    await stop([child], seconds=10)  # SIGTERM, then SIGKILL
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
TAIL_BYTES = 4096

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Child:
    """One program, which may be started several times."""

    def __init__(self, name: str, argv: Sequence[str], log: Path) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self._over = asyncio.Event()

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def alive(self) -> bool:
        return self.process is not None and not self._over.is_set()

    def start(self) -> None:
        """Start the program. Raises OSError if it cannot be run, or its log file cannot be written."""
        parent = os.getpid()
        self._over.clear()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: _die_with(parent),
            )

    def reap(self) -> None:
        """Check whether it has ended; to be called after SIGCHLD."""
        if self.process is not None and self.process.poll() is not None:
            self._over.set()

    async def ended(self) -> None:
        await self._over.wait()

    def send(self, number: int) -> None:
        if self.alive and self.process is not None:
            self.process.send_signal(number)

    def how_it_ended(self) -> str:
        """`was killed by SIGKILL`, or `ended with status 1: the last line of its log`."""
        status = self.process.returncode if self.process is not None else None
        if status is None:
            return "runs"
        if status < 0:
            return f"was killed by {signal_name(-status)}"
        said = last_line(self.log)
        return f"ended with status {status}{f': {said}' if said else ''}"


async def stop(children: Sequence[Child], *, seconds: float) -> None:
    """End them at the same time: SIGTERM, then SIGKILL for those that need longer than `seconds`."""
    for child in children:
        child.send(signal.SIGTERM)
    # These tasks need no group: they end in this function.
    waiting = [asyncio.ensure_future(child.ended()) for child in children if child.alive]
    if not waiting:
        return
    try:
        await asyncio.wait(waiting, timeout=seconds)
    finally:
        for child in children:
            child.send(signal.SIGKILL)
    # Only a process in an uninterruptible system call survives SIGKILL; this does not wait for it.
    await asyncio.wait(waiting, timeout=5.0)
    for task in waiting:
        task.cancel()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_line(path: Path) -> str:
    """The last line of a log file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


def _die_with(parent: int) -> None:
    """Run in the child before exec: have the kernel kill it when the parent dies."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl was called
        os._exit(1)
