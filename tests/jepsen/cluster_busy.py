"""A healthy cluster on a busy machine: no leader may be taken for a frozen one.

    python -m tests.jepsen.cluster_busy --minutes 10 [--burners 8] [--sync always]

Three nodes, two lookup daemons, etcd and clients, beside processes that only burn CPU. What is counted: changes of
leaders, by the record and by the log of the controller; how often a node said that it does not hear a leader; how often
the controller asked whether a node is there. With a change the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.integration.cluster import Cluster, UnderLoad, pause
from tests.jepsen.deployment import LEASE_SECONDS, TOPIC

LOOK_SECONDS = 10.0
SAID = {
    "elections": "leads epoch",
    "leaders not heard": "nothing is heard of node",
    "suspicions": "is suspected:",
}


@contextlib.contextmanager
def burners(count: int) -> Iterator[None]:
    """So many processes that only use CPU, at the priority of everybody else."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def counts(cluster: Cluster) -> dict[str, int]:
    """What the members have logged."""
    return {what: sum(daemon.log().count(text) for daemon in cluster.daemons) for what, text in SAID.items()}


def watch(cluster: Cluster, seconds: float) -> int:
    """Print how it goes; returns how often the leader changed."""
    began, epoch, before = time.monotonic(), cluster.wait_isr(TOPIC, 3).epoch, counts(cluster)
    loads = []
    while time.monotonic() - began < seconds:
        pause(LOOK_SECONDS)
        loads.append(os.getloadavg()[0])
    changes = cluster.wait_isr(TOPIC, 3, seconds=60).epoch - epoch
    said = {what: number - before[what] for what, number in counts(cluster).items()}
    print(
        f"{time.monotonic() - began:.0f} s at a load average of {min(loads):.1f} to {max(loads):.1f}, "
        f"mean {sum(loads) / len(loads):.1f}: epochs {changes}, " + ", ".join(f"{k} {v}" for k, v in said.items()),
        flush=True,
    )
    return max(changes, said["elections"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--burners", type=int, default=8)
    parser.add_argument("--sync", choices=("always", "interval", "none"), default="always")
    args = parser.parse_args()
    options = {"nodes": 3, "lookupds": 2, "sync": args.sync, "flags": [f"--lease-ttl={LEASE_SECONDS}s"]}
    with (
        tempfile.TemporaryDirectory(prefix="nsqha-busy-") as folder,
        Cluster.running(Path(folder), **options) as cluster,
    ):
        cluster.create(TOPIC, "steady")
        cluster.wait_isr(TOPIC, 3)
        with UnderLoad(cluster, TOPIC, "steady", seed=1), burners(args.burners):
            pause(LOOK_SECONDS)
            changes = watch(cluster, 60 * args.minutes)
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
