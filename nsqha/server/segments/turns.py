"""Turns: of all the threads that serve readers one at a time runs more than a few lines of Python.

request --take--> parsed, looked up, planned --give--> sent
                      |  paused: a file is read
                      +--> the next one, in the order in which they came
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from nsqha.server.segments.ranges import Refusal

TURN_SECONDS = 10.0  # to wait for one; whoever has it waits for nothing but the loop
RETRY_AFTER_SECONDS = 2


def busy(why: str) -> Refusal:
    """Later, or elsewhere."""
    return Refusal(503, why, {"Retry-After": str(RETRY_AFTER_SECONDS)})


class Turns:
    """One thread at a time, in the order in which they came. Each uses a `turn` of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()  # each is released when its turn has come

    def turn(self) -> Turn:
        """One that is not taken yet."""
        return Turn(self)

    def take(self) -> None:
        """Wait for it. Refusal (503): it has not come for TURN_SECONDS."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        if mine.acquire(timeout=TURN_SECONDS):
            return
        with self._lock:
            if mine not in self._waiting:
                return  # it has come just now
            self._waiting.remove(mine)
        raise busy("this node is too busy; take another replica")

    def give(self) -> None:
        """To the next one."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


class Turn:
    """`with` it the thread is the only one in its part; within, `paused` lets others go first while a file is read."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.mine = False

    def __enter__(self) -> Turn:
        self._turns.take()
        self.mine = True
        return self

    def __exit__(self, *_: object) -> None:
        if self.mine:
            self.mine = False
            self._turns.give()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A slow disk keeps nobody else."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
