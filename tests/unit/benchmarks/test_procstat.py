from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.procstat import MachineTime, Memory, ProcessTree, parse_io, parse_machine, parse_status, watching_memory

STATUS = "Name:\tpython\nState:\tS (sleeping)\nVmHWM:\t  13600 kB\nVmRSS:\t  13000 kB\nRssAnon:\t    6876 kB\n"
IO = "rchar: 13\nwchar: 7\nsyscr: 1\nsyscw: 2\nread_bytes: 3\nwrite_bytes: 4096\ncancelled_write_bytes: 0\n"


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_memory_of_a_status() -> None:
    assert parse_status(STATUS) == Memory(13000 * 1024, 6876 * 1024)
    assert parse_status("Name:\tpython\nState:\tZ (zombie)\n") == Memory(0, 0)


def test_bytes_written() -> None:
    assert parse_io(IO) == 4096


def test_waiting_is_not_busy() -> None:
    line = "cpu  100 10 50 99999 777 1 2 30 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
    assert parse_machine(line, 100) == MachineTime(busy_s=1.63, steal_s=0.30)
    assert MachineTime(3.0, 1.0) - MachineTime(1.0, 0.5) == MachineTime(2.0, 0.5)


CLOCK = """
import os, time
from pathlib import Path
from benchmarks.procstat import ProcessTree
tree = ProcessTree([os.getpid()])
before = tree.cpu_ns() - time.process_time_ns()
while time.process_time() < 0.5:
    pass
shown = sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{os.getpid()}/task").glob("*/schedstat"))
print(tree.cpu_ns() - shown, tree.cpu_ns() - time.process_time_ns() - before)
"""


def test_the_clock_is_the_schedulers() -> None:
    """The sum over threads that schedstat shows, up to the tick it lags behind. In a process of its own: children of
    this one, servers of other tests, use time as well."""
    root = Path(__file__).resolve().parents[3]
    said = subprocess.run([sys.executable, "-c", CLOCK], cwd=root, capture_output=True, text=True, check=True).stdout
    ahead, gone = map(int, said.split())
    assert ahead >= 0
    assert gone == pytest.approx(0, abs=20_000_000)


def test_a_thread_that_ended_still_counts() -> None:
    tree = ProcessTree([os.getpid()])
    before = tree.cpu_ns()
    thread = threading.Thread(target=burn, args=(0.03,))
    thread.start()
    thread.join()
    assert tree.cpu_ns() - before >= 30_000_000


def test_children_count_and_are_not_forgotten() -> None:
    # A parent that starts a child which burns 50 ms, says so, and lives until its input ends.
    child = "import time\nwhile time.process_time() < 0.05: pass\nprint(1, flush=True)\ninput()"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])\nprint(2, flush=True)\ninput()"
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    try:
        tree = ProcessTree([process.pid])
        assert process.stdout.readline() == b"1\n"
        assert len(tree.pids()) == 2
        both = tree.cpu_ns()
        assert both >= 50_000_000
        assert tree.memory().rss_bytes > ProcessTree(tree.pids()[1:]).memory().rss_bytes > 0
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"2\n"
        assert tree.pids() == [process.pid]
        assert tree.cpu_ns() >= both
    finally:
        process.communicate(b"\n", timeout=10)


def test_a_process_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    tree = ProcessTree([process.pid])
    assert (tree.pids(), tree.cpu_ns(), tree.memory(), tree.written_bytes()) == ([], 0, Memory(0, 0), 0)


def test_memory_is_watched_while_something_runs() -> None:
    with watching_memory(ProcessTree([os.getpid()]), every_s=0.001) as readings:
        # A mapping of its own: a block of the heap might be one that was in use before.
        held = mmap.mmap(-1, 30_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for at in range(0, 30_000_000, 4096):
            held[at] = 1
    assert max(each.anonymous_bytes for each in readings) - readings[0].anonymous_bytes > 20_000_000
