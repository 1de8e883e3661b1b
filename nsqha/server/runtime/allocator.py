"""What the C library's allocator keeps: large blocks, which batches use again, but not what a storm has left behind.

glibc gives freed memory back to the kernel only from the end of its heap, so one block that is still used keeps all
below it: after 4,000 connections with a large command each had come and gone, a node of 75 MB stayed at 230 MB for
good. `malloc_trim` gives back the whole pages in between; it takes some 25 ms for 130 MB, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

from nsqha.server.runtime.measures import resident_bytes

LOOK_SECONDS = 30.0
WORTH_BYTES = 64 << 20  # that the process must have grown by since memory was given back

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
