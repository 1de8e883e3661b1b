"""A daemon that is started with switches of tests: each of them does what it says, and nothing else is changed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsqha.cli.brokers.v2client import V2Publisher
from nsqha.clock import SystemClock
from nsqha.errors import NsqhaError
from tests.integration.servers import Lookupd, Node, wait_until
from tests.jepsen import program
from tests.jepsen.switches.clock import ClockFile, reader
from tests.jepsen.switches.failpoints import Failpoint
from tests.jepsen.switches.stalls import StallFile
from tests.mutation import Suite, instead

HOUR_NS = 3600 * 10**9


# ---- the clock


def test_a_clock_file_moves_the_clock_at_once_and_counts_looks(tmp_path: Path) -> None:
    clock = ClockFile(tmp_path / "clock")
    wall_ns = reader(clock.path)
    assert abs(wall_ns() - time.time_ns()) < HOUR_NS / 2
    clock.set(offset_ns=-72 * HOUR_NS)
    assert clock.looks() == 0
    assert abs(wall_ns() - (time.time_ns() - 72 * HOUR_NS)) < HOUR_NS / 2
    clock.set()
    assert abs(wall_ns() - time.time_ns()) < HOUR_NS / 2
    assert clock.looks() == 1


def test_a_clock_that_drifts_begins_where_it_is(tmp_path: Path) -> None:
    clock = ClockFile(tmp_path / "clock")
    wall_ns = reader(clock.path)
    clock.set(rate=1000.0)
    first = wall_ns()
    time.sleep(0.05)
    assert wall_ns() - first > 10 * 10**9
    clock.set(rate=0.5)
    began, first = time.time_ns(), wall_ns()
    time.sleep(0.05)
    gone = wall_ns() - first
    assert 0 < gone < time.time_ns() - began


def test_a_broker_stamps_messages_by_its_clock_file(tmp_path: Path) -> None:
    clock, stalls = ClockFile(tmp_path / "clock"), StallFile(tmp_path / "stalls")
    node = Node(tmp_path / "node")
    node.program = program.command("nsqd", clock_file=clock.path, stall_file=stalls.path)
    clock.set(offset_ns=-24 * HOUR_NS)
    with node:
        began = node.json("/stats?format=json")["start_time"]
        assert abs(began - (time.time() - 24 * 3600)) < 1800
        clock.set()
        wait_until(lambda: clock.looks() > 0, "it looks at the clock again, as it does each second")
        assert stalls.seconds() == 0
        stalls.stall(0.3)
        wait_until(lambda: stalls.seconds() >= 0.3, "the loop has stood still")
        stalls.stall(0.3, every=True)
        wait_until(lambda: stalls.seconds() >= 0.6, "all of it has stood still")
        assert node.json("/stats?format=json")["health"] == "OK"
        assert node.stop() == 0


def test_a_stall_of_the_loop_leaves_other_threads_and_one_of_all_does_not(tmp_path: Path) -> None:
    stalls = StallFile(tmp_path / "stalls")
    command = [sys.executable, "-c", BUSY, str(program.ROOT), str(stalls.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        assert busy.stdout.readline() == b"ready\n"
        stalls.stall(0.6)
        turns, _ = busy.stdout.readline().split()
        assert int(turns) > 5, "turns of another thread meanwhile"
        wait_until(lambda: stalls.seconds() >= 0.6, "it says that it has stood still")
        stalls.stall(0.6, every=True)
        _, longest = busy.stdout.readline().split()
        assert float(longest) >= 0.5, "the other thread stood still as well"


BUSY = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.jepsen.switches import stalls
stalls.follow(Path(sys.argv[2]))
turns, longest = 0, 0.0
def other():
    global turns, longest
    last = time.monotonic()
    while True:
        time.sleep(0.01)
        now = time.monotonic()
        turns, longest, last = turns + 1, max(longest, now - last), now
threading.Thread(target=other, daemon=True).start()
print("ready", flush=True)
for _ in range(2):
    last = time.monotonic()
    while True:
        before = turns
        time.sleep(0.002)
        now = time.monotonic()
        if now - last > 0.5:
            time.sleep(0.1)  # the other thread has looked at the clock, too
            print(turns - before, longest, flush=True)
            break
        last = now
"""


# ---- failpoints


@pytest.mark.parametrize(
    "text", ["sync:1", "before-sync", "before-sync:0", "between-sync:1", "half-sync:1", "before-x:1"]
)
def test_a_failpoint_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Failpoint.parsed(text)


@pytest.mark.parametrize(
    "text", ["before-sync:3", "after-rename@journal:1", "half-write@.segment:20", "before-sync-dir:2"]
)
def test_a_failpoint_says_where_it_is(text: str) -> None:
    assert str(Failpoint.parsed(text)) == text


def test_a_broker_ends_in_the_middle_of_the_write_that_was_asked_for(tmp_path: Path) -> None:
    node = Node(tmp_path / "node")
    node.program = program.command("nsqd", failpoints=["half-write@.segment:4"])
    bodies = [bytes([n]) * 4000 for n in range(6)]
    done = []
    with node:
        publisher = V2Publisher(node.tcp, 20)
        with pytest.raises((OSError, NsqhaError)):
            for body in bodies:
                publisher.publish("orders", [body])
                done.append(body)
        process = node._process
        assert process is not None
        assert process.wait(20) == -signal.SIGKILL
        assert "failpoint half-write@.segment:4 is reached" in node.log()
        assert 0 < len(done) < len(bodies)
        sizes = [path.read_bytes().rstrip(b"\0") for path in node.data.rglob("*.segment")]
        assert any(size.endswith(bytes([len(done)]) * 1000) for size in sizes), "half of a message is there"
        node.kill()
        node.program = ()
        node.start()
        assert node.json("/stats?format=json&topic=orders")["topics"][0]["depth"] == len(done)


# ---- plants, and what there is not


STOPPED_S = 1_000_000_000
SUITE: Suite[None] = Suite("tests.jepsen.test_program", lambda mutant, seed: None, runs=1)


def stopped_clock() -> Iterator[None]:
    with instead(SystemClock, "wall_ns", staticmethod(lambda: STOPPED_S * 10**9)):
        yield


SUITE.add(stopped_clock, "time goes on", None)


def test_a_bug_is_planted_by_name(tmp_path: Path) -> None:
    node = Node(tmp_path / "node")
    node.program = program.command("nsqd", plants=["tests.jepsen.test_program:stopped_clock"])
    with node:
        assert node.json("/stats?format=json")["start_time"] == STOPPED_S
        assert "planted: tests.jepsen.test_program:stopped_clock" in node.log()


def test_a_lookup_daemon_is_started_too_and_what_there_is_not_is_named(tmp_path: Path) -> None:
    clock = ClockFile(tmp_path / "clock")
    lookupd = Lookupd(tmp_path / "lookupd")
    lookupd.program = program.command("nsqlookupd", clock_file=clock.path)
    with lookupd:
        assert lookupd.request("/ping") == b"OK"
        assert "the wall clock follows" in lookupd.log()
    refused = subprocess.run(program.command("nsqd", plants=["no_such_bug"]), capture_output=True, text=True)
    assert refused.returncode == 2
    assert "no bug no_such_bug is in tests.sim.mutants; there are " in refused.stderr
