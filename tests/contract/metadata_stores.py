"""The metadata stores that have to keep the same promises: in memory, embedded, etcd.

An implementation joins by adding an `Opener`: something that opens the store again as a restarted process would.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nsqha.clock import SystemClock
from nsqha.commitlog.storage import MemStorage, OsStorage
from nsqha.election.embedded import EmbeddedStore
from nsqha.election.etcd.client import EtcdOptions
from nsqha.election.etcd.store import EtcdStore
from nsqha.election.memory import MemoryStore
from nsqha.election.model import TopicRecord, Versioned
from nsqha.election.session import ClusterSession
from nsqha.election.store import MetadataStore
from tests.etcd_server import EtcdServer

Opener = Callable[[], MetadataStore]
CLUSTER = 0x1234_5678_9ABC_DEF0


def in_memory() -> Opener:
    store = MemoryStore(random.Random(1), cluster_id=CLUSTER)
    return lambda: store


def embedded_in_memory() -> Opener:
    storage = MemStorage()
    storage.make_dirs("d")
    rng = random.Random(1)
    return lambda: EmbeddedStore(storage, "d/metadata", rng, cluster_id=CLUSTER)


def embedded_on_disk(folder: Path) -> Opener:
    rng = random.Random(1)
    return lambda: EmbeddedStore(OsStorage(), f"{folder}/metadata", rng, cluster_id=CLUSTER)


class EtcdOpener:
    """Each one is a cluster of its own."""

    def __init__(self, server: EtcdServer) -> None:
        self._options = EtcdOptions((server.endpoint,))
        self._name = uuid.uuid4().hex
        self._opened: list[EtcdStore] = []

    def __call__(self) -> MetadataStore:
        store = EtcdStore(self._options, self._name, SystemClock(), random.Random(), cluster_id=CLUSTER)
        self._opened.append(store)
        store.sessions.open(ttl_s=60, lost=lambda: None)  # ephemeral topics hang on it
        return store

    def close(self) -> None:
        for store in self._opened:
            store.close()


def changed(topic: Versioned[TopicRecord], channel: str, uid: int = 5) -> TopicRecord:
    return replace(topic.record, channels=topic.record.channels.with_channel(channel, uid))


def open_session(store: MetadataStore) -> ClusterSession:
    if isinstance(store, EtcdStore):
        # One per process; the opener has made it.
        assert store.sessions.last is not None
        if not store.sessions.last.over:
            return store.sessions.last
    return store.sessions.open(ttl_s=60, lost=lambda: None)
