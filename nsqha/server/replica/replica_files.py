"""What catching up does to a replica's files, with its records in the journal and the cache (`catch_up.Files`).

Each step is carried out whole, whoever is cancelled meanwhile: half of one leaves an intent that the next start carries
out on batches that were acknowledged since, or files that the log does not know of. What the disk refuses half way is
`Poisoned`; before, an OSError or AppendFailed, and the step may be tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from nsqha.errors import AppendFailed, Poisoned
from nsqha.ids import PartitionKey
from nsqha.server.runtime.whole import whole

if TYPE_CHECKING:
    from nsqha.commitlog.entry import Entry
    from nsqha.election.model import PartitionMeta, TopicRecord
    from nsqha.server.replica.follower import Follower
    from nsqha.server.replica.replica_runtime import ReplicaRuntime


T = TypeVar("T")


class ReplicaFiles:
    """The files of one node's replicas, as catch-up changes them."""

    def __init__(
        self,
        runtime: ReplicaRuntime,
        *,
        record_of: Callable[[PartitionKey], TopicRecord],
        begun_anew: Callable[[PartitionKey], object],
    ) -> None:
        """`begun_anew`: nothing of the old log is left."""
        self._node = runtime.node
        self._journal = runtime.journal
        self._journal_writer = runtime.journal_writer
        self._opener = runtime.opener
        self._disk = runtime.disk
        self._nodes = runtime.nodes
        self._record_of = record_of
        self._forget_doubts = begun_anew
        self._loading: set[PartitionKey] = set()
        self._one_load = asyncio.Lock()  # one state at a time: two of one partition would share its place in the cache

    async def cut(self, follower: Follower, log_id: int) -> None:
        await whole(self._cut_log(follower, log_id))

    async def _cut_log(self, follower: Follower, log_id: int) -> None:
        self._journal.stage_cut(follower.key, follower.log.cut_intent(log_id))
        try:
            await self._journal_writer.promise()
            # The files are taken: whoever reads the log meanwhile finds its new end, and nobody appends.
            cut = follower.log.cutting(log_id)
        except (AppendFailed, OSError):
            # A full disk, or too many open files; nothing was cut, and perhaps nothing ever is.
            self._journal.stage_cut_done(follower.key)
            raise
        await self._half_way(self._disk.run(cut))
        self._journal.stage_cut_done(follower.key)
        await self._journal_writer.promise()

    async def begin_anew(self, follower: Follower, anchor: Entry) -> None:
        await whole(self._begin_anew(follower, anchor))

    async def _begin_anew(self, follower: Follower, anchor: Entry) -> None:
        key, record = follower.key, self._record_of(follower.key)
        follower.log.close()
        self._opener.cursor_cache.forget(key)
        log_uid = self._opener.new_log_uid()
        self._journal.stage(key, log_uid=log_uid, local_durable=anchor.log_id + 1)
        await self._journal_writer.promise()
        await self._half_way(self._disk.removed(lambda: self._opener.remove_partition(record, key[1])))
        log_ = await self._half_way(self._disk.run(lambda: self._opener.begin_at(record, key[1], anchor)))
        self._forget_doubts(key)
        follower.restart_with(log_, log_uid)

    @staticmethod
    async def _half_way(work: Awaitable[T]) -> T:
        try:
            return await work
        except OSError as error:
            raise Poisoned(str(error)) from error

    async def roll(self, follower: Follower) -> None:
        await whole(self._roll(follower))

    async def _roll(self, follower: Follower) -> None:
        follower.log.use(await self._disk.run(follower.log.next_pair))

    def forget_state(self, follower: Follower) -> None:
        self._opener.cursor_cache.forget(follower.key)
        follower.restart_with(follower.log, follower.log_uid)

    def loading(self, key: PartitionKey) -> bool:
        """Whether the state of a partition is being looked for."""
        return key in self._loading

    async def reload(self, follower: Follower, *, alone: bool = True) -> None:
        """Look for the channel state of a follower that has none, or that stopped in front of damage: a checkpoint
        behind it may say all that it did. Not `alone`: others may take its files meanwhile."""
        await whole(self._reload(follower, alone))

    async def _reload(self, follower: Follower, alone: bool) -> None:
        # Nothing is found when a log was begun anew and its leader has committed nothing yet. It may need this replica
        # for that.
        key, cache = follower.key, self._opener.cursor_cache
        async with self._one_load:
            if (follower.state is not None and follower.damage is None) or follower.closed:
                return
            self._loading.add(key)
            log_, past, known = follower.log, follower.log.past, follower.known
            committed, snapshot = min(follower.committed, log_.end.log_id), log_.snapshot()
            try:
                state, damage = await self._disk.run(
                    lambda: self._opener.state_vouched_for(key, log_, committed=committed, seen_as=snapshot)
                )
                follower.tried = known
            finally:
                self._loading.discard(key)
            changed = follower.log is not log_ or log_.past is not past or follower.closed
            if state is None:
                if damage is not None and not changed:
                    follower.found(damage)
            elif changed or (not alone and not follower.quiet):
                cache.give_back(key, state)  # of a log that is another one now, or about to be
            else:
                follower.know(state)

    def may_lose_committed(self, follower: Follower) -> bool:
        return self._meta(follower).isr.get(self._node) != follower.log_uid

    def waited_for(self, follower: Follower) -> bool:
        # A member of the ISR is; and anybody where too few members live: the next one that is near may join.
        meta, alive = self._meta(follower), self._nodes()
        return not self.may_lose_committed(follower) or sum(node in alive for node in meta.isr) < meta.min_isr

    def _meta(self, follower: Follower) -> PartitionMeta:
        return self._record_of(follower.key).partitions[follower.key[1]]
