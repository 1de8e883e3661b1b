"""Spark and a cluster with a shared secret, with certificates as well and without: who has what it takes reads, follows
and commits; who lacks it is told which option; publishing needs neither."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Certificates
from tests.integration.cluster import Cluster, Member
from tests.integration.test_cluster_tls import ADMINISTRATOR, Rotated, TlsCluster
from tests.spark.test_batch_tls import READER

pytestmark = pytest.mark.timeout(180)

TOPIC, SECRET, OTHER = "orders", "s" * 40, "w" * 40
BODIES = [f"b{n:03d}" for n in range(60)]
TLS = ("nsqha.tls.cert", "nsqha.tls.key", "nsqha.tls.ca")


class SecretTlsCluster(TlsCluster):
    """Each node has a certificate, and the secret."""

    secret: str

    def make(self, name: str) -> Member:
        member = super().make(name)
        member.flags[-2:-2] = [f"--cluster-secret-file={self.secret}"]  # the addresses stay the last
        return member


def written(folder: Path, name: str, secret: str) -> str:
    path = folder / name
    path.write_text(f"{secret}\n")
    path.chmod(0o600)
    return str(path)


class Site:
    """A cluster, what a job needs of it, and a topic with known messages."""

    def __init__(self, cluster: Cluster, options: dict[str, str], wrong: str) -> None:
        self.cluster = cluster
        self.options = {"brokers": ",".join(node.grpc for node in cluster.nodes), **options}
        self.wrong = wrong
        cluster.create(TOPIC)
        for body in BODIES:
            cluster.nodes[0].request(f"/pub?topic={TOPIC}", body.encode())

    def read(self, spark: Any, topic: str = TOPIC, *, without: tuple[str, ...] = (), **more: str) -> list[str]:
        options = {name: value for name, value in self.options.items() if name not in without}
        reader = spark.read.format("nsqha").option("subscribe", topic).options(**options, **more)
        return sorted(bytes(row.value).decode() for row in reader.load().select("value").collect())

    def depths(self, channel: str) -> list[int]:
        """As each node says: the leader what it is, others 0."""
        answers = [json.loads(node.request(f"/stats?format=json&topic={TOPIC}")) for node in self.cluster.nodes]
        channels = [c for answer in answers for topic in answer["topics"] for c in topic["channels"]]
        return [c["depth"] for c in channels if c["channel_name"] == channel]


@pytest.fixture(scope="module", params=["secret", "secret and certificates"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("secrets")
    secret, wrong = written(folder, "secret", SECRET), written(folder, "wrong", OTHER)
    flags = [f"--cluster-secret-file={secret}"]
    options = {"nsqha.clusterSecretFile": secret}
    if request.param == "secret":
        with Cluster.running(folder / "cluster", nodes=2, sync="none", flags=flags, lookupd_flags=flags) as cluster:
            yield Site(cluster, options, wrong)
        return
    files = Rotated(tmp_path_factory.mktemp("certificates"), Certificates(tmp_path_factory.mktemp("made")))
    files.trust("ca")
    for name in ("n1", "n2"):
        files.issue(name, "IP:127.0.0.1")
    files.issue("lookupd", "DNS:lookupd.example")
    files.issue("admin", ADMINISTRATOR)
    files.issue("reader", READER)
    SecretTlsCluster.files, SecretTlsCluster.secret = files, secret
    lookupd_flags = [*files.flags("lookupd"), *flags]
    running = SecretTlsCluster.running(folder / "cluster", nodes=2, sync="none", lookupd_flags=lookupd_flags)
    with running as cluster:
        cluster.issue_all("ca")
        names = dict(zip(TLS, ("reader.crt", "reader.key", "trusted.crt"), strict=True))
        options |= {option: str(files.folder / name) for option, name in names.items()}
        yield Site(cluster, options, wrong)


def test_what_is_there_is_read(spark: Any, site: Site) -> None:
    assert site.read(spark) == BODIES


def test_a_stream_moves_the_channel_that_follows_it(spark: Any, site: Site, tmp_path: Path) -> None:
    options = {**site.options, "subscribe": TOPIC, "startingOffsets": "earliest", "commitChannel": "lake"}
    options["maxOffsetsPerTrigger"] = "40"
    query = (
        spark.readStream.format("nsqha").options(**options).load().selectExpr("CAST(value AS STRING) AS value")
        .writeStream.format("parquet")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )  # fmt: skip
    query.awaitTermination(90)
    assert query.exception() is None
    assert sorted(row.value for row in spark.read.parquet(str(tmp_path / "out")).collect()) == BODIES
    assert max(site.depths("lake")) == 20, "one micro-batch behind"


def test_a_job_without_the_secret_or_with_another_is_told_which_option(spark: Any, site: Site) -> None:
    for given in ({}, {"nsqha.clusterSecretFile": site.wrong}):
        with pytest.raises(Exception, match=r"nsqha\.clusterSecretFile|know this cluster's secret") as refused:
            site.read(spark, without=("nsqha.clusterSecretFile",), **given)
        assert SECRET not in str(refused.value)
        assert OTHER not in str(refused.value)


def test_publishing_needs_no_secret(spark: Any, site: Site) -> None:
    topic = "written"
    site.cluster.create(topic)
    rows = spark.createDataFrame([(topic, body.encode()) for body in BODIES], "topic string, value binary")
    nsqd = ",".join(node.tcp for node in site.cluster.nodes)
    rows.write.format("nsqha").option("nsqd", nsqd).mode("append").save()
    assert site.read(spark, topic) == BODIES
