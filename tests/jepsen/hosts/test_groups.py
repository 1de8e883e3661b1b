"""What a group takes from its processes, and the counters that show it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.servers import wait_until
from tests.jepsen.hosts.disks import Disk
from tests.jepsen.hosts.groups import Group, descriptors
from tests.jepsen.hosts.namespaces import NotPossible

MIB = 1 << 20
SPIN = "while True: pass"
SLEEP = "import time; print('ready', flush=True); time.sleep(100)"
GROW = "data = bytearray(); [data.extend(bytes(1 << 20)) for _ in range(256)]"
SYNC = """
import os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
for n in range(int(sys.argv[2])):
    os.pwrite(fd, os.urandom(4096), 4096 * n)
    os.fdatasync(fd)
"""


@pytest.fixture
def group() -> Iterator[Group]:
    try:
        with Group.made(f"test-{time.monotonic_ns()}") as group:
            yield group
    except NotPossible as error:
        pytest.skip(str(error))


def start(group: Group, code: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [*group.prefix, sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def ended(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    process.communicate()
    return process.returncode


def test_a_quota_of_a_core_is_all_that_is_had(group: Group) -> None:
    group.cpu(0.05)
    spinning = start(group, SPIN)
    try:
        wait_until(lambda: group.throttled() >= 3, "it had to wait")
        assert spinning.pid in group.pids()
        assert group.cpu_used() > 0
        group.cpu(None)
        time.sleep(0.1)  # the period that has begun
        before = group.throttled()
        time.sleep(0.3)
        assert group.throttled() == before
    finally:
        ended(spinning)


def test_who_needs_more_memory_than_there_is_is_killed(group: Group) -> None:
    group.memory(64 * MIB)
    growing = start(group, GROW)
    growing.communicate(timeout=60)
    assert growing.returncode == -signal.SIGKILL
    assert group.oom_kills() == 1
    group.memory(None)
    growing = start(group, GROW)
    growing.communicate(timeout=60)
    assert growing.returncode == 0


def test_nobody_of_a_frozen_group_runs(group: Group) -> None:
    spinning = start(group, SPIN)
    try:
        wait_until(lambda: cpu_ticks(spinning.pid) > 0, "it runs")
        group.freeze()
        before = cpu_ticks(spinning.pid)
        time.sleep(0.2)
        assert cpu_ticks(spinning.pid) == before
        group.thaw()
        assert not group.frozen()
        wait_until(lambda: cpu_ticks(spinning.pid) > before, "it runs again")
    finally:
        ended(spinning)


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_slow_disk_takes_so_many_writes_a_second(group: Group, tmp_path: Path) -> None:
    try:
        with Disk.made(tmp_path, size=64 * MIB) as disk:
            group.slow(disk.device, 20)
            began = time.monotonic()
            assert start(group, SYNC, disk.at / "log", 8).wait(60) == 0
            assert time.monotonic() - began > 0.2, "a slower machine only makes it longer"
            assert group.writes(disk.device) >= 8
            group.slow(disk.device, None)
    except NotPossible as error:
        pytest.skip(f"no disk can be made here: {error}")


def test_a_process_has_no_descriptors_left_and_gets_them_back() -> None:
    sleeping = subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE)
    try:
        assert sleeping.stdout is not None
        assert sleeping.stdout.readline() == b"ready\n"
        used = descriptors(sleeping.pid, 3)
        assert used >= 3
        limits = Path(f"/proc/{sleeping.pid}/limits").read_text()
        assert any(line.startswith("Max open files") and line.split()[3] == "3" for line in limits.splitlines())
        descriptors(sleeping.pid, None)
        limits = Path(f"/proc/{sleeping.pid}/limits").read_text()
        assert any(line.startswith("Max open files") and line.split()[3] != "3" for line in limits.splitlines())
    finally:
        ended(sleeping)


def test_groups_of_processes_that_are_gone_are_removed_with_the_next_one(group: Group) -> None:
    left = next(iter(group._folders.values())).parent / f"nsqha-{2**22 + 1}-left"
    left.mkdir()
    with Group.made(f"next-{time.monotonic_ns()}"):
        assert not left.exists()


def test_version_2_has_all_files_in_one_folder(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory io")
    group = Group("n1", tmp_path)
    folder = tmp_path / f"nsqha-{os.getpid()}-n1"
    group.cpu(0.5)
    group.memory(64 * MIB)
    (folder / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    (folder / "cpu.stat").write_text("usage_usec 10\nnr_periods 9\nnr_throttled 7\n")
    group.freeze()
    files = {path.name: path.read_text() for path in folder.iterdir()}
    assert files["cpu.max"] == "50000 100000"
    assert files["memory.max"] == str(64 * MIB)
    assert files["cgroup.freeze"] == "1"
    assert group.throttled() == 7
    group.cpu(None)
    assert (folder / "cpu.max").read_text() == "max 100000"
    assert str(folder / "cgroup.procs") in group.prefix[2]
