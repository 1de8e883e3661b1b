"""A cluster whose etcd is put back to an older state, or replaced, for tests of `accept-metadata`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from nsqha.clock import SystemClock
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.client import EtcdClient, EtcdOptions
from nsqha.election.etcd.metadata_restore import EtcdAcceptance, EtcdSnapshot
from nsqha.election.metadata_restore import Hold
from nsqha.errors import NsqhaError
from tests.integration.cluster import CLUSTER_NAME, Cluster, Member, posted
from tests.integration.servers import wait_until


class Restorable:
    """A cluster whose etcd can be put back."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self._backup = folder / "backup"

    def with_backup(self) -> Cluster:
        """There is a topic `old`, and the backup knows it."""
        self.cluster.create("old", "steady")
        self.back_up()
        return self.cluster

    def outgrow_backup(self) -> None:
        """A topic `new` with 20 messages, and a later epoch of `old`: the backup knows neither."""
        create(self.cluster, "new")
        for n in range(20):
            publish(self.cluster.nodes[n % 3], "new", b"message %d" % n)
        move_leader(self.cluster, "old")

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

    def wipe(self) -> None:
        """All keys of all clusters are deleted; etcd itself goes on."""
        client = EtcdClient(EtcdOptions((self.cluster.etcd.endpoint,)))
        request = rpc.DeleteRangeRequest(key=b"/nsqha/", range_end=b"/nsqha0")
        client.change(lambda stubs: stubs.kv.DeleteRange, request)
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

    def look(self) -> EtcdSnapshot | None:
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

    def accept(self, *words: str, status: int = 0, answer_seconds: float | None = None) -> dict[str, Any]:
        """`answer_seconds`: how long nodes are waited for that do not answer, if not as long as usual."""
        before = "" if answer_seconds is None else f"cluster_accept.ANSWER_SECONDS = {answer_seconds}; "
        code = f"from nsqha.cli.cluster import accept as cluster_accept; from nsqha.cli import main; {before}main()"
        command = [sys.executable, "-c", code, "cluster"]
        environment = os.environ | {"NSQHA_ETCD_ENDPOINT": self.cluster.etcd.endpoint}
        done = subprocess.run(
            [*command, "accept-metadata", *words, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return dict(json.loads(done.stdout)) if done.stdout else {"said": done.stderr}

    def wait_believed(self) -> None:
        wait_until(lambda: self.waiting() == {}, "nobody waits any more", 60)
        self.cluster.wait_registered(sum(node.running for node in self.cluster.nodes))


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
