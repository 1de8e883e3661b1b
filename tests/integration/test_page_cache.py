"""A file system that loses its page cache while the host goes on: a broker that did not sync knows at its next start.

The disk is a file with ext4 on a loop device, shut down by the ioctl that administrators and errors use. Needs root.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsqha.cli.brokers.v2client import V2Publisher
from tests.integration.servers import Node, wait_until

EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32), linux/ext4.h
WITHOUT_LOG_FLUSH = 2
MAY_BE_GONE = "acknowledged before their fsync may be gone"
DISK_BYTES = 1 << 30  # sparse; a broker wants 256 MiB free


class LoopDisk:
    """A file system of its own."""

    def __init__(self, folder: Path) -> None:
        self.image = folder / "disk.img"
        self.at = folder / "disk"
        self.at.mkdir()
        with self.image.open("wb") as file:
            file.truncate(DISK_BYTES)
        run("mkfs.ext4", "-q", str(self.image))
        self.mount()

    def mount(self) -> None:
        run("mount", "-o", "loop", str(self.image), str(self.at))

    def unmount(self) -> None:
        run("umount", str(self.at))

    def shut_down(self) -> None:
        """From now on it refuses everything, and what is not on the disk is lost."""
        folder = os.open(self.at, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, EXT4_IOC_SHUTDOWN, struct.pack("I", WITHOUT_LOG_FLUSH))
        finally:
            os.close(folder)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LoopDisk]:
    if os.geteuid() != 0 or not all(map(shutil.which, ("mkfs.ext4", "mount", "umount"))):
        pytest.skip("needs root, mkfs.ext4 and mount")
    try:
        disk = LoopDisk(tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device: {error.stderr.decode(errors='replace').strip()}")
    try:
        yield disk
    finally:
        disk.unmount()


@pytest.mark.parametrize("sync_after", ["none", "always"])
def test_a_file_system_that_was_mounted_again_may_have_lost_messages(disk: LoopDisk, sync_after: str) -> None:
    node = Node(disk.at / "node", sync="none")
    with node:
        publish(node, 100)
        os.sync()
        publish(node, 100)
        disk.shut_down()
        node.kill()
        disk.unmount()
        disk.mount()
        assert stored(node) < 200
        node.flags[1] = f"--sync={sync_after}"
        node.start()
        wait_until(lambda: MAY_BE_GONE in node.log(), "the broker says that messages may be gone")


def test_a_broker_that_is_killed_loses_no_page_cache(disk: LoopDisk) -> None:
    with Node(disk.at / "node", sync="none") as node:
        publish(node, 100)
        node.kill()
        node.start()
        assert MAY_BE_GONE not in node.log()
        assert node.json("/stats?format=json")["topics"][0]["depth"] == 100


def publish(node: Node, messages: int) -> None:
    publisher = V2Publisher(node.tcp, 20)
    for _ in range(messages // 10):
        publisher.publish("orders", [os.urandom(1000)] * 10)
    publisher.close()


def stored(node: Node) -> int:
    """How many whole messages the files of a broker that does not run can have."""
    return sum(path.stat().st_size for path in node.data.rglob("*.segment")) // 1000
