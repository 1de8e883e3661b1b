"""How a command ends: the exit status, and one line on stderr that says what failed, why, and what to do.

    0  ok                          5  not allowed
    1  failed                      6  unreachable, or timed out
    2  usage                       7  partly done
    3  not found                   8  not confirmed; nothing was changed
    4  exists already, or was changed meanwhile
    130 interrupted                141 whoever read our output is gone
"""

from __future__ import annotations

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
    CONFLICT: "exists already",
    NOT_ALLOWED: "not allowed",
    UNREACHABLE: "unreachable or timed out",
    PARTLY: "partly done",
    NOT_CONFIRMED: "not confirmed",
    INTERRUPTED: "interrupted",
}


class Exit(NsqhaError):
    """End the command with this status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def status_of(error: NsqhaError) -> int:
    """The exit status that an error stands for."""
    if isinstance(error, Exit):
        return error.status
    for kind, status in ((ConfigError, USAGE), (NotFound, NOT_FOUND), (Conflict, CONFLICT), (Unavailable, UNREACHABLE)):
        if isinstance(error, kind):
            return status
    return FAILED
