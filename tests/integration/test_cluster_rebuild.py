"""A lost replica is made again at the rate that was set, and operators see how far it is."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli.brokers.v2client import V2Publisher
from tests.integration.cluster import CLUSTER_NAME, Cluster

pytestmark = pytest.mark.timeout(180)

BYTES_PER_SECOND = 2_000_000
MESSAGES = 200
MESSAGE_BYTES = 100_000


def shown(cluster: Cluster, verb: str) -> list[dict[str, Any]]:
    endpoints = [f"--etcd-endpoint={endpoint}" for endpoint in cluster.etcds.endpoints]
    command = [sys.executable, "-m", "nsqha", "cluster", verb, f"--cluster-name={CLUSTER_NAME}", *endpoints, "--json"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    return [json.loads(line) for line in found.splitlines()]


def rebuilding(cluster: Cluster, seconds: float = 60.0) -> dict[str, Any]:
    """What `nsqha cluster status` says of the replica that is made again, once both nodes know of it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for one in (found[0]["rebuilding"] if (found := shown(cluster, "status")) else None) or ():
            if one["bytes_left"] and one["seconds_left"]:
                return dict(one)
    raise AssertionError("nothing is rebuilt")


def test_a_lost_replica_comes_back_at_the_rate_and_says_how_far_it_is(tmp_path: Path) -> None:
    flags = [f"--catch-up-bytes-per-second={BYTES_PER_SECOND}"]
    with Cluster.running(tmp_path, sync="interval", flags=flags) as cluster:
        cluster.create("orders", "c")
        leader = cluster.leader("orders")
        publisher = V2Publisher(leader.tcp, 20)
        for _ in range(MESSAGES // 10):
            publisher.publish("orders", [b"x" * MESSAGE_BYTES] * 10)
        publisher.close()
        [lost, _] = cluster.followers("orders")
        lost.kill()
        lost.wipe()
        began = time.monotonic()
        lost.start()
        one = rebuilding(cluster)
        assert (one["topic"], one["partition"], one["node"]) == ("orders", 0, lost.name)
        assert 0 < one["bytes_left"] <= MESSAGES * (MESSAGE_BYTES + 100)
        cluster.wait_isr("orders", 3, seconds=90)
        # A second's worth goes at once, and the last message does not wait.
        least = (MESSAGES * MESSAGE_BYTES - 2 * BYTES_PER_SECOND) / BYTES_PER_SECOND
        assert time.monotonic() - began > least, "it was pushed without a limit"
        assert shown(cluster, "status")[0]["rebuilding"] == []
        assert {row["rebuilding"] for row in shown(cluster, "nodes")} == {None}
