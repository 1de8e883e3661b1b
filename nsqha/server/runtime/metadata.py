"""The metadata store as the loop sees it: every write goes to the disk thread, in order of submission.

The store owns a topic's record; others hold the version they last read. A change of a channel list is a compare-and-set
on that version and does not touch logs: `Topic.reconcile` brings the logs of this node in line with the record that is
returned. The revision of each write is recorded in the journal, so that the next start notices a store that was
put back to an older state. A store that cannot be trusted any more closes the node.

Reads of many topics at once gather into one, and a slow one holds up none that is asked for later: each begins after it
was asked for, which is what makes it linearizable.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from nsqha.commitlog.journal import NodeJournal
from nsqha.election.model import ChannelList, PartitionMeta, TopicRecord, Versioned
from nsqha.election.store import MetadataRecords, PartitionChange, Refusal
from nsqha.errors import Conflict, NotFound, NsqhaError, Poisoned, Unavailable
from nsqha.server.runtime.tasks import Shared, awaited

CHANGE_RETRIES = 100  # of a compare-and-set that lost against another change of the same topic

READS_ALONE_MAX = 4  # topics are read one by one as long as no more of them are wanted at once
READS_TOGETHER_MAX = 4  # under way at once
READ_APART_SECONDS = 0.01  # after which a read of many topics is slow: those wanted since then do not wait for it

T = TypeVar("T")


class GatheredChanges:
    """Changes of partitions' records by one node: while one call is under way the others gather for the next.

    When a thousand topics are made, or a node that led as many is gone, each partition changes its record a few times.
    One transaction for many of them is one for etcd, and one event for each watch."""

    def __init__(
        self, write: Callable[[Sequence[PartitionChange]], Awaitable[Sequence[PartitionMeta | Refusal]]]
    ) -> None:
        """`write` changes all of them in one call; the results stand in the same order."""
        self._write = write
        self._turn = asyncio.Lock()
        self._changes: list[PartitionChange] = []
        self._partitions: set[tuple[int, int]] = set()  # of these
        self._gathering: Shared[Sequence[PartitionMeta | Refusal]] | None = None  # has not begun to write

    async def put(self, change: PartitionChange) -> PartitionMeta:
        """What became of it: as `MetadataRecords.replace_partition`."""
        partition = (change.uid, change.number)
        while partition in self._partitions:  # one whose caller is gone: a transaction may change each record once
            assert self._gathering is not None
            await asyncio.wait([self._gathering.task])
        self._partitions.add(partition)
        if self._gathering is None:
            self._gathering = Shared(asyncio.get_running_loop(), self._round())
        index = len(self._changes)
        self._changes.append(change)
        result = (await self._gathering.outcome())[index]
        if isinstance(result, PartitionMeta):
            return result
        raise result

    async def _round(self) -> Sequence[PartitionMeta | Refusal]:
        async with self._turn:
            self._gathering = None
            changes, self._changes = self._changes, []
            self._partitions.clear()
            return await self._write(changes)


class RunBlocking(Protocol):
    """Runs a blocking call off the loop."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]: ...


class NodeMetadata:
    """Reads and writes the metadata store's records for one node."""

    def __init__(
        self, records: MetadataRecords, run: RunBlocking, journal: NodeJournal, fail: Callable[[BaseException], None]
    ) -> None:
        """`run` executes a blocking call in a worker thread; for an embedded store it is the disk thread."""
        self.records = records
        self._run = run
        self._journal = journal
        self._fail = fail
        self._alone = 0  # reads of one topic under way
        self._wanted: set[str] = set()  # to be read together
        self._gathering: Shared[Mapping[str, Versioned[TopicRecord] | None]] | None = None  # has not begun to read
        self._places = asyncio.Semaphore(READS_TOGETHER_MAX)
        self._latest: asyncio.Task[Mapping[str, Versioned[TopicRecord] | None]] | None = None  # that was begun
        self._gathered = GatheredChanges(lambda changes: self.write(partial(self.records.replace_partitions, changes)))
        self.replace_partition = self._gathered.put

    async def write(self, change: Callable[[], T]) -> T:
        """Write to the store once and stage its revision in the journal. Poisoned closes the node."""
        try:
            result = await self._run(change)
        except Poisoned as error:
            self._fail(error)
            raise
        self._journal.node.stage_revision(self.records.revision)
        return result

    async def read(self, read: Callable[[], T]) -> T:
        """Read the store once, linearizably, and stage the revision that was seen in the journal."""
        result = await self._run(read)
        self._journal.node.stage_revision(self.records.revision)
        return result

    async def topic(self, name: str) -> Versioned[TopicRecord] | None:
        """Read one topic once, linearizably. Reads of many topics at once, as when a leader of many died, are one."""
        many = self._latest is not None and not self._latest.done()
        if self._alone < READS_ALONE_MAX and not many:
            self._alone += 1
            try:
                return await self.read(lambda: self.records.topic(name))
            finally:
                self._alone -= 1
        if self._gathering is None:
            self._gathering = Shared(asyncio.get_running_loop(), self._read_together())
        self._wanted.add(name)
        found = await self._gathering.outcome()
        return found[name] if name in found else await self.read(lambda: self.records.topic(name))

    async def _read_together(self) -> Mapping[str, Versioned[TopicRecord] | None]:
        """The topics that are wanted before the read begins; none of them if they are better read one by one."""
        async with self._places:
            if self._latest is not None:
                await asyncio.wait([self._latest], timeout=READ_APART_SECONDS)
            self._gathering = None
            wanted, self._wanted = tuple(self._wanted), set()
            read = self.read(lambda: self.records.topics_of(wanted))
            self._latest = awaited(asyncio.get_running_loop(), read)
            try:
                return await self._latest
            except NsqhaError:
                return {}  # perhaps because of one record: it shall hold up no other

    async def change_channels(
        self, known: Versioned[TopicRecord], change: Callable[[ChannelList], ChannelList]
    ) -> Versioned[TopicRecord]:
        """Compare-and-set a topic's channel list; after a lost race it is retried on the current record.

        Returns the record with the change in it. NotFound if the topic is gone, Unavailable if too many races are lost.
        """
        name, uid = known.record.name, known.record.uid
        fresh = False
        for _ in range(CHANGE_RETRIES):
            channels = change(known.record.channels)
            if channels is not known.record.channels:
                record = replace(known.record, channels=channels)
                with contextlib.suppress(Conflict):
                    return await self.write(lambda v=known, r=record: self.records.replace(name, v.version, r))  # type: ignore[misc]
            elif fresh:
                return known  # not fresh: another node may have changed it back, and this node has not seen that yet
            current = await self.read(lambda: self.records.topic(name))
            if current is None or current.record.uid != uid:
                raise NotFound(f"there is no topic {name}")
            known, fresh = current, True
        raise Unavailable(f"topic {name} is being changed by too many requests at once; try again")
