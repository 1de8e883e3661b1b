"""Whether the leader of an epoch leads. It is asked periodically, also when no node complains.

A leader that was just elected may not have begun yet, so one answer is not enough. A leader that has promised its epoch
and does not lead will never lead it: a process life leads an epoch once. Its answers count double.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from nsqha.election.controller.rounds import ControllerLimits, TopicPartition
from nsqha.election.elect import ReplicaReport
from nsqha.election.model import PartitionMeta
from nsqha.election.placement import PartitionName
from nsqha.ids import PartitionKey


class Idle(NamedTuple):
    """A leader that reports that it does not lead."""

    epoch: int
    audits: int
    counted: float


class LeaderCheck:
    """Counts answers of leaders that do not lead."""

    def __init__(self, limits: ControllerLimits) -> None:
        self._limits = limits
        self._idle: dict[PartitionName, Idle] = {}
        self._last: dict[int, PartitionKey] = {}  # the last one that each node was asked for

    def turn(self, node: int, keys: Iterable[PartitionKey]) -> list[PartitionKey]:
        """The keys for the next request to a node: as many of `keys` as fit, after those of its last request."""
        ordered = sorted(set(keys))
        first = bisect_right(ordered, self._last.get(node, (0, 0)))
        chosen = [*ordered[first:], *ordered[:first]][: self._limits.keys_max]
        if chosen:
            self._last[node] = chosen[-1]
        return chosen

    def answered(self, part: TopicPartition, node: int, report: ReplicaReport | None, now: float) -> None:
        """A node reports what it has of a partition; None: nothing."""
        meta = part.meta
        if node != meta.leader:
            return
        if report is not None and report.leading:
            self.forget(part.name)
            return
        idle = self._idle.get(part.name, Idle(meta.epoch, 0, now - self._limits.audit_s))
        if now - idle.counted >= self._limits.audit_s * 0.9:
            gave_up = report is not None and report.promise >= meta.epoch
            weight = (self._limits.idle_audits + 1) // 2 if gave_up else 1
            self._idle[part.name] = Idle(meta.epoch, idle.audits + weight, now)

    def does_not_lead(self, name: PartitionName, meta: PartitionMeta) -> bool:
        """Whether the leader has reported often enough that it does not lead."""
        idle = self._idle.get(name)
        return idle is not None and idle.epoch == meta.epoch and idle.audits >= self._limits.idle_audits

    def forget(self, name: PartitionName) -> None:
        """Drop the count: another leader, or none, or no partition."""
        self._idle.pop(name, None)
