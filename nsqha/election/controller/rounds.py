"""What the controller keeps in its head about one partition: an attempt to find a leader, and what led to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nsqha.election.controller.planner import PlanLimits
from nsqha.election.elect import ReplicaReport
from nsqha.election.model import PartitionMeta, Sync, TopicSettings
from nsqha.election.placement import PartitionName
from nsqha.ids import PartitionKey

Kind = Literal["doubt", "elect", "transfer"]


@dataclass(frozen=True)
class ControllerLimits:
    """Times in seconds."""

    doubt_s: float = 0.1  # a leader that is suspected has so long to answer
    probe_s: float = 1.0
    ask_again_s: float = 0.25
    begin_ask_s: float = 0.05  # replicas of a new partition, while they begin their logs
    transfer_ask_s: float = 0.02
    handover_s: float = 0.25  # a leader that is to go names the next one itself; else it is done here after this
    transfer_s: float = 1.0  # then a planned change of leader is given up, or forced if the leader leaves
    transfer_pause_s: float = 30.0  # before it is tried again
    blamed_s: float = 2.0  # a leader that so many members lost that it can not commit is replaced after this
    scan_s: float = 0.5  # everything is looked at, and slow work goes on
    audit_s: float = 2.0  # leaders are asked whether they lead
    idle_audits: int = 5  # a leader that does not lead for so many audits is replaced (2 if it gave the epoch up)
    keys_max: int = 1000  # per probe
    plan: PlanLimits = field(default_factory=PlanLimits)


@dataclass
class TopicPartition:
    """One partition and what its topic says."""

    name: PartitionName
    settings: TopicSettings
    meta: PartitionMeta

    @property
    def key(self) -> PartitionKey:
        return self.name.uid, self.name.number

    @property
    def sync(self) -> Sync:
        # A default that only the nodes know counts as the strictest here.
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


@dataclass(frozen=True)
class OpenProbe:
    """A question that a node has not answered yet; times are monotonic seconds."""

    number: int
    keys: frozenset[PartitionKey]
    sent: float
    due: float
