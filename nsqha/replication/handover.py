"""Who leads a partition next, when its leader shuts down or the record names a successor (HandOver)."""

from __future__ import annotations

from dataclasses import replace

from nsqha.election.model import PartitionMeta
from nsqha.replication.followers import FollowerReports


class LeaderHandOver:
    """The next leader of one partition, and the record in which it leads."""

    def __init__(self, node: int, followers: FollowerReports) -> None:
        self.departing: frozenset[int] = frozenset()  # nodes that say that they shut down
        self.declining: frozenset[int] = frozenset()  # nodes that should lead only where no other can
        self._node = node
        self._followers = followers
        self._named_at = followers.time  # since then the record names the successor that it does

    def heir(self, meta: PartitionMeta) -> int:
        """Who is to lead next: whom the record names or, if this node shuts down or declines, the first that may
        lead; 0: none. One that says that it could not, or declines, is not waited for."""
        named = self._followers.get(meta.successor)
        if meta.successor and meta.successor not in self.declining and (named is None or named.fit):
            return meta.successor
        if self._node not in self.departing | self.declining:
            return 0
        members = [*meta.replicas, *(node for node in sorted(meta.isr) if node not in meta.replicas)]
        return next((node for node in members if self.may_lead(node, meta)), 0)

    def may_lead(self, node: int, meta: PartitionMeta) -> bool:
        """A member that is there, with the log that the record names, fit, and did not just lose its registration."""
        follower = self._followers.get(node)
        if node in self.departing or node in self.declining:
            return False
        if follower is None or follower.gone_at is not None or not follower.registration:
            return False
        if not follower.fit:
            return False
        counts = node in meta.isr and follower.log_uid != 0 and meta.isr[node] == follower.log_uid
        return counts and not self._followers.refused(follower)

    def named(self) -> None:
        """The record names another successor than before, or none."""
        self._named_at = self._followers.time

    def overdue(self, seconds: float) -> bool:
        """Whether the successor has been named for so long."""
        return self._followers.time - self._named_at >= seconds

    def record(self, meta: PartitionMeta, heir: int) -> PartitionMeta:
        """It has all that we have, as that is committed. If we shut down, nobody is to wait for us."""
        isr = dict(meta.isr)
        if self._node in self.departing and len(isr) > meta.min_isr:
            del isr[self._node]
        registration = self._followers.of(heir).registration
        return replace(meta, leader=heir, epoch=meta.epoch + 1, registration=registration, successor=0, isr=isr)
