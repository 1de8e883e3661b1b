"""How a command ends: the exit status, and one line on stderr that says what failed, why, and what to do.

    0  ok                          5  not allowed
    1  failed                      6  unreachable, or timed out
    2  usage                       7  partly done
    3  not found                   8  not confirmed; nothing was changed
    4  exists already, or was changed meanwhile
    130 interrupted                141 stdout was closed

With gRPC in the process, it ends by `os._exit` and not by the interpreter's own shutdown, which can hang for ever:
gRPC's threads are stopped wherever they are, one of them perhaps while it holds the lock of a call, and the finalizer
of that call then waits for the lock. gRPC has no way to wait for its threads. Nothing is left to the interpreter: a
command syncs, closes and sends what is necessary before it returns its status.

An interrupt that comes while the interpreter runs a finalizer, or a callback of a weak reference (the import system has
one per module), is dropped by it as an error that cannot be raised. It is raised again a moment later, or a command
that waits for an interrupt would run for ever.

Signals that end no Go program end no command and no daemon either: scripts send SIGUSR1 to nsqd, and nothing happens.
SIGHUP ends both at once, as SIGKILL does, unless the parent ignores it (`nohup`).
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from nsqha.errors import ConfigError, Conflict, NotFound, NsqhaError, Unavailable

OK = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
CONFLICT = 4
NOT_ALLOWED = 5
UNREACHABLE = 6
PARTLY = 7
NOT_CONFIRMED = 8
INTERRUPTED = 130
BROKEN_PIPE = 141

MEANING = {
    FAILED: "failed",
    USAGE: "usage",
    NOT_FOUND: "not found",
    CONFLICT: "exists already or was changed meanwhile",
    NOT_ALLOWED: "not allowed",
    UNREACHABLE: "unreachable or timed out",
    PARTLY: "partly done",
    NOT_CONFIRMED: "not confirmed",
    INTERRUPTED: "interrupted",
}


AGAIN_SECONDS = 0.01
"""Seconds until a dropped interrupt is raised again: long enough that the finalizer it came in has returned."""


_IGNORED = ("SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGPWR", "SIGXCPU", "SIGXFSZ")
"""What Go's runtime catches and does nothing about, as far as Python would end the process; and all of real time."""


def run(command: Callable[[], int]) -> NoReturn:
    """Carry out a command and end the process with its status; an unexpected error is shown, with status 1."""
    _ignore_signals()
    again = _InterruptAgain()
    signal.signal(signal.SIGALRM, again.on_alarm)
    sys.unraisablehook = again.on_dropped
    try:
        status = command()
    except Exception as error:
        if _interrupted(error):
            status = INTERRUPTED
        else:
            traceback.print_exc()
            status = FAILED
    end(status)


def _interrupted(error: BaseException | None) -> bool:
    """Whether it was made of an interrupt: one that comes while a class statement of an import runs its
    `__set_name__` calls leaves them as a RuntimeError (until Python 3.12)."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__
    return False


def _ignore_signals() -> None:
    numbers = [int(getattr(signal, name, 0)) for name in _IGNORED]
    if hasattr(signal, "SIGRTMIN"):
        numbers += range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
    for number in filter(None, numbers):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)


class _InterruptAgain:
    """Raises a dropped interrupt again, by an alarm. Alarms of others are ignored."""

    def __init__(self) -> None:
        self._dropped = False

    def on_dropped(self, dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            self._dropped = True
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        else:
            sys.__unraisablehook__(dropped)

    def on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self._dropped:
            self._dropped = False
            signal.default_int_handler(number, frame)


def end(status: int) -> NoReturn:
    """End the process; by SystemExit where that is safe."""
    if "grpc" not in sys.modules:
        sys.exit(status)
    if "logging" in sys.modules:
        sys.modules["logging"].shutdown()  # which the interpreter's own end calls, too: what was said is written
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # the stream is closed: that was reported before, or there is no reader to report it to
    os._exit(status)


class Exit(NsqhaError):
    """End the command with this status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def status_of(error: NsqhaError) -> int:
    """The exit status for an error."""
    if isinstance(error, Exit):
        return error.status
    for kind, status in ((ConfigError, USAGE), (NotFound, NOT_FOUND), (Conflict, CONFLICT), (Unavailable, UNREACHABLE)):
        if isinstance(error, kind):
            return status
    return FAILED
