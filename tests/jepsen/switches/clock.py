"""A wall clock that is wrong, told by a file that the process reads at every look at its clock.

    clock = ClockFile(path)               the harness
    clock.set(offset_ns=3600 * 10**9)     an hour ahead, from now on
    clock.set(rate=3.0)                   runs three times as fast, from now on
    clock.looks()                         how often the process has looked since the last `set`

The file is mapped by both sides. `sequence` is odd while the harness writes, so that no reader takes half of an old
value with half of a new one. The monotonic clock is the machine's: nobody may set that.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path

from nsqha.clock import SystemClock

_FIELDS = struct.Struct("=QqqdQ")  # sequence, offset ns, since ns, rate, looks
_SETTING = struct.Struct("=qqd")
_SEQUENCE, _LOOKS = struct.Struct("=Q"), 32  # the latter is where looks are


class ClockFile:
    """What the clock of one process says; for whoever starts it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(_FIELDS.pack(0, 0, 0, 1.0, 0))
        self._map = _mapped(path)
        self._sequence = 0
        self.wrong = False

    def set(self, *, offset_ns: int = 0, rate: float = 1.0) -> None:
        """From now on it is off by this, and runs at this rate; without arguments it is right."""
        _SEQUENCE.pack_into(self._map, _LOOKS, 0)
        self.move(offset_ns=offset_ns, rate=rate)

    def move(self, *, offset_ns: int = 0, rate: float = 1.0) -> None:
        """As `set`; looks are counted on."""
        self._sequence += 2
        _SEQUENCE.pack_into(self._map, 0, self._sequence - 1)
        _SETTING.pack_into(self._map, _SEQUENCE.size, offset_ns, time.time_ns(), rate)
        _SEQUENCE.pack_into(self._map, 0, self._sequence)
        self.wrong = offset_ns != 0 or rate != 1.0

    def looks(self) -> int:
        looks: int = _SEQUENCE.unpack_from(self._map, _LOOKS)[0]
        return looks


def reader(path: Path) -> Callable[[], int]:
    """The wall clock in nanoseconds as the file has it."""
    shared = _mapped(path)

    def wall_ns() -> int:
        while True:
            sequence, offset, since, rate, looks = _FIELDS.unpack_from(shared)
            if not sequence & 1 and _SEQUENCE.unpack_from(shared)[0] == sequence:
                break
        _SEQUENCE.pack_into(shared, _LOOKS, looks + 1)
        now = time.time_ns()
        return now + int(offset) + (round((now - since) * (rate - 1.0)) if rate != 1.0 else 0)

    return wall_ns


def follow(path: Path) -> None:
    """All of this process takes the wall clock from the file."""
    wall_ns = staticmethod(reader(path))
    for name in ("wall_ns", "raw_wall_ns"):
        setattr(SystemClock, name, wall_ns)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _FIELDS.size)
