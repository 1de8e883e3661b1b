"""A cluster whose nodes have an access file: they go on as themselves, and nobody else is one of them."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from nsqha.cluster_secret import MISSING
from nsqha.pb.v1 import admin_pb2 as pb
from nsqha.pb.v1 import replication_pb2
from nsqha.pb.v1.admin_pb2_grpc import AdminStub
from nsqha.pb.v1.replication_pb2_grpc import ReplicationStub
from tests.integration.cluster import Cluster
from tests.integration.servers import wait_until
from tests.integration.test_access_roles import TOKENS, write_access

SECRET = "s" * 40


def nsqha(*words: str, token: str = "") -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("NSQHA_")} | {"NSQHA_TOKEN": token}
    return subprocess.run(
        [sys.executable, "-m", "nsqha", *words], capture_output=True, text=True, timeout=60, env=env, check=False
    )


def code_of(call: Any, request: Any, token: str = "") -> tuple[grpc.StatusCode, str]:
    metadata = [("authorization", f"Bearer {token}")] if token else []
    try:
        call(request, timeout=20, metadata=metadata)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def audited(cluster: Cluster) -> list[str]:
    lines = [line for node in cluster.nodes for line in node.log().splitlines() if "AUDIT: " in line]
    return [line.partition(") ")[2] for line in lines]


def test_nodes_need_no_token_and_a_token_makes_nobody_a_node(tmp_path: Path) -> None:
    secret, access = tmp_path / "secret", write_access(tmp_path / "access.toml")
    secret.write_text(SECRET)
    secret.chmod(0o600)
    anybody_looks = write_access(tmp_path / "lookupd.toml", 'anonymous = ["viewer"]\n')
    known = f"--cluster-secret-file={secret}"
    flags, lookupd_flags = [known, f"--access-file={access}"], [known, f"--access-file={anybody_looks}"]
    with Cluster.running(tmp_path, nodes=2, flags=flags, lookupd_flags=lookupd_flags, sync="none") as cluster:
        one, other = cluster.nodes
        at = f"--grpc-address={one.grpc}"
        made = nsqha("topic", "create", "t", "--partitions", "6", "--channel", "c", at, token=TOKENS["operator"])
        assert made.returncode == 0, made.stderr
        for node in cluster.nodes:  # replicated: OK comes when both have it
            assert posted(node.http, "/pub?topic=t", TOKENS["publisher"]) == 200
        for address in (one.http, one.tcp, cluster.lookupds[0].http):  # a monitor has neither secret nor etcd
            looked = nsqha("cluster", "topics", "t", "--json", f"--address={address}", token=TOKENS["viewer"])
            assert looked.returncode == 0 and looked.stdout.count('"state": "ok"') == 6, (address, looked)
        refused = nsqha("cluster", "status", f"--address={one.http}", token=TOKENS["publisher"])
        assert refused.returncode == 5 and "needs the role" in refused.stderr
        moved = nsqha("seek", "t", "c", "end", "--yes", at, token=TOKENS["operator"])
        assert moved.returncode == 0, moved.stderr
        assert [line for line in audited(cluster) if "Seek" in line] == [
            "grpc nsqha.v1.Admin/Seek topic=t channel=c: plan, done; skips 2 never finished",
            "grpc nsqha.v1.Admin/Seek topic=t channel=c: done; skips 2 never finished",
        ]
        of_a_node = sum("Seek" in line for line in other.log().splitlines() if "AUDIT" in line)
        assert of_a_node == 0, "the other leader was asked by a node, which has recorded it"
        with grpc.insecure_channel(other.grpc) as channel:
            seek = AdminStub(channel).Seek
            passed_on = pb.SeekRequest(topic="t", channel="c", target=pb.SeekTarget(end=True), here=pb.Here())
            assert code_of(seek, passed_on)[0] is grpc.StatusCode.UNAUTHENTICATED
            assert code_of(seek, passed_on, TOKENS["viewer"])[0] is grpc.StatusCode.PERMISSION_DENIED
            denied = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
            assert code_of(seek, passed_on, TOKENS["operator"])[0] not in denied
            wait_until(
                lambda: any("AUDIT: operator" in line and "Seek" in line for line in other.log().splitlines()),
                "whoever is no node is recorded, `here` or not",
            )
            for token in ("", TOKENS["admin"]):
                fetch = code_of(ReplicationStub(channel).Fetch, replication_pb2.FetchRequest(), token)
                assert fetch == (grpc.StatusCode.UNAUTHENTICATED, MISSING)
        wrong = nsqha("topic", "list", at, token="wrong")
        assert wrong.returncode == 5 and "the access file does not have this token" in wrong.stderr
        with_secret = nsqha("topic", "delete", "t", "--yes", at, known)
        assert with_secret.returncode == 0, "who has the secret is one of the cluster"
        wait_until(lambda: any("DeleteTopic" in line for line in audited(cluster)), "recorded")
        assert "AUDIT: cluster secret (" in one.log()
        for daemon in cluster.daemons:
            assert "token-of-" not in daemon.log() and SECRET not in daemon.log()


def posted(address: str, path: str, token: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request("POST", path, b"x", {"Authorization": f"Bearer {token}"})
    return connection.getresponse().status


@pytest.mark.parametrize("also", [[], ["--insecure-cluster"]])
def test_a_cluster_without_secret_and_certificates_can_not_have_one(tmp_path: Path, also: list[str]) -> None:
    access = write_access(tmp_path / "access.toml")
    words = ["--etcd-endpoint=127.0.0.1:1", f"--data-path={tmp_path}", f"--access-file={access}", *also]
    refused = nsqha("broker", *words)
    assert refused.returncode != 0 and "nodes can not be told from strangers" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_change_of_the_audit_topic_is_in_the_audit_of_every_node(tmp_path: Path) -> None:
    secret, access = tmp_path / "secret", write_access(tmp_path / "access.toml")
    secret.write_text(SECRET)
    secret.chmod(0o600)
    known = f"--cluster-secret-file={secret}"
    flags = [known, f"--access-file={access}", "--audit-topic=audit"]
    with Cluster.running(tmp_path, nodes=2, flags=flags, lookupd_flags=[known], sync="none") as cluster:
        one, other = cluster.nodes
        assert posted(one.http, "/topic/create?topic=audit", TOKENS["admin"]) == 200
        assert posted(one.http, "/topic/empty?topic=audit", TOKENS["operator"]) == 403
        assert posted(one.http, "/topic/empty?topic=audit", TOKENS["admin"]) == 200
        emptied = "http POST /topic/empty topic=audit: done"
        wait_until(lambda: emptied in other.log(), "the other node has the record")
        for node in cluster.nodes:
            assert sum(emptied in line for line in node.log().splitlines()) == 1
        assert "refused" not in "".join(line for line in other.log().splitlines() if "AUDIT" in line)
