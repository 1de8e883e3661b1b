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
from nsqha.election.accepting import Hold
from nsqha.election.etcd_accepting import EtcdAcceptance, Look
from nsqha.election.etcd_bridge import rpc
from nsqha.election.etcd_client import EtcdClient, EtcdOptions
from nsqha.errors import NsqhaError
from tests.integration.cluster import CLUSTER_NAME, Cluster, Member, UnderLoad, pause, posted
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
        self.forget()
        self.cluster.wait_registered(len(self.cluster.nodes))

    def restore(self) -> None:
        etcd = self.cluster.etcd
        etcd.kill()
        shutil.rmtree(etcd.folder / "data")
        shutil.copytree(self._backup, etcd.folder / "data")
        etcd.start()
        self.forget()

    def restore_elsewhere(self, *, empty: bool = False) -> None:
        """Another etcd at the same place, with the records of the backup: what restoring a snapshot makes."""
        kept = {} if empty else self._records()
        etcd = self.cluster.etcd
        etcd.kill()
        shutil.rmtree(etcd.folder / "data")
        etcd.extra = ("--initial-cluster-token", "another")
        etcd.start()
        client = EtcdClient(EtcdOptions((etcd.endpoint,)))
        for key, value in kept.items():
            client.change(lambda stubs: stubs.kv.Put, rpc.PutRequest(key=key, value=value))
        client.close()
        self.forget()

    def _records(self) -> dict[bytes, bytes]:
        """Of the backup, but for what hangs on a process."""
        etcd = self.cluster.etcd
        etcd.kill()
        shutil.rmtree(etcd.folder / "data")
        shutil.copytree(self._backup, etcd.folder / "data")
        etcd.start()
        client = EtcdClient(EtcdOptions((etcd.endpoint,)))
        request = rpc.RangeRequest(key=b"/nsqha/", range_end=b"/nsqha0")
        kvs = client.read(lambda stubs: stubs.kv.Range, request).kvs
        client.close()
        return {kv.key: kv.value for kv in kvs if not kv.lease}

    def forget(self) -> None:
        """The test's own connection is to an etcd that was, and its view of another past."""
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

    def put_hold(self) -> None:
        """As the command does before it changes anything."""
        acceptance = EtcdAcceptance(
            EtcdOptions((self.cluster.etcd.endpoint,)), CLUSTER_NAME, SystemClock(), lambda text: None
        )
        acceptance.hold(Hold("a command that died"))
        acceptance.close()

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


def create(cluster: Cluster, topic: str) -> None:
    """As soon as the node has found etcd again."""
    wait_until(lambda: posted(cluster.nodes[0], f"/topic/create?topic={topic}"), f"{topic} is made", 60)
    cluster.create(topic, "steady")


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
        create(cluster, "new")
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


def stop_all(cluster: Cluster) -> None:
    for daemon in cluster.daemons:
        daemon.stop()


def spawn_all(cluster: Cluster) -> None:
    for daemon in cluster.daemons:
        daemon.spawn()


def test_another_etcd_with_an_old_backup_under_nodes_that_were_stopped(restorable: Restorable) -> None:
    """What `etcdctl snapshot restore` makes is another etcd. Nobody remembers settings but the logs' own tale."""
    cluster = restorable.cluster
    cluster.create("old", "steady")
    restorable.back_up()
    with UnderLoad(cluster, "old") as load:
        create(cluster, "new")
        for n in range(20):
            publish(cluster.nodes[n % 3], "new", b"message %d" % n)
        move_leader(cluster, "old")
        stop_all(cluster)
        restorable.restore_elsewhere()
        spawn_all(cluster)
        restorable.wait_waiting(held=True)
        shown = restorable.accept("--yes")
        restorable.wait_believed()
        cluster.wait_isr("old", 3)
        cluster.wait_isr("new", 3)
    assert shown["restored"] == ["new"]
    assert load.report.figures.ok > 100
    assert consumed(cluster.nodes[1], "new", 20) == {b"message %d" % n for n in range(20)}
    cluster.check_replicas()


def consumed(node: Member, topic: str, count: int) -> set[bytes]:
    """Bodies of so many messages of a channel."""
    command = [str(BIN / "nsqha"), "sub", topic, "steady", "-n", str(count), "--nsqd-tcp-address", node.tcp]
    done = subprocess.run(command, capture_output=True, timeout=60)
    return set(done.stdout.split(b"\n")) - {b""}


def test_a_node_is_away_and_the_command_dies_and_etcd_is_put_back_twice(restorable: Restorable) -> None:
    cluster = restorable.cluster
    cluster.create("old", "steady")
    restorable.back_up()
    with UnderLoad(cluster, "old") as load:
        move_leader(cluster, "old")
        away = cluster.followers("old")[-1]
        uid = cluster.uid(away)
        others = [node for node in cluster.nodes if node is not away]
        away.stop()
        cluster.wait_isr("old", 2)
        restorable.restore()
        restorable.wait_waiting(*others)

        refused = restorable.accept("--yes", status=6)
        assert f"{uid:016x} (away); 1 partitions have a replica there" in refused["said"]
        asked = restorable.accept("--without", f"{uid:016x}", status=8)
        assert "n" in asked["said"]
        assert restorable.waiting() == {node.name: False for node in others}, "nothing was done"

        # Broken off between the hold and the end: they wait, also after a restart, and it is run again.
        restorable.put_hold()
        restorable.wait_waiting(*others, held=True)
        assert others[0].stop() == 0
        others[1].kill()
        for node in others:
            node.spawn()
        restorable.wait_waiting(*others, held=True)
        assert cluster.meta("old") is not None
        shown = restorable.accept("--yes", "--without", f"{uid:016x}")
        assert shown["unheard"] == [f"{uid:016x}"]
        assert all(partition["loss"] == "" for partition in shown["partitions"])
        restorable.wait_believed()
        cluster.wait_isr("old", 2)

        away.start()  # it has nothing against this etcd but what it has of it is behind: it follows
        cluster.wait_registered(3)
        cluster.wait_isr("old", 3)

        # Nodes that believe stop as well, and notice what happens to etcd while they wait.
        restorable.put_hold()
        restorable.wait_waiting(held=True)
        restorable.restore()  # to the same old state, without the hold and without the first acceptance
        restorable.wait_waiting(held=True)
        shown = restorable.accept("--yes")
        assert shown["generation"] == 2
        restorable.wait_believed()
        cluster.wait_isr("old", 3)
    assert load.report.figures.ok > 200
    cluster.check_replicas()


def test_an_etcd_that_has_nothing_at_all_gets_everything_from_the_nodes(restorable: Restorable) -> None:
    cluster = restorable.cluster
    cluster.create("old", "steady")
    id_before = cluster.cluster_id
    with UnderLoad(cluster, "old") as load:
        restorable.restore_elsewhere(empty=True)
        restorable.wait_waiting()
        shown = restorable.accept("--yes")
        restorable.wait_believed()
        meta = cluster.wait_isr("old", 3)
    assert shown["restored"] == ["old"] and meta.epoch > 1
    assert cluster.cluster_id == id_before
    assert load.report.figures.ok > 100
    cluster.check_replicas()
