"""etcd servers and stores on them."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsqha.clock import SystemClock
from nsqha.election.etcd import EtcdStore
from nsqha.election.etcd_client import EtcdOptions
from tests.etcd_server import EtcdServer
from tests.integration.etcd_rig import Open
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
        call_s = options.pop("call_s", 0.5)
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
