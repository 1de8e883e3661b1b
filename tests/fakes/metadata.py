"""The metadata of one node in tests: the product's store and its `NodeMetadata`, behind a link that a test may cut.

    metadata = FakeMetadata(journal, failures.append)
    metadata.put(Versioned(record, 3))      the record as the store has it from now on
    metadata.away = True                    every call fails with Unavailable and changes nothing
    replicas = Replicas(..., metadata=metadata.node)

The stores themselves are compared in `tests/contract/test_metadata_*.py`, this link in `test_node_metadata.py`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TypeVar

from nsqha.commitlog.journal import NodeJournal
from nsqha.election.memory import Change, MemoryStore, StoreState
from nsqha.election.model import ClusterRecord, FolderUse, TopicRecord, Versioned
from nsqha.errors import Conflict, Unavailable
from nsqha.server.runtime.metadata import NodeMetadata

SECONDS = 0.001  # that a call takes

T = TypeVar("T")


class FakeMetadata:
    """A store in memory, and one node's way to it."""

    def __init__(self, journal: NodeJournal, fail: Callable[[BaseException], None], *, cluster_id: int = 9) -> None:
        self.away = False
        self._state = StoreState(Versioned(ClusterRecord(cluster_id), 1))
        self.store = MemoryStore(random.Random(1), state=self._state)
        self.node = NodeMetadata(self.store.records, self._run, journal, fail)

    async def _run(self, call: Callable[[], T]) -> T:
        await asyncio.sleep(SECONDS)
        if self.away:
            raise Unavailable("the metadata store is away")
        return call()

    def put(self, topic: Versioned[TopicRecord]) -> None:
        """Another node has changed the topic; the next read finds this record and version."""
        revision = max(self._state.revision, topic.version)
        self._state.apply(Change(revision, topics={topic.record.name: topic}))


class FakeFolders:
    """Records of data directories."""

    def __init__(self) -> None:
        self.records: dict[int, FolderUse] = {}

    def read(self, node: int) -> FolderUse | None:
        return self.records.get(node)

    def write(self, use: FolderUse) -> None:
        stored = self.records.get(use.node_uid)
        if stored is not None and stored.uses > use.uses:
            raise Conflict(f"the data directory is in its use {stored.uses}")
        self.records[use.node_uid] = use
