"""Disks that break: each kind of breaking does to files what it says."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.servers import wait_until
from tests.jepsen.hosts.disks import Disk
from tests.jepsen.hosts.namespaces import MOUNTS, Namespaces, NotPossible

SIZE = 64 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        with Disk.made(tmp_path, size=SIZE) as disk:
            yield disk
    except NotPossible as error:
        pytest.skip(f"no disk can be made here: {error}")


def written(path: Path, data: bytes, *, synced: bool) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(data)
        if synced:
            os.fsync(file.fileno())


def test_a_power_loss_takes_what_was_not_synced(disk: Disk) -> None:
    written(disk.at / "log", b"synced", synced=True)
    written(disk.at / "log", b", and not", synced=False)
    written(disk.at / "new", b"not", synced=False)
    disk.power_loss()
    assert (disk.at / "log").read_bytes() == b"synced"
    assert not (disk.at / "new").exists()


def test_a_power_loss_that_loses_nothing_is_noticed(disk: Disk) -> None:
    disk.shut_down()
    lost = disk._lost
    disk.remount()
    lost.write_bytes(b"still there")
    with pytest.raises(AssertionError, match="nobody synced it"):
        disk.boot()


def test_a_disk_that_lost_power_refuses_everything_until_it_boots(disk: Disk) -> None:
    with (disk.at / "log").open("wb", buffering=0) as file:
        disk.shut_down()
        with pytest.raises(OSError) as refused:
            file.write(b"more")
    assert refused.value.errno == errno.EIO
    disk.boot()
    assert disk.refuses() == ""


def test_a_full_disk_refuses_and_takes_writes_again(disk: Disk) -> None:
    disk.fill(leave=1 << 20)
    assert 0 < disk.free_bytes() <= 1 << 20
    assert disk.refuses() == ""
    disk.fill()
    assert disk.refuses() == "ENOSPC"
    disk.free()
    assert disk.refuses() == ""
    assert disk.free_bytes() > 10 << 20


def test_a_read_only_disk_refuses_files_that_are_open(disk: Disk) -> None:
    written(disk.at / "log", b"synced", synced=True)
    with (disk.at / "log").open("ab", buffering=0) as file:
        disk.read_only()
        with pytest.raises(OSError) as refused:
            file.write(b"more")
    assert refused.value.errno == errno.EROFS
    assert disk.refuses() == "EROFS"
    assert (disk.at / "log").read_bytes() == b"synced"
    disk.repair()
    assert disk.refuses() == ""
    assert (disk.at / "log").read_bytes() == b"synced"


def test_failing_data_fail_one_fsync_and_the_next_one_says_that_all_is_well(disk: Disk) -> None:
    """What makes a retried fsync a lie: the page that was not written counts as clean."""
    written(disk.at / "log", b"synced", synced=True)
    disk.fail_data()
    with (disk.at / "log").open("ab", buffering=0) as file:
        file.write(b", and not")
        with pytest.raises(OSError) as failed:
            os.fsync(file.fileno())
        os.fsync(file.fileno())
    assert failed.value.errno == errno.EIO
    assert disk.refuses() == "EIO"
    disk.work_again()
    assert disk.refuses() == ""
    assert (disk.at / "log").read_bytes() == b"synced, and not", "out of the page cache"
    disk.repair()
    assert (disk.at / "log").read_bytes() != b"synced, and not", "out of the disk"


def test_whoever_writes_to_a_hanging_disk_waits(disk: Disk) -> None:
    disk.hang()
    writer = subprocess.Popen([sys.executable, "-c", f"open({str(disk.at / 'log')!r}, 'w').write('late')"])
    try:
        wait_until(lambda: state_of(writer.pid) == "D", "it waits for the disk")
        assert not (disk.at / "log").exists()
        disk.go_on()
        assert writer.wait(20) == 0
    finally:
        disk.go_on()
        writer.kill()
        writer.wait()
    assert (disk.at / "log").read_text() == "late"


def test_a_disk_goes_on_when_the_process_that_made_it_hang_is_killed(disk: Disk) -> None:
    disk.hang()
    assert disk._freezer is not None
    assert disk._freezer.stdin is not None
    disk._freezer.stdin.close()  # as the kernel does then
    assert disk.refuses() == ""
    disk._freezer.wait(20)
    disk._freezer = None


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_snapshot_that_is_put_back_is_the_disk_as_it_was(disk: Disk) -> None:
    written(disk.at / "log", b"before", synced=False)
    snapshot = disk.snapshot()
    written(disk.at / "log", b" and after", synced=True)
    written(disk.at / "new", b"after", synced=True)
    disk.put_back(snapshot)
    assert (disk.at / "log").read_bytes() == b"before"
    assert not (disk.at / "new").exists()


def test_a_disk_is_seen_in_its_host_only_and_goes_with_it(tmp_path: Path) -> None:
    try:
        with Namespaces.held(MOUNTS) as host, Disk.made(tmp_path, inside=host, size=SIZE) as disk:
            written(disk.at / "log", b"here", synced=True)
            assert host.run("cat", str(tmp_path / "disk/log")) == "here"
            assert not (tmp_path / "disk/log").exists()
            device = disk.device
            assert device in loops()
            host.end()  # as if this process had been killed
            wait_until(lambda: device not in loops() or str(disk.image) not in loops(), "the device is free again")
    except NotPossible as error:
        pytest.skip(f"no disk can be made here: {error}")


def loops() -> str:
    return subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout
