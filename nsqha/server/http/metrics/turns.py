"""Work for one who asks for figures, done on the loop in turns: clients are served between two of them.

The work is a generator that yields after each step. A thread would be no better: the loop waits for the interpreter as
long as the thread has it, at each of its callbacks anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

TURN_SECONDS = 0.0001  # a publish that arrives in a turn waits for its end, and for nothing else


def to_end(work: Generator[object, None, T]) -> T:
    """All of it now."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


async def in_turns(work: Generator[object, None, T]) -> T:
    """A turn ends with the first step that ends after TURN_SECONDS."""
    began = time.perf_counter()
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        if time.perf_counter() - began >= TURN_SECONDS:
            # The loop looks at its sockets once in each; what a callback of theirs asks it to do next is behind the
            # first, and would wait for one more turn.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            began = time.perf_counter()
