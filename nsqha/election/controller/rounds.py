"""The controller's state about one partition: an attempt to find a leader, and its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from nsqha.election.controller.planner import PlanLimits
from nsqha.election.elect import ReplicaReport
from nsqha.election.model import PartitionMeta, Sync, TopicSettings
from nsqha.election.placement import PartitionName
from nsqha.ids import PartitionKey

Kind = Literal["doubt", "watch", "elect", "transfer"]


@dataclass(frozen=True)
class ControllerLimits:
    """Times in seconds."""

    doubt_s: float = 0.1  # a suspected leader has this long to answer
    probe_s: float = 1.0
    key_s: float = 0.001  # more for each that is asked for: a node answers many in parts, as they find leaders
    ask_again_s: float = 0.25
    begin_ask_s: float = 0.05  # between requests to replicas of a new partition, while they begin their logs
    transfer_ask_s: float = 0.02
    handover_s: float = 0.25  # a leader that leaves names the next one itself; else the controller does after this
    transfer_s: float = 1.0  # then a planned change of leader is given up, or forced if the leader leaves
    transfer_pause_s: float = 30.0  # before it is tried again
    watch_ask_s: float = 1.0  # between requests to the followers of a leader that may not serve
    stuck_s: float = 3.0  # a leader that commits nothing for this long, while its log goes on, may not serve
    unlinked_s: float = 5.0  # a leader at whose peer port the controller is refused for this long hands over
    blamed_s: float = 2.0  # a leader that lost so many members that it cannot commit is replaced after this
    resign_s: float = 4.0  # a controller that can not help a partition for this long resigns; leases end before
    scan_s: float = 0.5  # between scans of partitions and steps of slow work
    scan_parts: int = 2000  # per scan, in turn
    plan_wait_s: float = 3.0  # slow work waits so long for leaders that are sought: they need the processors first
    audit_s: float = 2.0  # between requests to leaders whether they lead
    idle_audits: int = 5  # a leader that does not lead in this many audits is replaced (2 if it gave the epoch up)
    keys_max: int = 1000  # per probe, and under way to one node
    round_keys: int = 200  # per probe while leaders are sought: the first are elected while the next are answered
    audit_keys: int = 100  # per audit and node, of leaders that led when they were last asked
    plan: PlanLimits = field(default_factory=PlanLimits)


@dataclass
class TopicPartition:
    """One partition and its topic's record."""

    name: PartitionName
    settings: TopicSettings
    meta: PartitionMeta

    @property
    def key(self) -> PartitionKey:
        return self.name.uid, self.name.number

    @property
    def sync(self) -> Sync:
        # A default that only the nodes know counts as the strictest one here.
        return self.meta.sync or self.settings.sync or "always"


@dataclass
class Round:
    """One attempt to find a leader."""

    kind: Kind
    why: str
    since: float
    reports: dict[int, ReplicaReport] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)  # when the last answer or failure came
    failed: set[int] = field(default_factory=set)
    waiting: str = ""
    many: int = 1  # partitions whose leaders were sought at the same time, at most
    due: float = math.inf  # when it is looked at again, even if nothing happens

    def due_at(self, moment: float) -> None:
        self.due = min(self.due, moment)


@dataclass(frozen=True)
class OpenProbe:
    """A request that a node has not answered yet; times are monotonic seconds."""

    number: int
    keys: frozenset[PartitionKey]
    sent: float
    due: float
    urgent: bool
