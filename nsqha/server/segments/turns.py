"""Turns: only one of the threads that serve readers runs more than a few lines of Python at a time.

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

TURN_SECONDS = 10.0  # to wait for a turn; the thread that has it waits for nothing but the loop
RETRY_AFTER_SECONDS = 2


def busy(why: str) -> Refusal:
    """A 503 that asks the reader to try later, or another replica."""
    return Refusal(503, why, {"Retry-After": str(RETRY_AFTER_SECONDS)})


class Turns:
    """Admits one thread at a time, in the order in which they came. Each uses a `turn` of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()  # each is released when its turn has come

    def turn(self) -> Turn:
        """A turn that is not taken yet."""
        return Turn(self)

    def take(self) -> None:
        """Wait for a turn. Refusal (503): there was none within TURN_SECONDS."""
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
        """Pass the turn to the next thread."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


class Turn:
    """A context in which one thread runs at a time; `paused` lets others run while the thread reads a file."""

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
        """Give the turn up for the block: other threads do not wait for a slow disk."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
