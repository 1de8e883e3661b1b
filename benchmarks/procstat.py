"""What a process tree used: CPU, memory, bytes written; and what else the machine was doing.

CPU is read from each process's own CPU clock (`clock_gettime` on the clock id made from its pid). That is the
scheduler's run time in nanoseconds, the counter behind `/proc/<pid>/task/*/schedstat`, with two differences that
matter here: it includes threads that have ended (a pool that shrinks must not make CPU vanish) and the slice that is
running right now (schedstat lags by up to a tick). `utime`/`stime` are 10 ms jiffies, far too coarse.

A child counts from the moment it is first seen and keeps its last reading when it is gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Memory:
    rss_bytes: int
    anonymous_bytes: int


class ProcessTree:
    """The processes below (and with) some roots, as one."""

    def __init__(self, roots: Iterable[int]) -> None:
        self._roots = tuple(roots)
        self._cpu_ns: dict[int, int] = {}

    def pids(self) -> list[int]:
        """Roots that live and all their living descendants."""
        found: list[int] = []
        waiting = list(self._roots)
        while waiting:
            pid = waiting.pop()
            tasks = _children(pid)
            if tasks is None or pid in found:
                continue
            found.append(pid)
            waiting += tasks
        return found

    def cpu_ns(self) -> int:
        """Run time of all threads so far."""
        for pid in self.pids():
            reading = _cpu_clock_ns(pid)
            if reading is not None:
                self._cpu_ns[pid] = reading
        return sum(self._cpu_ns.values())

    def memory(self) -> Memory:
        fields = [parse_status(text) for text in self._read("status")]
        return Memory(sum(each.rss_bytes for each in fields), sum(each.anonymous_bytes for each in fields))

    def written_bytes(self) -> int:
        """Bytes the tree made dirty on block devices: what reaches the disk unless a file is deleted before."""
        return sum(parse_io(text) for text in self._read("io"))

    def _read(self, name: str) -> Iterator[str]:
        for pid in self.pids():
            try:
                yield (PROC / str(pid) / name).read_text()
            except OSError:
                continue  # ended since it was listed


def parse_status(text: str) -> Memory:
    """VmRSS and RssAnon of a /proc/<pid>/status; a zombie has neither."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return Memory(_kib(fields.get("VmRSS", "0 kB")), _kib(fields.get("RssAnon", "0 kB")))


def parse_io(text: str) -> int:
    """write_bytes of a /proc/<pid>/io (wchar would count sockets too)."""
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return int(fields["write_bytes"])


def _kib(value: str) -> int:
    return int(value.split()[0]) * 1024


def _children(pid: int) -> list[int] | None:
    """Children of all threads of a process; None if it is gone."""
    try:
        tasks = os.listdir(PROC / str(pid) / "task")
    except OSError:
        return None
    found: list[int] = []
    for task in tasks:
        try:
            found += map(int, (PROC / str(pid) / "task" / task / "children").read_text().split())
        except OSError:
            continue
    return found


def _cpu_clock_ns(pid: int) -> int | None:
    # clock_getcpuclockid(3): the complement of the pid above three bits, of which 2 means "scheduler time, process".
    try:
        return time.clock_gettime_ns(((~pid) << 3) | 2)
    except OSError:
        return None


@dataclass(frozen=True)
class MachineTime:
    """The `cpu` line of /proc/stat, in seconds over all cores."""

    busy_s: float
    steal_s: float

    def __sub__(self, earlier: MachineTime) -> MachineTime:
        return MachineTime(self.busy_s - earlier.busy_s, self.steal_s - earlier.steal_s)


def parse_machine(text: str, jiffies_per_s: int) -> MachineTime:
    """user nice system idle iowait irq softirq steal ...; waiting for a disk is not being busy."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.split("\n", 1)[0].split()[1:9])
    return MachineTime((user + nice + system + irq + softirq) / jiffies_per_s, steal / jiffies_per_s)


def machine_time() -> MachineTime:
    return parse_machine((PROC / "stat").read_text(), os.sysconf("SC_CLK_TCK"))


def load_average() -> float:
    return os.getloadavg()[0]


@contextmanager
def watching_memory(tree: ProcessTree, *, every_s: float = 0.05) -> Iterator[list[Memory]]:
    """Memory of the tree, read again and again while the body runs (the load generator does not hold the GIL)."""
    readings = [tree.memory()]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(every_s):
            readings.append(tree.memory())

    thread = threading.Thread(target=watch, name="memory", daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        done.set()
        thread.join()
        readings.append(tree.memory())
