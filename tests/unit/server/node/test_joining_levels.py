"""Which builds a node does not join."""

from __future__ import annotations

from nsqha.election.model import NodeInfo
from nsqha.server.node.cluster.joining import unlike_nodes

ME = 7


def test_a_node_does_not_join_builds_that_it_cannot_speak_to() -> None:
    like = NodeInfo(1, build="0.1.0", peer_level=1, peer_level_oldest=1)
    newer = NodeInfo(2, name="n2", build="3.0.0", peer_level=9, peer_level_oldest=8)
    older = NodeInfo(3, name="n3")
    assert unlike_nodes({1: like}, ME) == ""
    assert unlike_nodes({1: like, 2: newer}, ME).startswith("node n2 of the cluster: nsqha 3.0.0 with levels 8 to 9")
    assert "n3 of the cluster: nsqha of an unknown version" in unlike_nodes({3: older}, ME)
    assert unlike_nodes({ME: older}, ME) == "", "its own earlier life"
