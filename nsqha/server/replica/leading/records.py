"""One partition's record in the metadata store, as its leadership reads and writes it.

    propose | fence --a task each--> Applied | ProposalRefused | Unknown
    reread          --one at a time--> the record | unreadable

What the store answers late or never is `Unknown`, which is the business of the ISR's keeper (nsqha.replication.isr).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from nsqha.election.store import PartitionChange
from nsqha.errors import Conflict, NotFound, NsqhaError, Unavailable
from nsqha.nsqlog import Logger
from nsqha.replication.isr import Applied, ProposalRefused, Unknown

if TYPE_CHECKING:
    from nsqha.election.model import PartitionMeta
    from nsqha.replication.isr import Outcome
    from nsqha.server.runtime.metadata import NodeMetadata

logger = Logger("leadership", waits=True)


class RecordStore(Protocol):
    """The partition's record in the metadata store; each call runs in a worker thread."""

    async def propose(self, meta: PartitionMeta, registered: Mapping[int, int]) -> PartitionMeta:
        """Compare-and-set on `meta.version` and on the registrations. Conflict, NotFound; anything else: unknown."""

    async def fence(self, version: int) -> PartitionMeta:
        """Make the record newer than `version`."""

    async def read(self) -> PartitionMeta | None:
        """As it is now, linearizably; None: the topic is gone."""


class PartitionRecords:
    """One partition's record, as its leadership reads and writes it: a `RecordStore`."""

    def __init__(self, metadata: NodeMetadata, name: str, uid: int, number: int) -> None:
        self._metadata = metadata
        self._name = name
        self._uid = uid
        self._number = number

    async def propose(self, meta: PartitionMeta, registered: Mapping[int, int]) -> PartitionMeta:
        return await self._metadata.replace_partition(
            PartitionChange(self._name, self._uid, self._number, meta, registered)
        )

    async def fence(self, version: int) -> PartitionMeta:
        records = self._metadata.records
        return await self._metadata.write(lambda: records.fence_partition(self._name, self._uid, self._number, version))

    async def read(self) -> PartitionMeta | None:
        topic = await self._metadata.topic(self._name)
        return None if topic is None or topic.record.uid != self._uid else topic.record.partitions.get(self._number)


class RecordRequests:
    """Requests of one leadership to the store, each in a task of its own."""

    def __init__(
        self,
        records: RecordStore,
        *,
        partition: str,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        replied: Callable[[Outcome], None],
        found: Callable[[PartitionMeta | None], None],
        unreadable: Callable[[int], None],
    ) -> None:
        """`partition`: its name, for log lines. `replied`: what became of a proposal or a fence. `found`: the record as
        it is now; None: the topic is gone. `unreadable(promised)`: it can not be read now, and the highest epoch that a
        follower has promised."""
        self._records = records
        self._partition = partition
        self._spawn = spawn
        self._replied = replied
        self._found = found
        self._unreadable = unreadable
        self._closed = False
        self._reading = False
        self._read_again = False  # what the read under way finds may be older than what it is needed for
        self._promised = 0  # the highest epoch that a follower says it has promised

    def close(self) -> None:
        """Tell nothing of what is still under way."""
        self._closed = True

    def propose(self, meta: PartitionMeta, registered: Mapping[int, int]) -> None:
        """Put a record in the place of the one that it was made from."""
        self._spawn(self._write(self._records.propose(meta, registered), fence=False))

    def fence(self, version: int) -> None:
        """Make the record newer than `version`, so that no earlier proposal is carried out any more."""
        self._spawn(self._write(self._records.fence(version), fence=True))

    def reread(self, *, promised: int | None = None) -> None:
        """Read the record. `promised`: a follower has promised that epoch; an earlier read may not have seen it.

        One read at a time: while the metadata are away each takes seconds, and one is asked for ten times a second.
        They would fill the memory, and hold up what has to be read or written first when the metadata are back."""
        if promised is not None:
            self._promised = max(self._promised, promised)
            self._read_again = self._reading
        if not self._reading:
            self._reading = True
            self._spawn(self._read())

    async def _write(self, work: Coroutine[Any, Any, PartitionMeta], *, fence: bool) -> None:
        outcome: Outcome
        try:
            outcome = Applied(await work)
        except (Conflict, NotFound):
            outcome = ProposalRefused()
        except Unavailable as error:
            # Definitely not done; a fence that was not done has ended no doubt.
            logger.debug("metadata_unavailable", "%s: %s", self._partition, error)
            outcome = Unknown() if fence else ProposalRefused()
        except NsqhaError as error:
            # Also StaleMetadata: the store that is not the right one, or an older state of it, may have done it.
            logger.info("outcome_unknown", "%s: %s", self._partition, error)
            outcome = Unknown()
        except Exception as error:
            logger.error("metadata_failed", "%s", self._partition, error=error)
            outcome = Unknown()
        if not self._closed:
            self._replied(outcome)

    async def _read(self) -> None:
        try:
            await self._read_once()
            while self._read_again and not self._closed:
                self._read_again = False
                await self._read_once()
        finally:
            self._reading = False

    async def _read_once(self) -> None:
        try:
            meta = await self._records.read()
        except NsqhaError as error:
            logger.debug("metadata_unavailable", "%s: %s", self._partition, error)
            if not self._closed:
                self._unreadable(self._promised)
        else:
            if not self._closed:
                self._found(meta)
