"""Whether the leader of an epoch leads, and commits. It is asked periodically, also when no node complains.

A leader that was just elected may not have begun yet, so one answer is not enough. A leader that has promised its epoch
and does not lead will never lead it: a process life leads an epoch once. Its answers count double. One that says that
it could not lead this epoch (`declined_epoch`) needs no further answer. Leaders that said that they lead are asked in
turn: thousands of idle partitions cost their node what a few do.

A leader whose log goes on while nothing commits is *stuck*. That alone says nothing against it: replicas may be down.
What its followers say of it does (`hearing`, `deaf`): a leader that too few of them hear can not commit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
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


class Stuck(NamedTuple):
    """A leader that reports batches that are not committed."""

    epoch: int
    committed: int
    since: float


class Heard(NamedTuple):
    """Whose stream a follower has."""

    leader: int
    at: float  # when it said so


def _may_lead(meta: PartitionMeta, node: int, report: ReplicaReport) -> bool:
    """Whether the report of a node is about a log that may be elected."""
    if node in meta.isr:
        return report.log_uid == meta.isr[node]
    return node in meta.electable and report.log_uid != 0


class LeaderCheck:
    """Counts answers of leaders that do not lead, and keeps what followers say of them."""

    def __init__(self, limits: ControllerLimits) -> None:
        self._limits = limits
        self._leads: dict[PartitionName, int] = {}  # the epoch in which the leader said that it leads
        self._idle: dict[PartitionName, Idle] = {}
        self._stuck: dict[PartitionName, Stuck] = {}
        self._heard: dict[PartitionName, dict[int, Heard]] = {}
        self._last: dict[int, PartitionKey] = {}  # the last one that each node was asked for

    def turn(
        self, node: int, led: Mapping[PartitionName, TopicPartition], more: Iterable[PartitionKey] = ()
    ) -> list[PartitionKey]:
        """The keys for the next request to a node: of what it leads, all in doubt, then of the others some, after those
        of its last request; and `more`."""
        doubted: list[PartitionKey] = []
        leads: list[PartitionKey] = []
        for name, part in led.items():
            confirmed = self._leads.get(name) == part.meta.epoch and name not in self._stuck
            (leads if confirmed else doubted).append(part.key)
        leads.sort()
        first = bisect_right(leads, self._last.get(node, (0, 0)))
        chosen = [*leads[first:], *leads[:first]][: self._limits.audit_keys]
        if chosen:
            self._last[node] = chosen[-1]
        rest = dict.fromkeys([*doubted, *more, *chosen])
        return list(rest)[: self._limits.keys_max]

    def answered(self, part: TopicPartition, node: int, report: ReplicaReport | None, now: float) -> None:
        """A node reports what it has of a partition; None: nothing."""
        meta = part.meta
        if node != meta.leader:
            if report is None or not _may_lead(meta, node, report):
                self._heard.get(part.name, {}).pop(node, None)
            else:
                self._heard.setdefault(part.name, {})[node] = Heard(report.led_by, now)
            return
        if report is not None and report.leading:
            self._idle.pop(part.name, None)
            self._leads[part.name] = meta.epoch
            self._commits(part, report, now)
            return
        self._leads.pop(part.name, None)
        if report is not None and report.declines and report.declined_epoch == meta.epoch:
            self._idle[part.name] = Idle(meta.epoch, self._limits.idle_audits, now)
            return
        idle = self._idle.get(part.name, Idle(meta.epoch, 0, now - self._limits.audit_s))
        if now - idle.counted >= self._limits.audit_s * 0.9:
            gave_up = report is not None and report.promise >= meta.epoch
            weight = _weight(self._limits) if gave_up else 1
            self._idle[part.name] = Idle(meta.epoch, idle.audits + weight, now)

    @property
    def doubted(self) -> set[PartitionName]:
        """Those with anything counted against the leader."""
        return self._idle.keys() | self._stuck.keys()

    def not_leading(self) -> set[PartitionName]:
        """Those whose leader says that it cannot lead, or has said more than once that it does not: after one answer,
        whatever that counts, it may be about to begin."""
        once = _weight(self._limits)
        return {name for name, idle in self._idle.items() if idle.audits > once}

    def does_not_lead(self, name: PartitionName, meta: PartitionMeta) -> bool:
        """Whether the leader has reported often enough that it does not lead."""
        idle = self._idle.get(name)
        return idle is not None and idle.epoch == meta.epoch and idle.audits >= self._limits.idle_audits

    def _commits(self, part: TopicPartition, report: ReplicaReport, now: float) -> None:
        """The leader leads: note since when nothing was committed."""
        before = self._stuck.get(part.name)
        if report.committed >= report.end:
            self._stuck.pop(part.name, None)
        elif before is None or (before.epoch, before.committed) != (part.meta.epoch, report.committed):
            self._stuck[part.name] = Stuck(part.meta.epoch, report.committed, now)

    def stuck_since(self, name: PartitionName, meta: PartitionMeta) -> float | None:
        """Since when the leader has committed nothing though its log goes on; None: it commits."""
        stuck = self._stuck.get(name)
        return stuck.since if stuck is not None and stuck.epoch == meta.epoch else None

    def hearing(self, name: PartitionName, meta: PartitionMeta, since: float) -> set[int]:
        """Nodes that may lead and have said since then that the leader's stream is open."""
        return {uid for uid, heard in self._said(name, meta, since) if heard.leader == meta.leader}

    def deaf(self, name: PartitionName, meta: PartitionMeta, since: float) -> set[int]:
        """Nodes that may lead and have said since then that it is not."""
        return {uid for uid, heard in self._said(name, meta, since) if heard.leader != meta.leader}

    def _said(self, name: PartitionName, meta: PartitionMeta, since: float) -> list[tuple[int, Heard]]:
        heard = self._heard.get(name)
        if not heard:
            return []
        return [(uid, found) for uid, found in heard.items() if uid in meta.electable and found.at >= since]

    def forget(self, name: PartitionName) -> None:
        """Drop what was counted: another leader, or none, or no partition."""
        for held in (self._leads, self._idle, self._stuck, self._heard):
            held.pop(name, None)


def _weight(limits: ControllerLimits) -> int:
    """What an answer counts of a leader that gave its epoch up: two of them are enough."""
    return (limits.idle_audits + 1) // 2
