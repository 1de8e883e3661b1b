"""Whose turn it is among connections that ask for more than one of them may have in a turn of the loop.

A connection that has had its part of a turn *rests*: it is not read, and what it has sent already waits. All that rest
share TURN_SECONDS of each turn of the loop. They go on in the order in which they began to rest, each once in a turn,
and whoever has its part again and wants more is behind all others. So what is asked by those who never wait for an
answer costs everybody else TURN_SECONDS and one part in a turn, however many they are; and none of them waits for
ever, as at least one goes on in every turn.

What a part is says who makes a connection rest: it has to be small beside TURN_SECONDS.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

TURN_SECONDS = 0.001


class Loop(Protocol):
    """The loop, as far as turns need it."""

    def call_soon(self, callback: Callable[[], None]) -> object: ...


class SharedTurns:
    """The connections of one port that rest."""

    __slots__ = ("_clock", "_due", "_loop", "_resting")

    def __init__(self, loop: Loop, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` goes on within a turn: the loop's own does not."""
        self._loop = loop
        self._clock = clock
        self._resting: deque[Callable[[], None]] = deque()
        self._due = False  # the loop calls `_turn`, or it runs

    def later(self, go_on: Callable[[], None]) -> None:
        """Call this in a later turn of the loop, when all that rest already have had theirs."""
        self._resting.append(go_on)
        if not self._due:
            self._due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """A turn of the loop."""
        resting = self._resting
        end, left = self._clock() + TURN_SECONDS, len(resting)
        try:
            while left:
                left -= 1
                resting.popleft()()
                if self._clock() >= end:
                    break
        finally:
            self._due = bool(resting)
            if resting:
                self._loop.call_soon(self._turn)
