"""What the tiny cluster is made of: replicas, the messages between them, requests to the metadata."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from nsqha.commitlog.entry import Entry, genesis
from nsqha.election.model import PartitionMeta
from nsqha.replication import divergence
from nsqha.replication.isr import IsrKeeper, Outcome
from nsqha.replication.leader import LeaderReplica

if TYPE_CHECKING:
    from tests.unit.replication.tiny import Tiny


class Wrong(AssertionError):
    """A rule of the protocol was broken."""


def require(condition: object, why: str) -> None:
    if not condition:
        raise Wrong(why)


TOPIC = 77


@dataclass(frozen=True)
class OpenMsg:
    epoch: int


@dataclass(frozen=True)
class AppendMsg:
    epoch: int
    entries: tuple[Entry, ...]
    committed: int


@dataclass(frozen=True)
class OpenedMsg:
    log_uid: int
    end: int
    durable: int
    chain: int


@dataclass(frozen=True)
class AckMsg:
    log_uid: int
    end: int
    durable: int


@dataclass(frozen=True)
class RefusedMsg:
    fenced: bool
    why: str


Down: TypeAlias = OpenMsg | AppendMsg
Up: TypeAlias = OpenedMsg | AckMsg | RefusedMsg


@dataclass
class Stream:
    """Leader to follower and back, in order; it ends as a whole."""

    leader: int
    epoch: int
    follower: int
    registration: int
    down: deque[Down] = field(default_factory=deque)
    up: deque[Up] = field(default_factory=deque)
    opened: bool = False  # the follower has promised and aligned its log
    pushing: bool = False  # the leader knows where the follower is
    next: int = 0  # log id to be sent next
    closed: bool = False


@dataclass
class Request:
    """A compare-and-set that may be applied at any time until it is settled."""

    node: int
    registration: int
    epoch: int
    meta: PartitionMeta
    registered: dict[int, int]
    outcome: Outcome | None = None  # as the store knows it
    told: bool = False  # the sender has an answer, Unknown perhaps


class Leading:
    """What a node has while it leads."""

    def __init__(self, tiny: Tiny, node: Replica) -> None:
        meta = tiny.meta
        self.epoch = meta.epoch
        self.leader = LeaderReplica(
            node=node.uid,
            epoch=meta.epoch,
            isr=meta.isr,
            min_isr=meta.min_isr,
            sync_always=tiny.sync_always,
            end=node.end,
            durable=node.durable,
        )
        self.keeper = IsrKeeper(
            node.uid, meta, epoch_start=node.end, now=tiny.now, limits=tiny.limits, sync_always=tiny.sync_always
        )
        self.streams: dict[int, Stream] = {}
        self.reread = False


class Replica:
    """One node's copy."""

    def __init__(self, uid: int, log_uid: int) -> None:
        self.uid = uid
        self.name = "abcdefgh"[uid - 1]
        self.up = True
        self.registration = 1
        self.log_uid = log_uid
        self.log: list[Entry] = [genesis(TOPIC, 0)]
        self.durable = 1
        self.promise = 0
        self.committed = 0  # as far as this process knows
        self.differs_at: int | None = None  # own entry that a leader's batch did not fit
        self.wiped = False
        self.vouched = True  # recovery will find what there was
        self.seen: PartitionMeta | None = None  # the record as last read here
        self.leading: Leading | None = None

    @property
    def end(self) -> int:
        return len(self.log)

    def entry(self, log_id: int) -> Entry | None:
        return self.log[log_id] if 0 < log_id < self.end else None

    def before(self, log_id: int) -> Entry:
        return self.log[log_id - 1]

    def epoch_end(self, epoch: int) -> divergence.EpochEndAnswer:
        last = next(entry for entry in reversed(self.log) if entry.epoch <= epoch)
        return divergence.EpochEndAnswer(last.epoch, last.log_id + 1, last.chain, 1)
