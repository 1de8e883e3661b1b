"""Clocks, passed in as arguments: this is the only module below the shell that reads a clock.

Two clocks that are never mixed: `monotonic` for deadlines (seconds, never goes back), `wall_ns` for message
timestamps, due times of delays and retention (nanoseconds since 1970, may jump).
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol


class Now(NamedTuple):
    """One reading of both clocks, so that a decision uses one moment."""

    mono: float
    wall_ns: int


class Clock(Protocol):
    """Both clocks. The monotonic one never goes back; the wall clock may be set at any time."""

    @property
    def trusted(self) -> bool:
        """Whether what is old by the wall clock is old; False: nothing is removed because of its age."""

    def monotonic(self) -> float:
        """Seconds; for deadlines and intervals."""

    def wall_ns(self) -> int:
        """Nanoseconds since 1970; for timestamps and due times."""

    def raw_wall_ns(self) -> int:
        """The same as the machine says it, whether that is believed or not; for others to compare with theirs."""


class SystemClock:
    """The machine's clocks."""

    monotonic = staticmethod(time.monotonic)
    trusted = True
    wall_ns = raw_wall_ns = staticmethod(time.time_ns)


class ManualClock:
    """A clock that moves only by `advance`; for tests and simulation."""

    def __init__(self, mono: float = 1000.0, wall_ns: int = 1_700_000_000_000_000_000) -> None:
        self.trusted = True
        self.mono = mono
        self.wall = wall_ns

    def monotonic(self) -> float:
        return self.mono

    def wall_ns(self) -> int:
        return self.wall

    def raw_wall_ns(self) -> int:
        return self.wall

    def advance(self, seconds: float) -> None:
        self.mono += seconds
        self.wall += round(seconds * 1e9)


def read(clock: Clock) -> Now:
    """Read both clocks at once."""
    return tuple.__new__(Now, (clock.monotonic(), clock.wall_ns()))  # Now(...), in half the time
