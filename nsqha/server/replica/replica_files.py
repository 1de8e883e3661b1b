"""A replica's files and its records in the journal: how its log is opened or begun empty, and what catching up does.

`ReplicaLogs` opens a log under a log_uid and with a promise:

    found on this disk   recovered; it keeps its name if recovery can vouch for it, and its promise if that is trusted;
                         what is damaged goes by a new one, and the journal keeps the old one until a leader takes it on
    never made           begun under the name that the record has for it: this process drew it, or an earlier life did,
                         which died before it made the log
    recovery refuses     logged once; requests get the same answer without another read of the disk, for longer each
                         time:
                         it reads two pairs to their end, and a leader asks once a second for as long as it leads

`ReplicaFiles` changes the files of replicas that catch up (`catch_up.Files`), and the cache with them. Each step is
carried out whole, even if its caller is cancelled meanwhile: half of one leaves an intent that the next start carries
out on batches that were acknowledged since, or files that the log does not know of. What the disk refuses half way is
`Poisoned`; before, an OSError or AppendFailed, and the step may be tried again.

Invariant: nothing is opened under a name that acknowledged messages are counted on by, unless it has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from nsqha import ids
from nsqha.errors import AppendFailed, LogCorrupt, NsqhaError, Poisoned
from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger
from nsqha.server.integrity.suspect_logs import good_name
from nsqha.server.runtime.backoff import Backoff
from nsqha.server.runtime.tasks import whole

if TYPE_CHECKING:
    from nsqha.commitlog.entry import Entry
    from nsqha.commitlog.log import PartitionLog
    from nsqha.election.model import PartitionMeta, TopicRecord
    from nsqha.server.integrity.log_integrity import LogIntegrity
    from nsqha.server.opening.opener import OpenedLog
    from nsqha.server.replica.following.follower import Follower
    from nsqha.server.replica.replica_runtime import ReplicaRuntime


AGAIN_SECONDS = 1.0  # after recovery refused a log; twice as long each time
AGAIN_SECONDS_MAX = 600.0

T = TypeVar("T")

logger = Logger("replicas", waits=True)


@dataclass(slots=True)
class Unusable:
    """A log that recovery refuses."""

    why: str
    backoff: Backoff
    again_at: float


class ReplicaLogs:
    """Opens the logs of one node's replicas."""

    def __init__(self, runtime: ReplicaRuntime, integrity: LogIntegrity) -> None:
        self._clock = runtime.clock
        self._node = runtime.node
        self._journal = runtime.journal
        self._journal_writer = runtime.journal_writer
        self._opener = runtime.opener
        self._disk = runtime.disk
        self._integrity = integrity
        self._drawn: set[int] = set()  # names of logs that are about to be made
        self.unusable: dict[PartitionKey, Unusable] = {}

    def draw_log_uid(self) -> int:
        """A name for a log that is about to be made here, to be put into the record of a new partition."""
        log_uid = self._opener.new_log_uid()
        self._drawn.add(log_uid)
        return log_uid

    def forget_log_uid(self, log_uid: int) -> None:
        """No record names it."""
        self._drawn.discard(log_uid)

    async def open(self, record: TopicRecord, number: int) -> tuple[OpenedLog, int]:
        """Open the log, or begin an empty one; the epoch that is promised with it. LogCorrupt: it was said why."""
        key = (record.uid, number)
        before = self.unusable.get(key)
        if before is not None and self._clock.monotonic() < before.again_at:
            raise LogCorrupt(before.why)
        try:
            opened = await self._open(record, number)
        except LogCorrupt as error:
            backoff = Backoff(AGAIN_SECONDS, AGAIN_SECONDS_MAX) if before is None else before.backoff
            self.unusable[key] = Unusable(str(error), backoff, self._clock.monotonic() + backoff.next_pause())
            if before is None or before.why != str(error):
                logger.error("replica_unusable", "%s/%d: %s", record.name, number, error)
            raise
        self.unusable.pop(key, None)
        return opened

    def gone(self, key: PartitionKey) -> None:
        """The replica is not here any more."""
        self.unusable.pop(key, None)

    async def _open(self, record: TopicRecord, number: int) -> tuple[OpenedLog, int]:
        key, meta = (record.uid, number), record.partitions[number]
        sync = meta.sync or self._opener.sync_of(record)
        drawn = meta.isr.get(self._node, 0)
        if drawn in self._drawn or self._never_made(key, meta):
            # Its record was written, and nothing can have been promised or acknowledged.
            promise = 0 if drawn in self._drawn else meta.epoch
            logs = await self._disk.run(lambda: self._opener.create(record, {number: drawn}))
            self._drawn.discard(drawn)
            if not ids.is_ephemeral(record.name):
                self._opener.stage_promise(key, promise, logs[number].log, drawn, sync)
            return logs[number], promise
        name = good_name(self._journal, key, sync)
        settled = await self._disk.apart(lambda: self._opener.settle(record, [number]))
        logs = await self._disk.run(lambda: self._opener.recover(record, [number], settled))
        opened = logs[number]
        known = self._journal.record(key)
        promise = known.promise if known is not None else 0
        if known is None or not known.promise_trusted or opened.log_uid != known.log_uid:
            # What was promised before may be lost, or was promised for another log.
            promise = max(promise, meta.epoch)
        goes_by = opened.log_uid
        if opened.report is not None:
            bad = self._integrity.corrupt.recovered(key, opened.report)
            old = self._integrity.suspects.recovered(key, opened.log, opened.report, name, bad)
            if known is not None and old and opened.log.vouched_durable < known.local_durable:
                # It may yet be what it was. The next start finds the same damage by the same record, and asks others
                # for it again; by the new one it might take what is behind it for a torn end.
                goes_by = old
        self._opener.stage_promise(key, promise, opened.log, goes_by, sync)
        await self._journal_writer.promise()
        return opened, promise

    async def renamed(self, key: PartitionKey, log: PartitionLog, log_uid: int, name: int, sync: str) -> bool:
        """Journal that a log goes by another name; False: it does not, as the disk took nothing."""
        known = self._journal.record(key)
        if known is not None and known.log_uid == name:
            return True
        promise = 0 if known is None else known.promise
        self._opener.stage_promise(key, promise, log, name, sync)
        try:
            await self._journal_writer.promise()
        except NsqhaError as error:
            logger.warning("journal_delayed", "%s: %s; trying again", log.directory, error)
            # Not with the next write: a leader may have taken it on by then, and cut it.
            known = self._journal.record(key)
            self._opener.stage_promise(key, 0 if known is None else known.promise, log, log_uid, sync)
            return False
        return True

    def _never_made(self, key: PartitionKey, meta: PartitionMeta) -> bool:
        """Whether the ISR names a log of this node that never was: its node died between the record and the log.

        Nothing of it is in the journal, which is written before a log is led. That may also be because an old copy of
        the data directory was put back: then the log existed, and may begin again under its name only because, by the
        record, nothing in it was ever acknowledged. A later epoch was begun by a leader that had seen a log."""
        alone = set(meta.isr) == {self._node} and bool(meta.isr[self._node])
        return alone and meta.epoch == 1 and meta.nothing_acked and self._journal.record(key) is None


class ReplicaFiles:
    """The files of one node's replicas, as catch-up changes them."""

    def __init__(
        self,
        runtime: ReplicaRuntime,
        *,
        record_of: Callable[[PartitionKey], TopicRecord],
        log_replaced: Callable[[PartitionKey], object],
    ) -> None:
        """`log_replaced`: nothing of the old log is left."""
        self._node = runtime.node
        self._journal = runtime.journal
        self._journal_writer = runtime.journal_writer
        self._opener = runtime.opener
        self._disk = runtime.disk
        self._nodes = runtime.nodes
        self._record_of = record_of
        self._forget_doubts = log_replaced
        self._loading: set[PartitionKey] = set()
        self._one_load = asyncio.Lock()  # one state at a time: two of one partition would share its place in the cache

    async def cut(self, follower: Follower, log_id: int) -> None:
        await whole(self._cut_log(follower, log_id))

    async def _cut_log(self, follower: Follower, log_id: int) -> None:
        self._journal.stage_cut(follower.key, follower.log.cut_intent(log_id))
        try:
            await self._journal_writer.promise()
            # The files are taken: readers of the log find its new end meanwhile, and nothing is appended.
            cut = follower.log.cutting(log_id)
        except (AppendFailed, OSError):
            # A full disk, or too many open files; nothing was cut, and perhaps nothing ever is.
            self._journal.stage_cut_done(follower.key)
            raise
        # In the same turn of the loop: from here on no reader finds the batches that are cut, so nothing may know them.
        if log_id < follower.applier.applied_end:
            self._opener.cursor_cache.forget(follower.key)
            follower.restart_with(follower.log, follower.log_uid)
        follower.leader_log.differs_at = None
        follower.applier.was_cut(log_id)
        await self._half_way(self._disk.run(cut))
        self._journal.stage_cut_done(follower.key)
        await self._journal_writer.promise()

    async def replace_log(self, follower: Follower, anchor: Entry) -> None:
        await whole(self._replace_log(follower, anchor))

    async def _replace_log(self, follower: Follower, anchor: Entry) -> None:
        key, record = follower.key, self._record_of(follower.key)
        follower.log.close()
        self._opener.cursor_cache.forget(key)
        log_uid = self._opener.new_log_uid()
        self._journal.stage(key, log_uid=log_uid, local_durable=anchor.log_id + 1)
        await self._journal_writer.promise()
        await self._half_way(self._disk.removed(lambda: self._opener.folders.remove_partition(record, key[1])))
        log = await self._half_way(self._disk.run(lambda: self._opener.begin_at(record, key[1], anchor)))
        self._forget_doubts(key)
        follower.restart_with(log, log_uid)

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

    def distrust(self, follower: Follower, log_id: int) -> None:
        """The channel state of a follower is wrong, since some batch up to `log_id`. Neither it nor the cache of it is
        used any more: `reload` finds it again in the log."""
        self._opener.measures.log_events["state_diverged"] += 1
        self._opener.cursor_cache.forget(follower.key)
        follower.applier.distrust(log_id)

    def loading(self, key: PartitionKey) -> bool:
        """Whether the state of a partition is being looked for."""
        return key in self._loading

    async def reload(self, follower: Follower, *, alone: bool = True) -> None:
        """Look for the channel state of a follower that has none, or that stopped in front of damage: a checkpoint
        behind it may say all that it did. Not `alone`: others may take its files meanwhile."""
        await whole(self._reload(follower, alone))

    async def _reload(self, follower: Follower, alone: bool) -> None:
        # Nothing is found when a log began again and its leader has committed nothing yet. It may need this replica
        # for that.
        key, applier, cache = follower.key, follower.applier, self._opener.cursor_cache
        async with self._one_load:
            if applier.fit or follower.closed:
                return
            self._loading.add(key)
            log, past, known = follower.log, follower.log.past, applier.known
            committed, snapshot = min(applier.committed, log.end.log_id), log.snapshot()
            distrusted = applier.distrusted
            try:
                state, damage = await self._disk.run(
                    lambda: self._opener.states.vouched_for(
                        key, log, committed=committed, seen_as=snapshot, distrusted=distrusted
                    )
                )
                applier.tried = known
            finally:
                self._loading.discard(key)
            changed = follower.log is not log or log.past is not past or follower.closed
            if state is None:
                if damage is not None and not changed:
                    applier.found(damage)
            elif changed or (not alone and not follower.quiet):
                cache.give_back(key, state)  # of a log that is another one now, or about to be
            else:
                applier.know(state)

    def may_lose_committed(self, follower: Follower) -> bool:
        return self._meta(follower).isr.get(self._node) != follower.log_uid

    def waited_for(self, follower: Follower) -> bool:
        # A member of the ISR is; and anybody where too few members live: the next one that is near may join.
        meta, alive = self._meta(follower), self._nodes()
        return not self.may_lose_committed(follower) or sum(node in alive for node in meta.isr) < meta.min_isr

    def _meta(self, follower: Follower) -> PartitionMeta:
        return self._record_of(follower.key).partitions[follower.key[1]]
