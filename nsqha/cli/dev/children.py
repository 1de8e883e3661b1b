"""Processes that live and die with this one: how `nsqha dev` runs the parts of a cluster.

A child has a log file, a session of its own (Ctrl-C in the terminal reaches us alone, and we stop the children in
order) and, on Linux, dies with us whatever happens to us: the kernel sends SIGKILL to it when we are gone, also after
kill -9. SIGKILL and not SIGTERM, because a child that hangs would survive the latter; what was acknowledged is safe.

    child = Child("node-1", argv, Path("data/node-1.log"))
    child.start()
    await child.ended()              # told by SIGCHLD, no threads
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
    """One program, perhaps started several times."""

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
        """OSError: the program can not be run, or its log not be written."""
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
        """Look whether it has ended; to be called when SIGCHLD came."""
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
    """End them at the same time: SIGTERM, and SIGKILL for those that need longer."""
    for child in children:
        child.send(signal.SIGTERM)
    waiting = [asyncio.ensure_future(child.ended()) for child in children if child.alive]
    if not waiting:
        return
    try:
        await asyncio.wait(waiting, timeout=seconds)
    finally:
        for child in children:
            child.send(signal.SIGKILL)
    # Nothing outlives SIGKILL but a process in an uninterruptible system call; that one is not waited for.
    await asyncio.wait(waiting, timeout=5.0)
    for task in waiting:
        task.cancel()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_line(path: Path) -> str:
    """Of a log; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


def _die_with(parent: int) -> None:
    """In the child, before it becomes its program."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the kernel was told
        os._exit(1)
