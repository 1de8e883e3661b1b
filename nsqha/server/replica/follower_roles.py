"""The role of a follower: logs are opened and followed with, and what was found in them is mended or looked behind.

    record --make--> ReplicaLogs.open --follow--> Follower in the table
    a leadership that ended, or could not begin --follow--> Follower over the same log

Invariant: each log has one owner: a `Follower` is made of a log that nothing else writes any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger
from nsqha.server.opening.opener import OpenedLog
from nsqha.server.replica.following.early_promise import early_promise
from nsqha.server.replica.following.follower import Follower
from nsqha.server.runtime.allocator import full_collections

if TYPE_CHECKING:
    from nsqha.election.model import PartitionMeta, TopicRecord, Versioned
    from nsqha.server.integrity.log_integrity import LogIntegrity
    from nsqha.server.replica.following.follower import FollowerRuntime
    from nsqha.server.replica.replica_files import ReplicaFiles, ReplicaLogs
    from nsqha.server.replica.replica_runtime import ReplicaRuntime
    from nsqha.server.replica.replica_table import ReplicaTable

logger = Logger("replicas", waits=True)


class FollowerRoles:
    """Makes the followers of one node."""

    def __init__(
        self,
        runtime: ReplicaRuntime,
        table: ReplicaTable,
        integrity: LogIntegrity,
        logs: ReplicaLogs,
        files: ReplicaFiles,
        *,
        lent: FollowerRuntime,
    ) -> None:
        """`lent`: what each follower gets."""
        self._node = runtime.node
        self._opener = runtime.opener
        self._journal = runtime.journal
        self._journal_writer = runtime.journal_writer
        self._spawn = runtime.spawn
        self._table = table
        self._integrity = integrity
        self._logs = logs
        self._files = files
        self._lent = lent

    async def make(self, topic: Versioned[TopicRecord], number: int) -> None:
        """Open the log, or begin an empty one, and follow with it."""
        opened, promise = await self._logs.open(topic.record, number)
        self.follow(topic, number, opened, promise=promise)

    def follow(self, topic: Versioned[TopicRecord], number: int, opened: OpenedLog, *, promise: int) -> Follower:
        """Follow with an open log."""
        key = (topic.record.uid, number)
        self._table.saw(key, topic)
        self._table.followers[key] = follower = Follower(
            self._lent,
            key=key,
            log=opened.log,
            log_uid=opened.log_uid,
            state=opened.state,
            sync=self.sync_of(topic.record, topic.record.partitions[number]),
            epoch=promise,
        )
        self._table.idle_turns.add(follower)
        self._lent.disk.request(follower)  # what it led with may not be on the disk yet, and perhaps nothing follows
        full_collections.made()
        if opened.damage is not None:
            follower.applier.found(opened.damage)
        return follower

    def follow_again(self, topic: Versioned[TopicRecord], released: Follower) -> None:
        """It was to lead, and does not."""
        opened = OpenedLog(released.log, released.log_uid, released.applier.state, None)
        follower = self.follow(topic, released.key[1], opened, promise=released.epoch)
        follower.stopped = released.stopped

    def promise_early(self, follower: Follower, meta: PartitionMeta) -> None:
        """Another node leads in a later epoch, by a record that has just come: it will ask for this promise. While the
        stream of its predecessor is open that one may still hand over, so nothing is promised before it is asked."""
        known = self._journal.record(follower.key)
        # Nor is a log that goes by a name which was kept for damage given its own one before a leader takes it on.
        if known is None or known.log_uid != follower.log_uid or known.promise >= meta.epoch:
            return
        if meta.leader and follower.port is None and follower.stopped is None:
            follower.leader_log.early = early_promise(self._opener, self._journal_writer, follower, meta.epoch)

    def sync_of(self, record: TopicRecord, meta: PartitionMeta) -> str:
        """What OK means for a partition."""
        return meta.sync or self._opener.sync_of(record)

    # ---- what was found in a log

    async def whole_again(self, key: PartitionKey, name: int) -> None:
        """Everything that recovery found damaged is mended: this log is what it was, if no leader has taken it on."""
        async with self._table.changing(key):
            follower = self._table.followers.get(key)
            idle = follower is not None and follower.port is None and follower.quiet
            if (
                follower is None
                or not idle
                or self._integrity.suspects.unsound_from(key) is None
                or self._table.stopping
            ):
                return
            text = "%s: all that was damaged is mended from other replicas"
            if name and self._table.records[key].record.partitions[key[1]].isr.get(self._node) == name:
                # As if the damage had not been found: the ISR counts on this log, and on all that was in it. Who
                # committed without this node has taken it out of the record, and by that alone it is elected: an old
                # copy of the record, looked at here, only makes a name that counts for nothing.
                follower.log.doubtful_from = None
                if not await self._logs.renamed(key, follower.log, follower.log_uid, name, follower.sync):
                    return
                follower.log_uid = name
                text += ", and it goes by its old name again"
            follower.log.doubtful_from = None
            self._integrity.suspects.renewed(key)
            logger.warning("whole_again", text, follower.log.directory)
            follower.applier.mended()
            if follower.applier.state is None:
                await self._files.reload(follower)

    async def look_behind_damage(self, key: PartitionKey) -> None:
        """No replica has what the channels of a follower wait for: they may be known from further on."""
        await self._files.reload(self._table.followers[key], alone=False)

    def look_for_state(self, key: PartitionKey, follower: Follower) -> None:
        """Look for a channel state that is missing, if the log may say more than when it was last looked for."""
        applier = follower.applier
        news = applier.known != applier.tried and not self._files.loading(key)
        if applier.state is None and follower.quiet and news:
            self._spawn(self._files.reload(follower, alone=False))
