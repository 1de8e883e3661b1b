"""What one HTTP connection has sent and is not parsed yet: parsed in parts, while others have their turn in between.

One read of the socket is up to 256 KB, and a body of tiny chunks takes a millisecond for each 16 KB of it, also where
only the rest of a refused body is dropped. So a read is fed to the parser in pieces, until that has taken PART_SECONDS;
what is left waits, and the socket is not read, until it is this connection's turn again (`runtime.budget`). One that
sends faster than it is read rests after each read, too: else the loop would read on from it in the same turn. So does
who comes in a turn in which others have used what there is for those that do not rest. What is kept is one read, and
one more for each time that the parser's owner asks for more although this connection rests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from nsqha.server.runtime.budget import SharedTurns

PIECE_BYTES = 16 << 10
FAST_BYTES = 64 << 10  # a read of more: there is more where it came from
PART_SECONDS = 0.0003


class HttpSource(Protocol):
    """The connection that is read."""

    def feed(self, data: bytes) -> None:
        """Parse this."""

    def pause_source(self) -> None:
        """Read no more."""

    def resume_source(self) -> None:
        """Read on, unless the parser's owner wants none."""


class ReadParts:
    """The turns that one HTTP connection has at being parsed."""

    __slots__ = ("_clock", "_kept", "_source", "_turns", "resting")

    def __init__(self, source: HttpSource, turns: SharedTurns, clock: Callable[[], float] = time.perf_counter) -> None:
        self.resting = False
        self._source = source
        self._turns = turns
        self._clock = clock
        self._kept = b""

    def take(self, data: bytes) -> None:
        """What was read. Nothing: parse on, which is not for others to wait for."""
        if self.resting and data:
            self._kept += data
            self._source.pause_source()
        elif not data:
            self._source.feed(data)
        elif not self._turns.enter():
            self._kept = data
            self._rest(self._turns.wait)
        else:
            if len(data) <= PIECE_BYTES:
                self._source.feed(data)
            else:
                self._kept = data
                self._part(rest=len(data) > FAST_BYTES)
            self._turns.leave()

    def end(self) -> None:
        """The connection is gone."""
        self._kept = b""
        self._source = _NOBODY

    def _part(self, *, rest: bool) -> None:
        data, at = self._kept, 0
        end = self._clock() + PART_SECONDS
        while at < len(data):
            self._source.feed(data[at : at + PIECE_BYTES])
            at += PIECE_BYTES
            if self._clock() >= end:
                break
        self._kept = data[at:] + self._kept[len(data) :]
        if self._kept or rest:
            self._rest(self._turns.later)
        else:
            self._source.resume_source()

    def _rest(self, until: Callable[[Callable[[], None]], None]) -> None:
        self.resting = True
        self._source.pause_source()
        until(self._go_on)

    def _go_on(self) -> None:
        self.resting = False
        self._part(rest=False)


class _Nobody:
    """A connection that is gone."""

    def feed(self, data: bytes) -> None: ...

    def pause_source(self) -> None: ...

    def resume_source(self) -> None: ...


_NOBODY = _Nobody()
