"""kill -9 of a broker whose channel has gone quiet: nothing that was finished comes again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from tests.integration.servers import Node, wait_until
from tests.integration.test_node import Client, mpub, pub

MESSAGES = 20

CLUSTER = {"lookupds": 1}


def finish_all(node: Node, topic: str) -> None:
    """Publish, and finish everything; the channel is quiet, and its progress is in the log."""
    client = Client(node)
    client.send(mpub(topic, [b"%d" % n for n in range(MESSAGES)]))
    client.ok()
    client.subscribe(topic, "steady", MESSAGES)
    fins = b"".join(b"FIN %s\n" % client.message()[1] for _ in range(MESSAGES))
    client.send(fins)
    wait_until(lambda: node.progress_is_committed(topic, MESSAGES), "progress is committed without more data")


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
