"""An etcd that was put back to an older state: nodes do not believe it, and `accept-metadata` makes it follow them."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.integration.cluster import Cluster, Member, UnderLoad
from tests.integration.restorable import Restorable
from tests.integration.servers import BIN

pytestmark = pytest.mark.timeout(300)


def test_an_older_etcd_under_running_nodes(restorable: Restorable) -> None:
    cluster = restorable.with_backup()
    with UnderLoad(cluster, "old") as load:
        restorable.outgrow_backup()
        cluster.nodes[0].request("/channel/policy?topic=old&channel=steady", b'{"max_attempts": 9}')
        restorable.restore()
        restorable.wait_waiting()
        load.goes_on()
        shown = restorable.accept("--yes")
        restorable.wait_believed()
        cluster.wait_isr("old", 3)
        cluster.wait_isr("new", 3)
        for node in cluster.nodes:
            policy = json.loads(node.request("/channel/policy?topic=old&channel=steady"))["policy"]
            assert policy == {"max_attempts": 9}, "the backup is older"
    assert shown["restored"] == ["new"] and shown["unheard"] == [] and shown["generation"] == 1
    assert shown["partitions"] and all(partition["loss"] == "" for partition in shown["partitions"])
    cluster.check_replicas()
    logs = [lookupd.log() for lookupd in cluster.lookupds]
    assert sum(log.count("etcd cluster accept-metadata : done") for log in logs) == 1, "it is in the audit"


def stop_all(cluster: Cluster) -> None:
    for daemon in cluster.daemons:
        daemon.stop()


def spawn_all(cluster: Cluster) -> None:
    for daemon in cluster.daemons:
        daemon.spawn()


def test_another_etcd_with_an_old_backup_under_nodes_that_were_stopped(restorable: Restorable) -> None:
    """What `etcdctl snapshot restore` makes is another etcd. Nobody remembers settings but the logs' own tale."""
    cluster = restorable.with_backup()
    with UnderLoad(cluster, "old"):
        restorable.outgrow_backup()
        stop_all(cluster)
        restorable.restore_elsewhere()
        spawn_all(cluster)
        restorable.wait_waiting(held=True)
        shown = restorable.accept("--yes")
        restorable.wait_believed()
        cluster.wait_isr("old", 3)
        cluster.wait_isr("new", 3)
    assert shown["restored"] == ["new"]
    assert consumed(cluster.nodes[1], "new", 20) == {b"message %d" % n for n in range(20)}
    cluster.check_replicas()


def consumed(node: Member, topic: str, count: int) -> set[bytes]:
    """Bodies of so many messages of a channel."""
    command = [str(BIN / "nsqha"), "sub", topic, "steady", "-n", str(count), "--nsqd-tcp-address", node.tcp]
    done = subprocess.run(command, capture_output=True, timeout=60)
    return set(done.stdout.split(b"\n")) - {b""}


def test_an_etcd_that_has_nothing_at_all_gets_everything_from_the_nodes(restorable: Restorable) -> None:
    cluster = restorable.cluster
    cluster.create("old", "steady")
    id_before = cluster.cluster_id
    with UnderLoad(cluster, "old"):
        restorable.restore_elsewhere(empty=True)
        restorable.wait_waiting()
        shown = restorable.accept("--yes")
        restorable.wait_believed()
        meta = cluster.wait_isr("old", 3)
    assert shown["restored"] == ["old"] and meta.epoch > 1
    assert cluster.cluster_id == id_before
    cluster.check_replicas()


def test_an_etcd_whose_keys_were_deleted_gets_everything_from_the_running_nodes(restorable: Restorable) -> None:
    cluster = restorable.cluster
    cluster.create("old", "steady")
    id_before = cluster.cluster_id
    with UnderLoad(cluster, "old") as load:
        restorable.wipe()
        restorable.wait_waiting()
        load.goes_on()
        words = [str(BIN / "nsqha"), "check", "cluster", "--etcd-endpoint", cluster.etcd.endpoint]
        checked = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert checked.returncode == 2 and "until then no topic can be created" in checked.stdout, checked
        shown = restorable.accept("--yes")
        restorable.wait_believed()
        cluster.wait_isr("old", 3)
    cluster.create("new", "steady")
    assert shown["restored"] == ["old"] and shown["unheard"] == []
    assert cluster.cluster_id == id_before
    cluster.check_replicas()
