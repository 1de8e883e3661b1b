"""`nsqha spark replay` killed in the middle, driver, JVM and workers at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli.brokers.admin import Admin
from tests.integration.devnode import BIN, DevNode, die_with_parent
from tests.integration.servers import wait_until
from tests.integration.spark_session import environment

pytestmark = pytest.mark.timeout(600)


def command(node: DevNode, *words: str) -> dict[str, Any]:
    """For Popen: a process group of its own, which ends with us."""
    return {
        "args": [str(BIN / "nsqha"), "spark", "replay", "orders", "--into", "again", "--master", "local[1]", *words],
        "env": environment() | {"NSQHA_GRPC_ADDRESS": node.grpc, "NSQHA_TCP_ADDRESS": node.tcp},
        "cwd": node.folder,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "preexec_fn": die_with_parent,
        "start_new_session": True,
    }


def done(state: Path) -> int:
    """Messages that the file says are stored."""
    if not state.exists():
        return 0
    partitions = json.loads(state.read_text())["partitions"].values()
    return sum(end - first for one in partitions for first, end in one["done"])


def test_a_replay_that_is_killed_goes_on_and_sends_little_twice(tmp_path: Path) -> None:
    node = DevNode(tmp_path, "--sync=interval")
    state = tmp_path / "state"
    bodies = [f"order {number}" for number in range(3000)]
    node.publish("orders", *bodies)
    words = ("--from", "start", "--state", str(state), "--yes", "--json")
    killed = subprocess.Popen(**command(node, *words, "--rate", "50"))
    try:
        wait_until(lambda: done(state) > 0 or killed.poll() is not None, "a wave is done", 300)
        assert killed.poll() is None
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate()
    before = done(state)
    assert 0 < before < 3000
    finished = subprocess.run(**{**command(node, *words), "timeout": 300})
    assert finished.returncode == 0, finished.stderr
    told = json.loads(finished.stdout)
    with Admin(node.grpc, 10) as admin:
        peeked = admin.stream("PeekMessages", topic="again", start=True, count_max=9000)
        stored = Counter(one.body.decode() for one in peeked)
    assert set(stored) == set(bodies)
    twice = sum(stored.values()) - 3000
    assert twice <= told["possible_duplicates"] <= 3000 - before
    assert told["possible_duplicates"] <= 50 * 10 + 1  # one wave at the rate
    assert (told["left"], told["missing"], told["failed"]) == (0, 0, [])
    assert node.stop() == 0
