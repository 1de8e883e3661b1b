"""What hosts are made of goes with the process that made them, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.servers import wait_until
from tests.jepsen import program
from tests.jepsen.hosts import probe

MADE = """
import os, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.jepsen.hosts.disks import Disk
from tests.jepsen.hosts.groups import Group
from tests.jepsen.hosts.links import Link
from tests.jepsen.hosts.network import Network
with Network.made() as network:
    host = network.host("a")
    with (
        Disk.made(Path(sys.argv[2]), inside=network.namespaces("a"), size=64 << 20) as disk,
        Group.made("killed") as group,
        Link.plugged(network, "a") as link,
    ):
        group.cpu(0.5)
        disk.hang()
        pids = [network.switch.pid, network.namespaces("a").pid, link._copier.pid, disk._freezer.pid]
        print(network.leg, disk.device, *pids, flush=True)
        try:
            time.sleep(100)
        except KeyboardInterrupt:
            pass
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_stays_of_a_process_that_made_hosts(tmp_path: Path, number: signal.Signals) -> None:
    if lacking := probe.lacking(probe.CAPABILITIES):
        pytest.skip(lacking)
    command = [sys.executable, "-c", MADE, str(program.ROOT), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        leg, device, *pids = maker.stdout.readline().split()
        assert os.path.exists(f"/sys/class/net/{leg}")
        assert str(tmp_path) in loops()
        maker.send_signal(number)
    for pid in pids:
        wait_until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"), f"process {pid} is gone")  # type: ignore[misc]
    wait_until(lambda: not os.path.exists(f"/sys/class/net/{leg}"), "the leg is gone")
    wait_until(lambda: str(tmp_path) not in loops(), f"{device} is free")
    if number == signal.SIGKILL:
        probe.CAPABILITIES["groups"]()  # the next one to make a group removes those of processes that are gone
    assert not [*Path("/sys/fs/cgroup").glob(f"**/nsqha-{maker.pid}-*")]


def loops() -> str:
    return subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout
