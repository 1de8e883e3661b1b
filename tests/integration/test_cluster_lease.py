"""A node that is back before its lease has run out: it serves, but has to wait until it may call itself alive."""

from __future__ import annotations

import pytest

from tests.integration.cluster import Cluster, UnderLoad

pytestmark = pytest.mark.timeout(180)

CLUSTER = {"flags": ["--lease-ttl=6s"]}  # a node starts in less, also on a busy machine


@pytest.mark.parametrize("which", ["follower", "leader"])
def test_a_node_that_is_back_at_once_joins_the_isr_again(cluster: Cluster, which: str) -> None:
    topic = f"after-{which}"
    cluster.create(topic, "steady")
    node = cluster.leader(topic) if which == "leader" else cluster.followers(topic)[0]
    with UnderLoad(cluster, topic) as load:
        load.clients.avoid = cluster.nodes.index(node)
        node.kill()
        node.start()
        cluster.wait_isr(topic, 2)
        cluster.wait_isr(topic, 3, seconds=30)
