"""One small Spark and one cluster of three nodes for all of these tests; each test leaves them as it found them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster
from tests.integration.servers import free_port, wait_until
from tests.spark.rig import FILE_BYTES, KnownLog

pytest.importorskip("pyspark")

BATCH_ROWS = 100  # between two Python workers: a gate closes early in a split


@pytest.fixture(scope="session")
def spark_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the JVM and all workers say on stderr."""
    return tmp_path_factory.mktemp("spark-log") / "stderr"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, spark_log: Path) -> Iterator[Any]:
    """A Spark session for all tests of this process; it starts in some seconds."""
    from tests.integration.spark_session import running_session

    ours = os.dup(2)
    log = os.open(spark_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    settings = {"spark.sql.execution.arrow.maxRecordsPerBatch": str(BATCH_ROWS)}
    try:
        with running_session(tmp_path_factory.mktemp("spark"), **settings) as session:
            os.dup2(ours, 2)
            yield session
    finally:
        os.dup2(ours, 2)
        os.close(ours)
        os.close(log)


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Use `cluster`."""

    def flags(name: str) -> list[str]:
        # Labels of their own: the option `host` says which replica is asked first. Ports that outlive the process.
        own = [f"--host={name}", f"--segments-address=127.0.0.1:{free_port()}"]
        return [*own, f"--max-bytes-per-file={FILE_BYTES}", "--scrub-bytes-per-second=0"]

    # Not "none": retention takes nothing that no fsync has reached.
    with Cluster.running(tmp_path_factory.mktemp("cluster"), sync="interval", flags=flags) as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """Three nodes that are all there, in sync, when the test begins; it may do to them what it likes."""
    running_cluster.start()
    wait_until(running_cluster.all_in_sync, "everything is in sync", 60)
    yield running_cluster


@pytest.fixture(scope="session")
def published(running_cluster: Cluster) -> KnownLog:
    """Use `log`."""
    return KnownLog.published(running_cluster, "orders", 6000)


@pytest.fixture
def log(cluster: Cluster, published: KnownLog) -> KnownLog:
    """Two partitions of about 24 MB, for tests that take no message away."""
    return published
