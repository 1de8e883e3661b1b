"""A file system that loses its page cache while the host goes on: a broker that did not sync knows at its next start.

The disk is a file with ext4 on a loop device, shut down by the ioctl that administrators and errors use. Needs root.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsqha.cli.brokers.v2client import V2Publisher
from tests.integration.servers import Node, wait_until
from tests.jepsen.hosts.disks import Disk
from tests.jepsen.hosts.namespaces import NotPossible

MAY_BE_GONE = "acknowledged before their fsync may be gone"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        with Disk.made(tmp_path) as disk:
            yield disk
    except NotPossible as error:
        pytest.skip(f"no disk can be made here: {error}")


@pytest.mark.parametrize("sync_after", ["none", "always"])
def test_a_file_system_that_was_mounted_again_may_have_lost_messages(disk: Disk, sync_after: str) -> None:
    node = Node(disk.at / "node", sync="none")
    with node:
        publish(node, 100)
        # Of this file system only: any other one of this machine that hangs would hold up a sync of all.
        subprocess.run(["sync", "--file-system", disk.at], check=True)
        publish(node, 100)
        disk.shut_down()
        node.kill()
        disk.boot()
        assert stored(node) < 200
        node.flags[1] = f"--sync={sync_after}"
        node.start()
        wait_until(lambda: MAY_BE_GONE in node.log(), "the broker says that messages may be gone")


def test_a_broker_that_is_killed_loses_no_page_cache(disk: Disk) -> None:
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
