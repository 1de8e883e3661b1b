"""Batch reads of a cluster with certificates: a reader's reads and does nothing else, and nobody is believed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsqha.server.runtime.tls import ClusterTls
from pyspark_nsqha.model import ReadFailed, ReplicaAddress
from pyspark_nsqha.options import ConnectOptions, Tls
from pyspark_nsqha.planner import PlannedRange, plan
from pyspark_nsqha.reading.fetch import runs
from pyspark_nsqha.snapshot import Segments, SnapshotRequest
from tests.certificates import Certificates
from tests.integration.cluster import Member
from tests.integration.servers import wait_until
from tests.integration.test_cluster_tls import (
    ADMINISTRATOR,
    NODES,
    Rotated,
    TlsCluster,
    TlsMember,
    administrate,
    attempts,
    target_of,
)
from tests.spark.rig import KnownLog, digests, line_of

pytestmark = pytest.mark.timeout(180)

READER = "URI:nsqha:reader"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsCluster]:
    """Three nodes with certificates, and some for readers who are and who are not."""
    certificates = Certificates(tmp_path_factory.mktemp("made"), "foreign")
    files = Rotated(tmp_path_factory.mktemp("certificates"), certificates)
    files.trust("ca")
    for name in NODES:
        files.issue(name, "IP:127.0.0.1")
    files.issue("lookupd", "DNS:lookupd.example")
    files.issue("admin", ADMINISTRATOR)
    files.issue("reader", READER)
    files.issue("nobody")
    files.issue("foreign", READER, ca="foreign")
    TlsCluster.files = files
    folder = tmp_path_factory.mktemp("cluster")
    with TlsCluster.running(folder, sync="none", lookupd_flags=files.flags("lookupd")) as cluster:
        assert isinstance(cluster, TlsCluster)
        cluster.issue_all("ca")
        yield cluster


@pytest.fixture(scope="module")
def log(cluster: TlsCluster) -> KnownLog:
    log = KnownLog(cluster, "secret")
    cluster.create("secret", "done")
    log.publish(1000, size=1000)
    log.wait_level()
    return log


def shown(cluster: TlsCluster, name: str) -> dict[str, str]:
    """Options for a reader with this certificate."""
    at = cluster.files.folder
    files = {"cert": at / f"{name}.crt", "key": at / f"{name}.key", "ca": at / "trusted.crt"}
    return {f"nsqha__tls__{what}": str(path) for what, path in files.items()}


def refusal(log: KnownLog, spark: Any, **options: Any) -> str:
    """The line with which load() fails."""
    try:
        log.read(spark, numRetries=0, timeoutMs=5000, **options)
    except Exception as error:
        return line_of(error)
    raise AssertionError("it was let in")


def test_a_reader_reads(spark: Any, cluster: TlsCluster, log: KnownLog) -> None:
    log.check(digests(log.read(spark, **shown(cluster, "reader"))).collect())


def test_an_administrator_reads_too(spark: Any, cluster: TlsCluster, log: KnownLog) -> None:
    log.check(digests(log.read(spark, **shown(cluster, "admin"))).collect())


def test_strangers_are_refused_in_one_line(spark: Any, cluster: TlsCluster, log: KnownLog) -> None:
    line = refusal(log, spark, **shown(cluster, "nobody"))
    assert "refuses this certificate" in line and line.endswith("a reader's has URI:nsqha:reader"), line
    line = refusal(log, spark, **shown(cluster, "foreign"))
    assert line.startswith("no broker answers: 127.0.0.1:"), line
    line = refusal(log, spark)
    assert "if it requires a certificate: nsqha.tls.cert, nsqha.tls.key, nsqha.tls.ca" in line, line


def test_no_key_is_shown(spark: Any, cluster: TlsCluster, log: KnownLog, spark_log: Path) -> None:
    missing = shown(cluster, "reader") | {"nsqha__tls__key": "/nowhere/private.key"}
    line = refusal(log, spark, **missing)
    assert "nsqha.tls.key" in line and "private.key" not in line, line
    key = (cluster.files.folder / "reader.key").read_text().splitlines()[1]
    assert key not in spark_log.read_text()


def test_a_reader_does_nothing_else(cluster: TlsCluster, log: KnownLog) -> None:
    at = cluster.files.folder
    tls = ClusterTls(*((at / file).read_bytes() for file in ("reader.crt", "reader.key", "trusted.crt")))
    target = target_of(cluster, log.topic, cluster.leader(log.topic))
    outcomes = asyncio.run(attempts(target, tls, target.leader_uid))
    assert len(outcomes) == 9 and all(outcomes.values()), outcomes
    assert administrate(target, tls) == "PERMISSION_DENIED"


def test_a_node_is_believed_by_the_name_that_it_was_asked_by(spark: Any, cluster: TlsCluster, log: KnownLog) -> None:
    node = log.followers()[0]
    assert isinstance(node, TlsMember)
    frame = log.read(spark, **shown(cluster, "reader"))
    cluster.files.issue(node.name, "DNS:localhost", f"URI:nsqha:node/{cluster.uid(node):016x}")
    try:
        by_address = {"brokers": node.grpc, **shown(cluster, "reader")}
        refused = "has a certificate without this name"
        wait_until(lambda: refused in refusal_or_nothing(log, spark, **by_address), "the new certificate is shown", 30)
        by_name = {"brokers": f"localhost:{node.grpc_port}", **shown(cluster, "reader")}
        log.check(digests(log.read(spark, **by_name)).collect())
        with pytest.raises(ReadFailed, match="its certificate: IP address mismatch"):
            bytes_of(cluster, log, node)
        log.check(digests(frame).collect())
    finally:
        cluster.issue_all("ca")


def bytes_of(cluster: TlsCluster, log: KnownLog, node: Member) -> None:
    """Everything, from this replica and no other, as a task would read it."""
    at = cluster.files.folder
    tls = Tls(str(at / "reader.crt"), str(at / "reader.key"), str(at / "trusted.crt"))
    asked = SnapshotRequest(topics=(log.topic,), ranges=((log.topic, 0, 0, len(log.digests)),))
    [pin] = Segments(ConnectOptions((log.leader().grpc,), tls)).snapshot(asked).pins
    address = cluster.store.watch.view().nodes[cluster.uid(node)].segments_address
    [(part,)] = plan([PlannedRange(pin, 0, len(log.digests))], split_bytes=64 << 20)
    for _ in runs(replace(part.split, replicas=(ReplicaAddress(address),)), tls=tls, retries=0):
        pass


def refusal_or_nothing(log: KnownLog, spark: Any, **options: Any) -> str:
    try:
        return refusal(log, spark, **options)
    except AssertionError:
        return ""
