"""The memory of the process: what the C library's allocator keeps, and what Python's collector looks at.

Large blocks are kept, as batches use them again, but not what a storm has left behind (`FreedMemory`). glibc gives
freed memory back to the kernel only from the end of its heap, so one block that is still used keeps all below it: after
4,000 connections with a large command each had come and gone, a node of 75 MB stayed at 230 MB for good. `malloc_trim`
gives back the whole pages in between; it takes some 25 ms for 130 MB, in a thread of its own.

A full garbage collection looks at every object that can be part of a cycle: 0.1 to 0.5 s in a node of a thousand
partitions, and CPython begins one whenever a quarter more has come, two or three of them during a failover. So what has
outlived a collection that used LONG_SECONDS of CPU is set aside (`FullCollections`): reference counts still free
it, but no later collection looks at it, and each of these costs what has come since. Cycles among what is set aside are
looked for in a *whole* collection, which stands still for as long as before: when the process has grown by WORTH_BYTES
since the last one, or after WHOLE_SECONDS, and not before SHARE times as long as the last one took.

Short collections begin each time YOUNG more objects are there, not 700 as by CPython's default: what a new leadership
makes stays, and was looked at by three generations while a thousand of them began, for a tenth of the node's CPU then.
Every YOUNG_PER_MIDDLE-th looks at what those before it left, too: beside a flood of strangers one that looked at
ten times as much took 40 to 80 ms. Who makes many such things says so (`made`): every MADE of them what is new is set
aside, without a look at it, before there are YOUNG new objects.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from collections.abc import Callable
from typing import Any

from nsqha.server.runtime.measures import resident_bytes

LOOK_SECONDS = 30.0
WORTH_BYTES = 64 << 20  # that the process must have grown by since memory was given back

LONG_SECONDS = 0.02
WHOLE_SECONDS = 3600.0
SHARE = 2000
YOUNG = 5_000
YOUNG_PER_MIDDLE = 4
MIDDLE_PER_FULL = 50
MADE = 16

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_large_blocks() -> None:
    """Have the C library reuse blocks of batch size instead of giving each back to the kernel.

    glibc maps every block above 128 KiB again for each allocation, so each large batch would cost page faults: half of
    what making frames and stamping them costs otherwise. Without glibc the call does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def trim() -> None:
    """Give the pages that nothing uses back to the kernel. Without glibc the call does nothing."""
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    malloc_trim(0)


class FreedMemory:
    """Sees now and then whether the process has grown, and gives back what it does not use any more."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        resident: Callable[[], int] = resident_bytes,
        trim: Callable[[], None] = trim,
    ) -> None:
        self._loop = loop
        self._resident = resident
        self._trim = trim
        self._least = 0  # resident memory at its least since the last time, or just after that
        self._trimming = False

    def start(self) -> None:
        """Look from now on, for as long as the loop runs."""
        self._least = self._resident()
        self._loop.call_later(LOOK_SECONDS, self._due)

    def _due(self) -> None:
        self._loop.call_later(LOOK_SECONDS, self._due)
        self.look()

    def look(self) -> None:
        """Give memory back if that is worth it; the pages are given back in a thread."""
        resident = self._resident()
        self._least = min(self._least, resident)
        if resident - self._least >= WORTH_BYTES and not self._trimming:
            self._trimming = True
            self._loop.run_in_executor(None, self._trim).add_done_callback(self._trimmed)

    def _trimmed(self, _: object) -> None:
        self._trimming = False
        self._least = self._resident()


class FullCollections:
    """What the collector of this process sets aside, and when it looks at that again."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
        collector: Any = gc,
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        self._clock = clock
        self._cpu = cpu  # a short collection beside a busy machine is no long one
        self._gc = collector
        self._resident = resident
        self._started = False
        self._made = 0  # since something was set aside for that
        self._began = 0.0  # the full collection that runs, in CPU of its thread
        self._set_aside = False  # since the last whole collection
        self._whole_ended = 0.0
        self._whole_seconds = 0.0
        self._whole_resident = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set aside all that there is (hardly any of it is garbage, and a node of many partitions would stand still
        just after it has registered), and look after collections for as long as the loop runs."""
        if self._observe not in self._gc.callbacks:
            self._gc.callbacks.append(self._observe)
        self._started = True
        self._gc.freeze()
        self._gc.set_threshold(YOUNG, YOUNG_PER_MIDDLE, MIDDLE_PER_FULL)
        self._whole_ended, self._whole_resident = self._clock(), self._resident()
        loop.call_later(LOOK_SECONDS, self._due, loop)

    def made(self) -> None:
        """Something with a few hundred objects was made that stays, such as a partition's role."""
        self._made += 1
        if self._made >= MADE and self._started:
            self._made = 0
            self._gc.freeze()
            self._set_aside = True

    def _due(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(LOOK_SECONDS, self._due, loop)
        self.look()

    def look(self) -> None:
        """Collect everything, if something was set aside and that may be worth it by now."""
        passed = self._clock() - self._whole_ended
        if not self._set_aside or passed < SHARE * self._whole_seconds:
            return
        if passed >= WHOLE_SECONDS or self._resident() - self._whole_resident >= WORTH_BYTES:
            self._gc.unfreeze()
            self._collect_whole()

    def _collect_whole(self) -> None:
        began = self._clock()
        self._gc.collect()
        self._gc.freeze()
        self._whole_ended = self._clock()
        self._whole_seconds = self._whole_ended - began
        self._whole_resident = self._resident()
        self._set_aside = False

    def _observe(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began = self._cpu()
        elif self._cpu() - self._began >= LONG_SECONDS:
            self._gc.freeze()
            self._set_aside = True


full_collections = FullCollections()
"""The process has one collector; the start of a node or lookup daemon starts this."""
