"""Memory that was freed goes back to the kernel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

from nsqha.server.runtime.allocator import LOOK_SECONDS, WORTH_BYTES, FreedMemory

FREED = """
from nsqha.server.runtime.allocator import trim
from nsqha.server.runtime.measures import resident_bytes

before = resident_bytes()
blocks = [b"x" * (4000 + n % 7) for n in range(50_000)]
blocks[:-1] = []  # the last one lies at the end of the heap
freed = resident_bytes()
trim()
print(freed - before, resident_bytes() - before)
"""


class FakeLoop:
    """Timers and threads that run when the test says so."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.work: list[Callable[[], None]] = []
        self.callbacks: list[Callable[[object], None]] = []

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.timers.append((seconds, callback))

    def run_in_executor(self, _: None, work: Callable[[], None]) -> FakeLoop:
        self.work.append(work)
        return self

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self.callbacks.append(callback)

    def pass_time(self) -> None:
        [(seconds, callback)] = self.timers
        assert seconds == LOOK_SECONDS
        self.timers.clear()
        callback()

    def threads_run(self) -> int:
        """How many ran."""
        done, self.work = len(self.work), []
        for callback in self.callbacks:
            callback(None)
        self.callbacks.clear()
        return done


class Process:
    def __init__(self) -> None:
        self.resident = 100 << 20
        self.loop = FakeLoop()
        self.memory = FreedMemory(cast(Any, self.loop), resident=lambda: self.resident, trim=lambda: None)
        self.memory.start()

    def look(self) -> int:
        """How often memory was given back."""
        self.loop.pass_time()
        return self.loop.threads_run()


def test_what_a_storm_left_is_given_back_once() -> None:
    process = Process()
    assert process.look() == 0
    process.resident += WORTH_BYTES
    assert process.look() == 1
    assert process.look() == 0, "what is left is in use"


def test_growth_counts_from_the_least_there_was() -> None:
    process = Process()
    process.resident -= 30 << 20
    assert process.look() == 0
    process.resident += WORTH_BYTES - 1
    assert process.look() == 0
    process.resident += 1
    assert process.look() == 1


def test_one_thread_at_a_time_gives_memory_back() -> None:
    process = Process()
    process.resident += WORTH_BYTES
    process.loop.pass_time()
    process.loop.pass_time()
    assert process.loop.threads_run() == 1
    process.resident += WORTH_BYTES
    assert process.look() == 1


def test_pages_between_blocks_that_are_used_go_back_to_the_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    freed, trimmed = map(int, done.stdout.split())
    assert freed > 150 << 20, "the allocator gave it back by itself: nothing to test"
    assert trimmed < 40 << 20
