"""A cluster with a shared secret, as real processes: who has it is served, who has not is refused with one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from nsqha.cluster_secret import MISSING
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.pb.v1.replication_pb2_grpc import ReplicationStub
from tests.integration.cluster import Cluster
from tests.integration.servers import wait_until

NEW, OLD = "n" * 40, "o" * 40


def written(folder: Path, name: str, *secrets: str) -> str:
    path = folder / name
    path.write_text("\n".join(secrets) + "\n")
    path.chmod(0o600)
    return str(path)


def nsqha(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nsqha", *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_nodes_with_the_secret_replicate_and_strangers_get_nothing(tmp_path: Path) -> None:
    old, both, new = (
        written(tmp_path, "old", OLD),
        written(tmp_path, "both", NEW, OLD),
        written(tmp_path, "new", NEW),
    )
    # The secret is being replaced: one node has the new file already.
    files = {"n1": old, "n2": both}
    options = {"flags": lambda name: [f"--cluster-secret-file={files[name]}"], "sync": "none"}
    lookupd_flags = [f"--cluster-secret-file={old}"]
    with Cluster.running(tmp_path, nodes=2, lookupd_flags=lookupd_flags, **options) as cluster:
        one, other = cluster.nodes
        at = f"--grpc-address={one.grpc}"
        made = nsqha("topic", "create", "orders", at, f"--cluster-secret-file={old}")
        assert made.returncode == 0, made.stderr
        # OK is answered when both replicas have it: the stream between them stands.
        one.request("/pub?topic=orders", b"hello")
        listed = nsqha("cluster", "nodes", "--etcd-endpoint", cluster.etcd.endpoint, "--json")
        assert '"version": "0.1.0"' in listed.stdout, listed.stdout + listed.stderr
        for secret, why in ((None, MISSING), (new, "does not know this cluster's secret")):
            given = [] if secret is None else [f"--cluster-secret-file={secret}"]
            refused = nsqha("topic", "list", at, *given)
            assert refused.returncode != 0
            assert why in refused.stderr
            assert refused.stderr.count("\n") == 1, refused.stderr
        with grpc.insecure_channel(other.grpc) as channel, pytest.raises(grpc.RpcError) as stranger:
            ReplicationStub(channel).Fetch(pb.FetchRequest(), timeout=5)
        assert stranger.value.code() is grpc.StatusCode.UNAUTHENTICATED
        wait_until(lambda: MISSING in other.log(), "a line about the stranger")
        for daemon in cluster.daemons:
            assert OLD not in daemon.log()
            assert NEW not in daemon.log()
        assert "nsqha 0.1.0 (nsqd v1.3.0" in one.log()


def test_a_cluster_that_other_hosts_reach_wants_a_secret_or_certificates(tmp_path: Path) -> None:
    words = ["broker", "--etcd-endpoint=127.0.0.1:1", "--grpc-address=0.0.0.0:0", f"--data-path={tmp_path}"]
    refused = nsqha(*words)
    assert refused.returncode != 0
    assert "--grpc-address=0.0.0.0:0: other hosts reach it" in refused.stderr
    assert refused.stderr.count("\n") == 1
