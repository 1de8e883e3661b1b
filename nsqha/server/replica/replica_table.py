"""What one node knows of its replicas: which it leads, which it follows, and the newest record seen of each.

`Replicas` (`server.replica.roles`) owns the table and alone gives roles; those that answer other nodes and those that
mend logs read it. A part that has read a newer record says so (`saw`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nsqha.commitlog.idle_turns import IdleTurns
from nsqha.ids import PartitionKey
from nsqha.server.runtime.tasks import HeldLock, Locks

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog
    from nsqha.election.model import TopicRecord, Versioned
    from nsqha.server.replica.following.follower import Follower
    from nsqha.server.replica.leading.leadership import Leadership


class ReplicaTable:
    """All replicas of one node, by partition."""

    def __init__(self) -> None:
        self.registration = 0  # this process life; 0: not registered yet
        self.stopping = False  # no role is taken any more
        self.leading: dict[PartitionKey, Leadership] = {}
        self.ticking: dict[Leadership, None] = {}  # of these, the ones that wait for something
        self.followers: dict[PartitionKey, Follower] = {}
        self.records: dict[PartitionKey, Versioned[TopicRecord]] = {}  # the newest seen, of what has a replica here
        self.declined: dict[PartitionKey, tuple[int, str]] = {}  # the last epoch that could not be led here, and why
        self.idle_turns = IdleTurns["Follower"]()  # of the followers
        self.locks = Locks[PartitionKey]()
        self.settling: dict[PartitionKey, int] = {}  # records that are followed, or wait for their turn

    def record_of(self, key: PartitionKey) -> Versioned[TopicRecord] | None:
        """The newest record seen of a partition that has a replica here."""
        return self.records.get(key)

    def saw(self, key: PartitionKey, topic: Versioned[TopicRecord]) -> None:
        """The record was read."""
        self.records[key] = topic

    def log_of(self, key: PartitionKey) -> PartitionLog | None:
        """The log of a replica; None: there is none here."""
        leader, follower = self.leading.get(key), self.followers.get(key)
        return leader.log if leader is not None else follower.log if follower is not None else None

    def committed_of(self, key: PartitionKey) -> int:
        """The high watermark of a replica, as far as this node knows; 0 if there is none here."""
        leader, follower = self.leading.get(key), self.followers.get(key)
        return leader.committed if leader is not None else follower.applier.committed if follower is not None else 0

    def settles(self, keys: Iterable[PartitionKey]) -> None:
        """A record of these is followed from now on, until `settled`."""
        for key in keys:
            self.settling[key] = self.settling.get(key, 0) + 1

    def settled(self, keys: Iterable[PartitionKey]) -> None:
        for key in keys:
            if (others := self.settling.pop(key) - 1) > 0:
                self.settling[key] = others

    def changing(self, key: PartitionKey) -> HeldLock[PartitionKey]:
        """One change of a partition's role at a time; who opens a log or ends a leadership holds this."""
        return self.locks.held(key)
