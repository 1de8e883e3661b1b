"""kill -9 of a broker whose channel has gone quiet: nothing that was finished comes again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from tests.integration.servers import Node, wait_until
from tests.integration.test_node import Client, mpub, pub

MESSAGES = 20
QUIET_SECONDS = 0.15

CLUSTER = {"lookupds": 1}


def finish_all(node: Node, topic: str) -> None:
    """Publish, and finish everything; the channel is quiet afterwards."""
    client = Client(node)
    client.send(mpub(topic, [b"%d" % n for n in range(MESSAGES)]))
    client.ok()
    client.subscribe(topic, "steady", MESSAGES)
    fins = b"".join(b"FIN %s\n" % client.message()[1] for _ in range(MESSAGES))
    before = log_end(node, topic)
    client.send(fins)
    wait_until(lambda: (node.channel(topic, "steady") or {}).get("in_flight_count") == 0, "all are finished")
    wait_until(lambda: log_end(node, topic) > before, "progress is written")
    time.sleep(QUIET_SECONDS)


def log_end(node: Node, topic: str) -> int:
    """Bytes written of the topic's log, of its events too."""
    (found,) = node.json(f"/stats?format=json&include_nsqha=true&topic={topic}")["nsqha"]["topics"]
    (partition,) = found["partitions"]
    return int(partition["end_position_bytes"])


def next_message(node: Node, topic: str) -> bytes:
    """What the channel gives first, if something new comes behind all that it has."""
    client = Client(node)
    client.send(pub(topic, b"new"))
    client.ok()
    client.subscribe(topic, "steady", 1)
    body = client.message()[2]
    client.close()
    return body


@pytest.mark.parametrize("sync", ["always", "interval"])
def test_what_was_finished_does_not_come_again_after_a_kill(sync: str, tmp_path: Path) -> None:
    with Node(tmp_path, sync=sync) as node:
        finish_all(node, "t")
        node.kill()
        node.start()
        assert next_message(node, "t") == b"new"


@pytest.mark.timeout(180)
def test_the_next_leader_repeats_nothing_that_was_finished(cluster: Cluster, topic: str) -> None:
    cluster.wait_isr(topic, 3)
    leader = cluster.leader(topic)
    finish_all(leader, topic)
    leader.kill()
    after = cluster.member(cluster.wait_isr(topic, 2).leader)
    assert isinstance(after, Node) and after is not leader
    assert next_message(after, topic) == b"new"
