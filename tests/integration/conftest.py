"""etcd servers, stores on them, and whole clusters."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from nsqha.clock import SystemClock
from nsqha.election.etcd.client import CALL_S, EtcdOptions
from nsqha.election.etcd.store import EtcdStore
from tests.etcd_server import EtcdServer
from tests.integration.cluster import Cluster
from tests.integration.etcd_rig import Open
from tests.integration.restorable import Restorable
from tests.tcp_relay import Relay


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """For tests that leave it alive."""
    with EtcdServer.running(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """For tests that do not."""
    with EtcdServer.running(tmp_path) as server:
        yield server


@pytest.fixture
def relay(shared_etcd: EtcdServer) -> Iterator[Relay]:
    with Relay.to(shared_etcd.client_port) as relay:
        yield relay


@pytest.fixture
def open_store() -> Iterator[Open]:
    """Stores of one cluster, closed at the end."""
    opened: list[EtcdStore] = []
    cluster = uuid.uuid4().hex

    def open_(*endpoints: str, name: str = cluster, **options: object) -> EtcdStore:
        call_s = options.pop("call_s", CALL_S)
        store = EtcdStore(
            EtcdOptions(endpoints, call_s=call_s),  # type: ignore[arg-type]
            name,
            SystemClock(),
            random.Random(),
            **options,  # type: ignore[arg-type]
        )
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.close()


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes and one lookup daemon, or what the module's CLUSTER says. Every test leaves them running; when the
    module is done, all replicas of all topics are compared."""
    options = getattr(request.module, "CLUSTER", {})
    with Cluster.running(tmp_path_factory.mktemp("cluster"), **options) as cluster:
        yield cluster
        cluster.check_replicas()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Spark session for all tests of this process; it starts in some seconds."""
    pytest.importorskip("pyspark")
    from tests.integration.spark_session import running_session

    with running_session(tmp_path_factory.mktemp("spark")) as session:
        yield session


topics = count(1)


@pytest.fixture
def topic(cluster: Cluster) -> Iterator[str]:
    """A topic of its own for each test, with channel steady and all replicas in sync; they meet when it is over."""
    cluster.start()
    name = f"orders-{next(topics)}"
    cluster.create(name, "steady")
    yield name
    cluster.start()
    if (meta := cluster.meta(name)) is not None:
        cluster.wait_isr(name, len(meta.replicas), seconds=60)
        cluster.wait_level(name, replicas=len(meta.replicas))


@pytest.fixture
def restorable(tmp_path: Path) -> Iterator[Restorable]:
    """For the tests that end with comparing what members that were killed have on disk."""
    with Cluster.running(tmp_path) as cluster:
        yield Restorable(cluster, tmp_path)
