"""An etcd that was put back to an older state: nodes do not believe it, and `accept-metadata` makes it follow them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsqha.clock import SystemClock
from nsqha.election.etcd_accepting import EtcdAcceptance, Look
from nsqha.election.etcd_client import EtcdOptions
from nsqha.errors import NsqhaError
from tests.integration.cluster import CLUSTER_NAME, Cluster, Member, UnderLoad, pause
from tests.integration.servers import BIN, wait_until

pytestmark = pytest.mark.timeout(300)


class Restorable:
    """A cluster whose etcd can be put back."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self._backup = folder / "backup"

    def back_up(self) -> None:
        """etcd's data directory as it is; etcd is away for a moment."""
        etcd = self.cluster.etcd
        etcd.kill()
        shutil.rmtree(self._backup, ignore_errors=True)
        shutil.copytree(etcd.folder / "data", self._backup)
        etcd.start()
        self.cluster.wait_registered(len(self.cluster.nodes))

    def restore(self, *extra: str) -> None:
        etcd = self.cluster.etcd
        etcd.kill()
        shutil.rmtree(etcd.folder / "data")
        shutil.copytree(self._backup, etcd.folder / "data")
        etcd.extra = extra
        etcd.start()
        self.forget()

    def forget(self) -> None:
        """The test's own view of the metadata is of another past, too."""
        if self.cluster._store is not None:
            self.cluster._store.close()
            self.cluster._store = None

    def look(self) -> Look | None:
        acceptance = EtcdAcceptance(
            EtcdOptions((self.cluster.etcd.endpoint,)), CLUSTER_NAME, SystemClock(), lambda text: None
        )
        try:
            return acceptance.look()
        except NsqhaError:
            return None
        finally:
            acceptance.close()

    def waiting(self) -> dict[str, bool]:
        """Names of nodes that do not believe -> whether they are held."""
        look = self.look()
        return {} if look is None else {node.name: node.held for node in look.waiting.values()}

    def wait_waiting(self, *members: Member, held: bool = False) -> None:
        wanted = {member.name: held for member in members or self.cluster.nodes}
        wait_until(lambda: self.waiting() == wanted, f"{wanted} wait", 60)

    def accept(self, *words: str, status: int = 0) -> dict[str, Any]:
        done = self.run("accept-metadata", *words, "--json")
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return dict(json.loads(done.stdout)) if done.stdout else {"said": done.stderr}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"NSQHA_ETCD_ENDPOINT": self.cluster.etcd.endpoint}
        return subprocess.run(
            [str(BIN / "nsqha"), "cluster", *words], env=environment, capture_output=True, text=True, timeout=150
        )

    def wait_believed(self) -> None:
        wait_until(lambda: self.waiting() == {}, "nobody waits any more", 60)
        self.cluster.wait_registered(sum(node.running for node in self.cluster.nodes))


@pytest.fixture
def restorable(tmp_path: Path) -> Iterator[Restorable]:
    with Cluster.running(tmp_path) as cluster:
        yield Restorable(cluster, tmp_path)


def publish(node: Member, topic: str, body: bytes) -> None:
    """Until it is acknowledged."""

    def done() -> bool:
        try:
            return node.request(f"/pub?topic={topic}", body) == b"OK"
        except OSError:
            return False

    wait_until(done, f"{body!r} is acknowledged", 60)


def move_leader(cluster: Cluster, topic: str) -> None:
    """Another node leads, in a later epoch than the backup knows."""
    leader = cluster.leader(topic)
    before = cluster.wait_isr(topic, 3).epoch
    leader.stop()
    wait_until(lambda: (meta := cluster.meta(topic)) and meta.epoch > before, "another leads")
    leader.start()
    cluster.wait_isr(topic, 3)


def test_an_older_etcd_under_running_nodes(restorable: Restorable) -> None:
    cluster = restorable.cluster
    cluster.create("old", "steady")
    restorable.back_up()
    with UnderLoad(cluster, "old") as load:
        cluster.create("new", "steady")
        for n in range(20):
            publish(cluster.nodes[n % 3], "new", b"message %d" % n)
        move_leader(cluster, "old")
        restorable.restore()
        restorable.wait_waiting()
        pause(1)
        shown = restorable.accept("--yes")
        restorable.wait_believed()
        cluster.wait_isr("old", 3)
        cluster.wait_isr("new", 3)
    assert shown["restored"] == ["new"] and shown["unheard"] == [] and shown["generation"] == 1
    assert all(partition["loss"] == "" for partition in shown["partitions"])
    assert load.report.figures.ok > 200
    cluster.check_replicas()
