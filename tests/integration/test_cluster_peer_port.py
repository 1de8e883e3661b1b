"""The peer port of real nodes without TLS: any gRPC client may open a stream there, and only there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from nsqha.cli.dev.plan import is_free
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.pb.v1.replication_pb2_grpc import ReplicationStub
from tests.integration.cluster import Cluster
from tests.integration.push_client import answers
from tests.integration.servers import free_port, wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster.running(tmp_path_factory.mktemp("cluster"), nodes=2) as cluster:
        cluster.create("orders", "steady")
        yield cluster


def hello(cluster: Cluster) -> list[pb.PushMessage]:
    """The first node speaks to the second."""
    speaks, meant = map(cluster.uid, cluster.nodes)
    cluster_id = cluster.cluster_id
    return [
        pb.PushMessage(hello=pb.PushHello(cluster_id=cluster_id, node_uid=speaks, registration=1, target_uid=meant))
    ]


def test_any_grpc_client_may_open_a_stream(cluster: Cluster) -> None:
    topic = cluster.store.records.topic("orders")
    assert topic is not None
    key = pb.PartitionKey(topic_uid=topic.record.uid, partition=0)
    past = pb.PushMessage(opens=[pb.Open(key=key, topic="orders", epoch=0)])
    with grpc.insecure_channel(cluster.nodes[1].peer) as channel:
        greeting, refused = answers(channel, [*hello(cluster), past], 2)
    assert greeting.hello.node_uid == cluster.uid(cluster.nodes[1])
    assert [(r.key, r.refusal) for r in refused.refused] == [(key, pb.REFUSAL_FENCED)]


def test_a_call_at_the_peer_port_and_a_stream_at_the_other_are_unimplemented(cluster: Cluster) -> None:
    node = cluster.nodes[1]
    for address, open_ in (
        (node.peer, lambda channel: ReplicationStub(channel).Status(pb.StatusRequest(), timeout=10)),
        (node.grpc, lambda channel: answers(channel, hello(cluster), 1)),
    ):
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
            open_(channel)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, caught.value
        assert "-address" in caught.value.details(), "it says which port is meant"


def test_the_peer_port_is_next_to_the_other_unless_a_flag_says_otherwise(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster.running(tmp_path, nodes=1))
        infos = cluster.store.watch.view().nodes
        [info] = infos.values()
        assert (info.grpc_address, info.peer_address) == (cluster.nodes[0].grpc, cluster.nodes[0].peer)
        node = cluster.nodes[0]
        node.stop()
        port = next(port for port in iter(free_port, None) if port < 65535 and is_free(port + 1))
        node.flags[-2:] = [f"--grpc-address=0.0.0.0:{port}", "--insecure-cluster"]
        node.start()
        wait_until(lambda: cluster.uid(node), "registered")
        [info] = cluster.store.watch.view().nodes.values()
        assert info.peer_address == f"{node.host.ip}:{port + 1}"
