"""What a leader knows of its followers: what each reported last, and since when it is good or bad.

Times are monotonic seconds. A span in which nobody called (this process was stopped) counts for at most
`IsrLimits.unwatched_seconds`: the acks of that time may still wait in our own sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

SAMPLES = 32  # of our own end, within `replica_timeout`: how exactly it is kept


@dataclass(frozen=True, slots=True)
class IsrLimits:
    """When a replica is late, gone, or good enough."""

    replica_timeout: float = 2.0  # a member that leaves something unacknowledged for so long leaves
    lost_seconds: float = 0.3  # ... or whose stream is lost and not back for so long
    join_lag: int = 16  # batches: a replica further from our end does not join (it would hold everybody up)
    settle_seconds: float = 1.0  # one that was removed keeps up for so long before it joins again; at most:
    settle_lost_seconds_max: float = 4.0  # where that doubled each time that it was lost,
    settle_seconds_max: float = 30.0  # or late. And after so long as a member its earlier removals are forgotten
    retry_seconds: float = 0.1  # between attempts to learn an outcome
    refused_seconds: float = 1.0  # a join that the store refused is not tried again before
    successor_seconds: float = 10.0  # a successor has so long to take over; a controller gives it up before
    unwatched_seconds: float = 0.25  # a pause between two calls counts for no more than this


class RemovalCause(Enum):
    """Why a member was removed: what it cost those who publish says how long it must keep up before the next time."""

    ANNOUNCED = "announced"  # nothing: it said that it leaves, or the record moves the replica
    LOST = "lost"  # they waited for `lost_seconds`
    LATE = "late"  # they waited for `replica_timeout`


@dataclass(slots=True)
class FollowerReport:
    """what one replica has reported in its present life, and since when it is good or bad."""

    since: float  # it is a member, or known; as watched
    joined_at: float  # the same by the clock
    gone_at: float | None = None  # its stream is lost since then; None: it is there
    registration: int = 0  # 0: never heard of
    log_uid: int = 0
    end: int = 0
    durable: int = 0
    near_since: float | None = None  # it has been within `join_lag` of our end since then
    settle_seconds: float = 0.0  # it keeps up for so long before it joins
    fit: bool = True  # to lead, as it says
    refused_at: float | None = None


class FollowerReports:
    """The followers of one partition, as its leader heard of them."""

    def __init__(
        self, node: int, members: Iterable[int], *, end: int, now: float, limits: IsrLimits, sync_always: bool
    ) -> None:
        """`end`: this node's log end. `sync_always`: an ack is the durable end."""
        self.sync_always = sync_always  # may be changed at any time
        self.time = now  # as watched: without the pauses of this process
        self.end = end
        self._node = node
        self._limits = limits
        self._called_at = now
        self._known = {n: FollowerReport(now, now) for n in members if n != node}
        self._ends = deque([(now, end)])  # (time, our end then), back to `replica_timeout` ago

    def heard(
        self, node: int, *, registration: int, log_uid: int, end: int, durable: int, now: float, fit: bool = True
    ) -> None:
        """An Opened or an Ack, of a member or not. The newest one is the truth, also when it says less. `fit`: it could
        lead; one whose log is damaged would not, and everybody would wait for the controller to notice.

        `end` must have been found to lie in a common past with our own log (`acceptance.same_past`); else give 0.
        """
        assert durable <= end, f"node {node} reports durable {durable} behind its end {end}"
        self.watch(now)
        follower = self.of(node)
        if registration != follower.registration or log_uid != follower.log_uid:
            follower.near_since = None
            follower.refused_at = None
        follower.gone_at = None
        follower.registration = registration
        follower.log_uid = log_uid
        follower.end = end
        follower.durable = durable
        follower.fit = fit

    def lost(self, node: int, now: float) -> None:
        """Its stream ended, can not be opened, or it refuses."""
        self.watch(now)
        follower = self.of(node)
        follower.near_since = None
        if follower.gone_at is None:
            follower.gone_at = self.time

    def get(self, node: int) -> FollowerReport | None:
        return self._known.get(node)

    def of(self, node: int) -> FollowerReport:
        """The report of this node; an empty one if it was never heard of."""
        assert node != self._node, "a leader does not follow itself"
        follower = self._known.get(node)
        if follower is None:
            follower = self._known[node] = FollowerReport(self.time, self._called_at)
        return follower

    def end_of(self, node: int) -> int:
        """Where a follower's log ended when it was last heard; 0: not known. For figures."""
        follower = self._known.get(node)
        return 0 if follower is None else follower.end

    def watch(self, now: float) -> None:
        """Let time pass."""
        self.time += min(max(now - self._called_at, 0.0), self._limits.unwatched_seconds)
        self._called_at = now

    def advanced(self, end: int) -> None:
        """Our own log ends there now."""
        self.end = end
        self._sample()
        for follower in self._known.values():
            self._observe(follower)

    def acked(self, follower: FollowerReport) -> int:
        return follower.durable if self.sync_always else follower.end

    def late(self, follower: FollowerReport) -> bool:
        """It lacks something that was here `replica_timeout` ago, and was to have it all that time."""
        then = self.time - self._limits.replica_timeout
        return follower.since <= then and self.acked(follower) < self._ends[0][1]

    def refused(self, follower: FollowerReport) -> bool:
        """Whether the store refused it just now."""
        return follower.refused_at is not None and self.time - follower.refused_at < self._limits.refused_seconds

    def joined(self, node: int) -> None:
        """It is a member from now on."""
        follower = self.of(node)
        follower.since, follower.joined_at = self.time, self._called_at

    def removed(self, node: int, cause: RemovalCause) -> None:
        """It is no member any more."""
        follower, limits = self.of(node), self._limits
        # Not by the watched time: nobody watches a partition that is quiet.
        before = follower.settle_seconds if self._called_at - follower.joined_at < limits.settle_seconds_max else 0.0
        longer = limits.settle_seconds
        if cause is not RemovalCause.ANNOUNCED:
            most = limits.settle_lost_seconds_max if cause is RemovalCause.LOST else limits.settle_seconds_max
            longer = min(max(2 * before, longer), most)
        follower.settle_seconds = max(before, longer)
        follower.near_since = None

    def _sample(self) -> None:
        """Remember our end, so that the age of what is not acknowledged is known without a time per batch."""
        ends = self._ends
        if self.time - ends[-1][0] >= self._limits.replica_timeout / SAMPLES:
            ends.append((self.time, self.end))
        while len(ends) > 1 and ends[1][0] <= self.time - self._limits.replica_timeout:
            ends.popleft()

    def _observe(self, follower: FollowerReport) -> None:
        acked = self.acked(follower)
        if follower.gone_at is not None or self.end - acked > self._limits.join_lag:
            follower.near_since = None
        elif follower.near_since is None:
            follower.near_since = self.time
