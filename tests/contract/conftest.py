"""Each of the metadata stores, for the suites of what all of them promise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nsqha.election.session import ClusterSession
from nsqha.election.store import MetadataStore
from tests.contract.metadata_stores import (
    EtcdOpener,
    Opener,
    embedded_in_memory,
    embedded_on_disk,
    in_memory,
    open_session,
)
from tests.etcd_server import EtcdServer


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer.running(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=["memory", "embedded", "embedded on disk", "etcd"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    match request.param:
        case "memory":
            yield in_memory()
        case "embedded":
            yield embedded_in_memory()
        case "embedded on disk":
            yield embedded_on_disk(tmp_path)
        case _:
            opener = EtcdOpener(request.getfixturevalue("etcd"))
            yield opener
            opener.close()


@pytest.fixture
def store(opener: Opener) -> Iterator[MetadataStore]:
    store = opener()
    yield store
    store.close()


@pytest.fixture
def session(store: MetadataStore) -> ClusterSession:
    return open_session(store)
