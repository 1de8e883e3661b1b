"""One partition's record in the metadata store, as the leader of the partition reads and writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nsqha.election.model import PartitionMeta

if TYPE_CHECKING:
    from nsqha.server.runtime.metadata import Metadata


class PartitionRecords:
    """One partition's record, as its leadership writes it."""

    def __init__(self, metadata: Metadata, name: str, uid: int, number: int) -> None:
        self._metadata = metadata
        self._name = name
        self._uid = uid
        self._number = number

    async def propose(self, meta: PartitionMeta, registered: Mapping[int, int]) -> PartitionMeta:
        store = self._metadata.store
        return await self._metadata.write(
            lambda: store.replace_partition(self._name, self._uid, self._number, meta, registered=registered)
        )

    async def fence(self, version: int) -> PartitionMeta:
        store = self._metadata.store
        return await self._metadata.write(lambda: store.fence_partition(self._name, self._uid, self._number, version))

    async def read(self) -> PartitionMeta | None:
        topic = await self._metadata.read(lambda: self._metadata.store.topic(self._name))
        return None if topic is None or topic.record.uid != self._uid else topic.record.partitions.get(self._number)
