"""Events and actions of the controller. Frozen, so that a decision can be logged, scripted and replayed.

Every `Probe` is answered by `Answered` or `NotAnswered`, every `PutPartition` by `PutDone`, every `ReadTopic` by
`TopicRead`, every change of an intent by `IntentDone`: the shell, which carries out actions, must not lose one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nsqha.election.elect import ReplicaReport
from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord, Versioned
from nsqha.election.placement import PartitionName
from nsqha.ids import PartitionKey

Outcome = Literal["applied", "refused", "unknown"]


# ---- events


@dataclass(frozen=True, slots=True)
class Metadata:
    """All records, as the store's view has them. A missing record only means that it is not changed any more."""

    topics: Mapping[str, Versioned[TopicRecord]]
    nodes: Mapping[int, NodeInfo]
    intents: Mapping[str, Versioned[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class TopicRead:
    """One topic, read after a compare-and-set that failed."""

    name: str
    topic: Versioned[TopicRecord] | None


@dataclass(frozen=True, slots=True)
class Suspect:
    """The controller's own stream to a node ended, or could not be opened, or a check of the node was requested."""

    node: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Linked:
    """The controller's own stream to a node is open."""

    node: int


@dataclass(frozen=True, slots=True)
class Unheard:
    """The controller's own stream to a node is open, but for a second nothing came on it, not even answers to pings;
    and the controller itself ran all the time."""

    node: int


@dataclass(frozen=True, slots=True)
class Blamed:
    """All nodes that one node has lost its streams to, now, and those that it does not hear though nothing ended."""

    by: int
    nodes: frozenset[int]
    unheard: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Answered:
    """A node reported what it has. A requested key that is missing does not exist there."""

    number: int  # of the probe
    node: int
    registration: int
    reports: Mapping[PartitionKey, ReplicaReport]


@dataclass(frozen=True, slots=True)
class NotAnswered:
    """The connection was refused, or the time-out is over."""

    number: int
    node: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class PutDone:
    """How a compare-and-set ended; `meta` if it was applied."""

    name: PartitionName
    outcome: Outcome
    meta: PartitionMeta | None = None


@dataclass(frozen=True, slots=True)
class IntentDone:
    """A change of an intent ended; the next `Metadata` shows its outcome."""

    name: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    wall_s: float = 0.0  # seconds since 1970, by the clock of this process


Event = (
    Metadata | TopicRead | Suspect | Linked | Unheard | Blamed | Answered | NotAnswered | PutDone | IntentDone | Tick
)


# ---- actions


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask a node for the state of its replicas."""

    number: int
    node: int
    keys: tuple[PartitionKey, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class PutPartition:
    """Compare-and-set of a partition's record, against the version in it."""

    name: PartitionName
    meta: PartitionMeta
    why: str
    registered: Mapping[int, int] = field(default_factory=dict)  # registrations that nodes must still have


@dataclass(frozen=True, slots=True)
class ReadTopic:
    """Read a topic again, linearizably, until it succeeds."""

    name: str


@dataclass(frozen=True, slots=True)
class PutIntent:
    """Store an intent if its record has this version; 0: if there is none."""

    name: str
    intent: Mapping[str, Any]
    expected_version: int = 0


@dataclass(frozen=True, slots=True)
class RemoveIntent:
    """Remove an intent that is carried out, or is no longer needed."""

    name: str
    expected_version: int


@dataclass(frozen=True, slots=True)
class Resign:
    """Let another controller take over, unless this process did so a short time ago."""

    why: str


@dataclass(frozen=True, slots=True)
class Say:
    """Write a log line and count it; `event` is a stable name."""

    event: str
    text: str
    level: Literal["info", "warning", "error"] = "info"
    fields: Mapping[str, object] = field(default_factory=dict)


Action = Probe | PutPartition | ReadTopic | PutIntent | RemoveIntent | Resign | Say
