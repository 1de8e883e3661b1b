"""Stalls of a process from inside: its event loop, or all of its Python, does nothing for a while.

    stalls = StallFile(path)          the harness
    stalls.stall(2.5)                 the main thread, and with it the event loop; other threads go on
    stalls.stall(2.5, every=True)     all that needs the interpreter, as in a long call into C; threads in C go on
    stalls.seconds()                  how long it has stood still in all

SIGSTOP stops all threads and freezes the process as a scheduler does. Here some of it lives: its lease is renewed, its
disk writes, gRPC answers pings, and only the loop is away.

A thread looks at the file. It has the main thread run a signal handler that sleeps, or sleeps itself and keeps the lock
of the interpreter meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from pathlib import Path

LOOK_SECONDS = 0.02
SIGNAL = signal.SIGUSR2  # the product has no use for it


class StallFile:
    """What one process is to do; for whoever starts it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._asked = 0
        path.write_text("")
        _answers(path).write_text("")

    def stall(self, seconds: float, *, every: bool = False) -> None:
        """Ask for it; it comes within some milliseconds."""
        self._asked += 1
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.write_text(f"{self._asked} {'all' if every else 'loop'} {seconds}\n")
        fresh.replace(self.path)

    def seconds(self) -> float:
        """How long it has stood still, of the stalls that are over."""
        return sum(float(line.split()[1]) for line in _answers(self.path).read_text().splitlines())


def follow(path: Path) -> None:
    """This process stands still when the file says so. To be called by the main thread."""
    seconds = 0.0

    def stand_still(*_: object) -> None:
        began = time.monotonic()
        # A sleep goes on after a signal; what else the process is told has to wait.
        time.sleep(seconds)
        _answer(path, "loop", began)

    signal.signal(SIGNAL, stand_still)
    signal.siginterrupt(SIGNAL, False)

    def look() -> None:
        nonlocal seconds
        done = ""
        with contextlib.suppress(FileNotFoundError):
            done = path.read_text().partition(" ")[0]  # what an earlier life was asked for
        while True:
            time.sleep(LOOK_SECONDS)
            with contextlib.suppress(FileNotFoundError, ValueError):
                number, kind, wanted = path.read_text().split()
                if number != done:
                    done, seconds = number, float(wanted)
                    if kind == "all":
                        _hold_interpreter(path, seconds)
                    else:
                        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)

    threading.Thread(target=look, name="stalls", daemon=True).start()


def _hold_interpreter(path: Path, seconds: float) -> None:
    began = time.monotonic()
    ctypes.PyDLL(None).usleep(ctypes.c_uint(round(seconds * 1e6)))  # a PyDLL does not let go of the lock
    _answer(path, "all", began)


def _answer(path: Path, kind: str, began: float) -> None:
    with _answers(path).open("a") as file:
        file.write(f"{kind} {time.monotonic() - began:.3f}\n")


def _answers(path: Path) -> Path:
    return path.with_name(f"{path.name}.done")
