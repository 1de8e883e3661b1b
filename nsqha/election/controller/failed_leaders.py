"""Nodes that were elected for a partition and did not lead it, and when the next attempt to replace a leader is due.

A node that failed comes last in elections of that partition, and leadership is not moved to it, for a time that doubles
with each failure. That holds for one process life. A leader that runs but does not serve is replaced at once the first
time; the pauses before further replacements double, too, so that a fault that stays costs few epochs. Failures that are
long past do not count.

A failure ends with the life in which it was seen, so replacements are also counted for each node whatever its life. The
first one costs it nothing. One that loses the lead again soon after it got it back (a process that stops for longer
than its lease, or that dies at each start) gets it back by a transfer only after RETURN_S, twice as long each time. An
election may still choose it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nsqha.election.model import NodeInfo
from nsqha.election.placement import PartitionName

LAST_S = (10.0, 640.0)  # how long a node comes last after its first failure, and at most
REPLACE_S = (10.0, 60.0)  # the pause after the first replacement of a leader that runs, and the longest
RETURN_S = (60.0, 640.0)  # from the second loss of the lead to the next transfer back, and the longest pause
FORGET_S = 600.0


class Failure(NamedTuple):
    """Failures of one process life of a node to lead a partition."""

    registration: int
    times: int
    until: float


class Replaced(NamedTuple):
    """Replacements of leaders of one partition that ran and did not serve."""

    times: int
    next_due: float


class Lost(NamedTuple):
    """How often a node was replaced as the leader of a partition, in any life."""

    times: int
    returns: float


class FailedLeaders:
    """The failures that one term of one controller has seen; times are monotonic seconds."""

    def __init__(self) -> None:
        self._failures: dict[PartitionName, dict[int, Failure]] = {}
        self._replaced: dict[PartitionName, Replaced] = {}
        self._lost: dict[PartitionName, dict[int, Lost]] = {}

    def failed(self, name: PartitionName, node: int, registration: int, now: float) -> None:
        """This life of a node did not lead the partition, or could not take it over."""
        nodes = self._failures.setdefault(name, {})
        before = nodes.get(node)
        known = before is not None and before.registration == registration and now < before.until + FORGET_S
        count = before.times + 1 if before is not None and known else 1
        nodes[node] = Failure(registration, count, now + doubled(LAST_S, count))

    def last(self, name: PartitionName, nodes: Mapping[int, NodeInfo], now: float) -> frozenset[int]:
        """Those of `nodes` that come last now."""
        failures = self._failures.get(name, {})
        return frozenset(
            uid
            for uid, found in failures.items()
            if now < found.until and uid in nodes and nodes[uid].registration == found.registration
        )

    def replaced(self, name: PartitionName, now: float) -> None:
        """A leader that runs has been replaced."""
        before = self._replaced.get(name)
        count = before.times + 1 if before is not None and now < before.next_due + FORGET_S else 1
        self._replaced[name] = Replaced(count, now + doubled(REPLACE_S, count))

    def next_due(self, name: PartitionName) -> float:
        """A leader that runs is not replaced before this."""
        found = self._replaced.get(name)
        return found.next_due if found is not None else 0.0

    def lost(self, name: PartitionName, node: int, now: float) -> None:
        """A node was replaced as the leader."""
        nodes = self._lost.setdefault(name, {})
        before = nodes.get(node)
        count = before.times + 1 if before is not None and now < before.returns + FORGET_S else 1
        nodes[node] = Lost(count, now + doubled(RETURN_S, count - 1) if count > 1 else now)

    def may_return(self, name: PartitionName, node: int, now: float) -> bool:
        """Whether the lead may be given back to a node that can have it."""
        found = self._lost.get(name, {}).get(node)
        return found is None or now >= found.returns

    def forget(self, name: PartitionName) -> None:
        """The partition is gone."""
        for held in (self._failures, self._replaced, self._lost):
            held.pop(name, None)


def doubled(limits: tuple[float, float], count: int) -> float:
    """The first limit, doubled with each count after the first, up to the second."""
    return min(limits[0] * 2.0 ** min(count - 1, 20), limits[1])
