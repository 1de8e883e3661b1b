"""Where the node's figures come from: what it counts while it runs, the free space of its disk, what its process uses.

Measures are counted per batch or per second, never per message.

What the process uses is shown in the fields of nsqd's memory statistics, as far as Python has them. heap_objects is
the number of allocated blocks, heap_in_use_bytes the resident memory; Python keeps no figure for idle, released or
next-collection bytes, so these are 0. The collector pauses are those of full collections only: the younger generations
are scanned in microseconds.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter, deque
from typing import Any, NamedTuple

from nsqha.quantile import BATCH_BOUNDS, SECONDS_BOUNDS, Histogram

PAUSES_KEPT = 256
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Measures:
    """One node's histograms and counters; `server.node.snapshot` reads them."""

    def __init__(self) -> None:
        self.publish_seconds = Histogram(SECONDS_BOUNDS)  # from the flush of a batch to its commit
        self.batch_messages = Histogram(BATCH_BOUNDS)
        self.loop_lag_seconds = Histogram(SECONDS_BOUNDS)
        self.publish_errors: Counter[str] = Counter()
        self.log_events: Counter[str] = Counter()
        self.retention_removed_bytes = 0
        self.leader_changes: Counter[str] = Counter()  # epochs begun here, by topic
        self.isr_changes: Counter[tuple[str, str]] = Counter()  # by topic and kind

    def retention_removed(self, size: int) -> None:
        self.retention_removed_bytes += size


class Space(NamedTuple):
    """The free and the total space of one file system."""

    free_bytes: int
    total_bytes: int


def disk_space(path: str) -> Space:
    """The space of the file system that `path` is on; free is what an unprivileged user may still write."""
    found = os.statvfs(path)
    return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


class MemoryStats(NamedTuple):
    """nsqd's nine memory figures, in its order."""

    heap_objects: int = 0
    heap_idle_bytes: int = 0
    heap_in_use_bytes: int = 0
    heap_released_bytes: int = 0
    gc_pause_usec_100: int = 0
    gc_pause_usec_99: int = 0
    gc_pause_usec_95: int = 0
    next_gc_bytes: int = 0
    gc_total_runs: int = 0


class CollectorWatch:
    """Remembers how long the last full garbage collections stopped the process."""

    def __init__(self) -> None:
        self.runs = 0
        self.seconds_total = 0.0
        self._usec: deque[int] = deque(maxlen=PAUSES_KEPT)
        self._started = 0.0

    def start(self) -> None:
        if self._observe not in gc.callbacks:
            gc.callbacks.append(self._observe)

    def _observe(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._started = time.perf_counter()
        elif self._started:
            pause = time.perf_counter() - self._started
            self.runs += 1
            self.seconds_total += pause
            self._usec.append(int(pause * 1e6))

    def percentile_usec(self, quantile: float) -> int:
        pauses = sorted(self._usec)
        return pauses[min(int(quantile * len(pauses)), len(pauses) - 1)] if pauses else 0


certificates_end: dict[str, float] = {}
"""When the certificates of this process expire (Unix time), by their path; `server.runtime.certificates` writes it."""



def expired_certificates(now: float) -> str:
    """The certificates of this process that have expired (`now`: Unix time), and what to do; empty: none has."""
    expired = [(path, end) for path, end in sorted(certificates_end.items()) if end <= now]
    return "; ".join(f"{path} expired at {utc(end)}: replace the file (no restart)" for path, end in expired)


def utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


collector = CollectorWatch()
"""The process has one collector; the start of a node starts the watch."""


def resident_bytes() -> int:
    """Resident memory now; 0 where the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def open_files() -> int:
    """File descriptors in use; 0 where the system does not report them."""
    try:
        return open_files_told() or len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def open_files_told() -> int:
    """Likewise, in a microsecond, where the kernel keeps their number (Linux 6.2); else 0: they have to be listed."""
    try:
        return os.stat("/proc/self/fd").st_size
    except OSError:
        return 0


def memory_stats() -> MemoryStats:
    return MemoryStats(
        heap_objects=sys.getallocatedblocks(),
        heap_in_use_bytes=resident_bytes(),
        gc_pause_usec_100=collector.percentile_usec(1.0),
        gc_pause_usec_99=collector.percentile_usec(0.99),
        gc_pause_usec_95=collector.percentile_usec(0.95),
        gc_total_runs=collector.runs,
    )
