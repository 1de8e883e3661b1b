"""Damage in a whole cluster of processes: what one node has mends another, and what nobody has is not the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli.log import folders
from nsqha.commitlog.entry import ENTRY_BYTES
from nsqha.commitlog.journal import inspect
from nsqha.commitlog.reading.lookup import LogIdentity, LogReader
from nsqha.commitlog.storage import OsStorage
from tests.integration.cluster import CLUSTER_NAME, Cluster, Member
from tests.integration.servers import wait_until
from tests.integration.test_node import Client, mpub

pytestmark = pytest.mark.timeout(240)


def damage(node: Member, body: bytes) -> None:
    """The batch that holds this message, and its entry: of what is known to be durable a start looks at entries."""
    (folder,) = folders(str(node.data), "orders", 0)
    reader = LogReader.open(OsStorage(), folder.path, LogIdentity(folder.topic_uid, folder.partition))
    entry = next(e for e in reader.entries(1, reader.end.log_id) if body in reader.read(e))
    reader.close()
    for suffix, at in ((".segment", entry.position), (".commitlog", entry.log_id * ENTRY_BYTES + 40)):
        path = Path(folder.path, f"{0:020}{suffix}")
        data = bytearray(path.read_bytes())
        data[at] ^= 0xFF
        path.write_bytes(data)


def nsqha(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nsqha", *words]
    if words[0] == "cluster":
        command += [f"--etcd-endpoint={cluster.etcds.endpoints[0]}", f"--cluster-name={CLUSTER_NAME}"]
    else:
        command += [f"--grpc-address={cluster.leader('orders').grpc}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def status(cluster: Cluster, node: Member) -> Any:
    found = cluster.store.records.topic("orders")
    assert found is not None
    return node.status((found.record.uid, 0), cluster_id=cluster.cluster_id).replicas[0]


def with_batches(cluster: Cluster) -> None:
    """Five batches of ten messages on three nodes, which are killed then."""
    cluster.create("orders", "steady")
    client = Client(cluster.leader("orders"))
    for batch in range(5):
        client.send(mpub("orders", [b"%d-%d" % (batch, n) for n in range(10)]))
        client.ok()
    client.close()
    end = cluster.wait_level("orders")
    # Else what is damaged at the end passes for torn, as if it had never been durable.
    wait_until(lambda: all(journalled(node) == end for node in cluster.nodes), "all journals say what is durable")
    for node in cluster.nodes:
        node.kill()


def journalled(node: Member) -> int:
    (record,) = inspect(OsStorage(), str(node.data)).partitions.values()
    return record.local_durable


def finished(client: Client) -> bytes:
    """The next message, which is answered."""
    _, message_id, body = client.message()
    client.send(b"FIN " + message_id + b"\n")
    return body


def test_nodes_that_all_restart_with_damage_mend_one_another(tmp_path: Path) -> None:
    with Cluster.running(tmp_path) as cluster:
        with_batches(cluster)
        for n, node in enumerate(cluster.nodes):
            damage(node, b"%d-4" % n)
        cluster.start()
        cluster.wait_isr("orders", 3, seconds=60)
        client = Client(cluster.leader("orders"))
        client.subscribe("orders", "steady", 100)
        assert [client.message()[2] for _ in range(50)] == [b"%d-%d" % (b, n) for b in range(5) for n in range(10)]
        client.close()
        cluster.check_replicas()


def test_a_batch_that_nobody_has_is_given_up_and_the_partition_moves_on(tmp_path: Path) -> None:
    with Cluster.running(tmp_path) as cluster, cluster.another("n4") as fourth:
        with_batches(cluster)
        n1 = cluster.nodes[0]
        damage(n1, b"3-4")  # which others have
        for node in cluster.nodes:
            damage(node, b"1-4")
        cluster.start()
        wait_until(lambda: all(status(cluster, node).corrupt for node in cluster.nodes), "all know of their damage")

        unnamed = nsqha(cluster, "cluster", "elect", "orders", "--unclean", "--yes")
        assert unnamed.returncode == 5 and "name the one" in unnamed.stderr
        asked = nsqha(cluster, "cluster", "elect", "orders", "--unclean", "--node", "n1")
        assert asked.returncode == 8
        assert "n1 cannot read batches" in asked.stderr and "messages at offsets 10 to 19" in asked.stderr
        done = nsqha(cluster, "cluster", "elect", "orders", "--unclean", "--node", "n1", "--yes")
        assert done.returncode == 0, done.stderr
        cluster.wait_isr("orders", 3, seconds=60)

        assert cluster.leader("orders") is n1
        client = Client(n1)
        client.subscribe("orders", "steady", 100)
        assert [finished(client) for _ in range(10)] == [b"0-%d" % n for n in range(10)]

        def stuck() -> bool:
            stats = n1.json("/stats?format=json&include_nsqha=true")["nsqha"]["topics"][0]["channels"][0]
            return any("given up" in cursor["stuck"] for cursor in stats["cursors"])

        wait_until(stuck, "the channel says why it stopped")
        skip = nsqha(cluster, "log", "skip", "orders", "--yes", "--json")
        assert skip.returncode == 0, skip.stderr
        assert [(s["first_offset"], s["end_offset"]) for s in json.loads(skip.stdout)["skipped"]] == [(10, 20)]
        assert [finished(client) for _ in range(30)] == [b"%d-%d" % (b, n) for b in (2, 3, 4) for n in range(10)]
        client.close()

        fourth.start()
        cluster.wait_registered(4)
        cluster.nodes.append(fourth)
        moved = nsqha(cluster, "cluster", "move", "orders/0", "n4,n2,n3", "--wait")
        assert moved.returncode == 0, moved.stderr
        wait_until(lambda: cluster.leader_now("orders") is fourth, "the new node leads")
        publisher = Client(fourth)
        publisher.send(mpub("orders", [b"goes on"]))
        publisher.ok()
        publisher.subscribe("orders", "steady", 100)
        while finished(publisher) != b"goes on":
            pass  # what was finished just before it moved may come again
        publisher.close()
        found = subprocess.run(
            [sys.executable, "-m", "nsqha", "log", "verify", str(fourth.data), "orders", "--json"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert [(p["first_offset"], p["end_offset"]) for p in json.loads(found.stdout)["problems"]] == [(10, 20)]
        assert "given up" in found.stdout
